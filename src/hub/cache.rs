//! The cache folder shared by all programs that download from a hub, in `huggingface_hub`'s layout:
//!
//! ```text
//! models--owner--repo/
//!     blobs/<digest>                   content of files; <digest>.incomplete during download
//!     refs/<revision>                  the commit of a branch or tag
//!     snapshots/<commit>/<path>        links to blobs; on Windows they may be the files themselves
//! .locks/models--owner--repo/<digest>.lock
//! ```
//!
//! Documented at <https://huggingface.co/docs/hub/local-cache>.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File as DiskFile, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::choice::RepoFile;
use super::digest::{Digest, is_hex};
use crate::error::Error;

/// Limit of nested folders in a repository.
const MAX_DEPTH: usize = 16;

/// A repository's part of the cache.
pub(super) struct Repo {
    folder: PathBuf,
    locks: PathBuf,
}

/// A blob in the cache.
pub(super) struct Blob {
    pub path: PathBuf,
    pub size: u64,
    pub digest: Digest,
    /// Commits and paths of the files with this content.
    pub files: Vec<(String, String)>,
}

/// All model repositories in a cache, as `owner/repo`.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be read; a missing one is empty.
pub(super) fn repos(cache: &Path) -> Result<Vec<String>, Error> {
    let names = names(cache)?;
    let repos = names.iter().filter_map(|name| name.strip_prefix("models--")?.split_once("--"));
    Ok(repos.map(|(owner, repo)| format!("{owner}/{repo}")).collect())
}

impl Repo {
    /// The entry of `owner/repo`, which may not exist yet.
    pub fn new(cache: &Path, repo: &str) -> Repo {
        let name = format!("models--{}", repo.replace('/', "--"));
        Repo { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    pub fn exists(&self) -> bool {
        self.folder.is_dir()
    }

    /// Location of a blob.
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.folder.join("blobs").join(digest.as_str())
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Commits with files in the cache.
    pub fn commits(&self) -> Result<Vec<String>, Error> {
        names(&self.folder.join("snapshots"))
    }

    /// The cached commit of a branch, tag or commit name.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        let named = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let commit = named.map(|commit| commit.trim().to_owned()).unwrap_or_else(|| revision.into());
        (is_commit(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// Branches and tags that point to a commit.
    pub fn revisions_of(&self, commit: &str) -> Result<Vec<String>, Error> {
        let refs = self.folder.join("refs");
        let mut found = files_below(&refs)?;
        found.retain(|(_, path)| fs::read_to_string(path).is_ok_and(|named| named.trim() == commit));
        Ok(found.into_iter().map(|(name, _)| name).collect())
    }

    /// Points a branch or tag to a commit.
    pub fn set_revision(&self, revision: &str, commit: &str) -> Result<(), Error> {
        let path = self.folder.join("refs").join(revision);
        match revision == commit || fs::read_to_string(&path).is_ok_and(|named| named.trim() == commit) {
            true => Ok(()),
            false => crate::cache::write(&path, commit.as_bytes()),
        }
    }

    /// The files of a commit with cached content.
    pub fn files(&self, commit: &str) -> Result<Vec<RepoFile>, Error> {
        let mut files = Vec::new();
        for (path, place) in files_below(&self.snapshot(commit))? {
            // Skips links without a blob.
            if let Ok(content) = fs::metadata(&place) {
                files.push(RepoFile { path, size: Some(content.len()), digest: None });
            }
        }
        Ok(files)
    }

    /// Locks a file against concurrent downloads; calls `on_wait` before waiting. Without file-system locks, a
    /// concurrent write fails the digest check.
    pub fn lock(&self, digest: &Digest, on_wait: impl FnOnce()) -> Option<DiskFile> {
        fs::create_dir_all(&self.locks).ok()?;
        // Without truncation, in case the name is a link.
        let open = DiskFile::options().write(true).create(true).truncate(false).clone();
        let lock = open.open(self.locks.join(format!("{digest}.lock"))).ok()?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            on_wait();
            lock.lock().ok()?;
        }
        Some(lock)
    }

    /// Whether a commit's file has its full size.
    pub fn has(&self, commit: &str, path: &str, size: u64) -> bool {
        let content = fs::metadata(self.snapshot(commit).join(path));
        content.is_ok_and(|content| content.is_file() && content.len() == size)
    }

    /// Links a commit's file to its blob, unless already linked.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub fn link(&self, commit: &str, path: &str, digest: &Digest) -> Result<(), Error> {
        let place = self.snapshot(commit).join(path);
        let io = |source| Error::Io { path: place.clone(), source };
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder).map_err(io)?;
        }
        // Relative, so that the cache can be moved: out of the path's folders, the commit and `snapshots`.
        let up = std::iter::repeat_n("..", path.split('/').count() + 1);
        let target: PathBuf = up.chain(["blobs", digest.as_str()]).collect();
        let is_right = || fs::read_link(&place).is_ok_and(|found| found == target);
        // Concurrent programs do this at once, and some already read the file.
        if is_right() {
            return Ok(());
        }
        match self.replace_link(&target, digest, &place) {
            Err(_) if is_right() || cfg!(not(unix)) && place.is_file() => Ok(()),
            replaced => replaced.map_err(io),
        }
    }

    /// Creates the link under a temporary name and renames it, so that the file always exists.
    fn replace_link(&self, target: &Path, digest: &Digest, place: &Path) -> io::Result<()> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let blob = self.blob(digest);
        let part = loop {
            let turn = MADE.fetch_add(1, Ordering::Relaxed);
            let part = blob.with_extension(format!("link{}-{turn}", std::process::id()));
            match link(target, &blob, &part) {
                // Left by a killed process with the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => break made.map(|()| part)?,
            }
        };
        let renamed = fs::rename(&part, place);
        // Remains after an error, or if both names already linked to the same file.
        let _ = fs::remove_file(&part);
        renamed
    }

    /// All blobs with their expected digests: from their names, or from `listed` for files that are not links. Then
    /// the files without a known digest.
    ///
    /// # Errors
    /// [`Error::Io`] if a folder cannot be read.
    pub fn contents(&self, listed: impl Fn(&str) -> Vec<RepoFile>) -> Result<(Vec<Blob>, Vec<PathBuf>), Error> {
        let (mut contents, mut unknown) = (Vec::new(), Vec::new());
        let size = |path: &Path| fs::metadata(path).ok().filter(|entry| entry.is_file()).map(|entry| entry.len());
        let mut files: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
        for commit in self.commits()? {
            let listed = LazyCell::new(|| listed(&commit));
            for (path, place) in files_below(&self.snapshot(&commit))? {
                if let Ok(target) = fs::read_link(&place) {
                    let blob = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    files.entry(blob).or_default().push((commit.clone(), path));
                } else if let Some(size) = size(&place) {
                    match listed.iter().find(|file| file.path == path).and_then(|file| file.digest.clone()) {
                        Some(digest) => {
                            let files = vec![(commit.clone(), path)];
                            contents.push(Blob { path: place, size, digest, files });
                        }
                        None => unknown.push(place),
                    }
                }
            }
        }
        for (name, path) in files_below(&self.folder.join("blobs"))? {
            // Names of partial downloads are not digests.
            let digest = Digest::sha256(&name).or_else(|| Digest::git(&name));
            match (digest, size(&path)) {
                (Some(digest), Some(size)) => {
                    let files = files.remove(&name).unwrap_or_default();
                    contents.push(Blob { path, size, digest, files });
                }
                (None, Some(_)) if files.contains_key(&name) => unknown.push(path),
                _ => {}
            }
        }
        Ok((contents, unknown))
    }

    /// Removes files of commits, and blobs that no commit needs any more. Removes the whole repository once no file
    /// is left. Returns the bytes freed.
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
            // Only empty lock files remain.
            let _ = fs::remove_dir_all(&self.locks);
        }
        Ok(freed)
    }
}

/// Whether a text is a full commit hash.
pub(super) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

fn remove_file(path: &Path) -> Result<u64, Error> {
    let io = |source| Error::Io { path: path.into(), source };
    let size = fs::symlink_metadata(path).map_err(io)?.len();
    fs::remove_file(path).map_err(io)?;
    Ok(size)
}

/// Sorted names in a folder; none if it is missing.
fn names(folder: &Path) -> Result<Vec<String>, Error> {
    let io = |source| Error::Io { path: folder.into(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // Names from a hub are UTF-8.
        names.extend(entry.map_err(io)?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// Files below a folder: relative path with `/`, and location. Does not follow links to folders.
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

/// Symbolic links need special rights on Windows; else the content is hard-linked or moved, as in `huggingface_hub`.
#[cfg(not(unix))]
fn link(target: &Path, blob: &Path, place: &Path) -> io::Result<()> {
    #[cfg(windows)]
    if std::os::windows::fs::symlink_file(target, place).is_ok() {
        return Ok(());
    }
    let _ = target;
    fs::hard_link(blob, place).or_else(|_| fs::rename(blob, place))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    /// A repository with two blobs in an empty folder.
    fn repo(test: &str) -> (PathBuf, Repo, [Digest; 2]) {
        let cache = std::env::temp_dir().join(format!("tilewright-hub-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&cache);
        let repo = Repo::new(&cache, "owner/name");
        let digests = ["a", "b"].map(|digit| Digest::git(&digit.repeat(40)).unwrap());
        fs::create_dir_all(repo.folder.join("blobs")).unwrap();
        digests.iter().for_each(|digest| fs::write(repo.blob(digest), digest.as_str()).unwrap());
        (cache, repo, digests)
    }

    #[cfg(unix)]
    #[test]
    fn correct_link_is_left_unchanged() {
        let (cache, repo, [first, second]) = repo("right");
        let folder = repo.snapshot("commit").join("sub");
        let place = folder.join("m.gguf");
        // Adding or removing an entry changes a folder's date.
        let long_ago = SystemTime::now() - Duration::from_secs(1000);
        let set_back = || DiskFile::open(&folder).unwrap().set_modified(long_ago).unwrap();
        let is_changed = || fs::metadata(&folder).unwrap().modified().unwrap() != long_ago;
        repo.link("commit", "sub/m.gguf", &first).unwrap();
        set_back();
        repo.link("commit", "sub/m.gguf", &first).unwrap();
        assert!(!is_changed(), "the link was recreated");
        repo.link("commit", "sub/m.gguf", &second).unwrap();
        assert!(is_changed() && fs::read_to_string(&place).unwrap() == second.as_str());
        // Replaces any file; a folder is an error.
        fs::remove_file(&place).unwrap();
        fs::write(&place, "something else").unwrap();
        repo.link("commit", "sub/m.gguf", &first).unwrap();
        assert_eq!(fs::read_to_string(&place).unwrap(), first.as_str());
        fs::create_dir_all(folder.join("x.gguf/y")).unwrap();
        assert!(matches!(repo.link("commit", "sub/x.gguf", &first), Err(Error::Io { .. })));
        assert_eq!(names(&repo.folder.join("blobs")).unwrap().len(), 2, "nothing is left beside the contents");
        fs::remove_dir_all(cache).unwrap();
    }

    #[test]
    fn concurrent_programs_share_snapshot_links() {
        const ROUNDS: usize = 300;
        let (cache, repo, digests) = repo("side-by-side");
        let barrier = std::sync::Barrier::new(8);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|writer| {
                    let (repo, barrier, digests) = (&repo, &barrier, &digests);
                    scope.spawn(move || {
                        let link = |round: usize| {
                            barrier.wait();
                            // A new file, and one replaced under its readers.
                            repo.link("commit", &format!("{round}.gguf"), &digests[0])?;
                            repo.link("commit", "m.gguf", &digests[(round + writer) % 2])
                        };
                        // A failing writer still reaches the barrier.
                        (0..ROUNDS).filter_map(|round| link(round).err()).collect::<Vec<_>>()
                    })
                })
                .collect();
            let reader = scope.spawn(|| {
                let place = repo.snapshot("commit").join("m.gguf");
                while !place.exists() && !is_over.load(Ordering::Relaxed) {}
                let mut n_missing = 0;
                while !is_over.load(Ordering::Relaxed) {
                    n_missing += usize::from(fs::read(&place).is_err());
                }
                n_missing
            });
            let failed: Vec<_> = writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
            is_over.store(true, Ordering::Relaxed);
            assert!(failed.is_empty(), "{} of {} failed: {}", failed.len(), 8 * ROUNDS, failed[0]);
            assert_eq!(reader.join().unwrap(), 0, "the link was gone at times");
        });
        fs::remove_dir_all(cache).unwrap();
    }
}
