//! Files that outlive a run: where they are, and how they are written.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
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
    let mut file = Replacement::begin(path)?;
    file.write(bytes)?;
    file.finish()
}

/// A file in progress beside the place of the one that it is to replace.
pub(crate) struct Replacement {
    path: PathBuf,
    part: PathBuf,
    /// `None` once closed.
    file: Option<File>,
}

impl Replacement {
    pub fn begin(path: &Path) -> Result<Replacement, Error> {
        static WRITTEN: AtomicU32 = AtomicU32::new(0);
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(io)?;
        }
        // Other processes and threads may be writing the same file.
        let turn = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let part = path.with_extension(format!("part{}-{turn}", std::process::id()));
        let file = File::create(&part).map_err(io)?;
        Ok(Replacement { path: path.to_path_buf(), part, file: Some(file) })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write_all(bytes));
        written.map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// Puts the file in its place.
    pub fn finish(mut self) -> Result<(), Error> {
        // Not every system renames an open file.
        self.file = None;
        std::fs::rename(&self.part, &self.path).map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

impl Drop for Replacement {
    /// What could be written of it must not stay on a full disk; what is in its place has another name.
    fn drop(&mut self) {
        self.file = None;
        let _ = std::fs::remove_file(&self.part);
    }
}
