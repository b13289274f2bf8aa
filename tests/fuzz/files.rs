//! Model files: GGUF, safetensors, lists of shards, and blocks of weights.

use std::path::Path;
use std::sync::OnceLock;

use tilewright::formats::block::dequantize;
use tilewright::formats::{BlockType, Gguf, Parsed, Safetensors, ShardIndex};
use tilewright::load::ModelFile;
use tilewright::{Error, LoadOptions, Model, WeightType};

use super::builder::{GgufFile, json_entry, safetensors};
use super::hostile::{memory_limit, work_limit};
use super::kernels::any_target;
use super::{common, fuzz, inputs, mutate};
use crate::allocator::measure;

/// Parses within the bounds on memory and work for hostile files.
fn read<T>(bytes: &[u8], parse: impl FnOnce(&[u8], u64) -> Result<T, Error>) -> Result<T, Error> {
    let (result, asked) = measure(|| parse(bytes, bytes.len() as u64));
    let (memory, work) = (memory_limit(bytes.len()), work_limit(bytes.len()));
    assert!(asked.peak <= memory && asked.total <= work, "{asked:?} for {} bytes", bytes.len());
    if let Err(error) = &result {
        let message = error.to_string();
        assert!(!message.is_empty() && message.len() < 2000 && !message.contains('\0'), "{message}");
    }
    result
}

/// GGUF files of the test data, small models.
fn models() -> &'static [Vec<u8>] {
    static MODELS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let folder = common::find_data(Path::new("tiny-random")).expect("committed test data");
        let mut paths: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .flat_map(|entry| std::fs::read_dir(entry.unwrap().path()).unwrap())
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
            .collect();
        paths.sort();
        assert!(paths.len() > 10);
        paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
    })
}

fn header_len(gguf: &Gguf) -> usize {
    gguf.tensors.iter().map(|tensor| tensor.range().start).min().unwrap_or(0) as usize
}

#[test]
fn gguf_parse() {
    fuzz("gguf_parse", 3000, |rng| {
        let mut bytes = match rng.below(4) {
            0 => models()[rng.below(models().len())].clone(),
            _ => GgufFile::random(rng).build().bytes,
        };
        let end = Gguf::parse(&bytes, bytes.len() as u64).map_or(bytes.len(), |gguf| header_len(&gguf));
        mutate::bytes(rng, &mut bytes, end);
        let Ok(gguf) = read(&bytes, Gguf::parse) else { return false };
        // An accepted file is readable: every value, and the bytes of every tensor.
        for (key, value) in gguf.metadata.iter() {
            assert!(gguf.metadata.get(key).is_some());
            value.as_str();
            let _ =
                (gguf.metadata.get_str_array(key), gguf.metadata.get_u32_array(key), gguf.metadata.get_f32_array(key));
        }
        for tensor in &gguf.tensors {
            assert_eq!(tensor.bytes(&bytes).unwrap().len() as u64, tensor.range().end - tensor.range().start);
        }
        // Parsing the header in parts gives the same result.
        let part = rng.below(bytes.len() + 1);
        match Gguf::parse_prefix(&bytes[..part], bytes.len() as u64) {
            Ok(Parsed::Complete(part)) => assert_eq!(part.tensors, gguf.tensors),
            Ok(_) => {}
            Err(error) => panic!("refused for its beginning: {error}"),
        }
        true
    });
}

#[test]
fn gguf_to_plan() {
    fuzz("gguf_to_plan", 300, |rng| {
        let mut bytes = models()[rng.below(models().len())].clone();
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        // Changes a key's value, or bytes of the tensor list.
        for _ in 0..1 + rng.below(3) {
            let key = gguf.metadata.iter().nth(rng.below(gguf.metadata.len())).unwrap().0;
            // An earlier change may have renamed it.
            let Some(at) = bytes.windows(key.len()).position(|window| window == key.as_bytes()) else { continue };
            let at = at + key.len() + 4;
            match rng.below(4) {
                0 => mutate::number(rng, &mut bytes[at..]),
                1 => {
                    let small = [rng.below(65) as u8, 0, 0, 0];
                    bytes[at..at + 4].copy_from_slice(&small);
                }
                2 => bytes[at..at + 4].copy_from_slice(&(rng.below(64) as f32 / 8.0 - 1.0).to_le_bytes()),
                _ => {
                    let at = rng.below(header_len(&gguf));
                    mutate::number(rng, &mut bytes[at..]);
                }
            }
        }
        let len = bytes.len();
        let (target, context) = (any_target(rng), rng.pick(&[None, Some(1), Some(77), Some(4096), Some(u32::MAX)]));
        let (plan, asked) = measure(|| {
            let options = LoadOptions { context_length: context, ..LoadOptions::default() };
            Model::plan_file(&target, &ModelFile::from_gguf_bytes(bytes)?, &options)
        });
        assert!(asked.peak <= 4 * len + (64 << 20), "{asked:?} for {len} bytes");
        plan.is_ok_and(|plan| plan.total_bytes() > 0)
    });
}

#[test]
fn safetensors_parse() {
    fuzz("safetensors_parse", 3000, |rng| {
        let mut bytes = {
            let mut end = 0;
            let entries = (0..rng.below(6)).map(|i| {
                let (rows, cols) = (rng.below(5), rng.below(5));
                let (dtype, size) = rng.pick(&[("F32", 4), ("F16", 2), ("I64", 8), ("U8", 1)]);
                let begin = end;
                end += rows * cols * size;
                json_entry(&format!("layers.{i}.weight"), dtype, &format!("[{rows},{cols}]"), begin, end)
            });
            let entries: Vec<String> = entries.collect();
            safetensors(format!("{{{}}}", entries.join(",")), end)
        };
        let end = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len).saturating_add(8));
        if rng.below(16) > 0 {
            mutate::bytes(rng, &mut bytes, end.try_into().unwrap_or(usize::MAX));
        }
        let Ok(file) = read(&bytes, Safetensors::parse) else { return false };
        for tensor in &file.tensors {
            assert_eq!(tensor.bytes(&bytes).unwrap().len() as u64, tensor.range().end - tensor.range().start);
            assert!(file.tensor(&tensor.name).is_some());
        }
        true
    });
}

#[test]
fn st_index() {
    fuzz("st_index", 3000, |rng| {
        let mut bytes = {
            let n_shards = 1 + rng.below(4);
            let entries: Vec<String> = (0..rng.below(12))
                .map(|i| format!(r#""t{i}":"model-{:05}-of-{n_shards:05}.safetensors""#, 1 + rng.below(n_shards)))
                .collect();
            format!(r#"{{"metadata":{{"total_size":9}},"weight_map":{{{}}}}}"#, entries.join(",")).into_bytes()
        };
        if rng.below(16) > 0 {
            let end = bytes.len();
            mutate::bytes(rng, &mut bytes, end);
        }
        let Ok(index) = read(&bytes, |bytes, _| ShardIndex::parse(bytes)) else { return false };
        for shard in index.shards() {
            let is_plain = !shard.is_empty() && !shard.contains(['/', '\\', '\0', ':']) && !shard.starts_with('.');
            assert!(is_plain, "{shard:?} is not a plain file name");
        }
        true
    });
}

/// Blocks of arbitrary bits, against independent decoders.
#[test]
fn dequant_block() {
    fuzz("dequant_block", 2000, |rng| {
        let weight = rng.pick(&WeightType::ALL);
        let block_type = BlockType::ALL.iter().copied().find(|block_type| block_type.name() == weight.name()).unwrap();
        let n = 1 + rng.below(4);
        let (len, size) = (block_type.block_len() as usize, block_type.block_bytes() as usize);
        let mut blocks: Vec<u8> = (0..n * size).map(|_| rng.next() as u8).collect();
        if rng.below(4) == 0 {
            mutate::bytes(rng, &mut blocks, n * size);
        }
        let mut got = vec![0.0; n * len];
        let result = dequantize(block_type, &blocks, &mut got);
        assert_eq!(result.is_ok(), blocks.len() == n * size, "{block_type}");
        if result.is_err() {
            return false;
        }
        let want = inputs::dequantise(weight, &blocks, (n * len) as u32);
        assert_eq!(want.len(), got.len());
        for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
            let is_equal = match want.is_finite() && want.abs() <= f64::from(f32::MAX) {
                true => (f64::from(got) - want).abs() <= 1e-6 * want.abs().max(1e-30),
                false => !got.is_finite(),
            };
            assert!(is_equal, "{block_type}, value {i}: {got:e} and not {want:e}");
        }
        true
    });
}
