//! Constraints on the output of `run` and `chat`.

use std::path::{Path, PathBuf};

use clap::Args;
use tilewright::Error;
use tilewright::answer::Format;
use tilewright::grammar::{Constraint, ToolChoice};
use tilewright::{ChatModel, ChatRequest};

use super::read_text;

#[derive(Args)]
#[group(multiple = false)]
pub struct ConstraintArgs {
    /// Constrain the output to a JSON Schema, in a file or as text.
    ///
    /// A text starts with {.
    #[arg(long, value_name = "FILE|SCHEMA")]
    json_schema: Option<String>,
    /// Constrain the output to a JSON object of any content.
    #[arg(long)]
    json_object: bool,
    /// Constrain the output to a regular expression, such as "yes|no".
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,
    /// Constrain the output to a grammar in GBNF or Lark syntax.
    ///
    /// Lark's syntax is that of llguidance. A file with a rule `root ::=` is read as llama.cpp's GBNF. `--max-tokens`
    /// can still cut the text short.
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl ConstraintArgs {
    pub fn constraint(&self) -> Result<Option<Constraint>, Error> {
        let constraint = match self {
            ConstraintArgs { json_schema: Some(schema), .. } if schema.trim_start().starts_with('{') => {
                Constraint::json_schema(schema)?
            }
            ConstraintArgs { json_schema: Some(file), .. } => Constraint::json_schema(&read_text(Path::new(file))?)?,
            ConstraintArgs { json_object: true, .. } => Constraint::JsonObject,
            ConstraintArgs { regex: Some(pattern), .. } => Constraint::Regex(pattern.clone()),
            ConstraintArgs { grammar: Some(text), .. } if text.to_string_lossy().contains("::=") => {
                Constraint::grammar_of(text.to_string_lossy().into_owned())
            }
            ConstraintArgs { grammar: Some(path), .. } => Constraint::grammar_of(read_text(path)?),
            _ => return Ok(None),
        };
        Ok(Some(constraint))
    }
}

/// Enforcement of tool calls.
#[derive(Args)]
pub struct CallArgs {
    /// Tool use: `auto` (the model decides), `required`, `none`, or the name of a tool to call [default: auto].
    ///
    /// Calls are constrained to the model's format and the tool's schema, also after thinking.
    #[arg(long, value_name = "auto|required|none|NAME", requires = "tools")]
    tool_choice: Option<ToolChoice>,
    /// Allow at most one tool call per answer.
    #[arg(long, requires = "tools")]
    single_call: bool,
    /// Disable thinking before tool calls; sets enable_thinking and thinking to false in the template.
    #[arg(long, requires = "tools")]
    no_thinking: bool,
}

impl CallArgs {
    /// Sets how a request's tool calls are enforced. They are not, with a notice, beside another constraint, a
    /// prefill or speculative decoding (an error with `--tool-choice`), or if the choice is `auto` and the call
    /// format unknown.
    pub fn enforce(&self, request: &mut ChatRequest, chat: &ChatModel, drafts: bool) -> Result<(), Error> {
        let is_bound = drafts || request.prefill.is_some() || request.options.constraint.is_some();
        let choice = self.tool_choice.clone().unwrap_or_default();
        if is_bound && self.tool_choice.is_some() {
            return Err(Error::Option {
                option: "tool_choice",
                expected: "no constraint, --prefill or speculative decoding beside it".into(),
                found: "given".into(),
            });
        }
        if is_bound || (chat.format() == Format::Plain && choice == ToolChoice::Auto) {
            notice!(
                "tool calls are not enforced: {}",
                match is_bound {
                    true => "there is another constraint, a prefill or speculative decoding",
                    false => "the model's tool call format is unknown; set it with --tool-format",
                }
            );
            request.enforce_calls = false;
            return Ok(());
        }
        request.tool_choice = choice;
        request.parallel_calls = !self.single_call;
        request.thinking = self.no_thinking.then_some(false);
        // Reports unusable tools before the first message.
        chat.continue_text("", request).map(drop)
    }
}
