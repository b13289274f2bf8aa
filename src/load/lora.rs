//! LoRA adapters (Hu et al. 2021, arXiv:2106.09685): PEFT folders, and GGUF files by llama.cpp's
//! `convert_lora_to_gguf.py`.
//!
//! ```text
//! PEFT   adapter_config.json        r, lora_alpha, use_rslora, rank_pattern, alpha_pattern
//!        adapter_model.safetensors  base_model.model.<module>.lora_A.weight [r, K], and .lora_B.weight [N, r]
//! GGUF   general.type "adapter", general.architecture, adapter.type "lora", adapter.lora.alpha
//!        <tensor>.lora_a [r, K], and <tensor>.lora_b [N, r]
//! ```
//!
//! The product of the factors is scaled by `alpha / r`, or by `alpha / sqrt(r)` with `use_rslora` (Kalajdzievski
//! 2023, arXiv:2312.03732). Anything else that PEFT can train is an error that names it: an adapter is applied in
//! full or not at all.
//!
//! Llama's GGUF files order the rows of queries and keys differently (`Architecture::pairs`). The rows of B are
//! reordered to match the model, so adapters of either format work with models of either.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use super::FileBytes;
use super::architectures::Architecture;
use super::huggingface::missing;
use super::merge::Delta;
use super::tensor_index::{FileLayout, check_type, floats};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::Gguf;
use crate::formats::safetensors::Safetensors;
use crate::formats::{BlockType, TensorInfo};
use crate::kernels::RopeStyle;
use crate::model::{ModelConfig, Recurrence, layer_of, name_in_layer};
use crate::xxh64::Xxh64;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Keys of `adapter_config.json` that are read below, or do not affect inference. Any other key must be off.
const KNOWN_KEYS: [&str; 29] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
    "bias",
];

/// An adapter file with paired, mutually consistent tensors. Whether it fits a model is checked in `factors`.
pub struct AdapterFile {
    name: String,
    origin: Origin,
    pairs: Vec<Pair>,
    bytes: FileBytes,
}

/// The file's format.
#[derive(PartialEq)]
enum Origin {
    /// The architecture named in the file.
    Gguf(String),
    Peft,
}

/// The factors of one matrix.
struct Pair {
    /// The matrix's name in the file.
    of: String,
    /// `[r, K]`.
    a: TensorInfo,
    /// `[N, r]`.
    b: TensorInfo,
    /// Scale of the product B A.
    scale: f32,
}

/// The factors of a model's matrix, laid out for its kernels.
pub(crate) struct LoraFactors<'a> {
    /// The matrix's GGUF name.
    pub name: String,
    /// The rank r.
    pub rank: u32,
    file: &'a AdapterFile,
    pair: &'a Pair,
    /// The row order of the matrix in the file.
    stored: FileLayout,
    /// Head size and target RoPE style, if the file's style differs from the model's.
    heads: Option<(u32, RopeStyle)>,
    /// How many rows of the matrix were multiplied by which factor when it was loaded.
    row_factors: Vec<(u32, f32)>,
}

impl AdapterFile {
    /// Opens a PEFT folder, a `.safetensors` or `.json` file in one, or a GGUF file.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Io`] if it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<AdapterFile, Error> {
        let path = path.as_ref();
        if !super::is_of_folder(path) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            return AdapterFile::of_gguf(name, FileBytes::map(path)?).map_err(|error| error.in_file(path));
        }
        let folder = match path.is_dir() {
            true => path,
            false => path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")),
        };
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let config = super::huggingface::read(&folder.join(CONFIG))?;
        let weights = FileBytes::map(&folder.join(WEIGHTS))?;
        AdapterFile::of_peft(name, &config, weights).map_err(|error| error.in_folder(folder))
    }

    /// Reads a GGUF file in memory.
    ///
    /// # Errors
    /// [`Error::Adapter`], [`Error::Format`] or [`Error::Unsupported`] naming the key or tensor.
    pub fn from_gguf_bytes(bytes: impl Into<FileBytes>) -> Result<AdapterFile, Error> {
        AdapterFile::of_gguf("adapter".into(), bytes.into())
    }

    /// Reads PEFT's `adapter_config.json` and `adapter_model.safetensors` in memory.
    ///
    /// # Errors
    /// As [`AdapterFile::from_gguf_bytes`], in [`Error::InFile`] naming the file.
    pub fn from_peft_bytes(config: &[u8], weights: impl Into<FileBytes>) -> Result<AdapterFile, Error> {
        AdapterFile::of_peft("adapter".into(), config, weights.into())
    }

    /// The name of the file or folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn of_gguf(name: String, bytes: FileBytes) -> Result<AdapterFile, Error> {
        let gguf = Gguf::parse(&bytes, bytes.len() as u64)?;
        let metadata = &gguf.metadata;
        for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
            let found = metadata.get_str(key)?;
            if found != Some(expected) {
                let found = found.map_or("missing".into(), |found| format!("`{}`", found.escape_debug()));
                return Err(wrong(key, format!("`{expected}`"), found));
            }
        }
        if metadata.get("adapter.alora.invocation_tokens").is_some() {
            return Err(unsupported("gguf", "adapter.alora.invocation_tokens", "set", "adapters of all tokens"));
        }
        let architecture = metadata.get_str("general.architecture")?;
        let architecture = architecture.ok_or_else(|| missing("general.architecture"))?.to_owned();
        let alpha = metadata.get_f32("adapter.lora.alpha")?;
        if let Some(found) = alpha.filter(|alpha| !alpha.is_finite()) {
            return Err(wrong("adapter.lora.alpha", "a finite number".into(), found.to_string()));
        }
        let factor = |name: &str| {
            let half =
                |end: &str, is_b: bool| Some((name.strip_suffix(end)?.strip_suffix(".weight")?.to_owned(), is_b));
            half(".lora_a", false).or_else(|| half(".lora_b", true))
        };
        // As in llama.cpp, a missing or zero alpha means scale 1.
        let scale = |_: &str, rank: u32| match alpha {
            None | Some(0.0) => Ok(1.0),
            Some(alpha) => Ok(alpha / rank as f32),
        };
        let pairs = pairs(&gguf.tensors, "gguf", factor, [".weight.lora_a", ".weight.lora_b"], scale)?;
        Ok(AdapterFile { name, origin: Origin::Gguf(architecture), pairs, bytes })
    }

    fn of_peft(name: String, config: &[u8], bytes: FileBytes) -> Result<AdapterFile, Error> {
        let scaling = Scaling::read(config).map_err(|error| error.in_file(CONFIG))?;
        let read = || {
            let header = Safetensors::parse(&bytes, bytes.len() as u64)?;
            let factor = |name: &str| {
                let module = name.strip_prefix("base_model.model.")?;
                let half = |end: &str, is_b: bool| Some((module.strip_suffix(end)?.to_owned(), is_b));
                half(".lora_A.weight", false).or_else(|| half(".lora_B.weight", true))
            };
            pairs(&header.tensors, "safetensors", factor, [".lora_A.weight", ".lora_B.weight"], |module, rank| {
                scaling.of(module, rank)
            })
        };
        let pairs = read().map_err(|error| error.in_file(WEIGHTS))?;
        Ok(AdapterFile { name, origin: Origin::Peft, pairs, bytes })
    }

    /// The factors for a model's kernels; `adaptable` lists the matrices that support adapters, as `[rows, columns]`.
    ///
    /// # Errors
    /// [`Error::Adapter`] naming a key or tensor that does not match the model, or a matrix that supports no adapter.
    pub(crate) fn factors(
        &self,
        config: &ModelConfig,
        adaptable: &[(String, [u32; 2])],
    ) -> Result<Vec<LoraFactors<'_>>, Error> {
        let adaptable: HashMap<&str, [u32; 2]> = adaptable.iter().map(|(name, dims)| (name.as_str(), *dims)).collect();
        let architecture = Architecture::of_model(config)?;
        if let Origin::Gguf(found) = &self.origin {
            // Mixtral's files name the architecture `llama`.
            let expected = if architecture.gguf.is_empty() { "llama" } else { architecture.gguf };
            if found != expected {
                let found = format!("`{}`", found.escape_debug());
                return Err(wrong("general.architecture", format!("`{expected}`, the model's"), found));
            }
        }
        let (stored, pairs) = match self.origin {
            Origin::Gguf(_) => (architecture.gguf_stored, architecture.pairs[0]),
            Origin::Peft => (architecture.stored, architecture.pairs[1]),
        };
        let own_pairs = config.ropes.first().map_or(pairs, |rope| rope.style);
        let mut seen = HashSet::new();
        let mut factors = Vec::with_capacity(self.pairs.len());
        for pair in &self.pairs {
            let name = match self.origin {
                Origin::Gguf(_) => Some(architecture.usual_name(&format!("{}.weight", pair.of))),
                Origin::Peft => architecture.gguf_name(&format!("{}.weight", pair.of)),
            };
            let dims = name.as_deref().and_then(|name| adaptable.get(name));
            let (Some(name), Some(&[rows, cols])) = (name, dims) else {
                let found = format!("for `{}`", pair.of.escape_debug());
                let expected = "for a matrix of the model's attention, recurrence or dense feed-forward".into();
                return Err(wrong(&pair.a.name, expected, found));
            };
            self.check_format(architecture, config, (&pair.a.name, &name))?;
            let rank = pair.a.shape[0];
            for (tensor, shape) in [(&pair.a, [rank, cols.into()]), (&pair.b, [rows.into(), rank])] {
                if tensor.shape != shape {
                    let found = format!("of shape {:?}", tensor.shape);
                    return Err(wrong(&tensor.name, format!("a tensor of shape {shape:?}"), found));
                }
            }
            if !seen.insert(name.clone()) {
                let found = format!("a duplicate, as `{}`", pair.of.escape_debug());
                return Err(wrong(&pair.a.name, format!("`{name}` once"), found));
            }
            let is_turned = name.ends_with(".attn_q.weight") || name.ends_with(".attn_k.weight");
            let block = layer_of(&name).and_then(|l| config.blocks.get(l as usize));
            let own = block.filter(|block| is_turned && block.attends() && pairs != own_pairs);
            let heads = own.map(|block| &block.attention).filter(|own| own.latent.is_none());
            let heads = heads.map(|own| (own.head_dim, own_pairs));
            let stored = stored(&name, config);
            let in_layer = name_in_layer(&name);
            let row_factors = config.row_factors.iter().find(|(of, _)| Some(*of) == in_layer);
            let row_factors = row_factors.filter(|_| self.origin == Origin::Peft).map(|(_, groups)| groups.clone());
            let row_factors = row_factors.unwrap_or_default();
            factors.push(LoraFactors { name, rank: rank as u32, file: self, pair, stored, heads, row_factors });
        }
        Ok(factors)
    }

    /// The changes of a PEFT adapter, by the names and in the layout of a folder.
    ///
    /// # Errors
    /// [`Error::Adapter`] naming a tensor that is not for a matrix of the architecture.
    pub(super) fn deltas(&self, architecture: &Architecture) -> Result<Vec<Delta>, Error> {
        let delta = |pair: &Pair| {
            let name = architecture.gguf_name(&format!("{}.weight", pair.of)).ok_or_else(|| {
                let found = format!("for `{}`", pair.of.escape_debug());
                wrong(&pair.a.name, "for a matrix of the model".into(), found)
            })?;
            let mut b = self.values(&pair.b)?;
            b.iter_mut().for_each(|value| *value *= pair.scale);
            Ok(Delta { name, factor: pair.a.name.clone(), rank: pair.a.shape[0] as usize, a: self.values(&pair.a)?, b })
        };
        self.pairs.iter().map(delta).collect()
    }

    /// The finite values of a tensor.
    fn values(&self, tensor: &TensorInfo) -> Result<Vec<f32>, Error> {
        let values = floats(tensor, tensor.bytes(&self.bytes)?)?;
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(wrong(&tensor.name, "finite numbers".into(), format!("{} at {at}", values[at]))),
        }
    }

    /// Refuses an adapter in another format than the model where the GGUF converter changes matrices: it multiplies
    /// Falcon-H1's, and reorders the value heads of Qwen3.5's gated delta rules.
    fn check_format(
        &self,
        architecture: &Architecture,
        config: &ModelConfig,
        (field, name): (&str, &str),
    ) -> Result<(), Error> {
        let of_peft = self.origin == Origin::Peft;
        let refused = |why: &str| {
            let [expected, found] = [!of_peft, of_peft].map(|peft| if peft { "PEFT" } else { "GGUF" });
            Err(wrong(field, format!("an adapter in {expected}, the model's format: {why}"), found.into()))
        };
        if architecture.factors.is_some() && of_peft == config.row_factors.is_empty() {
            return refused("GGUF files have multipliers in their weights");
        }
        let block = layer_of(name).and_then(|l| config.blocks.get(l as usize));
        let Some(Recurrence::DeltaNet { rule, .. }) = block.and_then(|block| block.recurs()) else { return Ok(()) };
        let is_reordered = matches!(architecture.gguf, "qwen35" | "qwen35moe");
        match is_reordered && rule.n_heads != rule.n_key_heads && of_peft != rule.grouped && !name.contains(".ffn_") {
            true => refused("GGUF files have value heads in another order"),
            false => Ok(()),
        }
    }
}

impl LoraFactors<'_> {
    /// Factor A, `[r, K]`.
    ///
    /// # Errors
    /// [`Error::Adapter`] if a value is not finite.
    pub fn a(&self) -> Result<Vec<f32>, Error> {
        self.file.values(&self.pair.a)
    }

    /// Factor B times the scale, `[N, r]`, with its rows in the model's order.
    ///
    /// # Errors
    /// As [`LoraFactors::a`].
    pub fn b(&self, scale: f32) -> Result<Vec<f32>, Error> {
        let mut values = self.file.values(&self.pair.b)?;
        if let FileLayout::ByHead { .. } | FileLayout::Grouped { .. } = self.stored {
            let info = TensorInfo { block_type: BlockType::F32, ..self.pair.b.clone() };
            if let Some(ordered) = self.stored.ordered(&info, bytemuck::cast_slice(&values)) {
                values = bytemuck::pod_collect_to_vec(&ordered);
            }
        }
        if let Some((head_dim, style)) = self.heads {
            values = paired(&values, head_dim as usize, self.rank as usize, style);
        }
        let scale = scale * self.pair.scale;
        values.iter_mut().for_each(|value| *value *= scale);
        let factors =
            self.row_factors.iter().flat_map(|&(n_rows, factor)| std::iter::repeat_n(factor, n_rows as usize));
        for (row, factor) in values.chunks_exact_mut(self.rank as usize).zip(factors) {
            row.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(values)
    }

    /// Hash of these factors: name, scale, types, shapes and bytes.
    pub fn digest(&self) -> u64 {
        let mut digest = Xxh64::new();
        digest.add(self.name.as_bytes());
        digest.add(&self.pair.scale.to_le_bytes());
        for tensor in [&self.pair.a, &self.pair.b] {
            digest.add(format!(" {} {:?}", tensor.block_type, tensor.shape).as_bytes());
            digest.add(tensor.bytes(&self.file.bytes).unwrap_or_default());
        }
        digest.finish()
    }
}

/// Reorders the rows of each head from the other RoPE style to `style`.
fn paired(rows: &[f32], head_dim: usize, row_len: usize, style: RopeStyle) -> Vec<f32> {
    let half = head_dim / 2;
    let place = |at: usize| match style {
        // Elements 2 i and 2 i + 1 come from i and i + half.
        RopeStyle::Interleaved => at / 2 + at % 2 * half,
        RopeStyle::Halves => at % half * 2 + at / half,
    };
    let from = |row: usize| row / head_dim * head_dim + place(row % head_dim);
    (0..rows.len() / row_len).flat_map(|row| &rows[from(row) * row_len..][..row_len]).copied().collect()
}

/// Pairs the factors of each matrix. `factor` maps a tensor's name to its matrix and whether it is factor B; `ends`
/// are the suffixes of the names; `scale` maps a matrix and its rank to its scale.
fn pairs(
    tensors: &[TensorInfo],
    format: &'static str,
    factor: impl Fn(&str) -> Option<(String, bool)>,
    ends: [&str; 2],
    scale: impl Fn(&str, u32) -> Result<f32, Error>,
) -> Result<Vec<Pair>, Error> {
    let mut halves: BTreeMap<String, [Option<&TensorInfo>; 2]> = BTreeMap::new();
    for tensor in tensors {
        let found = factor(&tensor.name).filter(|(of, _)| !of.to_ascii_lowercase().contains("lora_"));
        let Some((of, is_b)) = found else {
            let [a, b] = ends;
            let expected = format!("a name ending in `{a}` or `{b}`");
            return Err(wrong(&tensor.name, expected, "not a LoRA factor".into()));
        };
        check_type(format, tensor)?;
        halves.entry(of).or_default()[usize::from(is_b)] = Some(tensor);
    }
    if halves.is_empty() {
        return Err(wrong("tensors", "LoRA factors".into(), "none".into()));
    }
    let pair = |(of, halves): (String, [Option<&TensorInfo>; 2])| {
        let (a, b) = match halves {
            [Some(a), Some(b)] => (a, b),
            [Some(one), None] | [None, Some(one)] => {
                let expected = format!("a pair of tensors ending in `{}` and `{}`", ends[0], ends[1]);
                return Err(wrong(&one.name, expected, "without its pair".into()));
            }
            [None, None] => return Err(missing(&of)),
        };
        let rank = match (&a.shape[..], &b.shape[..]) {
            (&[rank, _], &[_, of_b]) if rank == of_b && rank > 0 => u32::try_from(rank).unwrap_or(u32::MAX),
            _ => {
                let found = format!("of shape {:?}, factor A of shape {:?}", b.shape, a.shape);
                return Err(wrong(&b.name, "a matrix with as many columns as factor A has rows".into(), found));
            }
        };
        let scale = scale(&of, rank)?;
        Ok(Pair { of, a: a.clone(), b: b.clone(), scale })
    };
    halves.into_iter().map(pair).collect()
}

/// Scaling settings of an `adapter_config.json`.
struct Scaling {
    rank: u32,
    alpha: f32,
    /// Ranks and alphas by module-name suffix.
    ranks: Vec<(String, f32)>,
    alphas: Vec<(String, f32)>,
    uses_root: bool,
}

impl Scaling {
    fn read(config: &[u8]) -> Result<Scaling, Error> {
        let json = ConfigJson::parse(config)?;
        let is_on = |value: &serde_json::Value| match value {
            serde_json::Value::Null | serde_json::Value::Bool(false) => false,
            serde_json::Value::Array(values) => !values.is_empty(),
            serde_json::Value::Object(values) => !values.is_empty(),
            _ => true,
        };
        let expect = |key: &str, expected: &str| match json.get_str(key)? {
            found if found.unwrap_or(expected) == expected => Ok(()),
            found => Err(unsupported("peft", key, found.unwrap_or_default(), expected)),
        };
        expect("peft_type", "LORA")?;
        expect("bias", "none")?;
        // Other initialisations subtract part of the base weights first.
        let begins = json.get("init_lora_weights")?.and_then(serde_json::Value::as_str);
        if let Some(found) = begins.filter(|found| !["gaussian", "eva", "orthogonal"].contains(found)) {
            return Err(unsupported("peft", "init_lora_weights", found, "true, false, gaussian, eva, orthogonal"));
        }
        let key = |path: &str| path.split('.').next().unwrap_or(path).to_owned();
        if let Some(path) = json.find(|path, value| is_on(value) && !KNOWN_KEYS.contains(&&*key(path))) {
            return Err(unsupported("peft", &key(&path), "set", "plain LoRA"));
        }
        let rank = json.get_u32("r")?.ok_or_else(|| missing("r"))?;
        let alpha = json.get_f32("lora_alpha")?.ok_or_else(|| missing("lora_alpha"))?;
        if rank == 0 {
            return Err(wrong("r", "1 or more".into(), "0".into()));
        }
        Ok(Scaling {
            rank,
            alpha: finite("lora_alpha", alpha)?,
            ranks: pattern(&json, "rank_pattern")?,
            alphas: pattern(&json, "alpha_pattern")?,
            uses_root: json.get_bool("use_rslora")?.unwrap_or(false),
        })
    }

    /// The scale of a module's product.
    fn of(&self, module: &str, rank: u32) -> Result<f32, Error> {
        let find = |pattern: &[(String, f32)]| {
            let is_end = |end: &str| module == end || module.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
            pattern
                .iter()
                .find(|(key, _)| key.strip_prefix('^').map_or_else(|| is_end(key), |whole| module == whole))
                .map(|(_, value)| *value)
        };
        let expected = find(&self.ranks).unwrap_or(self.rank as f32);
        if expected != rank as f32 {
            let field = format!("r of `{}`", module.escape_debug());
            return Err(wrong(&field, format!("{expected}, as {CONFIG} says"), rank.to_string()));
        }
        let alpha = find(&self.alphas).unwrap_or(self.alpha);
        Ok(alpha / if self.uses_root { (rank as f32).sqrt() } else { rank as f32 })
    }
}

/// An object of numbers by module-name suffix.
fn pattern(json: &ConfigJson, key: &str) -> Result<Vec<(String, f32)>, Error> {
    let values = match json.get(key)? {
        None => return Ok(Vec::new()),
        Some(serde_json::Value::Object(values)) => values,
        Some(other) => return Err(wrong(key, "an object".into(), other.to_string())),
    };
    let entry = |(module, value): (&String, &serde_json::Value)| {
        let field = format!("{key}.{}", module.escape_debug());
        // PEFT accepts regular expressions; in practice these are names.
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        if !is_name(module.strip_prefix('^').unwrap_or(module)) {
            return Err(unsupported("peft", &field, "a regular expression", "module names or their suffixes"));
        }
        let number = value.as_f64().ok_or_else(|| wrong(&field, "a number".into(), value.to_string()))?;
        Ok((module.clone(), finite(&field, number as f32)?))
    };
    values.iter().map(entry).collect()
}

fn finite(field: &str, value: f32) -> Result<f32, Error> {
    if value.is_finite() { Ok(value) } else { Err(wrong(field, "a finite number".into(), value.to_string())) }
}

fn wrong(field: &str, expected: String, found: String) -> Error {
    Error::Adapter { field: field.escape_debug().to_string(), expected, found }
}

fn unsupported(format: &'static str, field: &str, found: &str, supported: &str) -> Error {
    let found = found.escape_debug().to_string();
    Error::Unsupported { format, field: field.escape_debug().to_string(), found, supported: supported.into() }
}
