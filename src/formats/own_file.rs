//! Files of this project's own kinds: safetensors that say under `__metadata__` what they are, `format` "tilewright KIND" and
//! a `version`.

use super::{BlockType, Error, Safetensors, TensorInfo};

/// The header of a file of one of our kinds.
pub(crate) struct OwnFile {
    /// What errors call it: KIND.
    format: &'static str,
    pub header: Safetensors,
}

impl OwnFile {
    /// What `format` says in a file of a kind.
    pub fn label(format: &str) -> String {
        format!("tilewright {format}")
    }

    /// A header, which has to be of this kind and version.
    ///
    /// # Errors
    /// [`Error::Format`] for another kind, [`Error::Unsupported`] for another version.
    pub fn of(header: Safetensors, format: &'static str, version: &str) -> Result<OwnFile, Error> {
        let file = OwnFile { format, header };
        file.expect("format", &OwnFile::label(format))?;
        let found = file.text("version")?;
        if found != version {
            let (found, supported) = (shown(found), format!("version {version} is"));
            return Err(Error::Unsupported { format, field: "version".into(), found, supported });
        }
        Ok(file)
    }

    /// The text of a key that has to be there.
    pub fn text(&self, key: &str) -> Result<&str, Error> {
        self.header.text(key).ok_or_else(|| self.missing(key, "a text in __metadata__"))
    }

    /// Refuses another text than this one.
    pub fn expect(&self, key: &str, expected: &str) -> Result<(), Error> {
        let found = self.text(key)?;
        if found == expected { Ok(()) } else { Err(self.wrong(key, shown(expected), shown(found))) }
    }

    /// A tensor that has to be there; `expected` says of another shape what it should have been.
    pub fn tensor(
        &self,
        name: &str,
        block_type: BlockType,
        expected: impl FnOnce(&[u64]) -> Option<String>,
    ) -> Result<&TensorInfo, Error> {
        let tensor = self.header.tensor(name).ok_or_else(|| self.missing(name, "a tensor"))?;
        let is_other = tensor.block_type != block_type;
        if let Some(shape) = expected(&tensor.shape).or_else(|| is_other.then(|| format!("{:?}", tensor.shape))) {
            let found = format!("{} {:?}", tensor.block_type, tensor.shape);
            return Err(self.broken(name, tensor.offset, format!("{block_type} {shape}"), found));
        }
        Ok(tensor)
    }

    fn missing(&self, field: &str, expected: &str) -> Error {
        self.wrong(field, expected, "missing")
    }

    /// What is wrong in the header.
    pub fn wrong(&self, field: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Error {
        /// Where a safetensors header begins.
        const HEADER_OFFSET: u64 = 8;
        self.broken(field, HEADER_OFFSET, expected, found)
    }

    /// What is wrong at a byte.
    pub fn broken(
        &self,
        field: impl Into<String>,
        offset: u64,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        let (field, expected, found) = (field.into(), expected.into(), found.into());
        Error::Format { format: self.format, field, offset, expected, found }
    }
}

/// A text from a file, cut and escaped for a message.
pub(crate) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(40).collect();
    format!("`{}`", cut.escape_debug())
}
