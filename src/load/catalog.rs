//! The tensors of a model's files, and the way from their bytes to a device.
//!
//! Bytes arrive in file order, in pieces of any size, and rows are repacked as they do; a cut row waits for its rest.
//! A mapped file is fed as a download is, so there is one path from bytes to weights. Every tensor is read, or listed
//! in `unread.rs`, or an error. Uploads are drained every 32 MiB, so that a download never piles up in memory.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
#[cfg(not(target_arch = "wasm32"))]
use std::panic::resume_unwind;
#[cfg(not(target_arch = "wasm32"))]
use std::sync::atomic::{AtomicUsize, Ordering};
#[cfg(not(target_arch = "wasm32"))]
use std::thread::ScopedJoinHandle;

use super::gguf::FACTORS;
use super::{FileBytes, WeightFiles, WeightShare, mxfp4};
use crate::device::Device;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::formats::{BlockType, TensorInfo, block};
use crate::matrix::{Matrix, TailEdges, file_row_bytes};
use crate::model::{Destination, ExpertPart, RowPlaces, SourceTensor, WeightSource, layer_of};
use crate::xxh64::Xxh64;

/// Tensors under GGUF's names, and where each lies.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    tensors: HashMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// Number of the file.
    file: usize,
    info: TensorInfo,
    stored: Stored,
    /// Number of the file of a tensor that belongs to this one, and where it lies there; see [`mxfp4`].
    scales: Option<(usize, TensorInfo)>,
    /// Whether weights with it are other weights than those without it.
    is_told: bool,
}

impl Entry {
    /// The digest of a tensor whose bytes add up to this, its scales first.
    fn told(&self, mut bytes: Xxh64) -> u64 {
        let TensorInfo { name, shape, block_type, .. } = &self.info;
        bytes.add(format!("{name} {block_type} {shape:?}").as_bytes());
        bytes.finish()
    }

    /// Rows and groups of each expert's matrix, if it is of two tensors.
    fn groups(&self) -> Option<[usize; 2]> {
        self.scales.as_ref().and_then(|(_, scales)| match scales.shape[..] {
            [_, rows, groups] => Some([rows as usize, groups as usize]),
            _ => None,
        })
    }
}

impl Entry {
    /// What it has of expert `i` of `n`, if the file keeps experts one after the other.
    fn of_expert(&self, [i, n]: [u32; 2]) -> Option<Entry> {
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
        Some(Entry { info: cut(&self.info)?, scales, ..self.clone() })
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Entry {
    /// See [`Entry::told`]: of what the files have.
    fn digest_of_files(&self, files: &[FileBytes]) -> u64 {
        const PIECE: usize = 4 << 20;
        let mut digest = Xxh64::new();
        let scales = self.scales.as_ref().map(|(file, scales)| (*file, scales));
        for (file, info) in scales.into_iter().chain([(self.file, &self.info)]) {
            // A tensor past its file's end was refused when the header was read.
            let bytes = info.bytes(&files[file]).unwrap_or_default();
            for (i, piece) in bytes.chunks(PIECE).enumerate() {
                digest.add(piece);
                let first = info.offset as usize + i * PIECE;
                files[file].let_go(first..first + piece.len());
            }
        }
        self.told(digest)
    }
}

/// How a file keeps a tensor, where that is not as kernels read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// It is.
    AsRead,
    /// Less one: Gemma's norms.
    LessOne,
    /// `[columns, rows]`: GPT-2's matrices.
    Transposed,
    /// Of each expert `[columns, rows]`, with gates and ups in turns where `paired`: gpt-oss.
    ExpertsTransposed {
        /// Whether rows are pairs of a gate and its up, which kernels read as all gates and then all ups.
        paired: bool,
    },
    /// Of each expert its gates and ups in turns.
    Paired,
    /// Rows of several kinds of a head after those of the one before, for so many heads: queries, keys and values of
    /// GPT-NeoX; queries and gates of Qwen3.5, which kernels read in the other order.
    ByHead {
        /// H.
        n_heads: u32,
        /// Kinds of rows, in the order in which kernels read all heads' rows of each.
        kinds: &'static [u32],
    },
    /// The logarithm of the negated: time constants.
    NegativeLog,
}

impl Stored {
    /// The bytes of a whole tensor in the order in which kernels read its rows; `None` if they are.
    pub(super) fn ordered(self, info: &TensorInfo, bytes: &[u8]) -> Option<Vec<u8>> {
        let rows = info.shape.first().copied().unwrap_or(1) as usize;
        match self {
            Stored::AsRead | Stored::LessOne | Stored::NegativeLog | Stored::Paired => None,
            Stored::Transposed => {
                let cols = info.shape.get(1).copied().unwrap_or(1) as usize;
                let size = bytes.len() / (rows * cols);
                let at = |i: usize| &bytes[(i % rows * cols + i / rows) * size..][..size];
                Some((0..rows * cols).flat_map(at).copied().collect())
            }
            Stored::ExpertsTransposed { paired } => {
                // A vector of each expert is a matrix of one column.
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
            Stored::ByHead { n_heads, kinds } => {
                // A head's rows of one kind are together.
                let (n_heads, n_kinds) = (n_heads as usize, kinds.len());
                let size = rows / (n_kinds * n_heads) * (bytes.len() / rows);
                let places = kinds.iter().flat_map(|&kind| (0..n_heads).map(move |h| h * n_kinds + kind as usize));
                Some(places.flat_map(|place| &bytes[place * size..][..size]).copied().collect())
            }
        }
    }
}

impl Catalog {
    /// Adds a tensor of file number `file` under the name that GGUF gives it.
    pub(super) fn insert(&mut self, name: String, file: usize, info: TensorInfo, stored: Stored) {
        self.tensors.insert(name, Entry { file, info, stored, scales: None, is_told: true });
    }

    /// Adds a tensor whose rows are those of two of a layer, the first half and the second.
    pub(super) fn insert_halves(&mut self, layer: &str, names: [&str; 2], file: usize, info: &TensorInfo) {
        let mut half = info.clone();
        half.size_bytes /= 2;
        if let Some(rows) = half.shape.first_mut() {
            *rows /= 2;
        }
        for (i, name) in names.into_iter().enumerate() {
            let offset = info.offset + i as u64 * half.size_bytes;
            self.insert(format!("{layer}.{name}.weight"), file, TensorInfo { offset, ..half.clone() }, Stored::AsRead);
        }
    }

    /// Adds a tensor of MXFP4 whose exponents are in a tensor of their own.
    ///
    /// # Errors
    /// [`Error::Config`] if the two do not fit each other.
    pub(super) fn insert_scaled(
        &mut self,
        name: String,
        (file, blocks): (usize, &TensorInfo),
        scales: (usize, TensorInfo),
        paired: bool,
    ) -> Result<(), Error> {
        let info = mxfp4::joined(&blocks.name, blocks, &scales.1)?;
        let stored = if paired { Stored::Paired } else { Stored::AsRead };
        self.tensors.insert(name, Entry { file, info, stored, scales: Some(scales), is_told: true });
        Ok(())
    }

    /// Leaves out the tensors of layers from `n_layers` on. Returns whether there were any.
    pub(super) fn drop_layers(&mut self, n_layers: u32) -> bool {
        let n_before = self.tensors.len();
        self.tensors.retain(|name, _| layer_of(name).is_none_or(|layer| layer < n_layers));
        self.tensors.len() < n_before
    }

    /// The rows of a table, if each lies in the file by itself.
    pub(crate) fn table_rows(&self, name: &str) -> Option<TableRows> {
        let entry = self.tensors.get(name)?;
        (entry.stored == Stored::AsRead && entry.scales.is_none()).then(|| TableRows { entry: entry.clone() })
    }

    /// Names of the tensors of layers from this one on.
    pub(crate) fn of_layers_from(&self, first: u32) -> impl Iterator<Item = &str> {
        let names = self.tensors.keys().map(String::as_str);
        names.filter(move |name| layer_of(name).is_some_and(|layer| layer >= first))
    }

    /// Says that layers from this one on are of a head without which the model is the same: sessions of either know each other.
    pub(super) fn leave_untold(&mut self, first: u32) {
        let of_head = |name: &str| layer_of(name).is_some_and(|layer| layer >= first);
        self.tensors.iter_mut().filter(|(name, _)| of_head(name)).for_each(|(_, entry)| entry.is_told = false);
    }

    /// Number of a tensor's file, and where it lies there.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        self.tensors.get(name).map(|entry| (entry.file, &entry.info))
    }

    /// Every tensor under the name that GGUF gives it, the number of its file, and how that keeps it.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, usize, &TensorInfo, Stored)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry.file, &entry.info, entry.stored))
    }

    /// Every tensor.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().map(|entry| &entry.info)
    }

    /// Refuses tensors that no pass would read: files with them are of another model, whose text ours would not be.
    /// `read` are the names of those that are read.
    ///
    /// # Errors
    /// [`Error::Config`] naming such a tensor.
    pub(crate) fn check_read<'a>(&self, read: impl Iterator<Item = &'a str>) -> Result<(), Error> {
        let read: HashSet<&str> = read.collect();
        let is_known = |name: &str| {
            // Those of the head stay unread where only vectors are wanted, and `rope_freqs` is read with the configuration.
            // The first converters wrote the plain frequencies of each layer, which everyone computes anyway.
            FACTORS.contains(&name)
                || ["output.weight", "output.bias"].contains(&name)
                || name.starts_with("cls.")
                || name.ends_with(".attn_rot_embd.weight")
        };
        let unread = self.tensors.iter().filter(|(name, _)| !read.contains(name.as_str()) && !is_known(name));
        match unread.map(|(_, entry)| &entry.info.name).min() {
            Some(name) => Err(Error::Config {
                field: name.clone(),
                expected: "no such tensor in a model of this configuration".into(),
                found: "in the file".into(),
            }),
            None => Ok(()),
        }
    }

    /// Block types in use, the one with most bytes first.
    pub fn block_types(&self) -> Vec<BlockType> {
        self.shares().into_iter().map(|share| share.block_type).collect()
    }

    /// The weights by how they are stored, the type with most bytes first.
    pub fn shares(&self) -> Vec<WeightShare> {
        WeightShare::of(self.tensors())
    }
}

impl WeightSource for Catalog {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        let Entry { info, stored, .. } = self.tensors.get(name)?;
        let mut shape = info.shape.clone();
        match (stored, &mut shape[..]) {
            (Stored::Transposed, shape) => shape.reverse(),
            (Stored::ExpertsTransposed { .. }, [_, cols, rows]) => std::mem::swap(cols, rows),
            _ => {}
        }
        // Of a convolution of each channel by itself there is one input.
        if let (true, [channels, 1, taps]) = (name.contains("conv"), &shape[..]) {
            shape = vec![*channels, *taps];
        }
        // Numbers of heads are columns, and a norm of all of them is a row.
        if [".ssm_a.", ".ssm_d.", ".ssm_norm."].iter().any(|part| name.contains(part)) {
            shape = vec![shape.iter().product()];
        }
        // A product with one row.
        if let (true, [columns]) = (name.ends_with("ffn_gate_inp_shexp.weight"), &shape[..]) {
            shape = vec![1, *columns];
        }
        // Those of all experts are one matrix, and one vector.
        if name.contains("_exps.") {
            let n_kept = usize::from(name.ends_with(".weight"));
            let kept = shape.split_off(shape.len().saturating_sub(n_kept));
            shape = std::iter::once(shape.into_iter().product()).chain(kept).collect();
        }
        Some(SourceTensor { weight: weight_type(info.block_type), shape })
    }
}

/// A catalog for a CPU: matrices of halves are declared as F32, unless products take them as they are. Each pass would widen
/// them again, which takes as long as the products of a few dozen tokens. Tables of token vectors stay as they are: a pass
/// takes a few of their rows.
pub(crate) struct Widened<'a>(pub &'a Catalog);

impl WeightSource for Widened<'_> {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        let tensor = self.0.describe(name)?;
        let is_table = ["token_embd.weight", "per_layer_token_embd.weight"].contains(&name);
        let widens = match tensor.weight {
            // Products with experts take rows one after the other.
            WeightType::F16 => !is_table && (!crate::cpu::take_halves() || name.contains("_exps.")),
            WeightType::BF16 => !is_table,
            _ => false,
        };
        Some(SourceTensor { weight: if widens { WeightType::F32 } else { tensor.weight }, ..tensor })
    }
}

/// The weight type under which a tensor's rows are stored on a device: its own where kernels have it, else F32, which
/// is exact.
fn weight_type(block_type: BlockType) -> WeightType {
    WeightType::ALL.into_iter().find(|weight| weight.block_type() == block_type).unwrap_or(WeightType::F32)
}

/// Refuses a tensor whose type has no decoder, before anything is allocated for the model.
pub(super) fn check_type(format: &'static str, tensor: &TensorInfo) -> Result<(), Error> {
    // The decoder is chosen by the type alone, so that no data at all tells whether there is one.
    block::dequantize(tensor.block_type, &[], &mut []).map_err(|error| match error {
        Error::Unsupported { found, supported, .. } => {
            let field = format!("type of tensor `{}`", tensor.name.escape_debug());
            Error::Unsupported { format, field, found, supported }
        }
        other => other,
    })
}

/// The values of a tensor, from its data.
pub(super) fn floats(tensor: &TensorInfo, data: &[u8]) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; tensor.n_elements() as usize];
    block::dequantize(tensor.block_type, data, &mut values)?;
    Ok(values)
}

/// Rows of a table that stays in its file.
#[derive(Clone, Debug)]
pub(crate) struct TableRows {
    entry: Entry,
}

impl TableRows {
    /// How many there are.
    pub fn len(&self) -> u64 {
        n_rows(&self.entry.info)
    }

    /// Writes the rows of these numbers to a matrix of [`Matrix::declare_rows`], one after the other. One that is not in the
    /// table is written as zeros, which nobody is to read.
    ///
    /// # Errors
    /// [`Error::Format`] if the table lies past its file's end; [`Error::Operand`] for more rows than the matrix has; errors
    /// of [`Device::write`].
    pub async fn write(&self, device: &Device, files: &WeightFiles, numbers: &[u32], to: &Matrix) -> Result<(), Error> {
        let Entry { file, info, .. } = &self.entry;
        let row_bytes = (info.size_bytes / self.len()) as usize;
        // Two rows may share a word of tails.
        let mut rows = vec![0; numbers.len().next_multiple_of(2) * row_bytes];
        #[cfg(not(target_arch = "wasm32"))]
        let table = info.bytes(&files[*file])?;
        for (row, &number) in rows.chunks_exact_mut(row_bytes).zip(numbers) {
            #[cfg(not(target_arch = "wasm32"))]
            if let Some(found) = table.chunks_exact(row_bytes).nth(number as usize) {
                row.copy_from_slice(found);
            }
            #[cfg(target_arch = "wasm32")]
            if u64::from(number) < self.len() {
                files.read_exact(*file, info.offset + u64::from(number) * row_bytes as u64, row).await?;
            }
        }
        write_plain(device, info, to, RowPlaces::from(0), 0, &rows, &mut TailEdges::default())?;
        Ok(())
    }
}

/// Bytes of a model's files that a device's weights want next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Number of the file.
    pub file: usize,
    /// Offset of the first byte wanted.
    pub offset: u64,
    /// Bytes up to the end of a tensor.
    pub len: u64,
}

/// Weights on their way from files to a device: takes the bytes of every tensor in the order of the files, in pieces of
/// any size, and writes whole rows.
#[derive(Clone)]
pub(crate) struct Feed {
    /// Tensors in the order of the files, but scales right before what they scale.
    items: Vec<(Entry, Destination)>,
    /// The scales of the tensor in progress, as far as they have come; all of them come before its blocks.
    scales: Vec<u8>,
    /// The tensor in progress, and how much of it has come.
    at: usize,
    done: u64,
    /// The beginning of a row whose end has not come.
    partial_row: Vec<u8>,
    edges: TailEdges,
    fed_bytes: u64,
    total_bytes: u64,
    /// Bytes written to the device since [`Feed::take_uploaded`].
    uploaded_bytes: u64,
    /// Of the tensors that have come, if that is wanted, and of the one in progress.
    digest: Option<u64>,
    tensor_digest: Xxh64,
}

impl Feed {
    /// A feed of all tensors that weights were declared with.
    pub fn new<'a>(catalog: &Catalog, destinations: impl Iterator<Item = (&'a str, Destination)>) -> Feed {
        // Weights were declared from this catalog, so each is in it.
        let found = destinations.filter_map(|(name, place)| Some((catalog.tensors.get(name)?.clone(), place)));
        Feed::of(found.collect())
    }

    /// The same, which adds up for [`Feed::digest`] those tensors that `is_told` names.
    pub fn digesting<'a>(
        catalog: &Catalog,
        destinations: impl Iterator<Item = (&'a str, Destination)>,
        is_told: impl Fn(&str) -> bool,
    ) -> Feed {
        let found = destinations.filter_map(|(name, place)| {
            let entry = catalog.tensors.get(name)?;
            Some((Entry { is_told: entry.is_told && is_told(name), ..entry.clone() }, place))
        });
        Feed { digest: Some(0), ..Feed::of(found.collect()) }
    }

    /// A feed of one expert's parts.
    ///
    /// # Errors
    /// [`Error::Config`] naming a tensor that does not keep its experts one after the other.
    pub fn of_expert(catalog: &Catalog, parts: Vec<ExpertPart>) -> Result<Feed, Error> {
        let item = |ExpertPart { name, share, place }: ExpertPart| {
            let entry = catalog.tensors.get(&name);
            let found = entry.map_or("missing".into(), |entry| format!("one of shape {:?}", entry.info.shape));
            let entry = match share {
                Some(share) => entry.and_then(|entry| entry.of_expert(share)),
                None => entry.cloned(),
            };
            match entry {
                Some(entry) => Ok((entry, place)),
                None => Err(Error::Config {
                    field: name,
                    expected: "a tensor of experts one after the other".into(),
                    found,
                }),
            }
        };
        Ok(Feed::of(parts.into_iter().map(item).collect::<Result<_, _>>()?))
    }

    fn of(mut items: Vec<(Entry, Destination)>) -> Feed {
        crate::sort::by_key(&mut items, |(entry, _)| (entry.file, entry.info.offset));
        let scales_bytes = |entry: &Entry| entry.scales.as_ref().map_or(0, |(_, scales)| scales.size_bytes);
        let total_bytes = items.iter().map(|(entry, _)| entry.info.size_bytes + scales_bytes(entry)).sum();
        let edges = TailEdges::default();
        Feed {
            items,
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

    /// Tells the weights that were taken from others: names, types, shapes and all bytes of all tensors, in whatever order
    /// and files they lie. 0 of what was not made by [`Feed::digesting`].
    pub fn digest(&self) -> u64 {
        self.digest.unwrap_or_default()
    }

    /// The digest that it would have if it had taken everything; all of it is read, by several threads.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn digest_of_files(&self, files: &[FileBytes]) -> u64 {
        const THREADS: usize = 4;
        let n_taken = AtomicUsize::new(0);
        let take = || {
            let mut sum = 0u64;
            while let Some((entry, _)) = self.items.get(n_taken.fetch_add(1, Ordering::Relaxed)) {
                sum = sum.wrapping_add(if entry.is_told { entry.digest_of_files(files) } else { 0 });
            }
            sum
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..THREADS.min(self.items.len())).map(|_| scope.spawn(take)).collect();
            let join = |other: ScopedJoinHandle<'_, u64>| other.join().unwrap_or_else(|panic| resume_unwind(panic));
            others.into_iter().map(join).fold(take(), u64::wrapping_add)
        })
    }

    /// The bytes wanted next; `None` at the end.
    pub fn wanted(&self) -> Option<Wanted> {
        let (file, info) = self.in_progress()?;
        let done = if self.takes_scales() { self.scales.len() as u64 } else { self.done };
        Some(Wanted { file, offset: info.offset + done, len: info.size_bytes - done })
    }

    /// The tensor whose bytes are wanted.
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

    /// Whether what comes next are scales.
    fn takes_scales(&self) -> bool {
        let scales = self.items.get(self.at).and_then(|(entry, _)| entry.scales.as_ref());
        scales.is_some_and(|(_, scales)| (self.scales.len() as u64) < scales.size_bytes)
    }

    /// Takes everything from files that are there as a whole. `progress` is told bytes taken so far, and in all.
    ///
    /// # Errors
    /// [`Error::Truncated`] if a tensor lies past its file's end; errors of [`Device::write`].
    pub fn take_all(
        &mut self,
        device: &Device,
        files: &[FileBytes],
        progress: Option<&mut dyn FnMut(u64, u64)>,
    ) -> Result<(), Error> {
        let mut ignore = |_, _| ();
        let progress = progress.unwrap_or(&mut ignore);
        if !device.is_gpu() {
            // All of it before any is touched, so that the system may put large pages under neighbours.
            for (_, place) in &self.items {
                match place {
                    Destination::Rows { matrix, .. } => {
                        matrix.slabs().iter().try_for_each(|slab| device.allocate(&slab.words))?;
                    }
                    Destination::Values { tensor, .. } => device.allocate(tensor)?,
                }
            }
        }
        while self.take_piece(device, files)? {
            progress(self.fed_bytes, self.total_bytes);
        }
        Ok(())
    }

    /// Says that all of it is taken next.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn announce(&self, files: &[FileBytes]) {
        for (entry, _) in &self.items {
            let scales = entry.scales.as_ref().map(|(file, scales)| (*file, scales));
            for (file, TensorInfo { offset, size_bytes, .. }) in scales.into_iter().chain([(entry.file, &entry.info)]) {
                files[file].announce(*offset as usize..offset.saturating_add(*size_bytes) as usize);
            }
        }
    }

    /// Takes the next bytes of files that are there as a whole, and tells whether there were any.
    ///
    /// # Errors
    /// As [`Feed::take_all`].
    pub fn take_piece(&mut self, device: &Device, files: &[FileBytes]) -> Result<bool, Error> {
        const PIECE: u64 = 4 << 20;
        /// Bytes that are added up in less time than a thread takes to start.
        #[cfg(not(target_arch = "wasm32"))]
        const ASIDE: usize = 256 << 10;
        let (Some(wanted), Some(tensor)) = (self.wanted(), self.tensor()) else { return Ok(false) };
        let file = &files[wanted.file];
        let data = tensor.bytes(file)?;
        let n = wanted.len.min(PIECE) as usize;
        let first = (wanted.offset - tensor.offset) as usize;
        let piece = &data[first..first + n];
        #[cfg(not(target_arch = "wasm32"))]
        match self.told_now().is_some() && n > ASIDE {
            true => self.push_and_add(device, piece)?,
            false => self.push(device, piece)?,
        }
        #[cfg(target_arch = "wasm32")]
        self.push(device, piece)?;
        file.let_go(wanted.offset as usize..wanted.offset as usize + n);
        Ok(true)
    }

    /// Takes the next bytes of files that are read again, and tells whether there were any.
    ///
    /// # Errors
    /// Those of reading; as [`Feed::take_all`].
    pub async fn take_again(&mut self, device: &Device, files: &WeightFiles) -> Result<bool, Error> {
        #[cfg(not(target_arch = "wasm32"))]
        return self.take_piece(device, files);
        #[cfg(target_arch = "wasm32")]
        match self.wanted() {
            Some(Wanted { file, offset, len }) => {
                let bytes = files.read(file, offset, len).await?;
                self.take(device, file, offset, &bytes).map(|()| true)
            }
            None => Ok(false),
        }
    }

    /// Takes what it wants of a file's bytes that begin at `start`; what lies between tensors is passed over.
    ///
    /// # Errors
    /// As [`Feed::push`].
    pub fn take(&mut self, device: &Device, file: usize, start: u64, bytes: &[u8]) -> Result<(), Error> {
        while let Some(wanted) = self.wanted().filter(|wanted| wanted.file == file) {
            let skip = wanted.offset.checked_sub(start).and_then(|skip| usize::try_from(skip).ok());
            let Some(rest) = skip.and_then(|skip| bytes.get(skip..)).filter(|rest| !rest.is_empty()) else { break };
            let len = usize::try_from(wanted.len).unwrap_or(usize::MAX).min(rest.len());
            self.push(device, &rest[..len])?;
        }
        Ok(())
    }

    /// Bytes taken so far, and in all.
    pub fn progress(&self) -> (u64, u64) {
        (self.fed_bytes, self.total_bytes)
    }

    /// Bytes that were written to the device since this was last asked: more than were taken where they are expanded.
    pub fn take_uploaded(&mut self) -> u64 {
        std::mem::take(&mut self.uploaded_bytes)
    }

    /// Takes bytes from [`Wanted::offset`] on, at most [`Wanted::len`].
    ///
    /// # Errors
    /// Errors of [`Device::write`].
    pub fn push(&mut self, device: &Device, bytes: &[u8]) -> Result<(), Error> {
        let told = self.told_now();
        if told.is_some() {
            self.tensor_digest.add(bytes);
        }
        if self.put(device, bytes)? {
            self.tell(told);
        }
        Ok(())
    }

    /// As [`Feed::push`] of bytes that are worth it: adds them up while the device takes them.
    #[cfg(not(target_arch = "wasm32"))]
    fn push_and_add(&mut self, device: &Device, bytes: &[u8]) -> Result<(), Error> {
        let told = self.told_now();
        let mut digest = self.tensor_digest.clone();
        let (ended, digest) = std::thread::scope(|scope| {
            let adding = scope.spawn(move || {
                digest.add(bytes);
                digest
            });
            let put = self.put(device, bytes);
            // A thread only reads; a panic in it goes on here.
            let digest = adding.join().unwrap_or_else(|panic| resume_unwind(panic));
            put.map(|ended| (ended, digest))
        })?;
        self.tensor_digest = digest;
        if ended {
            self.tell(told);
        }
        Ok(())
    }

    /// The tensor in progress, if it counts for the digest.
    fn told_now(&self) -> Option<usize> {
        let is_told = self.digest.is_some() && self.items.get(self.at).is_some_and(|(entry, _)| entry.is_told);
        is_told.then_some(self.at)
    }

    /// Counts a tensor whose bytes have all come.
    fn tell(&mut self, told: Option<usize>) {
        let bytes = std::mem::replace(&mut self.tensor_digest, Xxh64::new());
        if let Some((entry, _)) = told.and_then(|at| self.items.get(at)) {
            self.digest = self.digest.map(|digest| digest.wrapping_add(entry.told(bytes)));
        }
    }

    /// Puts bytes where they belong, and says whether they end a tensor.
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
            // An expert's rows, which are put in order.
            _ if entry.scales.is_some() => (info.size_bytes / info.shape.first().copied().unwrap_or(1)) as usize,
            Destination::Rows { .. } if matches!(entry.stored, Stored::AsRead | Stored::LessOne) => {
                (info.size_bytes / n_rows(info)) as usize
            }
            // Taken as a whole.
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
                first_row += unit;
                self.partial_row.clear();
            }
        }
        let (rows, rest) = bytes.split_at(bytes.len() / row_bytes * row_bytes);
        // Bounds what is expanded and repacked at a time.
        const PIECE: usize = 1 << 20;
        let piece_rows = (PIECE / row_bytes).max(1);
        for piece in rows.chunks(piece_rows * row_bytes) {
            let rows = repacked(entry, first_row, piece, &self.scales);
            self.uploaded_bytes += write_rows(device, entry, place, first_row, &rows, &mut self.edges)?;
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

/// Rows from `first_row` on as GGUF files have them: those of two tensors are put together.
fn repacked<'a>(entry: &Entry, first_row: u32, bytes: &'a [u8], scales: &[u8]) -> Cow<'a, [u8]> {
    let Some([rows, groups]) = entry.groups() else { return Cow::Borrowed(bytes) };
    let first = first_row as usize * groups;
    let of_rows = &scales[first..first + bytes.len() / mxfp4::GROUP];
    Cow::Owned(mxfp4::repacked(bytes, of_rows, [rows, groups], entry.stored == Stored::Paired))
}

/// Writes whole rows of a tensor where they belong, expanded to F32 if no kernel reads their type. Returns the bytes that
/// this made.
fn write_rows(
    device: &Device,
    Entry { info, stored, .. }: &Entry,
    place: &Destination,
    first_row: u32,
    bytes: &[u8],
    edges: &mut TailEdges,
) -> Result<u64, Error> {
    let ordered = stored.ordered(info, bytes);
    let bytes = ordered.as_deref().unwrap_or(bytes);
    match place {
        Destination::Values { tensor, places } => {
            let mut values = dequantized(info, bytes)?;
            match stored {
                Stored::LessOne => values.iter_mut().for_each(|value| *value += 1.0),
                Stored::NegativeLog => values.iter_mut().for_each(|value| *value = -value.exp()),
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
        Destination::Rows { matrix, places } => match places.slice {
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

/// Rows of a tensor: all dimensions but the last.
fn n_rows(info: &TensorInfo) -> u64 {
    info.shape.split_last().map_or(1, |(_, rows)| rows.iter().product())
}

/// Writes whole rows in the type of a file to their places.
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
    let mut rest = bytes;
    for (place, n) in places.places(first_row, (bytes.len() / row_bytes) as u32) {
        let (run, after) = rest.split_at(n as usize * row_bytes);
        matrix.write_rows(device, place, run, edges)?;
        rest = after;
    }
    Ok(bytes.len() as u64)
}

/// Rows of a file cut into slices of so many columns, each as rows of the matrix, zero where they have no more.
fn slices(info: &TensorInfo, matrix: &Matrix, bytes: &[u8], columns: u32) -> Result<Vec<Vec<u8>>, Error> {
    let (block_len, block_bytes) = (info.block_type.block_len(), info.block_type.block_bytes());
    let (columns, all) = (u64::from(columns), info.shape.last().copied().unwrap_or(1));
    if !columns.is_multiple_of(block_len) && columns < all {
        return Err(Error::Config {
            field: info.name.clone(),
            expected: format!("blocks that end every {columns} columns, where it is cut"),
            found: format!("{}, in blocks of {block_len}", info.block_type),
        });
    }
    let bytes_of = |columns: u64| (columns.div_ceil(block_len) * block_bytes) as usize;
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

/// Writes zeros where a tensor leaves places free.
fn write_gaps(
    device: &Device,
    Entry { info, .. }: &Entry,
    place: &Destination,
    edges: &mut TailEdges,
) -> Result<u64, Error> {
    let Destination::Rows { matrix, places } = place else { return Ok(0) };
    let row_bytes = file_row_bytes(matrix.weight(), matrix.cols() as usize);
    let mut written = 0;
    for (first, n) in places.gaps(n_rows(info) as u32) {
        let zeros = vec![0; n as usize * row_bytes];
        matrix.write_rows(device, first, &zeros, edges)?;
        written += zeros.len() as u64;
    }
    Ok(written)
}

/// The values of some blocks of a tensor.
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

    /// The device counts on its own what it was given.
    #[test]
    fn what_is_in_flight_counts_as_expanded() {
        let device = Device::cpu();
        let tensor = Tensor::declare("w", Role::Weights, &[1024], DType::F32).unwrap();
        let info =
            TensorInfo { name: "w".into(), shape: vec![1024], block_type: BlockType::F16, offset: 0, size_bytes: 2048 };
        let mut catalog = Catalog::default();
        catalog.insert("w".into(), 0, info, Stored::AsRead);
        let mut feed =
            Feed::new(&catalog, [("w", Destination::Values { tensor, places: RowPlaces::from(0) })].into_iter());
        let before = device.counters();
        for (piece, uploaded) in [(1000, 0), (1048, 4096)] {
            feed.push(&device, &vec![0; piece]).unwrap();
            assert_eq!(feed.take_uploaded(), uploaded);
        }
        assert_eq!((device.counters() - before).bytes_uploaded, 4096);
        assert_eq!((feed.take_uploaded(), feed.progress()), (0, (2048, 2048)));
    }
}
