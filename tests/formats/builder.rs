//! Writes GGUF and safetensors files, valid by default, with every field mutable.

use std::ops::Range;

/// SplitMix64: the same numbers on every machine.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

/// A metadata entry of a GGUF file.
#[derive(Clone)]
pub struct Entry {
    pub key: Vec<u8>,
    /// Overrides the key's length.
    pub key_len: Option<u64>,
    pub value_type: u32,
    pub value: Vec<u8>,
}

pub fn entry(key: &str, value_type: u32, value: impl Into<Vec<u8>>) -> Entry {
    Entry { key: key.into(), key_len: None, value_type, value: value.into() }
}

/// A string as GGUF writes it.
pub fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// An array value: type, length, elements.
pub fn array(element_type: u32, len: u64, elements: impl AsRef<[u8]>) -> Vec<u8> {
    [&element_type.to_le_bytes()[..], &len.to_le_bytes(), elements.as_ref()].concat()
}

/// A tensor of a GGUF file.
#[derive(Clone)]
pub struct Tensor {
    pub name: Vec<u8>,
    /// Overrides the name's length.
    pub name_len: Option<u64>,
    /// Overrides the number of dimensions.
    pub rank: Option<u32>,
    /// In file order, contiguous first.
    pub dimensions: Vec<u64>,
    pub type_number: u32,
    /// Overrides the computed offset.
    pub offset: Option<u64>,
    pub size_bytes: u64,
}

/// Number, elements and bytes of some block types, from ggml's headers.
const TYPES: [(u32, u64, u64); 6] = [(0, 1, 4), (1, 1, 2), (2, 32, 18), (8, 32, 34), (12, 256, 144), (30, 1, 2)];

pub fn tensor(name: &str, dimensions: &[u64], type_number: u32) -> Tensor {
    let (_, block_len, block_bytes) = TYPES.into_iter().find(|t| t.0 == type_number).unwrap();
    let size_bytes = dimensions.iter().product::<u64>() / block_len * block_bytes;
    let (name, dimensions) = (name.into(), dimensions.to_vec());
    Tensor { name, name_len: None, rank: None, dimensions, type_number, offset: None, size_bytes }
}

/// A GGUF file before it is written.
#[derive(Clone)]
pub struct GgufFile {
    pub magic: [u8; 4],
    pub version: u32,
    pub n_tensors: Option<u64>,
    pub n_entries: Option<u64>,
    pub entries: Vec<Entry>,
    pub tensors: Vec<Tensor>,
    pub alignment: u64,
    /// Whether the last tensor is padded like the others.
    pub pads_end: bool,
    pub trailing: usize,
}

/// A GGUF file and the offsets of its parts.
pub struct BuiltGguf {
    pub bytes: Vec<u8>,
    pub entries: Vec<Range<u64>>,
    pub tensors: Vec<Range<u64>>,
    pub data: Vec<Range<u64>>,
    pub header_end: u64,
}

impl GgufFile {
    pub fn empty() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            n_tensors: None,
            n_entries: None,
            entries: vec![],
            tensors: vec![],
            alignment: 32,
            pads_end: true,
            trailing: 0,
        }
    }

    /// A valid file with a few entries of every kind and a few tensors, different for each seed.
    pub fn random(rng: &mut Rng) -> Self {
        let mut file = Self { version: rng.pick(&[2, 3]), ..Self::empty() };
        for i in 0..3 + rng.below(5) {
            let key = format!("general.key-{i}");
            file.entries.push(match rng.below(7) {
                0 => entry(&key, U32, (rng.next() as u32).to_le_bytes()),
                1 => entry(&key, F32, 1.5_f32.to_le_bytes()),
                2 => entry(&key, BOOL, [1]),
                3 => entry(&key, STRING, text("Grüße, 世界")),
                4 => entry(&key, ARRAY, array(STRING, 2, [text("a"), text("")].concat())),
                5 => entry(&key, ARRAY, array(U8, 5, *b"hello")),
                _ => entry(&key, U64, rng.next().to_le_bytes()),
            });
        }
        for i in 0..2 + rng.below(4) {
            let (type_number, block_len, _) = rng.pick(&TYPES);
            let mut dimensions = vec![block_len * (1 + rng.next() % 3)];
            for _ in 0..rng.below(4) {
                dimensions.push(1 + rng.next() % 4);
            }
            file.tensors.push(tensor(&format!("blk.{i}.weight"), &dimensions, type_number));
        }
        file
    }

    pub fn build(&self) -> BuiltGguf {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.n_entries.unwrap_or(self.entries.len() as u64).to_le_bytes());
        let mut entries = vec![];
        for entry in &self.entries {
            let start = bytes.len() as u64;
            bytes.extend(entry.key_len.unwrap_or(entry.key.len() as u64).to_le_bytes());
            bytes.extend(&entry.key);
            bytes.extend(entry.value_type.to_le_bytes());
            bytes.extend(&entry.value);
            entries.push(start..bytes.len() as u64);
        }
        let (mut tensors, mut offsets, mut end) = (vec![], vec![], 0_u64);
        for tensor in &self.tensors {
            let start = bytes.len() as u64;
            bytes.extend(tensor.name_len.unwrap_or(tensor.name.len() as u64).to_le_bytes());
            bytes.extend(&tensor.name);
            bytes.extend(tensor.rank.unwrap_or(tensor.dimensions.len() as u32).to_le_bytes());
            bytes.extend(tensor.dimensions.iter().flat_map(|dimension| dimension.to_le_bytes()));
            bytes.extend(tensor.type_number.to_le_bytes());
            bytes.extend(tensor.offset.unwrap_or(end).to_le_bytes());
            tensors.push(start..bytes.len() as u64);
            offsets.push(end);
            end = (end + tensor.size_bytes).next_multiple_of(self.alignment);
        }
        let header_end = bytes.len() as u64;
        let mut data = vec![];
        if !self.tensors.is_empty() {
            let data_offset = header_end.next_multiple_of(self.alignment);
            data.extend(offsets.iter().zip(&self.tensors).map(|(offset, tensor)| {
                let start = data_offset + offset;
                start..start + tensor.size_bytes
            }));
            let file_len = if self.pads_end { data_offset + end } else { data[data.len() - 1].end };
            bytes.resize(file_len as usize, 0xA5);
        }
        bytes.resize(bytes.len() + self.trailing, 0);
        BuiltGguf { bytes, entries, tensors, data, header_end }
    }
}

/// A safetensors file with this header and this many bytes of data.
pub fn safetensors(header: impl AsRef<[u8]>, data_len: usize) -> Vec<u8> {
    let mut bytes = text(header);
    bytes.resize(bytes.len() + data_len, 0xA5);
    bytes
}

/// One entry of a safetensors header.
pub fn json_entry(name: &str, dtype: &str, shape: &str, begin: usize, end: usize) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}
