//! Models by address: `hf:owner/repo[:quantisation][@revision]` to files on this machine.
//!
//! ```no_run
//! use tilewright::hub::{Address, Hub};
//!
//! let address: Address = "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M".parse()?;
//! let path = Hub::from_env()?.fetch(&address, &mut |_| {})?;
//! # Ok::<(), tilewright::Error>(())
//! ```
//!
//! One request lists the files of a revision with their sizes and digests; a choice is made among them, and those that the
//! cache does not have are downloaded. A file enters the cache when all of it is there and has the size and the digest that
//! the list says. The cache has the layout of `huggingface_hub`, so what other programs downloaded is used, and the reverse.
//!
//! This module blocks on the network: it is for the command line and for programs that may block.
//!
//! A hub is not trusted. Names that lead out of the cache are refused before anything is downloaded, all requests go
//! to the commit that the list names, and what an earlier run left counts only if the digest of the whole is right.
//! The token goes to the hub's scheme, host and port alone, so redirects are followed here and not by the HTTP
//! library. After five attempts in a row that bring less than 1 MiB each, a download fails.

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

use self::cache::{Content, Repo};
use self::choice::{Choice, File, Folder};
use self::client::Client;
use self::digest::Digest;
use self::download::Wanted;
use self::patience::Patience;
use crate::error::Error;
use crate::formats::safetensors::ShardIndex;

/// A hub and the cache of what came from it.
pub struct Hub {
    client: Client,
    cache: PathBuf,
    is_offline: bool,
    sleep: Box<dyn Fn(Duration) + Send + Sync>,
}

/// Where a hub is and what it may be asked.
#[derive(Clone)]
pub struct HubOptions {
    /// Its address, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Folder of the cache, which need not be there.
    pub cache: PathBuf,
    /// Token of an account. It goes to the hub itself, never to where a redirect leads.
    pub token: Option<String>,
    /// Whether no request may be made.
    pub is_offline: bool,
}

impl HubOptions {
    /// What the environment says, as `huggingface_hub` understands it: `HF_ENDPOINT`, `HF_HUB_CACHE` or `HF_HOME`, `HF_TOKEN` or
    /// the file `token` in `HF_HOME`, `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// [`Error::Option`] if no variable says where the cache is and there is no home folder.
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

/// What happens while a model is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A download begins. It does not if all files are there.
    Begin {
        /// Files that are missing.
        n_files: usize,
        /// Their bytes.
        total_bytes: u64,
    },
    /// Bytes of these files that are there.
    Progress {
        /// Those that are there.
        done_bytes: u64,
        /// All of them.
        total_bytes: u64,
    },
    /// The download has ended.
    End,
    /// What a person should know.
    Notice(&'a str),
}

/// A model in the cache.
#[derive(Clone, Debug)]
pub struct Cached {
    /// Its address.
    pub address: Address,
    /// Its file, the first of its shards, or its folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub size_bytes: u64,
    /// When the latest of them was written.
    pub modified: SystemTime,
}

/// What [`Hub::verify`] found.
#[derive(Debug, Default)]
pub struct Verified {
    /// Contents that were added up.
    pub n_files: usize,
    /// Their bytes.
    pub size_bytes: u64,
    /// Those that were not what they should be, and were removed.
    pub damaged: Vec<Damaged>,
    /// Files of which nothing says what they should be.
    pub unknown: Vec<PathBuf>,
}

/// A content that was damaged.
#[derive(Debug)]
pub struct Damaged {
    /// `owner/repo`.
    pub repo: String,
    /// Where it was.
    pub path: PathBuf,
    /// The digest that it should have, and the one that it had.
    pub digests: [String; 2],
    /// The commits and paths of the files that it was the content of.
    pub files: Vec<(String, String)>,
    /// Whether these have been downloaded again.
    pub restored: Result<(), Error>,
}

/// A revision of a repository as the hub lists it.
struct Listing {
    commit: String,
    files: Vec<File>,
}

/// What is read of the hub's answer.
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
    /// The hub and the cache that the environment names.
    ///
    /// # Errors
    /// Those of [`HubOptions::from_env`] and [`Hub::new`].
    pub fn from_env() -> Result<Hub, Error> {
        Hub::new(HubOptions::from_env()?)
    }

    /// This hub and this cache.
    ///
    /// # Errors
    /// [`Error::Option`] if the endpoint is no address of a server, or the token no token.
    pub fn new(options: HubOptions) -> Result<Hub, Error> {
        let HubOptions { endpoint, cache, token, is_offline } = options;
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            let expected = "an address that begins with https:// or http://".into();
            return Err(Error::Option { option: "HF_ENDPOINT", expected, found: endpoint });
        }
        if token.as_ref().is_some_and(|token| !token.trim().bytes().all(|byte| byte.is_ascii_graphic())) {
            let (expected, found) = ("letters, digits and signs of ASCII".into(), "others".into());
            return Err(Error::Option { option: "HF_TOKEN", expected, found });
        }
        Ok(Hub { client: Client::new(&endpoint, token), cache, is_offline, sleep: Box::new(std::thread::sleep) })
    }

    /// Waits by `sleep` between tries, rather than for the time itself.
    pub fn with_sleep(self, sleep: impl Fn(Duration) + Send + Sync + 'static) -> Hub {
        Hub { sleep: Box::new(sleep), ..self }
    }

    /// Folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Finds a model in the cache or downloads what is missing of it. Returns its file, the first of its shards, or its
    /// folder.
    ///
    /// The hub is asked each time whether the revision has changed. Where it does not answer and the cache has the model, that
    /// copy is used, with a notice.
    ///
    /// # Errors
    /// Any of [`HubError`]; [`Error::Io`] if the cache cannot be read or written.
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
                "the token goes to {} without encryption: whoever is on the way can read and use it",
                self.client.endpoint()
            )));
        }
        let listing = match self.list_files(address, cached.is_ok()) {
            Err(Error::Hub(error)) if error.is_passing() && cached.is_ok() => {
                on_event(Event::Notice(&format!("{error}; the copy in the cache is used")));
                return cached;
            }
            listing => listing?,
        };
        let repo = Repo::new(&self.cache, &address.repo);
        let snapshot = repo.snapshot(&listing.commit);
        let choice = choice::choose(&listing.files, address)?;
        let files = match &choice {
            Choice::Gguf(model) => model.files(),
            Choice::Folder(folder) => {
                // Small, and it says which other files are needed.
                self.complete(address, &repo, &listing, folder.index.as_slice(), &mut |_| {})?;
                [folder.texts.clone(), weights(folder, &snapshot, address)?].concat()
            }
        };
        self.complete(address, &repo, &listing, &files, on_event)?;
        repo.set_revision(address.revision(), &listing.commit)?;
        Ok(choice.place(&snapshot))
    }

    /// Finds a model in the cache, without any request.
    ///
    /// # Errors
    /// [`HubError::Choice`] if it is not there, or not all of it.
    pub fn find(&self, address: &Address) -> Result<PathBuf, Error> {
        let repo = Repo::new(&self.cache, &address.repo);
        let Some(commit) = repo.commit_of(address.revision()) else {
            let wanted = format!("no revision {} in the cache", address.revision());
            return Err(HubError::Choice { address: address.to_string(), wanted, available: Vec::new() }.into());
        };
        let snapshot = repo.snapshot(&commit);
        let choice = choice::choose(&repo.files(&commit)?, address)?;
        if let Choice::Folder(folder) = &choice {
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

    /// Adds up all files in the cache, or those of the repository of an address: each time a model is used, its files are
    /// looked at for their sizes alone. A content that is not what its name or the hub says is removed, and downloaded again
    /// unless no request may be made. `on_event` hears of what was added up as of a download.
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
            false => self.list_files(&of_commit(name, commit), true).map_or(Vec::new(), |listing| listing.files),
        };
        let (contents, mut unknown) = repo.contents(listed)?;
        verified.unknown.append(&mut unknown);
        let total_bytes = contents.iter().map(|content| content.size).sum();
        let mut done_bytes = 0;
        for Content { path, size, digest, files } in contents {
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

    /// Downloads a file of a commit that is gone from the cache.
    fn restore(&self, name: &str, repo: &Repo, commit: &str, path: &str) -> Result<(), Error> {
        let address = of_commit(name, commit);
        if self.is_offline {
            let found = format!("{path} was damaged, and is removed");
            return Err(HubError::Offline { address: address.to_string(), found, cache: self.cache.clone() }.into());
        }
        let listing = self.list_files(&address, false)?;
        let wanted: Vec<File> = listing.files.iter().filter(|file| file.path == path).cloned().collect();
        if wanted.is_empty() {
            let (wanted, available) = (format!("no {path}"), Vec::new());
            return Err(HubError::Choice { address: address.to_string(), wanted, available }.into());
        }
        self.complete(&address, repo, &listing, &wanted, &mut |_| {})
    }

    /// Removes a model from the cache: in one revision if the address names it, or else in all. What other models of the
    /// repository need stays. Returns the bytes that are freed.
    ///
    /// # Errors
    /// [`HubError::NotCached`] if it is not there, [`HubError::Choice`] if the address names none of several models;
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
                Ok(Choice::Gguf(model)) => model.files(),
                Ok(Choice::Folder(folder)) => folder.all(),
                Err(_) => Vec::new(),
            };
            chosen.extend(found.into_iter().map(|file| (commit.clone(), file.path)));
        }
        // What a download left that never ended can be removed as well.
        let is_leftover = !has_files && address.revision.is_none();
        if chosen.is_empty() && !is_leftover {
            return Err(missing().into());
        }
        repo.remove(&chosen)
    }

    /// The files of a revision; one try if it can be done without.
    fn list_files(&self, address: &Address, is_dispensable: bool) -> Result<Listing, Error> {
        let url = self.client.list_url(&address.repo, address.revision());
        let mut patience = match is_dispensable {
            true => Patience::none(&*self.sleep),
            false => Patience::new(&*self.sleep),
        };
        loop {
            match self.client.list(&url) {
                Ok(json) => return Ok(read_listing(&url, &json)?),
                Err(error) => patience.wait(error, 0)?,
            }
        }
    }

    /// Downloads those of some files that are missing, and puts all of them into the snapshot.
    fn complete(
        &self,
        address: &Address,
        repo: &Repo,
        listing: &Listing,
        files: &[File],
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
                on_event(Event::Notice(&format!("another program downloads {path} as well; waiting for it")));
            });
            let blob = repo.blob(&digest);
            // Another program may have been faster.
            if !has_size(&blob, size) {
                let (wanted, mut patience) = (Wanted { url, size, digest: &digest }, Patience::new(&*self.sleep));
                let mut on_size = |bytes| on_event(Event::Progress { done_bytes: before + bytes, total_bytes });
                download::download(&self.client, &wanted, &blob, &mut patience, &mut on_size)?;
            }
            repo.link(commit, path, &digest)?;
            before += size;
        }
        on_event(Event::End);
        Ok(())
    }

    /// Size and digest of a file: from the list, or else from the headers of the file itself.
    fn known(&self, url: &str, file: &File) -> Result<(u64, Digest), Error> {
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
            expected: "the list of files or a header to say it".into(),
            found: "nowhere".into(),
        };
        let size = file.size.or(said.size).ok_or_else(|| missing("the file's size"))?;
        let digest = file.digest.clone().or(said.digest).ok_or_else(|| missing("the file's digest"))?;
        Ok((size, digest))
    }
}

/// All of a repository at a commit.
fn of_commit(repo: &str, commit: &str) -> Address {
    Address { repo: repo.into(), path: None, quant: None, revision: Some(commit.into()) }
}

/// Reads the hub's list of a revision's files. Nothing in it is trusted: names could lead out of the cache.
fn read_listing(url: &str, json: &[u8]) -> Result<Listing, HubError> {
    let wrong = |field: &str, expected: &str, found: String| HubError::Answer {
        url: url.into(),
        field: field.into(),
        expected: expected.into(),
        found,
    };
    let revision: Revision = serde_json::from_slice(json)
        .map_err(|error| wrong("the list of files", "JSON with `sha` and `siblings`", format!("wrong: {error}")))?;
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
            // A pointer's own digest would not be that of the content.
            (None, Some(git)) if lfs_size.is_none() => Digest::git(git),
            _ => None,
        };
        files.push(File { path: rfilename, size: lfs_size.or(size), digest });
    }
    Ok(Listing { commit: revision.sha.to_ascii_lowercase(), files })
}

/// The weight files of a folder whose index, if it has one, is in the snapshot.
fn weights(folder: &Folder, snapshot: &Path, address: &Address) -> Result<Vec<File>, Error> {
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
    let cached = |address: Address, path: PathBuf, files: &[File]| {
        let modified = files.iter().filter_map(|file| fs::metadata(snapshot.join(&file.path)).ok()?.modified().ok());
        let modified = modified.max().unwrap_or(SystemTime::UNIX_EPOCH);
        let size_bytes = files.iter().filter_map(|file| file.size).sum();
        Cached { address, path, size_bytes, modified }
    };
    if models.is_empty() {
        let Some(folder) = choice::folder(&files, "") else { return Ok(Vec::new()) };
        // With shards missing it is no model.
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
