//! Parsing of model output: answers generated in every format, cut in arbitrary pieces, against the generator's input.

use crate::common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tilewright::answer::{AnswerReader, CallPart, Event, Format, Problem, ToolCall};
use tilewright::formats::Gguf;
use tilewright::load::vocab_from_gguf;
use tilewright::tokenizer::{EncodeOptions, TokenType, Tokenizer};

/// Generated answers of each family.
const N_CASES: u64 = 300;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<'t>(&mut self, of: &[&'t str]) -> &'t str {
        of[self.below(of.len())]
    }
}

/// A part of an answer as a model writes it.
#[derive(Clone, Debug)]
enum Part {
    Text(String),
    /// A special token, in vocabularies that have it.
    Mark(&'static str),
}

/// An answer and its events.
#[derive(Default)]
struct Case {
    parts: Vec<Part>,
    expected: Vec<Expected>,
    tools: Option<Vec<Value>>,
    prompt: &'static str,
}

#[derive(Clone, Debug, PartialEq)]
enum Expected {
    Thinking(String),
    Text(String),
    Call(ToolCall),
    /// Not a call, but text; with the position of the problem if known.
    NotACall(String, Option<usize>),
    Open,
}

impl Case {
    fn text(&mut self, text: impl Into<String>) {
        self.parts.push(Part::Text(text.into()));
    }

    fn mark(&mut self, mark: &'static str) {
        // Of DeepSeek V3.2's marks, only `｜DSML｜` is a token.
        match mark.contains("DSML") {
            true => self.text(mark),
            false => self.parts.push(Part::Mark(mark)),
        }
    }

    fn whole(&self) -> String {
        let name = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Mark(mark) => mark.to_string(),
        };
        self.parts.iter().map(name).collect()
    }

    /// Truncates to `n_bytes`, without splitting a character.
    fn cut(&mut self, n_bytes: usize) {
        let mut left = n_bytes;
        for at in 0..self.parts.len() {
            let text = match &self.parts[at] {
                Part::Text(text) => text.clone(),
                Part::Mark(mark) => mark.to_string(),
            };
            if text.len() > left {
                let n = (0..=left).rev().find(|&n| text.is_char_boundary(n)).unwrap();
                self.parts[at] = Part::Text(text[..n].into());
                self.parts.truncate(at + 1);
                return;
            }
            left -= text.len();
        }
    }
}

/// Events with consecutive texts merged, and without the wording of problems.
fn simplified(events: &[Event]) -> Vec<Expected> {
    let mut all: Vec<Expected> = Vec::new();
    for event in events {
        match (event, all.last_mut()) {
            (Event::Text(more), Some(Expected::Text(text))) => *text += more,
            (Event::Thinking(more), Some(Expected::Thinking(text))) => *text += more,
            (Event::Text(text), _) => all.push(Expected::Text(text.clone())),
            (Event::Thinking(text), _) => all.push(Expected::Thinking(text.clone())),
            (Event::Call(call), _) => all.push(Expected::Call(call.clone())),
            (Event::NotACall { text, problem }, _) => {
                all.push(Expected::NotACall(text.clone(), Some(problem.position)));
            }
            (Event::Open(_), _) => all.push(Expected::Open),
            (Event::CallPart(part), _) => panic!("{part:?}"),
        }
    }
    all
}

fn problems(events: &[Event]) -> Vec<Problem> {
    let of = |event: &Event| match event {
        Event::NotACall { problem, .. } | Event::Open(problem) => Some(problem.clone()),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

/// Pieces of texts and strings meant to mislead the parser.
const PIECES: [&str; 34] = [
    "a",
    "word",
    " ",
    "ü",
    "漢字",
    "🦀",
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "\n",
    "\t",
    "<",
    "</",
    ">",
    "'",
    ", ",
    "=",
    ":",
    ";",
    "(",
    ")",
    "{\"name\": \"x\"}",
    "]]",
    "\\n",
    "<too",
    "x\u{302}",
    "0",
    "-1.5",
    "null",
    "True",
    "%",
];
const MARKS: [&str; 19] = [
    "<arg_key>",
    "</seed:think>",
    "<|tool_call_begin|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call>",
    "<tool_call|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|end|>",
    "<|tool_call_end|>",
    "<|tool_call|>",
    "<|python_tag|>",
    "<function=",
];

fn string(rng: &mut Rng, marks: bool) -> String {
    let n = rng.below(9);
    let mut text = String::new();
    for _ in 0..n {
        text += if marks && rng.one_in(8) { rng.pick(&MARKS) } else { rng.pick(&PIECES) };
    }
    text
}

/// Text that begins and ends with a letter and contains no mark.
fn prose(rng: &mut Rng) -> String {
    format!("{}{}{}", rng.pick(&["I", "So", "é"]), string(rng, false).replace(";", ","), rng.pick(&["x", "…", "."]))
}

fn identifier(rng: &mut Rng) -> String {
    let mut name = rng.pick(&["get", "set", "look_up", "f", "sunTimes"]).to_string();
    for _ in 0..rng.below(3) {
        name += rng.pick(&["_a", "B", "7", "_weather"]);
    }
    name
}

fn value(rng: &mut Rng, depth: usize, plain_keys: bool) -> Value {
    match rng.below(if depth > 2 { 6 } else { 8 }) {
        0 => Value::Null,
        1 => json!(rng.one_in(2)),
        2 => json!(rng.next() as i64 >> rng.below(60)),
        3 => json!((rng.below(4001) as f64 - 2000.0) / 8.0),
        4 | 5 => json!(string(rng, true)),
        6 => (0..rng.below(4)).map(|_| value(rng, depth + 1, plain_keys)).collect(),
        _ => Value::Object(object(rng, depth + 1, plain_keys)),
    }
}

fn object(rng: &mut Rng, depth: usize, plain_keys: bool) -> Map<String, Value> {
    let key = |rng: &mut Rng| match plain_keys || depth == 0 {
        true => identifier(rng),
        false => format!("k{}", string(rng, true)),
    };
    (0..rng.below(5)).map(|_| (key(rng), value(rng, depth, plain_keys))).collect()
}

fn written(rng: &mut Rng, value: &Value) -> String {
    match rng.below(3) {
        0 => value.to_string(),
        1 => format!("{value:#}"),
        // As Python's `json.dumps` escapes characters by default.
        _ => {
            let mut text = String::new();
            for c in value.to_string().chars() {
                match c.is_ascii() {
                    true => text.push(c),
                    false => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text += &format!("\\u{unit:04x}")),
                }
            }
            text
        }
    }
}

fn python(rng: &mut Rng, value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => {
            let quote = if rng.one_in(2) { '\'' } else { '"' };
            let mut out = String::from(quote);
            for c in text.chars() {
                match c {
                    '\n' => out += "\\n",
                    '\\' => out += "\\\\",
                    c if c == quote => out.extend(['\\', c]),
                    c if !c.is_ascii() && rng.one_in(3) => out += &format!("\\U{:08x}", c as u32),
                    c => out.push(c),
                }
            }
            out.push(quote);
            out
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| python(rng, item)).collect();
            match items.len() > 1 && rng.one_in(3) {
                true => format!("({})", items.join(",")),
                false => format!("[{}]", items.join(", ")),
            }
        }
        Value::Object(fields) => {
            let field =
                |(key, value): (&String, &Value)| format!("{}: {}", python(rng, &json!(key)), python(rng, value));
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Writes a value as Gemma 4's template does.
fn gemma(case: &mut Case, value: &Value, quoted_keys: bool) {
    const QUOTE: &str = "<|\"|>";
    let quoted = |case: &mut Case, text: &str| {
        case.mark(QUOTE);
        case.text(text);
        case.mark(QUOTE);
    };
    match value {
        Value::String(text) => quoted(case, text),
        Value::Array(items) => {
            case.text("[");
            for (at, item) in items.iter().enumerate() {
                case.text(if at > 0 { "," } else { "" });
                gemma(case, item, quoted_keys);
            }
            case.text("]");
        }
        Value::Object(fields) => {
            case.text("{");
            for (at, (key, value)) in fields.iter().enumerate() {
                case.text(if at > 0 { "," } else { "" });
                if quoted_keys {
                    quoted(case, key)
                } else {
                    case.text(key.as_str())
                }
                case.text(":");
                gemma(case, value, quoted_keys);
            }
            case.text("}");
        }
        Value::Null => case.text("None"),
        other => case.text(other.to_string()),
    }
}

/// Writes the calls; text between two of them is allowed only if each has its own mark.
fn write_calls(case: &mut Case, rng: &mut Rng, format: Format, calls: &mut [ToolCall]) {
    let list = |rng: &mut Rng, calls: &[ToolCall], id: bool| {
        let call = |call: &ToolCall| match (&call.id, id) {
            (Some(id), true) => json!({"name": call.name, "arguments": call.arguments, "id": id}),
            _ => json!({"name": call.name, "arguments": call.arguments}),
        };
        written(rng, &calls.iter().map(call).collect())
    };
    match format {
        Format::Granite => {
            case.mark("<|tool_call|>");
            let calls = list(rng, calls, false);
            case.text(calls);
        }
        Format::Lfm2 => {
            case.mark("<|tool_call_start|>");
            case.text("[");
            for (at, call) in calls.iter().enumerate() {
                case.text(if at > 0 { ", " } else { "" });
                let argument = |(key, value): (&String, &Value)| format!("{key}={}", python(rng, value));
                let arguments: Vec<String> = call.arguments.iter().map(argument).collect();
                case.text(format!("{}({})", call.name, arguments.join(", ")));
            }
            case.text("]");
            case.mark("<|tool_call_end|>");
        }
        Format::Mistral if rng.one_in(2) => {
            calls.iter_mut().enumerate().for_each(|(at, call)| call.id = Some(format!("abCD0000{at}")));
            case.mark("[TOOL_CALLS]");
            let calls = list(rng, calls, true);
            case.text(calls);
        }
        Format::Mistral => {
            for (at, call) in calls.iter_mut().enumerate() {
                case.mark("[TOOL_CALLS]");
                case.text(call.name.clone());
                if rng.one_in(2) {
                    call.id = Some(format!("x1y2z3w4{at}"));
                    case.mark("[CALL_ID]");
                    case.text(call.id.clone().unwrap());
                }
                case.mark("[ARGS]");
                let arguments = written(rng, &json!(call.arguments));
                case.text(arguments);
            }
        }
        Format::Llama3 => {
            let has_mark = rng.one_in(2);
            if has_mark {
                case.mark("<|python_tag|>");
            }
            for (at, call) in calls.iter().enumerate() {
                case.text(if at > 0 { "; " } else { "" });
                let key = if rng.one_in(4) { "arguments" } else { "parameters" };
                let json = written(rng, &json!({"name": call.name, key: call.arguments}));
                case.text(json);
            }
        }
        Format::Json => {
            let json = match calls {
                [call] if rng.one_in(2) => written(rng, &json!({"name": call.name, "arguments": call.arguments})),
                calls => list(rng, calls, false),
            };
            case.text(json);
        }
        Format::Hermes | Format::Xml | Format::Gemma4 => {
            for (at, call) in calls.iter().enumerate() {
                if at > 0 && format != Format::Gemma4 {
                    case.text("\n");
                }
                write_call(case, rng, format, call);
            }
        }
        Format::NemotronV2 => {
            case.mark("<TOOLCALL>");
            let calls = list(rng, calls, false);
            case.text(calls);
            case.mark("</TOOLCALL>");
        }
        Format::Glm | Format::SeedOss => calls.iter().enumerate().for_each(|(at, call)| {
            case.text(if at > 0 { "\n" } else { "" });
            write_tagged(case, rng, format, call);
        }),
        Format::Dsml | Format::MiniMax => {
            let [open, close] = match format {
                Format::Dsml => ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"],
                _ => ["<minimax:tool_call>", "</minimax:tool_call>"],
            };
            case.mark(open);
            case.text("\n");
            calls.iter().for_each(|call| write_tagged(case, rng, format, call));
            case.mark(close);
        }
        Format::DeepSeek => {
            case.mark("<｜tool▁calls▁begin｜>");
            // As V3 and R1, or as V3.1.
            let is_fenced = rng.one_in(2);
            for (at, call) in calls.iter().enumerate() {
                case.text(if at > 0 && is_fenced { "\n" } else { "" });
                case.mark("<｜tool▁call▁begin｜>");
                case.text(if is_fenced { "function" } else { &call.name });
                case.mark("<｜tool▁sep｜>");
                let arguments = written(rng, &json!(call.arguments));
                case.text(match is_fenced {
                    true => format!("{}\n```json\n{arguments}\n```", call.name),
                    false => arguments,
                });
                case.mark("<｜tool▁call▁end｜>");
            }
            case.mark("<｜tool▁calls▁end｜>");
        }
        Format::KimiK2 => {
            case.mark("<|tool_calls_section_begin|>");
            let first = rng.below(12);
            for (at, call) in calls.iter_mut().enumerate() {
                call.id = Some(format!("functions.{}:{}", call.name, first + at));
                case.mark("<|tool_call_begin|>");
                case.text(call.id.clone().unwrap());
                case.mark("<|tool_call_argument_begin|>");
                let arguments = written(rng, &json!(call.arguments));
                case.text(arguments);
                case.mark("<|tool_call_end|>");
            }
            case.mark("<|tool_calls_section_end|>");
        }
        Format::Harmony | Format::Plain => unreachable!("{format} has another generator"),
    }
}

/// A call with arguments between tags, as GLM's, Seed-OSS's, DeepSeek V3.2's and MiniMax M2's templates write it.
fn write_tagged(case: &mut Case, rng: &mut Rng, format: Format, call: &ToolCall) {
    // GLM 4.6 begins lines, GLM 4.7 does not.
    let line = if format == Format::Glm && rng.one_in(2) { "" } else { "\n" };
    match format {
        Format::Glm => {
            case.mark("<tool_call>");
            case.text(format!("{}{line}", call.name));
        }
        Format::SeedOss => {
            case.mark("<seed:tool_call>");
            case.text(format!("\n<function={}>\n", call.name));
        }
        Format::Dsml => case.text(format!("<｜DSML｜invoke name=\"{}\">\n", call.name)),
        _ => case.text(format!("<invoke name=\"{}\">\n", call.name)),
    }
    for (key, value) in &call.arguments {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Object(_) if format == Format::SeedOss => python(rng, value),
            other => other.to_string(),
        };
        match format {
            Format::Glm => {
                case.mark("<arg_key>");
                case.text(key.as_str());
                case.mark("</arg_key>");
                case.text(line);
                case.mark("<arg_value>");
                case.text(text);
                case.mark("</arg_value>");
                case.text(line);
            }
            Format::SeedOss => case.text(format!("<parameter={key}>{text}</parameter>\n")),
            Format::Dsml => {
                let tag = format!("<｜DSML｜parameter name=\"{key}\" string=\"{}\">", value.is_string());
                case.text(format!("{tag}{text}</｜DSML｜parameter>\n"));
            }
            _ => case.text(format!("<parameter name=\"{key}\">{text}</parameter>\n")),
        }
    }
    match format {
        Format::Glm => case.mark("</tool_call>"),
        Format::SeedOss => {
            case.text("</function>\n");
            case.mark("</seed:tool_call>");
        }
        Format::Dsml => case.text("</｜DSML｜invoke>\n"),
        _ => case.text("</invoke>\n"),
    }
}

fn write_call(case: &mut Case, rng: &mut Rng, format: Format, call: &ToolCall) {
    match format {
        Format::Hermes => {
            let arguments = match rng.one_in(5) {
                // A string that contains the object.
                true => json!(json!(call.arguments).to_string()),
                false => json!(call.arguments),
            };
            let json = written(rng, &json!({"name": call.name, "arguments": arguments}));
            case.mark("<tool_call>");
            case.text(format!("\n{json}\n"));
            if !rng.one_in(8) {
                case.mark("</tool_call>");
            }
        }
        Format::Xml => {
            let is_marked = !rng.one_in(8);
            if is_marked {
                case.mark("<tool_call>");
            }
            let mut text = format!("\n<function={}>\n", call.name);
            for (key, value) in &call.arguments {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                // Sometimes omitted.
                let end = if rng.one_in(8) && !value.is_empty() { "" } else { "\n</parameter>" };
                text += &format!("<parameter={key}>\n{value}{end}\n");
            }
            text += "</function>\n";
            case.text(if is_marked { text.as_str() } else { text.trim() });
            if is_marked {
                case.mark("</tool_call>");
            }
        }
        _ => {
            case.mark("<|tool_call>");
            case.text(format!("call:{}", call.name));
            gemma(case, &json!(call.arguments), rng.one_in(3));
            case.mark("<tool_call|>");
        }
    }
}

/// The marks around a call and around reasoning.
fn marks_of(format: Format) -> (Option<&'static str>, &'static str, &'static str) {
    let call = match format {
        Format::Hermes | Format::Xml => Some("<tool_call>"),
        Format::Llama3 => Some("<|python_tag|>"),
        Format::Mistral => Some("[TOOL_CALLS]"),
        Format::Gemma4 => Some("<|tool_call>"),
        Format::Lfm2 => Some("<|tool_call_start|>"),
        Format::Granite => Some("<|tool_call|>"),
        Format::NemotronV2 => Some("<TOOLCALL>"),
        Format::Glm => Some("<tool_call>"),
        Format::SeedOss => Some("<seed:tool_call>"),
        Format::DeepSeek => Some("<｜tool▁calls▁begin｜>"),
        Format::Dsml => Some("<｜DSML｜function_calls>"),
        Format::KimiK2 => Some("<|tool_calls_section_begin|>"),
        Format::MiniMax => Some("<minimax:tool_call>"),
        Format::Harmony | Format::Json | Format::Plain => None,
    };
    match format {
        Format::SeedOss => (call, "<seed:think>", "</seed:think>"),
        Format::Mistral => (call, "[THINK]", "[/THINK]"),
        Format::Gemma4 => (call, "<|channel>", "<channel|>"),
        _ => (call, "<think>", "</think>"),
    }
}

fn calls(rng: &mut Rng, format: Format, n: usize) -> Vec<ToolCall> {
    let plain_keys = matches!(format, Format::Gemma4);
    let call = |_| {
        let mut arguments = object(rng, 0, plain_keys);
        if format == Format::Xml {
            // A value ends at its closing tag.
            for value in arguments.values_mut().filter(|value| value.is_string()) {
                *value = json!(value.as_str().unwrap().replace("<function=", "<functio").trim_matches('\n'));
            }
        }
        ToolCall { name: identifier(rng), arguments, id: None }
    };
    (0..n).map(call).collect()
}

/// Tool definitions for these calls, with the type of each argument.
fn tools_of(calls: &[ToolCall]) -> Vec<Value> {
    let of = |call: &ToolCall| {
        let kind = |value: &Value| if value.is_string() { "string" } else { "object" };
        let properties: Map<String, Value> =
            call.arguments.iter().map(|(key, value)| (key.clone(), json!({"type": kind(value)}))).collect();
        json!({"type": "function", "function": {"name": call.name, "parameters": {"properties": properties}}})
    };
    calls.iter().map(of).collect()
}

fn case(seed: u64, format: Format) -> Case {
    let mut rng = Rng(seed);
    if format == Format::Harmony {
        return harmony(&mut rng);
    }
    let rng = &mut rng;
    let (call_mark, open, close) = marks_of(format);
    let mut case = Case::default();
    let name = if format == Format::Gemma4 { "thought\n" } else { "" };
    match rng.below(4) {
        // Opened by the template.
        0 => {
            let thought = prose(rng);
            case.prompt = open;
            case.text(format!("{name}\n{thought}\n"));
            case.mark(close);
            case.expected.push(Expected::Thinking(thought));
        }
        1 => {
            let thought = prose(rng);
            case.mark(open);
            case.text(format!("{name}{thought}"));
            case.mark(close);
            case.expected.push(Expected::Thinking(thought));
        }
        // Empty reasoning.
        2 => {
            case.mark(open);
            case.text(format!("{name}\n\n"));
            case.mark(close);
            case.text("\n\n");
        }
        _ => {}
    }
    let is_bare = matches!(format, Format::Json);
    let has_text = format == Format::Plain || (rng.one_in(2) && !is_bare);
    // Llama's calls have no mark: text before one would make it text.
    let has_text = has_text && format != Format::Llama3;
    if has_text {
        let text = prose(rng);
        case.text(text.clone());
        case.expected.push(Expected::Text(text));
        case.text(rng.pick(&["", "\n", "\n\n"]));
    }
    if format == Format::Plain {
        let space = match case.parts.last() {
            Some(Part::Text(space)) => space.clone(),
            _ => String::new(),
        };
        if let Some(Expected::Text(text)) = case.expected.last_mut() {
            *text += &space;
        }
        return case;
    }
    let n_calls = 1 + rng.below(2);
    let mut calls = calls(rng, format, n_calls);
    if n_calls == 2 && calls[0].name == calls[1].name {
        calls[1].name += "_other";
    }
    let is_untyped = matches!(format, Format::Xml | Format::Glm | Format::SeedOss | Format::MiniMax);
    if rng.one_in(2) || is_untyped {
        case.tools = Some(tools_of(&calls));
    }
    let n_before = case.whole().len();
    let kind = rng.below(6);
    match (kind, call_mark) {
        // Not a call, despite the mark.
        (0, Some(mark)) => {
            let position = n_before + mark.len();
            case.mark(mark);
            case.text("%oops");
            let space = case.parts.iter().rev().nth(2).and_then(|part| match part {
                Part::Text(space) if has_text => Some(space.clone()),
                _ => None,
            });
            if let (Some(Expected::Text(text)), Some(space)) = (case.expected.last_mut(), space) {
                *text += &space;
            }
            case.expected.push(Expected::NotACall(mark.into(), Some(position)));
            case.expected.push(Expected::Text("%oops".into()));
        }
        // Truncated within the call.
        (1, Some(mark)) => {
            let mut one = calls[..1].to_vec();
            let at = case.parts.len();
            write_calls(&mut case, rng, format, &mut one);
            let begin = match &case.parts[at] {
                Part::Mark(_) => n_before + mark.len(),
                // Without its mark it is ordinary text.
                Part::Text(_) => {
                    case.expected.extend(one.into_iter().map(Expected::Call));
                    return case;
                }
            };
            // A call's end mark may be missing.
            let whole = case.whole();
            let ends = [
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁end｜>",
                "<|tool_calls_section_end|>",
                "<|tool_call_end|>",
                "</tool_call>",
                "<tool_call|>",
                "</TOOLCALL>",
                "</seed:tool_call>",
                "</minimax:tool_call>",
            ];
            let end = ends.iter().fold(whole.as_str(), |whole, end| whole.trim_end_matches(end)).trim_end();
            let n = begin + rng.below(end.len() - begin);
            case.cut(n);
            let cut = case.whole();
            if has_text && let Some(Expected::Text(text)) = case.expected.last_mut() {
                let written = cut[..n_before].trim_end().len();
                *text += &cut[written..n_before];
            }
            case.expected.push(Expected::NotACall(cut[n_before..].into(), Some(cut.len())));
        }
        _ => {
            write_calls(&mut case, rng, format, &mut calls);
            case.expected.extend(calls.into_iter().map(Expected::Call));
            if rng.one_in(3) {
                let text = prose(rng);
                case.text(format!("{}{text}\n", rng.pick(&["", "\n", "\n\n"])));
                case.expected.push(Expected::Text(text + "\n"));
            }
        }
    }
    case
}

/// Messages of gpt-oss; the template begins the first header, and several headers are malformed.
fn harmony(rng: &mut Rng) -> Case {
    let mut case = Case { prompt: "<|start|>assistant", ..Case::default() };
    let mut is_first = true;
    let mut begin = |case: &mut Case| {
        if !std::mem::take(&mut is_first) {
            case.mark("<|start|>");
            case.text("assistant");
        }
    };
    if !rng.one_in(4) {
        let thought = prose(rng);
        begin(&mut case);
        case.mark("<|channel|>");
        case.text("analysis");
        case.mark("<|message|>");
        case.text(thought.clone());
        // Sometimes omitted if another message follows.
        if !rng.one_in(6) {
            case.mark("<|end|>");
        }
        case.expected.push(Expected::Thinking(thought));
    }
    let mut message = |case: &mut Case, channel: &str, text: &str| {
        begin(case);
        case.mark("<|channel|>");
        case.text(channel);
        case.mark("<|message|>");
        case.text(text);
    };
    if rng.one_in(3) {
        let text = prose(rng);
        message(&mut case, "commentary", &text);
        case.mark("<|end|>");
        case.expected.push(Expected::Text(text));
    }
    match rng.below(5) {
        0 => {
            let text = prose(rng);
            message(&mut case, rng.pick(&["final", "final ", "", "comment"]), &text);
            match case.expected.last_mut() {
                Some(Expected::Text(before)) => *before += &text,
                _ => case.expected.push(Expected::Text(text)),
            }
            case.mark(rng.pick(&["<|return|>", "<|end|>"]));
        }
        kind => {
            begin(&mut case);
            let mut call = calls(rng, Format::Harmony, 1).remove(0);
            let n_before = case.whole().len();
            let recipient = format!("to=functions.{}", call.name);
            let header = rng.below(9);
            match header {
                // As in the template, and as the model usually writes it.
                0 | 1 => {
                    case.text(format!(" {recipient}"));
                    case.mark("<|channel|>");
                    case.text("commentary json");
                }
                2 | 3 => {
                    case.mark("<|channel|>");
                    case.text(format!("commentary {recipient} "));
                    case.mark("<|constrain|>");
                    case.text("json");
                }
                // Malformed.
                4 => {
                    case.mark("<|channel|>");
                    case.text(format!("commentary{recipient}"));
                }
                5 => {
                    case.mark("<|channel|>");
                    case.text(format!("commentary to={} json", call.name));
                }
                6 => case.text(format!(" {recipient} json")),
                7 => case.text(format!("commentary {recipient} json")),
                _ => {
                    case.mark("<|channel|>");
                    case.text(format!("analysis {recipient} code"));
                }
            }
            case.mark("<|message|>");
            let n_header = case.whole().len();
            match kind {
                1 => {
                    case.text("%oops");
                    case.mark("<|call|>");
                    let whole = case.whole();
                    // The header includes its opening, except for the prompt's part.
                    let from = if whole[..n_before].ends_with("<|start|>assistant") { n_before - 18 } else { n_before };
                    case.expected.push(Expected::NotACall(whole[from..n_header].into(), None));
                    case.expected.push(Expected::Text("%oops".into()));
                }
                2 if rng.one_in(3) => {
                    call.arguments.clear();
                    case.mark("<|call|>");
                    case.expected.push(Expected::Call(call));
                }
                3 => {
                    let json = written(rng, &json!(call.arguments));
                    case.text(json.clone());
                    case.cut(n_header + 1 + rng.below(json.len() - 1));
                    let whole = case.whole();
                    let from = if whole[..n_before].ends_with("<|start|>assistant") { n_before - 18 } else { n_before };
                    case.expected.push(Expected::NotACall(whole[from..].into(), Some(whole.len())));
                }
                _ => {
                    let json = written(rng, &json!(call.arguments));
                    case.text(json);
                    case.mark("<|call|>");
                    case.expected.push(Expected::Call(call));
                }
            }
        }
    }
    case
}

fn reader(case: &Case, reader: AnswerReader) -> AnswerReader {
    let reader = reader.after_prompt(case.prompt);
    match &case.tools {
        Some(tools) => reader.with_tools(tools),
        None => reader,
    }
}

fn whole(case: &Case, format: Format) -> Vec<Event> {
    let mut reader = reader(case, AnswerReader::new(format));
    let mut events = reader.push_text(&case.whole());
    events.extend(reader.finish());
    events
}

fn by_characters(case: &Case, format: Format) -> Vec<Event> {
    let mut reader = reader(case, AnswerReader::new(format));
    let mut events = Vec::new();
    for c in case.whole().chars() {
        events.extend(reader.push_text(c.encode_utf8(&mut [0; 4])));
    }
    events.extend(reader.finish());
    events
}

/// As from a generation: ids whose text lags, as with stop strings.
fn by_tokens(case: &Case, format: Format, tokenizer: &Tokenizer, rng: &mut Rng) -> Vec<Event> {
    let mut reader = reader(case, AnswerReader::for_tokenizer(format, tokenizer));
    let mut ids = Vec::new();
    for part in &case.parts {
        match part {
            Part::Mark(mark) => ids.push(tokenizer.special_id(mark).unwrap()),
            Part::Text(text) => ids.extend(tokenizer.encode_with(text, EncodeOptions::default()).unwrap()),
        }
    }
    let mut decoder = tokenizer.decoder().continuing();
    let (mut events, mut late) = (Vec::new(), String::new());
    let lags = rng.one_in(2);
    for (at, &id) in ids.iter().enumerate() {
        late += &decoder.push(id).unwrap();
        let is_last = at + 1 == ids.len();
        if is_last {
            late += &decoder.finish();
        }
        let n = if lags && !is_last { rng.below(late.len() + 1) } else { late.len() };
        let n = (0..=n).rev().find(|&n| late.is_char_boundary(n)).unwrap();
        let rest = late.split_off(n);
        events.extend(reader.push(id, &late).unwrap());
        late = rest;
    }
    events.extend(reader.finish());
    events
}

/// A vocabulary with all marks as tokens of one type, and its size before they were added.
fn tokenizer(path: PathBuf, kind: TokenType) -> (Tokenizer, usize) {
    let bytes = fs::read(path).unwrap();
    let mut vocab = vocab_from_gguf(&Gguf::parse(&bytes, bytes.len() as u64).unwrap().metadata).unwrap();
    if vocab.token_types.is_empty() {
        vocab.token_types = vec![TokenType::Normal; vocab.tokens.len()];
    }
    let others = [
        "[THINK]",
        "[/THINK]",
        "[CALL_ID]",
        "<|channel>",
        "<channel|>",
        "<|\"|>",
        "<|start|>",
        "<|return|>",
        "<|constrain|>",
        "<|tool_call_start|>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<seed:think>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_calls_section_end|>",
        "<TOOLCALL>",
        "</TOOLCALL>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ];
    let mut n_known = 0;
    for mark in MARKS.into_iter().filter(|mark| *mark != "<function=").chain(others) {
        match vocab.tokens.iter().position(|token| token == mark) {
            Some(at) => {
                vocab.token_types[at] = kind;
                n_known += 1;
            }
            None => {
                vocab.tokens.push(mark.into());
                vocab.token_types.push(kind);
                if !vocab.scores.is_empty() {
                    vocab.scores.push(0.0);
                }
            }
        }
    }
    (Tokenizer::from_vocab(vocab).unwrap(), n_known)
}

#[test]
fn answer_events_do_not_depend_on_how_text_is_split() {
    let mut tokenizers = Vec::new();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoders/qwen3-embedding/model.gguf");
    let mut paths = vec![("qwen3-embedding", own)];
    for name in ["qwen35", "llama-bpe", "gemma-4"] {
        match common::find_data(Path::new(&format!("vocab/ggml-vocab-{name}.gguf"))) {
            Some(path) => paths.push((name, path)),
            None => common::skip_part(format_args!("no vocabulary `{name}`")),
        }
    }
    for (name, path) in paths {
        for kind in [TokenType::Control, TokenType::UserDefined] {
            let (tokenizer, n_known) = tokenizer(path.clone(), kind);
            println!("vocabulary {name}: {n_known} marks of its own, all {kind:?}");
            tokenizers.push(tokenizer);
        }
    }
    for format in Format::ALL {
        let (mut n_cuts, mut n_calls, mut n_broken, mut n_thoughts) = (0, 0, 0, 0);
        for seed in 0..N_CASES {
            let case = case(seed * 31 + format as u64, format);
            let events = whole(&case, format);
            let mut found = simplified(&events);
            for (found, expected) in found.iter_mut().zip(&case.expected) {
                if let (Expected::NotACall(_, at), Expected::NotACall(_, None)) = (found, expected) {
                    *at = None;
                }
            }
            let text = case.whole();
            assert_eq!(found, case.expected, "{format}, case {seed}: {text:?}\n{events:?}");
            n_calls += found.iter().filter(|event| matches!(event, Expected::Call(_))).count();
            n_broken += problems(&events).len();
            n_thoughts += found.iter().filter(|event| matches!(event, Expected::Thinking(_))).count();
            let mut check = |cut: Vec<Event>, how: &str| {
                assert_eq!(simplified(&cut), simplified(&events), "{format}, case {seed}, {how}: {text:?}");
                assert_eq!(problems(&cut), problems(&events), "{format}, case {seed}, {how}: {text:?}");
                n_cuts += 1;
            };
            check(by_characters(&case, format), "by characters");
            // In Gemma's vocabulary, DeepSeek's marks have spaces.
            let keeps =
                |text: &str, of: &Tokenizer| of.decode(&of.encode(text, false).unwrap(), false).unwrap() == text;
            let able = tokenizers.iter().enumerate().filter(|(_, of)| format != Format::DeepSeek || keeps("▁", of));
            for (at, tokenizer) in able {
                check(by_tokens(&case, format, tokenizer, &mut Rng(seed)), &format!("tokens of vocabulary {at}"));
            }
        }
        println!(
            "{format}: {N_CASES} answers, {n_cuts} cuts of them, {n_calls} calls, {n_thoughts} thoughts, {n_broken} broken"
        );
    }
}

/// Output in the form of published models' templates, by file name.
/// The calls of events in parts, joined, and the number of parts; the other events.
fn joined(events: Vec<Event>) -> (Vec<CallPart>, usize, Vec<Event>) {
    let (mut calls, mut n_parts, mut others): (Vec<CallPart>, _, _) = (Vec::new(), 0, Vec::new());
    for event in events {
        let Event::CallPart(part) = event else {
            others.push(event);
            continue;
        };
        n_parts += 1;
        if part.is_first {
            calls.push(part);
            continue;
        }
        let call = calls.last_mut().unwrap();
        assert!(call.name == part.name && !call.is_last, "{call:?}, {part:?}");
        call.arguments += &part.arguments;
        call.is_last = part.is_last;
    }
    (calls, n_parts, others)
}

/// Calls in parts are those of the parser of whole calls. In an answer that is cut off, they begin the same calls, and
/// nothing of them is text.
#[test]
fn call_parts_are_the_beginning_of_the_whole_calls() {
    for format in Format::ALL {
        let (mut n_calls, mut n_parts, mut n_cut) = (0, 0, 0);
        for seed in 0..N_CASES / 3 {
            let case = case(seed * 31 + format as u64, format);
            let (text, plain) = (case.whole(), whole(&case, format));
            let new = || reader(&case, AnswerReader::new(format)).with_call_parts();
            let (mut parts, mut events) = (new(), Vec::new());
            text.chars().for_each(|c| events.extend(parts.push_text(c.encode_utf8(&mut [0; 4]))));
            events.extend(parts.finish());
            let (calls, n, others) = joined(events);
            let expected = plain.iter().filter_map(|event| match event {
                Event::Call(call) => Some((call.name.clone(), Value::Object(call.arguments.clone()).to_string())),
                _ => None,
            });
            let expected: Vec<(String, String)> = expected.collect();
            let complete = calls.iter().filter(|call| call.is_last);
            let complete: Vec<_> = complete.map(|call| (call.name.clone(), call.arguments.clone())).collect();
            (n_calls, n_parts) = (n_calls + expected.len(), n_parts + n);
            if !problems(&plain).is_empty() {
                // Calls of a list that does not end are complete as well.
                let is_given = |call| complete.contains(call);
                assert!(expected.iter().all(is_given), "{format}, case {seed}: {text:?}, {complete:?}");
                continue;
            }
            assert_eq!(complete, expected, "{format}, case {seed}: {text:?}");
            assert!(calls.iter().all(|call| call.is_last), "{format}, case {seed}: {text:?}");
            let texts = plain.into_iter().filter(|event| !matches!(event, Event::Call(_)));
            assert_eq!(simplified(&others), simplified(&texts.collect::<Vec<_>>()), "{format}, case {seed}: {text:?}");

            for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)).step_by(3) {
                let mut cut = new();
                let mut events = cut.push_text(&text[..end]);
                events.extend(cut.finish_cut());
                let (begun, _, others) = joined(events);
                let begins = |(cut, whole): (&CallPart, &CallPart)| {
                    let is_equal = cut.arguments == whole.arguments;
                    cut.name == whole.name && whole.arguments.starts_with(&cut.arguments) && (is_equal || !cut.is_last)
                };
                assert!(begun.len() <= calls.len(), "{format}, case {seed}, {end}: {begun:?}");
                assert!(begun.iter().zip(&calls).all(begins), "{format}, case {seed}, {end}: {begun:?}, {calls:?}");
                let is_text = |event: &Event| matches!(event, Event::NotACall { .. });
                let has_marks = !matches!(format, Format::Json | Format::Llama3 | Format::Harmony);
                assert!(!(has_marks && others.iter().any(is_text)), "{format}, case {seed}, {end}: {others:?}");
                n_cut += begun.iter().filter(|call| !call.is_last).count();
            }
        }
        println!("{format}: {n_calls} calls in {n_parts} parts, {n_cut} cut off");
        assert!(format == Format::Plain || (n_parts > 3 * n_calls && n_cut > 50), "{format}");
    }
}

#[test]
fn tool_format_is_detected_from_the_template() {
    let Some(folder) = common::find_data(Path::new("chat-templates")) else {
        return common::skip(format_args!("no chat templates"));
    };
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            found.insert(name, Format::detect(&fs::read_to_string(&path).unwrap(), |_| false));
        }
    }
    let expected = [
        (Format::Hermes, "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"),
        (Format::Hermes, "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
        (Format::Hermes, "Qwen-QwQ-32B"),
        (Format::Hermes, "Qwen-Qwen2.5-7B-Instruct"),
        (Format::Hermes, "Qwen-Qwen3-0.6B"),
        (Format::Hermes, "ibm-granite-granite-4.0"),
        (Format::Hermes, "ibm-granite-granite-4.1"),
        (Format::Hermes, "Bielik-11B-v3.0-Instruct"),
        (Format::Hermes, "MiMo-VL"),
        (Format::Hermes, "Reka-Edge"),
        (Format::Xml, "Qwen3-Coder"),
        (Format::Xml, "Qwen3.5-4B"),
        (Format::Xml, "StepFun3.5-Flash"),
        (Format::Xml, "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        (Format::Llama3, "meta-llama-Llama-3.1-8B-Instruct"),
        (Format::Llama3, "meta-llama-Llama-3.2-3B-Instruct"),
        (Format::Llama3, "meta-llama-Llama-3.3-70B-Instruct"),
        (Format::Mistral, "Mistral-Small-3.2-24B-Instruct-2506"),
        (Format::Mistral, "mistralai-Ministral-3-14B-Reasoning-2512"),
        (Format::Mistral, "mistralai-Mistral-Nemo-Instruct-2407"),
        (Format::Mistral, "unsloth-mistral-Devstral-Small-2507"),
        (Format::Gemma4, "google-gemma-4-31B-it"),
        (Format::Gemma4, "google-gemma-4-31B-it-interleaved"),
        (Format::Harmony, "openai-gpt-oss-120b"),
        (Format::Lfm2, "LFM2-8B-A1B"),
        (Format::Lfm2, "LFM2.5-8B-A1B"),
        (Format::Lfm2, "LFM2.5-Instruct"),
        (Format::Granite, "ibm-granite-granite-3.3-2B-Instruct"),
        (Format::NemotronV2, "NVIDIA-Nemotron-Nano-v2"),
        (Format::Glm, "GLM-4.6"),
        (Format::Glm, "GLM-4.7-Flash"),
        (Format::Glm, "inclusionai-ling-3.0-flash"),
        (Format::SeedOss, "ByteDance-Seed-OSS"),
        (Format::DeepSeek, "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
        (Format::DeepSeek, "deepseek-ai-DeepSeek-V3.1"),
        (Format::Dsml, "deepseek-ai-DeepSeek-V3.2"),
        (Format::KimiK2, "Kimi-K2-Instruct"),
        (Format::KimiK2, "Kimi-K2-Thinking"),
        (Format::KimiK2, "moonshotai-Kimi-K2"),
        (Format::MiniMax, "MiniMax-M2"),
        (Format::Plain, "MiniMax-M3"),
        (Format::Plain, "meetkai-functionary-medium-v3.1"),
        (Format::Plain, "meetkai-functionary-medium-v3.2"),
        (Format::Json, "google-gemma-2-2b-it"),
        (Format::Json, "microsoft-Phi-3.5-mini-instruct"),
    ];
    for (format, name) in expected {
        assert_eq!(found.get(name), Some(&format), "{name}");
    }
    let mut counts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, format) in &found {
        counts.entry(format.name()).or_default().push(name);
    }
    println!("{} of {} templates are known by name", expected.len(), found.len());
    for (format, names) in counts {
        println!("{format}: {}", names.join(" "));
    }
}

/// A model was trained to answer in the form in which its published template writes calls.
#[cfg(feature = "chat")]
#[test]
fn calls_rendered_by_templates_are_parsed_back() {
    use tilewright::chat::{ChatOptions, ChatTemplate, Message, SpecialTexts};

    let Some(folder) = common::find_data(Path::new("chat-templates")) else {
        return common::skip(format_args!("no chat templates"));
    };
    let arguments = json!({
        "text": "a \"b\" {c}\n<d> é🦀 </tool_call>",
        "n": -3,
        "x": 1.5,
        "yes": true,
        "list": ["a", 2],
        "in": {"k": "v"},
    });
    let tool = json!({"type": "function", "function": {"name": "look_up", "description": "Looks.", "parameters": {
        "type": "object", "properties": {"text": {"type": "string", "description": "A text."}}, "required": ["text"],
    }}});
    let call = json!({"type": "function", "id": "abc123def", "function": {"name": "look_up", "arguments": arguments}});
    let mut asked = Message::new("assistant", "");
    asked.fields.insert("tool_calls".into(), json!([call]));
    let question = Message::new("user", "What is it?");
    let tools = vec![tool];
    let special: SpecialTexts = serde_json::from_value(json!({"bos_token": "<s>", "eos_token": "</s>"})).unwrap();
    let mut n_read = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(source) = fs::read_to_string(&path) else { continue };
        let format = Format::detect(&source, |_| false);
        if path.extension().is_none_or(|extension| extension != "jinja")
            || matches!(format, Format::Plain | Format::Json)
        {
            continue;
        }
        let template = ChatTemplate::from_source(&source, special.clone()).unwrap();
        let render = |messages: &[Message], add_generation_prompt| {
            let tools = Some(tools.clone());
            let options = ChatOptions { add_generation_prompt, tools, now: Some(0), ..ChatOptions::default() };
            template.render(messages, &options).map(|rendered| rendered.text().to_owned())
        };
        let prompt = render(std::slice::from_ref(&question), true).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy();
        // Some write a list for several calls, and some reject a message without text.
        let Ok(whole) = render(&[question.clone(), asked.clone()], false) else {
            println!("{name} refuses the conversation");
            continue;
        };
        let same: usize =
            prompt.chars().zip(whole.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        // Not within a mark.
        let same = prompt[..same].rfind('<').filter(|&at| !prompt[at..same].contains('>')).unwrap_or(same);
        let mut reader = AnswerReader::new(format).with_tools(&tools).after_prompt(&prompt[..same]);
        let mut events = reader.push_text(&whole[same..]);
        events.extend(reader.finish());
        let calls: Vec<&ToolCall> = events
            .iter()
            .filter_map(|event| match event {
                Event::Call(call) => Some(call),
                _ => None,
            })
            .collect();
        // Two of LFM2's templates and Granite 3's write none.
        let [call] = calls[..] else {
            println!("{name} ({format}) writes no call: {:?}", &whole[same..]);
            continue;
        };
        assert_eq!((call.name.as_str(), &json!(call.arguments)), ("look_up", &arguments), "{name}: {whole}");
        n_read += 1;
    }
    println!("calls of {n_read} templates read");
    assert!(n_read >= 36);
}

#[test]
fn tool_format_is_detected_from_the_vocabulary() {
    let has = |token: &'static str| move |name: &str| name == token;
    assert_eq!(Format::detect("{{ messages }}", has("<tool_call>")), Format::Hermes);
    assert_eq!(Format::detect("", has("<|tool_call_start|>")), Format::Lfm2);
    assert_eq!(Format::detect("", has("<｜tool▁calls▁begin｜>")), Format::DeepSeek);
    assert_eq!(Format::detect("", |name| ["<tool_call>", "<arg_key>"].contains(&name)), Format::Glm);
    assert_eq!(Format::detect("", has("nothing")), Format::Json);
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Some(format));
    }
    assert_eq!(Format::from_name("none"), None);
}

fn events(format: Format, text: &str) -> Vec<Event> {
    let mut reader = AnswerReader::new(format);
    let mut events = reader.push_text(text);
    events.extend(reader.finish());
    events
}

/// Streaming latency: text is emitted at once unless it may begin a mark.
#[test]
fn text_is_emitted_once_it_cannot_begin_a_marker() {
    let mut reader = AnswerReader::new(Format::Hermes);
    assert_eq!(reader.push_text("a < b"), [Event::Text("a < b".into())]);
    assert_eq!(reader.push_text("<tool_"), []);
    assert_eq!(reader.push_text("box> "), [Event::Text("<tool_box>".into())]);
    assert_eq!(reader.push_text("and"), [Event::Text(" and".into())]);
    // A JSON object that is not a call becomes text after its first key.
    let mut reader = AnswerReader::new(Format::Json);
    assert_eq!(reader.push_text("{\"na"), []);
    assert_eq!(reader.push_text("med\": "), [Event::Text("{\"named\":".into())]);
    assert_eq!(events(Format::Json, "{\"name\": \n"), [Event::Text("{\"name\": \n".into())]);
    assert_eq!(events(Format::Json, "{\"name\": \"Ada\"}"), [Event::Text("{\"name\": \"Ada\"}".into())]);
    // So does a call of an unknown tool.
    let answer = "{\"name\": \"Ada\", \"arguments\": {}}";
    for (tools, is_call) in [(json!([{"name": "Ada"}]), true), (json!([{"name": "Bob"}]), false), (json!([]), false)] {
        let mut reader = AnswerReader::new(Format::Json).with_tools(tools.as_array().unwrap());
        let mut events = reader.push_text(answer);
        events.extend(reader.finish());
        assert_eq!(matches!(events[..], [Event::Call(_)]), is_call, "{tools}");
        assert!(is_call || events == [Event::Text(answer.into())]);
    }
}

#[test]
fn thinking_markers_spelled_as_text_stay_text() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoders/qwen3-embedding/model.gguf");
    let (tokenizer, _) = tokenizer(path, TokenType::Control);
    let mut case = Case::default();
    case.mark("<think>");
    case.text("a </think> b");
    case.mark("</think>");
    case.text("<think>c</think>");
    // A control token without meaning here, such as end of turn.
    case.mark("<|end|>");
    let found = by_tokens(&case, Format::Hermes, &tokenizer, &mut Rng(1));
    let expected = [Expected::Thinking("a </think> b".into()), Expected::Text("<think>c</think>".into())];
    assert_eq!(simplified(&found), expected);
    // An id beyond the vocabulary has no text.
    let size = tokenizer.vocab_size() as u32;
    assert!(AnswerReader::for_tokenizer(Format::Hermes, &tokenizer).push(size, "").unwrap().is_empty());
}

#[test]
fn tool_call_inside_unclosed_thinking_is_a_call() {
    let answer = "<think>I should <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let call = ToolCall { name: "f".into(), arguments: Map::new(), id: None };
    let found = events(Format::Hermes, answer);
    assert_eq!(simplified(&found), [Expected::Thinking("I should".into()), Expected::Call(call)]);
    let found = events(Format::Hermes, "<think>With <tool_call> one calls.</think>Yes");
    let expected = [Expected::Thinking("With <tool_call> one calls.".into()), Expected::Text("Yes".into())];
    assert_eq!(simplified(&found), expected);
    // Truncated within both.
    let found = events(Format::Hermes, "<think>So <tool_call>{\"name\": ");
    let expected = [Expected::Thinking("So <tool_call>{\"name\":".into()), Expected::Open];
    assert_eq!(simplified(&found), expected);
}

#[test]
fn alternative_call_syntaxes_are_parsed() {
    let one = |format, text: &str, name: &str, arguments: Value| {
        let found = events(format, text);
        let Some(Event::Call(call)) = found.first() else { panic!("{text}: {found:?}") };
        assert_eq!((call.name.as_str(), json!(call.arguments)), (name, arguments), "{text}");
    };
    one(Format::Llama3, "<|python_tag|>brave_search.call(query=\"a\\\"b\")", "brave_search", json!({"query": "a\"b"}));
    one(Format::Mistral, "[TOOL_CALLS]f{\"a\": 1}", "f", json!({"a": 1}));
    one(Format::Granite, "<tool_call>[{\"name\": \"f\", \"arguments\": {\"a\": null}}]", "f", json!({"a": null}));
    one(
        Format::Lfm2,
        "<|tool_call_start|>[{\"name\": \"f\", \"arguments\": {\"a\": []}}]<|tool_call_end|>",
        "f",
        json!({"a": []}),
    );
    one(
        Format::Lfm2,
        "<|tool_call_start|>[f(a=.5, b=1_000, c=(1,), d='\\x41\\q')]<|tool_call_end|>",
        "f",
        json!({"a": 0.5, "b": 1000.0, "c": [1], "d": "A\\q"}),
    );
    one(Format::Gemma4, "<|tool_call>call:f{a: \"b}\", c:null}<tool_call|>", "f", json!({"a": "b}", "c": null}));
    one(
        Format::Hermes,
        "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>",
        "f",
        json!({"a": "x"}),
    );
    one(
        Format::Hermes,
        "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {}}}",
        "f",
        json!({}),
    );
    // A section's mark is missing, or those of its end.
    one(Format::KimiK2, "<|tool_call_begin|>f<|tool_call_argument_begin|>{\"a\": 1}", "f", json!({"a": 1}));
    one(Format::DeepSeek, "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{\"a\": 1}", "f", json!({"a": 1}));
    one(Format::MiniMax, "<invoke name=\"f\"><parameter name=\"a\">1</parameter></invoke>", "f", json!({"a": 1}));
    one(
        Format::SeedOss,
        "<seed:tool_call><function=f><parameter=a>{'b': [True, None]}</parameter></function></seed:tool_call>",
        "f",
        json!({"a": {"b": [true, null]}}),
    );
    one(
        Format::Dsml,
        "<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter></｜DSML｜invoke>",
        "f",
        json!({"a": "1"}),
    );
    // A gpt-oss answer without a header.
    assert_eq!(events(Format::Harmony, "Hello there."), [Event::Text("Hello there.".into())]);
    let found = events(Format::Granite, "<think>a</think>\n<response>b</response>");
    assert_eq!(simplified(&found), [Expected::Thinking("a".into()), Expected::Text("b".into())]);
}

#[test]
fn malformed_calls_are_reported_with_their_problem() {
    let problem = |format, text: &str| {
        let found = events(format, text);
        problems(&found).first().unwrap_or_else(|| panic!("{text}: {found:?}")).to_string()
    };
    let cut = problem(Format::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b");
    assert_eq!(cut, "answer (hermes): at byte 46 is the end of the answer, expected the end of a string");
    let open = problem(Format::Hermes, "<think>so");
    assert_eq!(open, "answer (hermes): at byte 9 is the end of the answer, expected the end of the reasoning");
    for (format, text, expected) in [
        (Format::Hermes, "<tool_call>[]</tool_call>", "an empty list, expected a call"),
        (Format::Hermes, "<tool_call>{\"name\": \"\"}</tool_call>", "expected a JSON object with a name"),
        (
            Format::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
            "expected arguments as a JSON object",
        ),
        (Format::Hermes, "<tool_call>{\"name\" \"f\"}</tool_call>", "expected JSON"),
        (Format::Hermes, "<tool_call>{\"a\": ]", "expected a bracket that closes the innermost one"),
        (Format::Xml, "<function=f><parameter=a>b</parameter>c</function>", "expected `<parameter=` or `</function>`"),
        (Format::Xml, "<function=f\n", "expected a name and `>`"),
        (Format::Mistral, "[TOOL_CALLS][ARGS]{}", "expected"),
        (Format::Mistral, "[TOOL_CALLS]a b[ARGS]{}", "expected a name and `[ARGS]`"),
        (Format::Gemma4, "<|tool_call>cell:f{}<tool_call|>", "expected `call:` and a name"),
        (Format::Gemma4, "<|tool_call>call:f{a:b c}<tool_call|>", "expected a value"),
        (Format::Lfm2, "<|tool_call_start|>[f(1)]<|tool_call_end|>", "expected `=`"),
        (Format::Lfm2, "<|tool_call_start|>f()<|tool_call_end|>", "expected a list in brackets"),
        (Format::Harmony, "<|channel|>commentary to=functions.f<|message|>[1]", "expected a JSON object"),
        (Format::Harmony, "<|channel|>commen", "expected `<|message|>`"),
        (Format::NemotronV2, "<TOOLCALL>[]</TOOLCALL>", "an empty list, expected a call"),
        (Format::Glm, "<tool_call>f(a)</tool_call>", "expected a name and its arguments"),
        (Format::Glm, "<tool_call>f\n<b>", "expected `<arg_key>` or `</tool_call>`"),
        (
            Format::Glm,
            "<tool_call>f<arg_key>a</arg_key>b<arg_value>c</arg_value></tool_call>",
            "expected `</tool_call>`",
        ),
        (Format::SeedOss, "<seed:tool_call>{\"name\": \"f\"}", "expected a function's name"),
        (Format::DeepSeek, "<｜tool▁calls▁begin｜><｜tool▁sep｜>f", "expected the mark of a call"),
        (Format::DeepSeek, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g\n```json\n{}\n<", "expected the end of a fence"),
        (Format::DeepSeek, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]", "expected a name and its arguments"),
        (Format::KimiK2, "<|tool_call_begin|>f<|tool_call_end|>", "expected arguments after the name"),
        (
            Format::KimiK2,
            "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}",
            "expected a name and its arguments",
        ),
        (Format::Dsml, "<｜DSML｜function_calls>\n<f>", "expected `<｜DSML｜parameter` or `</｜DSML｜invoke>`"),
    ] {
        let found = problem(format, text);
        assert!(found.contains(expected), "{text}: {found}");
        // Nothing is lost.
        let all: String = events(format, text)
            .into_iter()
            .map(|event| match event {
                Event::Text(text) | Event::Thinking(text) | Event::NotACall { text, .. } => text,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(all, text);
    }
}

/// Hostile answers: deep, long, and with the beginning of a call at every step. No clock is checked; a quadratic
/// parser would not finish.
#[test]
fn hostile_answers_hit_limits_in_linear_time() {
    let deep = |open: &str| format!("<tool_call>{{\"name\": {}", open.repeat(100_000));
    let found = events(Format::Hermes, &deep("["));
    assert!(problems(&found)[0].expected.contains("64"), "{:?}", problems(&found));
    // Of a text between tags, the depth is not known before it is parsed.
    let deep = "[".repeat(100_000) + "'";
    let deep = format!("<seed:tool_call><function=f><parameter=a>{deep}</parameter></function>");
    assert!(matches!(&events(Format::SeedOss, &deep)[..], [Event::Call(call)] if call.arguments["a"].is_string()));
    let long = format!("<tool_call>{{\"name\": \"{}", "x".repeat(3 << 20));
    let found = events(Format::Hermes, &long);
    assert!(problems(&found)[0].expected.contains("1 MiB"));
    let n_bytes = |found: Vec<Event>| -> usize {
        let len = |event: &Event| match event {
            Event::Text(text) | Event::Thinking(text) | Event::NotACall { text, .. } => text.len(),
            _ => 0,
        };
        found.iter().map(len).sum()
    };
    assert_eq!(n_bytes(found), long.len());
    // In parts, which are parsed from the beginning of the call.
    let mut reader = AnswerReader::new(Format::Hermes).with_call_parts();
    reader.push_text("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"");
    let found: Vec<Event> = (0..1 << 16).flat_map(|_| reader.push_text("xyzw")).collect();
    let len = |event: &Event| if let Event::CallPart(part) = event { part.arguments.len() } else { 0 };
    let n: usize = found.iter().map(len).sum();
    assert!(n > 250_000 && (300..2000).contains(&found.len()), "{n} bytes in {} parts", found.len());
    for (format, begin) in [
        (Format::Hermes, "<tool_call>"),
        (Format::Xml, "<tool_call><function=a><"),
        (Format::Xml, "<function=a><parameter=b>c"),
        (Format::Gemma4, "<|tool_call>call:a{<"),
        (Format::Lfm2, "<|tool_call_start|>["),
        (Format::Mistral, "[TOOL_CALLS]"),
        (Format::Llama3, "{\"name\":1,\"parameters\":"),
        (Format::Harmony, "<|channel|>"),
        (Format::Harmony, "<|start|>"),
        (Format::Json, "[{\"name\":"),
        (Format::Hermes, "<"),
        (Format::Hermes, "\n"),
        (Format::Xml, "<tool_call><function=a><parameter=b>c</parameter>"),
        (Format::Glm, "<tool_call>a<arg_key>b</arg_key><arg_value>"),
        (Format::SeedOss, "<seed:tool_call><function=a><parameter=b>[[[["),
        (Format::DeepSeek, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        (Format::KimiK2, "<|tool_call_begin|>a<|tool_call_argument_begin|>{"),
        (Format::Dsml, "<｜DSML｜invoke name=\"a\">"),
    ] {
        let text = begin.repeat((2 << 20) / begin.len());
        let found = events(format, &text);
        println!("{format}, {begin:?}: {} events of {} bytes", found.len(), text.len());
    }
}
