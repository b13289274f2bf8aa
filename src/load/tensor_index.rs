//! The tensors of a model's files, and their upload to a device.
//!
//! Bytes arrive in file order in pieces of any size, and rows are repacked on arrival; a partial row waits for its
//! rest. Mapped files use the same path as downloads. Every tensor must be read or listed in `unread.rs`. Uploads are
//! drained every 32 MiB, so a download never piles up in memory.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::gguf::FACTORS;
use super::{FileBytes, WeightFiles, WeightShare, mxfp4};
use crate::device::Device;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::formats::{BlockType, TensorInfo, block};
use crate::matrix::{Matrix, TailEdges, file_row_bytes};
use crate::model::{
    ExpertPart, PositionBiases, RowPlaces, SourceTensor, TensorSlot, WeightSource, layer_of, name_in_layer,
};
use crate::platform::{IS_BROWSER, on_threads};
use crate::xxh64::Xxh64;

/// Tensors by GGUF name, with their locations.
#[derive(Clone, Debug, Default)]
pub struct TensorIndex {
    tensors: HashMap<String, IndexEntry>,
}

#[derive(Clone, Debug)]
struct IndexEntry {
    /// Number of its file.
    file: usize,
    info: TensorInfo,
    stored: FileLayout,
    /// The tensor with its scales and that tensor's file number; see [`mxfp4`].
    scales: Option<(usize, TensorInfo)>,
    /// Whether it counts towards the weights' digest.
    is_selected: bool,
    /// Whether it is a row of another tensor, which may be uploaded too.
    is_row: bool,
}

impl IndexEntry {
    /// Digest of the tensor from the hash of its bytes, scales first.
    fn item_digest(&self, mut bytes: Xxh64) -> u64 {
        let TensorInfo { name, shape, block_type, .. } = &self.info;
        bytes.add(format!("{name} {block_type} {shape:?}").as_bytes());
        bytes.finish()
    }

    /// Rows and groups of each expert's matrix, if its scales are a separate tensor.
    fn groups(&self) -> Option<[usize; 2]> {
        self.scales.as_ref().and_then(|(_, scales)| match scales.shape[..] {
            [_, rows, groups] => Some([rows as usize, groups as usize]),
            _ => None,
        })
    }

    /// The shape of `n` experts' matrices, if they are one matrix of this shape.
    fn experts_apart(shape: &[u64], n: u32) -> Option<Vec<u64>> {
        match *shape {
            [rows, cols] if n > 0 && rows.is_multiple_of(n.into()) => Some(vec![n.into(), rows / u64::from(n), cols]),
            _ => None,
        }
    }

    /// Whether its bytes are among those of another tensor.
    fn is_within(&self, of: &IndexEntry) -> bool {
        let end = |info: &TensorInfo| info.offset.saturating_add(info.size_bytes);
        self.file == of.file && self.info.offset >= of.info.offset && end(&self.info) <= end(&of.info)
    }

    /// Its part for expert `i` of `n`, if the file stores experts contiguously.
    fn of_expert(&self, [i, n]: [u32; 2]) -> Option<IndexEntry> {
        let [i, n] = [i, n].map(u64::from);
        let cut = |info: &TensorInfo| {
            let mut part = info.clone();
            let experts = part.shape.first_mut().filter(|experts| **experts == n && i < n)?;
            *experts = 1;
            part.size_bytes = info.size_bytes.checked_div(n).filter(|size| size * n == info.size_bytes)?;
            part.offset += i * part.size_bytes;
            Some(part)
        };
        let scales = match &self.scales {
            Some((file, scales)) => Some((*file, cut(scales)?)),
            None => None,
        };
        Some(IndexEntry { info: cut(&self.info)?, scales, ..self.clone() })
    }

    /// See [`IndexEntry::item_digest`]: from the files' bytes.
    fn digest_of_files(&self, files: &[FileBytes]) -> u64 {
        const PIECE: usize = 4 << 20;
        let mut digest = Xxh64::new();
        let scales = self.scales.as_ref().map(|(file, scales)| (*file, scales));
        for (file, info) in scales.into_iter().chain([(self.file, &self.info)]) {
            // Tensors past their file's end were refused with the header.
            let bytes = info.bytes(&files[file]).unwrap_or_default();
            for (i, piece) in bytes.chunks(PIECE).enumerate() {
                digest.add(piece);
                let first = info.offset as usize + i * PIECE;
                files[file].let_go(first..first + piece.len());
            }
        }
        self.item_digest(digest)
    }
}

/// The layout of a tensor in the file relative to the kernels'.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FileLayout {
    /// The same.
    AsRead,
    /// Each value minus 1: Gemma's norms.
    LessOne,
    /// `[columns, rows]`: GPT-2's matrices.
    Transposed,
    /// `[columns, rows]` per expert, with gates and ups interleaved if `paired`: gpt-oss.
    ExpertsTransposed {
        /// Whether gate and up rows alternate; kernels read all gates, then all ups.
        paired: bool,
    },
    /// `[columns, rows]` of all experts as one matrix: Nomic.
    ExpertsTransposedJoint {
        /// Experts.
        n: u32,
    },
    /// Gates and ups interleaved, per expert.
    Paired,
    /// Several kinds of rows per head, head by head: queries, keys and values of GPT-NeoX; queries and gates of
    /// Qwen3.5. Kernels read all heads' rows of one kind together.
    ByHead {
        /// H.
        n_heads: u32,
        /// Kinds of rows in the kernels' order.
        kinds: &'static [u32],
    },
    /// Rows of each head in quarters, which kernels read in the order 0, 2, 1, 3: Gemma 4's patches, whose halves of a
    /// head are rotated apart.
    Quarters {
        /// H.
        n_heads: u32,
    },
    /// Rows in groups, each with several kinds of rows: projections of Qwen3-Next. Kernels read all groups' rows of one
    /// kind together.
    Grouped {
        /// Groups.
        n: u32,
        /// A group's rows of each kind.
        rows: [u32; 4],
    },
    /// Biases by bucket, `[buckets, H]`. Kernels read a row for each distance.
    ByDistance(PositionBiases),
    /// The logarithm of the negated value: time constants.
    NegativeLog,
    /// Values that are multiplied by a factor: the scale of Gemma 4's router.
    Scaled(f32),
    /// `[rows, channels, frames, ..]`, whose two frames are summed, as F32: the same picture twice.
    SummedFrames,
    /// `[rows, channels, taps]`: convolutions over time. Kernels read all channels of a tap together.
    ByTap,
    /// Groups of rows that are multiplied by a factor each, as F32: Falcon-H1.
    ScaledRows {
        /// Rows of each group.
        rows: [u32; 5],
        /// Its factor.
        factors: [f32; 5],
    },
}

impl FileLayout {
    /// The bytes of a whole tensor in the kernels' row order; `None` if they already are.
    pub(super) fn ordered(self, info: &TensorInfo, bytes: &[u8]) -> Option<Vec<u8>> {
        let rows = info.shape.first().copied().unwrap_or(1) as usize;
        match self {
            FileLayout::AsRead
            | FileLayout::LessOne
            | FileLayout::NegativeLog
            | FileLayout::Scaled(_)
            | FileLayout::ScaledRows { .. }
            | FileLayout::SummedFrames
            | FileLayout::Paired => None,
            FileLayout::Transposed => {
                let cols = info.shape.get(1).copied().unwrap_or(1) as usize;
                let size = bytes.len() / (rows * cols);
                let at = |i: usize| &bytes[(i % rows * cols + i / rows) * size..][..size];
                Some((0..rows * cols).flat_map(at).copied().collect())
            }
            FileLayout::ByTap => {
                // A tensor of another shape is refused where it is declared.
                let [rows, channels, taps] = info.shape[..] else { return None };
                let [rows, channels, taps] = [rows, channels, taps].map(|n| n as usize);
                let size = bytes.len().checked_div(rows * channels * taps)?;
                let at = |row: usize, tap: usize, channel: usize| {
                    &bytes[((row * channels + channel) * taps + tap) * size..][..size]
                };
                let of_row = |row| (0..taps).flat_map(move |tap| (0..channels).flat_map(move |c| at(row, tap, c)));
                Some((0..rows).flat_map(of_row).copied().collect())
            }
            FileLayout::ExpertsTransposed { paired } => {
                // A vector per expert is a one-column matrix.
                let [n_experts, cols, rows] = match info.shape[..] {
                    [n_experts, cols, rows] => [n_experts, cols, rows],
                    [n_experts, rows] => [n_experts, 1, rows],
                    _ => return None,
                }
                .map(|n| n as usize);
                let size = bytes.len() / (n_experts * cols * rows);
                let from = |row: usize| if paired { row % (rows / 2) * 2 + row / (rows / 2) } else { row };
                let at = |i: usize| {
                    let (expert, row, col) = (i / (rows * cols), i / cols % rows, i % cols);
                    &bytes[((expert * cols + col) * rows + from(row)) * size..][..size]
                };
                Some((0..n_experts * cols * rows).flat_map(at).copied().collect())
            }
            FileLayout::ByDistance(biases) => {
                let row_bytes = bytes.len() / rows.max(1);
                let row = |bucket: u32| bytes.get(bucket as usize * row_bytes..).and_then(|rest| rest.get(..row_bytes));
                // A tensor with fewer buckets is refused where it is declared.
                Some(biases.buckets().filter_map(row).flatten().copied().collect())
            }
            FileLayout::ExpertsTransposedJoint { n } => {
                let apart = IndexEntry::experts_apart(&info.shape, n)?;
                let info = TensorInfo { shape: apart, ..info.clone() };
                FileLayout::ExpertsTransposed { paired: false }.ordered(&info, bytes)
            }
            FileLayout::Grouped { n, rows: of_group } => {
                let height: usize = of_group.iter().map(|&rows| rows as usize).sum();
                // A tensor of another shape is refused where it is declared.
                let row_bytes = bytes.len().checked_div(height * n as usize).filter(|&n| n * rows == bytes.len())?;
                let starts = of_group.iter().scan(0, |next, &rows| {
                    let first = *next;
                    *next += rows as usize;
                    Some((first, rows as usize))
                });
                let places = starts.flat_map(|(first, rows)| (0..n as usize).map(move |i| (i * height + first, rows)));
                Some(places.flat_map(|(row, rows)| &bytes[row * row_bytes..][..rows * row_bytes]).copied().collect())
            }
            FileLayout::Quarters { n_heads } => {
                // A tensor of another shape is refused where it is declared.
                let quarter = bytes
                    .len()
                    .checked_div(4 * n_heads as usize)
                    .filter(|n| n * 4 * n_heads as usize == bytes.len())?;
                let places = (0..n_heads as usize).flat_map(|h| [0, 2, 1, 3].map(|kind| 4 * h + kind));
                Some(places.flat_map(|place| &bytes[place * quarter..][..quarter]).copied().collect())
            }
            FileLayout::ByHead { n_heads, kinds } => {
                // A head's rows of one kind are contiguous.
                let (n_heads, n_kinds) = (n_heads as usize, kinds.len());
                let size = rows / (n_kinds * n_heads) * (bytes.len() / rows);
                let places = kinds.iter().flat_map(|&kind| (0..n_heads).map(move |h| h * n_kinds + kind as usize));
                Some(places.flat_map(|place| &bytes[place * size..][..size]).copied().collect())
            }
        }
    }
}

impl TensorIndex {
    /// The entries of declared tensors, which were declared from this index, so all are found.
    fn found(&self, tensor_slots: Vec<(&str, TensorSlot)>) -> Vec<(IndexEntry, TensorSlot)> {
        let entry = |(name, place)| Some((self.tensors.get(name)?.clone(), place));
        tensor_slots.into_iter().filter_map(entry).collect()
    }

    /// Adds a tensor of file number `file` under its GGUF name.
    pub(super) fn insert(&mut self, name: String, file: usize, info: TensorInfo, stored: FileLayout) {
        let entry = IndexEntry { file, info, stored, scales: None, is_selected: true, is_row: false };
        self.tensors.insert(name, entry);
    }

    /// Adds row `row` of the matrix `of` as a matrix of its own.
    ///
    /// # Errors
    /// [`Error::Config`] naming the matrix if it is missing or has no such row.
    pub(super) fn insert_row(&mut self, name: String, of: &str, row: u32) -> Result<(), Error> {
        let found = self.tensors.get(of).filter(|entry| entry.stored == FileLayout::AsRead && entry.scales.is_none());
        let cut = found.and_then(|entry| {
            let [rows, columns] = entry.info.shape[..] else { return None };
            let size_bytes = entry.info.size_bytes.checked_div(rows).filter(|_| u64::from(row) < rows)?;
            let offset = entry.info.offset + u64::from(row) * size_bytes;
            let info = TensorInfo { shape: vec![1, columns], offset, size_bytes, ..entry.info.clone() };
            Some(IndexEntry { info, is_row: true, is_selected: false, ..entry.clone() })
        });
        match cut {
            Some(entry) => {
                self.tensors.insert(name, entry);
                Ok(())
            }
            None => Err(Error::Config {
                field: of.into(),
                expected: format!("a matrix with a row {row}"),
                found: found.map_or("missing".into(), |entry| format!("one of shape {:?}", entry.info.shape)),
            }),
        }
    }

    /// Takes the bytes of a tensor from the beginning of another file.
    #[cfg(feature = "lora")]
    pub(super) fn move_to(&mut self, name: &str, file: usize) {
        if let Some(entry) = self.tensors.get_mut(name) {
            (entry.file, entry.info.offset) = (file, 0);
        }
    }

    /// Sets each tensor's layout by its GGUF name.
    pub(super) fn set_layouts(&mut self, layout: impl Fn(&str) -> FileLayout) {
        self.tensors.iter_mut().for_each(|(name, entry)| entry.stored = layout(name));
    }

    /// Multiplies the rows of a tensor of each layer, up to five groups of them, by factors.
    pub(super) fn scale(&mut self, name: &str, groups: &[(u32, f32)]) {
        let (mut rows, mut factors) = ([0; 5], [1.0; 5]);
        for ((row, factor), &(n, by)) in rows.iter_mut().zip(&mut factors).zip(groups) {
            (*row, *factor) = (n, by);
        }
        let is_it = |found: &str| name_in_layer(found) == Some(name) && factors.iter().any(|&by| by != 1.0);
        let found = self.tensors.iter_mut().filter(|(found, _)| is_it(found));
        found.for_each(|(_, entry)| entry.stored = FileLayout::ScaledRows { rows, factors });
    }

    /// Adds a tensor with the rows of two of a layer's tensors, half each.
    pub(super) fn insert_halves(&mut self, layer: &str, names: [&str; 2], file: usize, info: &TensorInfo) {
        let mut half = info.clone();
        half.size_bytes /= 2;
        if let Some(rows) = half.shape.first_mut() {
            *rows /= 2;
        }
        for (i, name) in names.into_iter().enumerate() {
            let offset = info.offset + i as u64 * half.size_bytes;
            self.insert(
                format!("{layer}.{name}.weight"),
                file,
                TensorInfo { offset, ..half.clone() },
                FileLayout::AsRead,
            );
        }
    }

    /// Adds an MXFP4 tensor with its exponents in a separate tensor.
    ///
    /// # Errors
    /// [`Error::Config`] if the two do not match.
    pub(super) fn insert_scaled(
        &mut self,
        name: String,
        (file, blocks): (usize, &TensorInfo),
        scales: (usize, TensorInfo),
        paired: bool,
    ) -> Result<(), Error> {
        let info = mxfp4::joined(&blocks.name, blocks, &scales.1)?;
        let stored = if paired { FileLayout::Paired } else { FileLayout::AsRead };
        let entry = IndexEntry { file, info, stored, scales: Some(scales), is_selected: true, is_row: false };
        self.tensors.insert(name, entry);
        Ok(())
    }

    /// Drops the tensors of layers from `n_layers` on. Returns whether there were any.
    pub(super) fn drop_layers(&mut self, n_layers: u32) -> bool {
        let n_before = self.tensors.len();
        self.tensors.retain(|name, _| layer_of(name).is_none_or(|layer| layer < n_layers));
        self.tensors.len() < n_before
    }

    /// The rows of a table, if the file stores each contiguously.
    pub(crate) fn table_rows(&self, name: &str) -> Option<TableRows> {
        let entry = self.tensors.get(name)?;
        (entry.stored == FileLayout::AsRead && entry.scales.is_none()).then(|| TableRows { entry: entry.clone() })
    }

    /// Names of the tensors of layers from `first` on.
    pub(crate) fn of_layers_from(&self, first: u32) -> impl Iterator<Item = &str> {
        let names = self.tensors.keys().map(String::as_str);
        names.filter(move |name| layer_of(name).is_some_and(|layer| layer >= first))
    }

    /// Excludes layers from `first` on from the digest: an optional head, without which sessions stay compatible.
    pub(super) fn leave_untold(&mut self, first: u32) {
        let of_head = |name: &str| layer_of(name).is_some_and(|layer| layer >= first);
        self.tensors.iter_mut().filter(|(name, _)| of_head(name)).for_each(|(_, entry)| entry.is_selected = false);
    }

    /// Removes a tensor and returns its file number and location.
    pub(super) fn remove(&mut self, name: &str) -> Option<(usize, TensorInfo)> {
        self.tensors.remove(name).map(|entry| (entry.file, entry.info))
    }

    /// A tensor's file number and location.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        self.tensors.get(name).map(|entry| (entry.file, &entry.info))
    }

    /// All tensors by GGUF name, with file number and layout.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, usize, &TensorInfo, FileLayout)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry.file, &entry.info, entry.stored))
    }

    /// The tensors, in no order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().map(|entry| &entry.info)
    }

    /// Refuses tensors that no pass reads, since such files are of another model, with other outputs. `read` are the
    /// names of the tensors that are read.
    ///
    /// # Errors
    /// [`Error::Config`] naming such a tensor.
    pub(crate) fn check_read<'a>(&self, read: impl Iterator<Item = &'a str>) -> Result<(), Error> {
        let read: HashSet<&str> = read.collect();
        let is_known = |name: &str| {
            // Embedding models do not read the output head; `rope_freqs` is read with the configuration. Early
            // converters stored each layer's plain frequencies, which are recomputed instead.
            FACTORS.contains(&name)
                || ["output.weight", "output.bias"].contains(&name)
                || name.starts_with("cls.")
                || name.ends_with(".attn_rot_embd.weight")
        };
        let unread = self.tensors.iter().filter(|(name, _)| !read.contains(name.as_str()) && !is_known(name));
        match unread.map(|(_, entry)| &entry.info.name).min() {
            Some(name) => Err(Error::Config {
                field: name.clone(),
                expected: "no such tensor in this configuration".into(),
                found: "in the file".into(),
            }),
            None => Ok(()),
        }
    }

    /// Block types in use, largest first by bytes.
    pub fn block_types(&self) -> Vec<BlockType> {
        self.shares().into_iter().map(|share| share.block_type).collect()
    }

    /// The weights by storage type, largest first by bytes.
    pub fn shares(&self) -> Vec<WeightShare> {
        WeightShare::of(self.tensors())
    }
}

impl WeightSource for TensorIndex {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        let IndexEntry { info, stored, .. } = self.tensors.get(name)?;
        let mut shape = info.shape.clone();
        match (stored, &mut shape[..]) {
            (FileLayout::Transposed, shape) => shape.reverse(),
            (FileLayout::ExpertsTransposed { .. }, [_, cols, rows]) => std::mem::swap(cols, rows),
            (FileLayout::ByTap, &mut [rows, channels, taps]) => shape = vec![rows, channels.saturating_mul(taps)],
            (FileLayout::ExpertsTransposedJoint { n }, [_, _]) => {
                if let Some([n, cols, rows]) = IndexEntry::experts_apart(&info.shape, *n).as_deref() {
                    shape = vec![*n, *rows, *cols];
                }
            }
            (FileLayout::ByDistance(biases), [rows, _]) if *rows == u64::from(biases.n_buckets) => {
                *rows = biases.n_distances().into();
            }
            _ => {}
        }
        // Patches are cut on the host, so their convolution is a product.
        if let (true, [rows, channels, inner @ ..]) = (name.starts_with("patch_embd."), &shape[..]) {
            let n_frames = if *stored == FileLayout::SummedFrames { 2 } else { 1 };
            shape = vec![*rows, channels.saturating_mul(inner.iter().product()) / n_frames];
        }
        // Depthwise convolutions have one input per channel; GGUF files may have a dimension of 1 around them.
        if let (true, &[1, channels, 1, taps]) = (name.contains("conv1d"), &shape[..]) {
            shape = vec![channels, 1, taps];
        }
        if let (true, [channels, 1, taps @ ..]) = (name.contains("conv"), &shape[..]) {
            shape = vec![*channels, taps.iter().product()];
        }
        // Per-head scalars are stored as columns; a norm of all heads is one row.
        if [".ssm_a.", ".ssm_d.", ".ssm_norm."].iter().any(|part| name.contains(part)) {
            shape = vec![shape.iter().product()];
        }
        // The matrices of all heads form one.
        if let (true, [n_heads, rows, cols]) =
            ([".attn_k_b.", ".attn_v_b."].iter().any(|part| name.contains(part)), &shape[..])
        {
            shape = vec![n_heads.saturating_mul(*rows), *cols];
        }
        // A matrix with one row.
        if let (true, [columns]) = (name.ends_with("ffn_gate_inp_shexp.weight"), &shape[..]) {
            shape = vec![1, *columns];
        }
        // All experts form one matrix, or one vector.
        if name.contains("_exps.") {
            let n_kept = usize::from(name.ends_with(".weight"));
            let kept = shape.split_off(shape.len().saturating_sub(n_kept));
            shape = std::iter::once(shape.into_iter().product()).chain(kept).collect();
        }
        let weight = match stored {
            // Factors and sums would be rounded away.
            FileLayout::ScaledRows { .. } | FileLayout::SummedFrames => WeightType::F32,
            _ => weight_type(info.block_type),
        };
        Some(SourceTensor { weight, shape })
    }
}

/// A catalog for the CPU: declares F16 and BF16 matrices as F32 unless its kernels read them directly. Widening in
/// each pass would take as long as the products of a few dozen tokens. Embedding tables stay as they are: a pass
/// reads few of their rows.
pub(crate) struct Widened<'a>(pub &'a TensorIndex);

impl WeightSource for Widened<'_> {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        let tensor = self.0.describe(name)?;
        let is_table = ["token_embd.weight", "per_layer_token_embd.weight"].contains(&name);
        let widens = match tensor.weight {
            // Expert kernels read one row after the other.
            WeightType::F16 => !is_table && (!crate::cpu::take_halves() || name.contains("_exps.")),
            WeightType::BF16 => !is_table,
            _ => false,
        };
        Some(SourceTensor { weight: if widens { WeightType::F32 } else { tensor.weight }, ..tensor })
    }
}

/// The type of a tensor's rows on a device: its own if kernels support it, else F32, which is exact.
fn weight_type(block_type: BlockType) -> WeightType {
    WeightType::ALL.into_iter().find(|weight| weight.block_type() == block_type).unwrap_or(WeightType::F32)
}

/// Refuses a type without a decoder before allocation.
pub(super) fn check_type(format: &'static str, tensor: &TensorInfo) -> Result<(), Error> {
    // The decoder depends on the type alone, so empty data suffice.
    block::dequantize(tensor.block_type, &[], &mut []).map_err(|error| match error {
        Error::Unsupported { found, supported, .. } => {
            let field = format!("type of tensor `{}`", tensor.name.escape_debug());
            Error::Unsupported { format, field, found, supported }
        }
        other => other,
    })
}

/// A tensor's values from its data.
pub(super) fn floats(tensor: &TensorInfo, data: &[u8]) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; tensor.n_elements() as usize];
    block::dequantize(tensor.block_type, data, &mut values)?;
    Ok(values)
}

/// Rows of a table that stays on disk.
#[derive(Clone, Debug)]
pub(crate) struct TableRows {
    entry: IndexEntry,
}

impl TableRows {
    /// Number of rows.
    pub fn len(&self) -> u64 {
        n_rows(&self.entry.info)
    }

    /// Writes these rows consecutively to a matrix of [`Matrix::declare_rows`]. Out-of-range rows are written as
    /// zeros, which must not be read.
    ///
    /// # Errors
    /// [`Error::Format`] if the table is past its file's end; [`Error::Operand`] for more rows than the matrix has;
    /// errors of [`Device::write`].
    pub async fn write(&self, device: &Device, files: &WeightFiles, numbers: &[u32], to: &Matrix) -> Result<(), Error> {
        let IndexEntry { file, info, .. } = &self.entry;
        let row_bytes = (info.size_bytes / self.len()) as usize;
        // Two rows may share a word of tails.
        let mut rows = vec![0; numbers.len().next_multiple_of(2) * row_bytes];
        for (row, &number) in rows.chunks_exact_mut(row_bytes).zip(numbers) {
            if u64::from(number) < self.len() {
                files.copy(*file, info, u64::from(number) * row_bytes as u64, row).await?;
            }
        }
        write_plain(device, info, to, RowPlaces::from(0), 0, &rows, &mut TailEdges::default())?;
        Ok(())
    }
}

/// The next bytes that an upload needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeededRange {
    /// Number of the file.
    pub file: usize,
    /// Offset of the first byte.
    pub offset: u64,
    /// Bytes up to the tensor's end.
    pub len: u64,
}

/// A list of places: only this loop is compiled for each type of iterator.
fn listed<'a>(tensor_slots: impl Iterator<Item = (&'a str, TensorSlot)>) -> Vec<(&'a str, TensorSlot)> {
    let mut list = Vec::new();
    for slot in tensor_slots {
        list.push(slot);
    }
    list
}

/// Uploads weights from files to a device: accepts the bytes of all tensors in file order in pieces of any size, and
/// writes whole rows.
#[derive(Clone)]
pub(crate) struct WeightUploader {
    /// Tensors in file order, with scales before their quants.
    items: Vec<(IndexEntry, TensorSlot)>,
    /// Rows of a tensor that are uploaded to a second place with it, by the tensor's index.
    rows: Vec<(usize, IndexEntry, TensorSlot)>,
    /// Scales of the current tensor received so far; all precede its blocks.
    scales: Vec<u8>,
    /// The current tensor, and its bytes received so far.
    at: usize,
    done: u64,
    /// A partial row.
    partial_row: Vec<u8>,
    edges: TailEdges,
    fed_bytes: u64,
    total_bytes: u64,
    /// Bytes written to the device since [`WeightUploader::take_uploaded`].
    uploaded_bytes: u64,
    /// Digest of the complete tensors, if wanted; then that of the current one.
    digest: Option<u64>,
    tensor_digest: Xxh64,
}

impl WeightUploader {
    /// A feed of all declared tensors.
    pub fn new<'a>(
        tensor_index: &TensorIndex,
        tensor_slots: impl Iterator<Item = (&'a str, TensorSlot)>,
    ) -> WeightUploader {
        WeightUploader::of(tensor_index.found(listed(tensor_slots)))
    }

    /// As [`WeightUploader::new`], of all tensors in the index.
    ///
    /// # Errors
    /// [`Error::Config`] naming a tensor without a place.
    pub fn of_all<'a>(
        tensor_index: &TensorIndex,
        tensor_slots: impl Iterator<Item = (&'a str, TensorSlot)>,
    ) -> Result<WeightUploader, Error> {
        let slots = listed(tensor_slots);
        tensor_index.check_read(slots.iter().map(|(name, _)| *name))?;
        Ok(WeightUploader::of(tensor_index.found(slots)))
    }

    /// A feed of this one's tensors and another's, from the same files, before either has taken bytes.
    pub fn and(self, other: WeightUploader) -> WeightUploader {
        let items = [self.items, other.items].into_iter().flatten();
        let rows = [self.rows, other.rows].into_iter().flatten().map(|(_, entry, slot)| (entry, slot));
        WeightUploader::of(items.chain(rows).collect())
    }

    /// As [`WeightUploader::new`], with a [`WeightUploader::digest`] of the tensors that `is_selected` selects.
    pub fn digesting<'a>(
        tensor_index: &TensorIndex,
        tensor_slots: impl Iterator<Item = (&'a str, TensorSlot)>,
        is_selected: impl Fn(&str) -> bool,
    ) -> WeightUploader {
        let mut found = Vec::new();
        for (name, place) in listed(tensor_slots) {
            if let Some(entry) = tensor_index.tensors.get(name) {
                let is_selected = entry.is_selected && is_selected(name);
                found.push((IndexEntry { is_selected, ..entry.clone() }, place));
            }
        }
        WeightUploader { digest: Some(0), ..WeightUploader::of(found) }
    }

    /// A feed of one expert's parts.
    ///
    /// # Errors
    /// [`Error::Config`] naming a tensor that does not store its experts contiguously.
    pub fn of_expert(tensor_index: &TensorIndex, parts: Vec<ExpertPart>) -> Result<WeightUploader, Error> {
        let item = |ExpertPart { name, share, place }: ExpertPart| {
            let entry = tensor_index.tensors.get(&name);
            let found = entry.map_or("missing".into(), |entry| format!("of shape {:?}", entry.info.shape));
            let entry = match share {
                Some(share) => entry.and_then(|entry| entry.of_expert(share)),
                None => entry.cloned(),
            };
            match entry {
                Some(entry) => Ok((entry, place)),
                None => Err(Error::Config { field: name, expected: "contiguous experts".into(), found }),
            }
        };
        Ok(WeightUploader::of(parts.into_iter().map(item).collect::<Result<_, _>>()?))
    }

    fn of(mut items: Vec<(IndexEntry, TensorSlot)>) -> WeightUploader {
        crate::sort::by_key(&mut items, |(entry, _)| (entry.file, entry.info.offset, entry.is_row));
        // Bytes are taken once.
        let mut rows = Vec::new();
        let mut whole: Vec<(IndexEntry, TensorSlot)> = Vec::with_capacity(items.len());
        for (entry, slot) in items {
            match whole.last() {
                Some((of, _)) if entry.is_row && entry.is_within(of) => rows.push((whole.len() - 1, entry, slot)),
                _ => whole.push((entry, slot)),
            }
        }
        let items = whole;
        let scales_bytes = |entry: &IndexEntry| entry.scales.as_ref().map_or(0, |(_, scales)| scales.size_bytes);
        let total_bytes = items.iter().map(|(entry, _)| entry.info.size_bytes + scales_bytes(entry)).sum();
        let edges = TailEdges::default();
        WeightUploader {
            items,
            rows,
            scales: Vec::new(),
            at: 0,
            done: 0,
            partial_row: Vec::new(),
            edges,
            fed_bytes: 0,
            total_bytes,
            uploaded_bytes: 0,
            digest: None,
            tensor_digest: Xxh64::new(),
        }
    }

    /// Hash of the weights received: names, types, shapes and bytes of all tensors, independent of order and files. 0
    /// unless made by [`WeightUploader::digesting`].
    pub fn digest(&self) -> u64 {
        self.digest.unwrap_or_default()
    }

    /// The digest after a complete upload; reads everything with several threads.
    pub fn digest_of_files(&self, files: &[FileBytes]) -> u64 {
        const THREADS: usize = 4;
        let n_taken = AtomicUsize::new(0);
        let take = || {
            let mut sum = 0u64;
            while let Some((entry, _)) = self.items.get(n_taken.fetch_add(1, Ordering::Relaxed)) {
                sum = sum.wrapping_add(if entry.is_selected { entry.digest_of_files(files) } else { 0 });
            }
            sum
        };
        on_threads(THREADS.min(self.items.len()), take).into_iter().fold(0, u64::wrapping_add)
    }

    /// The next bytes needed; `None` at the end.
    pub fn wanted(&self) -> Option<NeededRange> {
        let (file, info) = self.in_progress()?;
        let done = if self.takes_scales() { self.scales.len() as u64 } else { self.done };
        Some(NeededRange { file, offset: info.offset + done, len: info.size_bytes - done })
    }

    /// The current tensor.
    pub fn tensor(&self) -> Option<&TensorInfo> {
        self.in_progress().map(|(_, info)| info)
    }

    fn in_progress(&self) -> Option<(usize, &TensorInfo)> {
        let (entry, _) = self.items.get(self.at)?;
        match &entry.scales {
            Some((file, scales)) if self.takes_scales() => Some((*file, scales)),
            _ => Some((entry.file, &entry.info)),
        }
    }

    /// Whether scales come next.
    fn takes_scales(&self) -> bool {
        let scales = self.items.get(self.at).and_then(|(entry, _)| entry.scales.as_ref());
        scales.is_some_and(|(_, scales)| (self.scales.len() as u64) < scales.size_bytes)
    }

    /// Uploads everything from complete files. `progress` receives the bytes so far and their total.
    ///
    /// # Errors
    /// [`Error::Truncated`] if a tensor is past its file's end; errors of [`Device::write`].
    pub fn take_all(
        &mut self,
        device: &Device,
        files: &[FileBytes],
        progress: Option<&mut dyn FnMut(u64, u64)>,
    ) -> Result<(), Error> {
        let mut ignore = |_, _| ();
        let progress = progress.unwrap_or(&mut ignore);
        if !device.is_gpu() {
            // Allocates everything before first use, so that the system can use large pages across neighbours.
            for place in self.items.iter().map(|(_, place)| place).chain(self.rows.iter().map(|(_, _, place)| place)) {
                match place {
                    TensorSlot::Rows { matrix, .. } => {
                        matrix.slabs().iter().try_for_each(|slab| device.allocate(&slab.words))?;
                    }
                    TensorSlot::Values { tensor, .. } => device.allocate(tensor)?,
                }
            }
        }
        while self.take_piece(device, files)? {
            progress(self.fed_bytes, self.total_bytes);
        }
        Ok(())
    }

    /// Announces that everything is read next.
    pub fn announce(&self, files: &[FileBytes]) {
        for (entry, _) in &self.items {
            let scales = entry.scales.as_ref().map(|(file, scales)| (*file, scales));
            for (file, TensorInfo { offset, size_bytes, .. }) in scales.into_iter().chain([(entry.file, &entry.info)]) {
                files[file].announce(*offset as usize..offset.saturating_add(*size_bytes) as usize);
            }
        }
    }

    /// Uploads the next bytes of complete files. Returns whether there were any.
    ///
    /// # Errors
    /// As [`WeightUploader::take_all`].
    pub fn take_piece(&mut self, device: &Device, files: &[FileBytes]) -> Result<bool, Error> {
        const PIECE: u64 = 4 << 20;
        /// Fewer bytes are hashed faster than a thread starts.
        const ASIDE: usize = 256 << 10;
        let (Some(wanted), Some(tensor)) = (self.wanted(), self.tensor()) else { return Ok(false) };
        let file = &files[wanted.file];
        let data = tensor.bytes(file)?;
        let n = wanted.len.min(PIECE) as usize;
        let first = (wanted.offset - tensor.offset) as usize;
        let piece = &data[first..first + n];
        match !IS_BROWSER && self.digested_entry().is_some() && n > ASIDE {
            true => self.push_and_add(device, piece)?,
            false => self.push(device, piece)?,
        }
        file.let_go(wanted.offset as usize..wanted.offset as usize + n);
        Ok(true)
    }

    /// Uploads everything from files that are read again, with bounded uploads in flight. Returns its bytes.
    ///
    /// # Errors
    /// Errors of reading; as [`WeightUploader::take_all`].
    pub async fn read_again(mut self, device: &Device, files: &WeightFiles) -> Result<u64, Error> {
        const MAX_IN_FLIGHT: u64 = 32 << 20;
        let mut in_flight = 0;
        while files.feed(&mut self, device).await? {
            in_flight += self.take_uploaded();
            if in_flight >= MAX_IN_FLIGHT {
                device.drained().await?;
                in_flight = 0;
            }
        }
        Ok(self.fed_bytes)
    }

    /// Uploads the needed part of a file's bytes, which begin at `start`; skips gaps between tensors.
    ///
    /// # Errors
    /// As [`WeightUploader::push`].
    pub fn take(&mut self, device: &Device, file: usize, start: u64, bytes: &[u8]) -> Result<(), Error> {
        while let Some(wanted) = self.wanted().filter(|wanted| wanted.file == file) {
            let skip = wanted.offset.checked_sub(start).and_then(|skip| usize::try_from(skip).ok());
            let Some(rest) = skip.and_then(|skip| bytes.get(skip..)).filter(|rest| !rest.is_empty()) else { break };
            let len = usize::try_from(wanted.len).unwrap_or(usize::MAX).min(rest.len());
            self.push(device, &rest[..len])?;
        }
        Ok(())
    }

    /// Bytes uploaded so far and their total.
    pub fn progress(&self) -> (u64, u64) {
        (self.fed_bytes, self.total_bytes)
    }

    /// Bytes written to the device since the last call: more than received if rows are expanded.
    pub fn take_uploaded(&mut self) -> u64 {
        std::mem::take(&mut self.uploaded_bytes)
    }

    /// Pushes bytes at [`NeededRange::offset`], at most [`NeededRange::len`].
    ///
    /// # Errors
    /// Errors of [`Device::write`].
    pub fn push(&mut self, device: &Device, bytes: &[u8]) -> Result<(), Error> {
        let entry = self.digested_entry();
        if entry.is_some() {
            self.tensor_digest.add(bytes);
        }
        if self.put(device, bytes)? {
            self.add_to_digest(entry);
        }
        Ok(())
    }

    /// As [`WeightUploader::push`], hashing on another thread during the upload. Worthwhile for large pieces.
    fn push_and_add(&mut self, device: &Device, bytes: &[u8]) -> Result<(), Error> {
        let entry = self.digested_entry();
        let mut digest = self.tensor_digest.clone();
        let (ended, digest) = std::thread::scope(|scope| {
            let adding = scope.spawn(move || {
                digest.add(bytes);
                digest
            });
            let put = self.put(device, bytes);
            // The thread only reads; its panic is resumed here.
            let digest = adding.join().unwrap_or_else(|panic| resume_unwind(panic));
            put.map(|ended| (ended, digest))
        })?;
        self.tensor_digest = digest;
        if ended {
            self.add_to_digest(entry);
        }
        Ok(())
    }

    /// The current tensor, if it counts towards the digest.
    fn digested_entry(&self) -> Option<usize> {
        let is_selected = self.digest.is_some() && self.items.get(self.at).is_some_and(|(entry, _)| entry.is_selected);
        is_selected.then_some(self.at)
    }

    /// Adds a complete tensor to the digest.
    fn add_to_digest(&mut self, entry: Option<usize>) {
        let bytes = std::mem::replace(&mut self.tensor_digest, Xxh64::new());
        if let Some((entry, _)) = entry.and_then(|at| self.items.get(at)) {
            self.digest = self.digest.map(|digest| digest.wrapping_add(entry.item_digest(bytes)));
        }
    }

    /// Writes bytes to their destination. Returns whether they complete a tensor.
    fn put(&mut self, device: &Device, mut bytes: &[u8]) -> Result<bool, Error> {
        let takes_scales = self.takes_scales();
        let Some((entry, place)) = self.items.get(self.at) else { return Ok(false) };
        let info = &entry.info;
        let n_bytes = bytes.len() as u64;
        if takes_scales {
            self.scales.extend_from_slice(bytes);
            self.fed_bytes += n_bytes;
            return Ok(false);
        }
        let unit = entry.groups().map_or(1, |[rows, _]| rows as u32);
        let row_bytes = match place {
            // An expert's rows, to be reordered.
            _ if entry.scales.is_some() => (info.size_bytes / info.shape.first().copied().unwrap_or(1)) as usize,
            TensorSlot::Rows { matrix, places } if matches!(entry.stored, FileLayout::AsRead | FileLayout::LessOne) => {
                match places.slice {
                    // Those of the matrix: of patches, a file has more dimensions.
                    None => file_bytes(info, matrix.cols().into()),
                    Some(_) => (info.size_bytes / n_rows(info)) as usize,
                }
            }
            // The whole tensor at once.
            _ => info.size_bytes as usize,
        };
        let mut first_row = ((self.done - self.partial_row.len() as u64) / row_bytes as u64) as u32 * unit;
        if !self.partial_row.is_empty() {
            let (head, rest) = bytes.split_at(bytes.len().min(row_bytes - self.partial_row.len()));
            self.partial_row.extend_from_slice(head);
            bytes = rest;
            if self.partial_row.len() == row_bytes {
                let rows = repacked(entry, first_row, &self.partial_row, &self.scales);
                self.uploaded_bytes += write_rows(device, entry, place, first_row, &rows, &mut self.edges)?;
                let copied = self.rows.iter().filter(|(of, ..)| *of == self.at);
                self.uploaded_bytes += copy_rows(device, info, copied, first_row, &rows, &mut self.edges)?;
                first_row += unit;
                self.partial_row.clear();
            }
        }
        let (rows, rest) = bytes.split_at(bytes.len() / row_bytes * row_bytes);
        // Limits the bytes expanded and repacked at a time.
        const PIECE: usize = 1 << 20;
        let piece_rows = (PIECE / row_bytes).max(1);
        for piece in rows.chunks(piece_rows * row_bytes) {
            let rows = repacked(entry, first_row, piece, &self.scales);
            self.uploaded_bytes += write_rows(device, entry, place, first_row, &rows, &mut self.edges)?;
            let copied = self.rows.iter().filter(|(of, ..)| *of == self.at);
            self.uploaded_bytes += copy_rows(device, info, copied, first_row, &rows, &mut self.edges)?;
            first_row += (piece.len() / row_bytes) as u32 * unit;
        }
        self.partial_row.extend_from_slice(rest);
        self.fed_bytes += n_bytes;
        self.done += n_bytes;
        let ended = self.done >= info.size_bytes;
        if ended {
            self.uploaded_bytes += write_gaps(device, entry, place, &mut self.edges)?;
            self.at += 1;
            self.done = 0;
            self.scales.clear();
        }
        Ok(ended)
    }
}

/// Rows from `first_row` on in GGUF's layout: joins quants and scales.
fn repacked<'a>(entry: &IndexEntry, first_row: u32, bytes: &'a [u8], scales: &[u8]) -> Cow<'a, [u8]> {
    let Some([rows, groups]) = entry.groups() else { return Cow::Borrowed(bytes) };
    let first = first_row as usize * groups;
    let of_rows = &scales[first..first + bytes.len() / mxfp4::GROUP];
    Cow::Owned(mxfp4::repacked(bytes, of_rows, [rows, groups], entry.stored == FileLayout::Paired))
}

/// Writes whole rows of a tensor, expanded to F32 if no kernel reads their type. Returns the bytes written.
fn write_rows(
    device: &Device,
    IndexEntry { info, stored, .. }: &IndexEntry,
    place: &TensorSlot,
    first_row: u32,
    bytes: &[u8],
    edges: &mut TailEdges,
) -> Result<u64, Error> {
    let ordered = stored.ordered(info, bytes);
    let bytes = ordered.as_deref().unwrap_or(bytes);
    match place {
        TensorSlot::Values { tensor, places } => {
            let mut values = dequantized(info, bytes)?;
            match stored {
                FileLayout::LessOne => values.iter_mut().for_each(|value| *value += 1.0),
                FileLayout::NegativeLog => values.iter_mut().for_each(|value| *value = -value.exp()),
                FileLayout::Scaled(factor) => values.iter_mut().for_each(|value| *value *= factor),
                _ => {}
            }
            let mut rest = &values[..];
            for (place, n) in places.places(0, values.len() as u32) {
                let (run, after) = rest.split_at(n as usize);
                device.write(tensor, place as usize, run)?;
                rest = after;
            }
            Ok(size_of_val(&values[..]) as u64)
        }
        TensorSlot::Rows { matrix, places } if matches!(stored, FileLayout::ScaledRows { .. }) => {
            let FileLayout::ScaledRows { rows, factors } = stored else { return Ok(0) };
            let mut values = dequantized(info, bytes)?;
            let cols = matrix.cols() as usize;
            let mut rest = &mut values[..];
            for (&n, factor) in rows.iter().zip(factors) {
                let (group, after) = rest.split_at_mut((n as usize * cols).min(rest.len()));
                group.iter_mut().for_each(|value| *value *= factor);
                rest = after;
            }
            let info = &TensorInfo { block_type: BlockType::F32, ..info.clone() };
            write_plain(device, info, matrix, *places, first_row, bytemuck::cast_slice(&values), edges)
        }
        TensorSlot::Rows { matrix, places } if *stored == FileLayout::SummedFrames => {
            let values = summed_frames(info, &dequantized(info, bytes)?);
            let info = &TensorInfo { block_type: BlockType::F32, ..info.clone() };
            write_plain(device, info, matrix, *places, first_row, bytemuck::cast_slice(&values), edges)
        }
        TensorSlot::Rows { matrix, places } => match places.slice {
            None => write_plain(device, info, matrix, *places, first_row, bytes, edges),
            Some(columns) => {
                let mut written = 0;
                for (i, slice) in slices(info, matrix, bytes, columns)?.into_iter().enumerate() {
                    let places = RowPlaces::from(places.first + i as u32 * places.stride);
                    written += write_plain(device, info, matrix, places, first_row, &slice, edges)?;
                }
                Ok(written)
            }
        },
    }
}

/// Bytes of a row of so many elements in a file.
fn file_bytes(info: &TensorInfo, columns: u64) -> usize {
    (columns.div_ceil(info.block_type.block_len()) * info.block_type.block_bytes()) as usize
}

/// See [`FileLayout::SummedFrames`].
fn summed_frames(info: &TensorInfo, values: &[f32]) -> Vec<f32> {
    let n = info.shape.iter().skip(3).product::<u64>().max(1) as usize;
    let frames = values.chunks_exact(2 * n).map(|frames| frames.split_at(n));
    frames.flat_map(|(one, two)| one.iter().zip(two).map(|(a, b)| a + b)).collect()
}

/// Writes those of `rows`, of the tensor `of`, that are among its rows from `first_row` on. Returns the bytes written.
fn copy_rows<'a>(
    device: &Device,
    of: &TensorInfo,
    rows: impl Iterator<Item = &'a (usize, IndexEntry, TensorSlot)>,
    first_row: u32,
    bytes: &[u8],
    edges: &mut TailEdges,
) -> Result<u64, Error> {
    let mut written = 0;
    for (_, entry, place) in rows {
        let IndexEntry { info: TensorInfo { offset, size_bytes, .. }, .. } = entry;
        let start = (offset - of.offset).checked_sub(u64::from(first_row) * size_bytes);
        let range = start.map(|start| start as usize..(start + size_bytes) as usize);
        if let Some(row) = range.and_then(|range| bytes.get(range)) {
            written += write_rows(device, entry, place, 0, row, edges)?;
        }
    }
    Ok(written)
}

/// All dimensions but the last.
fn n_rows(info: &TensorInfo) -> u64 {
    info.shape.split_last().map_or(1, |(_, rows)| rows.iter().product())
}

/// Writes whole rows in the file's type.
fn write_plain(
    device: &Device,
    info: &TensorInfo,
    matrix: &Matrix,
    places: RowPlaces,
    first_row: u32,
    bytes: &[u8],
    edges: &mut TailEdges,
) -> Result<u64, Error> {
    let values;
    let bytes = match matrix.weight() {
        WeightType::F32 if info.block_type != BlockType::F32 => {
            values = dequantized(info, bytes)?;
            bytemuck::cast_slice(&values)
        }
        _ => bytes,
    };
    let row_bytes = file_row_bytes(matrix.weight(), matrix.cols() as usize);
    let distances = [Some(0), places.copy].into_iter().flatten();
    let mut written = 0;
    for distance in distances {
        let mut rest = bytes;
        for (place, n) in places.places(first_row, (bytes.len() / row_bytes) as u32) {
            let (run, after) = rest.split_at(n as usize * row_bytes);
            matrix.write_rows(device, place + distance, run, edges)?;
            rest = after;
        }
        written += bytes.len() as u64;
    }
    Ok(written)
}

/// Cuts rows into slices of `columns` columns, each as rows of the matrix, zero-padded.
fn slices(info: &TensorInfo, matrix: &Matrix, bytes: &[u8], columns: u32) -> Result<Vec<Vec<u8>>, Error> {
    let block_len = info.block_type.block_len();
    let (columns, all) = (u64::from(columns), info.shape.last().copied().unwrap_or(1));
    if !columns.is_multiple_of(block_len) && columns < all {
        return Err(Error::Config {
            field: info.name.clone(),
            expected: format!("blocks that end at the cuts, every {columns} columns"),
            found: format!("{}, in blocks of {block_len}", info.block_type),
        });
    }
    let bytes_of = |columns: u64| file_bytes(info, columns);
    let (slice_bytes, row_bytes) = (bytes_of(columns), bytes_of(all));
    let padded_bytes = bytes_of(matrix.cols().into());
    let slice = |i: usize| {
        let rows = bytes.chunks_exact(row_bytes).flat_map(|row| {
            let of_row = &row[i * slice_bytes..row_bytes.min((i + 1) * slice_bytes)];
            of_row.iter().copied().chain(std::iter::repeat_n(0, padded_bytes - of_row.len()))
        });
        rows.collect()
    };
    Ok((0..all.div_ceil(columns) as usize).map(slice).collect())
}

/// Zeroes the gaps in a tensor's destination.
fn write_gaps(
    device: &Device,
    IndexEntry { info, .. }: &IndexEntry,
    place: &TensorSlot,
    edges: &mut TailEdges,
) -> Result<u64, Error> {
    let (matrix, places) = match place {
        TensorSlot::Rows { matrix, places } => (matrix, places),
        TensorSlot::Values { tensor, places } => {
            let zeros = |(first, n): (u32, u32)| {
                device.write(tensor, first as usize, &vec![0f32; n as usize])?;
                Ok(4 * u64::from(n))
            };
            return places.gaps(info.n_elements() as u32).map(zeros).sum();
        }
    };
    let row_bytes = file_row_bytes(matrix.weight(), matrix.cols() as usize);
    let mut written = 0;
    for (first, n) in places.gaps(n_rows(info) as u32) {
        let zeros = vec![0; n as usize * row_bytes];
        matrix.write_rows(device, first, &zeros, edges)?;
        written += zeros.len() as u64;
    }
    Ok(written)
}

/// The values of a tensor's blocks.
fn dequantized(info: &TensorInfo, bytes: &[u8]) -> Result<Vec<f32>, Error> {
    let n_blocks = bytes.len() as u64 / info.block_type.block_bytes();
    let mut values = vec![0.0; (n_blocks * info.block_type.block_len()) as usize];
    block::dequantize(info.block_type, bytes, &mut values)?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::tensor::{Role, Tensor};

    /// The device keeps its own count of the bytes written.
    #[test]
    fn uploaded_bytes_count_weights_as_expanded() {
        let device = Device::cpu();
        let tensor = Tensor::declare("w", Role::Weights, &[1024], DType::F32).unwrap();
        let info =
            TensorInfo { name: "w".into(), shape: vec![1024], block_type: BlockType::F16, offset: 0, size_bytes: 2048 };
        let mut tensor_index = TensorIndex::default();
        tensor_index.insert("w".into(), 0, info, FileLayout::AsRead);
        let mut feed = WeightUploader::new(
            &tensor_index,
            [("w", TensorSlot::Values { tensor, places: RowPlaces::from(0) })].into_iter(),
        );
        let before = device.counters();
        for (piece, uploaded) in [(1000, 0), (1048, 4096)] {
            feed.push(&device, &vec![0; piece]).unwrap();
            assert_eq!(feed.take_uploaded(), uploaded);
        }
        assert_eq!((device.counters() - before).bytes_uploaded, 4096);
        assert_eq!((feed.take_uploaded(), feed.progress()), (0, (2048, 2048)));
    }
}
