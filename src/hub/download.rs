//! Downloads a file piece by piece and checks its digest.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::client::{FileResponse, HubClient};
use super::digest::{Digest, Sum};
use super::patience::Patience;
use crate::error::{Error, HubError};

const BUFFER_BYTES: usize = 256 << 10;

/// A file to download.
pub(super) struct FileDownload<'a> {
    pub url: String,
    pub size: u64,
    pub digest: &'a Digest,
}

/// A partial file.
struct PartialFile {
    path: PathBuf,
    file: File,
    size: u64,
    sum: Sum,
}

impl PartialFile {
    /// Opens the partial file of an earlier run, or an empty one.
    fn open(path: PathBuf, wanted: &FileDownload<'_>) -> Result<PartialFile, Error> {
        let io = |source| Error::Io { path: path.clone(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(io)?;
        }
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(io)?;
        let (mut size, mut sum) = (file.metadata().map_err(io)?.len(), wanted.digest.begin(wanted.size));
        if size > wanted.size {
            file.set_len(0).map_err(io)?;
            size = 0;
        }
        let (mut left, mut buffer) = (size, vec![0; BUFFER_BYTES]);
        while left > 0 {
            let room = buffer.len().min(usize::try_from(left).unwrap_or(buffer.len()));
            let n = file.read(&mut buffer[..room]).map_err(io)?;
            if n == 0 {
                break; // another program truncated it
            }
            sum.add(&buffer[..n]);
            left -= n as u64;
        }
        Ok(PartialFile { path, file, size: size - left, sum })
    }

    /// Starts over.
    fn clear(&mut self, wanted: &FileDownload<'_>) -> Result<(), Error> {
        let cleared = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        cleared.map_err(|source| Error::Io { path: self.path.clone(), source })?;
        self.size = 0;
        self.sum = wanted.digest.begin(wanted.size);
        Ok(())
    }

    fn add(&mut self, bytes: &[u8], wanted: &FileDownload<'_>) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::Hub(HubError::DiskFull { path: self.path.clone(), missing_bytes: wanted.size - self.size })
            }
            _ => Error::Io { path: self.path.clone(), source },
        })?;
        self.sum.add(bytes);
        self.size += bytes.len() as u64;
        crate::cache::may_die();
        Ok(())
    }
}

/// Downloads a file to `blob`, continuing an earlier run's partial file. `blob` appears only once complete, with the
/// right digest. `on_size` receives the bytes so far.
///
/// # Errors
/// [`HubError`] for files; [`Error::Io`] if it cannot be written.
pub(super) fn download(
    client: &HubClient,
    wanted: &FileDownload<'_>,
    blob: &Path,
    patience: &mut Patience<'_>,
    on_size: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let mut path = blob.as_os_str().to_owned();
    path.push(".incomplete");
    let mut part = PartialFile::open(path.into(), wanted)?;
    let completed = complete(client, wanted, &mut part, patience, on_size);
    let PartialFile { path, file, size, .. } = part;
    let io = |source| Error::Io { path: blob.into(), source };
    // Sync before renaming, so that the name never precedes the content.
    let synced = completed.and_then(|()| file.sync_all().map_err(io));
    // Some systems cannot rename or remove an open file.
    drop(file);
    if synced.is_err() && size == 0 {
        // An empty file is useless for a later attempt; failing to remove it is harmless.
        let _ = fs::remove_file(&path);
    }
    synced?;
    crate::cache::may_die();
    fs::rename(&path, blob).map_err(io)?;
    crate::cache::may_die();
    Ok(())
}

/// Requests until the file is complete with the right digest.
fn complete(
    client: &HubClient,
    wanted: &FileDownload<'_>,
    part: &mut PartialFile,
    patience: &mut Patience<'_>,
    on_size: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    // A partial file may be wrong, so a mismatch is an error only for a full download.
    let mut is_inherited = part.size > 0;
    loop {
        on_size(part.size);
        let before = part.size;
        match receive(client, wanted, part, on_size) {
            Ok(()) => {}
            Err(Error::Hub(error)) if error.is_passing() => {
                patience.wait(error, part.size.saturating_sub(before))?;
                continue;
            }
            Err(Error::Hub(HubError::Status { status: 416, .. })) if part.size > 0 => {
                part.clear(wanted)?;
                continue;
            }
            Err(error) => return Err(error),
        }
        let found = part.sum.clone().finish();
        if found == *wanted.digest {
            return Ok(());
        }
        part.clear(wanted)?;
        if !is_inherited {
            let (url, expected) = (wanted.url.clone(), wanted.digest.to_string());
            return Err(HubError::Digest { url, expected, found: found.to_string() }.into());
        }
        is_inherited = false;
    }
}

/// Requests and appends the missing bytes.
fn receive(
    client: &HubClient,
    wanted: &FileDownload<'_>,
    part: &mut PartialFile,
    on_size: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    if part.size == wanted.size {
        return Ok(());
    }
    let url = &wanted.url;
    let FileResponse { body, range_start, said } = client.file(url, part.size)?;
    if let Some(found) = said.size.filter(|size| *size != wanted.size) {
        return Err(HubError::Size { url: url.clone(), expected: wanted.size, found }.into());
    }
    if let Some(found) = said.digest.filter(|digest| digest.contradicts(wanted.digest)) {
        let (field, expected) = ("x-linked-etag".into(), wanted.digest.to_string());
        return Err(HubError::Answer { url: url.clone(), field, expected, found: found.to_string() }.into());
    }
    match range_start {
        Some(start) if start != part.size => {
            let (field, expected) = ("the start in content-range".into(), part.size.to_string());
            return Err(HubError::Answer { url: url.clone(), field, expected, found: start.to_string() }.into());
        }
        Some(_) => {}
        None if part.size > 0 => part.clear(wanted)?,
        None => {}
    }
    if let Some(coming) = body.content_length()
        && coming != wanted.size - part.size
    {
        let found = part.size.saturating_add(coming);
        return Err(HubError::Size { url: url.clone(), expected: wanted.size, found }.into());
    }
    let (mut reader, mut buffer) = (body.into_reader(), vec![0; BUFFER_BYTES]);
    while part.size < wanted.size {
        let broken = |message: String| HubError::Connection { url: url.clone(), message };
        let n = match reader.read(&mut buffer) {
            Ok(0) => {
                let message = format!("the response ends after {} of {} bytes", part.size, wanted.size);
                return Err(broken(message).into());
            }
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(broken(error.to_string()).into()),
        };
        let bytes = buffer.get(..n).unwrap_or_default();
        if part.size + n as u64 > wanted.size {
            let found = part.size + n as u64;
            part.clear(wanted)?;
            return Err(HubError::Size { url: url.clone(), expected: wanted.size, found }.into());
        }
        part.add(bytes, wanted)?;
        on_size(part.size);
    }
    Ok(())
}
