//! Model addresses: `hf:owner/repo[/path][:quantisation][@revision]`.

use std::fmt;
use std::str::FromStr;

use crate::error::HubError;

const SCHEME: &str = "hf:";

/// Address of a model in a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Repository: `owner/repo`.
    pub repo: String,
    /// File or folder in it; the whole repository if `None`.
    pub path: Option<String>,
    /// Quantisation of a GGUF file, such as `Q4_K_M`, case-insensitive; the best common one if `None`.
    pub quant: Option<String>,
    /// Branch, tag or commit; `main` if `None`.
    pub revision: Option<String>,
}

impl Address {
    /// Whether a string is an address: begins with `hf:`.
    pub fn is_meant_by(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// Branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl FromStr for Address {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Address, HubError> {
        let wrong = |found: &str| HubError::Address { text: text.into(), found: found.into() };
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| wrong("it does not begin with `hf:`"))?;
        let (rest, revision) = match rest.split_once('@') {
            Some((rest, revision)) => (rest, Some(revision)),
            None => (rest, None),
        };
        if revision.is_some_and(|revision| !is_plain_path(revision)) {
            return Err(wrong("the part after `@` is not a revision"));
        }
        let (rest, quant) = match rest.split_once(':') {
            Some((rest, quant)) => (rest, Some(quant)),
            None => (rest, None),
        };
        if quant.is_some_and(|quant| !is_name(quant)) {
            return Err(wrong("the part after `:` is not a quantisation"));
        }
        let mut parts = rest.splitn(3, '/');
        let (owner, name) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if name.is_empty() && is_name(owner) {
            return Err(wrong("it has no owner"));
        }
        if !is_name(owner) || !is_name(name) {
            return Err(wrong("owner and repository must consist of letters, digits and `-._`"));
        }
        // Shell completion may add a trailing slash.
        let path = parts.next().map(|path| path.trim_end_matches('/')).filter(|path| !path.is_empty());
        if path.is_some_and(|path| !is_plain_path(path)) {
            return Err(wrong("the path in the repository is not a plain relative path"));
        }
        let owned = |part: Option<&str>| part.map(str::to_owned);
        Ok(Address {
            repo: format!("{owner}/{name}"),
            path: owned(path),
            quant: owned(quant),
            revision: owned(revision),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.repo)?;
        let mut part = |before: char, part: &Option<String>| match part {
            Some(part) => write!(f, "{before}{part}"),
            None => Ok(()),
        };
        part('/', &self.path)?;
        part(':', &self.quant)?;
        part('@', &self.revision)
    }
}

/// Whether a name is a valid folder name on every system and cannot escape its folder.
fn is_name(name: &str) -> bool {
    let is_usual = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    // Cache names encode a slash as two dashes.
    !name.is_empty() && name.len() <= 96 && name.chars().all(is_usual) && !name.starts_with('.') && !name.contains("--")
}

/// Whether a path with `/` stays below its folder on every system.
pub(super) fn is_plain_path(path: &str) -> bool {
    let is_plain = |part: &str| {
        // Windows drops trailing dots and spaces, and gives special meaning to devices and streams.
        let is_usual = |c: char| !c.is_control() && !matches!(c, '\\' | ':' | '<' | '>' | '"' | '|' | '?' | '*');
        !part.is_empty() && part.chars().all(is_usual) && !part.ends_with(['.', ' '])
    };
    path.len() <= 1024 && path.split('/').all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_address_survives_a_round_trip() {
        let read = |text: &str| {
            let Address { repo, path, quant, revision } = text.parse().unwrap();
            (repo, path.unwrap_or_default(), quant.unwrap_or_default(), revision.unwrap_or_default())
        };
        let wanted = |repo: &str, path: &str, quant: &str, revision: &str| {
            (repo.to_owned(), path.to_owned(), quant.to_owned(), revision.to_owned())
        };
        for (text, want) in [
            ("hf:Qwen/Qwen3-0.6B-GGUF", wanted("Qwen/Qwen3-0.6B-GGUF", "", "", "")),
            ("hf:a/b:q8_0", wanted("a/b", "", "q8_0", "")),
            ("hf:a/b:UD-Q4_K_XL@v1.0", wanted("a/b", "", "UD-Q4_K_XL", "v1.0")),
            ("hf:a/b@refs/pr/3", wanted("a/b", "", "", "refs/pr/3")),
            ("hf:a/b/sub/c-Q4_0.gguf@0123abc", wanted("a/b", "sub/c-Q4_0.gguf", "", "0123abc")),
            ("hf:a/b/sub:F16", wanted("a/b", "sub", "F16", "")),
        ] {
            assert_eq!(read(text), want, "{text}");
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("hf:a/b/".parse::<Address>().unwrap().to_string(), "hf:a/b");
    }

    #[test]
    fn malformed_hub_address_is_refused() {
        for text in [
            "a/b",
            "hf:",
            "hf:a",
            "hf:a/",
            "hf:/b",
            "hf:../b",
            "hf:a/..",
            "hf:a/b/../c",
            "hf:a/b//c",
            "hf:a/b/c\\d",
            "hf:a/b:",
            "hf:a/b:Q4/1",
            "hf:a/b@",
            "hf:a/b@../main",
            "hf:a/b@x:y",
            "hf:a b/c",
            "hf:a--b/c",
            "hf:a/b/c:d:e",
        ] {
            assert!(matches!(text.parse::<Address>(), Err(HubError::Address { .. })), "{text}");
        }
    }
}
