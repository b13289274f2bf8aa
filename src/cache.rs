//! Files kept across runs: their location, and atomic writes, so that readers see a complete file or none.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::error::Error;
use crate::xxh64::Xxh64;

/// The cache folder. `TILEWRIGHT_CACHE_DIR` overrides it; an empty value disables the cache.
pub(crate) fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    if let Some(folder) = variable("TILEWRIGHT_CACHE_DIR") {
        return (!folder.as_os_str().is_empty()).then_some(folder);
    }
    let home = || variable("HOME").map(|home| home.join(".cache"));
    Some(variable("XDG_CACHE_HOME").or_else(|| variable("LOCALAPPDATA")).or_else(home)?.join("tilewright"))
}

/// Writes a temporary file and renames it, so that readers never see a partial file.
///
/// # Errors
/// [`Error::Io`] if the folder or the file cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = Replacement::begin(path)?;
    file.write(bytes)?;
    file.finish()
}

/// As [`write`], with a digest prefix for [`read_checked`].
///
/// # Errors
/// As [`write`].
pub(crate) fn write_checked(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = Replacement::begin(path)?;
    file.write(head(bytes).as_bytes())?;
    file.write(bytes)?;
    file.finish()
}

/// Reads a file from [`write_checked`]. `None` if it is missing or damaged.
pub(crate) fn read_checked(path: &Path) -> Option<Vec<u8>> {
    let mut all = std::fs::read(path).ok()?;
    let at = all.iter().position(|&byte| byte == b'\n')? + 1;
    let bytes = all.split_off(at);
    (all == head(&bytes).as_bytes()).then_some(bytes)
}

fn head(bytes: &[u8]) -> String {
    format!("tilewright {} {}\n", bytes.len(), digest(bytes))
}

/// Digest that detects damaged files.
pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("{:016x}", Xxh64::of(bytes))
}

/// The path of the file that is replaced when `path` is written: behind links.
///
/// # Errors
/// [`Error::Io`] for what is not a file, such as a device.
pub(crate) fn replaced(path: &Path) -> Result<PathBuf, Error> {
    let followed = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    match std::fs::metadata(&followed) {
        Ok(about) if !about.is_file() => {
            let source = std::io::Error::other("this is not a regular file, so it is not replaced");
            Err(Error::Io { path: path.to_path_buf(), source })
        }
        _ => Ok(followed),
    }
}

/// A temporary file that will replace another.
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
        let path = &replaced(path)?;
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(io)?;
        }
        sweep(path);
        let (part, file) = loop {
            // Other processes and threads may be writing the same file.
            let turn = WRITTEN.fetch_add(1, Ordering::Relaxed);
            let part = path.with_extension(format!("part{}-{turn}", std::process::id()));
            // Never open an existing file: a symlink of that name could point to any of the user's files.
            match File::create_new(&part) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                created => break (part, created.map_err(io)?),
            }
        };
        may_die();
        Ok(Replacement { path: path.to_path_buf(), part, file: Some(file) })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.file.as_mut().map_or(Ok(()), |file| {
            let (first, rest) = bytes.split_at(if cfg!(feature = "fault-injection") { bytes.len() / 2 } else { 0 });
            file.write_all(first)?;
            may_die();
            file.write_all(rest)
        });
        written.map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// Renames the file to its final path.
    pub fn finish(mut self) -> Result<(), Error> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        // Sync the content before the rename. Close the file: some systems cannot rename an open one.
        self.file.take().map_or(Ok(()), |file| file.sync_all()).map_err(io)?;
        may_die();
        std::fs::rename(&self.part, &self.path).map_err(io)?;
        may_die();
        Ok(())
    }
}

/// Removes temporary files of killed programs: those older than `LONG`, since active writers touch theirs.
fn sweep(path: &Path) {
    const LONG: Duration = Duration::from_secs(60 * 60);
    let (Some(folder), Some(stem)) = (path.parent(), path.file_stem().and_then(|stem| stem.to_str())) else { return };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_part = |name: &str| {
        let numbers = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix(".part")?.split_once('-'));
        numbers.is_some_and(|(process, turn)| is_number(process) && is_number(turn))
    };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_old = || entry.metadata().ok()?.modified().ok()?.elapsed().ok().map(|age| age >= LONG);
        if entry.file_name().to_str().is_some_and(is_part) && is_old() == Some(true) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A point at which tests may kill the process.
pub(crate) fn may_die() {
    #[cfg(feature = "fault-injection")]
    {
        static REACHED: AtomicU32 = AtomicU32::new(0);
        let n = REACHED.fetch_add(1, Ordering::Relaxed) + 1;
        if std::env::var("TILEWRIGHT_DIE_AT").is_ok_and(|at| at == n.to_string()) {
            std::process::abort();
        }
    }
}

impl Drop for Replacement {
    /// Removes the temporary file, which must not stay on a full disk. After a rename it no longer exists.
    fn drop(&mut self) {
        self.file = None;
        let _ = std::fs::remove_file(&self.part);
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("tilewright-cache-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn checked_file_with_a_changed_byte_is_not_read() {
        let folder = folder("checked");
        let path = folder.join("a.pipelines");
        assert_eq!(read_checked(&path), None);
        write_checked(&path, b"one\ntwo").unwrap();
        assert_eq!(read_checked(&path).as_deref(), Some(&b"one\ntwo"[..]));
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 4;
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(read_checked(&path), None, "byte {at}");
            std::fs::write(&path, &good[..at]).unwrap();
            assert_eq!(read_checked(&path), None, "{at} bytes");
        }
        write_checked(&path, b"").unwrap();
        assert_eq!(read_checked(&path).as_deref(), Some(&b""[..]));
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// Anyone with write access to the folder can guess the names of temporary files.
    #[cfg(unix)]
    #[test]
    fn symlink_in_place_of_a_partial_file_is_not_followed() {
        let folder = folder("links");
        let (path, other) = (folder.join("a.tuning.json"), folder.join("other"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&other, "of the user").unwrap();
        for turn in 0..1000 {
            let part = folder.join(format!("a.tuning.part{}-{turn}", std::process::id()));
            std::os::unix::fs::symlink(&other, part).unwrap();
        }
        write(&path, b"1").unwrap();
        assert_eq!(std::fs::read(&other).unwrap(), b"of the user");
        assert!(!path.is_symlink() && std::fs::read(&path).unwrap() == b"1");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn stale_partial_files_are_removed() {
        let folder = folder("swept");
        let path = folder.join("a.tuning.json");
        write(&path, b"1").unwrap();
        let old = ["a.tuning.part7-0", "a.tuning.part7-x", "b.tuning.part7-0", "a.tuning.part"];
        for name in old.iter().chain(&["a.tuning.part8-0"]) {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let long_ago = SystemTime::now() - Duration::from_secs(2 * 60 * 60);
        for name in old {
            File::options().write(true).open(folder.join(name)).unwrap().set_modified(long_ago).unwrap();
        }
        write(&path, b"2").unwrap();
        let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(
            left,
            ["a.tuning.json", "a.tuning.part", "a.tuning.part7-x", "a.tuning.part8-0", "b.tuning.part7-0"]
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"2");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
