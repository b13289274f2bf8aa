//! Builds the grammar of answers with tool calls from a list of tools and a model family's format.
//!
//! ```text
//! answer:  thinking? (text | text? mark call further calls)
//! ```
//! A mark that is a token of the vocabulary is matched by its id; otherwise its letters count and text must not
//! contain them. [`AnswerReader`](crate::answer::AnswerReader) does the same. Terminals that may start at the same
//! place are exclusive: text cannot continue past a mark, and from there the answer is constrained.
//!
//! - Terminals match greedily, which would take a mark for text. So text before a call is the shortest that ends in
//!   the mark, and an answer without a call contains no mark.
//! - Schemas allow no white space except an optional space after commas and colons, so the lexer need not guess which
//!   grammar a character belongs to. The syntax around arguments matches the templates, so most of it is forced.
//! - llguidance compiles JSON. Gemma's notation and Qwen3-Coder's tags have their own string rules (`notation.rs`). A
//!   string between tags must not contain its end tag; this is written without complements, which llguidance combines
//!   with lengths too slowly.
//! - Schemas are narrowed: an object with named properties has no others, and numbers have limits.
//! - If llguidance refuses the grammar, tools and then their properties are compiled one by one, so that the error
//!   names the faulty one.
//! - With a constraint the model does not think: the prompt closes the reasoning, or opens harmony's final message.

mod notation;

use std::collections::{HashMap, HashSet};
use std::fmt::{Display, Write};
use std::str::FromStr;

use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use super::Constraint;
use super::limits::{self, Excess};
use crate::answer::{CallTags, Format, Mark, is_name};
use crate::error::Error;
use crate::tokenizer::Tokenizer;
use notation::{Notation, TagEnd, TagRules};

/// Maximum length of a tool's name, which must fit a harmony header.
const MAX_NAME_BYTES: usize = 128;
/// Maximum bytes of a grammar without its schemas.
const MAX_RULE_BYTES: usize = 128 << 10;

/// Whether an answer has tool calls: OpenAI's `tool_choice`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides. It is unconstrained until it starts a call.
    #[default]
    Auto,
    /// At least one call.
    Required,
    /// A call of this tool.
    Tool(String),
    /// No calls.
    None,
}

impl FromStr for ToolChoice {
    type Err = std::convert::Infallible;

    /// `auto`, `required`, `none`, or a tool's name.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            "none" => ToolChoice::None,
            name => ToolChoice::Tool(name.into()),
        })
    }
}

/// Rules for answers with tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolRules {
    /// The format of reasoning and calls.
    pub format: Format,
    /// Whether there are calls.
    pub choice: ToolChoice,
    /// Whether several calls are allowed.
    pub parallel: bool,
    /// Whether the model may reason first. If not, reasoning opened by the prompt is closed at once.
    pub thinking: bool,
}

impl ToolRules {
    /// The model may reason and decides about calls.
    pub fn new(format: Format) -> Self {
        ToolRules { format, choice: ToolChoice::Auto, parallel: true, thinking: true }
    }
}

/// The grammar of an answer with tools, made by [`Constraint::tools`].
#[derive(Clone, Debug, PartialEq)]
pub struct ToolGrammar {
    pub(super) lark: String,
    /// Names and schemas, to report the unusable one.
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
    /// The grammar of answers with these tools. Each is `{"type": "function", "function": {...}}` or only the
    /// `function` object: `name`, `parameters` with a JSON schema. `prompt` is the text before the answer, or its
    /// end: it shows whether reasoning is open.
    ///
    /// [`AnswerReader`](crate::answer::AnswerReader) can parse all calls, and their arguments are valid by the tool's
    /// schema. Also, an object with named properties has no others unless the schema allows them; unless the schema
    /// has limits, integers are exact in 64-bit floats, and other numbers are below 10^15.
    ///
    /// # Errors
    /// [`Error::Constraint`] naming the tool and field, for a missing, duplicate or unsupported name, a schema that
    /// is too large or unsupported by the format, a chosen tool that does not exist, or a format without calls.
    /// [`Grammars::begin`](super::Grammars::begin) refuses schemas that cannot be enforced.
    pub fn tools(tools: &[Value], rules: &ToolRules, tokenizer: &Tokenizer, prompt: &str) -> Result<Constraint, Error> {
        let format = rules.format;
        if format == Format::Plain && rules.choice != ToolChoice::None {
            return Err(refused("format", "a format with calls, such as json", format));
        }
        let mut tools = read(tools, format)?;
        match &rules.choice {
            ToolChoice::Tool(name) => {
                tools.retain(|tool| tool.name == *name);
                if tools.is_empty() {
                    let expected = "auto, required, none or the name of a tool".into();
                    return Err(Error::Constraint {
                        field: "tool_choice".into(),
                        expected,
                        found: format!("`{name}`"),
                    });
                }
            }
            ToolChoice::Required if tools.is_empty() => {
                let (expected, found) = ("auto or none without tools".into(), "required".into());
                return Err(Error::Constraint { field: "tool_choice".into(), expected, found });
            }
            _ => {}
        }
        let mut answer = AnswerGrammar { format, tokenizer, parallel: rules.parallel, lark: Lark::default() };
        let start = answer.start(&tools, rules, prompt)?;
        let n_bytes = answer.lark.text.len() - answer.lark.n_schema_bytes;
        if n_bytes > MAX_RULE_BYTES {
            let found = format!("{n_bytes} bytes of rules");
            return Err(refused("tools", format!("tools that need at most {MAX_RULE_BYTES} bytes of rules"), found));
        }
        // Puts the schemas' terminals in the same class as those around them.
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

/// Parses and validates the tools.
fn read(tools: &[Value], format: Format) -> Result<Vec<Tool>, Error> {
    let mut all: Vec<Tool> = Vec::new();
    let mut names = HashSet::new();
    for (at, tool) in tools.iter().enumerate() {
        let tool = tool.get("function").unwrap_or(tool);
        let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| refused(format!("tool {at}: name"), "a text", "missing"))?;
        if let Some(c) = name.chars().find(|&c| !carries(format, c)) {
            return Err(refused(
                format!("`{name}`: name"),
                format!("characters that {format} allows in names"),
                format!("{c:?}"),
            ));
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(refused(format!("tool {at}: name"), format!("at most {MAX_NAME_BYTES} bytes"), name.len()));
        }
        if !names.insert(name) {
            return Err(refused(format!("`{name}`: name"), "unique names", "a duplicate"));
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

/// Whether a format allows this character in a tool's name.
fn carries(format: Format, c: char) -> bool {
    match format {
        Format::Mistral | Format::Gemma4 | Format::Harmony | Format::Lfm2 => is_name(c),
        Format::Glm | Format::DeepSeek | Format::KimiK2 => is_name(c),
        Format::Xml | Format::SeedOss | Format::Dsml | Format::MiniMax => {
            !c.is_control() && !c.is_whitespace() && !"<>\"".contains(c)
        }
        _ => !c.is_control(),
    }
}

/// An unfinished grammar.
#[derive(Default)]
struct Lark {
    text: String,
    /// Names by definition.
    known: HashMap<String, String>,
    /// The part of `text` that is schemas, in bytes.
    n_schema_bytes: usize,
}

impl Lark {
    /// Adds a definition, or reuses an identical one.
    fn add(&mut self, prefix: &str, attribute: &str, body: &str) -> String {
        let next = self.known.len() + 1;
        let name = self.known.entry(format!("{prefix}{attribute}: {body}")).or_insert_with(|| {
            let name = format!("{prefix}{next}");
            // Writing to a string never fails.
            let _ = writeln!(self.text, "{name}{attribute}: {body}");
            name
        });
        name.clone()
    }

    /// Adds a rule; returns its name.
    fn rule(&mut self, body: &str) -> String {
        self.add("r", "", body)
    }

    /// Adds a rule with the shortest match.
    fn lazy(&mut self, body: &str) -> String {
        self.add("r", "[lazy]", body)
    }

    /// Adds a terminal.
    fn terminal(&mut self, body: &str) -> String {
        self.add("T", "", body)
    }

    /// Adds a JSON value.
    fn json(&mut self, schema: &Value) -> String {
        let mut schema = schema.clone();
        if let Some(keywords) = schema.as_object_mut() {
            // An optional space, as in templates. Without a limit, a model may generate spaces forever.
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

/// A text as a quoted string.
fn quoted(text: &str) -> String {
    // Lark requires this escape, JSON does not.
    Value::from(text).to_string().replace('\u{7F}', "\\u007f")
}

/// A text as a regular expression.
fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        c if c.is_alphanumeric() => c.to_string(),
        c => format!("\\x{{{:X}}}", u32::from(c)),
    };
    text.chars().map(escape).collect()
}

/// Regular expressions for any text, nonempty text, and white space.
const ANY: &str = "/(?s:.*)/";
const SOME: &str = "/(?s:.+)/";
const SPACE: &str = "/[ \\n]{1,4}/";
/// An optional line break.
const LINE: &str = "\"\\n\"?";

/// ` & ~...` for texts that contain one of these.
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
struct AnswerGrammar<'a> {
    format: Format,
    tokenizer: &'a Tokenizer,
    parallel: bool,
    lark: Lark,
}

/// The start of calls: a mark, and the rule after it.
struct Opening {
    mark: &'static str,
    rest: String,
}

impl AnswerGrammar<'_> {
    /// A mark: its token or its letters.
    fn mark(&self, name: &str) -> String {
        match self.tokenizer.special_id(name) {
            Some(id) => format!("<[{id}]>"),
            None => quoted(name),
        }
    }

    fn is_token(&self, name: &str) -> bool {
        self.tokenizer.special_id(name).is_some()
    }

    /// The marks of some kinds that are not tokens.
    fn letters(&self, kinds: &[Mark]) -> Vec<&'static str> {
        let marks = self.format.marks().iter();
        marks.filter(|(name, kind)| kinds.contains(kind) && !self.is_token(name)).map(|(name, _)| *name).collect()
    }

    /// The first mark of a kind.
    fn first(&self, kind: Mark) -> Option<&'static str> {
        self.format.marks().iter().find(|(_, of)| *of == kind).map(|(name, _)| *name)
    }

    /// Text up to and including a mark, without the `excluded` ones. `more` restricts it further.
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
        // A reader would accept a call in reasoning, so exclude it.
        let rest = self.up_to(close, &self.letters(&[Mark::ThinkClose, Mark::CallOpen]), "");
        if is_open {
            return Ok(format!("{rest} {body}"));
        }
        let open = match self.tokenizer.special_id(open) {
            // GLM-4.6 writes a line end first.
            Some(id) => format!("{SPACE}? <[{id}]>"),
            None => self.lark.terminal(&format!("/\\s{{0,8}}{}/", escaped(open))),
        };
        let name = if self.format == Format::Gemma4 { "\"thought\\n\"" } else { "" };
        Ok(format!("({open} {name} {rest})? {body}"))
    }

    /// The answer after the reasoning.
    fn body(&mut self, tools: &[Tool], rules: &ToolRules) -> Result<String, Error> {
        let format = self.format;
        // Plain text must not contain the start of a call.
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
                // This mark is part of the call itself.
                false if mark == FUNCTION => continue,
                false => format!("{SPACE}? {}", self.mark(mark)),
            };
            ways.push(format!("{lead} {rest}"));
        }
        Ok(either(&ways))
    }

    /// Calls with a mark, and calls without one.
    fn calls(&mut self, tools: &[Tool]) -> Result<(Vec<Opening>, Option<String>), Error> {
        let opening = |mark, rest| Ok((vec![Opening { mark, rest }], None));
        match self.format {
            Format::Hermes => {
                let (mark, close) = ("<tool_call>", self.mark("</tool_call>"));
                let call = self.objects(tools, "arguments", "")?;
                let one = self.lark.rule(&format!("{LINE} {call} {LINE} {close}"));
                let rest = self.repeated(&one, &format!("{LINE} {} {one}", self.mark(mark)));
                opening(mark, rest)
            }
            Format::Xml | Format::SeedOss | Format::Glm | Format::Dsml | Format::MiniMax => self.tagged(tools),
            Format::DeepSeek => {
                let [begin, separator, end, close] =
                    ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]
                        .map(|name| self.mark(name));
                let mut calls = Vec::new();
                for Tool { name, parameters } in tools {
                    let arguments = self.lark.json(parameters);
                    calls.push(format!("{} {separator} {arguments}", quoted(name)));
                    let head = quoted(&format!("{name}\n```json\n"));
                    calls.push(format!("\"function\" {separator} {head} {arguments} \"\\n```\""));
                }
                let one = self.lark.rule(&format!("{begin} {} {end}", either(&calls)));
                let list = self.repeated(&one, &format!("{LINE} {one}"));
                opening("<｜tool▁calls▁begin｜>", self.lark.rule(&format!("{list} {LINE} {close}")))
            }
            Format::KimiK2 => {
                let [begin, separator, end, close] = [
                    "<|tool_call_begin|>",
                    "<|tool_call_argument_begin|>",
                    "<|tool_call_end|>",
                    "<|tool_calls_section_end|>",
                ]
                .map(|name| self.mark(name));
                let mut calls = Vec::new();
                for tool in tools {
                    let arguments = self.lark.json(&tool.parameters);
                    let name = quoted(&format!("functions.{}:", tool.name));
                    calls.push(format!("{name} /[0-9]{{1,3}}/ {separator} {arguments}"));
                }
                let one = self.lark.rule(&format!("{begin} {} {end}", either(&calls)));
                let list = self.repeated(&one, &one);
                opening("<|tool_calls_section_begin|>", self.lark.rule(&format!("{list} {close}")))
            }
            Format::NemotronV2 => {
                let close = self.mark("</TOOLCALL>");
                let call = self.objects(tools, "arguments", "")?;
                let list = self.repeated(&call, &format!("\",\" \" \"? {call}"));
                opening("<TOOLCALL>", self.lark.rule(&format!("\"[\" {list} \"]\" {close}")))
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

    /// Calls with arguments between tags.
    fn tagged(&mut self, tools: &[Tool]) -> Result<(Vec<Opening>, Option<String>), Error> {
        let marks = (CallTags::of(self.format), self.first(Mark::CallOpen), self.first(Mark::CallClose));
        let (Some(tags), Some(mark), Some(close)) = marks else { return Ok((Vec::new(), None)) };
        let (open, close) = (self.mark(mark), self.mark(close));
        let functions = self.functions(tags, tools)?;
        let [before, behind] = tags.name;
        let line = if self.format == Format::Glm { "" } else { "\n" };
        let after = |lead: &str| -> Vec<String> {
            let head = |name: &str| quoted(&format!("{lead}{name}{behind}{line}"));
            functions.iter().map(|(name, arguments)| format!("{} {arguments}", head(name))).collect()
        };
        let call = self.lark.rule(&either(&after(before)));
        if let Format::Dsml | Format::MiniMax = self.format {
            let list = self.repeated(&call, &format!("{LINE} {call}"));
            let rest = self.lark.rule(&format!("{LINE} {list} {LINE} {close}"));
            return Ok((vec![Opening { mark, rest }], None));
        }
        let one = self.lark.rule(&format!("{LINE} {call} {LINE} {close}"));
        let next = format!("{LINE} {open} {one}");
        let rest = self.repeated(&one, &next);
        let mut openings = vec![Opening { mark, rest }];
        if self.format == Format::Xml {
            let bare = self.lark.rule(&format!("{} ({LINE} {close})?", either(&after(""))));
            openings.push(Opening { mark: FUNCTION, rest: self.repeated(&bare, &next) });
        }
        Ok((openings, None))
    }

    /// The tools' names, and their arguments between tags with the function's end.
    fn functions<'t>(&mut self, tags: &'static CallTags, tools: &'t [Tool]) -> Result<Vec<(&'t str, String)>, Error> {
        let is_glm = self.format == Format::Glm;
        let around = [tags.key[0], tags.key[1], tags.value[0], tags.value[1]].map(|tag| self.mark(tag));
        let [key_open, key_close, value_open, value_close] = &around;
        let line = if tags.is_on_lines { "\n" } else { "" };
        let is_dsml = self.format == Format::Dsml;
        let open = |key: &str, is_string: bool| match is_glm {
            true => format!("{LINE} {key_open} {} {key_close} {LINE} {value_open}", quoted(key)),
            false => {
                let kind = if is_dsml { format!(" string=\"{is_string}\"") } else { String::new() };
                quoted(&format!("{}{key}{}{kind}{}{line}", tags.key[0], tags.key[1], tags.value[0]))
            }
        };
        let close = match (is_glm, self.is_token(tags.value[1])) {
            (true, true) => TagEnd::Token(value_close.clone()),
            (true, false) => TagEnd::Letters(tags.value[1].into()),
            (false, _) => TagEnd::Letters(format!("{line}{}\n", tags.value[1])),
        };
        let rules = TagRules { tags, open: &open, close };
        let mut functions = Vec::new();
        for tool in tools {
            let members = notation::members(Notation::Tags(&rules), tool, &mut self.lark)?;
            let arguments = match is_glm {
                // Its end is the mark of the whole call.
                true => members,
                false => self.lark.rule(&format!("{members} {}", quoted(tags.end))),
            };
            functions.push((tool.name.as_str(), arguments));
        }
        Ok(functions)
    }

    /// One call, and more if `parallel`.
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

    /// Harmony messages: reasoning, a preamble for the user, then a call or the answer.
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
            Some(_) => {
                return Err(refused("prompt", "a prompt that leaves room for a call", "an answer that has begun"));
            }
            None if rules.thinking => format!("{thought}? {body}"),
            None => body,
        })
    }
}

/// Starts a call in tags.
const FUNCTION: &str = "<function=";
