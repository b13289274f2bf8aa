//! Hugging Face folders as GGUF files: names, row order and keys as in llama.cpp's converter.
//!
//! Keys are written from the folder's configuration and read back: a folder that GGUF cannot describe is refused
//! before anything is written.

use std::path::Path;

use super::plan::{ConvertPlan, PlannedTensor, Target, Targets, set_type, written};
use super::recipe::ModelTraits;
use super::{Order, QuantizeOptions, vocab};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::{DEFAULT_ALIGNMENT, Gguf, Value, ValueType};
use crate::formats::gguf_writer::GgufHeader;
use crate::formats::{BlockType, TensorInfo};
use crate::kernels::{RopeScaling, RopeStyle, rope_table};
use crate::load::architectures::Architecture;
use crate::load::huggingface::{CONFIG, read};
use crate::load::tensor_index::FileLayout;
use crate::load::{FileBytes, ModelFile, ModelShape, gguf};
use crate::model::{ModelConfig, WeightSource};

/// Supported architectures. Others need their own keys and rules.
const KNOWN: [&str; 6] = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"];
const ROPE_FREQS: &str = "rope_freqs.weight";

/// The plan of the output for a folder.
pub(super) fn plan(input: &Path, options: &QuantizeOptions) -> Result<ConvertPlan, Error> {
    let folder = if input.is_dir() { input } else { input.parent().unwrap_or(Path::new(".")) };
    let ModelFile { header: model, files } = ModelFile::open(input)?;
    let in_folder = |error: Error| error.in_folder(folder);
    let json = ConfigJson::parse(&read(&folder.join(CONFIG))?).map_err(in_folder)?;
    let unsupported = |field: &str, found: String, supported: String| {
        in_folder(Error::Unsupported { format: "quantize", field: field.into(), found, supported })
    };
    let model_type = json.get_str("model_type").map_err(in_folder)?.unwrap_or_default();
    let architecture = Architecture::of_json(model_type).filter(|architecture| KNOWN.contains(&architecture.gguf));
    let (Some(architecture), ModelShape::Decoder(config)) = (architecture, &model.shape) else {
        let found = format!("`{}`", model_type.escape_debug());
        let supported = format!("folders of {}; GGUF files of any", KNOWN.join(", "));
        return Err(unsupported("model_type", found, supported));
    };
    let head_dim = config.blocks.first().map_or(0, |block| block.attention.head_dim);
    let order = match architecture.pairs {
        [in_gguf, in_json] if in_gguf == in_json => Order::Same,
        [RopeStyle::Interleaved, RopeStyle::Halves] if config.ropes.iter().all(|rope| rope.rot_dims == head_dim) => {
            Order::Pairs(head_dim as usize)
        }
        _ => {
            let rot_dims = config.ropes.first().map_or(0, |rope| rope.rot_dims);
            let supported = format!("{head_dim}, all elements of a head");
            return Err(unsupported("rotated elements of a head", rot_dims.to_string(), supported));
        }
    };

    let mut header = GgufHeader::new(DEFAULT_ALIGNMENT);
    set_keys(&mut header, architecture.gguf, &model.name, config)?;
    match vocab::of_folder(folder, &model.tokenizer, config.vocab_size).map_err(in_folder)? {
        Some(vocab) => vocab::set(&mut header, &vocab)?,
        None => header.set("tokenizer.ggml.model", Value::Str("no_vocab"))?,
    }
    model.chat.write(&mut header)?;
    set_type(&mut header, options)?;

    let tied = json.get_bool("tie_word_embeddings").map_err(in_folder)?.unwrap_or(architecture.tied);
    let mut plan = ConvertPlan { header, tensors: vec![], files, paths: vec![folder.to_owned()] };
    plan.paths.resize(plan.files.len(), folder.to_owned());
    let mut factors = gguf::ConfigData::default();
    if let Some(rope) = config.ropes.first()
        && matches!(rope.scaling, RopeScaling::Llama3 { .. })
    {
        let found = llama3_factors(config);
        let data: Vec<u8> = found.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        let (name, shape) = (ROPE_FREQS.to_owned(), vec![found.len() as u64]);
        let size_bytes = data.len() as u64;
        let source = TensorInfo { name, shape, block_type: BlockType::F32, offset: 0, size_bytes };
        let written = written(
            &mut plan.header,
            ROPE_FREQS,
            &source.shape,
            BlockType::F32,
            Target::plain(BlockType::F32),
            options,
        )?;
        let file = plan.files.len();
        factors.push((ROPE_FREQS.to_owned(), data.clone()));
        plan.files.push(FileBytes::Owned(data));
        plan.paths.push(folder.to_owned());
        let (stored, order) = (FileLayout::AsRead, Order::Same);
        plan.tensors.push(PlannedTensor { written, file, source, stored, order, adds_one: false });
    }
    let mut entries: Vec<_> = model.tensor_index.entries().collect();
    entries.sort_by_key(|&(_, file, source, _)| (file, source.offset));
    entries.retain(|&(name, ..)| name != "output.weight" || !tied);
    let shape_of = |name: &str| model.tensor_index.describe(name).map(|tensor| tensor.shape).unwrap_or_default();
    let shapes: Vec<Vec<u64>> = entries.iter().map(|&(name, ..)| shape_of(name)).collect();
    let described = entries.iter().zip(&shapes).map(|(&(name, ..), shape)| (name, shape.as_slice()));
    let targets = Targets::new(options, &ModelTraits::of_config(architecture.gguf, config), described);
    for ((name, file, source, stored), shape) in entries.into_iter().zip(&shapes) {
        let target = targets.get(name, shape).unwrap_or(Target::plain(BlockType::F32));
        let written = written(&mut plan.header, name, shape, source.block_type, target, options).map_err(in_folder)?;
        let is_rotated = [".attn_q.", ".attn_k."].iter().any(|part| name.contains(part));
        let order = if is_rotated { order } else { Order::Same };
        let adds_one = stored == FileLayout::LessOne;
        plan.tensors.push(PlannedTensor { written, file, source: source.clone(), stored, order, adds_one });
    }
    check(&plan, config, &factors).map_err(in_folder)?;
    Ok(plan)
}

/// Llama 3's frequency divisors, which GGUF stores as a tensor.
fn llama3_factors(config: &ModelConfig) -> Vec<f32> {
    let Some(rope) = config.ropes.first() else { return vec![] };
    let &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq_len } = &rope.scaling else {
        return vec![];
    };
    let of_pair = |i: u32| {
        let frequency = rope.theta.powf(-f64::from(2 * i) / f64::from(rope.rot_dims));
        let turns = original_max_seq_len * frequency / std::f64::consts::TAU;
        let share = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        (1.0 / (share + (1.0 - share) / factor)) as f32
    };
    (0..rope.rot_dims / 2).map(of_pair).collect()
}

/// Sets the model's keys, named as in GGUF's specification and llama.cpp's converter.
fn set_keys(header: &mut GgufHeader, architecture: &str, name: &str, config: &ModelConfig) -> Result<(), Error> {
    header.set("general.architecture", Value::Str(architecture))?;
    header.set("general.type", Value::Str("model"))?;
    header.set("general.name", Value::Str(name))?;
    let mut set = |key: &str, value: Value<'_>| header.set(&format!("{architecture}.{key}"), value);
    let (Some(block), Some(rope)) = (config.blocks.first(), config.ropes.first()) else {
        return Err(gguf::missing("block_count"));
    };
    let attention = &block.attention;
    set("block_count", Value::U32(config.blocks.len() as u32))?;
    set("context_length", Value::U32(config.max_seq_len))?;
    set("embedding_length", Value::U32(config.dim))?;
    set("feed_forward_length", Value::U32(block.feed_forward.dim))?;
    set("attention.head_count", Value::U32(attention.n_heads))?;
    set("attention.head_count_kv", Value::U32(attention.n_kv_heads))?;
    set("attention.layer_norm_rms_epsilon", Value::F32(config.norm_eps))?;
    set("attention.key_length", Value::U32(attention.head_dim))?;
    set("attention.value_length", Value::U32(attention.head_dim))?;
    set("vocab_size", Value::U32(config.vocab_size))?;
    set("rope.dimension_count", Value::U32(rope.rot_dims))?;
    set("rope.freq_base", Value::F32(rope.theta as f32))?;
    if let Some(local) = config.ropes.get(1) {
        set("rope.freq_base_swa", Value::F32(local.theta as f32))?;
    }
    match rope.scaling {
        RopeScaling::Linear { factor } => {
            set("rope.scaling.type", Value::Str("linear"))?;
            set("rope.scaling.factor", Value::F32(factor as f32))?;
        }
        RopeScaling::Yarn { factor, original_max_seq_len, .. } => {
            set("rope.scaling.type", Value::Str("yarn"))?;
            set("rope.scaling.factor", Value::F32(factor as f32))?;
            set("rope.scaling.original_context_length", Value::U32(original_max_seq_len as u32))?;
        }
        _ => {}
    }
    if let Some(window) = config.blocks.iter().find_map(|block| block.attention.window) {
        set("attention.sliding_window", Value::U32(window))?;
    }
    if let Some(cap) = attention.soft_cap {
        set("attn_logit_softcapping", Value::F32(cap))?;
    }
    if let Some(cap) = config.logit_soft_cap {
        set("final_logit_softcapping", Value::F32(cap))?;
    }
    Ok(())
}

/// Reads the header back as a GGUF file and compares the result with the folder's configuration.
fn check(plan: &ConvertPlan, config: &ModelConfig, factors: &gguf::ConfigData) -> Result<(), Error> {
    // The only data read are the factors, given separately.
    let header = plan.header.to_bytes();
    let gguf = Gguf::parse(&header, crate::formats::UNKNOWN_LEN)?;
    let read = gguf::header("", vec![gguf], factors)?;
    let found = read.shape.config();
    let mut want = config.clone();
    want.architecture.clone_from(&found.architecture);
    for (want, found) in want.ropes.iter_mut().zip(&found.ropes) {
        // Rows are written in interleaved order. Scalings are compared by their RoPE tables.
        want.style = found.style;
        let tables = [&*want, found].map(|rope| rope_table(rope, 64));
        if tables[0].iter().zip(&tables[1]).all(|(a, b)| (a - b).abs() < 1e-4) {
            (want.scaling, want.theta) = (found.scaling.clone(), found.theta);
        }
    }
    let different = |field: &str, want: String, found: String| {
        Err(Error::Unsupported {
            format: "quantize",
            field: field.into(),
            found: format!("{want} in the folder"),
            supported: format!("in GGUF files of this architecture {found}"),
        })
    };
    for (want, found) in want.blocks.iter().zip(&found.blocks) {
        let (want, found) = (&want.attention, &found.attention);
        if (want.scale - found.scale).abs() > 1e-6 {
            return different(
                "query_pre_attn_scalar",
                (1.0 / want.scale.powi(2)).to_string(),
                (1.0 / found.scale.powi(2)).to_string(),
            );
        }
        if want.window != found.window {
            return different("sliding_window", format!("{:?}", want.window), format!("{:?}", found.window));
        }
    }
    match want == *found {
        true => Ok(()),
        false => different("config.json", format!("{want:?}"), format!("{found:?}")),
    }
}

/// Sets an array of strings.
pub(super) fn set_texts(header: &mut GgufHeader, key: &str, texts: &[String]) -> Result<(), Error> {
    header.set_array(key, ValueType::String, texts.iter().map(|text| Value::Str(text)))
}
