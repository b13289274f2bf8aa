//! Hostile GGUF files, with several seeded variants per class.

use super::builder::{
    ARRAY, BOOL, Entry, F32, GgufFile, Rng, STRING, Tensor, U8, U32, U64, array, entry, tensor, text,
};
use super::hostile::{Class, Hostile, refuse, refuse_all};
use tilewright::formats::Gguf;

/// A file with changed header fields.
fn in_header(seed: u64, field: &str, at: u64, change: impl FnOnce(&mut GgufFile)) -> Hostile {
    let mut file = GgufFile::random(&mut Rng(seed));
    change(&mut file);
    Hostile::new(file.build().bytes, field, at..=at)
}

/// A file with one random metadata entry replaced.
fn in_entry(seed: u64, field: &str, replacement: Entry) -> Hostile {
    let mut rng = Rng(seed);
    let mut file = GgufFile::random(&mut rng);
    let item = rng.below(file.entries.len());
    file.entries[item] = replacement;
    let built = file.build();
    Hostile::new(built.bytes, field, built.entries[item].start..=built.entries[item].end)
}

/// A file with a key of invalid length or content.
fn in_key(seed: u64, change: impl FnOnce(&mut Entry)) -> Hostile {
    let mut rng = Rng(seed);
    let mut file = GgufFile::random(&mut rng);
    let item = rng.below(file.entries.len());
    change(&mut file.entries[item]);
    let built = file.build();
    Hostile::new(built.bytes, format!("metadata key {item}"), built.entries[item].start..=built.entries[item].end)
}

/// A file with one random tensor changed; `field` is that tensor's.
fn in_tensor(seed: u64, field: &str, change: impl FnOnce(&mut Rng, &mut Tensor)) -> Hostile {
    let mut rng = Rng(seed);
    let mut file = GgufFile::random(&mut rng);
    let item = rng.below(file.tensors.len());
    change(&mut rng, &mut file.tensors[item]);
    let field = format!("{field} of tensor `{}`", String::from_utf8_lossy(&file.tensors[item].name));
    let built = file.build();
    Hostile::new(built.bytes, field, built.tensors[item].clone().start..=built.tensors[item].end - 1)
}

fn in_tensor_name(seed: u64, change: impl FnOnce(&mut Tensor)) -> Hostile {
    let mut rng = Rng(seed);
    let mut file = GgufFile::random(&mut rng);
    let item = rng.below(file.tensors.len());
    change(&mut file.tensors[item]);
    let built = file.build();
    let at = built.tensors[item].start..=built.tensors[item].end;
    Hostile::new(built.bytes, format!("name of tensor {item}"), at)
}

/// A tensor whose shape and data size disagree.
fn shaped(seed: u64, field: &str, type_number: u32, dimensions: &[u64]) -> Hostile {
    in_tensor(seed, field, |_, tensor| {
        tensor.dimensions = dimensions.to_vec();
        tensor.type_number = type_number;
    })
}

fn aligned(seed: u64, value_type: u32, value: Vec<u8>) -> Hostile {
    let mut file = GgufFile::random(&mut Rng(seed));
    file.entries.insert(1, entry("general.alignment", value_type, value));
    let built = file.build();
    let start = built.entries[1].start;
    Hostile::new(built.bytes, "`general.alignment`", start..=start)
}

/// `depth` arrays within each other.
fn nested(seed: u64, depth: usize) -> Hostile {
    let mut value = vec![];
    for _ in 1..depth {
        value.extend(array(ARRAY, 1, []));
    }
    value.extend(array(U8, 1, [7]));
    in_entry(seed, "`nested`", entry("nested", ARRAY, value))
}

/// The file truncated within `range`, with the message's name for the place.
fn cut(seed: u64, field: &str, range: impl FnOnce(&GgufFile) -> std::ops::Range<u64>) -> Hostile {
    let mut rng = Rng(seed);
    let file = GgufFile::random(&mut rng);
    let range = range(&file);
    let len = range.start + rng.next() % (range.end - range.start);
    let mut bytes = file.build().bytes;
    bytes.truncate(len as usize);
    // The count at byte 8 or 16 may already exceed the file.
    Hostile::new(bytes, field, 8..=len)
}

fn many_keys(last: &str) -> GgufFile {
    let mut file = GgufFile::empty();
    file.entries = (0..300_000).map(|i| entry(&format!("{i:x}"), U8, [1])).collect();
    file.entries.push(entry(last, U8, [1]));
    file
}

const MAX: u64 = u64::MAX;
const GIB: u64 = 1 << 30;

#[rustfmt::skip] // one class, one line
pub const CLASSES: &[Class] = &[
    ("empty file", 1, |_| Hostile::new(vec![], "magic", 0..=0)),
    ("magic only", 1, |_| Hostile::new(b"GGUF".to_vec(), "version", 4..=4)),
    ("part of the magic", 3, |seed| Hostile::new(b"GGUF"[..seed as usize + 1].to_vec(), "magic", 0..=0)),
    ("wrong magic", 8, |seed| in_header(seed, "magic", 0, |file| file.magic[seed as usize % 4] ^= 1 << (seed % 8))),
    ("version 0", 8, |seed| in_header(seed, "version", 4, |file| file.version = 0).unsupported()),
    ("version 1", 8, |seed| in_header(seed, "version", 4, |file| file.version = 1).unsupported()),
    ("version 99", 8, |seed| in_header(seed, "version", 4, |file| file.version = 4 + 95 * (seed as u32 % 2)).unsupported()),
    ("version byte-swapped", 8, |seed| in_header(seed, "big endian", 4, |file| file.version = file.version.swap_bytes()).unsupported()),
    ("tensor count 2^64-1", 8, |seed| in_header(seed, "tensor count", 8, |file| file.n_tensors = Some(MAX - seed))),
    ("tensor count 2^40", 8, |seed| in_header(seed, "tensor count", 8, |file| file.n_tensors = Some((1 << 40) + seed))),
    ("tensor count above the limit", 2, |seed| Hostile { file_len: 1 << 40, ..in_header(seed, "tensor count", 8, |file| file.n_tensors = Some(65_537 + seed)) }),
    ("metadata count 2^64-1", 8, |seed| in_header(seed, "metadata count", 16, |file| file.n_entries = Some(MAX - seed))),
    ("metadata count 2^40", 8, |seed| in_header(seed, "metadata count", 16, |file| file.n_entries = Some((1 << 40) + seed))),

    ("metadata count that only the unread part has room for", 8, |seed| {
        let file = GgufFile { n_entries: Some((1 << 30) + seed), ..GgufFile::empty() };
        Hostile { file_len: 1 << 40, ..Hostile::new(file.build().bytes, "header", 24..=24) }
    }),

    ("key length 2^64-1", 8, |seed| in_key(seed, |entry| entry.key_len = Some(MAX - seed))),
    ("key length 1 GiB", 8, |seed| in_key(seed, |entry| entry.key_len = Some(GIB + seed))),
    ("key longer than the format allows", 8, |seed| in_key(seed, |entry| entry.key = vec![b'a'; 65_536 + seed as usize])),
    ("key empty", 8, |seed| in_key(seed, |entry| entry.key = vec![])),
    ("key not UTF-8", 8, |seed| in_key(seed, |entry| entry.key[seed as usize % 8] = 0xFF)),
    ("key duplicate", 8, duplicate_key),
    ("string length 2^64-1", 8, |seed| in_entry(seed, "`text`", entry("text", STRING, (MAX - seed).to_le_bytes()))),
    ("string length 1 GiB", 8, |seed| in_entry(seed, "`text`", entry("text", STRING, (GIB + seed).to_le_bytes()))),
    ("string not UTF-8", 8, |seed| in_entry(seed, "`text`", entry("text", STRING, text([b'a', 0xC0 + seed as u8, b'b'])))),
    ("string in array not UTF-8", 8, |seed| in_entry(seed, "`texts`", entry("texts", ARRAY, array(STRING, 2, [text("a"), text([0xC0 + seed as u8])].concat())))),
    ("value type unknown", 8, |seed| in_entry(seed, "value type of `key`", entry("key", 13 + seed as u32 * 7, [0; 8]))),
    ("value type 2^32-1", 8, |seed| in_entry(seed, "value type of `key`", entry("key", u32::MAX - seed as u32, [0; 8]))),
    ("array of unknown type", 8, |seed| in_entry(seed, "elements of `key`", entry("key", ARRAY, array(13 + seed as u32, 1, [0; 8])))),
    ("array length 2^64-1", 8, |seed| in_entry(seed, "length of `key`", entry("key", ARRAY, array(U8 + seed as u32, MAX - seed, [])))),
    ("array length that wraps", 8, |seed| in_entry(seed, "length of `key`", entry("key", ARRAY, array(U64, (1 << 61) + seed % 2, [])))),
    ("array of 1 GiB of bytes", 8, |seed| in_entry(seed, "length of `key`", entry("key", ARRAY, array(U8, GIB + seed, [])))),
    ("array of 2^30 strings", 8, |seed| in_entry(seed, "length of `key`", entry("key", ARRAY, array(STRING, GIB + seed, [])))),
    ("nested 5 deep", 8, |seed| nested(seed, 5)),
    ("nested 65 deep", 8, |seed| nested(seed, 65)),
    ("nested 100,000 deep", 2, |seed| nested(seed, 100_000)),
    ("nested fan-out 2^20, the last broken", 2, fan_out),
    ("nested fan-out of 2^60", 8, |seed| in_entry(seed, "length of `key`", entry("key", ARRAY, array(ARRAY, 1 << 60, array(ARRAY, 1 << 60, []))))),
    ("bool 2", 8, |seed| in_entry(seed, "`flag`", entry("flag", BOOL, [2 + seed as u8]))),
    ("bool 2 in array", 8, |seed| in_entry(seed, "`flags`", entry("flags", ARRAY, array(BOOL, 3, [1, 0, 2 + seed as u8])))),
    ("300,000 keys and one again", 2, |seed| {
        let built = many_keys(&format!("{seed:x}")).build();
        let start = built.entries[300_000].start;
        Hostile::new(built.bytes, format!("metadata key `{seed:x}`"), start..=start)
    }),

    ("alignment 0", 8, |seed| aligned(seed, U32, vec![0; 4])),
    ("alignment 13", 8, |seed| aligned(seed, U32, (13 + 2 * seed as u32).to_le_bytes().into())),
    ("alignment below 8", 3, |seed| aligned(seed, U32, (1_u32 << seed).to_le_bytes().into())),
    ("alignment 24", 8, |seed| aligned(seed, U32, (24 * (1 + seed as u32)).to_le_bytes().into())),
    ("alignment 2^31", 8, |seed| aligned(seed, U32, (1_u32 << (31 - seed)).to_le_bytes().into())),
    ("alignment a uint64", 8, |seed| aligned(seed, U64, 32_u64.to_le_bytes().into())),
    ("alignment a string", 8, |seed| aligned(seed, STRING, text("32"))),
    ("alignment a float", 8, |seed| aligned(seed, F32, 32_f32.to_le_bytes().into())),

    ("rank 0", 8, |seed| in_tensor(seed, "rank", |_, tensor| tensor.rank = Some(0))),
    ("rank 5", 8, |seed| in_tensor(seed, "rank", |_, tensor| { tensor.dimensions = vec![1; 5 + seed as usize]; })),
    ("rank 2^32-1", 8, |seed| in_tensor(seed, "rank", |_, tensor| tensor.rank = Some(u32::MAX - seed as u32))),
    ("dimension 0", 8, |seed| in_tensor(seed, "shape", |rng, tensor| { let axis = rng.below(tensor.dimensions.len()); tensor.dimensions[axis] = 0; })),
    ("dimension negative", 8, |seed| shaped(seed, "shape", 0, &[1 << 63 | seed << 8, 1])),
    ("product wraps to 0", 8, |seed| shaped(seed, "shape", 0, &[1 << 32, 1 << 32, 1 + seed])),
    ("product wraps to small", 8, |seed| shaped(seed, "shape", 0, &[(1 << 32) + 1, (1 << 32) - 1 + (seed % 2) * 2])),
    ("product wraps to negative", 8, |seed| shaped(seed, "shape", 0, &[1 << 62, 6 + seed])),
    ("bytes wrap", 8, |seed| shaped(seed, "shape", 0, &[1 << 62, 1 + seed % 2])),
    ("bytes of blocks wrap", 8, |seed| shaped(seed, "shape", 8, &[(0xF8 << 56) + 32 * seed])),
    ("padding wraps", 8, |seed| shaped(seed, "shape", 1, &[(1 << 63) - 1 - seed])),
    ("padding wraps in an endless file", 8, |seed| {
        let mut file = GgufFile::empty();
        file.entries.push(entry("general.alignment", U32, (2_u32 << 20).to_le_bytes()));
        file.tensors.push(Tensor { type_number: 24, dimensions: vec![MAX - 1000 - seed], ..tensor("t", &[1], 0) });
        let built = file.build();
        let at = built.tensors[0].start..=built.tensors[0].end;
        Hostile { file_len: MAX, ..Hostile::new(built.bytes, "shape of tensor `t`", at) }
    }),
    ("type 2^32-1", 8, |seed| in_tensor(seed, "type", |_, tensor| tensor.type_number = u32::MAX - seed as u32).unsupported()),
    ("type unknown", 8, |seed| in_tensor(seed, "type", |_, tensor| tensor.type_number = 1000 + seed as u32).unsupported()),
    ("type removed", 8, |seed| in_tensor(seed, "type", |rng, tensor| tensor.type_number = rng.pick(&[4, 5, 31, 32, 33, 36, 37, 38])).unsupported()),
    ("row no multiple of the block", 8, |seed| shaped(seed, "shape", 2, &[33 + seed, 32])),
    ("row of 172 in Q8_0", 8, |seed| shaped(seed, "shape", 8, &[172, 64 * (1 + seed)])),
    ("offset unaligned", 8, |seed| in_tensor(seed, "offset", |_, tensor| tensor.offset = Some(1 + seed))),
    ("offset past the end", 8, |seed| in_tensor(seed, "offset", |_, tensor| tensor.offset = Some((1 << 40) + 32 * seed))),
    ("offset near 2^64", 8, |seed| in_tensor(seed, "offset", |_, tensor| tensor.offset = Some(MAX - 31 - 32 * seed))),
    ("tensors overlap", 8, |seed| misplaced(seed, |end| end - 32)),
    ("gap between tensors", 8, |seed| misplaced(seed, |end| end + 32)),
    ("20,000 tensors on one offset", 2, |seed| {
        let mut file = GgufFile::empty();
        file.tensors = (0..20_000).map(|i| Tensor { offset: Some(0), ..tensor(&format!("t{i}"), &[8 + seed], 0) }).collect();
        let built = file.build();
        Hostile::new(built.bytes, "offset of tensor `t1`", built.tensors[1].start..=built.tensors[1].end)
    }),
    ("tensor name duplicate", 8, duplicate_tensor),
    ("tensor name long", 8, |seed| in_tensor_name(seed, |tensor| tensor.name = vec![b'w'; 65 + seed as usize])),
    ("tensor name length 2^64-1", 8, |seed| in_tensor_name(seed, |tensor| tensor.name_len = Some(MAX - seed))),
    ("tensor name empty", 8, |seed| in_tensor_name(seed, |tensor| tensor.name = vec![])),
    ("tensor name with NUL", 8, |seed| in_tensor_name(seed, |tensor| tensor.name[seed as usize % 10] = 0)),
    ("tensor name path-like", 8, |seed| in_tensor_name(seed, |tensor| tensor.name = [&b"../x"[..], b"/etc/x", b"a\\b", b"..", b"a/b"][seed as usize % 5].to_vec())),
    ("tensor name not UTF-8", 8, |seed| in_tensor_name(seed, |tensor| tensor.name[seed as usize % 10] = 0xFE)),
    ("data a little short", 8, |seed| {
        let mut built = GgufFile { pads_end: false, ..GgufFile::random(&mut Rng(seed)) }.build();
        built.bytes.truncate(built.bytes.len() - 1 - seed as usize);
        let last = built.data.len() - 1;
        Hostile::new(built.bytes, format!("data of tensor `blk.{last}.weight`"), built.data[last].start..=built.data[last].start)
    }),
    ("data cut anywhere", 8, |seed| {
        let mut rng = Rng(seed);
        let mut built = GgufFile::random(&mut rng).build();
        let last = built.data.pop().unwrap();
        built.bytes.truncate((built.header_end + rng.next() % (last.end - built.header_end)) as usize);
        Hostile::new(built.bytes, "of tensor `blk.", built.tensors[0].start..=last.start)
    }),
    ("claims 3 GB", 8, |seed| shaped(seed, "shape", 0, &[750_000_000 + seed])),
    ("claims 1 TB", 8, |seed| shaped(seed, "shape", 0, &[1 << 20, (1 << 18) + seed])),
    ("cut in the metadata", 8, |seed| cut(seed, "", |file| 24..file.build().entries.last().unwrap().end)),
    ("cut in the tensor infos", 8, |seed| cut(seed, "", |file| file.build().tensors[0].start..file.build().header_end)),
    ("trailing bytes", 8, |seed| {
        let mut file = GgufFile::random(&mut Rng(seed));
        file.trailing = 1 + 100 * seed as usize;
        let built = file.build();
        let end = built.data.last().unwrap().end;
        Hostile::new(built.bytes, "end of data", end..=end)
    }),
    ("trailing bytes behind a vocabulary", 8, |seed| {
        let mut file = GgufFile::random(&mut Rng(seed));
        file.tensors.clear();
        file.trailing = 32 + seed as usize;
        let built = file.build();
        let end = built.header_end.next_multiple_of(32);
        Hostile::new(built.bytes, "end of data", end..=end)
    }),
];

fn duplicate_key(seed: u64) -> Hostile {
    let mut rng = Rng(seed);
    let mut file = GgufFile::random(&mut rng);
    let (first, second) = (rng.below(file.entries.len() - 1), file.entries.len() - 1);
    file.entries[second].key = file.entries[first].key.clone();
    let field = format!("metadata key `general.key-{first}`");
    let built = file.build();
    Hostile::new(built.bytes, field, built.entries[second].start..=built.entries[second].start)
}

fn duplicate_tensor(seed: u64) -> Hostile {
    let mut rng = Rng(seed);
    let mut file = GgufFile::random(&mut rng);
    let (first, second) = (rng.below(file.tensors.len() - 1), file.tensors.len() - 1);
    file.tensors[second].name = file.tensors[first].name.clone();
    let built = file.build();
    let start = built.tensors[second].start;
    Hostile::new(built.bytes, format!("name of tensor {second}"), start..=start)
}

fn fan_out(seed: u64) -> Hostile {
    let mut inner = array(U8, 0, []).repeat(1 << 20);
    let last = inner.len() - 12;
    inner[last..last + 4].copy_from_slice(&(13 + seed as u32).to_le_bytes());
    in_entry(seed, "elements of `key`", entry("key", ARRAY, array(ARRAY, 1 << 20, inner)))
}

/// A file with its last tensor misplaced.
fn misplaced(seed: u64, place: impl FnOnce(u64) -> u64) -> Hostile {
    let mut file = GgufFile::random(&mut Rng(seed));
    let last = file.tensors.len() - 1;
    let built = file.build();
    file.tensors[last].offset = Some(place(built.data[last].start - built.data[0].start));
    let bytes = file.build().bytes;
    let field = format!("offset of tensor `blk.{last}.weight`");
    Hostile::new(bytes, field, built.tensors[last].start..=built.tensors[last].end)
}

#[test]
fn hostile_gguf_files_are_refused() {
    refuse_all(CLASSES, Gguf::parse);
}

#[test]
fn truncated_gguf_is_an_error() {
    for seed in 0..4 {
        let built = GgufFile::random(&mut Rng(seed)).build();
        let data_end = built.data.last().unwrap().end;
        let step = ((data_end - built.header_end) / 100).max(1) as usize;
        for len in (0..built.header_end).chain((built.header_end..data_end).step_by(step)) {
            let bytes = built.bytes[..len as usize].to_vec();
            refuse("cut", seed, &Hostile::new(bytes, "gguf", 0..=data_end), Gguf::parse);
        }
    }
}

/// With any byte of the header changed, the file is refused, or all results lie within the file.
#[test]
fn gguf_with_a_changed_byte_is_refused_or_within_the_file() {
    for seed in 0..4 {
        let mut rng = Rng(seed);
        let built = GgufFile::random(&mut rng).build();
        for position in 0..built.header_end as usize {
            let mut bytes = built.bytes.clone();
            bytes[position] ^= 1 << rng.below(8);
            let Ok(gguf) = Gguf::parse(&bytes, bytes.len() as u64) else { continue };
            for tensor in &gguf.tensors {
                assert_eq!(tensor.bytes(&bytes).unwrap().len() as u64, tensor.size_bytes);
            }
            assert_eq!(gguf.metadata.iter().count(), gguf.metadata.len());
        }
    }
}
