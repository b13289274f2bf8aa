//! The folder that all programs share which download from a hub, in the layout of `huggingface_hub`:
//!
//! ```text
//! models--owner--repo/
//!     blobs/<digest>                   content of files; <digest>.incomplete while it comes
//!     refs/<revision>                  the commit of a branch or tag
//!     snapshots/<commit>/<path>        links to blobs; on Windows they may be the files themselves
//! .locks/models--owner--repo/<digest>.lock
//! ```
//!
//! Described at <https://huggingface.co/docs/hub/local-cache>.

use std::collections::BTreeSet;
use std::fs::{self, File as DiskFile, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::choice::File;
use super::digest::{Digest, is_hex};
use crate::error::Error;

/// Folders in folders of a repository, at most.
const MAX_DEPTH: usize = 16;

/// The part of the cache that belongs to one repository.
pub(super) struct Repo {
    folder: PathBuf,
    locks: PathBuf,
}

/// All repositories of models in a cache, by `owner/repo`.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be read; one that is not there has none.
pub(super) fn repos(cache: &Path) -> Result<Vec<String>, Error> {
    let names = names(cache)?;
    let repos = names.iter().filter_map(|name| name.strip_prefix("models--")?.split_once("--"));
    Ok(repos.map(|(owner, repo)| format!("{owner}/{repo}")).collect())
}

impl Repo {
    /// That of `owner/repo`, which need not be there.
    pub fn new(cache: &Path, repo: &str) -> Repo {
        let name = format!("models--{}", repo.replace('/', "--"));
        Repo { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    pub fn exists(&self) -> bool {
        self.folder.is_dir()
    }

    /// Where a file's content is or will be.
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.folder.join("blobs").join(digest.as_str())
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Commits with files here.
    pub fn commits(&self) -> Result<Vec<String>, Error> {
        names(&self.folder.join("snapshots"))
    }

    /// The commit that a branch, a tag or a commit's own name stands for here.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        let named = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let commit = named.map(|commit| commit.trim().to_owned()).unwrap_or_else(|| revision.into());
        (is_commit(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// The branches and tags that stand for a commit.
    pub fn revisions_of(&self, commit: &str) -> Result<Vec<String>, Error> {
        let refs = self.folder.join("refs");
        let mut found = files_below(&refs)?;
        found.retain(|(_, path)| fs::read_to_string(path).is_ok_and(|named| named.trim() == commit));
        Ok(found.into_iter().map(|(name, _)| name).collect())
    }

    /// Writes which commit a branch or tag stands for.
    pub fn set_revision(&self, revision: &str, commit: &str) -> Result<(), Error> {
        let path = self.folder.join("refs").join(revision);
        match revision == commit || fs::read_to_string(&path).is_ok_and(|named| named.trim() == commit) {
            true => Ok(()),
            false => crate::cache::write(&path, commit.as_bytes()),
        }
    }

    /// The files of a commit whose content is here.
    pub fn files(&self, commit: &str) -> Result<Vec<File>, Error> {
        let mut files = Vec::new();
        for (path, place) in files_below(&self.snapshot(commit))? {
            // A link whose blob is gone is no file.
            if let Ok(content) = fs::metadata(&place) {
                files.push(File { path, size: Some(content.len()), digest: None });
            }
        }
        Ok(files)
    }

    /// Keeps other programs from downloading the same file meanwhile; waits until they have, after `on_wait`. A file system
    /// without locks has none, and then what two programs write at once fails its digest.
    pub fn lock(&self, digest: &Digest, on_wait: impl FnOnce()) -> Option<DiskFile> {
        fs::create_dir_all(&self.locks).ok()?;
        let lock = DiskFile::create(self.locks.join(format!("{digest}.lock"))).ok()?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            on_wait();
            lock.lock().ok()?;
        }
        Some(lock)
    }

    /// Whether a file of a commit is there in its whole size.
    pub fn has(&self, commit: &str, path: &str, size: u64) -> bool {
        let content = fs::metadata(self.snapshot(commit).join(path));
        content.is_ok_and(|content| content.is_file() && content.len() == size)
    }

    /// Gives a file of a commit its content.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub fn link(&self, commit: &str, path: &str, digest: &Digest) -> Result<(), Error> {
        let place = self.snapshot(commit).join(path);
        let io = |source| Error::Io { path: place.clone(), source };
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder).map_err(io)?;
        }
        if let Err(error) = fs::remove_file(&place)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(io(error));
        }
        // Relative, so that the cache can be moved: out of the folders of the path, the commit and `snapshots`.
        let up = std::iter::repeat_n("..", path.split('/').count() + 1);
        let target: PathBuf = up.chain(["blobs", digest.as_str()]).collect();
        link(&target, &self.blob(digest), &place).map_err(io)
    }

    /// Removes files of some commits, and the contents that no commit needs any more. If no file is left, all is removed that
    /// is kept of the repository. Returns the bytes that are freed.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be removed.
    pub fn remove(&self, files: &[(String, String)]) -> Result<u64, Error> {
        let (mut freed, mut blobs) = (0, BTreeSet::new());
        for (commit, path) in files {
            let place = self.snapshot(commit).join(path);
            match fs::read_link(&place).ok().as_deref().and_then(Path::file_name) {
                Some(blob) => {
                    blobs.insert(blob.to_owned());
                    remove_file(&place)?;
                }
                None => freed += remove_file(&place)?,
            }
        }
        let (mut is_empty, mut needed) = (true, BTreeSet::new());
        for commit in self.commits()? {
            for (_, place) in files_below(&self.snapshot(&commit))? {
                is_empty = false;
                needed.extend(
                    fs::read_link(&place).ok().as_deref().and_then(Path::file_name).map(|blob| blob.to_owned()),
                );
            }
        }
        for blob in blobs.difference(&needed) {
            let place = self.folder.join("blobs").join(blob);
            if place.exists() {
                freed += remove_file(&place)?;
            }
        }
        if is_empty {
            for (_, place) in files_below(&self.folder.join("blobs"))? {
                freed += fs::symlink_metadata(&place).map_or(0, |file| file.len());
            }
            fs::remove_dir_all(&self.folder).map_err(|source| Error::Io { path: self.folder.clone(), source })?;
            // Nothing but names is left there.
            let _ = fs::remove_dir_all(&self.locks);
        }
        Ok(freed)
    }
}

/// Whether a text is a commit's whole name.
pub(super) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

fn remove_file(path: &Path) -> Result<u64, Error> {
    let io = |source| Error::Io { path: path.into(), source };
    let size = fs::symlink_metadata(path).map_err(io)?.len();
    fs::remove_file(path).map_err(io)?;
    Ok(size)
}

/// Names in a folder, in order; none if it is not there.
fn names(folder: &Path) -> Result<Vec<String>, Error> {
    let io = |source| Error::Io { path: folder.into(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // A hub's names are UTF-8.
        names.extend(entry.map_err(io)?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// Files below a folder: their paths from there, with `/`, and where they are. Links to folders are not followed.
fn files_below(folder: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let (mut found, mut folders) = (Vec::new(), vec![(String::new(), folder.to_path_buf(), 0)]);
    while let Some((prefix, folder, depth)) = folders.pop() {
        for name in names(&folder)? {
            let (path, place) = (format!("{prefix}{name}"), folder.join(&name));
            let is_folder = fs::symlink_metadata(&place).is_ok_and(|entry| entry.is_dir());
            match is_folder {
                true if depth < MAX_DEPTH => folders.push((format!("{path}/"), place, depth + 1)),
                true => {}
                false => found.push((path, place)),
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(unix)]
fn link(target: &Path, _: &Path, place: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, place)
}

/// Links need a right there that few have; the content is then moved to where it belongs, as `huggingface_hub` does.
#[cfg(not(unix))]
fn link(target: &Path, blob: &Path, place: &Path) -> io::Result<()> {
    #[cfg(windows)]
    if std::os::windows::fs::symlink_file(target, place).is_ok() {
        return Ok(());
    }
    let _ = target;
    fs::hard_link(blob, place).or_else(|_| fs::rename(blob, place))
}
