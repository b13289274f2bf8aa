//! `tilewright quantize`: converts the matrices of a model to another type.

use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args};
use serde_json::json;
use tilewright::Error;
use tilewright::formats::BlockType;
use tilewright::formats::quantize::QUANTIZABLE;
use tilewright::load::convert::{ImportanceMatrix, QuantizeOptions, QuantizeReport, Recipe, quantize_file};

use super::{CommandFailure, print_json, progress, show_bytes};

/// Convert a model to a GGUF file with its matrices in other types.
///
/// IN is a GGUF file (of a model in shards, the first one), or a Hugging Face folder of Llama,
/// Mistral, Qwen2, Qwen3 or Gemma 1 to 3 with a BPE tokenizer.json. Metadata, tokenizer and chat template are kept;
/// norms, biases and other small tensors keep their type.
///
/// TYPE is a recipe of llama-quantize, which gives more bits to the matrices that need them: the output head, and some
/// of the value and down projections. From a GGUF file the result is llama.cpp's, byte for byte. With --pure, all
/// matrices get the same type.
///
/// Where rows are not a multiple of the block size, the type falls back as in llama.cpp: Q4_K to Q5_0, Q5_K to Q5_1,
/// Q6_K to Q8_0, Q2_K and Q3_K to Q4_0, IQ4_XS to IQ4_NL; if they are not a multiple of 32 either, to F16.
///
/// A model that is already quantised loses precision a second time: prefer an F16, BF16 or F32 source.
///
/// OUT appears only when it is complete, and cannot be the input.
#[derive(Args)]
#[command(override_usage = "tilewright quantize [OPTIONS] <IN> <OUT> <TYPE>")]
#[command(group = ArgGroup::new("types").args(["type_name", "type_flag"]).required(true))]
pub struct QuantizeArgs {
    /// Source: GGUF file, Hugging Face folder, or address hf:OWNER/REPO[:QUANTISATION].
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// GGUF file to write.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Recipe: Q4_K_M (the usual choice), Q2_K, Q2_K_S, Q3_K_S, Q3_K_M, Q3_K_L, Q4_K_S, Q5_K_S, Q5_K_M, Q6_K, Q8_0,
    /// Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, IQ4_XS, MXFP4_MOE, F16, BF16 or F32.
    ///
    /// Q3_K, Q4_K and Q5_K mean Q3_K_M, Q4_K_M and Q5_K_M. MXFP4 needs --pure.
    #[arg(value_name = "TYPE")]
    type_name: Option<TypeName>,
    /// The same, as a flag.
    #[arg(long = "type", value_name = "TYPE")]
    type_flag: Option<TypeName>,
    /// Give all matrices the same type: for a recipe, the type of most of its matrices.
    #[arg(long)]
    pure: bool,
    /// Importance matrix from `imatrix` or llama-imatrix, to round important columns more precisely.
    ///
    /// F32, F16, BF16, Q8_0 and MXFP4 do not use it.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Overwrite OUT if it exists.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn quantize(args: &QuantizeArgs) -> Result<(), CommandFailure> {
    let mut options = args.options()?;
    options.overwrite = args.force;
    options.importance = args.imatrix.as_ref().map(ImportanceMatrix::open).transpose()?;
    let template = "{bar:32} {percent} % of {total_bytes}, {bytes_per_sec}, {eta} left, {msg}";
    let bar = progress::bar(0, template);
    let written = quantize_file(&args.input, &args.output, &options, &mut |tensor, done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if bar.message() != tensor {
            bar.set_message(tensor.to_owned());
        }
    });
    bar.finish_and_clear();
    let report = written?;
    tell(&report, args.imatrix.is_some());
    if args.json {
        return print_json(&as_json(&report, args));
    }
    let mut out = io::stdout().lock();
    for (block_type, n_tensors, bytes) in report.by_type() {
        writeln!(out, "{:<8} {n_tensors:>5} tensors {:>12}", block_type.name(), show_bytes(bytes))?;
    }
    let (source, written) = (report.source_bytes, report.written_bytes);
    let (source_size, size) = (show_bytes(source), show_bytes(written));
    writeln!(out, "{}: {size}, {:.3} of {source_size}", args.output.display(), ratio(&report))?;
    Ok(out.flush()?)
}

/// Prints notices on other types than requested, tensors quantised twice, and the importance matrix.
fn tell(report: &QuantizeReport, has_importance: bool) {
    let fell_back: Vec<_> = report.tensors.iter().filter(|tensor| tensor.fell_back).collect();
    if let Some(first) = fell_back.first() {
        let n = fell_back.len();
        let row = first.shape.last().copied().unwrap_or_default();
        notice!(
            "{n} tensors have rows that are not a whole number of blocks and get another type, such as `{}` \
             with rows of {row}: {}",
            first.name,
            first.to
        );
    }
    let again = report.tensors.iter().find(|tensor| tensor.from != tensor.to && tensor.from.block_len() > 1);
    if let Some(tensor) = again {
        notice!("`{}` and others were already quantised, to {}, and lost precision twice", tensor.name, tensor.from);
    }
    if has_importance {
        let weighable = report.tensors.iter().filter(|tensor| tensor.to.block_len() > 1 && tensor.from != tensor.to);
        let (n, n_weighted) = (weighable.count(), report.tensors.iter().filter(|tensor| tensor.weighted).count());
        notice!("the importance matrix was used for {n_weighted} of {n} matrices");
    }
}

fn ratio(report: &QuantizeReport) -> f64 {
    report.written_bytes as f64 / report.source_bytes.max(1) as f64
}

fn as_json(report: &QuantizeReport, args: &QuantizeArgs) -> serde_json::Value {
    let types = report.by_type().into_iter().map(|(block_type, n_tensors, size_bytes)| {
        json!({ "type": block_type.name(), "n_tensors": n_tensors, "size_bytes": size_bytes })
    });
    let n_weights: u64 = report.tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum();
    let data_bytes: u64 = report.tensors.iter().map(|tensor| tensor.size_bytes).sum();
    json!({
        "file": args.output,
        "type": args.type_shown(),
        "pure": args.pure,
        "types": types.collect::<Vec<_>>(),
        "source_bytes": report.source_bytes,
        "written_bytes": report.written_bytes,
        "ratio": ratio(report),
        "bits_per_weight": 8.0 * data_bytes as f64 / n_weights.max(1) as f64,
        "n_fell_back": report.tensors.iter().filter(|tensor| tensor.fell_back).count(),
        "n_weighted": report.tensors.iter().filter(|tensor| tensor.weighted).count(),
    })
}

/// A type as a user names it: a recipe, a block type or both.
#[derive(Clone, Copy, Debug)]
struct TypeName {
    recipe: Option<Recipe>,
    block_type: BlockType,
}

impl FromStr for TypeName {
    type Err = String;

    fn from_str(text: &str) -> Result<TypeName, String> {
        let named = QUANTIZABLE.into_iter().find(|block_type| block_type.name().eq_ignore_ascii_case(text));
        match (text.parse::<Recipe>(), named) {
            (Ok(recipe), _) => Ok(TypeName { recipe: Some(recipe), block_type: recipe.block_type() }),
            (Err(_), Some(block_type)) => Ok(TypeName { recipe: None, block_type }),
            (Err(expected), None) => Err(format!("{expected}, or with --pure MXFP4")),
        }
    }
}

impl QuantizeArgs {
    fn wanted(&self) -> Option<TypeName> {
        self.type_name.or(self.type_flag)
    }

    fn options(&self) -> Result<QuantizeOptions, Error> {
        let wrong = |found: &str| Error::Option {
            option: "type",
            expected: "a recipe, such as MXFP4_MOE, or --pure".into(),
            found: found.into(),
        };
        match self.wanted() {
            None => Err(wrong("missing")),
            Some(TypeName { block_type, .. }) if self.pure => Ok(QuantizeOptions::new(block_type)),
            Some(TypeName { recipe: Some(recipe), .. }) => Ok(QuantizeOptions::of(recipe)),
            Some(TypeName { block_type, .. }) => Err(wrong(block_type.name())),
        }
    }

    /// The name of the recipe, or of the type of all matrices.
    fn type_shown(&self) -> String {
        match self.wanted() {
            Some(TypeName { recipe: Some(recipe), .. }) if !self.pure => recipe.to_string(),
            wanted => wanted.map_or(String::new(), |wanted| wanted.block_type.name().into()),
        }
    }
}
