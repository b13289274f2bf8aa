//! The plan of an output file: keys, and tensors with their types.

use std::path::{Path, PathBuf};

use super::{Order, QuantizeOptions, WrittenTensor, folder, is_float, map};
use crate::error::Error;
use crate::formats::gguf::{Gguf, Value};
use crate::formats::gguf_writer::GgufHeader;
use crate::formats::{BlockType, TensorInfo};
use crate::load::FileBytes;
use crate::load::tensor_index::{FileLayout, check_type};
use crate::load::{gguf, is_of_folder, shards};

/// Plan of an output file.
pub(super) struct ConvertPlan {
    pub header: GgufHeader,
    /// Tensors in output order.
    pub tensors: Vec<PlannedTensor>,
    /// Input files and their paths.
    pub files: Vec<FileBytes>,
    pub paths: Vec<PathBuf>,
}

/// Plan of a tensor.
pub(super) struct PlannedTensor {
    pub written: WrittenTensor,
    /// Number of its input file.
    pub file: usize,
    pub source: TensorInfo,
    pub stored: FileLayout,
    pub order: Order,
    /// Whether to add 1 to each value.
    pub adds_one: bool,
}

impl PlannedTensor {
    /// Whether its bytes are copied unchanged.
    pub fn is_copied(&self) -> bool {
        self.source.block_type == self.written.to && !self.adds_one && self.order == Order::Same
    }
}

impl ConvertPlan {
    /// The plan for `input`.
    pub fn of(input: &Path, options: &QuantizeOptions) -> Result<ConvertPlan, Error> {
        match is_of_folder(input) {
            true => folder::plan(input, options),
            false => ConvertPlan::of_gguf(input, options).map_err(|error| error.in_file(input)),
        }
    }

    /// Merges all shards of a GGUF file.
    fn of_gguf(input: &Path, options: &QuantizeOptions) -> Result<ConvertPlan, Error> {
        let read = |path: &Path| {
            let (found, file) = map(path)?;
            let shard = Gguf::parse(&file, file.len() as u64).map_err(|error| error.in_file(path))?;
            Ok::<_, Error>((found, (file, shard)))
        };
        let one = read(input)?;
        let all = match gguf::n_shards(&one.1.1)? {
            1 => vec![one],
            n => shards::paths(input, n)?.iter().map(|path| read(path)).collect::<Result<_, _>>()?,
        };
        let (paths, read): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let (files, shards): (Vec<_>, Vec<_>) = read.into_iter().unzip();
        let Some(first) = shards.first() else { return Err(gguf::missing("split.count")) };
        let mut header = GgufHeader::new(first.alignment);
        // These two keys come last, as in llama.cpp.
        let replaced = ["general.quantization_version", "general.file_type"];
        for (key, value) in first.metadata.iter() {
            if !replaced.contains(&key) && !key.starts_with("split.") {
                header.set(key, value)?;
            }
        }
        set_type(&mut header, options)?;
        let mut tensors = Vec::new();
        for (file, shard) in shards.iter().enumerate() {
            for source in &shard.tensors {
                let kept = source.block_type;
                let target = target(&source.name, &source.shape, options.block_type);
                let to = target.unwrap_or(kept);
                if to != kept || is_float(to) {
                    check_type("gguf", source)?;
                }
                let written = written(&mut header, &source.name, &source.shape, kept, to, options)?;
                let (source, stored, order) = (source.clone(), FileLayout::AsRead, Order::Same);
                tensors.push(PlannedTensor { written, file, source, stored, order, adds_one: false });
            }
        }
        Ok(ConvertPlan { header, tensors, files, paths })
    }
}

/// Adds a tensor to the header and returns its description.
pub(super) fn written(
    header: &mut GgufHeader,
    name: &str,
    shape: &[u64],
    from: BlockType,
    to: BlockType,
    options: &QuantizeOptions,
) -> Result<WrittenTensor, Error> {
    let size_bytes = header.add_tensor(name, shape, to)?;
    let is_weighable = from != to && !is_float(to) && !matches!(to, BlockType::Q8_0 | BlockType::MXFP4);
    let importance = options.importance.as_ref().filter(|_| is_weighable).and_then(|all| all.get(name));
    // One value per column and expert.
    let n_matrices: u64 = shape.iter().rev().skip(2).product();
    let n_columns = shape.last().copied().unwrap_or_default() * n_matrices;
    let weighted = match importance {
        Some(importance) if importance.len() as u64 == n_columns => true,
        // An embedding table is not multiplied, so its measured importances are meaningless.
        Some(_) if name == "token_embd.weight" => false,
        None => false,
        Some(importance) => {
            return Err(Error::Config {
                field: format!("importance matrix of `{}`", name.escape_debug()),
                expected: format!("{n_columns} values, one per column"),
                found: importance.len().to_string(),
            });
        }
    };
    let fell_back = to != from && to != options.block_type && options.block_type.block_len() > 1 && shape.len() > 1;
    Ok(WrittenTensor { name: name.into(), shape: shape.into(), from, to, size_bytes, fell_back, weighted })
}

/// Sets the keys of the quantisation type.
pub(super) fn set_type(header: &mut GgufHeader, options: &QuantizeOptions) -> Result<(), Error> {
    header.set("general.quantization_version", Value::U32(2))?;
    header.set("general.file_type", Value::U32(file_type(options.block_type)))?;
    if let Some(importance) = &options.importance {
        header.set("quantize.imatrix.file", Value::Str(importance.file_name()))?;
        header.set("quantize.imatrix.entries_count", Value::U32(importance.len() as u32))?;
    }
    Ok(())
}

/// `general.file_type` for matrices of this type: `llama.h`'s number (`enum llama_ftype`) of its smallest mixture.
fn file_type(block_type: BlockType) -> u32 {
    match block_type {
        BlockType::F16 => 1,
        BlockType::Q4_0 => 2,
        BlockType::Q4_1 => 3,
        BlockType::Q8_0 => 7,
        BlockType::Q5_0 => 8,
        BlockType::Q5_1 => 9,
        BlockType::Q2_K => 10,
        BlockType::Q3_K => 11,
        BlockType::Q4_K => 14,
        BlockType::Q5_K => 16,
        BlockType::Q6_K => 18,
        BlockType::IQ4_NL => 25,
        BlockType::IQ4_XS => 30,
        BlockType::BF16 => 32,
        BlockType::MXFP4 => 38,
        _ => 0,
    }
}

/// The output type of a tensor for the requested type `wanted`; `None` if it keeps its own.
pub(super) fn target(name: &str, shape: &[u64], wanted: BlockType) -> Option<BlockType> {
    let has_blocks = |block_type: BlockType| shape.last().is_some_and(|row| row.is_multiple_of(block_type.block_len()));
    if !is_quantized(name, shape) {
        return None;
    }
    let fallback = match wanted {
        _ if has_blocks(wanted) => return Some(wanted),
        BlockType::Q2_K | BlockType::Q3_K => BlockType::Q4_0,
        BlockType::Q4_K => BlockType::Q5_0,
        BlockType::Q5_K => BlockType::Q5_1,
        BlockType::Q6_K => BlockType::Q8_0,
        BlockType::IQ4_XS => BlockType::IQ4_NL,
        other => other,
    };
    Some(if has_blocks(fallback) { fallback } else { BlockType::F16 })
}

/// Whether a tensor is a matrix to quantise. Excludes small control tensors (norms, routers, positions, convolutions)
/// and the exceptions that llama.cpp makes for other architectures.
fn is_quantized(name: &str, shape: &[u64]) -> bool {
    const KEPT: [&str; 35] = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ffn_gate_tid2eid.weight",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "ssm_conv1d",
        "shortconv.conv.weight",
        "indexer.k_proj.weight",
        "indexer.q_proj.weight",
        "time_mix_first.weight",
        "time_mix_w0.weight",
        "time_mix_w1.weight",
        "time_mix_w2.weight",
        "time_mix_v0.weight",
        "time_mix_v1.weight",
        "time_mix_v2.weight",
        "time_mix_a0.weight",
        "time_mix_a1.weight",
        "time_mix_a2.weight",
        "time_mix_g1.weight",
        "time_mix_g2.weight",
        "time_mix_decay_w1.weight",
        "time_mix_decay_w2.weight",
        "time_mix_lerp_fused.weight",
        "attn_rel_b.weight",
        ".position_embd",
        "sam.pos_embd",
        "sam.neck.",
        "sam.net_",
        ".rel_pos",
        ".patch_embd",
        ".patch_merger",
        "a.rvq.codebook",
        "mm.a.code_embd",
    ];
    let is_matrix = shape.iter().rev().skip(1).any(|&dimension| dimension > 1) && name.ends_with("weight");
    let is_table = ["position_embd.weight", "token_types.weight"].contains(&name);
    is_matrix && !is_table && !KEPT.iter().any(|kept| name.contains(kept))
}
