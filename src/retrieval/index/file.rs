//! Indices as files: safetensors, so that other programs can read them.
//!
//! ```text
//! __metadata__  format "tilewright index", version "1", metric, storage, dims, count; model and pooling if known
//! live          U32 [ceil(count / 32)]        a bit for each vector that is not deleted, from the lowest
//! vectors       F32, F16 or I8 [count, dims]  those that are deleted included: their places are ids
//! scales        F16 [count, ceil(dims / 32)]  next to I8 alone: what each 32 numbers of a vector are multiples of
//! ```

#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;

use half::f16;

use super::{Bitset, Index, IndexOptions, MAX_DIMS, Metric, PIECE_BYTES, Storage};
use crate::device::Device;
use crate::dtype::BLOCK;
use crate::error::Error;
use crate::formats::own_file::{OwnFile, shown};
use crate::formats::{BlockType, Safetensors};

const FORMAT: &str = "index";
const VERSION: &str = "1";

impl Index {
    /// The index as a file's content.
    ///
    /// # Errors
    /// Errors of [`Device::read`].
    pub async fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.write_to(|piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })
        .await?;
        Ok(bytes)
    }

    /// Writes the index to a file, which is replaced only when all is written.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; errors of [`Device::read`].
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let mut file = crate::cache::Replacement::begin(path.as_ref())?;
        self.write_to(|piece| file.write(piece)).await?;
        file.finish()
    }

    /// Reads an index from a file.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened; else as [`Index::from_bytes`], with the file's name.
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn load(device: &Device, path: impl AsRef<Path>) -> Result<Index, Error> {
        let path = path.as_ref();
        let bytes = crate::load::FileBytes::map(path)?;
        Index::from_bytes(device, &bytes).await.map_err(|error| error.in_file(path))
    }

    /// Reads an index from a file's content.
    ///
    /// # Errors
    /// [`Error::Format`] that names what is wrong and where, down to the record whose vector is not finite or, where
    /// cosines are looked for, not of length 1; [`Error::Unsupported`] for another version; errors of
    /// [`Device::write`].
    pub async fn from_bytes(device: &Device, bytes: &[u8]) -> Result<Index, Error> {
        let file = File::read(bytes)?;
        let mut index = Index::new(device, file.dims, file.options.clone())?;
        if file.count == 0 {
            return Ok(index);
        }
        let ids = index.reserve(file.count)?;
        let cols = index.options.storage.cols(file.dims) as usize;
        let n_rows = (PIECE_BYTES / (4 * cols)).max(1);
        let mut packed = Vec::new();
        for first in ids.clone().step_by(n_rows) {
            packed.clear();
            for id in first..(first + n_rows as u32).min(ids.end) {
                file.check_record(id)?;
                file.pack(id, cols, &mut packed);
            }
            index.write_rows(first, &packed).await?;
        }
        index.publish(ids, |id| file.live.get(id))?;
        Ok(index)
    }

    /// Hands the file's content to `put`, piece by piece.
    async fn write_to(&self, mut put: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        put(&self.header())?;
        put(bytemuck::cast_slice(self.live.words()))?;
        let (dims, cols) = (self.dims as usize, self.options.storage.cols(self.dims) as usize);
        let number_bytes = number_type(self.options.storage).block_bytes() as usize;
        let mut scales: Vec<u8> = Vec::new();
        for shard in &self.shards {
            let n_rows = self.n_ids().saturating_sub(shard.first_id).min(shard.vectors.rows()) as usize;
            let slab = shard.vectors.only_slab("index")?;
            let words: Vec<u32> = self.device.read(&slab.words).await?;
            let (vectors, of_shard) = words.split_at(shard.vectors.quants_words(slab) as usize);
            let mut rows = Vec::with_capacity(n_rows * dims * number_bytes);
            for row in bytemuck::cast_slice::<u32, u8>(vectors).chunks_exact(cols * number_bytes).take(n_rows) {
                rows.extend_from_slice(&row[..dims * number_bytes]);
            }
            put(&rows)?;
            for row in bytemuck::cast_slice::<u32, u8>(of_shard).chunks_exact(cols / BLOCK * 2).take(n_rows) {
                scales.extend_from_slice(&row[..dims.div_ceil(BLOCK) * 2]);
            }
        }
        put(&scales)
    }

    /// The safetensors header and the length in front of it.
    fn header(&self) -> Vec<u8> {
        let IndexOptions { metric, storage, model, pooling } = &self.options;
        let (count, dims) = (self.n_ids().to_string(), self.dims.to_string());
        let label = OwnFile::label(FORMAT);
        let known =
            [("format", label.as_str()), ("version", VERSION), ("metric", metric.name()), ("storage", storage.name())];
        let known = known.into_iter().chain([("dims", dims.as_str()), ("count", count.as_str())]);
        let optional = [("model", model), ("pooling", pooling)];
        let optional = optional.iter().filter_map(|(key, text)| text.as_deref().map(|text| (*key, text)));
        let tensors = layout(*storage, self.n_ids(), self.dims);
        let tensors = tensors.iter().map(|(name, block_type, shape)| (*name, *block_type, shape.as_slice()));
        Safetensors::head(known.chain(optional), tensors)
    }
}

/// What numbers of vectors are in files.
fn number_type(storage: Storage) -> BlockType {
    match storage {
        Storage::F32 => BlockType::F32,
        Storage::F16 => BlockType::F16,
        Storage::Int8 => BlockType::I8,
    }
}

/// Names, types and shapes of the tensors, in the order of their data.
fn layout(storage: Storage, count: u32, dims: u32) -> Vec<(&'static str, BlockType, Vec<u64>)> {
    let (count, dims) = (u64::from(count), u64::from(dims));
    let mut tensors =
        vec![("live", BlockType::U32, vec![count.div_ceil(32)]), ("vectors", number_type(storage), vec![count, dims])];
    if storage == Storage::Int8 {
        tensors.push(("scales", BlockType::F16, vec![count, dims.div_ceil(BLOCK as u64)]));
    }
    tensors
}

/// A file's content, checked but for the vectors.
struct File<'a> {
    own: OwnFile<'a>,
    options: IndexOptions,
    dims: u32,
    count: u32,
    live: Bitset,
    vectors: &'a [u8],
    vectors_offset: u64,
    /// Empty where there are none.
    scales: &'a [u8],
    scales_offset: u64,
}

impl<'a> File<'a> {
    fn read(bytes: &'a [u8]) -> Result<File<'a>, Error> {
        let own = OwnFile::parse(bytes, FORMAT, VERSION)?;
        let metric = pick(&own, "metric", &Metric::ALL, Metric::name)?;
        let storage = pick(&own, "storage", &Storage::ALL, Storage::name)?;
        let number = |key: &str, range: std::ops::RangeInclusive<u32>| {
            let text = own.text(key)?;
            let number = text.parse().ok().filter(|number| range.contains(number));
            let expected = || format!("a number from {} to {}", range.start(), range.end());
            number.ok_or_else(|| own.wrong(key, expected(), shown(text)))
        };
        let (dims, count) = (number("dims", 1..=MAX_DIMS)?, number("count", 0..=u32::MAX)?);
        let optional = |key| own.header.text(key).map(str::to_string);
        let options = IndexOptions { metric, storage, model: optional("model"), pooling: optional("pooling") };

        let tensors = layout(storage, count, dims);
        if let Some(other) = own.header.tensors.iter().find(|tensor| tensors.iter().all(|known| known.0 != tensor.name))
        {
            return Err(own.broken("tensor", other.offset, "one of an index", shown(&other.name)));
        }
        let mut found = Vec::new();
        for (name, block_type, shape) in tensors {
            found.push(own.tensor(name, block_type, |found| (found != shape).then(|| format!("{shape:?}")))?);
        }
        let [(live_offset, live_bytes), (vectors_offset, vectors)] = [found[0], found[1]];
        let (scales_offset, scales) = found.get(2).copied().unwrap_or_default();
        let words: Vec<u32> = live_bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let live = Bitset::from_words(count, words).ok_or_else(|| {
            let offset = (live_offset + live_bytes.len() as u64).saturating_sub(4);
            own.broken("live", offset, format!("no bit past the {count} of the vectors"), "one")
        })?;
        Ok(File { own, options, dims, count, live, vectors, vectors_offset, scales, scales_offset })
    }

    /// The bytes of a record in a tensor of vectors or scales.
    fn row<'b>(&self, bytes: &'b [u8], id: u32) -> &'b [u8] {
        let size_bytes = bytes.len() / self.count as usize;
        &bytes[id as usize * size_bytes..][..size_bytes]
    }

    /// Refuses a vector that is not finite, or not of length 1 where it should be.
    fn check_record(&self, id: u32) -> Result<(), Error> {
        let (vector, scales) = (self.row(self.vectors, id), self.row(self.scales, id));
        let vectors_at = self.vectors_offset + u64::from(id) * vector.len() as u64;
        let half = |bytes: &[u8; 2]| f32::from(f16::from_le_bytes(*bytes));
        // Scales say all about the numbers of bytes, whose sums of squares cannot overflow.
        let is_finite = |x: &f32| x.is_finite();
        let scales: Vec<f32> = scales.as_chunks().0.iter().map(half).collect();
        if let Some(at) = scales.iter().position(|x| !is_finite(x)) {
            let offset = self.scales_offset + (id as usize * scales.len() + at) as u64 * 2;
            return Err(self.own.broken(
                format!("scale {at} of record {id}"),
                offset,
                "a finite number",
                scales[at].to_string(),
            ));
        }
        let numbers: Vec<f32> = match self.options.storage {
            Storage::F32 => vector.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            Storage::F16 => vector.as_chunks().0.iter().map(half).collect(),
            Storage::Int8 => {
                let blocks = vector.chunks(BLOCK).zip(&scales);
                blocks.flat_map(|(block, scale)| block.iter().map(move |&x| f32::from(x as i8) * scale)).collect()
            }
        };
        if let Some(at) = numbers.iter().position(|x| !is_finite(x)) {
            let offset = vectors_at + (at * (vector.len() / numbers.len())) as u64;
            return Err(self.own.broken(format!("record {id}"), offset, "finite numbers", numbers[at].to_string()));
        }
        // What rounding may do to a length of 1: bytes are off by up to a 254th of the largest of their block.
        let tolerance = if self.options.storage == Storage::Int8 { 0.05 } else { 0.002 };
        let square: f64 = numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        if self.options.metric == Metric::Cosine && (square - 1.0).abs() > tolerance {
            let found = format!("of length {}", square.sqrt());
            return Err(self.own.broken(format!("record {id}"), vectors_at, "a vector of length 1", found));
        }
        Ok(())
    }

    /// Appends a vector as matrices of its type take it, padded with zeros to `cols` columns.
    fn pack(&self, id: u32, cols: usize, packed: &mut Vec<u8>) {
        let (vector, end) = (self.row(self.vectors, id), packed.len());
        let row_bytes = crate::file_row_bytes(self.options.storage.weight(), cols);
        match self.options.storage {
            Storage::F32 | Storage::F16 => packed.extend_from_slice(vector),
            Storage::Int8 => {
                let scales = self.row(self.scales, id).as_chunks::<2>().0;
                for (block, scale) in vector.chunks(BLOCK).zip(scales) {
                    packed.extend(scale);
                    packed.extend_from_slice(block);
                    packed.extend(std::iter::repeat_n(0, BLOCK - block.len()));
                }
            }
        }
        packed.resize(end + row_bytes, 0);
    }
}

/// The one of `all` whose name stands under this key.
fn pick<T: Copy>(own: &OwnFile<'_>, key: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, Error> {
    let names = || all.iter().map(|&one| name(one)).collect::<Vec<_>>().join(" or ");
    let text = own.text(key)?;
    all.iter().copied().find(|&one| name(one) == text).ok_or_else(|| own.wrong(key, names(), shown(text)))
}
