//! Files of the test data.

use std::path::{Path, PathBuf};
use tilewright::formats::Safetensors;

pub fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = path.as_ref();
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files under `folder` with this extension, sorted.
pub fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let (mut found, mut folders) = (vec![], vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A safetensors file with access to tensors by name.
pub struct Reference {
    bytes: Vec<u8>,
    file: Safetensors,
}

impl Reference {
    pub fn open(path: impl AsRef<Path>) -> Self {
        let bytes = read(path);
        let file = Safetensors::parse(&bytes, bytes.len() as u64).unwrap();
        Self { bytes, file }
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        self.file.tensor(name).unwrap_or_else(|| panic!("no tensor {name}")).bytes(&self.bytes).unwrap()
    }

    pub fn f32s(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}
