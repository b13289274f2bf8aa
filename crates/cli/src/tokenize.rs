//! `tilewright tokenize` and `tilewright detokenize`: texts and their token ids.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tilewright::Error;
use tilewright::load::{self, ModelFile};
use tilewright::tokenizer::{EncodeOptions, Tokenizer};

use super::{CommandFailure, print_json, read_text, text_of};

/// Print the token ids of a text.
///
/// Of two arguments, the first is the model.
#[derive(Args)]
pub struct TokenizeArgs {
    /// Text to tokenize, after an optional model; `-`, or a pipe and no text, is stdin.
    #[arg(value_name = "TEXT", num_args = 0..=2)]
    words: Vec<String>,
    /// GGUF file (model or vocabulary), model folder, or address hf:OWNER/REPO [default: the built-in model].
    #[arg(long, short)]
    pub model: Option<PathBuf>,
    /// File with the text; `-` is stdin.
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Leave out the special tokens that the model expects around a text.
    #[arg(long)]
    no_special: bool,
    /// Recognise control tokens such as <|im_start|> in the text; by default they are plain text.
    #[arg(long)]
    parse_special: bool,
    /// Print the ids alone, in one line, as `detokenize` reads them.
    #[arg(long, conflicts_with_all = ["count", "json"])]
    ids: bool,
    /// Print the number of tokens alone.
    #[arg(long, conflicts_with = "json")]
    count: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn tokenize(args: &TokenizeArgs) -> Result<(), CommandFailure> {
    let tokenizer = tokenizer(args.model.as_deref())?;
    let options = EncodeOptions { add_special: !args.no_special, parse_special: args.parse_special };
    let ids = tokenizer.encode_with(&args.text()?, options)?;
    let mut out = io::stdout().lock();
    if args.count {
        writeln!(out, "{}", ids.len())?;
        return Ok(out.flush()?);
    }
    if args.ids {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        writeln!(out, "{}", ids.join(" "))?;
        return Ok(out.flush()?);
    }
    let mut pieces = Vec::new();
    for &id in &ids {
        pieces.push(String::from_utf8_lossy(tokenizer.token_bytes(id)?).into_owned());
    }
    if args.json {
        drop(out);
        return print_json(&json!({ "token_ids": ids, "pieces": pieces }));
    }
    for (id, piece) in ids.iter().zip(&pieces) {
        writeln!(out, "{id:>8}  {piece:?}")?;
    }
    Ok(out.flush()?)
}

impl TokenizeArgs {
    /// Makes a first word before the text the model.
    ///
    /// # Errors
    /// A message, if there are two models or two texts.
    pub fn join(&mut self) -> Result<(), String> {
        let is_text_elsewhere = self.file.is_some();
        if self.words.len() + usize::from(is_text_elsewhere) == 2 {
            let model = self.words.remove(0);
            if let Some(named) = self.model.replace(model.clone().into()) {
                return Err(match is_text_elsewhere {
                    true => format!("the text is given twice: `{model}` and by --file"),
                    false => format!("the model is given twice: `{model}` and --model {}", named.display()),
                });
            }
        }
        match is_text_elsewhere && !self.words.is_empty() {
            true => Err(format!("the text is given twice: `{}` and by --file", self.words[0])),
            false => Ok(()),
        }
    }

    fn text(&self) -> Result<String, Error> {
        match (self.words.first(), &self.file) {
            (Some(text), _) if text != "-" => Ok(text.clone()),
            (None, Some(file)) if file.as_os_str() != "-" => read_text(file),
            _ => stdin("a text, --file FILE, or a text on stdin"),
        }
    }
}

/// Print the text of token ids.
///
/// The first argument may be a model: a GGUF file, a model folder or an address hf:OWNER/REPO.
#[derive(Args)]
pub struct DetokenizeArgs {
    /// Token ids, separated by spaces or commas, after an optional model; without ids, read from stdin.
    #[arg(value_name = "IDS")]
    words: Vec<String>,
    /// GGUF file (model or vocabulary), model folder, or address hf:OWNER/REPO [default: the built-in model].
    #[arg(long, short)]
    pub model: Option<PathBuf>,
    /// Leave out control tokens such as <|im_start|>; by default they appear by name.
    #[arg(long)]
    no_special: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl DetokenizeArgs {
    /// Makes a first word that is no list of ids the model.
    pub fn join(&mut self) {
        if self.model.is_none() && self.words.first().is_some_and(|word| parse_ids(word).is_err()) {
            self.model = Some(self.words.remove(0).into());
        }
    }
}

pub fn detokenize(args: &DetokenizeArgs) -> Result<(), CommandFailure> {
    let words = match args.words.as_slice() {
        [] => stdin("token ids, or ids on stdin")?,
        [dash] if dash == "-" => stdin("token ids")?,
        words => words.join(" "),
    };
    let ids = parse_ids(&words)?;
    let text = tokenizer(args.model.as_deref())?.decode(&ids, args.no_special)?;
    if args.json {
        return print_json(&json!({ "text": text, "n_tokens": ids.len() }));
    }
    let mut out = io::stdout().lock();
    // The text alone, so that it can be compared with its source; a terminal's prompt begins on a new line.
    out.write_all(text.as_bytes())?;
    if io::stdout().is_terminal() && !text.ends_with('\n') {
        writeln!(out)?;
    }
    Ok(out.flush()?)
}

/// Token ids separated by spaces, lines or commas, also as a JSON list.
fn parse_ids(text: &str) -> Result<Vec<u32>, Error> {
    let inner = text.trim();
    let inner = inner.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(inner);
    let words = inner.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let parse = |word: &str| {
        word.parse().map_err(|_| Error::Tokenizer {
            field: "token id".into(),
            expected: "a number, such as `detokenize MODEL 1 15043 3186`".into(),
            found: format!("`{}`", word.escape_debug()),
        })
    };
    words.map(parse).collect()
}

fn tokenizer(model: Option<&Path>) -> Result<Tokenizer, Error> {
    match model {
        Some(path) => load::tokenizer(path),
        None => ModelFile::builtin()?.header.tokenizer,
    }
}

/// The text on stdin; a terminal has none.
fn stdin(expected: &str) -> Result<String, Error> {
    if io::stdin().is_terminal() {
        let found = "a terminal".into();
        return Err(Error::Tokenizer { field: "stdin".into(), expected: expected.into(), found });
    }
    text_of(Path::new("stdin"), io::read_to_string(io::stdin()))
}
