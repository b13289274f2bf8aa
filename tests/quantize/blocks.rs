//! Quantisers against llama.cpp's bytes, and their guarantees for any row.

use tilewright::Error;
use tilewright::formats::block::dequantize;
use tilewright::formats::quantize::{QUANTIZABLE, quantize_row};
use tilewright::formats::{BlockType, Safetensors};

const ROW: usize = 512;

/// SplitMix64 as in `scripts/quantize_vectors.py`.
struct SplitMix(u64);

impl SplitMix {
    /// A multiple of 2^-23 in [-1, 1).
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f64 / (1 << 23) as f64 - 1.0
    }
}

/// The rows of `scripts/quantize_vectors.py`.
fn rows() -> Vec<Vec<f32>> {
    let row = |kind: u64| {
        let mut rng = SplitMix(1000 + kind);
        let [a, b, c, d]: [Vec<f64>; 4] = std::array::from_fn(|_| (0..ROW).map(|_| rng.unit()).collect());
        let value = |i: usize| match kind {
            1 => (a[i] + b[i] + c[i] + d[i]) * 0.02,
            2 => a[i] * a[i] * a[i] * a[i] * a[i],
            3 if i < 256 => 0.0,
            4 if i == 300 => 12.5,
            4 => a[i] * 0.01,
            5 => a[i] * 2_f64.powi(-18),
            6 => a[i] * 2_f64.powi(-40),
            7 => a[i] * 4096.0,
            8 => a[i] + 3.0,
            9 => a[i] * 0.1 - 0.5,
            10 => 0.37,
            // Without negative zeros, which Python does not produce.
            11 => (a[i] * 4.0).round_ties_even() / 4.0 + 0.0,
            _ => a[i],
        };
        (0..ROW).map(|i| value(i) as f32).collect()
    };
    (0..12).map(row).collect()
}

/// The importances in that script.
fn importances() -> Vec<f32> {
    let mut rng = SplitMix(7);
    let mut number = |i: usize| {
        let a = rng.unit();
        if i % 37 == 5 { 0.0 } else { (a * a * a * a * 10.0) as f32 }
    };
    (0..ROW).map(&mut number).collect()
}

fn size(block_type: BlockType) -> usize {
    ROW / block_type.block_len() as usize * block_type.block_bytes() as usize
}

fn quantized(block_type: BlockType, row: &[f32], importance: Option<&[f32]>) -> Result<Vec<u8>, Error> {
    let mut out = vec![0xa5; size(block_type)];
    quantize_row(block_type, row, importance, &mut out)?;
    Ok(out)
}

/// Root mean square error of a row's blocks.
fn error(block_type: BlockType, row: &[f32], blocks: &[u8]) -> f64 {
    let mut values = vec![f32::NAN; ROW];
    dequantize(block_type, blocks, &mut values).unwrap();
    let squares = row.iter().zip(&values).map(|(x, y)| f64::from(x - y).powi(2));
    (squares.sum::<f64>() / ROW as f64).sqrt()
}

/// Every byte equals llama.cpp's, with and without importances.
#[test]
fn quantised_blocks_match_llama_cpp_byte_for_byte() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quantize/vectors.safetensors");
    let file = std::fs::read(path).unwrap();
    let vectors = Safetensors::parse(&file, file.len() as u64).unwrap();
    let importances = importances();
    let mut failed = vec![];
    for tensor in &vectors.tensors {
        let (name, kind) = tensor.name.split_once('.').unwrap();
        let block_type = *BlockType::ALL.iter().find(|block_type| block_type.name() == name).unwrap();
        let importance = (kind == "important").then_some(&importances[..]);
        for (i, (row, want)) in rows().iter().zip(tensor.bytes(&file).unwrap().chunks(size(block_type))).enumerate() {
            let got = quantized(block_type, row, importance).unwrap();
            if got != want {
                let different = got.iter().zip(want).filter(|(got, want)| got != want).count();
                let errors = (error(block_type, row, &got), error(block_type, row, want));
                failed.push(format!("{}, row {i}: {different} bytes differ, errors {errors:?}", tensor.name));
            }
        }
    }
    assert_eq!(vectors.tensors.len(), 26);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Relative root mean square errors of uniform and normal numbers are below each type's known error.
#[test]
fn quantisation_error_stays_below_each_types_bound() {
    let bounds = [
        (BlockType::F32, 0.0),
        (BlockType::F16, 0.0003),
        (BlockType::BF16, 0.003),
        (BlockType::Q8_0, 0.006),
        (BlockType::Q6_K, 0.022),
        (BlockType::Q5_K, 0.04),
        (BlockType::Q5_1, 0.04),
        (BlockType::Q5_0, 0.05),
        (BlockType::Q4_K, 0.08),
        (BlockType::Q4_1, 0.08),
        (BlockType::IQ4_NL, 0.09),
        (BlockType::IQ4_XS, 0.09),
        (BlockType::Q4_0, 0.11),
        (BlockType::MXFP4, 0.15),
        (BlockType::Q3_K, 0.18),
        (BlockType::Q2_K, 0.32),
    ];
    assert_eq!(bounds.len(), QUANTIZABLE.len());
    let rows = rows();
    for (block_type, bound) in bounds {
        for row in &rows[..2] {
            let size = (row.iter().map(|x| f64::from(x * x)).sum::<f64>() / ROW as f64).sqrt();
            let share = error(block_type, row, &quantized(block_type, row, None).unwrap()) / size;
            println!("{block_type}: {share:.5}");
            assert!(share <= bound, "{block_type}: an error of {share}, above {bound}");
            assert!(bound == 0.0 || share > bound / 4.0, "{block_type}: an error of {share}, far below {bound}");
        }
    }
}

/// Zeros stay zero, the smallest numbers stay or become zero, and an outlier survives with all numbers far from it.
#[test]
fn rows_of_zeros_subnormals_or_outliers_are_quantised() {
    for block_type in QUANTIZABLE {
        for importance in [None, Some(vec![1.0; ROW]), Some(vec![0.0; ROW])] {
            let importance = importance.as_deref();
            for zero in [0.0, -0.0] {
                let blocks = quantized(block_type, &[zero; ROW], importance).unwrap();
                assert_eq!(error(block_type, &[0.0; ROW], &blocks), 0.0, "{block_type}: zeros");
            }
            let tiny: Vec<f32> = (0..ROW).map(|i| f32::from_bits(i as u32)).collect();
            let blocks = quantized(block_type, &tiny, importance).unwrap();
            assert!(error(block_type, &tiny, &blocks) < 1e-38, "{block_type}: subnormal numbers");
        }
        let mut row = vec![0.0; ROW];
        row[100] = -1000.0;
        let blocks = quantized(block_type, &row, None).unwrap();
        let share = error(block_type, &row, &blocks) / (1000.0 / (ROW as f64).sqrt());
        // IQ4_NL's level nearest to zero is 1; MXFP4's scale is a power of two.
        let bound = if block_type == BlockType::MXFP4 { 0.25 } else { 0.05 };
        assert!(share < bound, "{block_type}: an outlier with an error of {share}");
    }
}

/// A number that cannot be stored is refused by name and position; nothing silently becomes infinite.
#[test]
fn numbers_out_of_range_are_refused() {
    for block_type in QUANTIZABLE {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = vec![1.0; ROW];
            row[300] = bad;
            let error = quantized(block_type, &row, None).unwrap_err();
            let found = format!("quantize: `row` is {bad} at element 300, expected finite numbers");
            assert_eq!(error.to_string(), found, "{block_type}");
        }
        let mut row = vec![1.0; ROW];
        row[300] = 3e38;
        match (block_type, quantized(block_type, &row, None)) {
            (BlockType::F32 | BlockType::BF16 | BlockType::MXFP4, written) => drop(written.unwrap()),
            (_, written) => {
                let error = written.unwrap_err().to_string();
                let block = 300 / block_type.block_len();
                let found =
                    format!("quantize: `row` is 3e38 in block {block}, expected magnitudes that {block_type} can");
                assert!(error.starts_with(&found), "{error}");
            }
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let refused = |block_type, len: usize, importance: Option<&[f32]>, size: usize| {
        quantize_row(block_type, &vec![0.5; len], importance, &mut vec![0; size]).unwrap_err().to_string()
    };
    let q4_k = BlockType::Q4_K;
    let found = "quantize: `row` is 384 elements, expected a multiple of 256 elements, the block of Q4_K";
    assert_eq!(refused(q4_k, 384, None, 216), found);
    assert!(refused(q4_k, 256, None, 143).contains("`out` is 143 bytes"));
    assert!(refused(q4_k, 256, Some(&[1.0; 255]), 144).contains("`importance` is 255 elements"));
    for bad in [f32::NAN, -1.0] {
        let mut importance = [1.0; 256];
        importance[9] = bad;
        assert!(refused(q4_k, 256, Some(&importance), 144).contains(&format!("`importance` is {bad} at element 9")));
    }
    assert!(refused(BlockType::IQ2_S, 256, None, 82).contains("IQ2_S, which is not supported (supported: F32 F16"));
}
