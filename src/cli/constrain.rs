//! What the text of `run` and `chat` must match.

use std::path::{Path, PathBuf};

use clap::Args;
use tilewright::Error;
use tilewright::grammar::Constraint;

#[derive(Args)]
#[group(multiple = false)]
pub struct ConstraintArgs {
    /// Write JSON that is valid by this schema: a file, or the schema itself, which begins with {.
    #[arg(long, value_name = "FILE|SCHEMA")]
    json_schema: Option<String>,
    /// Write a JSON object, of any content.
    #[arg(long)]
    json_object: bool,
    /// Write what this regular expression matches as a whole, such as "yes|no".
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,
    /// Write a text of the grammar in this file: in llama.cpp's syntax if it has a rule `root ::=`, or else in llguidance's
    /// variant of Lark's. `--max-tokens` ends such texts all the same.
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl ConstraintArgs {
    pub fn constraint(&self) -> Result<Option<Constraint>, Error> {
        let constraint = match self {
            ConstraintArgs { json_schema: Some(schema), .. } if schema.trim_start().starts_with('{') => {
                Constraint::json_schema(schema)?
            }
            ConstraintArgs { json_schema: Some(file), .. } => {
                let path = Path::new(file);
                Constraint::json_schema(&read(path)?).map_err(|error| error.in_file(path))?
            }
            ConstraintArgs { json_object: true, .. } => Constraint::JsonObject,
            ConstraintArgs { regex: Some(pattern), .. } => Constraint::Regex(pattern.clone()),
            ConstraintArgs { grammar: Some(path), .. } => Constraint::grammar_of(read(path)?),
            _ => return Ok(None),
        };
        Ok(Some(constraint))
    }
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })
}
