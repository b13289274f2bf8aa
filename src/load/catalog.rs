//! The tensors of a model's files, and the way from their bytes to a device.

use std::collections::{HashMap, HashSet};

use super::FileBytes;
use super::gguf::FACTORS;
use crate::device::Device;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::formats::{BlockType, TensorInfo, block};
use crate::matrix::TailEdges;
use crate::model::{Destination, SourceTensor, WeightSource};

/// Tensors under GGUF's names, and where each lies.
#[derive(Debug, Default)]
pub struct Catalog {
    tensors: HashMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// Number of the file.
    file: usize,
    info: TensorInfo,
    stored: Stored,
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
            Stored::AsRead | Stored::LessOne | Stored::NegativeLog => None,
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
        self.tensors.insert(name, Entry { file, info, stored });
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
        let mut bytes: HashMap<BlockType, u64> = HashMap::new();
        for info in self.tensors() {
            *bytes.entry(info.block_type).or_default() += info.size_bytes;
        }
        let mut types: Vec<_> = bytes.into_iter().collect();
        types.sort_by_key(|&(block_type, bytes)| (std::cmp::Reverse(bytes), block_type.to_string()));
        types.into_iter().map(|(block_type, _)| block_type).collect()
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

/// A catalog for a CPU: matrices of halves are declared as F32. Each pass would widen them again, which takes as long as the
/// products of a few dozen tokens. Tables of token vectors stay as they are: a pass takes a few of their rows.
pub(crate) struct Widened<'a>(pub &'a Catalog);

impl WeightSource for Widened<'_> {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        let tensor = self.0.describe(name)?;
        let widens = matches!(tensor.weight, WeightType::F16 | WeightType::BF16) && name != "token_embd.weight";
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
pub(crate) struct Feed {
    /// Tensors in the order of the files.
    items: Vec<(Entry, Destination)>,
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
}

impl Feed {
    /// A feed of all tensors that weights were declared with.
    pub fn new<'a>(catalog: &Catalog, destinations: impl Iterator<Item = (&'a str, Destination)>) -> Feed {
        // Weights were declared from this catalog, so each is in it.
        let found = destinations.filter_map(|(name, place)| Some((catalog.tensors.get(name)?.clone(), place)));
        let mut items: Vec<_> = found.collect();
        items.sort_by_key(|(entry, _)| (entry.file, entry.info.offset));
        let total_bytes = items.iter().map(|(entry, _)| entry.info.size_bytes).sum();
        let edges = TailEdges::default();
        Feed { items, at: 0, done: 0, partial_row: Vec::new(), edges, fed_bytes: 0, total_bytes, uploaded_bytes: 0 }
    }

    /// The bytes wanted next; `None` at the end.
    pub fn wanted(&self) -> Option<Wanted> {
        let (Entry { file, info, .. }, _) = self.items.get(self.at)?;
        Some(Wanted { file: *file, offset: info.offset + self.done, len: info.size_bytes - self.done })
    }

    /// The tensor whose bytes are wanted.
    pub fn tensor(&self) -> Option<&TensorInfo> {
        self.items.get(self.at).map(|(entry, _)| &entry.info)
    }

    /// Takes everything from files that are there as a whole. `progress` is told bytes taken so far, and in all.
    ///
    /// # Errors
    /// [`Error::Truncated`] if a tensor lies past its file's end; errors of [`Device::write`].
    pub fn take_all(
        mut self,
        device: &Device,
        files: &[FileBytes],
        progress: Option<&mut dyn FnMut(u64, u64)>,
    ) -> Result<(), Error> {
        /// Bytes between two reports of progress.
        const PIECE: u64 = 4 << 20;
        let mut ignore = |_, _| ();
        let progress = progress.unwrap_or(&mut ignore);
        while let (Some(wanted), Some(tensor)) = (self.wanted(), self.tensor()) {
            let data = tensor.bytes(&files[wanted.file])?;
            let rest = &data[(wanted.offset - tensor.offset) as usize..];
            self.push(device, &rest[..wanted.len.min(PIECE) as usize])?;
            progress(self.fed_bytes, self.total_bytes);
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
    pub fn push(&mut self, device: &Device, mut bytes: &[u8]) -> Result<(), Error> {
        let Some((entry, place)) = self.items.get(self.at) else { return Ok(()) };
        let info = &entry.info;
        let n_bytes = bytes.len() as u64;
        let row_bytes = match place {
            Destination::Rows { .. } if matches!(entry.stored, Stored::AsRead | Stored::LessOne) => {
                (info.size_bytes / info.shape.first().copied().unwrap_or(1)) as usize
            }
            // Taken as a whole.
            _ => info.size_bytes as usize,
        };
        let mut first_row = ((self.done - self.partial_row.len() as u64) / row_bytes as u64) as u32;
        if !self.partial_row.is_empty() {
            let (head, rest) = bytes.split_at(bytes.len().min(row_bytes - self.partial_row.len()));
            self.partial_row.extend_from_slice(head);
            bytes = rest;
            if self.partial_row.len() == row_bytes {
                self.uploaded_bytes += write_rows(device, entry, place, first_row, &self.partial_row, &mut self.edges)?;
                first_row += 1;
                self.partial_row.clear();
            }
        }
        let (rows, rest) = bytes.split_at(bytes.len() / row_bytes * row_bytes);
        // Bounds what is expanded and repacked at a time.
        const PIECE: usize = 1 << 20;
        let piece_rows = (PIECE / row_bytes).max(1);
        for piece in rows.chunks(piece_rows * row_bytes) {
            self.uploaded_bytes += write_rows(device, entry, place, first_row, piece, &mut self.edges)?;
            first_row += (piece.len() / row_bytes) as u32;
        }
        self.partial_row.extend_from_slice(rest);
        self.fed_bytes += n_bytes;
        self.done += n_bytes;
        if self.done >= info.size_bytes {
            self.at += 1;
            self.done = 0;
        }
        Ok(())
    }
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
    let values = || -> Result<Vec<f32>, Error> {
        let n_blocks = bytes.len() as u64 / info.block_type.block_bytes();
        let mut values = vec![0.0; (n_blocks * info.block_type.block_len()) as usize];
        block::dequantize(info.block_type, bytes, &mut values)?;
        Ok(values)
    };
    match place {
        Destination::Values { tensor, first } => {
            let mut values = values()?;
            match stored {
                Stored::LessOne => values.iter_mut().for_each(|value| *value += 1.0),
                Stored::NegativeLog => values.iter_mut().for_each(|value| *value = -value.exp()),
                _ => {}
            }
            device.write(tensor, *first, &values)?;
            Ok(size_of_val(&values[..]) as u64)
        }
        Destination::Rows { matrix, first_row: top } => match matrix.weight() {
            WeightType::F32 if info.block_type != BlockType::F32 => {
                let values = values()?;
                matrix.write_rows(device, top + first_row, bytemuck::cast_slice(&values), edges)?;
                Ok(size_of_val(&values[..]) as u64)
            }
            _ => {
                matrix.write_rows(device, top + first_row, bytes, edges)?;
                Ok(bytes.len() as u64)
            }
        },
    }
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
        let mut feed = Feed::new(&catalog, [("w", Destination::Values { tensor, first: 0 })].into_iter());
        let before = device.counters();
        for (piece, uploaded) in [(1000, 0), (1048, 4096)] {
            feed.push(&device, &vec![0; piece]).unwrap();
            assert_eq!(feed.take_uploaded(), uploaded);
        }
        assert_eq!((device.counters() - before).bytes_uploaded, 4096);
        assert_eq!((feed.take_uploaded(), feed.progress()), (0, (2048, 2048)));
    }
}
