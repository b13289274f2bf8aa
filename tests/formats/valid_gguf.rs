//! Unusual but valid GGUF files, and their parsed contents.

use super::builder::{ARRAY, BOOL, F32, GgufFile, Rng, STRING, U8, U32, U64, array, entry, tensor, text};
use super::hostile::memory_limit;
use crate::allocator::peak_bytes;
use tilewright::Error;
use tilewright::formats::gguf::Value;
use tilewright::formats::{BlockType, Gguf, Parsed};

fn parse(file: &GgufFile) -> Gguf {
    let bytes = file.build().bytes;
    Gguf::parse(&bytes, bytes.len() as u64).unwrap()
}

#[test]
fn gguf_tensors_are_found_at_their_offsets() {
    for seed in 0..50 {
        let file = GgufFile::random(&mut Rng(seed));
        let built = file.build();
        let gguf = parse(&file);
        assert_eq!((gguf.version, gguf.alignment), (file.version, 32));
        assert_eq!(gguf.data_offset, built.header_end.next_multiple_of(32));
        assert_eq!(gguf.tensors.len(), file.tensors.len());
        for ((read, written), range) in gguf.tensors.iter().zip(&file.tensors).zip(&built.data) {
            assert_eq!(read.name.as_bytes(), written.name);
            assert_eq!(read.shape.iter().rev().copied().collect::<Vec<_>>(), written.dimensions);
            assert_eq!(read.block_type.ggml_id(), Some(written.type_number));
            assert_eq!(read.range(), range.clone());
            assert_eq!(read.n_elements(), written.dimensions.iter().product::<u64>());
            assert_eq!(gguf.tensor(&read.name), Some(read));
        }
        assert_eq!(gguf.tensor("blk.0.weigh"), None);
        let keys: Vec<_> = gguf.metadata.iter().map(|(key, _)| key.as_bytes().to_vec()).collect();
        assert_eq!(keys, file.entries.iter().map(|entry| entry.key.clone()).collect::<Vec<_>>());
    }
}

#[test]
fn unusual_but_valid_gguf_files_load() {
    assert!(parse(&GgufFile::empty()).tensors.is_empty());
    assert!(parse(&GgufFile { version: 2, ..GgufFile::empty() }).metadata.is_empty());

    let mut file = GgufFile::random(&mut Rng(1));
    file.pads_end = false;
    assert_eq!(parse(&file).tensors.len(), file.tensors.len());

    for alignment in [8_u32, 64, 4096, 2 << 20] {
        let mut file = GgufFile::random(&mut Rng(2));
        file.alignment = alignment.into();
        file.entries.push(entry("general.alignment", U32, alignment.to_le_bytes()));
        let (gguf, built) = (parse(&file), file.build());
        assert_eq!(gguf.alignment, alignment);
        assert!(gguf.tensors.iter().map(|tensor| tensor.range()).eq(built.data));
    }

    // Only a vocabulary, with and without trailing padding.
    let mut file = GgufFile::random(&mut Rng(3));
    file.tensors.clear();
    let padding = file.build().header_end.next_multiple_of(32) - file.build().header_end;
    for trailing in [0, padding as usize] {
        file.trailing = trailing;
        assert!(parse(&file).tensors.is_empty());
    }

    // Everything at its limit: names of 64 bytes, a key of 65,535, four dimensions, four nested arrays.
    let mut file = GgufFile::empty();
    let mut value = array(ARRAY, 1, []).repeat(3);
    value.extend(array(STRING, 2, [text("x"), text("")].concat()));
    file.entries.push(entry(&"k".repeat(65_535), ARRAY, value));
    file.tensors.push(tensor(&"w".repeat(64), &[1, 2, 3, 4], 0));
    let gguf = parse(&file);
    assert_eq!(gguf.tensors[0].shape, [4, 3, 2, 1]);
    let (_, mut value) = gguf.metadata.iter().next().unwrap();
    for _ in 0..3 {
        let Value::Array(outer) = value else { panic!("{value:?}") };
        value = outer.iter().next().unwrap();
    }
    let Value::Array(inner) = value else { panic!("{value:?}") };
    assert_eq!(inner.iter().map(|value| value.to_string()).collect::<Vec<_>>(), ["\"x\"", "\"\""]);
}

#[test]
fn values_come_back_as_written() {
    let mut file = GgufFile::empty();
    let scalars: [(&str, u32, Vec<u8>); 12] = [
        ("u8", U8, vec![200]),
        ("i8", 1, vec![0x80]),
        ("u16", 2, 65_000_u16.to_le_bytes().into()),
        ("i16", 3, (-2_i16).to_le_bytes().into()),
        ("u32", U32, 4_000_000_000_u32.to_le_bytes().into()),
        ("i32", 5, (-3_i32).to_le_bytes().into()),
        ("f32", F32, 0.25_f32.to_le_bytes().into()),
        ("bool", BOOL, vec![1]),
        ("string", STRING, text("Grüße")),
        ("u64", U64, (1_u64 << 40).to_le_bytes().into()),
        ("i64", 11, 77_i64.to_le_bytes().into()),
        ("f64", 12, 1e-5_f64.to_le_bytes().into()),
    ];
    file.entries.extend(scalars.into_iter().map(|(key, value_type, value)| entry(key, value_type, value)));
    file.entries.push(entry("strings", ARRAY, array(STRING, 3, [text("a"), text(""), text("世界")].concat())));
    file.entries.push(entry("floats", ARRAY, array(F32, 2, [1.5_f32.to_le_bytes(), (-2_f32).to_le_bytes()].concat())));
    file.entries.push(entry("integers", ARRAY, array(5, 2, [7_i32.to_le_bytes(), 9_i32.to_le_bytes()].concat())));
    file.entries.push(entry("bools", ARRAY, array(BOOL, 3, [1, 0, 1])));
    file.entries.push(entry("none", ARRAY, array(STRING, 0, [])));
    let metadata = parse(&file).metadata;

    assert_eq!(metadata.get_u32("u8").unwrap(), Some(200));
    assert_eq!(metadata.get_u32("u16").unwrap(), Some(65_000));
    assert_eq!(metadata.get_u32("u32").unwrap(), Some(4_000_000_000));
    assert_eq!(metadata.get_u32("i64").unwrap(), Some(77));
    assert_eq!(metadata.get_u64("u64").unwrap(), Some(1 << 40));
    assert_eq!(metadata.get_f32("f32").unwrap(), Some(0.25));
    assert_eq!(metadata.get_f32("f64").unwrap(), Some(1e-5));
    assert_eq!(metadata.get_bool("bool").unwrap(), Some(true));
    assert_eq!(metadata.get_str("string").unwrap(), Some("Grüße"));
    assert_eq!(metadata.get_str_array("strings").unwrap(), Some(vec!["a", "", "世界"]));
    assert_eq!(metadata.get_f32_array("floats").unwrap(), Some(vec![1.5, -2.0]));
    assert_eq!(metadata.get_u32_array("integers").unwrap(), Some(vec![7, 9]));
    assert_eq!(metadata.get_i32_array("integers").unwrap(), Some(vec![7, 9]));
    assert_eq!(metadata.get_bool_array("bools").unwrap(), Some(vec![true, false, true]));
    assert_eq!(metadata.get_str_array("none").unwrap(), Some(vec![]));
    assert_eq!(metadata.get_u32_array("none").unwrap(), None.or(Some(vec![])));
    assert_eq!(metadata.get_u32("absent").unwrap(), None);
    let shown: Vec<_> = metadata.iter().map(|(_, value)| value.to_string()).collect();
    assert_eq!(shown[..6], ["200", "-128", "65000", "-2", "4000000000", "-3"]);
    assert_eq!(shown[6..13], ["0.25", "true", "\"Grüße\"", "1099511627776", "77", "0.00001", "array of 3 string"]);

    // A wrong type gives an error that names the key and its offset, not a missing key.
    let start_of = |key: &str| {
        let item = file.entries.iter().position(|entry| entry.key == key.as_bytes()).unwrap();
        file.build().entries[item].start
    };
    for (key, error) in [
        ("i8", metadata.get_u32("i8").err()),
        ("u64", metadata.get_u32("u64").err()),
        ("string", metadata.get_f32("string").err()),
        ("u8", metadata.get_bool("u8").err()),
        ("u32", metadata.get_str("u32").err()),
        ("string", metadata.get_str_array("string").err()),
        ("floats", metadata.get_u32_array("floats").err()),
    ] {
        match error {
            Some(Error::Format { format: "gguf", field, offset, .. }) => {
                assert_eq!((field, offset), (format!("`{key}`"), start_of(key)));
            }
            other => panic!("{key}: {other:?}"),
        }
    }
}

#[test]
fn a_growing_prefix_ends_in_the_same_header() {
    for seed in 0..8 {
        let mut file = GgufFile::random(&mut Rng(seed));
        file.entries.push(entry("vocabulary", ARRAY, array(STRING, 2000, text("token").repeat(2000))));
        let built = file.build();
        let file_len = built.bytes.len() as u64;
        let (mut len, mut n_calls) = (0, 0);
        let gguf = loop {
            n_calls += 1;
            match Gguf::parse_prefix(&built.bytes[..len], file_len).unwrap() {
                Parsed::Complete(gguf) => break gguf,
                Parsed::NeedMore(needed) => {
                    assert!(needed > len as u64 && needed <= built.header_end, "{needed} after {len}");
                    len = (2 * len as u64).max(needed).min(file_len) as usize;
                }
            }
        };
        assert_eq!(gguf.tensors, parse(&file).tensors);
        assert!(n_calls < 40, "{n_calls}");
        // The header suffices; one byte less does not.
        let header_end = built.header_end as usize;
        assert!(Gguf::parse(&built.bytes[..header_end], file_len).is_ok());
        assert!(Gguf::parse(&built.bytes[..header_end - 1], file_len).is_err());
    }
}

#[test]
fn large_headers_stay_within_the_memory_bound() {
    let mut keys = GgufFile::empty();
    keys.entries = (0..300_000).map(|i| entry(&format!("{i:x}"), U32, u32::to_le_bytes(i))).collect();
    let mut fan_out = GgufFile::empty();
    fan_out.entries.push(entry("key", ARRAY, array(ARRAY, 1 << 20, array(U8, 0, []).repeat(1 << 20))));
    let mut tensors = GgufFile::empty();
    tensors.tensors = (0..65_536).map(|i| tensor(&format!("{i:x}"), &[1], 0)).collect();
    for (what, file) in [("300,000 keys", keys), ("2^20 nested arrays", fan_out), ("65,536 tensors", tensors)] {
        let bytes = file.build().bytes;
        let start = std::time::Instant::now();
        let (gguf, peak) = peak_bytes(|| Gguf::parse(&bytes, bytes.len() as u64).unwrap());
        println!("{what}: {} bytes in {:?}, {peak} bytes of memory", bytes.len(), start.elapsed());
        assert!(peak <= memory_limit(bytes.len()), "{what}: {peak} bytes of memory");
        assert_eq!((gguf.metadata.len(), gguf.tensors.len()), (file.entries.len(), file.tensors.len()));
    }
}

/// Enough keys for hash collisions: each is found, and none in place of another.
#[test]
fn metadata_keys_with_equal_hashes_stay_distinct() {
    let mut file = GgufFile::empty();
    file.entries = (0..300_000).map(|i| entry(&format!("{i:x}"), U32, u32::to_le_bytes(i))).collect();
    let metadata = parse(&file).metadata;
    for i in 0..300_000 {
        assert_eq!(metadata.get_u32(&format!("{i:x}")).unwrap(), Some(i));
        assert_eq!(metadata.get_u32(&format!("absent {i}")).unwrap(), None);
    }
}

#[test]
fn block_types_are_found_by_number_and_name() {
    for &block_type in BlockType::ALL {
        if let Some(id) = block_type.ggml_id() {
            assert_eq!(BlockType::from_ggml_id(id), Some(block_type));
        }
        let by_name = BlockType::from_safetensors(block_type.name());
        assert_eq!(by_name, block_type.in_safetensors().then_some(block_type));
    }
    assert_eq!(BlockType::from_safetensors("Q4_0"), None);
}
