//! JSON format of a tuning, valid only for the program, adapter and driver that it was written for. Natively it is a
//! file named after adapter and tier.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::cache;
use crate::device::Device;
use crate::device::DeviceInfo;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::shaders::{self, Tier, Variant};
use crate::target::{Bucket, Choice, PlaceKey, TileForm, Tuning};
use crate::tested::TestResults;
use crate::tested::Tested;

/// Maximum file size: far more than all buckets need.
const MAX_BYTES: u64 = 4 << 20;

#[derive(Serialize, Deserialize)]
struct TuningContent {
    passed: Vec<String>,
    banned: BTreeMap<String, String>,
    choices: Vec<ChoiceRow>,
    #[serde(default)]
    places: Vec<PlaceRow>,
    #[serde(default)]
    operations_rate: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct PlaceRow {
    encoder: String,
    second: String,
    tokens: u32,
    texts: u32,
    is_second: bool,
}

#[derive(Serialize, Deserialize)]
struct ChoiceRow {
    kernel: String,
    weight: String,
    rows: u32,
    blocks: u32,
    tokens: u32,
    /// Both are missing where the usual choice is the fastest.
    tier: Option<String>,
    size: Option<u32>,
    #[serde(default)]
    form: TileForm,
}

/// The device's file in the cache folder.
fn path(folder: &Path, info: &DeviceInfo) -> PathBuf {
    let name = info.name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
    let name = name.collect::<Vec<_>>().join("-").to_ascii_lowercase();
    folder.join(format!("{}-{name}.{}.tuning.json", info.backend, info.tier))
}

/// Separates a text from its digest.
const DIGEST: &str = ",\n  \"digest\": \"";

/// What a tuning is valid for. The fingerprint covers the shaders, which may change without a new version, and so
/// may their compiler for the driver, with bounds checks or without.
fn identity(info: &DeviceInfo) -> Map<String, Value> {
    let fields = [
        ("format", json!(2)),
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("shaders", json!(shaders::FINGERPRINT)),
        ("compiler", json!(shaders::COMPILER)),
        ("checked", json!(crate::gpu::checked())),
        ("adapter", json!(info.name)),
        ("backend", json!(info.backend)),
        ("driver", json!(info.driver)),
        ("tier", json!(info.tier)),
    ];
    fields.into_iter().map(|(field, value)| (field.to_string(), value)).collect()
}

/// A device with its tuning from a file in a folder, and the path for saving.
pub(crate) fn from_folder(device: &Device, folder: &Path) -> Device {
    let path = path(folder, device.info());
    let (known, notices) = match read(&path, device.info()) {
        Ok(known) => (known.unwrap_or_default(), Vec::new()),
        Err(why) => (Default::default(), vec![format!("{} is ignored: {why}", path.display())]),
    };
    let (tuning, found) = known;
    device.with_known(tuning, Arc::new(Tested::new(found)), Some(path), notices)
}

/// The tuning in the device's file, which may be newer than its own; its own if the file has none for it.
pub(super) fn latest(device: &Device) -> Tuning {
    let known = device.tuning_file().and_then(|path| read(path, device.info()).unwrap_or_default());
    let mut tuning = device.tuning().clone();
    if let Some((known, _)) = known {
        tuning.add_missing(&known);
    }
    tuning
}

/// A file beside the device's that is there while products are measured: if it is found by a later load, the driver has
/// ended the process. `None` if the device has no file.
pub(super) fn marker(device: &Device) -> Option<PathBuf> {
    device.tuning_file().map(|path| path.with_extension("measuring"))
}

/// Reads a file; `None` if it does not exist.
///
/// # Errors
/// Why the file is unusable.
fn read(path: &Path, info: &DeviceInfo) -> Result<Option<(Tuning, TestResults)>, String> {
    let size_bytes = match std::fs::metadata(path) {
        // If the path is blocked otherwise, writing reports it.
        Err(_) => return Ok(None),
        Ok(metadata) => metadata.len(),
    };
    if size_bytes > MAX_BYTES {
        return Err(format!("it has {size_bytes} bytes, expected at most {MAX_BYTES}"));
    }
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    let known = Tuning::parse(&bytes, info)?;
    let at = bytes.windows(DIGEST.len()).rposition(|part| part == DIGEST.as_bytes());
    let (body, digest) = bytes.split_at(at.ok_or("it has no digest")?);
    match digest[DIGEST.len()..].starts_with(format!("{}\"", cache::digest(body)).as_bytes()) {
        true => Ok(Some(known)),
        false => Err("its digest does not match".into()),
    }
}

/// A text with its digest appended as the last field.
fn sealed(text: &str) -> String {
    let body = text.trim_end_matches("\n}\n");
    format!("{body}{DIGEST}{}\"\n}}\n", cache::digest(body.as_bytes()))
}

/// Saves the device's tuning and self-test results to its file, if it has one, merged with other processes' results.
/// Adds `tuning` to the file's; if that is `None`, keeps the file's, or writes the device's own if there is no file.
///
/// # Errors
/// [`Error::Io`] if the file cannot be written.
pub(crate) fn write(device: &Device, tuning: Option<&Tuning>) -> Result<(), Error> {
    let Some(path) = device.tuning_file() else { return Ok(()) };
    let kept = read(path, device.info()).unwrap_or_default();
    let mut found = device.tested().found();
    let mut tuning = tuning.cloned();
    if let Some((kept, theirs)) = &kept {
        found.passed.extend(theirs.passed.iter().cloned());
        found.banned.extend(theirs.banned.clone());
        tuning.get_or_insert_default().add_missing(kept);
    }
    let tuning = tuning.as_ref().unwrap_or(device.tuning());
    cache::write(path, sealed(&tuning.text(device.info(), &found)).as_bytes())
}

impl Tuning {
    /// A device's tuning and self-test results as JSON.
    pub(crate) fn text(&self, info: &DeviceInfo, found: &TestResults) -> String {
        let row = |(bucket, choice): (Bucket, Option<Choice>)| ChoiceRow {
            kernel: bucket.kernel.into(),
            weight: bucket.weight.name().into(),
            rows: bucket.rows,
            blocks: bucket.blocks,
            tokens: bucket.tokens,
            tier: choice.map(|choice| choice.tier.name().into()),
            size: choice.map(|choice| choice.size),
            form: choice.map(|choice| choice.form).unwrap_or_default(),
        };
        let place = |(key, is_second): (&PlaceKey, bool)| PlaceRow {
            encoder: key.encoder.clone(),
            second: key.second.clone(),
            tokens: key.n_tokens,
            texts: key.n_texts,
            is_second,
        };
        let content = TuningContent {
            passed: found.passed.iter().cloned().collect(),
            banned: found.banned.iter().map(|(label, found)| (label.to_string(), found.clone())).collect(),
            choices: self.measured().map(row).collect(),
            places: self.places().map(place).collect(),
            operations_rate: self.operations_rate(),
        };
        let mut fields = identity(info);
        if let Value::Object(content) = json!(content) {
            fields.extend(content);
        }
        format!("{:#}\n", Value::Object(fields))
    }

    /// Parses JSON from [`Tuning::text`] for this device.
    ///
    /// # Errors
    /// Why the text is unusable.
    pub(crate) fn parse(text: &[u8], info: &DeviceInfo) -> Result<(Tuning, TestResults), String> {
        let value: Value = serde_json::from_slice(text).map_err(|e| format!("it is not JSON: {e}"))?;
        for (field, expected) in identity(info) {
            let found = &value[&field];
            if *found != expected {
                return Err(format!("its {field} is {found}, expected {expected}"));
            }
        }
        let content: TuningContent = serde_json::from_value(value).map_err(|e| e.to_string())?;
        known(content)
    }
}

/// Converts a text's content. Every value must be one that [`Tuning::text`] could write.
fn known(content: TuningContent) -> Result<(Tuning, TestResults), String> {
    let (mut tuning, mut found) = (Tuning::default(), TestResults::default());
    tuning.set_operations_rate(content.operations_rate);
    for pipeline in content.passed {
        variant(pipeline.split(' ').next().unwrap_or_default())?;
        found.passed.insert(pipeline);
    }
    for (label, why) in content.banned {
        let variant = variant(&label)?;
        if variant.tier == Tier::Baseline {
            return Err(format!("`{label}` is banned, but has no replacement"));
        }
        found.banned.insert(variant.label, why);
    }
    for row in content.choices {
        let kernel = shaders::ALL.iter().find(|kernel| kernel.name == row.kernel);
        let weight = WeightType::ALL.into_iter().find(|weight| weight.name() == row.weight);
        let (Some(kernel), Some(weight)) = (kernel, weight) else {
            return Err(format!("unknown kernel {} {}", row.kernel, row.weight));
        };
        let choice = match (row.tier, row.size) {
            (None, None) => None,
            (Some(name), Some(size)) => {
                let tier = Tier::ALL.into_iter().find(|tier| tier.name() == name);
                let tier = tier.ok_or_else(|| format!("unknown tier {name}"))?;
                if !size.is_power_of_two() || size > 256 {
                    return Err(format!("a size is {size}, expected a power of two up to 256"));
                }
                Some(Choice { tier, size, form: row.form })
            }
            _ => return Err("a choice lacks its tier or size".into()),
        };
        let bucket = Bucket { kernel: kernel.name, weight, rows: row.rows, blocks: row.blocks, tokens: row.tokens };
        tuning.choose(bucket, choice);
    }
    for PlaceRow { encoder, second, tokens, texts, is_second } in content.places {
        tuning.put(PlaceKey { encoder, second, n_tokens: tokens, n_texts: texts }, is_second);
    }
    Ok((tuning, found))
}

fn variant(label: &str) -> Result<&'static Variant, String> {
    let mut all = shaders::ALL.iter().flat_map(|kernel| kernel.variants);
    all.find(|variant| variant.label == label).ok_or_else(|| format!("there is no shader variant `{label}`"))
}
