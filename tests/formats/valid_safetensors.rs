//! Valid safetensors files and shard indices, and their parsed contents.

use super::builder::{json_entry, safetensors};
use tilewright::Error;
use tilewright::formats::{BlockType, Parsed, Safetensors, ShardIndex};

fn parse(header: &str, data_len: usize) -> Safetensors {
    let bytes = safetensors(header, data_len);
    Safetensors::parse(&bytes, bytes.len() as u64).unwrap()
}

#[test]
fn safetensors_tensors_are_found_at_header_offsets() {
    // In another order than the data, with blanks, a scalar, an empty tensor, and 4-bit floats.
    let entries = [
        json_entry("b", "BF16", "[2, 3]", 4, 16),
        json_entry("scalar", "F32", "[]", 0, 4),
        json_entry("none", "I64", "[0,7]", 16, 16),
        json_entry("f4", "F4", "[3,2]", 16, 19),
        r#""__metadata__": {"format": "pt", "x": ""}"#.to_string(),
        json_entry("ü\\n\\u4e16", "U8", "[1,1,1,1,1,1,1,2]", 19, 21),
    ];
    let header = format!("{{{} }}\n   ", entries.join(" , "));
    let file = parse(&header, 21);
    let start = 8 + header.len() as u64;
    assert_eq!(file.data_offset, start);
    assert_eq!(file.metadata, [("format".into(), "pt".into()), ("x".into(), String::new())]);
    let places: Vec<_> = file.tensors.iter().map(|t| (t.name.as_str(), t.offset - start, t.size_bytes)).collect();
    assert_eq!(places, [("b", 4, 12), ("scalar", 0, 4), ("none", 16, 0), ("f4", 16, 3), ("ü\n世", 19, 2)]);
    assert_eq!(file.tensor("b").unwrap().shape, [2, 3]);
    assert_eq!(file.tensor("b").unwrap().block_type, BlockType::BF16);
    assert_eq!(file.tensor("scalar").unwrap().n_elements(), 1);
    assert_eq!(file.tensor("f4").unwrap().n_elements(), 6);
    assert_eq!(file.tensor("none").unwrap().n_elements(), 0);
    assert!(file.tensor("c").is_none());
}

#[test]
fn safetensors_files_without_tensors_load() {
    assert!(parse("{}", 0).tensors.is_empty());
    assert!(parse(r#"{"__metadata__":{}}      "#, 0).metadata.is_empty());
}

#[test]
fn a_growing_prefix_ends_in_the_same_header() {
    let header = format!("{{{}}}", json_entry("a", "F32", "[4]", 0, 16));
    let bytes = safetensors(&header, 16);
    let needed = |len: usize| match Safetensors::parse_prefix(&bytes[..len], bytes.len() as u64).unwrap() {
        Parsed::Complete(_) => None,
        Parsed::NeedMore(needed) => Some(needed),
    };
    let header_end = 8 + header.len();
    assert!((0..8).all(|len| needed(len) == Some(8)));
    assert!((8..header_end).all(|len| needed(len) == Some(header_end as u64)));
    assert_eq!(needed(header_end), None);
}

#[test]
fn a_shard_index_is_checked_against_its_shards() {
    let index = ShardIndex::parse(
        br#"{"metadata": {"total_size": 12, "nested": {"a": [1]}},
            "weight_map": {"c": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors",
                           "b": "model-00001-of-00002.safetensors"}}"#,
    )
    .unwrap();
    assert_eq!(index.shards(), ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"]);
    assert_eq!(index.shard_of("b"), Some("model-00001-of-00002.safetensors"));
    assert_eq!(index.shard_of("d"), None);

    let shard = |names: &[&str]| {
        let entries = names.iter().enumerate().map(|(i, name)| json_entry(name, "F32", "[1]", 4 * i, 4 * i + 4));
        parse(&format!("{{{}}}", entries.collect::<Vec<_>>().join(",")), 4 * names.len())
    };
    let first = "model-00001-of-00002.safetensors";
    index.check_shard(first, &shard(&["a", "b"])).unwrap();
    index.check_shard("model-00002-of-00002.safetensors", &shard(&["c"])).unwrap();
    for (names, culprit) in [(&["a"][..], "`b`"), (&["a", "b", "c"], "`c`"), (&["a", "b", "d"], "`d`")] {
        match index.check_shard(first, &shard(names)) {
            Err(Error::Format { field, .. }) => assert!(field.contains(culprit), "{field}"),
            other => panic!("{names:?}: {other:?}"),
        }
    }
}
