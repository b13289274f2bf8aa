//! Files that outlive a run: where they are, and how they are written.

use std::path::Path;
#[cfg(not(target_arch = "wasm32"))]
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Error;

/// The folder for them. `TILEWRIGHT_CACHE_DIR` moves it; empty turns it off.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    if let Some(folder) = variable("TILEWRIGHT_CACHE_DIR") {
        return (!folder.as_os_str().is_empty()).then_some(folder);
    }
    let home = || variable("HOME").map(|home| home.join(".cache"));
    Some(variable("XDG_CACHE_HOME").or_else(|| variable("LOCALAPPDATA")).or_else(home)?.join("tilewright"))
}

/// Writes a file beside its place and renames it, so that no reader ever sees half of it.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be made or the file not be written.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(io)?;
    }
    // Other processes and threads may be writing the same file.
    let turn = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let part = path.with_extension(format!("part{}-{turn}", std::process::id()));
    let written = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        // What could be written of it must not stay on a full disk.
        let _ = std::fs::remove_file(&part);
    }
    written.map_err(io)
}
