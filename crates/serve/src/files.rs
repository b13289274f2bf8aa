//! Versions of files that are read again when they change.

use std::path::Path;
use std::time::SystemTime;

/// Modification time and length of a file; `None` if it cannot be read.
pub type FileVersion = Option<(SystemTime, u64)>;

/// The versions of files.
pub fn versions(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Vec<FileVersion> {
    let version = |path: &Path| {
        let about = std::fs::metadata(path).ok()?;
        Some((about.modified().ok()?, about.len()))
    };
    paths.into_iter().map(|path| version(path.as_ref())).collect()
}
