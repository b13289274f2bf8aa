//! `matvec`, `matmul`, `matmul_naive`, `matmul_plain`, `split_sum` and the choice among them.

#[cfg(not(target_arch = "wasm32"))]
use tilewright::Tier;
#[cfg(not(target_arch = "wasm32"))]
use tilewright::kernels::microbench::matmul_naive;
use tilewright::kernels::{self, Activation, Gate, Gelu, Input, Linear, Norm};
use tilewright::{Error, Recorder, Tensor, WeightType};

use crate::activation::activated_within;
use crate::common::Expected;
use crate::harness::{Bound, Case, Data, FLUSH, Job, Operand, ROUND, sum_rounding};
use crate::inputs::{Inputs, Source, dequantise, has_case};
#[cfg(not(target_arch = "wasm32"))]
use crate::{
    common::{self, shared},
    harness::{Want, execute},
};
#[cfg(not(target_arch = "wasm32"))]
use tilewright::{Bucket, Choice, DType, Matrix, Role, TargetLimits, Workspace};

/// T, N, K: rows of w are handled in fours, K in blocks of 32 shared by up to 64 invocations.
const MATVEC: [[u32; 3]; 22] = [
    [1, 1, 4],
    [1, 2, 8],
    [2, 3, 32],
    [1, 31, 36],
    [3, 32, 64],
    [1, 33, 60],
    [2, 63, 96],
    [1, 62, 96], // part of a super-block
    [1, 64, 128],
    [1, 65, 132],
    [3, 127, 192],
    [1, 128, 256],
    [1, 129, 260],
    [2, 255, 96],
    [1, 256, 512],
    [1, 257, 516],
    [1, 5, 1000],
    [7, 6, 2048],
    [1, 9, 2052],
    [1, 3, 4096],
    [2, 4, 4100],
    [1, 1000, 64],
];

/// M, N, K: tiles are 64 x 64 outputs, or 16 x 64 in the scalar tier; K advances in steps of 32.
const MATMUL: [[u32; 3]; 21] = [
    [1, 1, 1],
    [2, 3, 2],
    [3, 2, 31],
    [31, 32, 33],
    [32, 33, 32],
    [33, 31, 63],
    [63, 64, 65],
    [64, 65, 64],
    [65, 63, 127],
    [127, 33, 129],
    [5, 128, 96],
    [129, 17, 255],
    [8, 255, 64],
    [17, 257, 36],
    [70, 70, 257],
    [4, 5, 1000],
    [3, 4, 4097],
    [64, 64, 64],
    [128, 129, 32],
    [256, 3, 128],
    [1, 130, 70],
];

/// Flag of cases named by the number of tokens side by side in an invocation.
const COLUMNS: usize = 64;
/// The flag of the quick GELU.
const QUICK: usize = 128;

/// Name part for the number of tokens, of `n_tokens`, side by side in an invocation.
pub fn named_columns(n_tokens: u32) -> String {
    format!("+columns{}", n_tokens.next_power_of_two().min(8))
}

/// T, N and K of a product of few tokens: rows that end within a block, and fewer blocks than tokens.
pub fn few(n_tokens: u32) -> [u32; 3] {
    [n_tokens, 37, [36, 260, 1000, 2052][n_tokens as usize % 4]]
}

/// S, M, N: a workgroup computes 256 outputs.
const SPLITS: [[u32; 3]; 8] =
    [[1, 1, 1], [2, 3, 85], [3, 1, 256], [8, 1, 257], [5, 2, 127], [4, 33, 31], [8, 64, 64], [2, 7, 4099]];

type Kernel = fn(&mut Recorder, &Linear, &Tensor, &Tensor) -> Result<(), Error>;

pub fn cases(cases: &mut Vec<Case>) {
    let mut push = |name, kernel: Kernel, weight: WeightType, flags: usize, [m, n, k]: [u32; 3], inputs| {
        let bias = if flags & 1 != 0 { "+bias" } else { "" };
        let accumulate = if flags & 2 != 0 { "+accumulate" } else { "" };
        let beside = if flags & 4 != 0 { "+beside" } else { "" };
        let norm = if flags & 8 != 0 { "+norm" } else { "" };
        let act = match activation(flags) {
            None => "",
            Some(Activation::Gelu(Gelu::Exact)) => "+gelu",
            Some(Activation::Gelu(Gelu::Tanh)) => "+gelu-tanh",
            Some(Activation::Gelu(Gelu::Quick)) => "+gelu-quick",
            Some(Activation::Tanh) => "+tanh",
        };
        let columns = if flags & COLUMNS != 0 { named_columns(m) } else { String::new() };
        cases.push(Case {
            kernel: name,
            variant: format!("{weight}{bias}{accumulate}{beside}{norm}{act}{columns}"),
            sizes: format!("t={m},n={n},k={k}"),
            inputs,
            build: Box::new(move |source| linear(source, kernel, weight, flags, [m, n, k])),
        });
    };
    for weight in WeightType::ALL {
        let of = |&(i, _): &(usize, &[u32; 3])| has_case(weight, i, 8);
        for inputs in Inputs::ALL {
            for (i, &sizes) in MATVEC.iter().enumerate().filter(of) {
                push("matvec", kernels::matvec, weight, i % 8, sizes, inputs);
            }
            // A norm excludes a bias.
            for (i, &sizes) in MATVEC.iter().enumerate().skip(1).step_by(3).filter(of) {
                push("matvec", kernels::matvec, weight, 8 + (i % 4) * 2, sizes, inputs);
            }
            for (i, &sizes) in MATMUL.iter().enumerate().filter(of) {
                push("matmul", kernels::matmul, weight, i % 8, sizes, inputs);
            }
            #[cfg(not(target_arch = "wasm32"))]
            for (i, &sizes) in MATMUL.iter().enumerate().skip(2).step_by(3).filter(of) {
                push("matmul_naive", matmul_naive, weight, i % 8, sizes, inputs);
            }
        }
        // Each number of tokens handled side by side, and one more.
        for t in (1..=9).filter(|&t| has_case(weight, t as usize, 4)) {
            let flags = COLUMNS | if t % 2 == 0 { 8 } else { 3 };
            let inputs = if t % 4 < 2 { Inputs::Normal } else { Inputs::Student };
            push("matvec", kernels::matvec, weight, flags, few(t), inputs);
        }
        // Up to three splits along K: as many as blocks, fewer, or with a short last one.
        for (i, &sizes) in MATMUL.iter().enumerate().filter(of) {
            push("matmul_split", split, weight, i % 8, sizes, Inputs::Student);
        }
        // Around the limit between matvec and matmul, and with a K that only matmul supports.
        for sizes in [[8, 5, 32], [9, 5, 32], [1, 5, 34], [7, 5, 33], [33, 70, 260]] {
            push("linear", |rec, linear, x, y| linear.record(rec, x, y), weight, 1, sizes, Inputs::Normal);
            push("linear", |rec, linear, x, y| linear.record(rec, x, y), weight, 8, sizes, Inputs::Normal);
            push("linear", |rec, linear, x, y| linear.record(rec, x, y), weight, 9, sizes, Inputs::Normal);
        }
        if matches!(weight, WeightType::F32 | WeightType::Q8_0 | WeightType::Q6_K) {
            for (i, inputs) in
                [Inputs::Normal, Inputs::Student, Inputs::Constant, Inputs::Zeros].into_iter().enumerate()
            {
                // Each activation with a bias, accumulation, or both.
                let flags = [16, 32, 48, QUICK][i % 4] + (i + 1) % 4;
                push("matvec", kernels::matvec, weight, flags, [2, 33, 260], inputs);
                push("matvec", kernels::matvec, weight, 4 + flags, [1, 65, 64], inputs);
                push("matmul", kernels::matmul, weight, flags, [17, 70, 36], inputs);
                push("matmul", kernels::matmul, weight, 4 + flags, [65, 130, 132], inputs);
                push("matmul", kernels::matmul, weight, flags, [64, 64, 64], inputs);
                #[cfg(not(target_arch = "wasm32"))]
                push("matmul_naive", matmul_naive, weight, flags, [3, 18, 33], inputs);
                push("matmul_split", split, weight, flags, [9, 20, 129], inputs);
            }
        }
        // The largest scales of other types would overflow f32.
        if matches!(weight, WeightType::F32 | WeightType::BF16 | WeightType::Q4_0) {
            for (i, &sizes) in MATMUL.iter().enumerate() {
                push("matmul", kernels::matmul, weight, i % 8, sizes, Inputs::Magnitudes);
                push("matmul_split", split, weight, i % 8, sizes, Inputs::Magnitudes);
            }
            push("matmul", kernels::matmul, weight, 0, [256, 8192, 64], Inputs::Magnitudes);
            push("matvec", kernels::matvec, weight, 0, [7, 33, 260], Inputs::Magnitudes);
        }
        let large: [(&str, Kernel, usize, [u32; 3], Inputs); 3] = [
            ("matvec", kernels::matvec, 0, [1, 65_537, 32], Inputs::Normal),
            ("matvec", kernels::matvec, 3, [1, 4097, 1024], Inputs::Student),
            ("matmul", kernels::matmul, 0, [2, 65_537, 4], Inputs::Normal),
        ];
        for (i, (name, kernel, flags, sizes, inputs)) in large.into_iter().enumerate() {
            if has_case(weight, i, 16) {
                push(name, kernel, weight, flags, sizes, inputs);
            }
        }
    }
    // Rows so long that llvmpipe would leave the loop of a single invocation.
    push("matvec", kernels::matvec, WeightType::Q8_0, 0, [1, 2, 262_144], Inputs::Normal);
    // A matrix of 155 MB: many adapters can bind it only in slabs of rows.
    push("matvec", kernels::matvec, WeightType::F32, 0, [1, 151_936, 256], Inputs::Normal);
    // Enough tiles to use large ones; the last sizes are whole tiles.
    for sizes in [[129, 12_300, 36], [200, 8200, 33], [70, 16_500, 64], [128, 16_384, 32]] {
        push("matmul", kernels::matmul, WeightType::Q4_0, 1, sizes, Inputs::Normal);
        push("matmul", kernels::matmul, WeightType::F32, 7, sizes, Inputs::Normal);
    }
    push("matmul_split", split, WeightType::Q4_0, 7, [129, 12_300, 161], Inputs::Normal);
    // Too large for one dispatch on a software adapter: split into runs of columns, and of rows.
    for sizes in [[128, 2816, 1024], [4160, 64, 512]] {
        push("matmul", kernels::matmul, WeightType::Q4_0, 1, sizes, Inputs::Normal);
    }
    push("matvec", kernels::matvec, WeightType::Q4_0, 3, [7, 33_000, 512], Inputs::Normal);
    push("matmul_split", split, WeightType::Q4_0, 1, [128, 2816, 1024], Inputs::Normal);
    for inputs in Inputs::ALL {
        for (flags, sizes) in SPLITS.into_iter().enumerate() {
            let [splits, m, n] = sizes;
            let beside = if flags & 4 != 0 { "+beside" } else { "" };
            cases.push(Case {
                kernel: "split_sum",
                variant: format!("F32+{}{beside}+{}", flags & 3, flags % 3),
                sizes: format!("s={splits},t={m},n={n}"),
                inputs,
                build: Box::new(move |source| split_sum(source, flags, sizes)),
            });
        }
    }
    for (i, gate) in [Gate::Silu, Gate::Gelu(Gelu::Tanh), Gate::Clamped].into_iter().enumerate() {
        for weight in [WeightType::F32, WeightType::F16, WeightType::Q4_0] {
            for [m, n, k] in [[2, 5, 32], [9, 33, 36], [40, 70, 260], [65, 64, 256]] {
                cases.push(Case {
                    kernel: "half_rows",
                    variant: format!("{weight}+gate{i}"),
                    sizes: format!("t={m},n={n},k={k}"),
                    inputs: Inputs::Normal,
                    build: Box::new(move |source| gated(source, weight, gate, [m, n, k])),
                });
            }
        }
    }
    let mut push_plain = |[m, n, k]: [u32; 3], inputs| {
        cases.push(Case {
            kernel: "matmul_plain",
            variant: "F32".into(),
            sizes: format!("m={m},n={n},k={k}"),
            inputs,
            build: Box::new(move |source| plain(source, [m, n, k])),
        });
    };
    for inputs in Inputs::ALL.into_iter().chain([Inputs::Magnitudes]) {
        MATMUL.into_iter().for_each(|sizes| push_plain(sizes, inputs));
    }
    for sizes in
        [[128, 1040, 1024], [2064, 64, 1024], [129, 12_300, 36], [130, 8193, 33], [70, 16_400, 34], [128, 16_384, 32]]
    {
        push_plain(sizes, Inputs::Normal);
    }
}

/// A gated product of a feed-forward's halves, by whichever kernel supports the number of rows.
fn gated(source: &mut Source, weight: WeightType, gate: Gate, [m, n, k]: [u32; 3]) -> Job {
    let halves = source.rows(m, 2 * k);
    let bytes = source.weights(weight, n, k);
    let values: Vec<f64> = halves
        .chunks_exact(2 * k as usize)
        .flat_map(|row| {
            let (gates, ups) = row.split_at(k as usize);
            gates
                .iter()
                .zip(ups)
                .map(|(&g, &u)| {
                    let (g, u) = (f64::from(g), f64::from(u));
                    match gate {
                        Gate::Silu => g / (1.0 + (-g).exp()) * u,
                        Gate::Clamped => {
                            let g = g.min(7.0);
                            (u.clamp(-7.0, 7.0) + 1.0) * g / (1.0 + (-1.702 * g).exp())
                        }
                        Gate::Gelu(_) => {
                            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                            0.5 * g * (1.0 + inner.tanh()) * u
                        }
                    }
                })
                .collect::<Vec<f64>>()
        })
        .collect();
    // Shader exponentials are accurate to a few digits of their exponent.
    let rows = Rows { values, rounding: 1e-5, gains: vec![1.0; m as usize], weight: vec![1.0; k as usize] };
    let sizes = [m, n, k].map(|d| d as usize);
    let want = product(source, &rows, &dequantise(weight, &bytes, k), &vec![[0.0; 2]; sizes[0] * sizes[1]], sizes);
    let operands = vec![
        Operand::weights(weight, &[n, k], bytes),
        Operand::floats("halves", &[m, 2 * k], halves),
        Operand::close("y", &[m, n], want, limit(source, sizes).max(1e-9)),
    ];
    Job::new(operands, move |rec: &mut Recorder, bound: &Bound| {
        let mut input = Input::gated(bound.tensor(1), gate);
        Linear::new(bound.matrix(0)).record_input(rec, &mut input, bound.tensor(2))
    })
}

/// The activation encoded in the flags.
fn activation(flags: usize) -> Option<Activation> {
    match flags & 48 {
        _ if flags & QUICK != 0 => Some(Activation::Gelu(Gelu::Quick)),
        0 => None,
        16 => Some(Activation::Gelu(Gelu::Exact)),
        32 => Some(Activation::Gelu(Gelu::Tanh)),
        _ => Some(Activation::Tanh),
    }
}

/// `matmul` in three splits.
fn split(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    kernels::matmul(rec, &Linear { splits: Some(3), ..*linear }, x, y)
}

/// The left operand of a product: plain or normalised rows.
pub struct Rows {
    /// `[M, K]`.
    pub values: Vec<f64>,
    /// Relative error of an element from normalising.
    pub rounding: f64,
    /// Factor and weights applied row by row after elements may have been flushed to zero.
    pub gains: Vec<f64>,
    pub weight: Vec<f32>,
}

impl Rows {
    pub fn plain(x: &[f32], k: usize) -> Rows {
        let values = x.iter().map(|&v| f64::from(v)).collect();
        Rows { values, rounding: 0.0, gains: vec![1.0; x.len() / k], weight: vec![1.0; k] }
    }

    /// RMSNorm of each row.
    pub fn normed(x: &[f32], weight: Vec<f32>, eps: f32) -> Rows {
        let k = weight.len();
        let gain = |row: &[f32]| {
            let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
            1.0 / (squares / k as f64 + f64::from(eps)).sqrt()
        };
        let gains: Vec<f64> = x.chunks_exact(k).map(gain).collect();
        let normed = |(i, &v): (usize, &f32)| f64::from(v) * gains[i / k] * f64::from(weight[i % k]);
        let values = x.iter().enumerate().map(normed).collect();
        Rows { values, rounding: sum_rounding(k), gains, weight }
    }
}

/// The product in f64 with `w` as `[N, K]`, and each element's rounding bound; adds two extra terms to each element's
/// sum.
pub fn product(source: &Source, x: &Rows, w: &[f64], more: &[[f64; 2]], [m, n, k]: [usize; 3]) -> Vec<Expected> {
    let magnitude = |row: &[f64]| row.iter().map(|v| v.abs()).sum::<f64>();
    let w_magnitudes: Vec<f64> = w.chunks_exact(k).map(magnitude).collect();
    // Error from flushing elements of a row of x, by their later factors.
    let flushed =
        |w: &[f64]| w.iter().zip(&x.weight).map(|(w, g)| (1.0 + w.abs()) * (1.0 + f64::from(g.abs()))).sum::<f64>();
    let mut want = Vec::with_capacity(m * n);
    for (row, values) in x.values.chunks_exact(k).enumerate() {
        let x_magnitude = magnitude(values);
        for (col, w) in w.chunks_exact(k).enumerate() {
            let [a, b] = more[row * n + col];
            let (mut sum, mut magnitude, mut power) = (0.0, 0.0, 0.0);
            for (x, w) in values.iter().zip(w) {
                let term = x * w;
                sum += term;
                magnitude += term.abs();
                power += term * term;
            }
            let operands = x_magnitude + w_magnitudes[col];
            let mut bound = (sum_rounding(k) + x.rounding) * magnitude;
            bound += 2.0 * ROUND * (a.abs() + b.abs() + magnitude);
            let mut floor = FLUSH * (operands + k as f64);
            if x.rounding > 0.0 {
                floor += FLUSH * (1.0 + x.gains[row]) * flushed(w);
            }
            if source.staged_f16 {
                // Two roundings to 11 bits per term, or to a multiple of 2^-24 for subnormal f16; but rows of x are
                // scaled if all elements are at most 2^-10, or one exceeds the f16 maximum.
                bound += magnitude / 1024.0;
                let largest = values.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
                let step = (largest / 16_384.0).min(ROUND).max(largest * 2f64.powi(-38));
                floor += x_magnitude * ROUND + w_magnitudes[col] * step;
            }
            let value = sum + a + b;
            want.push(Expected { value, bound, floor, power: (value * value).max(power) });
        }
    }
    want
}

/// Below this number of terms an average of f16 roundings says little, so the worst case is allowed instead.
const FEW_ROUNDINGS: usize = 256;

pub fn limit(source: &Source, [m, n, k]: [usize; 3]) -> f64 {
    // An outlier's channel dwarfs the others: only its roundings count.
    let channels = if matches!(source.inputs, Inputs::Channel1e3 | Inputs::Channel1e5) { 1 } else { k };
    // So does the largest row; each row is checked against its own bound.
    let m = if source.inputs == Inputs::Magnitudes { 1 } else { m };
    match source.staged_f16 {
        false => 1e-10,
        true if m.min(n) * channels < FEW_ROUNDINGS => 1e-6,
        true => 2e-7,
    }
}

/// Epsilon of the norms.
pub const EPS: f32 = 1e-5;

/// Unrelated columns of `y` left and right of the product.
const BESIDE: [u32; 2] = [3, 2];

/// Destination of a product of `n` columns: in `y`, right of `left` unrelated columns.
struct Target<'a> {
    /// Initial contents of `y`, if the product accumulates.
    held: Vec<f32>,
    bias: Option<&'a Vec<f32>>,
    activation: Option<Activation>,
    accumulate: bool,
    left: usize,
    n: usize,
}

impl Target<'_> {
    /// Terms added to each of the product's elements; `y` has `m` rows.
    fn terms(&self, m: u32) -> Vec<[f64; 2]> {
        let width = self.held.len() / m as usize;
        // Accumulation follows an activation.
        let of = |held: f32| if self.accumulate && self.activation.is_none() { f64::from(held) } else { 0.0 };
        let terms = |row: &[f32]| -> Vec<[f64; 2]> {
            let own = self.left..self.left + self.n;
            own.map(|c| [of(row[c]), self.bias.map_or(0.0, |bias| f64::from(bias[c]))]).collect()
        };
        self.held.chunks_exact(width).flat_map(terms).collect()
    }

    /// An element after activation, if any, and accumulation.
    fn activated(&self, sum: &Expected, held: f32) -> Expected {
        let Some(activation) = self.activation else { return *sum };
        let mut result = activated_within(sum, activation);
        if self.accumulate {
            result.value += f64::from(held);
            result.bound += ROUND * (result.value.abs() + result.bound);
            result.power = result.power.max(result.value.powi(2));
            result.floor += FLUSH;
        }
        result
    }

    /// `y`: only the product's columns may change.
    fn operand(self, m: u32, product: &[Expected], limit: f64) -> Operand {
        let width = self.held.len() / m as usize;
        let mut want = Vec::with_capacity(self.held.len());
        for (product, held) in product.chunks_exact(self.n).zip(self.held.chunks_exact(width)) {
            let value = |c: usize| if self.accumulate { f64::from(held[c]) } else { f64::NAN };
            let others = |c: usize| Expected::new(value(c), 0.0, 0.0);
            want.extend((0..self.left).map(others));
            want.extend(product.iter().zip(&held[self.left..]).map(|(sum, &held)| self.activated(sum, held)));
            want.extend((self.left + self.n..width).map(others));
        }
        let mut y = Operand::close("y", &[m, width as u32], want, limit);
        if self.accumulate {
            y.data = Data::Floats(self.held);
        }
        y
    }
}

fn split_sum(source: &mut Source, flags: usize, [splits, m, n]: [u32; 3]) -> Job {
    let (has_bias, accumulate) = (flags & 1 != 0, flags & 2 != 0);
    let [left, right] = if flags & 4 != 0 { BESIDE } else { [0, 0] };
    let width = left + n + right;
    let parts = source.rows(splits * m, n);
    let bias = source.normal(width);
    let held = source.rows(m, width);
    let activation = activation([0, 16, 32, 48][flags % 4]);
    let bias_of = has_bias.then_some(&bias);
    let target = Target { held, bias: bias_of, activation, accumulate, left: left as usize, n: n as usize };
    // A sum is a product with ones.
    let (len, depth) = ((m * n) as usize, splits as usize);
    let by_output: Vec<f64> = (0..len * depth).map(|i| f64::from(parts[i % depth * len + i / depth])).collect();
    let ones = Rows::plain(&vec![1.0; depth], depth);
    let sums = product(source, &ones, &by_output, &target.terms(m), [1, len, depth]);
    let y = target.operand(m, &sums, 1e-10);
    let operands = vec![Operand::floats("parts", &[splits * m, n], parts), Operand::floats("bias", &[width], bias), y];
    Job::new(operands, move |rec: &mut Recorder, bound: &Bound| {
        let bias = has_bias.then_some(bound.tensor(1));
        kernels::split_sum(rec, bound.tensor(0), bias, activation, left, accumulate, bound.tensor(2))
    })
}

fn linear(source: &mut Source, kernel: Kernel, weight: WeightType, flags: usize, [m, n, k]: [u32; 3]) -> Job {
    let (has_bias, accumulate, has_norm) = (flags & 1 != 0, flags & 2 != 0, flags & 8 != 0);
    let [left, right] = if flags & 4 != 0 { BESIDE } else { [0, 0] };
    let width = left + n + right;
    let x = source.rows(m, k);
    let bytes = source.weights(weight, n, k);
    let bias = source.normal(width);
    let norm = source.normal(k);
    let held = source.rows(m, width);

    let activation = activation(flags);
    let bias_of = has_bias.then_some(&bias);
    let target = Target { held, bias: bias_of, activation, accumulate, left: left as usize, n: n as usize };
    let sizes = [m as usize, n as usize, k as usize];
    let rows = if has_norm { Rows::normed(&x, norm.clone(), EPS) } else { Rows::plain(&x, k as usize) };
    let product = product(source, &rows, &dequantise(weight, &bytes, k), &target.terms(m), sizes);
    let y = target.operand(m, &product, limit(source, sizes));
    let operands = vec![
        Operand::weights(weight, &[n, k], bytes),
        Operand::floats("bias", &[width], bias),
        Operand::floats("x", &[m, k], x),
        y,
        Operand::floats("norm", &[k], norm),
    ];
    Job::new(operands, move |rec: &mut Recorder, bound: &Bound| {
        let bias = if has_bias { Some(bound.tensor(1)) } else { None };
        let norm = has_norm.then_some(Norm { weight: bound.tensor(4), eps: EPS });
        let linear = Linear { bias, norm, activation, accumulate, y_start: left, ..Linear::new(bound.matrix(0)) };
        kernel(rec, &linear, bound.tensor(2), bound.tensor(3))
    })
}

/// Non-finite results stay non-finite in every tier, and do not affect other rows.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn products_of_non_finite_inputs_stay_non_finite() {
    let [m, n, k] = [9, 5, 72];
    for device in shared::gpus_beside_cpu(Tier::ALL).into_iter().chain([common::cpu()]) {
        for weight in [WeightType::Q8_0, WeightType::Q4_0] {
            for (col, value) in [(0, f32::INFINITY), (33, f32::NEG_INFINITY), (71, f32::NAN)] {
                let mut source = Source::new(Inputs::Normal, 1, false);
                let mut x = source.rows(m, k);
                x[(3 * k + col) as usize] = value;
                let bytes = source.weights(weight, n, k);
                let check = move |content: &[u32]| {
                    let is_as_expected = |(i, &bits): (usize, &u32)| {
                        let is_finite = f32::from_bits(bits).is_finite();
                        if is_finite == (i as u32 / n == 3) { Err(format!("element {i} is {bits:#x}")) } else { Ok(()) }
                    };
                    content.iter().enumerate().try_for_each(is_as_expected)
                };
                let y = Operand::close("y", &[m, n], Vec::new(), 0.0).becomes(Want::Check(Box::new(check)));
                let operands = vec![Operand::weights(weight, &[n, k], bytes), Operand::floats("x", &[m, k], x), y];
                let job = Job::new(operands, |rec: &mut Recorder, bound: &Bound| {
                    kernels::matmul(rec, &Linear::new(bound.matrix(0)), bound.tensor(1), bound.tensor(2))
                });
                let outcome = common::block_on(execute(&device, &job, 1));
                assert!(outcome.is_ok(), "{weight} on {:?}, {value} in column {col}: {outcome:?}", device.tier());
            }
        }
    }
}

/// A row of a batch-invariant product has the same bits in any tile (TILE), whether or not tiles cover the operands
/// exactly (GUARDED), and with any number of rows; so do rows beside one that exceeds half precision, and that row
/// itself. The splits of a long K are the same for any number of rows.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn product_rows_are_bit_equal_in_every_tile_and_batch() {
    for device in shared::gpus_beside_cpu(Tier::ALL).into_iter().chain([common::cpu()]) {
        let sizes = match device.tier() {
            Tier::Scalar => vec![1],
            tier => {
                vec![tier.matrix_size().map_or(64, |size| 4 * size), tier.matrix_size().map_or(128, |size| 8 * size)]
            }
        };
        let tier = match device.tier() {
            // This tier has no product of its own.
            Tier::Subgroups => Tier::Baseline,
            tier => tier,
        };
        let short: (_, &[u32]) = ([256, 288], &[257, 128, 65, 1]);
        let long: (_, &[u32]) = ([20, 4224], &[65, 17, 1]);
        for (weight, ([n, k], counts)) in
            [(WeightType::F32, short), (WeightType::Q4_K, short), (WeightType::Q8_0, long)]
        {
            let n_rows = counts[0];
            let mut source = Source::new(Inputs::Magnitudes, 5, false);
            let sized = source.rows(n_rows, k);
            source.inputs = Inputs::Student;
            let mut x = source.rows(n_rows, k);
            // Every seventh row has another magnitude.
            for row in (3..n_rows as usize).step_by(7) {
                let own = row * k as usize..(row + 1) * k as usize;
                x[own.clone()].copy_from_slice(&sized[own]);
            }
            let bytes = source.weights(weight, n, k);
            let bias = source.normal(n);
            let mut reference: Option<Vec<u32>> = None;
            for &size in &sizes {
                let mut tuning = device.tuning().clone();
                let logs = |n: u32| (0..n).map(|log| 1 << log);
                for (rows, blocks, tokens) in
                    logs(10).flat_map(|rows| logs(8).flat_map(move |b| logs(10).map(move |t| (rows, b, t))))
                {
                    tuning.choose(
                        Bucket { kernel: "matmul", weight, rows, blocks, tokens },
                        Some(Choice::new(tier, size)),
                    );
                }
                let device = device.with_tuning(tuning);
                // In reverse, so that rows have other places in a tile than at first.
                for &m in counts {
                    let first = (n_rows - m) as usize;
                    let matrix = Matrix::declare(&device.target(), "w", weight, n, k).expect("the matrix is valid");
                    matrix.upload(&device, &[bytes.as_slice()]).expect("the weights fit");
                    let x = device.upload("x", &[m, k], &x[first * k as usize..]).expect("x fits");
                    let bias = device.upload("bias", &[n], &bias).expect("the bias fits");
                    let y = Tensor::declare("y", Role::Activations, &[m, n], DType::F32).expect("y is valid");
                    let target = device.target();
                    // As real GPUs have them.
                    let limits = TargetLimits { max_splits: 8, ..target.limits() };
                    let mut rec = Recorder::new(target.with_limits(limits));
                    let activation = Some(Activation::Gelu(Gelu::Exact));
                    let linear =
                        Linear { bias: Some(&bias), activation, batch_invariant: true, ..Linear::new(&matrix) };
                    kernels::matmul(&mut rec, &linear, &x, &y).expect("the operands fit");
                    let recording = rec.finish(&mut Workspace::default());
                    let is_split = k > 4096 && device.is_gpu() && tier != Tier::Scalar;
                    let n_products =
                        1 + u32::from(is_split) + u32::from(tier.rounds_to_half() && weight != WeightType::F32);
                    assert_eq!(recording.n_dispatches(), n_products as usize, "{:?} {weight}", device.tier());
                    device.run(&recording).expect("the product runs");
                    let found = common::block_on(device.read::<u32>(&y)).expect("y is readable");
                    let want = &reference.get_or_insert_with(|| found.clone())[first * n as usize..];
                    let differs = found.iter().zip(want).position(|(a, b)| a != b);
                    assert!(found.iter().all(|&bits| f32::from_bits(bits).is_finite()), "{:?} {weight}", device.tier());
                    assert_eq!(differs, None, "{:?} {weight}: {m} rows in tiles of {size}", device.tier());
                }
            }
        }
    }
}

fn plain(source: &mut Source, [m, n, k]: [u32; 3]) -> Job {
    let x = source.rows(m, k);
    let b: Vec<f32> = source.normal(k * n);
    let sizes @ [rows, cols, depth] = [m as usize, n as usize, k as usize];
    let transposed: Vec<f64> = (0..cols * depth).map(|i| f64::from(b[i % depth * cols + i / depth])).collect();
    let want = product(source, &Rows::plain(&x, depth), &transposed, &vec![[0.0; 2]; rows * cols], sizes);
    let y = Operand::close("y", &[m, n], want, limit(source, sizes));
    Job::new(vec![Operand::floats("x", &[m, k], x), Operand::floats("b", &[k, n], b), y], |rec, bound| {
        kernels::matmul_plain(rec, bound.tensor(0), bound.tensor(1), bound.tensor(2))
    })
}
