//! Selects the files of a repository that an address names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::address::Address;
use super::digest::Digest;
use crate::error::HubError;
use crate::load::is_mmproj;

/// Default quantisations, in order of preference: 4-bit types first, then mostly by size. None loses more than 1 % of
/// a model's quality.
const USUAL: [&str; 16] = [
    "Q4_K_M",
    "Q4_K_S",
    "Q4_K_L",
    "Q4_0",
    "IQ4_XS",
    "IQ4_NL",
    "Q4_1",
    "UD-Q4_K_XL",
    "Q5_K_M",
    "Q5_K_S",
    "Q6_K",
    "MXFP4",
    "Q8_0",
    "BF16",
    "F16",
    "F32",
];

/// A file of a repository.
#[derive(Clone, Debug)]
pub(super) struct RepoFile {
    /// Path in the repository with `/`.
    pub path: String,
    pub size: Option<u64>,
    pub digest: Option<Digest>,
}

/// A model's files.
#[derive(Debug)]
pub(super) enum ModelFiles {
    Gguf(GgufModel),
    Folder(Folder),
}

impl ModelFiles {
    /// The model's path in a snapshot: its file, its first shard, or its folder.
    pub fn place(&self, snapshot: &Path) -> PathBuf {
        match self {
            ModelFiles::Gguf(model) => snapshot.join(&model.first.path),
            ModelFiles::Folder(folder) if folder.prefix.is_empty() => snapshot.into(),
            ModelFiles::Folder(folder) => snapshot.join(folder.prefix.trim_end_matches('/')),
        }
    }
}

/// A folder with `config.json` and safetensors.
#[derive(Debug)]
pub(super) struct Folder {
    /// Path with a trailing `/`; empty for the repository's root.
    pub prefix: String,
    /// Configuration, tokenizer and templates, and weights of dense layers after pooling, of heads for tokens and of
    /// tasks' adapters.
    pub texts: Vec<RepoFile>,
    /// The shard index, if sharded.
    pub index: Option<RepoFile>,
    /// All its safetensors files.
    weights: Vec<RepoFile>,
}

impl Folder {
    /// All its files.
    pub fn all(self) -> Vec<RepoFile> {
        [self.texts, self.weights, Vec::from_iter(self.index)].concat()
    }

    /// The weight files: the index's shards, or the only file of a folder without an index.
    pub fn weights(&self, shards: Option<&[String]>, address: &Address) -> Result<Vec<RepoFile>, HubError> {
        let single = [SINGLE.to_owned()];
        let find = |name: &String| {
            let path = format!("{}{name}", self.prefix);
            self.weights.iter().find(|file| file.path == path).cloned().ok_or_else(|| HubError::Choice {
                address: address.to_string(),
                wanted: format!("{path} is missing"),
                available: paths(&self.weights),
            })
        };
        shards.unwrap_or(&single).iter().map(find).collect()
    }
}

/// The weight file of an unsharded folder.
const SINGLE: &str = "model.safetensors";

/// A model in a GGUF file or its shards.
#[derive(Debug)]
pub(super) struct GgufModel {
    /// Quantisation in the file name, if any.
    pub quant: Option<String>,
    pub first: RepoFile,
    /// The other shards, in order.
    others: Vec<RepoFile>,
}

impl GgufModel {
    /// All files, in order.
    pub fn files(&self) -> Vec<RepoFile> {
        std::iter::once(&self.first).chain(&self.others).cloned().collect()
    }
}

/// Selects the files that an address names.
///
/// # Errors
/// [`HubError::Choice`] if none or several match.
pub(super) fn choose(files: &[RepoFile], address: &Address) -> Result<ModelFiles, HubError> {
    let root = match &address.path {
        Some(path) if files.iter().any(|file| file.path == *path) => return choose_file(files, path, address),
        Some(path) => format!("{path}/"),
        None => String::new(),
    };
    let below: Vec<RepoFile> = files.iter().filter(|file| file.path.starts_with(&root)).cloned().collect();
    let models = gguf_models(&below);
    if !models.is_empty() {
        return choose_gguf(models, address).map(ModelFiles::Gguf);
    }
    match (folder(&below, &root), &address.quant) {
        (Some(folder), None) => Ok(ModelFiles::Folder(folder)),
        (found, quant) => Err(HubError::Choice {
            address: address.to_string(),
            wanted: match quant {
                Some(quant) if found.is_some() => {
                    format!("{quant} of a GGUF file is wanted, the model is in safetensors")
                }
                _ => "neither a GGUF file nor config.json with safetensors".into(),
            },
            available: paths(if below.is_empty() { files } else { &below }),
        }),
    }
}

/// The named file with its other shards.
fn choose_file(files: &[RepoFile], path: &str, address: &Address) -> Result<ModelFiles, HubError> {
    let wrong = |wanted: String| HubError::Choice { address: address.to_string(), wanted, available: paths(files) };
    if let Some(quant) = &address.quant {
        return Err(wrong(format!("{path} is a file, so `:{quant}` chooses nothing")));
    }
    if !is_gguf(path) {
        return Err(wrong(format!("{path} is no GGUF file")));
    }
    // Includes files whose names do not look like models.
    let same: Vec<RepoFile> = files.iter().filter(|file| stem(&file.path).0 == stem(path).0).cloned().collect();
    let model = group(&same).into_iter().find(|model| model.files().iter().any(|file| file.path == path));
    model.map(ModelFiles::Gguf).ok_or_else(|| wrong(format!("shards of {path} are missing")))
}

fn choose_gguf(mut models: Vec<GgufModel>, address: &Address) -> Result<GgufModel, HubError> {
    let named = |models: &[GgufModel], quant: &str| -> Vec<usize> {
        let is_it = |model: &GgufModel| model.quant.as_deref().is_some_and(|own| own == quant);
        (0..models.len()).filter(|&at| is_it(&models[at])).collect()
    };
    let wanted = address.quant.as_deref().map(normal);
    let found = match &wanted {
        Some(quant) => named(&models, quant),
        None if models.len() == 1 => vec![0],
        None => USUAL.iter().map(|quant| named(&models, quant)).find(|found| !found.is_empty()).unwrap_or_default(),
    };
    if let [one] = found[..] {
        return Ok(models.swap_remove(one));
    }
    let (wanted, shown) = match (&wanted, found.is_empty()) {
        (Some(quant), true) => (format!("no {quant}"), (0..models.len()).collect()),
        (None, true) => ("the quantisation has to be named".into(), (0..models.len()).collect()),
        (_, false) => ("several files would do, so the address has to name one by its path".into(), found),
    };
    let show = |at: usize| {
        let model: &GgufModel = &models[at];
        let is_unique = model.quant.as_deref().is_some_and(|quant| named(&models, quant).len() == 1);
        model.quant.clone().filter(|_| is_unique).unwrap_or_else(|| model.first.path.clone())
    };
    Err(HubError::Choice { address: address.to_string(), wanted, available: shown.into_iter().map(show).collect() })
}

/// The vision encoder (`mmproj`) in a GGUF model's folder, if there is one: in half precision where there are several.
pub(super) fn vision_file(files: &[RepoFile], model: &GgufModel) -> Option<RepoFile> {
    const BEST: [&str; 3] = ["F16", "BF16", "Q8_0"];
    let folder = |path: &str| path.rsplit_once('/').map(|(folder, _)| folder.to_owned());
    let is_one = |file: &&RepoFile| is_mmproj(file_name(&file.path)) && folder(&file.path) == folder(&model.first.path);
    let found: Vec<&RepoFile> = files.iter().filter(is_one).collect();
    let of = |wanted: &&str| found.iter().find(|file| quant(stem(&file.path).0).as_deref() == Some(*wanted));
    BEST.iter().find_map(of).or(found.first()).map(|file| (*file).clone())
}

/// Complete GGUF models by path. Excludes vision encoders and importance matrices.
pub(super) fn gguf_models(files: &[RepoFile]) -> Vec<GgufModel> {
    let is_model = |file: &&RepoFile| {
        let name = file_name(&file.path);
        !is_mmproj(name) && !name.to_lowercase().contains("imatrix")
    };
    group(&files.iter().filter(is_model).cloned().collect::<Vec<_>>())
}

/// Groups shards and skips incomplete groups.
fn group(files: &[RepoFile]) -> Vec<GgufModel> {
    let mut groups: BTreeMap<(String, u32), BTreeMap<u32, RepoFile>> = BTreeMap::new();
    for file in files.iter().filter(|file| is_gguf(&file.path)) {
        let (stem, [shard, n_shards]) = stem(&file.path);
        groups.entry((stem.into(), n_shards)).or_default().insert(shard, file.clone());
    }
    let is_whole =
        |shards: &BTreeMap<u32, RepoFile>, n: u32| shards.len() as u64 == u64::from(n) && !shards.contains_key(&0);
    let whole = groups.into_iter().filter(|((_, n), shards)| is_whole(shards, *n));
    let model = |((stem, _), shards): ((String, u32), BTreeMap<u32, RepoFile>)| {
        let mut shards = shards.into_values();
        Some(GgufModel { quant: quant(&stem), first: shards.next()?, others: shards.collect() })
    };
    whole.filter_map(model).collect()
}

/// The model folder at `root`, if it is one.
pub(super) fn folder(files: &[RepoFile], root: &str) -> Option<Folder> {
    let find = |name: &str| files.iter().find(|file| file.path.strip_prefix(root) == Some(name)).cloned();
    find(crate::load::CONFIG)?;
    let in_it = |file: &&RepoFile| file.path.strip_prefix(root).is_some_and(|name| !name.contains('/'));
    let weights: Vec<RepoFile> =
        files.iter().filter(in_it).filter(|file| file.path.ends_with(".safetensors")).cloned().collect();
    let index = find(crate::load::INDEX);
    if weights.is_empty() || (index.is_none() && find(SINGLE).is_none()) {
        return None;
    }
    let names = crate::load::TEXTS.iter().chain(&crate::load::DENSE_WEIGHTS).chain(&crate::load::PREPROCESSORS);
    let names = names.chain(&crate::load::TOKEN_HEADS);
    let texts = names.filter(|name| **name != crate::load::INDEX).filter_map(|name| find(name));
    let adapters = files.iter().filter(|file| file.path.strip_prefix(root).is_some_and(is_of_adapter)).cloned();
    Some(Folder { prefix: root.into(), texts: texts.chain(adapters).collect(), index, weights })
}

/// Whether a file in a folder is of the adapter of a task.
fn is_of_adapter(path: &str) -> bool {
    let rest = path.strip_prefix(crate::load::ADAPTERS).and_then(|rest| rest.strip_prefix('/'));
    let name = rest.and_then(|rest| rest.split_once('/')).map(|(_, name)| name);
    name.is_some_and(|name| ["adapter_config.json", "adapter_model.safetensors"].contains(&name))
}

fn paths(files: &[RepoFile]) -> Vec<String> {
    files.iter().map(|file| file.path.clone()).collect()
}

/// The last part of a path.
fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn is_gguf(path: &str) -> bool {
    path.len() > 5 && path.get(path.len() - 5..).is_some_and(|end| end.eq_ignore_ascii_case(".gguf"))
}

/// A GGUF file's path without its extension, its shard number and the number of shards.
fn stem(path: &str) -> (&str, [u32; 2]) {
    let stem = crate::load::stem(path);
    crate::load::numbered(stem).unwrap_or((stem, [1, 1]))
}

/// The quantisation in a file name: the last matching part.
fn quant(stem: &str) -> Option<String> {
    let parts: Vec<&str> = file_name(stem).split(['-', '.']).collect();
    let at = parts.iter().rposition(|part| is_quant(part))?;
    let is_dynamic = at > 0 && parts[at - 1].eq_ignore_ascii_case("ud");
    Some(normal(&format!("{}{}", if is_dynamic { "UD-" } else { "" }, parts[at])))
}

fn is_quant(part: &str) -> bool {
    let part = normal(part);
    let numbered = ["Q", "IQ", "TQ"].iter().any(|kind| {
        let rest = part.strip_prefix(kind).unwrap_or_default();
        rest.starts_with(|c: char| c.is_ascii_digit()) && (rest.contains('_') || *kind != "Q" || rest.len() == 1)
    });
    numbered
        || part == "F16"
        || part == "F32"
        || part == "BF16"
        || part.starts_with("MXFP4")
        || part.starts_with("NVFP4")
}

/// Canonical spelling of a quantisation.
fn normal(quant: &str) -> String {
    match quant.to_ascii_uppercase().as_str() {
        "FP16" => "F16".into(),
        "FP32" => "F32".into(),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(paths: &[&str], address: &str) -> Result<Vec<String>, String> {
        let files: Vec<RepoFile> =
            paths.iter().map(|path| RepoFile { path: path.to_string(), size: None, digest: None }).collect();
        match choose(&files, &address.parse().unwrap()) {
            Ok(ModelFiles::Gguf(model)) => Ok(super::paths(&model.files())),
            Ok(ModelFiles::Folder(folder)) => Ok([super::paths(&folder.texts), super::paths(&folder.weights)].concat()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn vision_encoder_comes_with_a_gguf_model() {
        let found = |paths: &[&str]| {
            let files = paths.iter().map(|path| RepoFile { path: path.to_string(), size: None, digest: None });
            let files: Vec<RepoFile> = files.collect();
            let model = gguf_models(&files).into_iter().next().unwrap();
            vision_file(&files, &model).map(|file| file.path)
        };
        assert_eq!(found(&["m-Q4_K_M.gguf"]), None);
        assert_eq!(found(&["m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"]).as_deref(), Some("mmproj-m-Q8_0.gguf"));
        let several = ["m-Q4_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "mmproj-F16.txt"];
        assert_eq!(found(&several).as_deref(), Some("mmproj-F16.gguf"));
        assert_eq!(found(&["q4/m-Q4_0.gguf", "mmproj-F16.gguf"]), None, "in another folder");
    }

    #[test]
    fn quantisation_is_read_from_the_file_name() {
        for (name, want) in [
            ("Qwen3-0.6B-Q8_0", Some("Q8_0")),
            ("tinyllama-1.1b-chat-v1.0.Q4_K_M", Some("Q4_K_M")),
            ("qwen2.5-0.5b-instruct-q4_k_m", Some("Q4_K_M")),
            ("gemma-4-E2B-it-UD-Q4_K_XL", Some("UD-Q4_K_XL")),
            ("Phi-3-mini-4k-instruct-fp16", Some("F16")),
            ("Q8_0/Llama-3-70B-BF16", Some("BF16")),
            ("Llama-3.2-1B-IQ4_XS", Some("IQ4_XS")),
            ("Phi-3-mini-4k-instruct-q4", Some("Q4")),
            ("gpt-oss-20b-mxfp4", Some("MXFP4")),
            ("Qwen3-Q4B", None),
            ("stories15M", None),
        ] {
            assert_eq!(quant(name).as_deref(), want, "{name}");
        }
    }

    #[test]
    fn default_or_named_quantisation_is_chosen() {
        let files =
            ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf", "mmproj-m-Q4_K_M.gguf", "m.imatrix.gguf"];
        assert_eq!(chosen(&files, "hf:a/b").unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&files, "hf:a/b:q8_0").unwrap(), ["m-Q8_0.gguf"]);
        assert_eq!(chosen(&files, "hf:a/b:fp16").unwrap(), ["m-F16.gguf"]);
        assert_eq!(chosen(&files, "hf:a/b/mmproj-m-Q4_K_M.gguf").unwrap(), ["mmproj-m-Q4_K_M.gguf"]);
        let unknown = chosen(&files, "hf:a/b:Q5_K_M").unwrap_err();
        assert_eq!(unknown, "hf:a/b:Q5_K_M: no Q5_K_M; there are F16, Q4_K_M, Q8_0");
        assert_eq!(chosen(&["only.gguf"], "hf:a/b").unwrap(), ["only.gguf"]);
        // The plain form precedes the dynamic quantisation.
        let both = ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"];
        assert_eq!(chosen(&both, "hf:a/b:Q4_K_M").unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&both, "hf:a/b:ud-q4_k_m").unwrap(), ["m-UD-Q4_K_M.gguf"]);
    }

    #[test]
    fn ambiguous_choice_lists_its_candidates() {
        let files = ["small-Q4_0.gguf", "large-Q4_0.gguf", "large-Q8_0.gguf"];
        let several = chosen(&files, "hf:a/b").unwrap_err();
        assert!(several.ends_with("there are large-Q4_0.gguf, small-Q4_0.gguf"), "{several}");
        assert!(chosen(&files, "hf:a/b:Q4_0").unwrap_err().contains("several files would do"));
        assert_eq!(chosen(&files, "hf:a/b:Q8_0").unwrap(), ["large-Q8_0.gguf"]);
        assert_eq!(chosen(&files, "hf:a/b/small-Q4_0.gguf").unwrap(), ["small-Q4_0.gguf"]);
        let unnamed = chosen(&["m-Q2_K.gguf", "m-Q3_K_S.gguf"], "hf:a/b").unwrap_err();
        assert!(unnamed.ends_with("there are Q2_K, Q3_K_S"), "{unnamed}");
    }

    #[test]
    fn shards_are_chosen_only_as_a_complete_set() {
        let files = ["q8/m-Q8_0-00002-of-00002.gguf", "q8/m-Q8_0-00001-of-00002.gguf", "m-F16-00001-of-00003.gguf"];
        let both = ["q8/m-Q8_0-00001-of-00002.gguf", "q8/m-Q8_0-00002-of-00002.gguf"];
        assert_eq!(chosen(&files, "hf:a/b").unwrap(), both);
        assert_eq!(chosen(&files, "hf:a/b/q8").unwrap(), both);
        assert_eq!(chosen(&files, "hf:a/b/q8/m-Q8_0-00002-of-00002.gguf").unwrap(), both);
        assert!(chosen(&files, "hf:a/b:F16").unwrap_err().ends_with("no F16; there is Q8_0"));
        assert!(chosen(&files, "hf:a/b/m-F16-00001-of-00003.gguf").unwrap_err().contains("are missing"));
    }

    #[test]
    fn safetensors_folder_is_chosen_without_a_gguf_file() {
        let files = ["config.json", "tokenizer.json", "model.safetensors", "onnx/model.onnx", "pytorch_model.bin"];
        assert_eq!(chosen(&files, "hf:a/b").unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
        let with_head = [&files[..], &["sparse_linear.pt"]].concat();
        assert!(chosen(&with_head, "hf:a/b").unwrap().contains(&"sparse_linear.pt".to_owned()));
        let adapters = ["adapters/retrieval/adapter_config.json", "adapters/retrieval/adapter_model.safetensors"];
        let with_adapters = [&files[..], &adapters, &["adapters/retrieval/README.md", "adapters/x.py"]].concat();
        assert_eq!(chosen(&with_adapters, "hf:a/b").unwrap()[2..4], adapters);
        assert!(chosen(&files, "hf:a/b:Q4_0").unwrap_err().contains("is in safetensors"));
        assert!(chosen(&["config.json", "pytorch_model.bin"], "hf:a/b").unwrap_err().contains("neither a GGUF file"));
        assert!(chosen(&files, "hf:a/b/config.json").unwrap_err().contains("no GGUF file"));
        assert!(chosen(&files, "hf:a/b/other").is_err());
    }
}
