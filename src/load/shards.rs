//! Finds all files of a sharded model from one of them, by its name or its link target's.

use std::path::{Path, PathBuf};

use crate::error::Error;

/// A GGUF file's name without its extension in any case; the whole name if the extension differs.
pub(crate) fn stem(name: &str) -> &str {
    const END: &str = ".gguf";
    let at = name.len().saturating_sub(END.len());
    match name.split_at_checked(at) {
        Some((stem, end)) if !stem.is_empty() && end.eq_ignore_ascii_case(END) => stem,
        _ => name,
    }
}

/// Splits a stem that ends in `-00001-of-00003` into its prefix, the shard's number and the number of shards.
pub(crate) fn numbered(stem: &str) -> Option<(&str, [u32; 2])> {
    const DIGITS: usize = 5;
    const BETWEEN: &str = "-of-";
    let number = |digits: &str| match digits.bytes().all(|digit| digit.is_ascii_digit()) {
        true => digits.parse().ok(),
        false => None,
    };
    let (rest, count) = stem.split_at_checked(stem.len().checked_sub(DIGITS)?)?;
    let (rest, between) = rest.split_at_checked(rest.len().checked_sub(BETWEEN.len())?)?;
    let (rest, no) = rest.split_at_checked(rest.len().checked_sub(DIGITS)?)?;
    let rest = rest.strip_suffix('-')?;
    between.eq_ignore_ascii_case(BETWEEN).then_some((rest, [number(no)?, number(count)?]))
}

/// A path and its chain of link targets.
pub(super) fn links(path: &Path) -> impl Iterator<Item = PathBuf> {
    /// About the limit of operating systems.
    const MOST: usize = 40;
    let next = |path: &PathBuf| {
        let target = std::fs::read_link(path).ok()?;
        // Relative targets are relative to the link's folder.
        Some(path.parent().map_or_else(|| target.clone(), |folder| folder.join(&target)))
    };
    std::iter::successors(Some(path.to_path_buf()), next).take(MOST)
}

/// The paths of all `n` shards, given one of them: in its folder, or in its link target's if its own name has no
/// number. In a hub's cache links have names and their targets digests.
///
/// # Errors
/// [`Error::Config`] if no name has a shard number; [`Error::Io`] naming the first missing shard.
pub(super) fn paths(path: &Path, n: usize) -> Result<Vec<PathBuf>, Error> {
    let mut missing = None;
    for path in links(path) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let stem = stem(&name);
        let is_one = |no: u32, count: u32| count as usize == n && (1..=n).contains(&(no as usize));
        let Some((rest, _)) = numbered(stem).filter(|&(_, [no, count])| is_one(no, count)) else { continue };
        let (rest, end) = (rest.to_owned(), &name[stem.len()..]);
        let found: Result<Vec<PathBuf>, PathBuf> =
            (1..=n).map(|no| beside(&path, &format!("{rest}-{no:05}-of-{n:05}{end}"))).collect();
        match found {
            Ok(found) => return Ok(found),
            Err(first) => missing = missing.or(Some(first)),
        }
    }
    Err(match missing {
        Some(path) => Error::Io { path, source: std::io::ErrorKind::NotFound.into() },
        None => Error::Config {
            field: "split.count".into(),
            expected: format!("a name ending in `-00001-of-{n:05}.gguf`, with a number up to {n}"),
            found: format!("`{}`", path.file_name().unwrap_or_default().to_string_lossy()),
        },
    })
}

/// The file of this name in the folder of `path`, ignoring case if no exact match exists.
///
/// # Errors
/// The expected path.
fn beside(path: &Path, name: &str) -> Result<PathBuf, PathBuf> {
    let expected = path.with_file_name(name);
    if expected.exists() {
        return Ok(expected);
    }
    let folder = expected.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_it = |entry: &std::fs::DirEntry| {
        entry.file_name().to_str().is_some_and(|other| other.eq_ignore_ascii_case(name)) && entry.path().exists()
    };
    entries.find(is_it).map(|entry| entry.path()).ok_or(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_number_is_read_from_the_file_name() {
        for (name, want) in [
            ("m-00001-of-00003.gguf", Some(("m", [1, 3]))),
            ("M-00012-OF-00120.GGUF", Some(("M", [12, 120]))),
            ("sub/ü-q4-00002-of-00002.Gguf", Some(("sub/ü-q4", [2, 2]))),
            ("m-0001-of-0003.gguf", None),
            ("m-0000a-of-00003.gguf", None),
            ("m+00001-of-00003.gguf", None),
            ("m.gguf", None),
            ("üüüüüü", None),
            ("", None),
        ] {
            assert_eq!(numbered(stem(name)), want, "{name}");
        }
        assert_eq!([stem("a.GGUF"), stem(".gguf"), stem("a.bin"), stem("ü")], ["a", ".gguf", "a.bin", "ü"]);
    }
}
