//! `tilewright tokenize`: token ids of a text.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright::load::{self, ModelFile};
use tilewright::tokenizer::EncodeOptions;

use super::{CommandFailure, print_json};

#[derive(Args)]
pub struct TokenizeArgs {
    /// Text to tokenize.
    text: String,
    /// GGUF file (model or vocabulary), model folder, or address hf:OWNER/REPO [default: the built-in model].
    #[arg(long, short)]
    pub model: Option<PathBuf>,
    /// Leave out the special tokens that the model expects around a text.
    #[arg(long)]
    no_special: bool,
    /// Recognise control tokens such as <|im_start|> in the text; by default they are plain text.
    #[arg(long)]
    parse_special: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn tokenize(args: &TokenizeArgs) -> Result<(), CommandFailure> {
    let tokenizer = match &args.model {
        Some(path) => load::tokenizer(path)?,
        None => ModelFile::builtin()?.header.tokenizer?,
    };
    let options = EncodeOptions { add_special: !args.no_special, parse_special: args.parse_special };
    let ids = tokenizer.encode_with(&args.text, options)?;
    let mut pieces = Vec::new();
    for &id in &ids {
        pieces.push(String::from_utf8_lossy(tokenizer.token_bytes(id)?).into_owned());
    }
    if args.json {
        return print_json(&json!({ "token_ids": ids, "pieces": pieces }));
    }
    let mut out = io::stdout().lock();
    for (id, piece) in ids.iter().zip(&pieces) {
        writeln!(out, "{id:>8}  {piece:?}")?;
    }
    Ok(out.flush()?)
}
