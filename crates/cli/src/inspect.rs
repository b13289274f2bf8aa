//! `tilewright inspect`: metadata, tensors and memory plan of a model file.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Map, json};
use tilewright::formats::TensorInfo;
use tilewright::formats::gguf::{Gguf, Value};
use tilewright::formats::safetensors::Safetensors;
use tilewright::generate::Streaming;
use tilewright::load::{FileBytes, ModelFile, ModelShape, VisionFile};
use tilewright::{Device, Embedder, Error, LoadOptions, MemoryPlan, Model, Reranker, VisionEncoder, VisionOptions};

use super::run::{PrecisionArgs, streaming_lines, within_limit};
use super::{CommandFailure, DeviceArgs, parse_bytes, print_json, show_bytes};

#[derive(Args)]
pub struct InspectArgs {
    /// GGUF or safetensors file, Hugging Face folder, or hf:OWNER/REPO[:QUANTISATION] [default: the built-in model].
    pub file: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Context length of the memory plan [default: the model's, at most 4096].
    ///
    /// The plan of a text encoder is for a full batch instead.
    #[arg(long, value_name = "N")]
    ctx: Option<u32>,
    /// Memory limit, such as 512M or 24G, to show which weights would be read from disk.
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    memory_limit: Option<u64>,
    #[command(flatten)]
    precision: PrecisionArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Contents of the files, independent of the model's architecture.
#[derive(Default)]
struct FileSummary {
    metadata: Vec<(String, serde_json::Value)>,
    tensors: Vec<TensorInfo>,
}

/// A vision encoder, and the memory of its weights and of the largest picture.
struct Vision {
    path: PathBuf,
    encoder: VisionEncoder,
    plan: MemoryPlan,
}

impl Vision {
    /// The encoder in this file or folder, or the one beside this model.
    fn of(device: &Device, path: &Path) -> Result<Option<Vision>, Error> {
        let path = match VisionFile::open(path) {
            Ok(_) => path.to_owned(),
            Err(_) => match VisionFile::beside(path)? {
                Some(path) => path,
                None => return Ok(None),
            },
        };
        let encoder = VisionEncoder::load(device, &path, VisionOptions::default())?;
        let plan = encoder.plan(encoder.max_patches())?;
        Ok(Some(Vision { path, encoder, plan }))
    }

    fn as_json(&self) -> serde_json::Value {
        json!({
            "path": self.path,
            "max_rows": self.encoder.max_rows(),
            "memory": self.plan,
        })
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let MemoryPlan { weights_bytes, activations_bytes, .. } = self.plan;
        let [weights, activations] = [weights_bytes, activations_bytes].map(show_bytes);
        writeln!(out, "pictures: up to {} rows each, by {}", self.encoder.max_rows(), self.path.display())?;
        writeln!(
            out,
            "memory of pictures: {} = weights {weights} + activations {activations}",
            show_bytes(self.plan.total_bytes()),
        )
    }
}

pub fn inspect(args: &InspectArgs) -> Result<(), CommandFailure> {
    let content = match &args.file {
        Some(path) => read(path)?,
        None => gguf(ModelFile::BUILTIN)?,
    };
    let file = match &args.file {
        Some(path) => ModelFile::open(path),
        None => ModelFile::builtin(),
    };
    // A file that cannot be run is still shown, with the error in place of the plan.
    let device = args.device.open()?;
    let PrecisionArgs { kv_type, exact } = args.precision;
    let options = LoadOptions { kv_type, exact, ..LoadOptions::default() };
    let mut streaming = None;
    let plan = file.and_then(|file| match &file.header.shape {
        ModelShape::Decoder(config) => {
            let context_length = args.ctx.map(|asked| within_limit(asked, config.max_seq_len));
            let options = LoadOptions { context_length, ..options };
            if args.memory_limit.is_none() {
                return Model::plan_file(&device.model_target(options.exact), &file, &options);
            }
            let options = LoadOptions { memory_limit: args.memory_limit, stream_layers: true, ..options };
            let (plan, found) = Model::plan_within(&device, file, &options)?;
            streaming = found;
            Ok(plan)
        }
        ModelShape::Encoder(shape) if shape.ranks() => Reranker::plan_file(&device, file),
        ModelShape::Encoder(_) => Embedder::plan_file(&device, file),
    });
    let vision = match &args.file {
        Some(path) => Vision::of(&device, path),
        None => Ok(None),
    };
    if args.json {
        return print_json(&as_json(&content, (&plan, &streaming), &vision));
    }
    let mut out = io::stdout().lock();
    for (key, value) in &content.metadata {
        // Strings are printed without JSON quotes.
        match value.as_str() {
            Some(text) => writeln!(out, "{key:<44} {text}")?,
            None => writeln!(out, "{key:<44} {value}")?,
        }
    }
    writeln!(out)?;
    let mut total = 0;
    for tensor in &content.tensors {
        total += tensor.size_bytes;
        let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
        let size = show_bytes(tensor.size_bytes);
        writeln!(out, "{:<44} {:<6} {shape:>16} {size:>12}", tensor.name, tensor.block_type)?;
    }
    writeln!(out, "\n{} tensors, {}", content.tensors.len(), show_bytes(total))?;
    match plan {
        Ok(plan) => writeln!(
            out,
            "memory: {} = weights {} + cache {} + activations {}",
            show_bytes(plan.total_bytes()),
            show_bytes(plan.weights_bytes),
            show_bytes(plan.cache_bytes),
            show_bytes(plan.activations_bytes)
        )?,
        // An encoder alone.
        Err(_) if matches!(&vision, Ok(Some(vision)) if vision.path.is_file() && Some(&vision.path) == args.file.as_ref()) =>
            {}
        Err(error) => writeln!(out, "cannot be run: {error}")?,
    }
    for line in streaming.iter().flat_map(streaming_lines) {
        writeln!(out, "{line}")?;
    }
    match &vision {
        Ok(Some(vision)) => vision.print(&mut out)?,
        Ok(None) => {}
        Err(error) => writeln!(out, "reads no pictures: {error}")?,
    }
    Ok(out.flush()?)
}

fn as_json(
    content: &FileSummary,
    (plan, streaming): (&Result<MemoryPlan, Error>, &Option<Streaming>),
    vision: &Result<Option<Vision>, Error>,
) -> serde_json::Value {
    let metadata: Map<String, serde_json::Value> = content.metadata.iter().cloned().collect();
    let tensors: Vec<_> = content
        .tensors
        .iter()
        .map(|tensor| {
            json!({
                "name": tensor.name,
                "type": tensor.block_type.name(),
                "shape": tensor.shape,
                "offset": tensor.offset,
                "size_bytes": tensor.size_bytes,
            })
        })
        .collect();
    let (plan, error) = match plan {
        Ok(plan) => (Some(plan), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let vision = match vision {
        Ok(vision) => json!(vision.as_ref().map(Vision::as_json)),
        Err(error) => json!({"error": error.to_string()}),
    };
    json!({
        "metadata": metadata,
        "tensors": tensors,
        "memory": plan,
        "streaming": streaming,
        "error": error,
        "vision": vision,
    })
}

/// Reads headers only; for a folder, those of all its safetensors files.
fn read(path: &Path) -> Result<FileSummary, Error> {
    let is_safetensors = |path: &Path| path.extension().is_some_and(|ext| ext == "safetensors");
    if path.is_dir() {
        let io = |source| Error::Io { path: path.into(), source };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path).map_err(io)? {
            files.push(entry.map_err(io)?.path());
        }
        files.retain(|file| is_safetensors(file));
        files.sort();
        let mut content = FileSummary::default();
        for file in files {
            let part = read(&file)?;
            content.metadata.extend(part.metadata);
            content.tensors.extend(part.tensors);
        }
        return Ok(content);
    }
    let bytes = FileBytes::map(path)?;
    if !is_safetensors(path) {
        // Opening the model tells more, such as that the file is cut off.
        return gguf(&bytes).map_err(|error| ModelFile::open(path).err().unwrap_or_else(|| error.in_file(path)));
    }
    let file = Safetensors::parse(&bytes, bytes.len() as u64).map_err(|e| e.in_file(path))?;
    let metadata = file.metadata.into_iter().map(|(key, value)| (key, value.into())).collect();
    Ok(FileSummary { metadata, tensors: file.tensors })
}

fn gguf(bytes: &[u8]) -> Result<FileSummary, Error> {
    let file = Gguf::parse(bytes, bytes.len() as u64)?;
    let metadata = file.metadata.iter().map(|(key, value)| (key.to_string(), plain(value))).collect();
    Ok(FileSummary { metadata, tensors: file.tensors })
}

/// A metadata value as JSON; arrays, which may be whole vocabularies, as a summary.
fn plain(value: Value<'_>) -> serde_json::Value {
    if let Some(flag) = value.as_bool() {
        return flag.into();
    }
    if let Some(text) = value.as_str() {
        return text.into();
    }
    if let Some(number) = value.as_integer().and_then(|n| i64::try_from(n).ok()) {
        return number.into();
    }
    value.as_float().map_or_else(|| value.to_string().into(), Into::into)
}
