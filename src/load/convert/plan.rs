//! The plan of an output file: keys, and tensors with their types.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::recipe::{self, ModelTraits, Recipe};
use super::{Order, QuantizeOptions, WrittenTensor, folder, is_float, map};
use crate::error::Error;
use crate::formats::gguf::{Gguf, Value};
use crate::formats::gguf_writer::GgufHeader;
use crate::formats::{BlockType, TensorInfo};
use crate::load::FileBytes;
use crate::load::refused::parse_gguf;
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
        let Shards { paths, files, headers: shards } = Shards::read(input)?;
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
        let mut sources: Vec<(usize, &TensorInfo)> =
            shards.iter().enumerate().flat_map(|(file, shard)| sources(file, shard)).collect();
        sources.sort_by(|(_, a), (_, b)| recipe::by_layer(&a.name, &b.name));
        let described = sources.iter().map(|(_, source)| (source.name.as_str(), source.shape.as_slice()));
        let targets = Targets::new(options, &ModelTraits::of_gguf(first), described);
        let mut tensors = Vec::new();
        for (file, source) in sources {
            let kept = source.block_type;
            let target = targets.get(&source.name, &source.shape).unwrap_or(Target::plain(kept));
            if target.to != kept || is_float(target.to) {
                check_type("gguf", source)?;
            }
            let written = written(&mut header, &source.name, as_written(&source.shape), kept, target, options)?;
            let (source, stored, order) = (source.clone(), FileLayout::AsRead, Order::Same);
            tensors.push(PlannedTensor { written, file, source, stored, order, adds_one: false });
        }
        Ok(ConvertPlan { header, tensors, files, paths })
    }
}

/// A GGUF file, or all shards of one.
pub(super) struct Shards {
    pub paths: Vec<PathBuf>,
    pub files: Vec<FileBytes>,
    pub headers: Vec<Gguf>,
}

impl Shards {
    /// Reads the headers of a file and, if it is a shard, of the others.
    pub fn read(input: &Path) -> Result<Shards, Error> {
        let read = |path: &Path| {
            let (found, file) = map(path)?;
            let shard = parse_gguf(&file).map_err(|error| error.in_file(path))?;
            Ok::<_, Error>((found, (file, shard)))
        };
        let one = read(input)?;
        let all = match gguf::n_shards(&one.1.1)? {
            1 => vec![one],
            n => shards::paths(input, n)?.iter().map(|path| read(path)).collect::<Result<_, _>>()?,
        };
        let (paths, read): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let (files, headers) = read.into_iter().unzip();
        Ok(Shards { paths, files, headers })
    }
}

/// A shape as llama.cpp writes it: a matrix of one row is a vector.
fn as_written(shape: &[u64]) -> &[u64] {
    let first = shape.iter().position(|&dimension| dimension != 1).unwrap_or(shape.len().saturating_sub(1));
    &shape[first..]
}

/// The tensors of a shard, with its number.
fn sources(file: usize, shard: &Gguf) -> impl Iterator<Item = (usize, &TensorInfo)> {
    shard.tensors.iter().map(move |tensor| (file, tensor))
}

/// The type of an output tensor.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub to: BlockType,
    /// Whether another type was wanted, whose blocks do not fit its rows.
    fell_back: bool,
}

impl Target {
    /// A type that was wanted.
    pub fn plain(to: BlockType) -> Target {
        Target { to, fell_back: false }
    }
}

/// The types of the output's matrices.
pub(super) struct Targets(HashMap<String, BlockType>);

impl Targets {
    /// Chooses types for the matrices among these tensors, given by name and shape.
    pub fn new<'t>(
        options: &QuantizeOptions,
        traits: &ModelTraits,
        tensors: impl Iterator<Item = (&'t str, &'t [u64])>,
    ) -> Targets {
        let owned = |(name, block_type): (&str, BlockType)| (name.to_owned(), block_type);
        Targets(match options.recipe {
            Some(recipe) => {
                let chosen = recipe::types(recipe, traits, options.importance.is_some(), tensors);
                chosen.into_iter().map(owned).collect()
            }
            None => {
                let matrices = tensors.filter(|(name, shape)| is_quantized(name, shape));
                matrices.map(|(name, _)| owned((name, options.block_type))).collect()
            }
        })
    }

    /// The type of a matrix; `None` if the tensor keeps its own.
    pub fn get(&self, name: &str, shape: &[u64]) -> Option<Target> {
        let wanted = *self.0.get(name)?;
        let to = fitting(shape, wanted);
        Some(Target { to, fell_back: to != wanted })
    }
}

/// Adds a tensor to the header and returns its description.
pub(super) fn written(
    header: &mut GgufHeader,
    name: &str,
    shape: &[u64],
    from: BlockType,
    Target { to, fell_back }: Target,
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
    // As in llama.cpp, which refuses this as well.
    let is_layer = !["token_embd.weight", "per_layer_token_embd.weight", "output.weight"].contains(&name);
    if options.recipe == Some(Recipe::Q2_K_S) && to == BlockType::Q2_K && from != to && is_layer && !weighted {
        return Err(Error::Unsupported {
            format: "quantize",
            field: format!("type of `{}`", name.escape_debug()),
            found: "Q2_K without importances, of recipe Q2_K_S".into(),
            supported: "an importance matrix with this tensor, or Q2_K".into(),
        });
    }
    let fell_back = fell_back && to != from;
    Ok(WrittenTensor { name: name.into(), shape: shape.into(), from, to, size_bytes, fell_back, weighted })
}

/// Sets the keys of the quantisation type.
pub(super) fn set_type(header: &mut GgufHeader, options: &QuantizeOptions) -> Result<(), Error> {
    header.set("general.quantization_version", Value::U32(2))?;
    let number = options.recipe.map_or_else(|| file_type(options.block_type), Recipe::file_type);
    header.set("general.file_type", Value::U32(number))?;
    if let Some(importance) = &options.importance {
        header.set("quantize.imatrix.file", Value::Str(importance.file_name()))?;
        header.set("quantize.imatrix.entries_count", Value::U32(importance.len() as u32))?;
    }
    Ok(())
}

/// `general.file_type` for matrices of this type alone: the smallest number of a recipe with this type.
fn file_type(block_type: BlockType) -> u32 {
    let of_type = Recipe::ALL.into_iter().filter(|recipe| recipe.block_type() == block_type);
    of_type.map(Recipe::file_type).min().unwrap_or(0)
}

/// The wanted type, or another one if rows of this shape are not a whole number of its blocks.
fn fitting(shape: &[u64], wanted: BlockType) -> BlockType {
    let has_blocks = |block_type: BlockType| shape.last().is_some_and(|row| row.is_multiple_of(block_type.block_len()));
    let fallback = match wanted {
        _ if has_blocks(wanted) => return wanted,
        BlockType::Q2_K | BlockType::Q3_K => BlockType::Q4_0,
        BlockType::Q4_K => BlockType::Q5_0,
        BlockType::Q5_K => BlockType::Q5_1,
        BlockType::Q6_K => BlockType::Q8_0,
        BlockType::IQ4_XS => BlockType::IQ4_NL,
        other => other,
    };
    if has_blocks(fallback) { fallback } else { BlockType::F16 }
}

/// Whether a tensor is a matrix to quantise. Excludes small control tensors (norms, routers, positions, convolutions)
/// and the exceptions that llama.cpp makes for other architectures.
pub(super) fn is_quantized(name: &str, shape: &[u64]) -> bool {
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
