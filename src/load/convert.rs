//! Conversion of model files to GGUF files of another type.
//!
//! ```text
//! GGUF file or folder -> Plan: keys, tensors with their types -> header -> tensor after tensor, a few rows at a time
//! ```
//! The rules are those of llama.cpp's quantiser: a [`Recipe`] gives each matrix a type by its role and layer, or all
//! matrices get the same one, as with `--pure`. Rows that are not a whole number of blocks get another.

mod folder;
mod importance;
mod plan;
mod recipe;
mod split;
mod vocab;

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::FileBytes;
use crate::error::Error;
use crate::formats::block::dequantize;
use crate::formats::quantize::{QUANTIZABLE, quantize_row};
use crate::formats::{BlockType, TensorInfo};
pub use importance::ImportanceMatrix;
use plan::{ConvertPlan, PlannedTensor};
pub use recipe::Recipe;
pub use split::{Shard, SplitLimit, SplitOptions, merge_files, split_file};

/// Options of [`quantize_file`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// Type of all matrices, one of [`QUANTIZABLE`].
    pub block_type: BlockType,
    /// A recipe in place of one type for all matrices.
    pub recipe: Option<Recipe>,
    /// Importance of each matrix column.
    pub importance: Option<ImportanceMatrix>,
    /// Whether to replace an existing file.
    pub overwrite: bool,
}

impl QuantizeOptions {
    /// All matrices of this type, no importance matrix, no replacing.
    pub fn new(block_type: BlockType) -> QuantizeOptions {
        QuantizeOptions { block_type, recipe: None, importance: None, overwrite: false }
    }

    /// Matrices of the types that a recipe chooses, no importance matrix, no replacing.
    pub fn of(recipe: Recipe) -> QuantizeOptions {
        QuantizeOptions { recipe: Some(recipe), ..QuantizeOptions::new(recipe.block_type()) }
    }
}

/// A written tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenTensor {
    /// Name in the new file.
    pub name: String,
    /// Dimensions with the contiguous one last.
    pub shape: Vec<u64>,
    /// Type in the input.
    pub from: BlockType,
    /// Type in the output.
    pub to: BlockType,
    /// Size in the output.
    pub size_bytes: u64,
    /// Whether its rows are not a whole number of blocks of the type that it should get, so that a fallback type was
    /// used.
    pub fell_back: bool,
    /// Whether the importance matrix was used.
    pub weighted: bool,
}

/// Result of [`quantize_file`].
#[derive(Clone, Debug)]
pub struct QuantizeReport {
    /// All tensors in file order.
    pub tensors: Vec<WrittenTensor>,
    /// Size of the input files.
    pub source_bytes: u64,
    /// Size of the output file.
    pub written_bytes: u64,
}

impl QuantizeReport {
    /// Number of tensors and bytes per type, largest first by bytes.
    pub fn by_type(&self) -> Vec<(BlockType, usize, u64)> {
        let mut found: Vec<(BlockType, usize, u64)> = Vec::new();
        for tensor in &self.tensors {
            match found.iter_mut().find(|(block_type, ..)| *block_type == tensor.to) {
                Some((_, n, bytes)) => (*n, *bytes) = (*n + 1, *bytes + tensor.size_bytes),
                None => found.push((tensor.to, 1, tensor.size_bytes)),
            }
        }
        found.sort_by_key(|&(block_type, _, bytes)| (std::cmp::Reverse(bytes), block_type.name()));
        found
    }
}

/// Converts the model at `input` to a GGUF file with matrices of another type.
///
/// `input` is a GGUF file of any architecture (the first shard stands for all), or a Hugging Face folder.
/// One-dimensional tensors, norms and a few small matrices keep their type; all keys stay except those that describe
/// the type. The tensors of a GGUF file are written in llama.cpp's order: those outside layers, then layer by layer,
/// each by name. The output is written under a temporary name beside `output` and renamed when complete. Only some rows
/// at a time are in memory. `progress` receives the current tensor, the bytes read so far and their total.
///
/// # Errors
/// [`Error::Io`] if a file cannot be read or written, or already exists; [`Error::InFile`] naming the input and the
/// tensor at fault: non-finite values or values too large for the type, types without a decoder;
/// [`Error::Unsupported`] for a type that is not [`QUANTIZABLE`], and for [`Recipe::Q2_K_S`] without the importances
/// that it needs.
pub fn quantize_file(
    input: &Path,
    output: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(&str, u64, u64),
) -> Result<QuantizeReport, Error> {
    if !QUANTIZABLE.contains(&options.block_type) {
        return Err(Error::Unsupported {
            format: "quantize",
            field: "type".into(),
            found: options.block_type.name().into(),
            supported: QUANTIZABLE.map(BlockType::name).join(" "),
        });
    }
    check_output(output, &[input], options.overwrite)?;
    let plan = ConvertPlan::of(input, options)?;
    let header = plan.header.to_bytes();
    let mut out = OutputFile::beside(output)?;
    out.write(&header)?;
    let source_bytes = plan.files.iter().map(|file| file.len() as u64).sum();
    let total: u64 = plan.tensors.iter().map(|tensor| tensor.source.size_bytes).sum();
    let mut done = 0;
    for tensor in &plan.tensors {
        let name = &tensor.written.name;
        progress(name, done, total);
        write_tensor(&plan, tensor, options, &mut out, &mut |bytes| progress(name, done + bytes, total))?;
        out.pad(plan.header.padding(tensor.written.size_bytes))?;
        done += tensor.source.size_bytes;
    }
    let written_bytes = out.finish()?;
    let tensors = plan.tensors.into_iter().map(|tensor| tensor.written).collect();
    Ok(QuantizeReport { tensors, source_bytes, written_bytes })
}

/// Refuses an output that is one of the inputs, one that exists unless it may be overwritten, and one in a folder that
/// does not exist.
fn check_output(output: &Path, inputs: &[&Path], overwrite: bool) -> Result<(), Error> {
    let place = output.canonicalize().ok();
    let is_input = place.is_some() && inputs.iter().any(|input| input.canonicalize().ok() == place);
    let has_folder = output.parent().is_none_or(|folder| folder.as_os_str().is_empty() || folder.is_dir());
    let (kind, what) = match (is_input, output.exists() && !overwrite) {
        (true, _) => (io::ErrorKind::InvalidInput, "is the input, which is never replaced"),
        (false, true) => (io::ErrorKind::AlreadyExists, "exists already"),
        (false, false) if !has_folder => (io::ErrorKind::NotFound, "the folder does not exist"),
        (false, false) => return Ok(()),
    };
    Err(Error::Io { path: output.into(), source: io::Error::new(kind, what) })
}

/// Writes a tensor's data, some rows at a time.
fn write_tensor(
    plan: &ConvertPlan,
    tensor: &PlannedTensor,
    options: &QuantizeOptions,
    out: &mut OutputFile,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    /// Elements per step: 8 MiB of floats.
    const PIECE: usize = 2 << 20;
    let in_file = |error: Error| error.in_file(&plan.paths[tensor.file]);
    let source = &tensor.source;
    let data = source.bytes(&plan.files[tensor.file]).map_err(in_file)?;
    let ordered = tensor.stored.ordered(source, data);
    let data = ordered.as_deref().unwrap_or(data);
    let to = tensor.written.to;
    if tensor.is_copied() && !is_float(to) {
        return out.write(data);
    }
    // A bias has the order of its matrix's rows.
    let is_ordered_bias = tensor.order != Order::Same && tensor.written.shape.len() == 1;
    let row_len = if is_ordered_bias { 1 } else { tensor.written.shape.last().copied().unwrap_or(1) as usize };
    let bytes_of_row =
        |block_type: BlockType| row_len / block_type.block_len() as usize * block_type.block_bytes() as usize;
    let (source_row, to_row) = (bytes_of_row(source.block_type), bytes_of_row(to));
    let n_rows = data.len() / source_row;
    // Each expert has its own importances.
    let rows_per_matrix = tensor.written.shape.iter().rev().nth(1).copied().unwrap_or(1) as usize;
    let importance = tensor.written.weighted.then(|| options.importance.as_ref()?.get(&tensor.written.name)).flatten();
    let piece_rows = (PIECE / row_len).clamp(1, n_rows.max(1));
    let mut blocks = vec![0; piece_rows * to_row];
    for first in (0..n_rows).step_by(piece_rows) {
        let n = piece_rows.min(n_rows - first);
        let blocks = &mut blocks[..n * to_row];
        blocks
            .par_chunks_mut(to_row)
            .enumerate()
            .try_for_each_init(
                || vec![0.0; row_len],
                |values, (i, blocks)| {
                    let row = first + i;
                    let at = tensor.order.source_row(row);
                    let bytes = data.get(at * source_row..(at + 1) * source_row).unwrap_or_default();
                    dequantize(source.block_type, bytes, values)?;
                    if tensor.adds_one {
                        values.iter_mut().for_each(|value| *value += 1.0);
                    }
                    let importance = importance.and_then(|all| all.chunks_exact(row_len).nth(row / rows_per_matrix));
                    quantize_row(to, values, importance, blocks).map_err(|error| at_tensor(error, source, row))
                },
            )
            .map_err(in_file)?;
        out.write(blocks)?;
        progress(((first + n) * source_row) as u64);
    }
    Ok(())
}

fn is_float(block_type: BlockType) -> bool {
    matches!(block_type, BlockType::F32 | BlockType::F16 | BlockType::BF16)
}

/// Adds tensor and row to the error of an invalid value.
fn at_tensor(error: Error, tensor: &TensorInfo, row: usize) -> Error {
    match error {
        Error::Operand { expected, found, .. } => Error::Format {
            format: "quantize",
            field: format!("row {row} of tensor `{}`", tensor.name.escape_debug()),
            offset: tensor.offset,
            expected,
            found,
        },
        other => other,
    }
}

/// A file with a temporary name until it is complete.
struct OutputFile {
    path: PathBuf,
    partial: PathBuf,
    file: Option<BufWriter<File>>,
    written_bytes: u64,
}

impl OutputFile {
    /// Opens a temporary file in the folder of `path`.
    fn beside(path: &Path) -> Result<OutputFile, Error> {
        let path = &crate::cache::replaced(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let opened = OpenOptions::new().write(true).create_new(true).open(&partial);
        let file = opened.map_err(|source| Error::Io { path: partial.clone(), source })?;
        Ok(OutputFile {
            path: path.into(),
            partial,
            file: Some(BufWriter::with_capacity(1 << 20, file)),
            written_bytes: 0,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.write_all(bytes).map_err(|source| Error::Io { path: self.partial.clone(), source })?;
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Writes zeros.
    fn pad(&mut self, n: usize) -> Result<(), Error> {
        const ZEROS: [u8; 4096] = [0; 4096];
        for first in (0..n).step_by(ZEROS.len()) {
            self.write(&ZEROS[..ZEROS.len().min(n - first)])?;
        }
        Ok(())
    }

    /// Renames the complete file. Returns its size in bytes.
    fn finish(mut self) -> Result<u64, Error> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        if let Some(file) = self.file.take() {
            let file = file.into_inner().map_err(|error| io(error.into_error()))?;
            file.sync_all().map_err(io)?;
        }
        std::fs::rename(&self.partial, &self.path).map_err(io)?;
        Ok(self.written_bytes)
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        // After `finish` this file no longer exists.
        drop(self.file.take());
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// Row order of the output relative to the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Unchanged.
    Same,
    /// In each head of this many rows, interleaves the halves: rows i and i + half become neighbours.
    Pairs(usize),
}

impl Order {
    fn source_row(self, row: usize) -> usize {
        match self {
            Order::Same => row,
            Order::Pairs(head) => row / head * head + row % head / 2 + row % 2 * (head / 2),
        }
    }
}

/// A mapped file with its path for messages.
fn map(path: &Path) -> Result<(PathBuf, FileBytes), Error> {
    Ok((path.into(), FileBytes::map(path)?))
}
