//! File digests of Git and Git LFS.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::error::Error;

/// Expected digest of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Digest {
    /// SHA-256 of a Git LFS file, in lower-case hexadecimal.
    Sha256(String),
    /// SHA-1 of a Git blob.
    Git(String),
}

impl Digest {
    /// A SHA-256, if `text` is one.
    pub fn sha256(text: &str) -> Option<Digest> {
        is_hex(text, 64).then(|| Digest::Sha256(text.to_ascii_lowercase()))
    }

    /// A Git object's name, if `text` is one.
    pub fn git(text: &str) -> Option<Digest> {
        is_hex(text, 40).then(|| Digest::Git(text.to_ascii_lowercase()))
    }

    /// The digest in a header such as `ETag: "..."`, if any.
    pub fn of_etag(header: &str) -> Option<Digest> {
        let text = header.trim().trim_start_matches("W/").trim_matches('"');
        Digest::sha256(text).or_else(|| Digest::git(text))
    }

    /// The hexadecimal text, which also names the blob in the cache.
    pub fn as_str(&self) -> &str {
        match self {
            Digest::Sha256(text) | Digest::Git(text) => text,
        }
    }

    /// Whether two digests of the same kind differ. Digests of different kinds cannot be compared.
    pub fn contradicts(&self, other: &Digest) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other) && self != other
    }

    /// Starts hashing a file of `size` bytes.
    pub fn begin(&self, size: u64) -> Sum {
        match self {
            Digest::Sha256(_) => Sum::Sha256(Sha256::new()),
            Digest::Git(_) => Sum::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The running digest.
#[derive(Clone)]
pub(super) enum Sum {
    Sha256(Sha256),
    Git(Sha1),
}

impl Sum {
    pub fn add(&mut self, bytes: &[u8]) {
        match self {
            Sum::Sha256(sum) => sum.update(bytes),
            Sum::Git(sum) => sum.update(bytes),
        }
    }

    pub fn finish(self) -> Digest {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Sum::Sha256(sum) => Digest::Sha256(hex(&sum.finalize())),
            Sum::Git(sum) => Digest::Git(hex(&sum.finalize())),
        }
    }
}

/// The digest of a file, of the same kind as `of_kind`. `on_bytes` receives the bytes hashed so far.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read.
pub(super) fn of_file(path: &Path, of_kind: &Digest, on_bytes: &mut dyn FnMut(u64)) -> Result<Digest, Error> {
    const BUFFER_BYTES: usize = 1 << 20;
    let io = |source| Error::Io { path: path.into(), source };
    let mut file = File::open(path).map_err(io)?;
    let mut sum = of_kind.begin(file.metadata().map_err(io)?.len());
    let (mut buffer, mut n_read) = (vec![0; BUFFER_BYTES], 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(sum.finish()),
            Ok(n) => {
                sum.add(buffer.get(..n).unwrap_or_default());
                n_read += n as u64;
                on_bytes(n_read);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(io(error)),
        }
    }
}

/// Whether `text` is a hexadecimal number of `n_digits` digits.
pub(super) fn is_hex(text: &str, n_digits: usize) -> bool {
    text.len() == n_digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_match_git_and_git_lfs() {
        // `printf 'hello\n' | git hash-object --stdin` and `| sha256sum`.
        for digest in [
            Digest::git("ce013625030ba8dba906f756967f9e9ca394464a").unwrap(),
            Digest::sha256("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03").unwrap(),
        ] {
            let mut sum = digest.begin(6);
            sum.add(b"hel");
            sum.add(b"lo\n");
            assert_eq!(sum.finish(), digest);
            assert_eq!(Digest::of_etag(&format!("W/\"{digest}\"")), Some(digest));
        }
        assert_eq!(Digest::of_etag("\"5f2a-abc\""), None);
    }
}
