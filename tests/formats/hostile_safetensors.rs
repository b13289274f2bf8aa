//! Hostile safetensors files and shard indices, with several seeded variants per class.

use super::builder::{Rng, json_entry, safetensors};
use super::hostile::{Class, Hostile, refuse, refuse_all};
use tilewright::formats::{Safetensors, ShardIndex};

/// A file with one valid tensor `a` of 4 bytes before `entries`, which claim the rest of `data_len` bytes.
fn with(entries: impl AsRef<str>, data_len: usize) -> Vec<u8> {
    let header = format!("{{{},{}}}", json_entry("a", "F32", "[1]", 0, 4), entries.as_ref());
    safetensors(header, data_len)
}

/// A file with faulty JSON.
fn in_json(seed: u64, field: &str, entries: impl AsRef<str>) -> Hostile {
    // Leading blanks shift the fault.
    let bytes = with(format!("{}{}", " ".repeat(seed as usize), entries.as_ref()), 8);
    let end = bytes.len() as u64 - 8;
    Hostile::new(bytes, field, 8 + 50..=end)
}

/// A file whose data contradicts its header at byte `at` of the data.
fn in_data(field: &str, entries: &str, data_len: usize, at: u64) -> Hostile {
    let bytes = with(entries, data_len);
    let start = ((bytes.len() - data_len) as u64).saturating_add(at);
    Hostile::new(bytes, field, start..=start)
}

fn in_length(length: u64, file_len: u64) -> Hostile {
    let bytes = [&length.to_le_bytes()[..], b"{}        "].concat();
    Hostile { file_len, ..Hostile::new(bytes, "header length", 0..=0) }
}

fn header(text: impl AsRef<[u8]>) -> Hostile {
    let bytes = safetensors(text, 0);
    let len = bytes.len() as u64;
    Hostile::new(bytes, "header", 8..=len)
}

#[rustfmt::skip] // one class, one line
pub const CLASSES: &[Class] = &[
    ("file too short for a length", 8, |seed| Hostile::new(vec![0; seed as usize], "header length", 0..=0)),
    ("header length 0", 2, |seed| in_length(seed, 18)),
    ("header length 2^64-1", 8, |seed| in_length(u64::MAX - seed, 18)),
    ("header longer than the file", 8, |seed| in_length(11 + seed, 18)),
    ("header of 100 MB and a byte", 8, |seed| in_length(100_000_001 + seed, 1 << 40)),
    ("header not UTF-8", 8, |seed| header([b"{\"", &[0xF8 + seed as u8][..], b"\":1}"].concat())),
    ("header not JSON", 8, |seed| header("{!?a'[},"[..1 + seed as usize].repeat(2))),
    ("header no object", 4, |seed| header(["[]", "17", "\"a\"", "null"][seed as usize])),
    ("header that starts with a blank", 2, |seed| header([" {}", "\n{}"][seed as usize])),
    ("bytes behind the object", 4, |seed| header(["{}x", "{}{}", "{},", "{}\0"][seed as usize])),
    ("unfinished object", 8, |seed| header(&r#"{"a":{"dtype":"F32","shape":[1],"#[..2 + 4 * seed as usize])),
    ("depth 10,000", 8, |seed| in_json(seed, "`x`", format!(r#""x":{}"#, "[".repeat(10_000)))),
    ("depth 10,000 in the shape", 8, |seed| in_json(seed, "`x`", format!(r#""x":{{"dtype":"F32","shape":{}"#, "[".repeat(10_000)))),
    ("depth 10,000 of objects", 8, |seed| in_json(seed, "`x`", format!(r#""x":{}"#, r#"{"y":"#.repeat(10_000)))),
    ("depth 10,000 in the metadata", 8, |seed| in_json(seed, "`__metadata__`", format!(r#""__metadata__":{}"#, r#"{"y":"#.repeat(10_000)))),
    ("name twice", 8, |seed| Hostile { at: 8..=8, ..in_json(seed, "`a`", json_entry("a", "F32", "[1]", 4, 8)) }),
    ("name twice through an escape", 8, |seed| Hostile { at: 8..=8, ..in_json(seed, "`a`", json_entry("\\u0061", "F32", "[1]", 4, 8)) }),
    ("name empty", 8, |seed| in_json(seed, "header", json_entry("", "F32", "[1]", 4, 8))),
    ("metadata twice", 8, |seed| in_json(seed, "`__metadata__`", r#""__metadata__":{},"__metadata__":{}"#)),
    ("metadata key twice", 8, |seed| Hostile { at: 8..=8, ..in_json(seed, "`k`", r#""__metadata__":{"k":"1","\u006b":"2"}"#) }),
    ("metadata not text", 4, |seed| in_json(seed, "`__metadata__`", format!(r#""__metadata__":{{"k":{}}}"#, ["1", "null", "{}", "[\"a\"]"][seed as usize]))),
    ("metadata no object", 4, |seed| in_json(seed, "`__metadata__`", format!(r#""__metadata__":{}"#, ["1", "null", "\"x\"", "[]"][seed as usize]))),
    ("dtype unknown", 4, |seed| in_json(seed, "`x`", json_entry("x", ["F31", "f32", "Q4_0", ""][seed as usize], "[1]", 4, 8))),
    ("dtype no text", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":7,"shape":[1],"data_offsets":[4,8]}"#)),
    ("dtype missing", 8, |seed| in_json(seed, "`x`", r#""x":{"shape":[1],"data_offsets":[4,8]}"#)),
    ("shape missing", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","data_offsets":[4,8]}"#)),
    ("offsets missing", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1]}"#)),
    ("field twice", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[4,8]}"#)),
    ("field unknown", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1],"data_offsets":[4,8],"strides":[1]}"#)),
    ("offsets reversed", 8, |seed| in_json(seed, "`x`", json_entry("x", "F32", "[1]", 8, 4))),
    ("offsets negative", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1],"data_offsets":[-4,8]}"#)),
    ("offsets floats", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1],"data_offsets":[4.0,8.0]}"#)),
    ("offsets above 2^64", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1],"data_offsets":[4,18446744073709551616]}"#)),
    ("one offset", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1],"data_offsets":[4]}"#)),
    ("three offsets", 8, |seed| in_json(seed, "`x`", r#""x":{"dtype":"F32","shape":[1],"data_offsets":[4,8,12]}"#)),
    ("dimension negative", 8, |seed| in_json(seed, "`x`", json_entry("x", "F32", "[-1]", 4, 8))),
    ("dimension a float", 8, |seed| in_json(seed, "`x`", json_entry("x", "F32", "[1.0]", 4, 8))),
    ("too many dimensions", 8, |seed| in_json(seed, "`x`", json_entry("x", "F32", &format!("[1{}]", ",1".repeat(8 + (seed as usize) * 1000)), 4, 8))),
    ("size not that of the shape", 8, |seed| in_json(seed, "`x`", json_entry("x", "F16", &format!("[{}]", 3 + seed), 4, 8))),
    ("half a byte", 8, |seed| in_json(seed, "`x`", json_entry("x", "F4", &format!("[{}]", 7 + 2 * seed), 4, 8))),
    ("product wraps", 8, |seed| in_json(seed, "`x`", json_entry("x", "F32", &format!("[4294967296,4294967296,{}]", seed + 1), 4, 4))),
    ("bytes wrap", 8, |seed| in_json(seed, "`x`", json_entry("x", "F64", &format!("[{}]", (1_u64 << 61) + (seed % 2)), 4, 4 + 8 * (seed as usize % 2)))),
    ("overlap", 8, |seed| in_data("`x`", &json_entry("x", "U8", "[4]", seed as usize % 4, seed as usize % 4 + 4), 8, seed % 4)),
    ("same data twice", 8, |_| in_data("`", &json_entry("x", "F32", "[1]", 0, 4), 4, 0)),
    ("hole", 8, |seed| in_data("`x`", &json_entry("x", "U8", "[4]", 5 + seed as usize, 9 + seed as usize), 9 + seed as usize, 5 + seed)),
    ("hole at the start", 8, |seed| {
        let begin = 1 + seed as usize;
        let header = format!("{{{}}}", json_entry("x", "F32", "[1]", begin, begin + 4));
        let start = 8 + header.len() as u64 + begin as u64;
        Hostile::new(safetensors(header, begin + 4), "`x`", start..=start)
    }),
    ("trailing bytes", 8, |seed| in_data("end of data", &json_entry("x", "F32", "[1]", 4, 8), 9 + seed as usize, 8)),
    ("data short", 8, |seed| in_data("end of data", &json_entry("x", "F32", "[1]", 4, 8), seed as usize, seed)),
    ("offset near 2^64", 8, |seed| in_data("`x`", &format!(r#""x":{{"dtype":"U8","shape":[4],"data_offsets":[{},{}]}}"#, u64::MAX - 4 - seed, u64::MAX - seed), 4, u64::MAX)),
    ("claims 1 TB", 8, |seed| in_data("end of data", &json_entry("x", "U8", &format!("[{}]", (1_u64 << 40) + seed), 4, (1 << 40) + 4 + seed as usize), 4, 4)),
    ("10^6 tensors of no size", 1, |_| {
        let entries: Vec<_> = (0..1_000_000).map(|i| json_entry(&format!("{i:x}"), "U8", "[0]", 0, 0)).collect();
        let bytes = safetensors(format!("{{{}}}", entries.join(",")), 0);
        let len = bytes.len() as u64;
        Hostile::new(bytes, "header entry `10000`", 8..=len)
    }),
    ("10^6 metadata texts", 1, |_| {
        let texts: Vec<_> = (0..1_000_000).map(|i| format!(r#""{i:x}":"""#)).collect();
        let bytes = safetensors(format!(r#"{{"__metadata__":{{{}}}}}"#, texts.join(",")), 0);
        let len = bytes.len() as u64;
        Hostile::new(bytes, "`__metadata__`", 8..=len)
    }),
];

fn index(weight_map: impl AsRef<str>) -> Hostile {
    let json = format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{{{}}}}}"#, weight_map.as_ref());
    let len = json.len() as u64;
    Hostile::new(json.into_bytes(), "safetensors index", 0..=len)
}

#[rustfmt::skip] // one class, one line
pub const INDEX_CLASSES: &[Class] = &[
    ("index names a file elsewhere", 15, |seed| {
        let names = ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\\\b.safetensors", "C:x.safetensors", "..", ".", "", "x",
            "x.safetensors/", ".safetensors", "x\\u0000.safetensors", "\\u002e\\u002e/x.safetensors", "https://x/y.safetensors", "x.bin"];
        index(format!(r#""t":"{}""#, names[seed as usize]))
    }),
    ("index names an endless file", 8, |seed| index(format!(r#""t":"{}.safetensors""#, "x".repeat(244 + seed as usize)))),
    ("index puts a tensor in two shards", 2, |seed| index(format!(r#""t":"a.safetensors","{}":"b.safetensors""#, ["t", "\\u0074"][seed as usize]))),
    ("index with a shard that is no text", 4, |seed| index(format!(r#""t":{}"#, ["1", "null", "[\"a.safetensors\"]", "{}"][seed as usize]))),
    ("index without weight_map", 3, |seed| Hostile { bytes: ["{}", "{\"metadata\":{}}", "{\"weight_map\":null}"][seed as usize].into(), ..index("") }),
    ("index with two weight_maps", 1, |_| Hostile { bytes: br#"{"weight_map":{},"weight_map":{}}"#.to_vec(), ..index("") }),
    ("index no JSON", 4, |seed| Hostile { bytes: [&b""[..], b"[]", b"{\"weight_map\":{\"t\"", b"\xFF{}"][seed as usize].to_vec(), ..index("") }),
    ("index nested 10,000 deep", 2, |seed| Hostile { bytes: format!(r#"{{"metadata":{}"#, ["[", "{\"a\":"][seed as usize].repeat(10_000)).into(), at: 0..=60_000, ..index("") }),
    ("index of too many tensors", 1, |_| {
        let entries: Vec<_> = (0..300_000).map(|i| format!(r#""{i:x}":"a.safetensors""#)).collect();
        index(entries.join(","))
    }),
    ("index of too many shards", 1, |_| {
        let entries: Vec<_> = (0..5_000).map(|i| format!(r#""{i:x}":"{i}.safetensors""#)).collect();
        index(entries.join(","))
    }),
];

#[test]
fn hostile_safetensors_files_are_refused() {
    refuse_all(CLASSES, Safetensors::parse);
}

#[test]
fn hostile_shard_indices_are_refused() {
    refuse_all(INDEX_CLASSES, |json, _| ShardIndex::parse(json));
}

#[test]
fn truncated_safetensors_is_an_error() {
    let bytes = with(json_entry("x", "F32", "[2,25]", 4, 204), 204);
    for len in 0..bytes.len() {
        let file = Hostile::new(bytes[..len].to_vec(), "safetensors", 0..=len as u64);
        refuse("cut", 0, &file, Safetensors::parse);
    }
}

/// With any byte of the header changed, the file is refused, or all results lie within the file.
#[test]
fn safetensors_with_a_changed_byte_is_refused_or_in_bounds() {
    let bytes = with(json_entry("x", "F32", "[2,25]", 4, 204), 204);
    let mut rng = Rng(1);
    for position in 0..bytes.len() - 204 {
        for _ in 0..16 {
            let mut bytes = bytes.clone();
            bytes[position] = rng.next() as u8;
            let Ok(file) = Safetensors::parse(&bytes, bytes.len() as u64) else { continue };
            for tensor in &file.tensors {
                assert_eq!(tensor.bytes(&bytes).unwrap().len() as u64, tensor.size_bytes);
            }
        }
    }
}
