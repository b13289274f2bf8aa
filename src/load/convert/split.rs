//! Splitting a GGUF file into shards, and merging them, with the names and keys of llama.cpp's `gguf-split`:
//!
//! ```text
//! PREFIX-00001-of-00003.gguf   all keys, split.no 0, split.tensors.count of all shards, split.count; tensors
//! PREFIX-00002-of-00003.gguf   the three keys of splits alone; tensors
//! ```

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::plan::Shards;
use super::{OutputFile, check_output};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::gguf::{DEFAULT_ALIGNMENT, Gguf, Value};
use crate::formats::gguf_writer::GgufHeader;
use crate::load::gguf;

/// Keys of shards begin with this.
const SPLIT: &str = "split.";

/// Where a shard ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitLimit {
    /// Maximum bytes of its tensors; keys are not counted.
    Bytes(u64),
    /// Maximum number of tensors.
    Tensors(usize),
}

/// Options of [`split_file`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SplitOptions {
    /// Where a shard ends.
    pub limit: SplitLimit,
    /// Whether the first shard has the keys alone, so that they can be changed by replacing a small file.
    pub keys_apart: bool,
    /// Whether to replace existing files.
    pub overwrite: bool,
    /// Whether to plan the shards without writing them.
    pub dry_run: bool,
}

impl SplitOptions {
    /// Tensors from the first shard on, no replacing.
    pub fn new(limit: SplitLimit) -> SplitOptions {
        SplitOptions { limit, keys_apart: false, overwrite: false, dry_run: false }
    }
}

/// A file of a model that was split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The file.
    pub path: PathBuf,
    /// Number of its tensors.
    pub n_tensors: usize,
    /// Its size.
    pub size_bytes: u64,
}

/// Splits the GGUF file `input` into files named after `prefix`. They appear one after the other; if one cannot be
/// written, those before it are removed. `progress` receives the bytes written so far and their total.
///
/// # Errors
/// [`Error::Io`] if a file cannot be read or written, or exists already; [`Error::InFile`] for an input that is a
/// shard itself or has no tensors; [`Error::Option`] for a limit of no tensors, or below the size of a tensor.
pub fn split_file(
    input: &Path,
    prefix: &Path,
    options: &SplitOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Shard>, Error> {
    let Shards { files, headers, .. } = Shards::read(input)?;
    let ([file], [header]) = (files.as_slice(), headers.as_slice()) else {
        return Err(wrong("split.count", "one file; merge these first", headers.len()).in_file(input));
    };
    let ranges = ranges(header, options)?;
    let shards = ShardPlan::all(header, &ranges, prefix).map_err(|error| error.in_file(input))?;
    shards.iter().try_for_each(|shard| check_output(&shard.path, &[input], options.overwrite))?;
    let total = shards.iter().map(|shard| shard.size_bytes).sum();
    let mut written = WrittenShards::default();
    let mut done = 0;
    for shard in shards {
        if !options.dry_run {
            let tensors = &header.tensors[shard.tensors.clone()];
            let add = &mut |bytes| {
                done += bytes;
                progress(done, total);
            };
            write(&shard.path, &shard.header, tensors.iter().map(|tensor| (&**file, tensor)), add)?;
            written.paths.push(shard.path.clone());
        }
        let Range { start, end } = shard.tensors;
        written.shards.push(Shard { path: shard.path, n_tensors: end - start, size_bytes: shard.size_bytes });
    }
    written.paths.clear();
    Ok(std::mem::take(&mut written.shards))
}

/// Merges the shards of a model, given one of them, into the file `output`; a file that llama.cpp wrote comes back as
/// it was. `progress` receives the bytes written so far and their total.
///
/// # Errors
/// [`Error::Io`] if a file cannot be read or written, or `output` exists already; [`Error::InFile`] for an input that
/// is no shard, and for shards that do not belong together.
pub fn merge_files(
    input: &Path,
    output: &Path,
    overwrite: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Shard, Error> {
    let Shards { paths, files, headers } = Shards::read(input)?;
    let Some(first) = headers.first().filter(|_| headers.len() > 1) else {
        return Err(wrong("split.count", "a shard, one of several files", "missing (a whole model)").in_file(input));
    };
    let inputs: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    check_output(output, &inputs, overwrite)?;
    for (no, (header, path)) in headers.iter().zip(&paths).enumerate() {
        check_shard(header, no, headers.len()).map_err(|error| error.in_file(path))?;
    }
    let tensors = || files.iter().zip(&headers).flat_map(|(file, header)| of_file(file, header));
    let expected = first.metadata.get_u64("split.tensors.count")?;
    if let Some(expected) = expected.filter(|&expected| expected != tensors().count() as u64) {
        let found = format!("{} in all files", tensors().count());
        return Err(wrong("split.tensors.count", &format!("{expected} tensors"), found).in_file(input));
    }
    let mut header = header_of(first)?;
    for (_, tensor) in tensors() {
        header.add_tensor(&tensor.name, &tensor.shape, tensor.block_type).map_err(|error| error.in_file(input))?;
    }
    let total = file_bytes(&header, tensors().map(|(_, tensor)| tensor));
    let mut done = 0;
    let size_bytes = write(output, &header, tensors(), &mut |bytes| {
        done += bytes;
        progress(done, total);
    })?;
    Ok(Shard { path: output.into(), n_tensors: tensors().count(), size_bytes })
}

fn of_file<'f>(file: &'f [u8], header: &'f Gguf) -> impl Iterator<Item = (&'f [u8], &'f TensorInfo)> {
    header.tensors.iter().map(move |tensor| (file, tensor))
}

fn wrong(field: &str, expected: &str, found: impl ToString) -> Error {
    Error::Config { field: field.into(), expected: expected.into(), found: found.to_string() }
}

fn check_shard(shard: &Gguf, no: usize, n: usize) -> Result<(), Error> {
    let count = gguf::n_shards(shard)?;
    if count != n {
        return Err(wrong("split.count", &n.to_string(), count));
    }
    let found = shard.metadata.get_u32("split.no")?.unwrap_or(0);
    if found as usize != no {
        return Err(wrong("split.no", &no.to_string(), found));
    }
    Ok(())
}

/// The keys of a file without those of splits.
fn header_of(file: &Gguf) -> Result<GgufHeader, Error> {
    let mut header = GgufHeader::new(file.alignment);
    for (key, value) in file.metadata.iter().filter(|(key, _)| !key.starts_with(SPLIT)) {
        header.set(key, value)?;
    }
    Ok(header)
}

/// A shard to be written.
struct ShardPlan {
    path: PathBuf,
    header: GgufHeader,
    tensors: Range<usize>,
    size_bytes: u64,
}

impl ShardPlan {
    fn all(file: &Gguf, ranges: &[Range<usize>], prefix: &Path) -> Result<Vec<ShardPlan>, Error> {
        let Ok(count) = u16::try_from(ranges.len()) else {
            return Err(wrong("split.count", "65535 files at most; use a higher limit", ranges.len()));
        };
        let name = prefix.file_name().unwrap_or_default().to_string_lossy();
        let plan = |(no, tensors): (u16, &Range<usize>)| {
            // Further files have no alignment of their own.
            let mut header = if no == 0 { header_of(file)? } else { GgufHeader::new(DEFAULT_ALIGNMENT) };
            // In this order, as in llama.cpp.
            header.set("split.no", Value::U16(no))?;
            header.set("split.tensors.count", Value::I32(file.tensors.len() as i32))?;
            header.set("split.count", Value::U16(count))?;
            let own = &file.tensors[tensors.clone()];
            for tensor in own {
                header.add_tensor(&tensor.name, &tensor.shape, tensor.block_type)?;
            }
            let path = prefix.with_file_name(format!("{name}-{:05}-of-{count:05}.gguf", no + 1));
            let size_bytes = file_bytes(&header, own.iter());
            Ok(ShardPlan { path, header, tensors: tensors.clone(), size_bytes })
        };
        (0..).zip(ranges).map(plan).collect()
    }
}

/// The tensors of each shard.
fn ranges(file: &Gguf, options: &SplitOptions) -> Result<Vec<Range<usize>>, Error> {
    let option = |option, expected: String, found: String| Err(Error::Option { option, expected, found });
    let tensors = &file.tensors;
    match options.limit {
        SplitLimit::Tensors(0) => return option("max_tensors", "1 or more".into(), "0".into()),
        SplitLimit::Bytes(most) => {
            if let Some(large) = tensors.iter().find(|tensor| padded(tensor) > most) {
                let expected = format!("at least {}, the size of `{}`", padded(large), large.name.escape_debug());
                return option("max_size", expected, most.to_string());
            }
        }
        SplitLimit::Tensors(_) => {}
    }
    let mut ranges = Vec::new();
    if options.keys_apart {
        ranges.push(0..0);
    }
    let (mut start, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let is_full = match options.limit {
            SplitLimit::Tensors(most) => i - start == most,
            SplitLimit::Bytes(most) => bytes + padded(tensor) > most,
        };
        if is_full {
            ranges.push(start..i);
            (start, bytes) = (i, 0);
        }
        bytes += padded(tensor);
    }
    ranges.push(start..tensors.len());
    Ok(ranges)
}

/// A tensor's bytes in a file, with padding.
fn padded(tensor: &TensorInfo) -> u64 {
    tensor.size_bytes.next_multiple_of(DEFAULT_ALIGNMENT.into())
}

/// Bytes of a file with these tensors.
fn file_bytes<'t>(header: &GgufHeader, tensors: impl Iterator<Item = &'t TensorInfo>) -> u64 {
    let data = tensors.map(|tensor| tensor.size_bytes + header.padding(tensor.size_bytes) as u64);
    header.to_bytes().len() as u64 + data.sum::<u64>()
}

/// Writes a file of tensors that are copied. Returns its size.
fn write<'t>(
    path: &Path,
    header: &GgufHeader,
    tensors: impl Iterator<Item = (&'t [u8], &'t TensorInfo)>,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, Error> {
    /// Bytes per step.
    const PIECE: usize = 8 << 20;
    let mut out = OutputFile::beside(path)?;
    let keys = header.to_bytes();
    out.write(&keys)?;
    progress(keys.len() as u64);
    for (file, tensor) in tensors {
        for piece in tensor.bytes(file)?.chunks(PIECE) {
            out.write(piece)?;
            progress(piece.len() as u64);
        }
        let padding = header.padding(tensor.size_bytes);
        out.pad(padding)?;
        progress(padding as u64);
    }
    out.finish()
}

/// Files written so far, which are removed unless all of them are.
#[derive(Default)]
struct WrittenShards {
    shards: Vec<Shard>,
    paths: Vec<PathBuf>,
}

impl Drop for WrittenShards {
    fn drop(&mut self) {
        for path in &self.paths {
            // A leftover shard does no harm.
            let _ = std::fs::remove_file(path);
        }
    }
}
