//! Tasks that an encoder has adapters for: Jina's embeddings 3 (Sturua et al. 2024,
//! arXiv:2409.10173), with the factors of all tasks beside each weight, and 5 (Akram et al. 2026, arXiv:2602.15547),
//! with an adapter in a folder for each.

use std::borrow::Cow;

use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::config_json::ConfigJson;
use crate::formats::safetensors::Safetensors;

/// The folder of adapters.
#[cfg(any(feature = "hub", feature = "lora"))]
pub(crate) const ADAPTERS: &str = "adapters";
/// `model_type` of folders whose weights lack an adapter.
const UNMERGED: &str = "jina_embeddings_v5";
/// Where a matrix with factors beside it is.
const PARAMETRIZED: &str = ".parametrizations.weight.";

/// The tasks that an encoder has adapters for.
#[derive(Clone, Debug, PartialEq)]
pub struct Tasks {
    /// Their names: `lora_adaptations`, or `task_names`.
    pub names: Vec<String>,
    pub(super) place: Place,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Place {
    /// A PEFT folder each.
    Folders,
    /// Factors of all tasks, `[tasks, ..]`, with the numbers of their files.
    Stacked { factors: Vec<(usize, TensorInfo)>, alpha: f32 },
}

impl Tasks {
    /// The tasks of a folder whose weight files have these headers.
    ///
    /// # Errors
    /// [`Error::Config`] for a key of another type, for a task whose name is not one of a folder, and for factors of
    /// tasks without names.
    pub(super) fn of(json: &ConfigJson, weights: &[(String, Safetensors)]) -> Result<Option<Tasks>, Error> {
        if is_unmerged(json)? {
            let names = json.get_str_array("task_names")?.unwrap_or_default();
            if let Some(found) = names.iter().find(|name| !is_plain(name)) {
                let (expected, found) = ("names of folders".into(), format!("`{}`", found.escape_debug()));
                return Err(Error::Config { field: "task_names".into(), expected, found });
            }
            return Ok(Some(Tasks { names: names.into_iter().map(str::to_owned).collect(), place: Place::Folders }));
        }
        let names = json.get_str_array("lora_adaptations")?;
        let all = weights.iter().enumerate().flat_map(|(i, (_, header))| header.tensors.iter().map(move |t| (i, t)));
        let factors: Vec<_> = all.filter(|(_, tensor)| is_factor(&tensor.name)).map(|(i, t)| (i, t.clone())).collect();
        let Some(names) = names else {
            return match factors.first() {
                None => Ok(None),
                Some((_, tensor)) => Err(Error::Config {
                    field: "lora_adaptations".into(),
                    expected: format!(
                        "the names of the tasks that have factors, such as `{}`",
                        tensor.name.escape_debug()
                    ),
                    found: "missing".into(),
                }),
            };
        };
        let alpha = json.get_f32("lora_alpha")?.unwrap_or(1.0);
        let names = names.into_iter().map(str::to_owned).collect();
        Ok((!factors.is_empty()).then_some(Tasks { names, place: Place::Stacked { factors, alpha } }))
    }

    /// Refuses weights that lack an adapter.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(crate) fn check_merged(&self) -> Result<(), Error> {
        match self.place {
            Place::Stacked { .. } => Ok(()),
            Place::Folders => Err(Error::Unsupported {
                format: "config.json",
                field: "model_type".into(),
                found: format!("`{UNMERGED}`, whose adapters are in files of their own"),
                supported: "a folder on disk, or the model's repository for one task, such as \
                            jinaai/jina-embeddings-v5-text-nano-retrieval"
                    .into(),
            }),
        }
    }
}

/// Whether a name is a single path component. Windows ignores dots and spaces at the end.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.ends_with(['.', ' ']) && !name.contains(['/', '\\', ':', '\0'])
}

/// Whether a folder's weights lack an adapter.
///
/// # Errors
/// [`Error::Config`] for a key of another type.
pub(super) fn is_unmerged(json: &ConfigJson) -> Result<bool, Error> {
    Ok(json.get_str("model_type")? == Some(UNMERGED))
}

/// Whether a tensor is a factor for all tasks.
pub(super) fn is_factor(name: &str) -> bool {
    factor(name).is_some()
}

/// The module that a factor is for, and whether it is factor B of `b a`. Those of embeddings are named the other way
/// round.
pub(super) fn factor(name: &str) -> Option<(&str, bool)> {
    let (module, factor) = name.split_once(PARAMETRIZED)?;
    let is_b = match factor {
        "0.lora_A" => false,
        "0.lora_B" => true,
        _ => return None,
    };
    Some((module, is_b != module.contains("embeddings.")))
}

/// The name of a tensor without what surrounds one that has factors.
pub(super) fn plain_name(name: &str) -> Cow<'_, str> {
    match name.split_once(PARAMETRIZED) {
        Some((module, "original")) => Cow::Owned(format!("{module}.weight")),
        _ => Cow::Borrowed(name),
    }
}
