//! Index files, in the safetensors format, so that other programs can read them.
//!
//! ```text
//! __metadata__  format "tilewright index", version "1", metric, storage, dims, count; model and pooling if known
//! live          U32 [ceil(count / 32)]        one bit per vector: 1 if not deleted; lowest bit first
//! vectors       F32, F16 or I8 [count, dims]  including deleted vectors: the row is the id
//! scales        F16 [count, ceil(dims / 32)]  only with I8: the scale of each 32 numbers
//! ```

use std::path::Path;

use half::f16;

use super::{Bitset, Index, IndexOptions, MAX_DIMS, Metric, PIECE_BYTES, Storage};
use crate::device::Device;
use crate::dtype::BLOCK;
use crate::error::Error;
use crate::formats::arriving::{Arriving, Sink};
use crate::formats::own_file::{OwnFile, shown};
use crate::formats::{BlockType, Safetensors, TensorInfo, UNKNOWN_LEN};
use crate::matrix::{Matrix, Slab};
use crate::saving::{RowSize, Saving};

const FORMAT: &str = "index";
const VERSION: &str = "1";

impl Index {
    /// Serialises the index in its current state. Vectors that are appended later are not included.
    ///
    /// # Errors
    /// [`Error::Operand`] if the vectors do not have an index's layout.
    pub fn saving(&self) -> Result<Saving, Error> {
        let mut saving = Saving::new(self.header());
        saving.add(bytemuck::cast_slice(self.live.words()).to_vec());
        for part in parts(self.options.storage) {
            let row = part.row(self.dims, self.options.storage);
            for shard in &self.shards {
                let n_rows = self.n_ids().saturating_sub(shard.first_id).min(shard.vectors.rows()) as usize;
                let (slab, first) = part.place(&shard.vectors)?;
                saving.add_rows(&self.device, &slab.words, first, n_rows, row);
            }
        }
        Ok(saving)
    }

    /// The index serialised as a file.
    ///
    /// # Errors
    /// As [`Index::saving`]; errors of [`Device::read`].
    pub async fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        self.saving()?.to_bytes().await
    }

    /// Writes the index to a file. Replaces an existing file only after everything is written.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; errors of [`Device::read`].
    pub async fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.saving()?.write(path.as_ref()).await
    }

    /// Reads an index from a file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened; else as [`Index::from_bytes`], with the file's name.
    pub async fn load(device: &Device, path: impl AsRef<Path>) -> Result<Index, Error> {
        let path = path.as_ref();
        let bytes = crate::load::FileBytes::map(path)?;
        Index::from_bytes(device, &bytes).await.map_err(|error| error.in_file(path))
    }

    /// Reads an index from the bytes of a file.
    ///
    /// # Errors
    /// As [`IndexLoader::push`].
    pub async fn from_bytes(device: &Device, bytes: &[u8]) -> Result<Index, Error> {
        let mut loader = IndexLoader::new(device, Some(bytes.len() as u64));
        while let Some(start) = loader.wanted() {
            let rest = usize::try_from(start).ok().and_then(|start| bytes.get(start..));
            loader.push(rest.unwrap_or_default()).await?;
        }
        loader.finish()
    }

    /// The safetensors header and its length prefix.
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

/// The type of a vector's numbers in files.
fn number_type(storage: Storage) -> BlockType {
    match storage {
        Storage::F32 => BlockType::F32,
        Storage::F16 => BlockType::F16,
        Storage::Int8 => BlockType::I8,
    }
}

/// Names, types and shapes of the tensors in file order.
fn layout(storage: Storage, count: u32, dims: u32) -> Vec<(&'static str, BlockType, Vec<u64>)> {
    let (count, dims) = (u64::from(count), u64::from(dims));
    let mut tensors =
        vec![("live", BlockType::U32, vec![count.div_ceil(32)]), ("vectors", number_type(storage), vec![count, dims])];
    if storage == Storage::Int8 {
        tensors.push(("scales", BlockType::F16, vec![count, dims.div_ceil(BLOCK as u64)]));
    }
    tensors
}

/// The tensors with one row per vector.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowTensor {
    Vectors,
    Scales,
}

/// In file order.
fn parts(storage: Storage) -> impl Iterator<Item = RowTensor> {
    [RowTensor::Vectors, RowTensor::Scales].into_iter().take(if storage == Storage::Int8 { 2 } else { 1 })
}

impl RowTensor {
    fn row(self, dims: u32, storage: Storage) -> RowSize {
        let (dims, cols) = (dims as usize, storage.cols(dims) as usize);
        match self {
            RowTensor::Vectors => {
                let number_bytes = number_type(storage).block_bytes() as usize;
                RowSize { words: cols * number_bytes / 4, kept_bytes: dims * number_bytes }
            }
            RowTensor::Scales => RowSize { words: cols / BLOCK / 2, kept_bytes: dims.div_ceil(BLOCK) * 2 },
        }
    }

    /// The slab and offset of a shard's first row.
    fn place(self, vectors: &Matrix) -> Result<(&Slab, usize), Error> {
        let slab = vectors.only_slab("index")?;
        Ok((slab, if self == RowTensor::Vectors { 0 } else { vectors.quants_words(slab) as usize }))
    }
}

/// Reads an index from a file that arrives in pieces. Buffers only part of a row and, for I8, one number per 32.
pub struct IndexLoader {
    arriving: Arriving,
    filling: Filling,
}

impl IndexLoader {
    /// A loader for a file of `file_len` bytes, if known.
    pub fn new(device: &Device, file_len: Option<u64>) -> IndexLoader {
        let file_len = file_len.unwrap_or(UNKNOWN_LEN);
        let filling = Filling { device: device.clone(), is_sized: file_len != UNKNOWN_LEN, begun: None };
        IndexLoader { arriving: Arriving::new(file_len), filling }
    }

    /// Offset of the next bytes that the loader needs; `None` when complete. Offsets only grow in files that
    /// [`Index`] wrote.
    pub fn wanted(&self) -> Option<u64> {
        self.arriving.wanted()
    }

    /// Accepts bytes from the wanted offset on. Waits for the device at intervals, so that uploads do not accumulate.
    ///
    /// # Errors
    /// [`Error::Format`] with the field and offset, down to the record whose vector is non-finite or, with
    /// [`Metric::Cosine`], not of length 1; [`Error::Unsupported`] for another version; errors of [`Device::write`].
    /// The loader is unusable afterwards.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let start = self.wanted().unwrap_or_default();
        let mut at = start;
        // The header may be the whole file.
        for piece in bytes.chunks(PIECE_BYTES).chain(bytes.is_empty().then_some(bytes)) {
            self.arriving.push(at, piece, &mut self.filling)?;
            self.filling.device.drained().await?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// [`Error::Truncated`] or [`Error::Format`] if bytes are missing.
    pub fn end(&self) -> Result<(), Error> {
        self.arriving.end()
    }

    /// The index, after all wanted bytes were pushed.
    ///
    /// # Errors
    /// As [`IndexLoader::end`]; [`Error::Format`] if a live bit is set past the last vector.
    pub fn finish(self) -> Result<Index, Error> {
        self.arriving.end()?;
        match self.filling.begun {
            Some(begun) => begun.finish(),
            None => Err(Error::Truncated { part: "its header".into(), needed_bytes: 1, found_bytes: 0 }),
        }
    }
}

struct Filling {
    device: Device,
    /// Whether the header's counts were checked against the file's length.
    is_sized: bool,
    begun: Option<Begun>,
}

impl Sink for Filling {
    fn begin(&mut self, header: Safetensors) -> Result<Vec<TensorInfo>, Error> {
        let (begun, tensors) = Begun::read(&self.device, header, self.is_sized)?;
        self.begun = Some(begun);
        Ok(tensors)
    }

    fn take(&mut self, tensor: &TensorInfo, at: u64, bytes: &[u8]) -> Result<usize, Error> {
        self.begun.as_mut().map_or(Ok(bytes.len()), |begun| begun.take(tensor, at, bytes))
    }
}

/// An index with a parsed header.
struct Begun {
    own: OwnFile,
    index: Index,
    count: u32,
    live: Vec<u32>,
    live_end: u64,
    vectors_offset: u64,
    /// For I8 with cosine: per 32 numbers, the scale or the sum of squares, whichever comes first in the file.
    first_halves: Vec<f32>,
    scales_come_first: bool,
}

impl Begun {
    fn read(device: &Device, header: Safetensors, is_sized: bool) -> Result<(Begun, Vec<TensorInfo>), Error> {
        let own = OwnFile::of(header, FORMAT, VERSION)?;
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
            return Err(own.broken("tensor", other.offset, "a tensor of an index", shown(&other.name)));
        }
        let mut wanted = Vec::new();
        for (name, block_type, shape) in tensors {
            let tensor = own.tensor(name, block_type, |found| (found != shape).then(|| format!("{shape:?}")))?;
            wanted.push(tensor.clone());
        }
        let (live_end, vectors_offset) = (wanted[0].range().end, wanted[1].offset);
        let scales_come_first = wanted.get(2).is_some_and(|scales| scales.offset < vectors_offset);
        crate::sort::by_key(&mut wanted, |tensor| tensor.offset);
        let mut index = Index::new(device, dims, options)?;
        if is_sized {
            index.reserve(count)?;
        }
        let (live, first_halves) = (Vec::new(), Vec::new());
        Ok((Begun { own, index, count, live, live_end, vectors_offset, first_halves, scales_come_first }, wanted))
    }

    fn take(&mut self, tensor: &TensorInfo, at: u64, bytes: &[u8]) -> Result<usize, Error> {
        let part = match tensor.name.as_str() {
            "live" => {
                let words = bytes.as_chunks().0;
                self.live.extend(words.iter().map(|&word| u32::from_le_bytes(word)));
                return Ok(4 * words.len());
            }
            "vectors" => RowTensor::Vectors,
            _ => RowTensor::Scales,
        };
        let row = part.row(self.index.dims, self.index.options.storage);
        let rows = bytes.chunks_exact(row.kept_bytes);
        let (first_id, n_rows) = ((at / row.kept_bytes as u64) as u32, rows.len());
        // If the file's length is unknown, the header's count is unchecked: reserve only what has arrived.
        self.index.reserve(first_id + n_rows as u32)?;
        let mut words = vec![0u32; n_rows * row.words];
        let padded = bytemuck::cast_slice_mut::<u32, u8>(&mut words).chunks_exact_mut(4 * row.words);
        for (id, (bytes, padded)) in (first_id..).zip(rows.zip(padded)) {
            match part {
                RowTensor::Vectors => self.check_vector(id, bytes)?,
                RowTensor::Scales => self.check_scales(tensor, id, bytes)?,
            }
            padded[..bytes.len()].copy_from_slice(bytes);
        }
        self.index.write_part(part, first_id, &words, row)?;
        Ok(n_rows * row.kept_bytes)
    }

    /// Refuses a vector that is non-finite, or with cosine not of length 1 if its scales are known.
    fn check_vector(&mut self, id: u32, vector: &[u8]) -> Result<(), Error> {
        let at = self.vectors_offset + u64::from(id) * vector.len() as u64;
        let half = |bytes: &[u8; 2]| f32::from(f16::from_le_bytes(*bytes));
        let numbers: Vec<f32> = match self.index.options.storage {
            Storage::F32 => vector.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            Storage::F16 => vector.as_chunks().0.iter().map(half).collect(),
            Storage::Int8 => {
                // Integers below 2^24, exact in f32.
                let square = |block: &[u8]| block.iter().map(|&x| i32::from(x as i8).pow(2)).sum::<i32>() as f32;
                let squares: Vec<f32> = vector.chunks(BLOCK).map(square).collect();
                return self.check_halves(id, &squares, self.scales_come_first);
            }
        };
        if let Some(column) = numbers.iter().position(|x| !x.is_finite()) {
            let offset = at + (column * (vector.len() / numbers.len())) as u64;
            let found = numbers[column].to_string();
            return Err(self.own.broken(format!("record {id}"), offset, "finite numbers", found));
        }
        self.check_length(id, numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
    }

    /// Refuses scales that are non-finite, or whose vector, with cosine, is not of length 1 if its bytes are known.
    /// Sums of squares of bytes cannot overflow, so finite scales suffice.
    fn check_scales(&mut self, tensor: &TensorInfo, id: u32, bytes: &[u8]) -> Result<(), Error> {
        let scales: Vec<f32> = bytes.as_chunks().0.iter().map(|&scale| f32::from(f16::from_le_bytes(scale))).collect();
        if let Some(at) = scales.iter().position(|x| !x.is_finite()) {
            let offset = tensor.offset + (id as usize * scales.len() + at) as u64 * 2;
            let field = format!("scale {at} of record {id}");
            return Err(self.own.broken(field, offset, "a finite number", scales[at].to_string()));
        }
        self.check_halves(id, &scales, !self.scales_come_first)
    }

    /// Checks a vector's length once both its scales and its bytes' squares are known.
    fn check_halves(&mut self, id: u32, halves: &[f32], come_last: bool) -> Result<(), Error> {
        if self.index.options.metric == Metric::Dot {
            return Ok(());
        }
        if !come_last {
            self.first_halves.extend_from_slice(halves);
            return Ok(());
        }
        let first = self.first_halves.iter().skip(id as usize * halves.len());
        let products = halves.iter().zip(first).map(|(&one, &other)| match self.scales_come_first {
            true => f64::from(one) * f64::from(other).powi(2),
            false => f64::from(one).powi(2) * f64::from(other),
        });
        self.check_length(id, products.sum())
    }

    fn check_length(&self, id: u32, square: f64) -> Result<(), Error> {
        let IndexOptions { metric, storage, .. } = self.index.options;
        // Rounding tolerance: bytes are off by up to 1/254 of the largest number in their block.
        let tolerance = if storage == Storage::Int8 { 0.05 } else { 0.002 };
        if metric == Metric::Cosine && (square - 1.0).abs() > tolerance {
            let row = RowTensor::Vectors.row(self.index.dims, storage);
            let offset = self.vectors_offset + u64::from(id) * row.kept_bytes as u64;
            let found = format!("of length {}", square.sqrt());
            return Err(self.own.broken(format!("record {id}"), offset, "a vector of length 1", found));
        }
        Ok(())
    }

    fn finish(self) -> Result<Index, Error> {
        let Begun { own, mut index, count, live, live_end, .. } = self;
        let live = Bitset::from_words(count, live).ok_or_else(|| {
            own.broken("live", live_end.saturating_sub(4), format!("no bit past the {count} of the vectors"), "one")
        })?;
        index.publish(0..count, |id| live.get(id))?;
        Ok(index)
    }
}

impl Index {
    /// Writes rows in device layout from `first_id` on.
    fn write_part(&self, part: RowTensor, first_id: u32, words: &[u32], row: RowSize) -> Result<(), Error> {
        let end = first_id + (words.len() / row.words) as u32;
        for shard in &self.shards {
            let (first, last) = (first_id.max(shard.first_id), end.min(shard.first_id + shard.vectors.rows()));
            if first < last {
                let (slab, begin) = part.place(&shard.vectors)?;
                let rows = &words[(first - first_id) as usize * row.words..(last - first_id) as usize * row.words];
                self.device.write(&slab.words, begin + (first - shard.first_id) as usize * row.words, rows)?;
            }
        }
        Ok(())
    }
}

/// The element of `all` that metadata `key` names.
fn pick<T: Copy>(own: &OwnFile, key: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, Error> {
    let names = || all.iter().map(|&one| name(one)).collect::<Vec<_>>().join(" or ");
    let text = own.text(key)?;
    all.iter().copied().find(|&one| name(one) == text).ok_or_else(|| own.wrong(key, names(), shown(text)))
}
