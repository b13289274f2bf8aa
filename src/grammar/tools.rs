//! Answers with calls of tools: of a list of tools and a family's format, the grammar of what a model may write.
//!
//! ```text
//! answer:  thinking? (text | text? mark call further calls)
//! ```
//! A mark that is a token of the vocabulary is one here, by its id; where it is none, its letters count, and no text has
//! them. Both is as [`AnswerReader`](crate::answer::AnswerReader) reads it. Terminals that may begin at the same place
//! exclude each other: where a mark ends, no text goes on, and what comes then is bound.
//!
//! - Terminals match as long as they can, which would take a mark for text. So text in front of a call is the
//!   shortest that ends in the mark, and an answer without a call has none.
//! - Schemas allow no white space but an optional space after commas and colons, so the lexer never guesses which
//!   grammar a character belongs to. What encloses arguments is written as templates write it, so most of it is
//!   forced.
//! - JSON is llguidance's. Gemma's notation and Qwen3-Coder's tags have their own rules for strings (`notation.rs`).
//!   A string between tags must not contain its end for the reader; that is written without complements, which
//!   llguidance combines with lengths too slowly.
//! - Schemas are narrowed: an object that names its properties has no others, and numbers get limits.
//! - If llguidance refuses the grammar, tools and then their properties are compiled one by one, so that the error
//!   names the one at fault.
//! - With a constraint the model does not think: the prompt closes the thought, or opens harmony's final message.

mod notation;

use std::collections::{HashMap, HashSet};
use std::fmt::{Display, Write};
use std::str::FromStr;

use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use super::Constraint;
use super::limits::{self, Excess};
use crate::answer::{Format, Mark};
use crate::error::Error;
use crate::tokenizer::Tokenizer;
use notation::Notation;

/// Bytes of a tool's name: a header of harmony has room for them.
const MOST_NAME_BYTES: usize = 128;
/// Bytes of a grammar without its schemas.
const MOST_RULE_BYTES: usize = 128 << 10;

/// Whether an answer has calls. As OpenAI's interface has it in `tool_choice`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides. It is free until it begins a call.
    #[default]
    Auto,
    /// There is at least one call.
    Required,
    /// There is a call of this tool.
    Tool(String),
    /// There is none.
    None,
}

impl FromStr for ToolChoice {
    type Err = std::convert::Infallible;

    /// `auto`, `required` or `none`, or else a tool's name.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            "none" => ToolChoice::None,
            name => ToolChoice::Tool(name.into()),
        })
    }
}

/// How an answer with tools may look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolRules {
    /// How the model writes thinking and calls.
    pub format: Format,
    /// Whether there are calls.
    pub choice: ToolChoice,
    /// Whether there may be several calls.
    pub parallel: bool,
    /// Whether the model may think first. A thought that the prompt has opened is closed at once if not.
    pub thinking: bool,
}

impl ToolRules {
    /// The model decides whether it thinks and what it calls.
    pub fn new(format: Format) -> Self {
        ToolRules { format, choice: ToolChoice::Auto, parallel: true, thinking: true }
    }
}

/// The grammar of an answer with tools, made by [`Constraint::tools`].
#[derive(Clone, Debug, PartialEq)]
pub struct ToolGrammar {
    pub(super) lark: String,
    /// Names and schemas, to say which of them cannot be used.
    pub(super) tools: Vec<(String, Value)>,
}

impl ToolGrammar {
    /// The grammar, in llguidance's variant of Lark's syntax.
    pub fn lark(&self) -> &str {
        &self.lark
    }

    /// The schemas, those of single properties first.
    pub(super) fn parts(&self) -> Vec<(String, TopLevelGrammar)> {
        let mut parts = Vec::new();
        for (name, schema) in &self.tools {
            let of = format!("`{name}`: parameters");
            for (key, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
                let mut property = property.clone();
                if let (Some(keywords), Some(root)) = (property.as_object_mut(), schema.as_object()) {
                    let definitions = root.iter().filter(|(key, _)| matches!(key.as_str(), "$defs" | "definitions"));
                    keywords.extend(definitions.map(|(key, value)| (key.clone(), value.clone())));
                }
                parts.push((format!("{of}.properties.{key}"), TopLevelGrammar::from_json_schema(property)));
            }
            parts.push((of, TopLevelGrammar::from_json_schema(schema.clone())));
        }
        parts
    }
}

impl Constraint {
    /// What a model may write that has these tools. Each is `{"type": "function", "function": {...}}` or what stands in
    /// `function` alone: `name`, `parameters` with a JSON schema. `prompt` is the text that the answer continues, or its end:
    /// it says whether a thought is open.
    ///
    /// Calls are such that [`AnswerReader`](crate::answer::AnswerReader) reads them, and their arguments are valid by the
    /// tool's schema. Beyond that, arguments have only properties that the schema names, if it has some and does not allow
    /// others; integers are exact in 64-bit floats, and other numbers are below 10^15, unless the schema has limits.
    ///
    /// # Errors
    /// [`Error::Constraint`] naming the tool and its field, for a tool without a name, a name that is there twice or that the
    /// format cannot carry, a schema that is too large or that the format cannot carry, a choice of a tool that is not there,
    /// and a format without calls. Schemas that cannot be enforced are refused by
    /// [`Grammars::begin`](super::Grammars::begin).
    pub fn tools(tools: &[Value], rules: &ToolRules, tokenizer: &Tokenizer, prompt: &str) -> Result<Constraint, Error> {
        let format = rules.format;
        if format == Format::Plain && rules.choice != ToolChoice::None {
            return Err(refused("format", "one with calls, such as json", format));
        }
        let mut tools = read(tools, format)?;
        match &rules.choice {
            ToolChoice::Tool(name) => {
                tools.retain(|tool| tool.name == *name);
                if tools.is_empty() {
                    return Err(refused("choice", "auto, required, none or the name of a tool", format!("`{name}`")));
                }
            }
            ToolChoice::Required if tools.is_empty() => return Err(refused("choice", "a tool to call", "no tools")),
            _ => {}
        }
        let mut answer = Answer { format, tokenizer, parallel: rules.parallel, lark: Lark::default() };
        let start = answer.start(&tools, rules, prompt)?;
        let n_bytes = answer.lark.text.len() - answer.lark.n_schema_bytes;
        if n_bytes > MOST_RULE_BYTES {
            let found = format!("{n_bytes} bytes of rules");
            return Err(refused("tools", format!("what needs at most {MOST_RULE_BYTES} bytes of rules"), found));
        }
        // With it, terminals of schemas are of the same class as those around them.
        let head = "%llguidance {\"ignore_once\": true}\n";
        let lark = format!("{head}start: {start}\n{}", answer.lark.text);
        let tools = tools.into_iter().map(|tool| (tool.name, tool.parameters)).collect();
        Ok(Constraint::Tools(ToolGrammar { lark, tools }))
    }
}

/// An error about the tools.
fn refused(of: impl Display, expected: impl Into<String>, found: impl Display) -> Error {
    Error::Constraint { field: format!("tools: {of}"), expected: expected.into(), found: found.to_string() }
}

impl From<(&str, Excess)> for Error {
    fn from((tool, excess): (&str, Excess)) -> Self {
        refused(format!("`{tool}`: parameters: {}", excess.of), excess.expected, excess.found)
    }
}

/// A tool.
struct Tool {
    name: String,
    parameters: Value,
}

/// Reads the list, and refuses what no grammar is to be made of.
fn read(tools: &[Value], format: Format) -> Result<Vec<Tool>, Error> {
    let mut all: Vec<Tool> = Vec::new();
    let mut names = HashSet::new();
    for (at, tool) in tools.iter().enumerate() {
        let tool = tool.get("function").unwrap_or(tool);
        let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| refused(format!("tool {at}: name"), "a text", "none"))?;
        if let Some(c) = name.chars().find(|&c| !carries(format, c)) {
            return Err(refused(
                format!("`{name}`: name"),
                format!("characters that {format} has in names"),
                format!("{c:?}"),
            ));
        }
        if name.len() > MOST_NAME_BYTES {
            return Err(refused(format!("tool {at}: name"), format!("at most {MOST_NAME_BYTES} bytes"), name.len()));
        }
        if !names.insert(name) {
            return Err(refused(format!("`{name}`: name"), "a name that no other tool has", "it twice"));
        }
        let given = tool.get("parameters").filter(|given| !given.is_null());
        if let Some(given) = given {
            limits::check_schema(given).map_err(|excess| Error::from((name, excess)))?;
        }
        let parameters = notation::parameters(name, given)?;
        all.push(Tool { name: name.into(), parameters });
    }
    let whole = Value::Array(all.iter().map(|tool| tool.parameters.clone()).collect());
    limits::check_schema(&whole)
        .map_err(|excess| refused(format!("all parameters: {}", excess.of), excess.expected, excess.found))?;
    Ok(all)
}

/// Whether a format has this character in the name of a tool.
fn carries(format: Format, c: char) -> bool {
    match format {
        Format::Mistral | Format::Gemma4 | Format::Harmony => c.is_alphanumeric() || "_-.:/".contains(c),
        Format::Lfm2 => c.is_alphanumeric() || "_-.:/".contains(c),
        Format::Xml => !c.is_control() && !c.is_whitespace() && !"<>".contains(c),
        _ => !c.is_control(),
    }
}

/// A grammar in progress.
#[derive(Default)]
struct Lark {
    text: String,
    /// Names by what they are defined as.
    known: HashMap<String, String>,
    /// Bytes of `text` that are schemas.
    n_schema_bytes: usize,
}

impl Lark {
    /// The definition, or the one that is there and says the same.
    fn add(&mut self, prefix: &str, attribute: &str, body: &str) -> String {
        let next = self.known.len() + 1;
        let name = self.known.entry(format!("{prefix}{attribute}: {body}")).or_insert_with(|| {
            let name = format!("{prefix}{next}");
            // A text takes all that is written to it.
            let _ = writeln!(self.text, "{name}{attribute}: {body}");
            name
        });
        name.clone()
    }

    /// A rule, by its name.
    fn rule(&mut self, body: &str) -> String {
        self.add("r", "", body)
    }

    /// A rule that ends where it first can.
    fn lazy(&mut self, body: &str) -> String {
        self.add("r", "[lazy]", body)
    }

    /// A terminal.
    fn terminal(&mut self, body: &str) -> String {
        self.add("T", "", body)
    }

    /// A JSON value.
    fn json(&mut self, schema: &Value) -> String {
        let mut schema = schema.clone();
        if let Some(keywords) = schema.as_object_mut() {
            // Spaces as JSON is written in templates, or none. Without a limit, a model may go on with them.
            let style = serde_json::json!({
                "whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?",
                "json_allowed_escapes": super::ESCAPES,
            });
            keywords.insert("x-guidance".into(), style);
        }
        let schema = schema.to_string();
        let before = self.text.len();
        let name = self.rule(&format!("%json {schema}"));
        self.n_schema_bytes += self.text.len() - before;
        name
    }
}

/// A text as a grammar has it in quotes.
fn quoted(text: &str) -> String {
    // What JSON leaves as it is and Lark does not.
    Value::from(text).to_string().replace('\u{7F}', "\\u007f")
}

/// A text in a regular expression.
fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        c if c.is_alphanumeric() => c.to_string(),
        c => format!("\\x{{{:X}}}", u32::from(c)),
    };
    text.chars().map(escape).collect()
}

/// Regular expressions of any text, of one that is not empty, and of white space.
const ANY: &str = "/(?s:.*)/";
const SOME: &str = "/(?s:.+)/";
const SPACE: &str = "/[ \\n]{1,4}/";

/// ` & ~...` for texts that have one of these in them.
fn without(texts: &[&str]) -> String {
    if texts.is_empty() {
        return String::new();
    }
    let texts: Vec<String> = texts.iter().map(|text| escaped(text)).collect();
    format!(" & ~/(?s:.*)(?:{})(?s:.*)/", texts.join("|"))
}

/// `a | b | c` in parentheses.
fn either(all: &[String]) -> String {
    format!("({})", all.join(" | "))
}

/// The grammar of an answer.
struct Answer<'a> {
    format: Format,
    tokenizer: &'a Tokenizer,
    parallel: bool,
    lark: Lark,
}

/// What calls begin with: a mark, and the rule of what follows it.
struct Opening {
    mark: &'static str,
    rest: String,
}

impl Answer<'_> {
    /// A mark: the token, or its letters.
    fn mark(&self, name: &str) -> String {
        match self.tokenizer.special_id(name) {
            Some(id) => format!("<[{id}]>"),
            None => quoted(name),
        }
    }

    fn is_token(&self, name: &str) -> bool {
        self.tokenizer.special_id(name).is_some()
    }

    /// The marks of some kinds that are no tokens.
    fn letters(&self, kinds: &[Mark]) -> Vec<&'static str> {
        let marks = self.format.marks().iter();
        marks.filter(|(name, kind)| kinds.contains(kind) && !self.is_token(name)).map(|(name, _)| *name).collect()
    }

    /// The first mark of a kind.
    fn first(&self, kind: Mark) -> Option<&'static str> {
        self.format.marks().iter().find(|(_, of)| *of == kind).map(|(name, _)| *name)
    }

    /// Text up to a mark and with it, that has none of some letters in it. `more` is what else it must be.
    fn up_to(&mut self, mark: &str, excluded: &[&str], more: &str) -> String {
        match self.tokenizer.special_id(mark) {
            Some(id) => {
                let text = self.lark.terminal(&format!("{SOME}{}{more}", without(excluded)));
                format!("{text}? <[{id}]>")
            }
            None => {
                let others: Vec<&str> = excluded.iter().copied().filter(|text| *text != mark).collect();
                let text = self.lark.terminal(&format!("{ANY}{}{more}", without(&others)));
                self.lark.lazy(&format!("{text} {}", quoted(mark)))
            }
        }
    }

    /// The whole answer.
    fn start(&mut self, tools: &[Tool], rules: &ToolRules, prompt: &str) -> Result<String, Error> {
        if self.format == Format::Harmony {
            return self.harmony(tools, rules, prompt);
        }
        let body = self.body(tools, rules)?;
        let (Some(open), Some(close)) = (self.first(Mark::ThinkOpen), self.first(Mark::ThinkClose)) else {
            return Ok(body);
        };
        let prompt = prompt.trim_end();
        let (is_open, is_closed) = (prompt.ends_with(open), prompt.ends_with(close));
        if !rules.thinking && is_open {
            return Ok(format!("{SPACE}? {} {body}", self.mark(close)));
        }
        if !rules.thinking || is_closed {
            return Ok(body);
        }
        // A call in a thought would be one, and is not to be.
        let rest = self.up_to(close, &self.letters(&[Mark::ThinkClose, Mark::CallOpen]), "");
        if is_open {
            return Ok(format!("{rest} {body}"));
        }
        let open = match self.tokenizer.special_id(open) {
            Some(id) => format!("<[{id}]>"),
            None => self.lark.terminal(&format!("/\\s{{0,8}}{}/", escaped(open))),
        };
        let name = if self.format == Format::Gemma4 { "\"thought\\n\"" } else { "" };
        Ok(format!("({open} {name} {rest})? {body}"))
    }

    /// What follows a thought.
    fn body(&mut self, tools: &[Tool], rules: &ToolRules) -> Result<String, Error> {
        let format = self.format;
        // What text has that is no call: nothing that begins one.
        let marks = self.letters(&[Mark::CallOpen, Mark::Function]);
        let mut begin = String::new();
        for open in self.letters(&[Mark::ThinkOpen]) {
            begin += &format!(" & ~/\\s*{}(?s:.*)/", escaped(open));
        }
        if format.is_bare() {
            begin += if format == Format::Json { " & ~/\\s*[{\\[](?s:.*)/" } else { " & ~/\\s*[{](?s:.*)/" };
        }
        let text = self.lark.terminal(&format!("{SOME}{}{begin}", without(&marks)));
        if rules.choice == ToolChoice::None || tools.is_empty() {
            return Ok(format!("{text}?"));
        }
        let (openings, bare) = self.calls(tools)?;
        let is_free = rules.choice == ToolChoice::Auto;
        let mut ways = if is_free { vec![format!("{text}?")] } else { Vec::new() };
        if let Some(bare) = bare {
            ways.push(format!("{SPACE}? {bare}"));
        }
        for Opening { mark, rest } in openings {
            let lead = match is_free {
                true => self.up_to(mark, &marks, &begin),
                // A mark that is a part of the call itself.
                false if mark == FUNCTION => continue,
                false => format!("{SPACE}? {}", self.mark(mark)),
            };
            ways.push(format!("{lead} {rest}"));
        }
        Ok(either(&ways))
    }

    /// What begins calls with a mark, and calls without one.
    fn calls(&mut self, tools: &[Tool]) -> Result<(Vec<Opening>, Option<String>), Error> {
        let line = "\"\\n\"?";
        let opening = |mark, rest| Ok((vec![Opening { mark, rest }], None));
        match self.format {
            Format::Hermes => {
                let (mark, close) = ("<tool_call>", self.mark("</tool_call>"));
                let call = self.objects(tools, "arguments", "")?;
                let one = self.lark.rule(&format!("{line} {call} {line} {close}"));
                let rest = self.repeated(&one, &format!("{line} {} {one}", self.mark(mark)));
                opening(mark, rest)
            }
            Format::Xml => {
                let (mark, close) = ("<tool_call>", self.mark("</tool_call>"));
                let mut functions = Vec::new();
                for tool in tools {
                    let members = notation::members(Notation::Tags, tool, &mut self.lark)?;
                    let arguments = self.lark.rule(&format!("{members} \"</function>\""));
                    functions.push((tool.name.as_str(), arguments));
                }
                let after = |lead: &str| -> Vec<String> {
                    let head = |name: &str| quoted(&format!("{lead}{name}>\n"));
                    functions.iter().map(|(name, arguments)| format!("{} {arguments}", head(name))).collect()
                };
                let call = self.lark.rule(&either(&after(FUNCTION)));
                let one = self.lark.rule(&format!("{line} {call} {line} {close}"));
                let next = format!("{line} {} {one}", self.mark(mark));
                let rest = self.repeated(&one, &next);
                let bare = self.lark.rule(&format!("{} ({line} {close})?", either(&after(""))));
                let bare = self.repeated(&bare, &next);
                Ok((vec![Opening { mark, rest }, Opening { mark: FUNCTION, rest: bare }], None))
            }
            Format::Llama3 => {
                let call = self.objects(tools, "parameters", "")?;
                let rest = self.repeated(&call, &format!("\";\" \" \"? {call}"));
                Ok((vec![Opening { mark: "<|python_tag|>", rest: rest.clone() }], Some(rest)))
            }
            Format::Mistral if self.is_token("[ARGS]") => {
                let (mark, args) = ("[TOOL_CALLS]", self.mark("[ARGS]"));
                let id = match self.is_token("[CALL_ID]") {
                    true => format!("({} /[a-zA-Z0-9]{{9}}/)?", self.mark("[CALL_ID]")),
                    false => String::new(),
                };
                let mut calls = Vec::new();
                for tool in tools {
                    let arguments = self.lark.json(&tool.parameters);
                    calls.push(format!("{} {id} {args} {arguments}", quoted(&tool.name)));
                }
                let one = self.lark.rule(&either(&calls));
                let rest = self.repeated(&one, &format!("{} {one}", self.mark(mark)));
                opening(mark, rest)
            }
            Format::Mistral => {
                let id = "(\", \\\"id\\\": \\\"\" /[a-zA-Z0-9]{9}/ \"\\\"\")?";
                let call = self.objects(tools, "arguments", id)?;
                let list = self.repeated(&call, &format!("\",\" \" \"? {call}"));
                let rest = self.lark.rule(&format!("\" \"? \"[\" {list} \"]\""));
                opening("[TOOL_CALLS]", rest)
            }
            Format::Gemma4 => {
                let (mark, close) = ("<|tool_call>", self.mark("<tool_call|>"));
                let quote = self.mark(crate::answer::GEMMA_QUOTE);
                let mut calls = Vec::new();
                for tool in tools {
                    let members = notation::members(Notation::Gemma(&quote), tool, &mut self.lark)?;
                    let head = quoted(&format!("call:{}{{", tool.name));
                    calls.push(format!("{head} {members} \"}}\""));
                }
                let one = self.lark.rule(&format!("{} {close}", either(&calls)));
                let rest = self.repeated(&one, &format!("{} {one}", self.mark(mark)));
                opening(mark, rest)
            }
            Format::Lfm2 => {
                let (mark, close) = ("<|tool_call_start|>", self.mark("<|tool_call_end|>"));
                let mut calls = Vec::new();
                for tool in tools {
                    let members = notation::members(Notation::Python, tool, &mut self.lark)?;
                    calls.push(format!("{} {members} \")\"", quoted(&format!("{}(", tool.name))));
                }
                let one = self.lark.rule(&either(&calls));
                let list = self.repeated(&one, &format!("\", \" {one}"));
                let rest = self.lark.rule(&format!("\"[\" {list} \"]\" {close}"));
                opening(mark, rest)
            }
            Format::Granite => {
                let mark = if !self.is_token("<|tool_call|>") && self.is_token("<tool_call>") {
                    "<tool_call>"
                } else {
                    "<|tool_call|>"
                };
                let call = self.objects(tools, "arguments", "")?;
                let list = self.repeated(&call, &format!("\",\" \" \"? {call}"));
                let rest = self.lark.rule(&format!("\" \"? \"[\" {list} \"]\""));
                opening(mark, rest)
            }
            Format::Json => {
                let call = self.objects(tools, "arguments", "")?;
                let bare = match self.parallel {
                    true => self.lark.rule(&format!("{call} | \"[\" {call} (\",\" \" \"? {call})* \"]\"")),
                    false => call,
                };
                Ok((Vec::new(), Some(bare)))
            }
            Format::Harmony | Format::Plain => Ok((Vec::new(), None)),
        }
    }

    /// One call, and further ones if there may be some.
    fn repeated(&mut self, one: &str, next: &str) -> String {
        match self.parallel {
            true => self.lark.rule(&format!("{one} ({next})*")),
            false => one.into(),
        }
    }

    /// `{"name": ..., "arguments": {...}}`, as templates write it, for one of the tools.
    fn objects(&mut self, tools: &[Tool], key: &str, more: &str) -> Result<String, Error> {
        let mut calls = Vec::new();
        for tool in tools {
            let arguments = self.lark.json(&tool.parameters);
            let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
            calls.push(format!("{} {arguments} {more} \"}}\"", quoted(&head)));
        }
        Ok(self.lark.rule(&either(&calls)))
    }

    /// Messages of harmony: a thought, a preamble for the user, then a call or the answer.
    fn harmony(&mut self, tools: &[Tool], rules: &ToolRules, prompt: &str) -> Result<String, Error> {
        let [start, channel, message, end, constrain] =
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"].map(|name| self.mark(name));
        let marks = self.letters(&[Mark::Start, Mark::Channel, Mark::End]);
        let again = format!("{start} \"assistant\"");
        let inner = self.up_to("<|end|>", &marks, "");
        let inner = self.lark.rule(&inner);
        let text = self.lark.terminal(&format!("{SOME}{}", without(&marks)));
        let thought = self.lark.rule(&format!("{channel} \"analysis\" {message} {inner} {again}"));
        let preamble = self.lark.rule(&format!("{channel} \"commentary\" {message} {inner} {again}"));
        let mut ways = Vec::new();
        if matches!(rules.choice, ToolChoice::Auto | ToolChoice::None) {
            ways.push(format!("{channel} \"final\" {message} {text}?"));
        }
        if rules.choice != ToolChoice::None {
            for tool in tools {
                let arguments = self.lark.json(&tool.parameters);
                let head = quoted(&format!("commentary to=functions.{} ", tool.name));
                ways.push(format!("{channel} {head} {constrain} \"json\" {message} {arguments}"));
            }
        }
        let body = self.lark.rule(&format!("{preamble}? {}", either(&ways)));
        let begun = prompt.rfind("<|start|>").and_then(|at| prompt.get(at..)).unwrap_or_default().trim_end();
        let header = begun.rsplit_once("<|channel|>").map_or("", |(_, header)| header);
        Ok(match header.strip_suffix("<|message|>") {
            Some(header) if header.starts_with("analysis") => match rules.thinking {
                true => format!("{inner} {again} {body}"),
                false => format!("{end} {again} {body}"),
            },
            Some(_) if matches!(rules.choice, ToolChoice::Auto | ToolChoice::None) => format!("{text}?"),
            Some(_) => return Err(refused("prompt", "one that leaves room for a call", "an answer that has begun")),
            None if rules.thinking => format!("{thought}? {body}"),
            None => body,
        })
    }
}

/// What begins a call in tags.
const FUNCTION: &str = "<function=";
