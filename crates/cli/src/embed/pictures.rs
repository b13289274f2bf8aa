//! `embed --images`: files of pictures in, vectors out.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::{Map, Value};
use tilewright::picture::{Patches, Picture, PictureLimits};
use tilewright::{Embedder, Error, ImageEmbedder};

use super::error::EmbedError;
use super::input::InputRecords;
use super::rows::{Cells, Records};

/// The field with a picture's path.
pub const COLUMN: &str = "image";
/// The input's name in errors.
pub const INPUT: &str = "--images";
/// Extensions of a folder's pictures.
const EXTENSIONS: [&str; 5] = ["png", "jpg", "jpeg", "webp", "gif"];
/// Pictures per batch of records, to bound memory.
const BATCH: usize = 64;

/// The files, and those in the folders among them, by name.
pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, EmbedError> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let failed = |source| Error::Io { path: path.clone(), source };
        let entries = fs::read_dir(path).map_err(failed)?;
        let listed = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
        let mut found = listed.map_err(failed)?;
        found.retain(|path| is_picture(path));
        found.sort();
        if found.is_empty() {
            let name = path.display().to_string();
            return Err(EmbedError::input(&name, format!("no pictures, expected files *.{}", EXTENSIONS.join(", *."))));
        }
        files.append(&mut found);
    }
    Ok(files)
}

fn is_picture(path: &Path) -> bool {
    is_named_as_picture(path) && path.is_file()
}

/// Whether a file's extension is that of a picture.
pub fn is_named_as_picture(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_lowercase();
    EXTENSIONS.contains(&extension.as_str())
}

/// A record for each file.
pub fn records(files: Vec<PathBuf>) -> Result<InputRecords, EmbedError> {
    let mut objects = Vec::with_capacity(files.len());
    for file in files {
        let fault = || EmbedError::input(&file.display().to_string(), "its path is not UTF-8");
        let path = file.to_str().ok_or_else(fault)?.to_owned();
        objects.push(Map::from_iter([(COLUMN.to_owned(), Value::String(path))]));
    }
    let batches: Vec<_> = objects.chunks(BATCH).map(<[_]>::to_vec).collect();
    let batches = batches.into_iter().enumerate().map(|(i, objects)| {
        Ok(Records { first_record: (i * BATCH) as u64 + 1, cells: Cells::Objects(objects), bad: Vec::new() })
    });
    Ok(InputRecords { name: INPUT.into(), columns: None, batches: Box::new(batches) })
}

/// The encoder's part for pictures.
pub fn encoder(embedder: &Embedder) -> Result<&ImageEmbedder, EmbedError> {
    embedder.images().map_err(|error| match error {
        Error::Unsupported { format, found, supported, .. } => {
            EmbedError::Model(Error::Unsupported { format, field: INPUT.into(), found, supported })
        }
        other => EmbedError::Model(other),
    })
}

/// The vectors of the pictures in these files.
pub async fn vectors(embedder: &Embedder, files: &[&str], progress: &mut dyn FnMut(usize)) -> Result<Vec<f32>, Error> {
    let encoder = embedder.images()?;
    let mut vectors = Vec::new();
    let n = encoder.batch_len();
    for (i, files) in files.chunks(n).enumerate() {
        let at = |record: usize, source: Box<Error>| Error::InRecord { record: i * n + record, source };
        let patches = prepared(encoder, files).map_err(|(record, error)| at(record, Box::new(error)))?;
        let made = encoder.embed_patches(&patches).await.map_err(|error| match error {
            Error::InRecord { record, source } => at(record, source),
            other => other,
        });
        vectors.extend(made?);
        progress(i * n + files.len());
    }
    Ok(vectors)
}

/// Decodes and prepares pictures with several threads. An error has the file's index.
fn prepared(encoder: &ImageEmbedder, files: &[&str]) -> Result<Vec<Patches>, (usize, Error)> {
    let n_threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(files.len()).max(1);
    let share = files.len().div_ceil(n_threads).max(1);
    thread::scope(|scope| {
        let run = |files: &[&str]| files.iter().map(|file| read(encoder, Path::new(file))).collect::<Vec<_>>();
        let threads: Vec<_> = files.chunks(share).map(|files| scope.spawn(move || run(files))).collect();
        let made = threads.into_iter().flat_map(|thread| match thread.join() {
            Ok(made) => made,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        made.enumerate().map(|(i, made)| made.map_err(|error| (i, error))).collect()
    })
}

fn read(encoder: &ImageEmbedder, path: &Path) -> Result<Patches, Error> {
    let limits = PictureLimits::default();
    let size = fs::metadata(path).map_err(|source| Error::Io { path: path.into(), source })?.len();
    if size > limits.max_bytes {
        let (expected, found) = (format!("at most {} bytes", limits.max_bytes), format!("{size} bytes"));
        return Err(Error::Config { field: "file".into(), expected, found }.in_file(path));
    }
    let bytes = fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let picture = Picture::decode(&bytes, &limits).map_err(|error| error.in_file(path))?;
    encoder.prepare(&picture).map_err(|error| error.in_file(path))
}
