//! Mutable copies of published folders of the test data.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;
use tilewright::formats::safetensors::Safetensors;
use tilewright::kernels::KvType;
use tilewright::{Device, LoadOptions, Model};

use super::builder::{json_entry, text};
use super::common::{self, References, block_on, largest_difference};
use super::{Folder, load};

/// A tensor of a checkpoint.
#[derive(Clone)]
pub struct Stored {
    pub dtype: String,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

/// A folder's contents: its configuration and its tensors.
#[derive(Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, Stored>,
}

/// The tiny random model of this name; `None` with a skip message if it is missing.
pub fn checkpoint(name: &str) -> Option<Checkpoint> {
    let folder = common::data(&["tiny-random"])?.join("tiny-random").join(name);
    let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let header = Safetensors::parse(&bytes, bytes.len() as u64).unwrap();
    let stored = |tensor: &tilewright::formats::TensorInfo| Stored {
        dtype: tensor.block_type.to_string(),
        shape: tensor.shape.clone(),
        data: tensor.bytes(&bytes).unwrap().to_vec(),
    };
    let tensors = header.tensors.iter().map(|tensor| (tensor.name.clone(), stored(tensor))).collect();
    Some(Checkpoint { config, tensors })
}

impl Checkpoint {
    pub fn write(&self) -> Folder {
        let folder = Folder::new();
        folder.write("config.json", self.config.to_string());
        folder.write("model.safetensors", self.safetensors());
        folder
    }

    fn safetensors(&self) -> Vec<u8> {
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        for (name, tensor) in &self.tensors {
            let begin = data.len();
            data.extend(&tensor.data);
            entries.push(json_entry(name, &tensor.dtype, &format!("{:?}", tensor.shape), begin, data.len()));
        }
        [text(format!("{{{}}}", entries.join(","))), data].concat()
    }

    /// Converts the BF16 tensors whose names contain one of these to F32.
    pub fn widen(&mut self, parts: &[&str]) -> usize {
        let mut n = 0;
        for (name, tensor) in &mut self.tensors {
            if tensor.dtype == "BF16" && parts.iter().any(|part| name.contains(part)) {
                tensor.data = tensor.data.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
                tensor.dtype = "F32".into();
                n += 1;
            }
        }
        n
    }

    /// Renames all tensors; drops those with an empty new name.
    pub fn rename(&mut self, to: impl Fn(&str) -> String) {
        self.tensors =
            std::mem::take(&mut self.tensors).into_iter().map(|(name, stored)| (to(&name), stored)).collect();
    }
}

/// Compares logits of all positions of the references' four texts.
pub fn check_references(name: &str, device: &Device, path: &Path, what: &str) {
    // Float64 references where F32 is ambiguous.
    let found = ["refs_f64.safetensors", "refs.safetensors"]
        .into_iter()
        .find_map(|file| common::find_data(&Path::new("tiny-random").join(name).join(file)));
    let references = References::open(&found.unwrap());
    let model = load(device, path).unwrap_or_else(|e| panic!("{what}: {e}"));
    check_model(&references, &model, what);
}

fn check_model(references: &References, model: &Model, what: &str) {
    let mut worst = 0.0f32;
    for i in 0..4 {
        let trace = block_on(model.trace(&references.ids(&format!("{i}.ids")))).unwrap();
        worst = worst.max(largest_difference(&trace.logits, &references.floats(&format!("{i}.logits"))));
    }
    println!("{what}: logits within {worst:.1e}");
    assert!(worst <= 2e-4, "{what}: logits differ by {worst}");
}

/// A model of a folder with the default options.
pub fn model(device: &Device, folder: &Folder) -> Model {
    // References use exact keys and values.
    Model::load(device, &folder.0, LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() })
        .unwrap_or_else(|e| panic!("{e}"))
}
