//! Static files: those of a folder, or the demo page that the build has included.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::UNIX_EPOCH;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use sha2::{Digest, Sha256};
use tilewright::Error;
use tokio::task::{JoinHandle, spawn_blocking};

use super::errors::hex;

/// Maximum number of files and folders.
const MAX_FILES: usize = 10_000;

/// Bytes of a file in memory at a time, per request.
const PIECE_BYTES: usize = 64 << 10;

/// Headers of each file. Pages are isolated from other origins, as threads need; other origins cannot frame them,
/// which a policy in the page cannot say; types are not guessed.
const HEADERS: [(&str, &str); 6] = [
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-embedder-policy", "require-corp"),
    ("content-security-policy", "frame-ancestors 'self'"),
    ("x-content-type-options", "nosniff"),
    ("cache-control", "no-cache"),
    ("accept-ranges", "bytes"),
];

include!(concat!(env!("OUT_DIR"), "/page.rs"));

/// The files present at the start, by URL path. No other path is looked up, so no URL leads out of the folder.
pub struct StaticFiles(HashMap<String, StaticFile>);

#[derive(Clone)]
enum StaticFile {
    OnDisk(PathBuf),
    /// Part of the program.
    Included(&'static str, &'static [u8]),
}

impl StaticFiles {
    /// # Errors
    /// [`Error::Io`] if the folder cannot be read; [`Error::Option`] if it has too many files.
    pub fn open(folder: &Path) -> Result<StaticFiles, Error> {
        let mut files = HashMap::new();
        let mut folders = vec![(folder.to_path_buf(), String::from("/"))];
        while let Some((folder, address)) = folders.pop() {
            let failed = |source| Error::Io { path: folder.clone(), source };
            for entry in std::fs::read_dir(&folder).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                if name.starts_with('.') {
                    continue;
                }
                // Links are followed: the folder's owner put them there.
                match std::fs::metadata(entry.path()) {
                    Ok(about) if about.is_dir() => folders.push((entry.path(), format!("{address}{name}/"))),
                    Ok(about) if about.is_file() => {
                        let file = StaticFile::OnDisk(entry.path());
                        if name == "index.html" {
                            files.insert(address.clone(), file.clone());
                        }
                        files.insert(format!("{address}{name}"), file);
                    }
                    _ => {}
                }
            }
            if files.len() + folders.len() > MAX_FILES {
                let (expected, found) = (format!("a folder of at most {MAX_FILES} files"), "more files".into());
                return Err(Error::Option { option: "page", expected, found });
            }
        }
        Ok(StaticFiles(files))
    }

    /// The demo page, if the build has included it: see `build.rs`.
    pub fn included() -> Option<StaticFiles> {
        (!INCLUDED.is_empty()).then(|| StaticFiles::of(INCLUDED))
    }

    /// Whether the files are part of the program.
    pub fn is_included(&self) -> bool {
        self.0.values().all(|file| matches!(file, StaticFile::Included(..)))
    }

    fn of(files: &[(&'static str, &'static [u8])]) -> StaticFiles {
        let mut all: HashMap<String, StaticFile> = HashMap::new();
        for &(path, bytes) in files {
            if let Some(folder) = path.strip_suffix("index.html") {
                all.insert(folder.into(), StaticFile::Included(path, bytes));
            }
            all.insert(path.into(), StaticFile::Included(path, bytes));
        }
        StaticFiles(all)
    }

    /// The file at a path, if any: all of it, the requested range, or 304 if unchanged (RFC 9110, 13 and 14). It is
    /// read while it is sent.
    pub async fn get(&self, method: &Method, path: &str, asked: &HeaderMap) -> Option<Response> {
        let opened = self.0.get(path)?.clone().open().await?;
        let (kind, len, tag) = (opened.kind, opened.len, opened.tag);
        let says = |name| asked.get(name).and_then(|value: &HeaderValue| value.to_str().ok());

        let mut response = Response::new(Body::empty());
        let headers = response.headers_mut();
        headers.extend(HEADERS.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))));
        headers.insert(header::ETAG, HeaderValue::from_str(&tag).ok()?);
        let is_kept =
            |tags: &str| tags.split(',').map(str::trim).any(|own| own == "*" || own.trim_start_matches("W/") == tag);
        if says(header::IF_NONE_MATCH).is_some_and(is_kept) {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            return Some(response);
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        // A range must be of the same version. A date never matches the tag.
        let is_same = says(header::IF_RANGE).is_none_or(|own| own == tag);
        let asked_for = says(header::RANGE).filter(|_| is_same && *method == Method::GET);
        let (status, range) = match asked_for.and_then(|asked| range_of(asked, len)) {
            None => (StatusCode::OK, 0..len),
            Some(Some(range)) => {
                let content_range = format!("bytes {}-{}/{len}", range.start, range.end - 1);
                headers.insert(header::CONTENT_RANGE, HeaderValue::from_str(&content_range).ok()?);
                (StatusCode::PARTIAL_CONTENT, range)
            }
            Some(None) => {
                headers.insert(header::CONTENT_RANGE, HeaderValue::from_str(&format!("bytes */{len}")).ok()?);
                *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
                return Some(response);
            }
        };
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(range.end - range.start));
        *response.status_mut() = status;
        if *method == Method::GET {
            *response.body_mut() = match opened.content {
                Content::File(file) => {
                    let left = range.end - range.start;
                    Body::new(FilePieces { left, at: range.start, next: NextRead::File(file) })
                }
                Content::Bytes(bytes) => Bytes::from_static(&bytes[range.start as usize..range.end as usize]).into(),
            };
        }
        Some(response)
    }
}

/// A file that is ready to be sent.
struct OpenedFile {
    kind: &'static str,
    len: u64,
    /// Its `ETag`.
    tag: String,
    content: Content,
}

enum Content {
    File(File),
    Bytes(&'static [u8]),
}

impl StaticFile {
    /// `None` if it is gone.
    async fn open(self) -> Option<OpenedFile> {
        let path = match self {
            StaticFile::OnDisk(path) => path,
            StaticFile::Included(path, bytes) => {
                let digest = Sha256::digest(bytes);
                let tag = format!("\"{}\"", hex(&digest[..16]));
                let (kind, len) = (type_of(Path::new(path)), bytes.len() as u64);
                return Some(OpenedFile { kind, len, tag, content: Content::Bytes(bytes) });
            }
        };
        let kind = type_of(&path);
        let opened = spawn_blocking(move || {
            let file = File::open(path)?;
            let about = file.metadata()?;
            Ok::<_, io::Error>((file, about))
        });
        let (file, about) = opened.await.ok()?.ok()?;
        let len = about.len();
        // A rewritten file has another time or length.
        let time = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let tag = format!("\"{len:x}-{:x}\"", time.as_nanos());
        Some(OpenedFile { kind, len, tag, content: Content::File(file) })
    }
}

/// The byte range of a `Range` header; an inner `None` if the file has no such bytes. `None` if it is not a single
/// byte range: the header is ignored then.
fn range_of(asked: &str, len: u64) -> Option<Option<Range<u64>>> {
    let (unit, asked) = asked.split_once('=')?;
    let (first, last) = asked.trim().split_once('-').filter(|_| unit.trim().eq_ignore_ascii_case("bytes"))?;
    let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() {
        // A number that overflows is also beyond the file.
        true => Some(text.parse().unwrap_or(u64::MAX)),
        false => None,
    };
    let range = match (first, last) {
        ("", last) => len.saturating_sub(number(last)?)..len,
        (first, "") => number(first)?..len,
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return None;
            }
            first..len.min(last.saturating_add(1))
        }
    };
    Some(Some(range).filter(|range| range.start < range.end))
}

/// A part of a file. Each piece is read once the connection has room for it.
struct FilePieces {
    left: u64,
    at: u64,
    next: NextRead,
}

enum NextRead {
    File(File),
    Reading(JoinHandle<io::Result<(File, Vec<u8>)>>),
    /// Reading failed.
    Nothing,
}

fn read(mut file: File, at: u64, n: usize) -> io::Result<(File, Vec<u8>)> {
    let mut piece = vec![0; n];
    file.seek(SeekFrom::Start(at))?;
    // A file that became shorter is an error: its length was sent already.
    file.read_exact(&mut piece)?;
    Ok((file, piece))
}

impl hyper::body::Body for FilePieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            let this = &mut *self;
            match std::mem::replace(&mut this.next, NextRead::Nothing) {
                NextRead::File(file) if this.left > 0 => {
                    let (at, n) = (this.at, this.left.min(PIECE_BYTES as u64) as usize);
                    this.next = NextRead::Reading(spawn_blocking(move || read(file, at, n)));
                }
                NextRead::Reading(mut reading) => {
                    let read = match pin!(&mut reading).poll(context) {
                        Poll::Ready(read) => read.unwrap_or_else(|panic| Err(io::Error::other(panic))),
                        Poll::Pending => {
                            this.next = NextRead::Reading(reading);
                            return Poll::Pending;
                        }
                    };
                    let (file, piece) = match read {
                        Ok(read) => read,
                        Err(error) => return Poll::Ready(Some(Err(error))),
                    };
                    let n = piece.len() as u64;
                    (this.left, this.at, this.next) = (this.left - n, this.at + n, NextRead::File(file));
                    return Poll::Ready(Some(Ok(Frame::data(piece.into()))));
                }
                NextRead::File(_) | NextRead::Nothing => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

fn type_of(file: &Path) -> &'static str {
    match file.extension().and_then(|extension| extension.to_str()).unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" | "map" => "application/json",
        "wasm" => "application/wasm",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "webp" => "image/webp",
        "ico" => "image/x-icon",
        "txt" | "md" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_headers_follow_the_http_standard() {
        let known: [(&str, Option<Option<Range<u64>>>); 16] = [
            ("bytes=0-0", Some(Some(0..1))),
            ("bytes=2-5", Some(Some(2..6))),
            ("Bytes=2-", Some(Some(2..10))),
            ("bytes=-3", Some(Some(7..10))),
            ("bytes=-99", Some(Some(0..10))),
            ("bytes=9-99999999999999999999999", Some(Some(9..10))),
            ("bytes=10-", Some(None)),
            ("bytes=99999999999999999999999-", Some(None)),
            ("bytes=-0", Some(None)),
            ("bytes=5-2", None),
            ("bytes=0-1,4-5", None),
            ("bytes=a-b", None),
            ("bytes=--1", None),
            ("bytes=-", None),
            ("lines=0-1", None),
            ("bytes", None),
        ];
        for (asked, range) in known {
            assert_eq!(range_of(asked, 10), range, "{asked}");
        }
        assert_eq!(range_of("bytes=0-", 0), Some(None));
    }

    #[tokio::test]
    async fn included_files_are_served_as_those_of_a_folder() {
        use http_body_util::BodyExt;

        let page = StaticFiles::of(&[("/index.html", b"<p>"), ("/a/index.html", b"a"), ("/b.js", b"0123")]);
        for (path, kind, text) in [
            ("/", "text/html; charset=utf-8", "<p>"),
            ("/index.html", "text/html; charset=utf-8", "<p>"),
            ("/a/", "text/html; charset=utf-8", "a"),
            ("/b.js", "text/javascript; charset=utf-8", "0123"),
        ] {
            let response = page.get(&Method::GET, path, &HeaderMap::new()).await.unwrap();
            assert_eq!(response.headers()[header::CONTENT_TYPE], kind, "{path}");
            assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), text, "{path}");
        }
        assert!(page.get(&Method::GET, "/a", &HeaderMap::new()).await.is_none());
        let asked = HeaderMap::from_iter([(header::RANGE, HeaderValue::from_static("bytes=1-2"))]);
        let part = page.get(&Method::GET, "/b.js", &asked).await.unwrap();
        assert_eq!(part.status(), StatusCode::PARTIAL_CONTENT);
        let tag = part.headers()[header::ETAG].clone();
        assert_eq!(part.into_body().collect().await.unwrap().to_bytes(), "12");
        let asked = HeaderMap::from_iter([(header::IF_NONE_MATCH, tag)]);
        let same = page.get(&Method::GET, "/b.js", &asked).await.unwrap();
        assert_eq!(same.status(), StatusCode::NOT_MODIFIED);
    }

    /// Reads no more than was taken, whatever the file's length.
    #[cfg(unix)]
    #[tokio::test]
    async fn file_body_is_read_only_as_it_is_consumed() {
        use http_body_util::BodyExt;
        use hyper::body::Body as _;

        let folder = std::env::temp_dir().join(format!("tilewright-page-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // A sparse file uses no disk space.
        let len = 1 << 40;
        File::create(folder.join("large.gguf")).unwrap().set_len(len).unwrap();
        let page = StaticFiles::open(&folder).unwrap();
        let response = page.get(&Method::GET, "/large.gguf", &HeaderMap::new()).await.unwrap();
        let mut body = response.into_body();
        assert_eq!(body.size_hint().exact(), Some(len));
        for n_taken in 1..=3 {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(frame.len(), PIECE_BYTES);
            assert_eq!(body.size_hint().exact(), Some(len - n_taken * PIECE_BYTES as u64));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
