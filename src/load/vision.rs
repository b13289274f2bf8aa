//! Vision encoders: those of a Hugging Face folder, and GGUF files that llama.cpp's users call `mmproj`.
//!
//! Tensors get one set of names: those of GGUF text models in the blocks, `patch_embd`, `patch_norm.1` and `patch_norm.2`
//! around it, `position_embd`, `output_norm`, `mm.norm`, `mm.0` and `mm.2` for the projector, and `deepstack.N` for those
//! of further layers.

mod clip;
mod gemma;
mod lfm3;
mod qwen;
mod siglip;

use std::path::{Path, PathBuf};

use serde_json::Value;

pub use clip::ImageEncoderFile;
pub(super) use clip::ImageHeader;
#[cfg(feature = "sound")]
pub(super) use gemma::GEMMA4_UNIFIED_SOUND;

use super::gguf::ConfigData;
use super::huggingface::{self, CONFIG, FolderTexts};
use super::keys::{Key, KeySource, Keys};
use super::refused::{parse_gguf, parse_safetensors};
use super::tensor_index::{FileLayout, TensorIndex, check_type, floats};
use super::{FileBytes, folder_of, is_of_folder, shards};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::{Gguf, Metadata};
use crate::formats::safetensors::Safetensors;
use crate::kernels::{Gelu, RopeConfig, RopeScaling, RopeStyle};
use crate::model::{Attention, Between, Block, FeedForward, Join, MAX_LAYERS, ModelConfig, NormKind, VisionConfig};
use crate::picture::positions::Interpolation;
use crate::picture::rope::Axes;
use crate::picture::{Family, Preprocess};

/// The preprocessor's settings in a folder, alone or with those of other inputs.
pub(crate) const PREPROCESSORS: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];
/// `general.architecture` of vision encoders in GGUF files.
pub(super) const CLIP: &str = "clip";
/// The encoder's part of `config.json`.
const VISION_CONFIG: &str = "vision_config";
/// Tensors that the host reads: learned positions, and biases and inverse deviations of means of patches.
const HOST_TENSORS: [&str; 3] = ["position_embd.weight", "std_bias.weight", "std_scale.weight"];
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
    /// How a file stores a tensor of our name.
    stored: fn(&str, &VisionConfig, FileKind) -> FileLayout,
    /// The encoder that the keys describe.
    describe: fn(&Keys<'_>) -> Result<(VisionConfig, PatchPlaces), Error>,
}

/// Which kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Folder,
    Gguf,
}

static FAMILIES: [VisionFamily; 7] = [
    qwen::QWEN3_VL,
    siglip::LFM2_VL,
    siglip::SMOLVLM,
    siglip::GEMMA3,
    gemma::GEMMA4,
    gemma::GEMMA4_UNIFIED,
    lfm3::LFM3_VL,
];

/// Names in GGUF files with ours; those in layers start after the layer's number.
const GGUF_NAMES: [(&str, &str); 10] = [
    ("input_norm", "norm"),
    ("soft_emb_norm", "norm"),
    ("ln1", "attn_norm"),
    ("ln2", "ffn_norm"),
    ("attn_out", "attn_output"),
    ("attn_post_norm", "post_attention_norm"),
    ("ffn_post_norm", "post_ffw_norm"),
    ("post_ln", "output_norm"),
    ("fc1", "0"),
    ("fc2", "2"),
];

/// Keys of a projector beside the encoder's.
const PROJECTOR_KEYS: [&str; 7] = [
    "downsample_factor",
    "mm_tokens_per_image",
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
    /// How learned positions fit a grid.
    pub learned: Option<Learned>,
    /// By rotation: which axis comes first, and the base of the frequencies.
    pub rope: Option<(Axes, f64)>,
}

/// Which of the learned positions a patch has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Learned {
    /// Those of its place in a square, resampled to the grid.
    Square(Interpolation),
    /// The sum of those of its column and its row, from a table each.
    Axes,
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
    /// Biases of means of patches, and their inverse deviations, `[C]`; empty unless means are standardised.
    pub(crate) standard: [Vec<f32>; 2],
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
            VisionHeader::of_gguf(&parse_gguf(&file)?)?.of_files(vec![file])
        };
        open().map_err(|e| e.in_file(path))
    }

    /// The vision encoder that belongs to a model: its folder, if that has one, or the only GGUF file beside it whose
    /// name has `mmproj` in it.
    ///
    /// # Errors
    /// [`Error::Config`] if there are several or `config.json` is invalid, [`Error::Io`] if the folder cannot be read.
    pub fn beside(model: impl AsRef<Path>) -> Result<Option<PathBuf>, Error> {
        part_beside(model.as_ref(), VISION_CONFIG)
    }

    /// Bytes of the weights.
    pub fn size_bytes(&self) -> u64 {
        self.tensor_index.tensors().map(|tensor| tensor.size_bytes).sum()
    }

    fn of_folder(path: &Path) -> Result<VisionFile, Error> {
        let folder = folder_of(path);
        let Folder { texts, weights, files } = Folder::open(folder)?;
        let header = VisionHeader::of_folder(&texts, weights.iter().map(|(name, header)| (name.as_str(), header)));
        header.and_then(|header| header.of_files(files)).map_err(|e| e.in_folder(folder))
    }
}

/// The files of a folder that an encoder of pictures or sounds is read from.
pub(super) struct Folder {
    texts: FolderTexts,
    /// Names and headers of the weight files.
    pub weights: Vec<(String, Safetensors)>,
    pub files: Vec<FileBytes>,
}

impl Folder {
    fn open(folder: &Path) -> Result<Folder, Error> {
        Folder::with_texts(folder, read_texts(folder)?)
    }

    /// A folder whose texts were read.
    pub fn with_texts(folder: &Path, texts: FolderTexts) -> Result<Folder, Error> {
        let (mut weights, mut files) = (Vec::new(), Vec::new());
        for name in huggingface::weight_files(&texts, None)? {
            let path = folder.join(&name);
            let file = FileBytes::map(&path)?;
            weights.push((name, parse_safetensors(&file).map_err(|e| e.in_file(&path))?));
            files.push(file);
        }
        Ok(Folder { texts, weights, files })
    }
}

/// The data of tensors in complete files.
fn data_in<'a>(
    files: &[FileBytes],
    tensors: impl Iterator<Item = &'a (usize, TensorInfo)>,
) -> Result<ConfigData, Error> {
    tensors.map(|(file, tensor)| Ok((tensor.name.clone(), tensor.bytes(&files[*file])?.to_vec()))).collect()
}

/// A vision encoder's properties from its files' headers: everything except the weights.
pub(super) struct VisionHeader {
    family: &'static VisionFamily,
    config: VisionConfig,
    places: PatchPlaces,
    preprocess: Preprocess,
    tensor_index: TensorIndex,
    /// Tensors of [`HOST_TENSORS`] that it has, with the numbers of their files.
    of_host: [Option<(usize, TensorInfo)>; 3],
}

impl VisionHeader {
    /// That of a folder with these weight files.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part.
    pub fn of_folder<'a>(
        texts: &FolderTexts,
        weights: impl Iterator<Item = (&'a str, &'a Safetensors)>,
    ) -> Result<VisionHeader, Error> {
        let mut header = VisionHeader::of_texts(texts)?;
        for (i, (name, tensors)) in weights.enumerate() {
            header.add(i, tensors).map_err(|e| e.in_file(name))?;
        }
        header.located()
    }

    /// That of a folder without its tensors.
    fn of_texts(texts: &FolderTexts) -> Result<VisionHeader, Error> {
        let in_file = |name: &'static str| move |error: Error| error.in_file(name);
        let bytes = texts.config.as_ref().ok_or_else(|| huggingface::missing(CONFIG))?;
        let json = ConfigJson::parse(bytes).map_err(in_file(CONFIG))?;
        let whole = json.clone().into_value();
        let preprocessor = texts.preprocessor_json()?;
        let model_type = json.get_str("model_type").map_err(in_file(CONFIG))?.unwrap_or("missing").to_owned();
        let family = Family::of_json(preprocessor.as_ref().map_or(&Value::Null, |(json, _)| json), &whole);
        let names = || encoders_of(FAMILIES.iter().flat_map(|known| known.family.model_types()).copied());
        let refused = || unsupported("config.json", "model_type", &model_type, names());
        let family = VisionFamily::of(family).ok_or_else(refused)?;
        let row_dim = json.get_u32("text_config.hidden_size").map_err(in_file(CONFIG))?;
        let json = json.required_part(VISION_CONFIG, &PROJECTOR_KEYS).map_err(in_file(CONFIG))?;
        let json = json.or_value("text_hidden_size", row_dim.map(Into::into));
        let keys = Keys::new(KeySource::Json(&json), &model_type, false);
        let (config, places) = (family.describe)(&keys).and_then(checked).map_err(in_file(CONFIG))?;
        keys.check_read().map_err(in_file(CONFIG))?;
        let (preprocessor, name) = preprocessor.ok_or_else(|| huggingface::missing(PREPROCESSORS[0]))?;
        let preprocess = Preprocess::from_json(family.family, &preprocessor, &whole).map_err(in_file(name))?;
        let (tensor_index, of_host) = (TensorIndex::default(), [const { None }; 3]);
        Ok(VisionHeader { family, config, places, preprocess, tensor_index, of_host })
    }

    /// Adds the encoder's tensors in a folder's weight file of this number.
    fn add(&mut self, file: usize, weights: &Safetensors) -> Result<(), Error> {
        for tensor in &weights.tensors {
            if let Some(name) = self.family.name(&tensor.name, &self.config) {
                check_type("safetensors", tensor)?;
                let stored = match tensor.shape.len() {
                    5 => FileLayout::SummedFrames,
                    _ => (self.family.stored)(&name, &self.config, FileKind::Folder),
                };
                self.tensor_index.insert(name, file, with_rank(tensor, stored), stored);
            }
        }
        Ok(())
    }

    /// That of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::Unsupported`] naming the key.
    pub fn of_gguf(gguf: &Gguf) -> Result<VisionHeader, Error> {
        let metadata = &gguf.metadata;
        check_clip(metadata)?;
        let projector = match metadata.get_str("clip.projector_type")? {
            Some(projector) => Some(projector),
            None => metadata.get_str("clip.vision.projector_type")?,
        };
        let projector = projector.unwrap_or("missing");
        let names = || encoders_of(FAMILIES.iter().map(|known| known.family.projector()));
        let family = VisionFamily::of(Family::of_projector(projector))
            .ok_or_else(|| unsupported("gguf", "clip.projector_type", projector, names()))?;
        let mut tensor_index = TensorIndex::default();
        // An encoder of sound may be beside.
        for tensor in gguf.tensors.iter().filter(|tensor| !is_sound(&tensor.name)) {
            check_type("gguf", tensor)?;
            tensor_index.insert(family.gguf_name(&tensor.name), 0, tensor.clone(), FileLayout::AsRead);
        }
        let data = Vec::new();
        let keys = Keys::new(KeySource::Gguf(metadata, &tensor_index, &data), "clip.vision", false);
        let (config, places) = checked((family.describe)(&keys)?)?;
        tensor_index.set_layouts(|name| (family.stored)(name, &config, FileKind::Gguf));
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
        let of_host = [const { None }; 3];
        VisionHeader { family, config, places, preprocess, tensor_index, of_host }.located()
    }

    /// Locates the tensors for the host.
    fn located(mut self) -> Result<VisionHeader, Error> {
        let VisionConfig { projector, has_positions, .. } = self.config;
        if self.preprocess.merge * self.preprocess.merge != projector.n_patches {
            let (field, found) = ("spatial_merge_size".into(), self.preprocess.merge.to_string());
            let expected = format!("{}, as in the encoder's part", projector.n_patches.isqrt());
            return Err(Error::Config { field, expected, found });
        }
        let is_standardised = matches!(projector.join, Join::Averaged { standardised: true, .. });
        let wanted = [has_positions, is_standardised, is_standardised];
        for ((name, slot), is_wanted) in HOST_TENSORS.iter().zip(&mut self.of_host).zip(wanted) {
            let found = self.tensor_index.remove(name).filter(|_| is_wanted);
            if found.is_none() && is_wanted {
                return Err(huggingface::missing(name));
            }
            *slot = found;
        }
        let [positions, standard @ ..] = &self.of_host;
        if let Some((_, tensor)) = positions {
            check_positions(&self.config, tensor)?;
        }
        for (_, tensor) in standard.iter().flatten() {
            if tensor.shape != [u64::from(self.config.encoder.dim)] {
                return Err(wrong_shape(tensor, &format!("[{}]", self.config.encoder.dim)));
            }
        }
        Ok(self)
    }

    /// The tensors whose data the header includes, with the numbers of their files.
    pub fn data(&self) -> impl Iterator<Item = &(usize, TensorInfo)> {
        self.of_host.iter().flatten()
    }

    /// The encoder with complete files.
    fn of_files(self, files: Vec<FileBytes>) -> Result<VisionFile, Error> {
        let data = data_in(&files, self.data())?;
        Ok(VisionFile { files, ..self.with_data(&data)? })
    }

    /// The encoder without its files. `data`: of the tensors of [`VisionHeader::data`], by name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for their storage type.
    pub fn with_data(self, data: &ConfigData) -> Result<VisionFile, Error> {
        let values = |tensor: &Option<(usize, TensorInfo)>| values(tensor.as_ref(), data);
        let [positions, bias, scale] = &self.of_host;
        let shape = positions.as_ref().map_or(&[][..], |(_, tensor)| &tensor.shape);
        let (positions, standard) = (by_axis(values(positions)?, shape), [values(bias)?, values(scale)?]);
        let VisionHeader { config, places, preprocess, tensor_index, .. } = self;
        Ok(VisionFile { config, preprocess, places, positions, standard, tensor_index, files: Vec::new() })
    }
}

/// The numbers of a tensor whose data a header includes; none without it.
fn values(tensor: Option<&(usize, TensorInfo)>, data: &ConfigData) -> Result<Vec<f32>, Error> {
    let Some((_, tensor)) = tensor else { return Ok(Vec::new()) };
    let found = data.iter().find(|(name, _)| *name == tensor.name);
    floats(tensor, found.map_or(&[][..], |(_, data)| data))
}

/// The texts of a folder that describe encoders of pictures and sound.
pub(super) fn read_texts(folder: &Path) -> Result<FolderTexts, Error> {
    let mut texts = FolderTexts::default();
    for name in [CONFIG, huggingface::INDEX].into_iter().chain(PREPROCESSORS) {
        let path = folder.join(name);
        if let Some(slot) = texts.slot(name)
            && path.exists()
        {
            *slot = Some(huggingface::read(&path)?);
        }
    }
    Ok(texts)
}

/// Refuses GGUF files of other models than encoders of pictures and sound.
pub(super) fn check_clip(metadata: &Metadata) -> Result<(), Error> {
    match metadata.get_str("general.architecture")?.unwrap_or("missing") {
        CLIP => Ok(()),
        found => Err(unsupported(
            "gguf",
            "general.architecture",
            found,
            "clip: encoders of pictures or sound (mmproj)".into(),
        )),
    }
}

/// The part that belongs to a model: its folder, if `config.json` has this object, or the only GGUF file beside it
/// whose name has `mmproj` in it.
pub(super) fn part_beside(model: &Path, part: &str) -> Result<Option<PathBuf>, Error> {
    if is_of_folder(model) {
        let path = folder_of(model).join(CONFIG);
        let json = ConfigJson::parse(&huggingface::read(&path)?).map_err(|e| e.in_file(&path))?;
        let has_part = json.get(part).map_err(|e| e.in_file(&path))?.is_some();
        return Ok(has_part.then(|| model.to_path_buf()));
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

/// Whether a GGUF file's tensor is of the part for sound.
pub(super) fn is_sound(name: &str) -> bool {
    name.starts_with("a.") || name.starts_with("mm.a.")
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

/// Refuses learned positions of another shape.
fn check_positions(config: &VisionConfig, tensor: &TensorInfo) -> Result<(), Error> {
    /// Far above every published model.
    const MAX: u64 = 1 << 20;
    let dim = u64::from(config.encoder.dim);
    match tensor.shape[..] {
        // A table for each axis, or both interleaved.
        [n, columns] | [2, n, columns] | [n, 2, columns] if columns == dim && n <= MAX => Ok(()),
        _ => Err(wrong_shape(tensor, &format!("[positions, {dim}]"))),
    }
}

fn wrong_shape(tensor: &TensorInfo, expected: &str) -> Error {
    Error::Config {
        field: tensor.name.escape_debug().to_string(),
        expected: format!("a tensor of shape {expected}"),
        found: format!("one of shape {:?}", tensor.shape),
    }
}

/// Positions of this shape with the tables of two axes one after the other.
fn by_axis(values: Vec<f32>, shape: &[u64]) -> Vec<f32> {
    match *shape {
        [n, 2, columns] if n != 2 => {
            let table = |axis| values.chunks_exact(columns as usize).skip(axis).step_by(2).flatten();
            table(0).chain(table(1)).copied().collect()
        }
        _ => values,
    }
}

/// A number as a vector, and a matrix for two frames by channel and frame.
fn with_rank(tensor: &TensorInfo, stored: FileLayout) -> TensorInfo {
    let shape = match (&tensor.shape[..], stored) {
        ([], _) => vec![1],
        (&[rows, columns], FileLayout::SummedFrames) if columns.is_multiple_of(6) => vec![rows, 3, 2, columns / 6],
        (shape, _) => shape.to_vec(),
    };
    TensorInfo { shape, ..tensor.clone() }
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
        if let Some((_, ours)) = self.names.iter().find(|(theirs, _)| *theirs == rest) {
            return Some(format!("{ours}.weight"));
        }
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
        if let Some((_, ours)) = self.names.iter().find(|(theirs, _)| *theirs == name) {
            return format!("{ours}.weight");
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
        Ok(ModelConfig {
            ropes: rope.map(|theta| axial(head_dim, theta)).into_iter().collect(),
            output_norm: true,
            ..of_blocks(architecture, dim, vec![block; n_layers as usize], (NormKind::Layer { bias: true }, eps))
        })
    }
}

/// A rotation by row and column, whose table the host writes.
fn axial(head_dim: u32, theta: f64) -> RopeConfig {
    let (style, scaling) = (RopeStyle::Halves, RopeScaling::None);
    RopeConfig { rot_dims: head_dim, theta, style, scaling, query_growth: None }
}

/// An encoder of these blocks alone, with attention in all directions.
pub(super) fn of_blocks(
    architecture: &str,
    dim: u32,
    blocks: Vec<Block>,
    (norm, norm_eps): (NormKind, f32),
) -> ModelConfig {
    ModelConfig {
        architecture: architecture.into(),
        dim,
        vocab_size: 0,
        max_seq_len: 0,
        blocks,
        n_mtp: 0,
        norm,
        norm_eps,
        ropes: Vec::new(),
        mrope: None,
        positions: None,
        position_biases: None,
        n_token_types: 0,
        per_layer: None,
        embd_norm: false,
        output_norm: false,
        embd_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        logit_soft_cap: None,
        causal: false,
        has_head: false,
        row_factors: Vec::new(),
    }
}

pub(super) fn unsupported(format: &'static str, field: &str, found: &str, supported: String) -> Error {
    Error::Unsupported { format, field: field.into(), found: format!("`{}`", found.escape_debug()), supported }
}

/// The supported families, by these names.
fn encoders_of(names: impl Iterator<Item = &'static str>) -> String {
    format!("vision encoders of {}", names.collect::<Vec<_>>().join(", "))
}
