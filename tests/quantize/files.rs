//! Files written by `quantize_file`: their contents, and outputs of models loaded from them.

use std::path::{Path, PathBuf};

use super::common::{self, Rng, block_on};
use tilewright::formats::block::dequantize;
use tilewright::formats::gguf::{Gguf, Value, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;
use tilewright::formats::quantize::{QUANTIZABLE, quantize_row};
use tilewright::formats::{BlockType, TensorInfo};
use tilewright::load::convert::{ImportanceMatrix, QuantizeOptions, QuantizeReport, quantize_file};
use tilewright::{Error, LoadOptions, Model};

const BUILTIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories.gguf");
const VOCAB: u32 = 300;

/// A test's own, empty folder.
pub fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("quantize").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A tensor: name, shape, numbers.
type Tensor = (String, Vec<u64>, Vec<f32>);

/// Writes a file of F32 tensors.
fn write(path: &Path, keys: &[(&str, Value<'_>)], tensors: &[Tensor]) {
    let mut header = GgufHeader::new(32);
    keys.iter().for_each(|(key, value)| header.set(key, *value).unwrap());
    let tokens: Vec<String> = (0..VOCAB).map(|i| format!("t{i}")).collect();
    let texts = tokens.iter().map(|token| Value::Str(token));
    header.set_array("tokenizer.ggml.tokens", ValueType::String, texts).unwrap();
    let mut data = vec![];
    for (name, shape, values) in tensors {
        assert_eq!(header.add_tensor(name, shape, BlockType::F32).unwrap(), 4 * values.len() as u64);
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        data.resize(data.len() + header.padding(data.len() as u64), 0);
    }
    std::fs::write(path, [header.to_bytes(), data].concat()).unwrap();
}

/// A Llama of random numbers: two layers of this width, four heads, two for keys and values.
fn llama(path: &Path, width: u64, ffn: u64) {
    let mut rng = Rng::new(5);
    let mut tensors: Vec<Tensor> = vec![];
    let mut add = |name: String, shape: &[u64]| {
        let n: u64 = shape.iter().product();
        let values = (0..n).map(|_| match shape.len() {
            1 => 1.0 + 0.1 * rng.normal() as f32,
            _ => rng.normal() as f32 / (shape[1] as f32).sqrt(),
        });
        tensors.push((name, shape.to_vec(), values.collect()));
    };
    add("token_embd.weight".into(), &[VOCAB.into(), width]);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[u64]| add(format!("blk.{layer}.{name}.weight"), shape);
        add("attn_norm", &[width]);
        add("attn_q", &[width, width]);
        add("attn_k", &[width / 2, width]);
        add("attn_v", &[width / 2, width]);
        add("attn_output", &[width, width]);
        add("ffn_norm", &[width]);
        add("ffn_gate", &[ffn, width]);
        add("ffn_up", &[ffn, width]);
        add("ffn_down", &[width, ffn]);
    }
    add("output_norm.weight".into(), &[width]);
    add("output.weight".into(), &[VOCAB.into(), width]);
    let keys = [
        ("general.architecture", Value::Str("llama")),
        ("general.file_type", Value::U32(0)),
        ("llama.embedding_length", Value::U32(width as u32)),
        ("llama.feed_forward_length", Value::U32(ffn as u32)),
        ("llama.block_count", Value::U32(2)),
        ("llama.attention.head_count", Value::U32(4)),
        ("llama.attention.head_count_kv", Value::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.context_length", Value::U32(64)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("tokenizer.ggml.model", Value::Str("none")),
        ("split.count", Value::U16(1)),
    ];
    write(path, &keys, &tensors);
}

pub fn quantized(input: &Path, output: &Path, options: &QuantizeOptions) -> Result<QuantizeReport, Error> {
    quantize_file(input, output, options, &mut |_, _, _| ())
}

/// A file, and its header.
pub fn open(path: &Path) -> (Vec<u8>, Gguf) {
    let bytes = std::fs::read(path).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    (bytes, gguf)
}

pub fn values(bytes: &[u8], tensor: &TensorInfo) -> Vec<f32> {
    let mut values = vec![f32::NAN; tensor.n_elements() as usize];
    dequantize(tensor.block_type, tensor.bytes(bytes).unwrap(), &mut values).unwrap();
    values
}

fn logits(path: &Path) -> Vec<f32> {
    let device = common::cpu();
    let model = Model::load(&device, path, LoadOptions::default()).unwrap();
    block_on(model.session().unwrap().logits(&[7, 250, 31, 4, 4, 99])).unwrap()
}

/// Relative difference of two vectors.
fn share(want: &[f32], got: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    norm(&mut want.iter().zip(got).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
}

/// A model of matrices with whole blocks per row, in every type: every matrix has it, and logits differ only by its
/// rounding.
#[test]
fn quantised_logits_stay_within_each_types_error() {
    let folder = folder("types");
    let input = folder.join("f32.gguf");
    llama(&input, 256, 512);
    let want = logits(&input);
    // Errors of weights accumulate over 15 matrices.
    let bounds = [
        (BlockType::F32, 0.0),
        (BlockType::F16, 0.002),
        (BlockType::BF16, 0.015),
        (BlockType::Q8_0, 0.03),
        (BlockType::Q6_K, 0.08),
        (BlockType::Q5_K, 0.15),
        (BlockType::Q5_1, 0.15),
        (BlockType::Q5_0, 0.2),
        (BlockType::Q4_K, 0.3),
        (BlockType::Q4_1, 0.35),
        (BlockType::IQ4_NL, 0.3),
        (BlockType::IQ4_XS, 0.3),
        (BlockType::Q4_0, 0.35),
        (BlockType::MXFP4, 0.5),
        (BlockType::Q3_K, 0.6),
        (BlockType::Q2_K, 1.1),
    ];
    assert_eq!(bounds.len(), QUANTIZABLE.len());
    for (block_type, bound) in bounds {
        let output = folder.join(format!("{block_type}.gguf"));
        let report = quantized(&input, &output, &QuantizeOptions::new(block_type)).unwrap();
        let (_, gguf) = open(&output);
        for tensor in &gguf.tensors {
            let want = if tensor.shape.len() == 1 { BlockType::F32 } else { block_type };
            assert_eq!(tensor.block_type, want, "{}", tensor.name);
        }
        assert_eq!(gguf.version, 3);
        assert_eq!(report.written_bytes, std::fs::metadata(&output).unwrap().len());
        assert_eq!(report.source_bytes, std::fs::metadata(&input).unwrap().len());
        let difference = share(&want, &logits(&output));
        println!("{block_type}: {} bytes, logits differ by {difference:.4}", report.written_bytes);
        assert!(difference <= bound, "{block_type}: logits differ by {difference}");
        assert!(bound == 0.0 || difference > bound / 20.0, "{block_type}: logits differ by {difference} alone");
    }
}

/// All keys keep their order, except that the type's come last and those of shards are dropped.
#[test]
fn quantising_keeps_metadata_keys_in_order() {
    let folder = folder("keys");
    let (input, output) = (folder.join("f32.gguf"), folder.join("q8_0.gguf"));
    llama(&input, 64, 96);
    quantized(&input, &output, &QuantizeOptions::new(BlockType::Q8_0)).unwrap();
    let shown = |path: &Path| -> Vec<String> {
        let (_, gguf) = open(path);
        gguf.metadata
            .iter()
            .map(|(key, value)| match value {
                Value::Array(array) => {
                    format!("{key} {:?}", array.iter().map(|value| value.to_string()).collect::<Vec<_>>())
                }
                value => format!("{key} {value:?}"),
            })
            .collect()
    };
    let mut want = shown(&input);
    want.retain(|line| !line.starts_with("split.") && !line.starts_with("general.file_type"));
    want.extend(["general.quantization_version U32(2)".into(), "general.file_type U32(7)".into()]);
    assert_eq!(shown(&output), want);
    // The built-in model has a tokenizer, which must encode as before.
    let output = folder.join("stories.gguf");
    quantized(Path::new(BUILTIN), &output, &QuantizeOptions::new(BlockType::BF16)).unwrap();
    let text = "Once upon a time, there was a  fox: 早 \n";
    let ids = |path: &Path| tilewright::load::tokenizer(path).unwrap().encode(text, true).unwrap();
    assert_eq!(ids(&output), ids(Path::new(BUILTIN)));
}

/// Rows that are not whole blocks get llama.cpp's fallback type, and rows that are not a multiple of 32 get F16.
#[test]
fn rows_that_are_no_whole_blocks_use_a_fallback_type() {
    let folder = folder("fallback");
    let input = folder.join("f32.gguf");
    let random = |n: usize| (0..n).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let tensors = [
        ("blk.0.attn_q.weight".to_owned(), vec![4, 96], random(4 * 96)),
        ("blk.0.attn_k.weight".to_owned(), vec![4, 40], random(4 * 40)),
        ("blk.0.attn_norm.weight".to_owned(), vec![2, 256], random(512)),
        ("blk.0.ffn_gate_inp.weight".to_owned(), vec![4, 256], random(1024)),
        ("blk.0.ffn_down.weight".to_owned(), vec![1, 256], random(256)),
        ("blk.0.attn_q.bias".to_owned(), vec![2, 256], random(512)),
        ("blk.0.ffn_down_exps.weight".to_owned(), vec![3, 2, 256], random(1536)),
        ("position_embd.weight".to_owned(), vec![4, 256], random(1024)),
    ];
    write(&input, &[("general.architecture", Value::Str("any"))], &tensors);
    let cases = [
        (BlockType::Q4_K, BlockType::Q5_0),
        (BlockType::Q5_K, BlockType::Q5_1),
        (BlockType::Q6_K, BlockType::Q8_0),
        (BlockType::Q2_K, BlockType::Q4_0),
        (BlockType::Q3_K, BlockType::Q4_0),
        (BlockType::IQ4_XS, BlockType::IQ4_NL),
        (BlockType::Q4_0, BlockType::Q4_0),
        (BlockType::MXFP4, BlockType::MXFP4),
    ];
    for (wanted, fallback) in cases {
        let output = folder.join(format!("{wanted}.gguf"));
        let report = quantized(&input, &output, &QuantizeOptions::new(wanted)).unwrap();
        let types: Vec<_> = open(&output).1.tensors.iter().map(|tensor| tensor.block_type).collect();
        let f32 = BlockType::F32;
        // In llama.cpp's order: the table, then the layer's tensors by name.
        assert_eq!(types, [f32, BlockType::F16, f32, f32, fallback, f32, wanted, f32], "{wanted}");
        let fell_back: Vec<_> = report.tensors.iter().map(|tensor| tensor.fell_back).collect();
        assert_eq!(fell_back, [false, true, false, false, fallback != wanted, false, false, false], "{wanted}");
    }
    // Floats have no blocks.
    quantized(&input, &folder.join("bf16.gguf"), &QuantizeOptions::new(BlockType::BF16)).unwrap();
    let types: Vec<_> = open(&folder.join("bf16.gguf")).1.tensors.iter().map(|tensor| tensor.block_type).collect();
    let (f32, bf16) = (BlockType::F32, BlockType::BF16);
    assert_eq!(types, [f32, bf16, f32, f32, bf16, f32, bf16, f32]);
}

/// A file's shards become one file without the shard keys; a missing shard is named.
#[test]
fn sharded_input_becomes_one_quantised_file() {
    let folder = folder("shards");
    let path = |shard: usize| folder.join(format!("m-0000{shard}-of-00002.gguf"));
    let values = |shard: usize| (0..512).map(|i| ((i * 37 + shard) % 101) as f32 / 50.0 - 1.0).collect::<Vec<f32>>();
    let write_shard = |shard: usize| {
        let keys = [("split.no", Value::U16(shard as u16 - 1)), ("split.count", Value::U16(2))];
        write(&path(shard), &keys, &[(format!("blk.{shard}.attn_q.weight"), vec![2, 256], values(shard))]);
    };
    write_shard(1);
    let output = folder.join("out.gguf");
    let error = quantized(&path(1), &output, &QuantizeOptions::new(BlockType::F16)).unwrap_err().to_string();
    assert!(error.contains("m-00002-of-00002.gguf"), "{error}");
    write_shard(2);
    quantized(&path(1), &output, &QuantizeOptions::new(BlockType::F16)).unwrap();
    let (bytes, gguf) = open(&output);
    assert!(gguf.metadata.iter().all(|(key, _)| !key.starts_with("split.")));
    assert_eq!(gguf.tensors.len(), 2);
    for (shard, tensor) in (1..).zip(&gguf.tensors) {
        assert_eq!(tensor.name, format!("blk.{shard}.attn_q.weight"));
        let want: Vec<u8> = values(shard).iter().flat_map(|x| half_bits(*x).to_le_bytes()).collect();
        assert_eq!(tensor.bytes(&bytes).unwrap(), want);
    }
}

/// The nearest f16 to a number in its range, by another method than the library's: the closest of all f16 of its sign.
fn half_bits(x: f32) -> u16 {
    let above = (0..0x7c00).collect::<Vec<u16>>().partition_point(|&bits| half_value(bits) <= x.abs()) as u16;
    let below = above - 1;
    let sign = if x < 0.0 { 0x8000 } else { 0 };
    let difference = |bits: u16| (half_value(bits) - x.abs()).abs();
    let is_above =
        difference(above) < difference(below) || (difference(above) == difference(below) && above.is_multiple_of(2));
    sign | if is_above { above } else { below }
}

fn half_value(bits: u16) -> f32 {
    let mut value = [0.0];
    dequantize(BlockType::F16, &bits.to_le_bytes(), &mut value).unwrap();
    value[0]
}

/// A requantised tensor is quantised from its values; one that already has the type keeps its bytes.
#[test]
fn quantised_input_is_requantised_or_copied() {
    let folder = folder("again");
    let (f32, q8_0) = (folder.join("f32.gguf"), folder.join("q8_0.gguf"));
    llama(&f32, 256, 512);
    quantized(&f32, &q8_0, &QuantizeOptions::new(BlockType::Q8_0)).unwrap();
    for block_type in [BlockType::Q4_K, BlockType::Q8_0, BlockType::F32] {
        let output = folder.join("again.gguf");
        let mut options = QuantizeOptions::new(block_type);
        options.overwrite = true;
        quantized(&q8_0, &output, &options).unwrap();
        let ((source_bytes, source), (bytes, gguf)) = (open(&q8_0), open(&output));
        for (source, tensor) in source.tensors.iter().zip(&gguf.tensors) {
            let values = values(&source_bytes, source);
            let row_len = *tensor.shape.last().unwrap() as usize;
            let mut want = vec![0; tensor.size_bytes as usize];
            let row_bytes = want.len() / (values.len() / row_len);
            for (row, want) in values.chunks(row_len).zip(want.chunks_mut(row_bytes)) {
                quantize_row(tensor.block_type, row, None, want).unwrap();
            }
            if source.block_type == tensor.block_type {
                assert_eq!(source.bytes(&source_bytes).unwrap(), tensor.bytes(&bytes).unwrap(), "{}", tensor.name);
            } else {
                assert!(want == tensor.bytes(&bytes).unwrap(), "{}", tensor.name);
            }
        }
    }
}

/// A number that cannot be stored gives an error that names file, tensor and row, and leaves no file behind.
#[test]
fn non_finite_tensor_values_are_refused_by_place() {
    let folder = folder("broken");
    let (input, output) = (folder.join("in.gguf"), folder.join("out.gguf"));
    for (bad, expected) in
        [(f32::NAN, "NaN at element 5"), (f32::INFINITY, "inf at element 5"), (1e20, "1e20 in block 0")]
    {
        for name in ["blk.0.attn_q.weight", "blk.0.attn_norm.weight"] {
            if bad == 1e20 && name.contains("norm") {
                continue;
            }
            let mut values = vec![0.5; 512];
            values[261] = bad;
            let tensors = [("ok.weight".into(), vec![2, 256], vec![0.5; 512]), (name.into(), vec![2, 256], values)];
            write(&input, &[("general.architecture", Value::Str("any"))], &tensors);
            let error = quantized(&input, &output, &QuantizeOptions::new(BlockType::Q6_K)).unwrap_err();
            assert!(matches!(&error, Error::InFile { source, .. } if matches!(**source, Error::Format { .. })));
            let message = error.to_string();
            let found = format!("in.gguf: quantize: row 1 of tensor `{name}`");
            assert!(message.contains(&found) && message.contains(expected), "{message}");
            let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left, ["in.gguf"]);
        }
    }
}

/// An existing file is kept, and so is the input, whatever its name.
#[test]
fn existing_output_file_is_not_overwritten() {
    let folder = folder("replaced");
    let (input, output) = (folder.join("in.gguf"), folder.join("out.gguf"));
    llama(&input, 64, 96);
    let before = std::fs::read(&input).unwrap();
    std::fs::write(&output, "mine").unwrap();
    let mut options = QuantizeOptions::new(BlockType::Q8_0);
    let refused =
        |output: &Path, options: &QuantizeOptions| quantized(&input, output, options).unwrap_err().to_string();
    assert!(refused(&output, &options).ends_with("out.gguf: exists already"));
    assert_eq!(std::fs::read(&output).unwrap(), b"mine");
    options.overwrite = true;
    assert!(refused(&folder.join(".").join("in.gguf"), &options).contains("is the input"));
    assert_eq!(std::fs::read(&input).unwrap(), before);
    quantized(&input, &output, &options).unwrap();
    open(&output);
    options.block_type = BlockType::IQ2_S;
    assert!(refused(&output, &options).contains("type is IQ2_S, which is not supported (supported: F32 F16 BF16"));
}

/// An importance matrix in both formats: sums over calls of `name`, with `counts` calls.
fn importance_files(name: &str, sums: &[f32], counts: &[f32]) -> [Vec<u8>; 2] {
    let mut header = GgufHeader::new(32);
    header.set("general.type", Value::Str("imatrix")).unwrap();
    let (n_matrices, n_columns) = (counts.len() as u64, (sums.len() / counts.len()) as u64);
    let mut data = vec![];
    for (suffix, columns, values) in [("in_sum2", n_columns, sums), ("counts", 1, counts)] {
        header.add_tensor(&format!("{name}.{suffix}"), &[n_matrices, columns], BlockType::F32).unwrap();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        data.resize(data.len() + header.padding(data.len() as u64), 0);
    }
    let gguf = [header.to_bytes(), data].concat();
    let mut dat = 1_i32.to_le_bytes().to_vec();
    dat.extend((name.len() as i32).to_le_bytes());
    dat.extend(name.as_bytes());
    dat.extend((counts[0] as i32).to_le_bytes());
    dat.extend((sums.len() as i32).to_le_bytes());
    dat.extend(sums.iter().flat_map(|value| value.to_le_bytes()));
    // Additions of newer writers: chunks, and a text.
    dat.extend(7_i32.to_le_bytes());
    [gguf, dat]
}

/// Importances in both formats change only their own tensor, to its expected bytes.
#[test]
fn importance_matrix_changes_only_its_tensor() {
    let folder = folder("importances");
    let input = folder.join("in.gguf");
    llama(&input, 256, 512);
    let name = "blk.1.ffn_up.weight";
    let sums: Vec<f32> = (0..256).map(|i| ((i * 29) % 64) as f32 * 8.0).collect();
    let importances: Vec<f32> = sums.iter().map(|sum| sum / 8.0).collect();
    let (source_bytes, source) = open(&input);
    for (format, file) in ["gguf", "dat"].into_iter().zip(importance_files(name, &sums, &[8.0])) {
        let path = folder.join(format!("imatrix.{format}"));
        std::fs::write(&path, file).unwrap();
        let found = ImportanceMatrix::open(&path).unwrap();
        assert_eq!((found.len(), found.get(name).unwrap()), (1, &importances[..]));
        for block_type in [BlockType::Q4_K, BlockType::Q4_0] {
            let output = folder.join(format!("{block_type}.{format}.gguf"));
            let mut options = QuantizeOptions::new(block_type);
            options.importance = Some(found.clone());
            let report = quantized(&input, &output, &options).unwrap();
            let weighted: Vec<_> = report.tensors.iter().filter(|tensor| tensor.weighted).map(|t| &t.name).collect();
            assert_eq!(weighted, [name]);
            let (bytes, gguf) = open(&output);
            assert_eq!(gguf.metadata.get_str("quantize.imatrix.file").unwrap(), path.file_name().unwrap().to_str());
            let tensor = gguf.tensor(name).unwrap();
            let values = values(&source_bytes, source.tensor(name).unwrap());
            let mut want = vec![0; tensor.size_bytes as usize];
            let mut plain = want.clone();
            let row_bytes = want.len() / 512;
            for (row, (want, plain)) in
                values.chunks(256).zip(want.chunks_mut(row_bytes).zip(plain.chunks_mut(row_bytes)))
            {
                quantize_row(block_type, row, Some(&importances), want).unwrap();
                quantize_row(block_type, row, None, plain).unwrap();
            }
            assert!(tensor.bytes(&bytes).unwrap() == want && want != plain, "{block_type}");
            // Their purpose: a smaller error when columns are weighted by importance.
            let error = |blocks: &[u8]| {
                let mut got = vec![0.0; values.len()];
                dequantize(block_type, blocks, &mut got).unwrap();
                let squares = values.iter().zip(&got).enumerate();
                squares.map(|(i, (a, b))| f64::from((a - b).powi(2) * importances[i % 256])).sum::<f64>()
            };
            let gain = error(&want) / error(&plain);
            println!("{block_type}: {gain:.3} of the error without importances");
            assert!(gain < 0.98, "{block_type}: {gain}");
        }
    }
}

/// Each expert has its own importances, uniform if no text reached it; a wrong number of them is refused.
#[test]
fn importance_matrix_must_fit_its_tensor_or_experts() {
    let folder = folder("experts");
    let (input, output) = (folder.join("in.gguf"), folder.join("out.gguf"));
    let values: Vec<f32> = (0..3 * 2 * 256).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let name = "blk.0.ffn_down_exps.weight";
    write(&input, &[("general.architecture", Value::Str("any"))], &[(name.into(), vec![3, 2, 256], values.clone())]);
    let sums: Vec<f32> = (0..768).map(|i| ((i * 13) % 50) as f32).collect();
    let [gguf, _] = importance_files(name, &sums, &[2.0, 0.0, 1.0]);
    let mut options = QuantizeOptions::new(BlockType::Q5_K);
    options.importance = Some(ImportanceMatrix::parse(&gguf).unwrap());
    quantized(&input, &output, &options).unwrap();
    let (bytes, written) = open(&output);
    let blocks = written.tensors[0].bytes(&bytes).unwrap();
    for row in 0..6 {
        let of = |i: usize| match row / 2 {
            0 => sums[i] / 2.0,
            1 => 1.0,
            _ => sums[512 + i],
        };
        let mut want = [0; 176];
        let importance: Vec<f32> = (0..256).map(of).collect();
        quantize_row(BlockType::Q5_K, &values[row * 256..][..256], Some(&importance), &mut want).unwrap();
        assert!(blocks[row * 176..][..176] == want, "row {row}");
    }
    let [gguf, _] = importance_files(name, &sums[..512], &[1.0, 1.0]);
    options.importance = Some(ImportanceMatrix::parse(&gguf).unwrap());
    options.overwrite = true;
    let message = quantized(&input, &output, &options).unwrap_err().to_string();
    assert!(
        message.contains("importance matrix of `blk.0.ffn_down_exps.weight` is 512, expected 768 values"),
        "{message}"
    );
}

/// Invalid or truncated importance matrices are refused by name and offset.
#[test]
fn malformed_importance_matrix_is_refused_by_place() {
    let refused = |bytes: &[u8]| ImportanceMatrix::parse(bytes).unwrap_err().to_string();
    let [gguf, dat] = importance_files("a.weight", &[1.0, 2.0], &[2.0]);
    assert!(refused(b"").contains("number of entries at byte 0"));
    assert!(refused(&[0; 4]).contains("number of entries at byte 0 is 0, expected 1 or more"));
    assert!(refused(&[255; 64]).contains("number of entries at byte 0 is -1"));
    for len in 0..dat.len() - 4 {
        refused(&dat[..len]);
    }
    for len in 0..gguf.len() - 28 {
        refused(&gguf[..len]);
    }
    let [gguf, dat] = importance_files("a.weight", &[1.0, f32::NAN], &[2.0]);
    assert!(refused(&gguf).contains("entry `a.weight` at byte 0 is NaN at 1"));
    assert!(refused(&dat).contains("entry `a.weight` at byte 0 is NaN at 1"));
    let mut huge = 1_i32.to_le_bytes().to_vec();
    huge.extend(i32::MAX.to_le_bytes());
    assert!(refused(&huge).contains("name of entry 0 at byte 8 is 0 bytes to the end of the file"));
    let mut header = GgufHeader::new(32);
    header.add_tensor("a", &[1], BlockType::F32).unwrap();
    assert!(refused(&[header.to_bytes(), vec![0; 4]].concat()).contains("names ending in `.in_sum2`"));
}
