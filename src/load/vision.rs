//! Vision encoders: those of a Hugging Face folder, and GGUF files that llama.cpp's users call `mmproj`.
//!
//! Tensors get one set of names: those of GGUF text models in the blocks, `patch_embd`, `position_embd`, `output_norm`,
//! `mm.0` and `mm.2` for the projector, and `deepstack.N` for those of further layers.

mod clip;
mod qwen;
mod siglip;

use std::path::{Path, PathBuf};

use serde_json::Value;

pub use clip::ImageEncoderFile;

use super::huggingface::{self, CONFIG, FolderTexts};
use super::keys::{Key, KeySource, Keys};
use super::refused::{parse_gguf, parse_safetensors};
use super::tensor_index::{FileLayout, TensorIndex, check_type, floats};
use super::{FileBytes, is_of_folder, shards};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::Gguf;
use crate::kernels::{Gelu, RopeConfig, RopeScaling, RopeStyle};
use crate::model::{Attention, Between, Block, FeedForward, MAX_LAYERS, ModelConfig, NormKind, VisionConfig};
use crate::picture::positions::Interpolation;
use crate::picture::rope::Axes;
use crate::picture::{Family, Preprocess};

/// The preprocessor's settings in a folder, alone or with those of other inputs.
pub(crate) const PREPROCESSORS: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];
/// `general.architecture` of vision encoders in GGUF files.
pub(super) const CLIP: &str = "clip";
/// The encoder's part of `config.json`.
const VISION_CONFIG: &str = "vision_config";
const POSITIONS: &str = "position_embd.weight";
const HEADS: Key = Key("attention.head_count", "num_heads|num_attention_heads");
const LAYERS: Key = Key("block_count", "depth|num_hidden_layers");

/// How one family's files name and describe its vision encoder.
struct VisionFamily {
    /// How its pictures are prepared.
    family: Family,
    /// Prefixes of its tensors in a folder.
    prefixes: &'static [&'static str],
    /// Prefix of its layers' numbers, after those.
    layers: &'static str,
    /// Names in a folder with ours, and those of its own in GGUF files; those in layers start after the layer's number.
    names: &'static [(&'static str, &'static str)],
    /// The encoder that the keys describe.
    describe: fn(&Keys<'_>) -> Result<(VisionConfig, PatchPlaces), Error>,
}

static FAMILIES: [VisionFamily; 3] = [qwen::QWEN3_VL, siglip::LFM2_VL, siglip::SMOLVLM];

/// Names in GGUF files with ours; those in layers start after the layer's number.
const GGUF_NAMES: [(&str, &str); 7] = [
    ("input_norm", "norm"),
    ("ln1", "attn_norm"),
    ("ln2", "ffn_norm"),
    ("attn_out", "attn_output"),
    ("post_ln", "output_norm"),
    ("fc1", "0"),
    ("fc2", "2"),
];

/// Keys of a projector beside the encoder's.
const PROJECTOR_KEYS: [&str; 6] = [
    "downsample_factor",
    "scale_factor",
    "projector_bias",
    "projector_hidden_act",
    "projector_hidden_size",
    "projector_use_layernorm",
];

/// Names of a deepstack layer's tensors in a folder with ours.
const DEEPSTACK_NAMES: [(&str, &str); 2] = [("linear_fc1", "0"), ("linear_fc2", "2")];

/// How an encoder knows the row and the column of a patch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PatchPlaces {
    /// How learned positions fit another grid.
    pub interpolation: Option<Interpolation>,
    /// By rotation: which axis comes first, and the base of the frequencies.
    pub rope: Option<(Axes, f64)>,
}

/// A vision encoder's file or files, complete: mapped or in memory.
pub struct VisionFile {
    /// The encoder's shape.
    pub config: VisionConfig,
    /// How pictures are resized and cut into patches.
    pub(crate) preprocess: Preprocess,
    pub(crate) places: PatchPlaces,
    /// Learned positions, `[N, C]`; empty without.
    pub(crate) positions: Vec<f32>,
    pub(crate) tensor_index: TensorIndex,
    pub(crate) files: Vec<FileBytes>,
}

impl VisionFile {
    /// Opens the vision encoder of a Hugging Face folder, or a GGUF file of one (`mmproj`).
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Unsupported`] for a model without a supported
    /// vision encoder, [`Error::Io`] if it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<VisionFile, Error> {
        let path = path.as_ref();
        if is_of_folder(path) {
            return VisionFile::of_folder(path);
        }
        let open = || {
            let file = FileBytes::map(path)?;
            VisionFile::of_gguf(&parse_gguf(&file)?, file)
        };
        open().map_err(|e| e.in_file(path))
    }

    /// The vision encoder that belongs to a model: its folder, if that has one, or the only GGUF file beside it whose
    /// name has `mmproj` in it.
    ///
    /// # Errors
    /// [`Error::Config`] if there are several or `config.json` is invalid, [`Error::Io`] if the folder cannot be read.
    pub fn beside(model: impl AsRef<Path>) -> Result<Option<PathBuf>, Error> {
        let model = model.as_ref();
        if is_of_folder(model) {
            let path = folder_of(model).join(CONFIG);
            let json = ConfigJson::parse(&huggingface::read(&path)?).map_err(|e| e.in_file(&path))?;
            let has_vision = json.get(VISION_CONFIG).map_err(|e| e.in_file(&path))?.is_some();
            return Ok(has_vision.then(|| model.to_path_buf()));
        }
        for path in shards::links(model) {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let mut found = mmproj_files(folder)?;
            if found.len() > 1 {
                let names = found.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>().join(", ");
                let expected = "one `mmproj-*.gguf` beside the model, or --mmproj FILE".into();
                return Err(Error::Config { field: "mmproj".into(), expected, found: names }.in_file(model));
            }
            if let Some(path) = found.pop() {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// Bytes of the weights.
    pub fn size_bytes(&self) -> u64 {
        self.tensor_index.tensors().map(|tensor| tensor.size_bytes).sum()
    }

    fn of_folder(path: &Path) -> Result<VisionFile, Error> {
        let folder = folder_of(path);
        let read = |name: &str| {
            let path = folder.join(name);
            if path.exists() { huggingface::read(&path).map(Some) } else { Ok(None) }
        };
        let in_file = |name: &'static str| move |error: Error| error.in_file(folder.join(name));
        let mut texts = FolderTexts::default();
        for name in [CONFIG, huggingface::INDEX] {
            if let Some(slot) = texts.slot(name) {
                *slot = read(name)?;
            }
        }
        let bytes = texts.config.as_ref().ok_or_else(|| huggingface::missing(CONFIG).in_file(folder))?;
        let json = ConfigJson::parse(bytes).map_err(in_file(CONFIG))?;
        let whole = json.clone().into_value();
        let [usual, other] = PREPROCESSORS;
        let parsed = |name: &'static str| -> Result<_, Error> {
            let Some(bytes) = read(name)? else { return Ok(None) };
            Ok(Some((ConfigJson::parse(&bytes).map_err(in_file(name))?.into_value(), name)))
        };
        let preprocessor = match parsed(usual)? {
            None => parsed(other)?,
            found => found,
        };
        let model_type = json.get_str("model_type").map_err(in_file(CONFIG))?.unwrap_or("missing").to_owned();
        let family = Family::of_json(preprocessor.as_ref().map_or(&Value::Null, |(json, _)| json), &whole);
        let names = || encoders_of(FAMILIES.iter().flat_map(|known| known.family.model_types()).copied());
        let refused = || unsupported("config.json", "model_type", &model_type, names()).in_file(folder);
        let family = VisionFamily::of(family).ok_or_else(refused)?;
        let row_dim = json.get_u32("text_config.hidden_size").map_err(in_file(CONFIG))?;
        let json = json.required_part(VISION_CONFIG, &PROJECTOR_KEYS).map_err(in_file(CONFIG))?;
        let json = json.or_value("text_hidden_size", row_dim.map(Into::into));
        let keys = Keys::new(KeySource::Json(&json), &model_type, false);
        let (config, places) = (family.describe)(&keys).and_then(checked).map_err(in_file(CONFIG))?;
        keys.check_read().map_err(in_file(CONFIG))?;
        let (preprocessor, name) = preprocessor.ok_or_else(|| huggingface::missing(usual).in_file(folder))?;
        let preprocess = Preprocess::from_json(family.family, &preprocessor, &whole).map_err(in_file(name))?;
        let (mut tensor_index, mut files) = (TensorIndex::default(), Vec::new());
        for (i, name) in huggingface::weight_files(&texts, None)?.iter().enumerate() {
            let path = folder.join(name);
            let file = FileBytes::map(&path)?;
            for tensor in &parse_safetensors(&file).map_err(|e| e.in_file(&path))?.tensors {
                if let Some(name) = family.name(&tensor.name, &config) {
                    check_type("safetensors", tensor).map_err(|e| e.in_file(&path))?;
                    let stored = match tensor.shape.len() {
                        5 => FileLayout::SummedFrames,
                        _ => FileLayout::AsRead,
                    };
                    tensor_index.insert(name, i, tensor.clone(), stored);
                }
            }
            files.push(file);
        }
        VisionFile::of_tensors((config, places), preprocess, tensor_index, files).map_err(|e| e.in_file(folder))
    }

    fn of_gguf(gguf: &Gguf, file: FileBytes) -> Result<VisionFile, Error> {
        let metadata = &gguf.metadata;
        let found = metadata.get_str("general.architecture")?.unwrap_or("missing");
        if found != CLIP {
            let supported = "clip, a vision encoder (mmproj)".into();
            return Err(unsupported("gguf", "general.architecture", found, supported));
        }
        let projector = match metadata.get_str("clip.projector_type")? {
            Some(projector) => Some(projector),
            None => metadata.get_str("clip.vision.projector_type")?,
        };
        let projector = projector.unwrap_or("missing");
        let names = || encoders_of(FAMILIES.iter().map(|known| known.family.projector()));
        let family = VisionFamily::of(Family::of_projector(projector))
            .ok_or_else(|| unsupported("gguf", "clip.projector_type", projector, names()))?;
        let mut tensor_index = TensorIndex::default();
        for tensor in &gguf.tensors {
            check_type("gguf", tensor)?;
            tensor_index.insert(family.gguf_name(&tensor.name), 0, tensor.clone(), FileLayout::AsRead);
        }
        let data = Vec::new();
        let keys = Keys::new(KeySource::Gguf(metadata, &tensor_index, &data), "clip.vision", false);
        let (config, places) = checked((family.describe)(&keys)?)?;
        let found = |name: &str| {
            let key = format!("clip.vision.{name}");
            let number = |value: f32| Value::from(f64::from(value));
            match (metadata.get_u32(&key), metadata.get_f32(&key), metadata.get_f32_array(&key)) {
                (Ok(Some(value)), ..) => Some(value.into()),
                (_, Ok(Some(value)), _) => Some(number(value)),
                (.., Ok(Some(values))) => Some(values.into_iter().map(number).collect()),
                _ => None,
            }
        };
        let preprocess = Preprocess::from_gguf(family.family, &found)?;
        VisionFile::of_tensors((config, places), preprocess, tensor_index, vec![file])
    }

    fn of_tensors(
        (config, places): (VisionConfig, PatchPlaces),
        preprocess: Preprocess,
        mut tensor_index: TensorIndex,
        files: Vec<FileBytes>,
    ) -> Result<VisionFile, Error> {
        let positions = match tensor_index.remove(POSITIONS) {
            Some((file, tensor)) if config.has_positions => positions(&config, &tensor, &files[file])?,
            None if config.has_positions => return Err(huggingface::missing(POSITIONS)),
            _ => Vec::new(),
        };
        Ok(VisionFile { config, preprocess, places, positions, tensor_index, files })
    }
}

fn folder_of(path: &Path) -> &Path {
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}

/// Whether a file's name is that of a vision encoder in GGUF: it has `mmproj` in it.
pub(crate) fn is_mmproj(name: &str) -> bool {
    let name = name.to_lowercase();
    name.contains("mmproj") && name.ends_with(".gguf")
}

/// GGUF files of vision encoders in a folder, by name.
fn mmproj_files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let io = |source| Error::Io { path: folder.into(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if is_mmproj(&path.file_name().unwrap_or_default().to_string_lossy()) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The learned positions, which the host interpolates.
fn positions(config: &VisionConfig, tensor: &TensorInfo, file: &FileBytes) -> Result<Vec<f32>, Error> {
    match tensor.shape[..] {
        [rows, cols] if cols == u64::from(config.encoder.dim) && rows <= 1 << 20 => floats(tensor, tensor.bytes(file)?),
        _ => Err(Error::Config {
            field: tensor.name.escape_debug().to_string(),
            expected: format!("a tensor of shape [positions, {}]", config.encoder.dim),
            found: format!("one of shape {:?}", tensor.shape),
        }),
    }
}

fn checked((config, places): (VisionConfig, PatchPlaces)) -> Result<(VisionConfig, PatchPlaces), Error> {
    config.check().map(|()| (config, places))
}

impl VisionFamily {
    fn of(family: Option<Family>) -> Option<&'static VisionFamily> {
        FAMILIES.iter().find(|known| Some(known.family) == family)
    }

    /// Our name of a folder's tensor; `None` for one of another part.
    fn name(&self, name: &str, config: &VisionConfig) -> Option<String> {
        let rest = self.prefixes.iter().find_map(|prefix| name.strip_prefix(prefix))?;
        let (stem, suffix) = rest.rsplit_once('.')?;
        let of_layer = |list: &str| stem.strip_prefix(list)?.split_once('.');
        if let Some((layer, part)) = of_layer(self.layers) {
            return Some(format!("blk.{layer}.{}.{suffix}", renamed(self.names, part)));
        }
        // Named by their place in the list.
        if let Some((i, part)) = of_layer("deepstack_merger_list.") {
            let layer = i.parse::<usize>().ok().and_then(|i| config.deepstack.get(i).copied()).unwrap_or(u32::MAX);
            return Some(format!("deepstack.{layer}.{}.{suffix}", renamed(&DEEPSTACK_NAMES, part)));
        }
        Some(format!("{}.{suffix}", renamed(self.names, stem)))
    }

    /// Our name of a GGUF file's tensor.
    fn gguf_name(&self, name: &str) -> String {
        // The second frame's patches.
        if name == "v.patch_embd.weight.1" {
            return "patch_embd.1.weight".into();
        }
        let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, "weight"));
        if let Some((_, ours)) = self.names.iter().find(|(theirs, _)| *theirs == stem) {
            return format!("{ours}.{suffix}");
        }
        let stem = stem.strip_prefix("v.").unwrap_or(stem);
        let parts: Vec<&str> = stem.split('.').map(|part| renamed(&GGUF_NAMES, part)).collect();
        format!("{}.{suffix}", parts.join("."))
    }
}

fn renamed<'a>(names: &[(&str, &'a str)], name: &'a str) -> &'a str {
    names.iter().find(|(theirs, _)| *theirs == name).map_or(name, |(_, ours)| ours)
}

/// A size of 1 to `max`.
fn size(keys: &Keys<'_>, key: Key, usual: Option<u32>, max: u32) -> Result<u32, Error> {
    match keys.u32(key)?.or(usual) {
        Some(value) if (1..=max).contains(&value) => Ok(value),
        Some(value) => Err(keys.wrong(key, format!("1 to {max}"), value)),
        None => Err(keys.missing(key)),
    }
}

/// Sizes of a vision encoder's blocks.
struct Tower {
    dim: u32,
    n_layers: u32,
    n_heads: u32,
    ffn_dim: u32,
    gelu: Gelu,
    eps: f32,
}

impl Tower {
    /// Reads the sizes. `eps`: of norms, by default.
    fn read(keys: &Keys<'_>, eps: f32) -> Result<Tower, Error> {
        let act = Key("", "hidden_act");
        let gelu = match keys.str(act)? {
            None | Some("gelu_pytorch_tanh") => Gelu::Tanh,
            Some("gelu") => Gelu::Exact,
            Some("quick_gelu") => Gelu::Quick,
            Some(other) => return Err(keys.unsupported(act, other, "gelu, gelu_pytorch_tanh, quick_gelu")),
        };
        keys.says(Key("use_gelu", ""));
        Ok(Tower {
            dim: keys.required(Key("embedding_length", "hidden_size"))?,
            n_layers: keys.required(LAYERS)?,
            n_heads: keys.required(HEADS)?,
            ffn_dim: keys.required(Key("feed_forward_length", "intermediate_size"))?,
            gelu,
            eps: keys.f32(Key("attention.layer_norm_epsilon", "layer_norm_eps"))?.unwrap_or(eps),
        })
    }

    /// Blocks with layer norms before each half and attention in all directions. `rope`: the base of the rotation by row
    /// and column, whose table the host writes, if there is one.
    fn config(&self, keys: &Keys<'_>, (architecture, rope): (&str, Option<f64>)) -> Result<ModelConfig, Error> {
        let Tower { dim, n_layers, n_heads, ffn_dim, gelu, eps } = *self;
        if n_heads == 0 || !dim.is_multiple_of(n_heads) {
            return Err(keys.wrong(HEADS, format!("a divisor of the width {dim}"), n_heads));
        }
        if !(1..=MAX_LAYERS).contains(&n_layers) {
            return Err(keys.wrong(LAYERS, format!("1 to {MAX_LAYERS}"), n_layers));
        }
        let head_dim = dim / n_heads;
        let attention = Attention { rope: rope.map(|_| 0), ..Attention::plain(n_heads, head_dim) };
        let feed_forward = FeedForward { dim: ffn_dim, between: Between::Gelu(gelu), experts: None };
        let block = Block::plain(attention, feed_forward);
        let rope = rope.map(|theta| RopeConfig {
            rot_dims: head_dim,
            theta,
            style: RopeStyle::Halves,
            scaling: RopeScaling::None,
            query_growth: None,
        });
        Ok(ModelConfig {
            architecture: architecture.into(),
            dim,
            vocab_size: 0,
            max_seq_len: 0,
            blocks: vec![block; n_layers as usize],
            n_mtp: 0,
            norm: NormKind::Layer { bias: true },
            norm_eps: eps,
            ropes: rope.into_iter().collect(),
            mrope: None,
            positions: None,
            position_biases: None,
            n_token_types: 0,
            per_layer: None,
            embd_norm: false,
            output_norm: true,
            embd_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap: None,
            causal: false,
            has_head: false,
        })
    }
}

fn unsupported(format: &'static str, field: &str, found: &str, supported: String) -> Error {
    Error::Unsupported { format, field: field.into(), found: format!("`{}`", found.escape_debug()), supported }
}

/// The supported families, by these names.
fn encoders_of(names: impl Iterator<Item = &'static str>) -> String {
    format!("vision encoders of {}", names.collect::<Vec<_>>().join(", "))
}
