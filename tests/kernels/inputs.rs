//! Kernel inputs: families of activations, and random weights in every file layout with their values.

use tilewright::WeightType;
use tilewright::formats::{BlockType, block};

use crate::common::Rng;

/// Types for which every case runs.
const EVERY: [WeightType; 8] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::BF16,
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_K,
    WeightType::Q5_K,
    WeightType::Q6_K,
];

/// Whether case `i` of a list runs for a weight type; one in `share` does. Kernels of different types differ only by
/// the fragment that unpacks a block, so most types need few sizes and one form of a kernel.
pub fn has_case(weight: WeightType, i: usize, share: usize) -> bool {
    EVERY.contains(&weight) || i % share == weight as usize % share
}

/// Distribution of a kernel's activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inputs {
    Uniform,
    Normal,
    Student,
    /// Normal, one channel a thousand times larger.
    Channel1e3,
    /// Normal, one channel a hundred thousand times larger.
    Channel1e5,
    /// Near the f16 maximum; even rows are all positive, so that nothing cancels.
    HalfMax,
    Subnormal,
    Zeros,
    /// One value per row, so that its variance is zero.
    Constant,
    /// Half of the elements very low, the first row entirely.
    Masked,
    /// Zeros of both signs.
    SignedZeros,
    /// The same token repeated.
    Repeated,
    /// Normal, with a magnitude per row from 1e-30 to 1e30. For products only: a norm's squares would overflow.
    Magnitudes,
}

impl Inputs {
    pub const ALL: [Inputs; 12] = [
        Inputs::Uniform,
        Inputs::Normal,
        Inputs::Student,
        Inputs::Channel1e3,
        Inputs::Channel1e5,
        Inputs::HalfMax,
        Inputs::Subnormal,
        Inputs::Zeros,
        Inputs::Constant,
        Inputs::Masked,
        Inputs::SignedZeros,
        Inputs::Repeated,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Inputs::Uniform => "uniform",
            Inputs::Normal => "normal",
            Inputs::Student => "student",
            Inputs::Channel1e3 => "channel1e3",
            Inputs::Channel1e5 => "channel1e5",
            Inputs::HalfMax => "half-max",
            Inputs::Subnormal => "subnormal",
            Inputs::Zeros => "zeros",
            Inputs::Constant => "constant",
            Inputs::Masked => "masked",
            Inputs::SignedZeros => "signed-zeros",
            Inputs::Repeated => "repeated",
            Inputs::Magnitudes => "magnitudes",
        }
    }
}

/// Draws the operands of one case.
pub struct Source {
    pub inputs: Inputs,
    pub rng: Rng,
    /// Whether the kernel rounds operands to f16: weights must then be in its range, rows of x need not.
    pub staged_f16: bool,
    /// Value of masked elements.
    pub mask: f32,
}

impl Source {
    pub fn new(inputs: Inputs, seed: u64, staged_f16: bool) -> Source {
        Source { inputs, rng: Rng::new(seed), staged_f16, mask: -1e9 }
    }

    /// `[rows, cols]` in the case's family.
    pub fn rows(&mut self, rows: u32, cols: u32) -> Vec<f32> {
        let (rows, cols) = (rows as usize, cols as usize);
        let mut out = Vec::with_capacity(rows * cols);
        let channel = self.rng.below(cols);
        for row in 0..rows {
            // Sixteenths are exact in every format.
            let constant = (1 + self.rng.below(64)) as f32 / 16.0 * if self.rng.below(2) == 0 { 1.0 } else { -1.0 };
            let size = if self.inputs == Inputs::Magnitudes { 10f64.powf(30.0 * self.rng.uniform()) } else { 1.0 };
            for col in 0..cols {
                let rng = &mut self.rng;
                let outlier = |rng: &mut Rng, factor: f64| rng.normal() * if col == channel { factor } else { 1.0 };
                let sign = if rng.below(2) == 0 { 1.0f32 } else { -1.0 };
                let value = match self.inputs {
                    Inputs::Uniform => rng.uniform() as f32,
                    Inputs::Normal => rng.normal() as f32,
                    Inputs::Student => rng.student() as f32,
                    Inputs::Channel1e3 => outlier(rng, 1e3) as f32,
                    Inputs::Channel1e5 => outlier(rng, 1e5) as f32,
                    Inputs::HalfMax => {
                        let value = 65504.0 * (1.0 - 0.01 * rng.unit()) as f32;
                        if row % 2 == 0 { value } else { value * sign }
                    }
                    Inputs::Subnormal => f32::from_bits(rng.word() & 0x007f_ffff) * sign,
                    Inputs::Zeros => 0.0,
                    Inputs::Constant => constant,
                    Inputs::Masked if row == 0 || rng.below(2) == 0 => self.mask,
                    Inputs::Masked => rng.normal() as f32,
                    Inputs::SignedZeros => 0.0 * sign,
                    Inputs::Repeated if row > 0 => out[col],
                    Inputs::Repeated => rng.normal() as f32,
                    Inputs::Magnitudes => (rng.normal() * size) as f32,
                };
                out.push(value);
            }
        }
        out
    }

    /// Normal numbers for any family: norms' weights, biases.
    pub fn normal(&mut self, n: u32) -> Vec<f32> {
        (0..n).map(|_| self.rng.normal() as f32).collect()
    }

    /// A matrix `[rows, cols]` in file layout. One in five has extreme blocks and values: zero, subnormal in f16,
    /// huge.
    pub fn weights(&mut self, weight: WeightType, rows: u32, cols: u32) -> Vec<u8> {
        let extreme = self.rng.below(5) == 0;
        let mut bytes = Vec::new();
        for _ in 0..rows {
            match weight {
                WeightType::F32 => (0..cols).for_each(|_| {
                    let value = self.rng.normal() as f32 * if extreme { self.magnitude() } else { 1.0 };
                    bytes.extend(value.to_le_bytes());
                }),
                WeightType::BF16 => (0..cols).for_each(|_| {
                    let value = self.rng.normal() as f32 * if extreme { self.magnitude() } else { 1.0 };
                    bytes.extend(((value.to_bits() >> 16) as u16).to_le_bytes());
                }),
                WeightType::F16 => (0..cols).for_each(|_| bytes.extend(self.half(extreme, 30).to_le_bytes())),
                WeightType::Q8_0 | WeightType::Q4_0 => (0..cols.div_ceil(32)).for_each(|_| {
                    // A product of scale and quant staged as f16 must be below 2^16.
                    let largest = if self.staged_f16 { 22 } else { 30 };
                    bytes.extend(self.half(extreme, largest).to_le_bytes());
                    let n_bytes = if weight == WeightType::Q8_0 { 32 } else { 16 };
                    bytes.extend((0..n_bytes).map(|_| self.rng.word() as u8));
                }),
                WeightType::Q4_K | WeightType::Q5_K | WeightType::Q6_K => (0..cols.div_ceil(256)).for_each(|_| {
                    let (size, place, middle) = match weight {
                        WeightType::Q4_K => (144, 0, 3),
                        WeightType::Q5_K => (176, 0, 4),
                        _ => (210, 208, 0),
                    };
                    let start = bytes.len();
                    bytes.extend((0..size).map(|_| self.rng.word() as u8));
                    let block = &mut bytes[start..];
                    let mut scale = self.half(extreme, 30);
                    let mut min = self.half(extreme, 30);
                    if self.staged_f16 {
                        // Scales of one magnitude, and mins of scale times the middle quant, as in real files: a
                        // super-block may be a whole row, with weights that are multiples of few numbers or lean to
                        // one side, and averages over roundings of few such rows say little.
                        scale = (scale & 0x83ff) | 12 << 10;
                        min = scale + (middle << 10);
                        block.copy_within(4..8, 8);
                        block[12..16].iter_mut().for_each(|byte| *byte = *byte % 16 * 17);
                    }
                    if weight != WeightType::Q6_K {
                        block[2..4].copy_from_slice(&min.to_le_bytes());
                    }
                    block[place..place + 2].copy_from_slice(&scale.to_le_bytes());
                }),
                _ => {
                    let (len, size, halves) = layout(weight);
                    for _ in 0..cols.div_ceil(len as u32) {
                        let start = bytes.len();
                        bytes.extend((0..size).map(|_| self.rng.word() as u8));
                        self.put_scales(weight, halves, extreme, &mut bytes[start..]);
                    }
                }
            }
        }
        bytes
    }

    /// Gives a block's scales ordinary values.
    fn put_scales(&mut self, weight: WeightType, halves: &[usize], extreme: bool, block: &mut [u8]) {
        let staged = self.staged_f16;
        for (i, &at) in halves.iter().enumerate() {
            let mut bits = self.half(extreme, 30);
            if staged {
                // Of one magnitude, as explained above.
                bits = (bits & 0x83ff) | 12 << 10;
            }
            if let (true, 1, &[first, _]) = (staged, i, halves) {
                bits = u16::from_le_bytes([block[first], block[first + 1]]);
                match weight {
                    WeightType::Q4_1 => bits = (bits ^ 0x8000) + (3 << 10),
                    WeightType::Q5_1 => bits = (bits ^ 0x8000) + (4 << 10),
                    _ => block[..16].iter_mut().for_each(|byte| *byte = *byte % 16 * 17),
                }
            }
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
        match weight {
            // Exponents of numbers near 1.
            WeightType::MXFP4 => block[0] = if staged { 126 } else { 112 + block[0] % 32 },
            WeightType::NVFP4 if staged => block[..4].iter_mut().for_each(|byte| *byte = *byte % 8 + 0x38),
            _ => {}
        }
    }

    fn magnitude(&mut self) -> f32 {
        [0.0, 1e-3, 1.0, 1.0, 1e3][self.rng.below(5)]
    }

    /// Bits of a finite f16: of ordinary magnitude, or with any exponent up to `largest`, including zero and
    /// subnormals.
    fn half(&mut self, extreme: bool, largest: u16) -> u16 {
        let bits = self.rng.word() as u16;
        let exponent = match (extreme, self.rng.below(4)) {
            (false, _) => 8 + self.rng.below(7) as u16,
            (true, 0) => 0,
            (true, 1) => largest,
            (true, _) => 10 + self.rng.below(6) as u16,
        };
        if extreme && self.rng.below(8) == 0 { bits & 0x8000 } else { (bits & 0x83ff) | (exponent << 10) }
    }
}

/// Value of f16 bits, by IEEE 754-2008, 3.4.
fn half_value(bits: u16) -> f64 {
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    let fraction = f64::from(bits & 0x3ff);
    match (bits >> 10) & 0x1f {
        0 => sign * fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        exponent => sign * (1024.0 + fraction) * 2f64.powi(i32::from(exponent) - 25),
    }
}

/// Quant `i` of a super-block with runs of `run` bytes: as many quants in their low nibbles, then in their high ones.
fn nibble(quants: &[u8], i: usize, run: usize) -> u8 {
    let byte = quants[i / (2 * run) * run + i % run];
    if i % (2 * run) < run { byte % 16 } else { byte / 16 }
}

/// Weight `i` of a Q4_K or Q5_K super-block. Twelve bytes hold eight scales and eight mins of 6 bits: the lower six
/// bits of the first eight bytes are four scales and four mins; their upper two bits complete the nibbles of the last
/// four bytes.
fn k_affine(block: &[u8], i: usize, quant: u8) -> f64 {
    let half_at = |at: usize| half_value(u16::from_le_bytes([block[at], block[at + 1]]));
    let packed = &block[4..16];
    let (group, j) = (i / 32, i / 32 % 4);
    let [scale, min] = match group {
        0..4 => [packed[j] % 64, packed[4 + j] % 64],
        _ => [packed[8 + j] % 16 + packed[j] / 64 * 16, packed[8 + j] / 16 + packed[4 + j] / 64 * 16],
    };
    half_at(0) * f64::from(scale) * f64::from(quant) - half_at(2) * f64::from(min)
}

/// Weights and bytes per block in files, and offsets of its f16 numbers.
fn layout(weight: WeightType) -> (usize, usize, &'static [usize]) {
    match weight {
        WeightType::Q4_1 => (32, 20, &[0, 2]),
        WeightType::Q5_0 => (32, 22, &[0]),
        WeightType::Q5_1 => (32, 24, &[0, 2]),
        WeightType::Q2_K => (256, 84, &[80, 82]),
        WeightType::Q3_K => (256, 110, &[108]),
        WeightType::IQ4_NL => (32, 18, &[0]),
        WeightType::IQ4_XS => (256, 136, &[0]),
        WeightType::IQ3_S => (256, 110, &[0]),
        WeightType::IQ3_XXS => (256, 98, &[0]),
        WeightType::IQ2_S => (256, 82, &[0]),
        WeightType::IQ2_XS => (256, 74, &[0]),
        WeightType::IQ2_XXS => (256, 66, &[0]),
        WeightType::MXFP4 => (32, 17, &[]),
        WeightType::NVFP4 => (64, 36, &[]),
        WeightType::Q2_0 => (64, 18, &[0]),
        WeightType::Q1_0 => (128, 18, &[0]),
        other => panic!("{other} has arms of its own"),
    }
}

/// Weight `i` of a block of the types in [`layout`], except codebooks.
fn block_value(weight: WeightType, block: &[u8], i: usize) -> f64 {
    const IQ4: [f64; 16] = [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];
    // Sign, two bits of exponent, one of fraction.
    let fp4 = |bits: u8| {
        let magnitude = match bits >> 1 & 3 {
            0 => f64::from(bits & 1) / 2.0,
            exponent => (1.0 + f64::from(bits & 1) / 2.0) * 2f64.powi(i32::from(exponent) - 1),
        };
        if bits & 8 != 0 { -magnitude } else { magnitude }
    };
    let half_at = |at: usize| half_value(u16::from_le_bytes([block[at], block[at + 1]]));
    // Two bits of a K-quant: 32 bytes hold 128 weights.
    let pair = |quants: &[u8]| quants[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
    let bit = |bytes: &[u8], i: usize| bytes[i / 8] >> (i % 8) & 1;
    match weight {
        WeightType::Q4_1 => half_at(0) * f64::from(nibble(&block[4..], i, 16)) + half_at(2),
        WeightType::Q5_0 => {
            let quant = nibble(&block[6..], i, 16) + 16 * bit(&block[2..], i);
            half_at(0) * (f64::from(quant) - 16.0)
        }
        WeightType::Q5_1 => {
            let quant = nibble(&block[8..], i, 16) + 16 * bit(&block[4..], i);
            half_at(0) * f64::from(quant) + half_at(2)
        }
        WeightType::Q2_K => {
            let group = block[i / 16];
            let scaled = half_at(80) * f64::from(group % 16) * f64::from(pair(&block[16..]));
            scaled - half_at(82) * f64::from(group / 16)
        }
        WeightType::Q3_K => {
            let group = i / 16;
            let low = if group < 8 { block[96 + group] % 16 } else { block[88 + group] / 16 };
            let high = block[104 + group % 4] >> (2 * (group / 4)) & 3;
            // Bit b of byte l is the third bit of weight l of block b.
            let quant = pair(&block[32..]) + 4 * (block[i % 32] >> (i / 32) & 1);
            half_at(108) * (f64::from(low + 16 * high) - 32.0) * (f64::from(quant) - 4.0)
        }
        WeightType::IQ4_NL => half_at(0) * IQ4[usize::from(nibble(&block[2..], i, 16))],
        WeightType::IQ4_XS => {
            let group = i / 32;
            let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
            let high = block[2 + group / 4] >> (2 * (group % 4)) & 3;
            half_at(0) * (f64::from(low + 16 * high) - 32.0) * IQ4[usize::from(nibble(&block[8..], i, 16))]
        }
        WeightType::MXFP4 => 2f64.powi(i32::from(block[0]) - 127) * fp4(nibble(&block[1..], i, 16)),
        WeightType::NVFP4 => {
            let (scale, quant) = (block[i / 16], nibble(&block[4..], i, 8));
            let value = match (scale, scale >> 3 & 15) {
                (0x7f, _) => 0.0,
                (_, 0) => f64::from(scale % 8) / 8.0 * 2f64.powi(-6),
                (_, exponent) => (1.0 + f64::from(scale % 8) / 8.0) * 2f64.powi(i32::from(exponent) - 7),
            };
            value * fp4(quant)
        }
        WeightType::Q2_0 => half_at(0) * (f64::from(block[2 + i / 4] >> (2 * (i % 4)) & 3) - 1.0),
        WeightType::Q1_0 => half_at(0) * (2.0 * f64::from(bit(&block[2..], i)) - 1.0),
        other => panic!("{other} has arms of its own"),
    }
}

/// Values of a matrix in file layout, `[rows, cols]`.
pub fn dequantise(weight: WeightType, bytes: &[u8], cols: u32) -> Vec<f64> {
    let cols = cols as usize;
    let half_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    // Offset of the block that holds weight `col` of a row, and the weight's index in it, for blocks of `len` weights
    // and `size` bytes.
    let place_in =
        |row: usize, col: usize, len: usize, size: usize| ((row * cols.div_ceil(len) + col / len) * size, col % len);
    let place = |row: usize, col: usize, size: usize| place_in(row, col, 32, size);
    let row_bytes = tilewright::file_row_bytes(weight, cols);
    // Codebook types use the decoder, which the shared vectors compare with ggml for every entry.
    let codebook = BlockType::ALL.iter().find(|known| {
        known.name() == weight.name() && (known.name().starts_with("IQ2") || known.name().starts_with("IQ3"))
    });
    if let Some(&codebook) = codebook {
        let padded = cols.next_multiple_of(256);
        let mut values = vec![0.0; bytes.len() / row_bytes * padded];
        block::dequantize(codebook, bytes, &mut values).expect("whole rows");
        return values.chunks(padded).flat_map(|row| &row[..cols]).map(|&value| f64::from(value)).collect();
    }
    let value = |row: usize, col: usize| match weight {
        WeightType::F32 => {
            let at = (row * cols + col) * 4;
            f64::from(f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]))
        }
        WeightType::BF16 => f64::from(f32::from_bits(u32::from(half_at((row * cols + col) * 2)) << 16)),
        WeightType::F16 => half_value(half_at((row * cols + col) * 2)),
        WeightType::Q8_0 => {
            let (at, j) = place(row, col, 34);
            half_value(half_at(at)) * f64::from(bytes[at + 2 + j] as i8)
        }
        WeightType::Q4_0 => {
            let (at, j) = place(row, col, 18);
            let byte = bytes[at + 2 + j % 16];
            let quant = if j < 16 { byte % 16 } else { byte / 16 };
            half_value(half_at(at)) * (f64::from(quant) - 8.0)
        }
        WeightType::Q4_K => {
            let (at, i) = place_in(row, col, 256, 144);
            k_affine(&bytes[at..], i, nibble(&bytes[at + 16..], i, 32))
        }
        WeightType::Q5_K => {
            let (at, i) = place_in(row, col, 256, 176);
            let fifth = bytes[at + 16 + i % 32] >> (i / 32) & 1;
            k_affine(&bytes[at..], i, nibble(&bytes[at + 48..], i, 32) + 16 * fifth)
        }
        WeightType::Q6_K => {
            let (at, i) = place_in(row, col, 256, 210);
            let upper = bytes[at + 128 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
            let quant = nibble(&bytes[at..], i, 64) + 16 * upper;
            let scale = f64::from(bytes[at + 192 + i / 16] as i8);
            half_value(half_at(at + 208)) * scale * (f64::from(quant) - 32.0)
        }
        _ => {
            let (len, size, _) = layout(weight);
            let (at, i) = place_in(row, col, len, size);
            block_value(weight, &bytes[at..], i)
        }
    };
    (0..bytes.len() / row_bytes)
        .flat_map(|row| (0..cols).map(move |col| (row, col)))
        .map(|(r, c)| value(r, c))
        .collect()
}
