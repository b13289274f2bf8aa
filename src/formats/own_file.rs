//! This project's own file types: safetensors with `format` "tilewright KIND" and a `version` in `__metadata__`.

use super::{BlockType, Error, Safetensors, TensorInfo};

/// The header of such a file.
pub(crate) struct OwnFile {
    /// KIND, also used in errors.
    format: &'static str,
    pub header: Safetensors,
}

impl OwnFile {
    /// The value of `format` for a file type.
    pub fn label(format: &str) -> String {
        format!("tilewright {format}")
    }

    /// Checks a header's file type and version.
    ///
    /// # Errors
    /// [`Error::Format`] for another file type, [`Error::Unsupported`] for another version.
    pub fn of(header: Safetensors, format: &'static str, version: &str) -> Result<OwnFile, Error> {
        let file = OwnFile { format, header };
        file.expect("format", &OwnFile::label(format))?;
        let found = file.text("version")?;
        if found != version {
            let (found, supported) = (shown(found), format!("version {version}"));
            return Err(Error::Unsupported { format, field: "version".into(), found, supported });
        }
        Ok(file)
    }

    /// The value of a required key.
    pub fn text(&self, key: &str) -> Result<&str, Error> {
        self.header.text(key).ok_or_else(|| self.missing(key, "a text in __metadata__"))
    }

    /// Checks that a key has the value `expected`.
    pub fn expect(&self, key: &str, expected: &str) -> Result<(), Error> {
        let found = self.text(key)?;
        if found == expected { Ok(()) } else { Err(self.wrong(key, shown(expected), shown(found))) }
    }

    /// A required tensor; `expected` returns the expected shape if a shape is wrong.
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

    /// An error in the header.
    pub fn wrong(&self, field: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Error {
        /// Start of a safetensors header.
        const HEADER_OFFSET: u64 = 8;
        self.broken(field, HEADER_OFFSET, expected, found)
    }

    /// An error at an offset.
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

/// A file's text, cut and escaped for a message.
pub(crate) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(40).collect();
    format!("`{}`", cut.escape_debug())
}
