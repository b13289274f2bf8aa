//! Fetches models by address: `hf:owner/repo[:quantisation][@revision]` to local files.
//!
//! ```no_run
//! use tilewright::hub::{Address, Hub};
//!
//! let address: Address = "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0".parse()?;
//! let path = Hub::from_env()?.fetch(&address, &mut |_| {})?;
//! # Ok::<(), tilewright::Error>(())
//! ```
//!
//! One request lists a revision's files with sizes and digests; the address selects some of them, and those missing
//! in the cache are downloaded. A file enters the cache once complete, with the listed size and digest. The cache
//! layout is `huggingface_hub`'s, so both programs share downloads.
//!
//! This module blocks on the network: it serves the command line and other programs that may block.
//!
//! The hub is untrusted. Names that escape the cache are refused before any download, all requests use the listed
//! commit, and partial files of earlier runs count only if the complete file's digest matches. The token is sent only
//! to the hub's scheme, host and port, so this module follows redirects instead of the HTTP library. A download fails
//! after five attempts in a row that each receive less than 1 MiB.

mod address;
mod cache;
mod choice;
mod client;
mod digest;
mod download;
mod patience;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Deserialize;

pub use crate::error::HubError;
pub use address::Address;

use self::cache::{Blob, Repo};
use self::choice::{Folder, ModelFiles, RepoFile};
use self::client::HubClient;
use self::digest::Digest;
use self::download::FileDownload;
use self::patience::Patience;
use crate::error::Error;
use crate::formats::safetensors::ShardIndex;

/// Suggested models, as JSON: names, addresses, sizes, and whether the project has run them.
pub const KNOWN_MODELS: &str = include_str!("../assets/models.json");

/// A hub with its cache.
pub struct Hub {
    client: HubClient,
    cache: PathBuf,
    is_offline: bool,
    sleep: Box<dyn Fn(Duration) + Send + Sync>,
}

/// Location and permissions of a hub.
#[derive(Clone)]
pub struct HubOptions {
    /// Base URL, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Cache folder, created on demand.
    pub cache: PathBuf,
    /// Access token. Sent to the hub only, never to redirect targets.
    pub token: Option<String>,
    /// Whether to make no requests.
    pub is_offline: bool,
}

impl HubOptions {
    /// Reads `huggingface_hub`'s environment variables: `HF_ENDPOINT`, `HF_HUB_CACHE` or `HF_HOME`, `HF_TOKEN` or the
    /// file `token` in `HF_HOME`, `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// [`Error::Option`] if no variable names the cache and there is no home folder.
    pub fn from_env() -> Result<HubOptions, Error> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        let folder = |name| variable(name).map(PathBuf::from);
        let user_cache = || folder("XDG_CACHE_HOME").or_else(|| Some(env::home_dir()?.join(".cache")));
        let home = folder("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.ok_or_else(|| Error::Option {
            option: "HF_HOME",
            expected: "a folder, since there is no home folder".into(),
            found: "not set".into(),
        })?;
        let text = |name| variable(name).and_then(|value| value.into_string().ok());
        let kept_token = || {
            let text = fs::read_to_string(home.as_ref()?.join("token")).ok()?;
            Some(text.strip_prefix(crate::formats::text::MARK).unwrap_or(&text).to_owned())
        };
        let is_set = |value: String| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE");
        Ok(HubOptions {
            endpoint: text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            cache,
            token: text("HF_TOKEN").or_else(kept_token),
            is_offline: text("HF_HUB_OFFLINE").is_some_and(is_set),
        })
    }
}

/// Events while a model is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A download begins; omitted if all files are cached.
    Begin {
        /// Number of missing files.
        n_files: usize,
        /// Their size.
        total_bytes: u64,
    },
    /// Progress of the download.
    Progress {
        /// Bytes received.
        done_bytes: u64,
        /// Bytes in total.
        total_bytes: u64,
    },
    /// The download has ended.
    End,
    /// A message for the user.
    Notice(&'a str),
}

/// A model in the cache.
#[derive(Clone, Debug)]
pub struct Cached {
    /// Its address.
    pub address: Address,
    /// Its file, its first shard, or its folder.
    pub path: PathBuf,
    /// Size of its files.
    pub size_bytes: u64,
    /// When its newest file was written.
    pub modified: SystemTime,
}

/// Result of [`Hub::verify`].
#[derive(Debug, Default)]
pub struct Verified {
    /// Number of blobs compared.
    pub n_files: usize,
    /// Their size.
    pub size_bytes: u64,
    /// Damaged blobs, which were removed.
    pub damaged: Vec<Damaged>,
    /// Files without a known digest.
    pub unknown: Vec<PathBuf>,
}

/// A damaged blob.
#[derive(Debug)]
pub struct Damaged {
    /// `owner/repo`.
    pub repo: String,
    /// Where it was.
    pub path: PathBuf,
    /// Expected and found digest.
    pub digests: [String; 2],
    /// Commits and paths of the files with this content.
    pub files: Vec<(String, String)>,
    /// Whether the files were downloaded again.
    pub restored: Result<(), Error>,
}

/// A revision of a repository as the hub lists it.
struct Listing {
    commit: String,
    files: Vec<RepoFile>,
}

/// The fields used from the hub's response.
#[derive(Deserialize)]
struct Revision {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Hub {
    /// The hub and cache from the environment.
    ///
    /// # Errors
    /// Those of [`HubOptions::from_env`] and [`Hub::new`].
    pub fn from_env() -> Result<Hub, Error> {
        Hub::new(HubOptions::from_env()?)
    }

    /// A hub with these options.
    ///
    /// # Errors
    /// [`Error::Option`] if the endpoint is not a URL or the token is malformed.
    pub fn new(options: HubOptions) -> Result<Hub, Error> {
        let HubOptions { endpoint, cache, token, is_offline } = options;
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            let expected = "an address that begins with https:// or http://".into();
            return Err(Error::Option { option: "HF_ENDPOINT", expected, found: endpoint });
        }
        if token.as_ref().is_some_and(|token| !token.trim().bytes().all(|byte| byte.is_ascii_graphic())) {
            let (expected, found) = ("printable ASCII characters".into(), "a text with other characters".into());
            return Err(Error::Option { option: "HF_TOKEN", expected, found });
        }
        Ok(Hub { client: HubClient::new(&endpoint, token), cache, is_offline, sleep: Box::new(std::thread::sleep) })
    }

    /// Uses `sleep` to wait between attempts.
    pub fn with_sleep(self, sleep: impl Fn(Duration) + Send + Sync + 'static) -> Hub {
        Hub { sleep: Box::new(sleep), ..self }
    }

    /// The cache folder.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Finds a model in the cache or downloads its missing files. Returns its file, its first shard, or its folder.
    ///
    /// Asks the hub each time whether the revision has changed. If the hub does not answer, a cached copy is used,
    /// with a notice.
    ///
    /// # Errors
    /// [`HubError`]; [`Error::Io`] if the cache cannot be read or written.
    pub fn fetch(&self, address: &Address, on_event: &mut dyn FnMut(Event<'_>)) -> Result<PathBuf, Error> {
        let cached = self.find(address);
        if self.is_offline {
            return cached.map_err(|error| match error {
                Error::Hub(HubError::Choice { wanted, available, .. }) => {
                    let found = if available.is_empty() {
                        String::new()
                    } else {
                        format!("{wanted}; there: {}", available.join(", "))
                    };
                    HubError::Offline { address: address.to_string(), found, cache: self.cache.clone() }.into()
                }
                other => other,
            });
        }
        if self.client.tells_token_in_clear() {
            on_event(Event::Notice(&format!(
                "the token is sent to {} without encryption: anyone on the network path can read it",
                self.client.endpoint()
            )));
        }
        let mut on_wait = |error: &HubError| on_event(Event::Notice(&format!("{error}; trying again")));
        let listing = match self.list_files(address, cached.is_ok(), &mut on_wait) {
            Err(Error::Hub(error)) if error.is_passing() && cached.is_ok() => {
                on_event(Event::Notice(&format!("{error}; using the cached copy")));
                return cached;
            }
            Err(Error::Hub(HubError::Connection { message, .. })) => {
                let (endpoint, address) = (self.client.endpoint().to_owned(), address.to_string());
                return Err(HubError::Unreachable { endpoint, address, message, cache: self.cache.clone() }.into());
            }
            listing => listing?,
        };
        let repo = Repo::new(&self.cache, &address.repo);
        let snapshot = repo.snapshot(&listing.commit);
        let choice = choice::choose(&listing.files, address)?;
        let files = match &choice {
            ModelFiles::Gguf(model) => {
                let vision = choice::vision_file(&listing.files, model);
                model.files().into_iter().chain(vision).collect()
            }
            ModelFiles::Folder(folder) => {
                // The index is small and names the other files needed.
                self.complete(address, &repo, &listing, folder.index.as_slice(), &mut |_| {})?;
                [folder.texts.clone(), weights(folder, &snapshot, address)?].concat()
            }
        };
        self.complete(address, &repo, &listing, &files, on_event)?;
        repo.set_revision(address.revision(), &listing.commit)?;
        Ok(choice.place(&snapshot))
    }

    /// Finds a model in the cache without requests.
    ///
    /// # Errors
    /// [`HubError::Choice`] if it is missing or incomplete.
    pub fn find(&self, address: &Address) -> Result<PathBuf, Error> {
        let repo = Repo::new(&self.cache, &address.repo);
        let Some(commit) = repo.commit_of(address.revision()) else {
            let wanted = format!("no revision {} in the cache", address.revision());
            return Err(HubError::Choice { address: address.to_string(), wanted, available: Vec::new() }.into());
        };
        let snapshot = repo.snapshot(&commit);
        let choice = choice::choose(&repo.files(&commit)?, address)?;
        if let ModelFiles::Folder(folder) = &choice {
            weights(folder, &snapshot, address)?;
        }
        Ok(choice.place(&snapshot))
    }

    /// The models in the cache, by address.
    ///
    /// # Errors
    /// [`Error::Io`] if the cache cannot be read.
    pub fn list(&self) -> Result<Vec<Cached>, Error> {
        let mut models = Vec::new();
        for name in cache::repos(&self.cache)? {
            let repo = Repo::new(&self.cache, &name);
            for commit in repo.commits()? {
                let revisions = repo.revisions_of(&commit)?;
                let revision = match revisions.iter().any(|revision| revision == "main") {
                    true => None,
                    false => Some(revisions.into_iter().next().unwrap_or_else(|| commit.clone())),
                };
                let address = Address { repo: name.clone(), path: None, quant: None, revision };
                models.extend(list_snapshot(&repo, &commit, &address)?);
            }
        }
        Ok(models)
    }

    /// Verifies the digests of all cached files, or of an address's repository; normal use checks sizes only. Blobs
    /// that do not match their name or the hub's digest are removed, and downloaded again unless offline. `on_event`
    /// reports progress as for a download.
    ///
    /// # Errors
    /// [`Error::Io`] if the cache cannot be read or written.
    pub fn verify(&self, address: Option<&Address>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Verified, Error> {
        let mut verified = Verified::default();
        let names = match address {
            Some(address) => vec![address.repo.clone()],
            None => cache::repos(&self.cache)?,
        };
        for name in names {
            self.verify_repo(&name, &mut verified, on_event)?;
        }
        Ok(verified)
    }

    fn verify_repo(
        &self,
        name: &str,
        verified: &mut Verified,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), Error> {
        let repo = Repo::new(&self.cache, name);
        let listed = |commit: &str| match self.is_offline {
            true => Vec::new(),
            false => {
                self.list_files(&of_commit(name, commit), true, &mut |_| {}).map_or(Vec::new(), |listing| listing.files)
            }
        };
        let (contents, mut unknown) = repo.contents(listed)?;
        verified.unknown.append(&mut unknown);
        let total_bytes = contents.iter().map(|content| content.size).sum();
        let mut done_bytes = 0;
        for Blob { path, size, digest, files } in contents {
            let mut on_bytes = |bytes: u64| on_event(Event::Progress { done_bytes: done_bytes + bytes, total_bytes });
            let found = digest::of_file(&path, &digest, &mut on_bytes)?;
            done_bytes += size;
            verified.n_files += 1;
            verified.size_bytes += size;
            if found == digest {
                continue;
            }
            fs::remove_file(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
            let restored = files.iter().try_for_each(|(commit, file)| self.restore(name, &repo, commit, file));
            let digests = [digest.to_string(), found.to_string()];
            verified.damaged.push(Damaged { repo: name.into(), path, digests, files, restored });
        }
        Ok(())
    }

    /// Downloads a commit's file again after it was removed from the cache.
    fn restore(&self, name: &str, repo: &Repo, commit: &str, path: &str) -> Result<(), Error> {
        let address = of_commit(name, commit);
        if self.is_offline {
            let found = format!("{path} was damaged and has been removed");
            return Err(HubError::Offline { address: address.to_string(), found, cache: self.cache.clone() }.into());
        }
        let listing = self.list_files(&address, false, &mut |_| {})?;
        let wanted: Vec<RepoFile> = listing.files.iter().filter(|file| file.path == path).cloned().collect();
        if wanted.is_empty() {
            let (wanted, available) = (format!("no {path}"), Vec::new());
            return Err(HubError::Choice { address: address.to_string(), wanted, available }.into());
        }
        self.complete(&address, repo, &listing, &wanted, &mut |_| {})
    }

    /// Removes a model from the cache: in the revision that the address names, or else in all. Blobs of the
    /// repository's other models stay. Returns the bytes freed.
    ///
    /// # Errors
    /// [`HubError::NotCached`] if it is not cached, [`HubError::Choice`] if the address matches several models;
    /// [`Error::Io`] if a file cannot be removed.
    pub fn remove(&self, address: &Address) -> Result<u64, Error> {
        let repo = Repo::new(&self.cache, &address.repo);
        let missing = || HubError::NotCached { address: address.to_string(), cache: self.cache.clone() };
        if !repo.exists() {
            return Err(missing().into());
        }
        let commits = match &address.revision {
            Some(revision) => Vec::from_iter(repo.commit_of(revision)),
            None => repo.commits()?,
        };
        let (mut chosen, mut has_files) = (Vec::new(), false);
        for commit in commits {
            let files = repo.files(&commit)?;
            has_files |= !files.is_empty();
            let models = choice::gguf_models(&files);
            if address.quant.is_none() && address.path.is_none() && models.len() > 1 {
                let available = models.into_iter().map(|model| model.first.path).collect();
                let (address, wanted) = (address.to_string(), "several models are in the cache".into());
                return Err(HubError::Choice { address, wanted, available }.into());
            }
            let found = match choice::choose(&files, address) {
                Ok(ModelFiles::Gguf(model)) => model.files(),
                Ok(ModelFiles::Folder(folder)) => folder.all(),
                Err(_) => Vec::new(),
            };
            chosen.extend(found.into_iter().map(|file| (commit.clone(), file.path)));
        }
        // Remains of an aborted download can be removed, too.
        let is_leftover = !has_files && address.revision.is_none();
        if chosen.is_empty() && !is_leftover {
            return Err(missing().into());
        }
        repo.remove(&chosen)
    }

    /// Lists a revision's files; tries once if `is_dispensable`. `on_wait` receives the error before the second attempt.
    fn list_files(
        &self,
        address: &Address,
        is_dispensable: bool,
        on_wait: &mut dyn FnMut(&HubError),
    ) -> Result<Listing, Error> {
        let url = self.client.list_url(&address.repo, address.revision());
        let mut patience = match is_dispensable {
            true => Patience::none(&*self.sleep),
            false => Patience::new(&*self.sleep),
        };
        loop {
            match self.client.list(&url) {
                Ok(json) => return Ok(read_listing(&url, &json)?),
                Err(error) => patience.wait_saying(error, 0, on_wait)?,
            }
        }
    }

    /// Downloads the missing files, and links all of them into the snapshot.
    fn complete(
        &self,
        address: &Address,
        repo: &Repo,
        listing: &Listing,
        files: &[RepoFile],
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), Error> {
        let commit = &listing.commit;
        let (mut missing, mut total_bytes) = (Vec::new(), 0u64);
        for file in files {
            let url = self.client.file_url(&address.repo, commit, &file.path);
            let (size, digest) = self.known(&url, file)?;
            if repo.has(commit, &file.path, size) {
                continue;
            }
            if has_size(&repo.blob(&digest), size) {
                repo.link(commit, &file.path, &digest)?;
                continue;
            }
            total_bytes = total_bytes.saturating_add(size);
            missing.push((&file.path, url, size, digest));
        }
        if missing.is_empty() {
            return Ok(());
        }
        on_event(Event::Begin { n_files: missing.len(), total_bytes });
        let mut before = 0;
        for (path, url, size, digest) in missing {
            let _lock = repo.lock(&digest, || {
                on_event(Event::Notice(&format!("waiting for another program that is downloading {path}")));
            });
            let blob = repo.blob(&digest);
            // Another program may have completed it.
            if !has_size(&blob, size) {
                let (wanted, mut patience) = (FileDownload { url, size, digest: &digest }, Patience::new(&*self.sleep));
                let mut on_size = |bytes| on_event(Event::Progress { done_bytes: before + bytes, total_bytes });
                download::download(&self.client, &wanted, &blob, &mut patience, &mut on_size)?;
            }
            repo.link(commit, path, &digest)?;
            before += size;
        }
        on_event(Event::End);
        Ok(())
    }

    /// A file's size and digest: from the listing, or else from its response headers.
    fn known(&self, url: &str, file: &RepoFile) -> Result<(u64, Digest), Error> {
        if let (Some(size), Some(digest)) = (file.size, &file.digest) {
            return Ok((size, digest.clone()));
        }
        let mut patience = Patience::new(&*self.sleep);
        let said = loop {
            match self.client.describe(url) {
                Ok(said) => break said,
                Err(error) => patience.wait(error, 0)?,
            }
        };
        let missing = |field: &str| HubError::Answer {
            url: url.into(),
            field: field.into(),
            expected: "a value in the list of files or a header".into(),
            found: "missing".into(),
        };
        let size = file.size.or(said.size).ok_or_else(|| missing("the file's size"))?;
        let digest = file.digest.clone().or(said.digest).ok_or_else(|| missing("the file's digest"))?;
        Ok((size, digest))
    }
}

/// The whole repository at a commit.
fn of_commit(repo: &str, commit: &str) -> Address {
    Address { repo: repo.into(), path: None, quant: None, revision: Some(commit.into()) }
}

/// Parses the hub's listing. Nothing in it is trusted: paths could escape the cache.
fn read_listing(url: &str, json: &[u8]) -> Result<Listing, HubError> {
    let wrong = |field: &str, expected: &str, found: String| HubError::Answer {
        url: url.into(),
        field: field.into(),
        expected: expected.into(),
        found,
    };
    let revision: Revision = serde_json::from_slice(json)
        .map_err(|error| wrong("the list of files", "JSON with `sha` and `siblings`", format!("invalid: {error}")))?;
    if !cache::is_commit(&revision.sha) {
        return Err(wrong("sha", "a commit of 40 hexadecimal digits", format!("`{}`", revision.sha.escape_debug())));
    }
    let mut files = Vec::new();
    for Sibling { rfilename, size, blob_id, lfs } in revision.siblings {
        if !address::is_plain_path(&rfilename) {
            let found = format!("`{}`", rfilename.escape_debug());
            return Err(wrong("rfilename", "a path that stays in the repository", found));
        }
        let (sha256, lfs_size) = lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
        let digest = match (&sha256, &blob_id) {
            (Some(sha256), _) => Digest::sha256(sha256)
                .map(Some)
                .ok_or_else(|| wrong("lfs.sha256", "64 hexadecimal digits", format!("`{}`", sha256.escape_debug())))?,
            // For an LFS file this is the pointer's digest, not the content's.
            (None, Some(git)) if lfs_size.is_none() => Digest::git(git),
            _ => None,
        };
        files.push(RepoFile { path: rfilename, size: lfs_size.or(size), digest });
    }
    Ok(Listing { commit: revision.sha.to_ascii_lowercase(), files })
}

/// The weight files of a folder; its index, if any, must be in the snapshot.
fn weights(folder: &Folder, snapshot: &Path, address: &Address) -> Result<Vec<RepoFile>, Error> {
    let Some(index) = &folder.index else { return Ok(folder.weights(None, address)?) };
    let path = snapshot.join(&index.path);
    let json = fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    let index = ShardIndex::parse(&json).map_err(|error| error.in_file(path))?;
    Ok(folder.weights(Some(index.shards()), address)?)
}

/// The models of a snapshot.
fn list_snapshot(repo: &Repo, commit: &str, address: &Address) -> Result<Vec<Cached>, Error> {
    let (files, snapshot) = (repo.files(commit)?, repo.snapshot(commit));
    let models = choice::gguf_models(&files);
    let cached = |address: Address, path: PathBuf, files: &[RepoFile]| {
        let modified = files.iter().filter_map(|file| fs::metadata(snapshot.join(&file.path)).ok()?.modified().ok());
        let modified = modified.max().unwrap_or(SystemTime::UNIX_EPOCH);
        let size_bytes = files.iter().filter_map(|file| file.size).sum();
        Cached { address, path, size_bytes, modified }
    };
    if models.is_empty() {
        let Some(folder) = choice::folder(&files, "") else { return Ok(Vec::new()) };
        // Incomplete shards are not a model.
        let Ok(weights) = weights(&folder, &snapshot, address) else { return Ok(Vec::new()) };
        let files = [folder.texts, weights].concat();
        return Ok(vec![cached(address.clone(), snapshot.clone(), &files)]);
    }
    let mut found = Vec::new();
    for model in &models {
        let is_unique = models.iter().filter(|other| other.quant == model.quant).count() == 1;
        let (path, quant) = match (&model.quant, is_unique) {
            (Some(quant), true) => (None, Some(quant.clone())),
            (None, true) if models.len() == 1 => (None, None),
            _ => (Some(model.first.path.clone()), None),
        };
        let address = Address { path, quant, ..address.clone() };
        found.push(cached(address, snapshot.join(&model.first.path), &model.files()));
    }
    Ok(found)
}

fn has_size(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == size)
}
