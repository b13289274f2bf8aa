//! Image encoders of models that embed texts and pictures in one space: CLIP (Radford et al. 2021, arXiv:2103.00020),
//! SigLIP (Zhai et al. 2023, arXiv:2303.15343) and SigLIP 2 (Tschannen et al. 2025, arXiv:2502.14786), whose variant
//! "naflex" keeps a picture's aspect ratio.

use std::path::Path;

use serde_json::Value;

use super::{
    ConfigData, FileBytes, Folder, PREPROCESSORS, Tower, VISION_CONFIG, data_in, encoders_of, renamed, size,
    unsupported, values,
};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::config_json::ConfigJson;
use crate::formats::safetensors::Safetensors;
use crate::load::architectures::says_generation;
use crate::load::huggingface::{self, CONFIG, FolderTexts};
use crate::load::keys::{Key, KeySource, Keys};
use crate::load::tensor_index::{FileLayout, TensorIndex, check_type};
use crate::load::{folder_of, is_of_folder};
use crate::model::{ImageEncoderConfig, ImageHead};
use crate::picture::positions::Interpolation;
use crate::picture::{Family, Preprocess};

const PREFIX: &str = "vision_model.";
const POSITIONS: &str = "embeddings.position_embedding.weight";
const CLASS: &str = "embeddings.class_embedding";
const PROBE: &str = "head.probe";
const PROJECTION: &str = "visual_projection.weight";
/// A learned query's projections, one above the other.
const IN_PROJ: [(&str, &str); 2] =
    [("head.attention.in_proj_weight", "weight"), ("head.attention.in_proj_bias", "bias")];

/// Names of tensors, and of their parts in layers and in the head.
const NAMES: [(&str, &str); 13] = [
    ("embeddings.patch_embedding", "patch_embd"),
    ("pre_layrnorm", "token_embd_norm"),
    ("post_layernorm", "output_norm"),
    ("layer_norm1", "attn_norm"),
    ("layer_norm2", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_output"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("attention.out_proj", "attn_output"),
    ("layernorm", "ffn_norm"),
];

/// From `CLIPVisionConfig`, `SiglipVisionConfig` and `Siglip2VisionConfig`, whose published files leave out keys.
const CLIP_DEFAULTS: &str = r#"{
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 32, "hidden_act": "quick_gelu"
}"#;
const SIGLIP_DEFAULTS: &str = r#"{
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 16, "hidden_act": "gelu_pytorch_tanh"
}"#;

/// The files of an image encoder whose model embeds texts and pictures in one space, complete: mapped or in memory.
pub struct ImageEncoderFile {
    /// The encoder's shape.
    pub config: ImageEncoderConfig,
    /// How pictures are resized and cut into patches.
    pub(crate) preprocess: Preprocess,
    /// How learned positions fit another grid.
    pub(crate) interpolation: Interpolation,
    /// Learned positions of patches, `[N, C]`.
    pub(crate) positions: Vec<f32>,
    /// Embedding of the class token with its position, `[C]`; empty without.
    pub(crate) class: Vec<f32>,
    pub(crate) tensor_index: TensorIndex,
    pub(crate) files: Vec<FileBytes>,
}

impl ImageEncoderFile {
    /// Opens the image encoder of a Hugging Face folder of CLIP, SigLIP or SigLIP 2.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Unsupported`] for another model, [`Error::Io`] if
    /// a file cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<ImageEncoderFile, Error> {
        let path = path.as_ref();
        let folder = folder_of(path);
        if !is_of_folder(path) {
            let found = path.display().to_string();
            return Err(unsupported("model", "file", &found, "Hugging Face folders of CLIP and SigLIP".into()));
        }
        let Folder { texts, weights, files } = Folder::open(folder)?;
        let header = ImageHeader::of_folder(&texts, weights.iter().map(|(name, header)| (name.as_str(), header)));
        let opened = header.and_then(|header| {
            let data = data_in(&files, header.data())?;
            header.with_data(&data)
        });
        Ok(ImageEncoderFile { files, ..opened.map_err(|e| e.in_folder(folder))? })
    }
}

/// An image encoder's properties from its files' headers: everything except the weights.
pub(crate) struct ImageHeader {
    config: ImageEncoderConfig,
    preprocess: Preprocess,
    tensor_index: TensorIndex,
    /// [`POSITIONS`] and [`CLASS`], with the numbers of their files.
    of_host: [Option<(usize, TensorInfo)>; 2],
}

impl ImageHeader {
    /// That of a folder with these weight files.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Unsupported`] for another model.
    pub fn of_folder<'a>(
        texts: &FolderTexts,
        weights: impl Iterator<Item = (&'a str, &'a Safetensors)>,
    ) -> Result<ImageHeader, Error> {
        let in_file = |name: &'static str| move |error: Error| error.in_file(name);
        let bytes = texts.config.as_ref().ok_or_else(|| huggingface::missing(CONFIG))?;
        let json = ConfigJson::parse(bytes).map_err(in_file(CONFIG))?;
        let whole = json.clone().into_value();
        let (preprocessor, name) = texts.preprocessor_json()?.ok_or_else(|| huggingface::missing(PREPROCESSORS[0]))?;
        let family = family(&json, &preprocessor).map_err(in_file(CONFIG))?;
        let preprocess = Preprocess::from_json(family, &preprocessor, &whole).map_err(in_file(name))?;
        let mut tensors = Tensors::default();
        for (i, (name, header)) in weights.enumerate() {
            for tensor in &header.tensors {
                tensors.add(i, tensor).map_err(|e| e.in_file(name))?;
            }
        }
        let Tensors { tensor_index, of_host, projection_dims } = tensors;
        let config = config(json, family, projection_dims).map_err(in_file(CONFIG))?;
        Ok(ImageHeader { config, preprocess, tensor_index, of_host })
    }

    /// The tensors whose data the header includes, with the numbers of their files.
    pub fn data(&self) -> impl Iterator<Item = &(usize, TensorInfo)> {
        self.of_host.iter().flatten()
    }

    /// The encoder without its files. `data`: of the tensors of [`ImageHeader::data`], by name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for their storage type, [`Error::Config`] for another number of positions.
    pub fn with_data(self, data: &ConfigData) -> Result<ImageEncoderFile, Error> {
        let [positions, class] = self.of_host.each_ref().map(|tensor| values(tensor.as_ref(), data));
        let ImageHeader { config, preprocess, tensor_index, .. } = self;
        let (positions, class) = placed((positions?, class?), &config, &preprocess)?;
        let interpolation = match preprocess.family {
            Family::Siglip2 => Interpolation::Antialiased,
            _ => Interpolation::Nearest,
        };
        Ok(ImageEncoderFile { config, preprocess, interpolation, positions, class, tensor_index, files: Vec::new() })
    }
}

fn family(json: &ConfigJson, preprocessor: &Value) -> Result<Family, Error> {
    const KNOWN: [Family; 3] = [Family::Clip, Family::Siglip, Family::Siglip2];
    let model_type = json.get_str("model_type")?.unwrap_or("missing");
    let family = Family::of_json(preprocessor, &json.clone().into_value());
    family.filter(|family| KNOWN.contains(family)).ok_or_else(|| {
        let names = encoders_of(KNOWN.iter().flat_map(|known| known.model_types()).copied());
        unsupported("config.json", "model_type", model_type, names)
    })
}

fn config(json: ConfigJson, family: Family, projection_dims: Option<u32>) -> Result<ImageEncoderConfig, Error> {
    let is_clip = family == Family::Clip;
    let model_type = json.get_str("model_type")?.unwrap_or_default().to_owned();
    let (defaults, eps) = if is_clip { (CLIP_DEFAULTS, 1e-5) } else { (SIGLIP_DEFAULTS, 1e-6) };
    let json = json.required_part(VISION_CONFIG, &[])?.or_defaults(defaults)?;
    let keys = Keys::new(KeySource::Json(&json), &model_type, false);
    let tower = Tower::read(&keys, eps)?;
    let mut encoder = tower.config(&keys, (&model_type, None))?;
    encoder.embd_norm = is_clip;
    let patch = size(&keys, Key("", "patch_size"), None, 128)?;
    if !is_clip {
        keys.only_bool(Key("", "vision_use_head"), true)?;
    }
    says_generation(&keys);
    for name in ["image_size", "num_channels", "num_patches", "projection_dim"] {
        keys.says(Key("", name));
    }
    keys.check_read()?;
    let head = match is_clip {
        true => {
            let dims = projection_dims.ok_or_else(|| huggingface::missing(PROJECTION))?;
            ImageHead::ClassToken { dims }
        }
        false => ImageHead::Probe { ffn_dim: tower.ffn_dim, gelu: tower.gelu },
    };
    let config = ImageEncoderConfig { encoder, patch_dim: 3 * patch * patch, head };
    config.check().map(|()| config)
}

/// The image encoder's tensors.
#[derive(Default)]
struct Tensors {
    tensor_index: TensorIndex,
    /// As in [`ImageHeader`].
    of_host: [Option<(usize, TensorInfo)>; 2],
    projection_dims: Option<u32>,
}

impl Tensors {
    /// Adds a tensor of file `i`, if it is the image encoder's, under our name.
    fn add(&mut self, i: usize, tensor: &TensorInfo) -> Result<(), Error> {
        let Tensors { tensor_index: index, of_host: [positions, class], projection_dims } = self;
        if tensor.name == PROJECTION {
            *projection_dims = tensor.shape.first().and_then(|&rows| u32::try_from(rows).ok());
            check_type("safetensors", tensor)?;
            index.insert("head.weight".into(), i, tensor.clone(), FileLayout::AsRead);
            return Ok(());
        }
        let Some(name) = tensor.name.strip_prefix(PREFIX).filter(|name| !name.ends_with("position_ids")) else {
            return Ok(());
        };
        check_type("safetensors", tensor)?;
        if let POSITIONS | CLASS = name {
            check_elements(tensor)?;
            *(if name == CLASS { class } else { positions }) = Some((i, tensor.clone()));
            return Ok(());
        }
        if let Some((_, suffix)) = IN_PROJ.iter().find(|(theirs, _)| *theirs == name) {
            for (part, third) in ["attn_q", "attn_k", "attn_v"].into_iter().zip(thirds(tensor)?) {
                index.insert(format!("head.{part}.{suffix}"), i, third, FileLayout::AsRead);
            }
            return Ok(());
        }
        let (name, tensor) = match (name, &tensor.shape[..]) {
            (PROBE, [1, 1, dim]) => ("head.probe.weight".into(), TensorInfo { shape: vec![1, *dim], ..tensor.clone() }),
            _ => (our_name(name), tensor.clone()),
        };
        index.insert(name, i, tensor, FileLayout::AsRead);
        Ok(())
    }
}

/// Positions of patches, and the class token's embedding with its position, from the files' tables.
fn placed(
    (mut positions, mut class): (Vec<f32>, Vec<f32>),
    config: &ImageEncoderConfig,
    preprocess: &Preprocess,
) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let (dim, n_class) = (config.encoder.dim as usize, config.n_class_rows() as usize);
    let wrong = |field: &str, expected: String, found: usize| Error::Config {
        field: format!("{PREFIX}{field}"),
        expected,
        found: format!("{found} numbers"),
    };
    if class.len() != n_class * dim {
        return Err(wrong(CLASS, format!("{} numbers", n_class * dim), class.len()));
    }
    let n_patches = match preprocess.family {
        // A table of its own size, which is resampled.
        Family::Siglip2 => (positions.len() / dim).isqrt().pow(2),
        _ => preprocess.max_patches() as usize,
    };
    if n_patches == 0 || positions.len() != (n_class + n_patches) * dim {
        let rows = n_class + n_patches;
        let expected = format!("{rows} rows of {dim}, for the pictures of the preprocessor's file");
        return Err(wrong(POSITIONS, expected, positions.len()));
    }
    let patches = positions.split_off(n_class * dim);
    class.iter_mut().zip(positions).for_each(|(class, position)| *class += position);
    Ok((patches, class))
}

/// Refuses a table far above any model's, before it is expanded.
fn check_elements(tensor: &TensorInfo) -> Result<(), Error> {
    const MAX: u64 = 1 << 26;
    match tensor.n_elements() {
        n if n <= MAX => Ok(()),
        n => Err(Error::Config {
            field: tensor.name.escape_debug().to_string(),
            expected: format!("at most {MAX} numbers"),
            found: n.to_string(),
        }),
    }
}

/// The rows of queries, keys and values.
fn thirds(tensor: &TensorInfo) -> Result<[TensorInfo; 3], Error> {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    if rows == 0 || !rows.is_multiple_of(3) || !tensor.size_bytes.is_multiple_of(3) {
        return Err(Error::Config {
            field: tensor.name.escape_debug().to_string(),
            expected: "rows of queries, keys and values".into(),
            found: format!("shape {:?}", tensor.shape),
        });
    }
    let mut third = TensorInfo { size_bytes: tensor.size_bytes / 3, ..tensor.clone() };
    third.shape[0] = rows / 3;
    Ok([0, 1, 2].map(|i| TensorInfo { offset: tensor.offset + i * third.size_bytes, ..third.clone() }))
}

/// Our name of a tensor, without the prefix.
fn our_name(name: &str) -> String {
    let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, "weight"));
    let of = |list: &str| stem.strip_prefix(list);
    if let Some((layer, part)) = of("encoder.layers.").and_then(|rest| rest.split_once('.')) {
        return format!("blk.{layer}.{}.{suffix}", renamed(&NAMES, part));
    }
    match of("head.") {
        Some(part) => format!("head.{}.{suffix}", renamed(&NAMES, part)),
        None => format!("{}.{suffix}", renamed(&NAMES, stem)),
    }
}
