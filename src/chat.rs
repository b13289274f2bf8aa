//! Renders conversations to token ids with a model's chat template.
//!
//! ```text
//! messages --template--> text, each stretch with its author --template's own text: control tokens--> token ids
//! ```
//! A template is an untrusted Jinja program, so it runs with a budget of steps, depth and bytes. User text is tracked
//! separately from template text throughout (`values`): only the template's own text can become control tokens,
//! whatever a message contains and wherever the template puts it.
//!
//! Templates behave as in `transformers`, oddities included: `tests/chat.rs` compares the templates of published
//! models. A template is parsed once; each conversation then walks its tree. Budgets grow with the conversation, so
//! real ones never exceed them (`tests/chat/bombs.rs` has those that do).
//!
//! - A template never fails the loading of a model: one that is invalid or refuses a conversation is an error when
//!   used.
//! - If a template fails, equivalent forms are tried (`adapted.rs`): later system messages as text of the user, one
//!   call per message, text as part of the reasoning, arguments as text, an empty list of tools, calls as text.
//! - The tokens that end an answer come from a trial rendering with two messages.
//!
//! No general engine gives both guarantees. minijinja limits steps and recursion but not sizes, and a string doubles
//! in three steps. Escaping the names of control tokens in messages, as `transformers` 5 can, changes what a template
//! sees (lengths, `split`), and misses names joined from two pieces.

mod adapted;
mod date;
mod engine;
mod filters;
mod functions;
mod known;
mod lexer;
mod methods;
mod operators;
mod parser;
mod values;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::error::Error;
use crate::load::ChatSource;
use crate::tokenizer::{EncodeOptions, Search, Tokenizer};
use parser::Template;
use values::{Budget, Dict, RenderFault, Seq, TrackedText, Value};

/// Roles set by programs. A template may build a control token from these (`<|user|>`), and from no other role.
const ROLES: [&str; 9] =
    ["system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "tool_response"];

/// Field names that programs use for reasoning; templates read the first, gpt-oss's the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Published templates have up to 20 KB.
const MAX_SOURCE_BYTES: usize = 1 << 18;

/// Steps of a conversation, and more per message: real templates take 20 to 1500 for one.
const STEPS: u64 = 1_000_000;
const STEPS_PER_MESSAGE: u64 = 10_000;

/// Bytes of work of a conversation, and more per byte of it.
const WORK_BYTES: u64 = 64 << 20;
const WORK_PER_INPUT_BYTE: u64 = 256;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The author: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// The content: a text, a list of parts such as `{"type": "text", "text": "..."}`, or nothing.
    #[serde(default, skip_serializing_if = "Json::is_null")]
    pub content: Json,
    /// Other fields for the template: `tool_calls`, `name`, `reasoning_content` and the like.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, Json>,
}

impl Message {
    /// A message with this role and text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: Json::String(content.into()), fields: serde_json::Map::new() }
    }

    /// A message with this role, so many images and a text after them.
    pub fn with_images(role: impl Into<String>, n_images: usize, content: impl Into<String>) -> Self {
        Message::with_parts(role.into(), ("image", n_images), content.into())
    }

    /// A message with this role, so many sounds and a text after them.
    pub fn with_sounds(role: impl Into<String>, n_sounds: usize, content: impl Into<String>) -> Self {
        Message::with_parts(role.into(), ("audio", n_sounds), content.into())
    }

    fn with_parts(role: String, (kind, n): (&str, usize), text: String) -> Self {
        let parts = std::iter::repeat_n(serde_json::json!({"type": kind}), n);
        let content = parts.chain([serde_json::json!({"type": "text", "text": text})]).collect();
        Message { role, content, fields: serde_json::Map::new() }
    }

    /// The content, if it is a text.
    pub fn text(&self) -> Option<&str> {
        self.content.as_str()
    }
}

/// Inputs of a template besides the messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ChatOptions {
    /// Ends with the start of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Leaves the last message open for the model to continue, instead of starting an answer.
    pub continue_final_message: bool,
    /// The tools, each in the form `{"type": "function", "function": {...}}`.
    pub tools: Option<Vec<Json>>,
    /// Documents to answer from, usually `{"title": "...", "text": "..."}`.
    pub documents: Option<Vec<Json>>,
    /// Further variables of the template: `enable_thinking`, `reasoning_effort` and the like.
    #[serde(rename = "templateVariables")]
    pub variables: serde_json::Map<String, Json>,
    /// The name of the model's template to use; default: `tool_use` with tools, otherwise `default`.
    #[serde(rename = "templateName")]
    pub template: Option<String>,
    /// Seconds since 1970 UTC, for templates that print the date; without it they use one of their own.
    pub now: Option<i64>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        ChatOptions {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: None,
            documents: None,
            variables: serde_json::Map::new(),
            template: None,
            now: None,
        }
    }
}

/// Texts of special tokens by the names that templates use: `bos_token`, `eos_token`, `unk_token`, `pad_token` and
/// the like, each a text, or `additional_special_tokens`, a list of texts.
pub type SpecialTexts = serde_json::Map<String, Json>;

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    text: TrackedText,
}

impl Rendered {
    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text.text
    }

    /// The text in pieces, each with whether a user wrote it.
    pub fn pieces(&self) -> impl Iterator<Item = (&str, bool)> {
        self.text.pieces()
    }
}

/// A chat template, or a model's several for different purposes. Clones share it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    inner: Arc<TemplateInner>,
}

#[derive(Debug)]
struct TemplateInner {
    name: &'static str,
    templates: Vec<NamedTemplate>,
    special: SpecialTexts,
    /// The publisher's special tokens, if neither caller nor vocabulary has them.
    default_special: SpecialTexts,
    stop_texts: &'static [&'static str],
}

/// One of a model's templates.
#[derive(Debug)]
struct NamedTemplate {
    name: String,
    /// The template, or why it is invalid.
    template: Result<Template, TemplateFault>,
    /// Whether it mentions tools.
    knows_tools: bool,
    /// Whether it reads only the first call of a message.
    takes_one_call: bool,
    /// Whether it drops content that is not a list of parts, as vision models' templates do.
    wants_parts: bool,
}

impl NamedTemplate {
    fn read(name: &str, source: &str) -> NamedTemplate {
        let template = parse(source);
        NamedTemplate {
            name: name.to_owned(),
            knows_tools: source.contains("tool"),
            takes_one_call: source.contains("tool_calls[0]"),
            wants_parts: source.contains("image") && template.as_ref().is_ok_and(wants_parts),
            template,
        }
    }

    fn template(&self) -> Result<&Template, Error> {
        self.template.as_ref().map_err(|failed| {
            let TemplateFault { field, expected, found } = failed.clone();
            Error::Template { field: format!("`{}`: {field}", self.name), expected, found }
        })
    }
}

/// Whether the template renders a question only if it is a part.
fn wants_parts(template: &Template) -> bool {
    /// Occurs in no template.
    const QUESTION: &str = "question-7c1e";
    let special = ["bos_token", "eos_token"].map(|name| (name.to_owned(), Json::from(""))).into_iter().collect();
    let options = ChatOptions { now: Some(0), ..ChatOptions::default() };
    let keeps = |question: &Message| {
        let rendered = render_once(template, std::slice::from_ref(question), &options, &special);
        rendered.ok().map(|text| text.text.contains(QUESTION))
    };
    let text = Message::new("user", QUESTION);
    keeps(&text) == Some(false) && keeps(&adapted::in_parts(&text)) == Some(true)
}

/// The fields of an [`Error::Template`], which can be cloned.
#[derive(Clone, Debug)]
struct TemplateFault {
    field: String,
    expected: String,
    found: String,
}

impl TemplateFault {
    fn error(self) -> Error {
        let TemplateFault { field, expected, found } = self;
        Error::Template { field, expected, found }
    }
}

impl ChatTemplate {
    /// Parses a template from its Jinja source.
    ///
    /// # Errors
    /// [`Error::Template`] with the invalid line, or for a source of more than 256 KiB.
    pub fn from_source(source: &str, special: SpecialTexts) -> Result<Self, Error> {
        let templates = vec![("default".to_owned(), source.to_owned())];
        let template = ChatTemplate::from_files(&ChatSource { templates, special_tokens: special });
        let error = template.unreadable().next();
        error.map_or(Ok(template), Err)
    }

    /// The templates of a model's files.
    fn from_files(source: &ChatSource) -> Self {
        let inner = TemplateInner {
            name: "file",
            templates: source.templates.iter().map(|(name, source)| NamedTemplate::read(name, source)).collect(),
            special: source.special_tokens.clone(),
            default_special: SpecialTexts::new(),
            stop_texts: &[],
        };
        ChatTemplate { inner: Arc::new(inner) }
    }

    /// A model's template: from its files, or the built-in one that matches its vocabulary. `None` for a base model.
    /// An invalid template in the files refuses every conversation; [`unreadable`](ChatTemplate::unreadable) reports
    /// it beforehand.
    pub fn for_model(source: &ChatSource, tokenizer: &Tokenizer) -> Option<Self> {
        match source.templates.is_empty() {
            false => Some(ChatTemplate::from_files(source)),
            true => ChatTemplate::detect(|name| tokenizer.special_id(name).is_some()),
        }
    }

    /// Errors of the invalid templates: [`Error::Template`] with the template's name and the line.
    pub fn unreadable(&self) -> impl Iterator<Item = Error> {
        self.inner.templates.iter().filter_map(|named| named.template().err())
    }

    /// A built-in template: one of [`ChatTemplate::KNOWN`].
    pub fn known(name: &str) -> Option<Self> {
        let known = known::TEMPLATES.iter().find(|known| known.name == name)?;
        let special = [("bos_token", known.bos), ("eos_token", known.eos)];
        let inner = TemplateInner {
            name: known.name,
            // Tests render each of them.
            templates: vec![NamedTemplate::read("default", known.source)],
            special: SpecialTexts::new(),
            default_special: special.map(|(name, text)| (name.to_owned(), Json::from(text))).into_iter().collect(),
            stop_texts: known.stop_texts,
        };
        Some(ChatTemplate { inner: Arc::new(inner) })
    }

    /// Names of the built-in templates.
    pub const KNOWN: [&str; known::TEMPLATES.len()] = known::NAMES;

    /// The built-in template that matches a vocabulary's special tokens, for files without one. `None` for
    /// vocabularies of base models and those whose markers are plain text.
    pub fn detect(is_special: impl Fn(&str) -> bool) -> Option<Self> {
        let fits = |markers: &&(&str, &[&str])| markers.1.iter().all(|marker| is_special(marker));
        ChatTemplate::known(known::MARKERS.iter().find(fits)?.0)
    }

    /// `file`, or the name of a built-in template.
    pub fn name(&self) -> &str {
        self.inner.name
    }

    /// Stop strings that end the assistant's turn where no token does.
    pub fn stop_texts(&self) -> &[&str] {
        self.inner.stop_texts
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`Error::Template`] if the template refuses the conversation, is invalid, or exceeds its budget.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<Rendered, Error> {
        self.render_with(messages, options, None)
    }

    /// The token ids of a conversation, with the tokens that the vocabulary puts before a text. Nothing in a message,
    /// role, tool, document or variable becomes a control token.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and those of [`Tokenizer::encode`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, Error> {
        encode(tokenizer, &self.render_with(messages, options, Some(tokenizer))?.text)
    }

    /// Control tokens beyond [`Tokenizer::eos_ids`] that end the assistant's turn: those that the template puts after
    /// an answer. Empty if it cannot render the trial conversation; the error then appears in use.
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        /// Stands for the answer; occurs in no template.
        const ANSWER: &str = "answer-7c1e";
        let messages = [Message::new("user", "question"), Message::new("assistant", ANSWER)];
        // Templates need some time; any will do.
        let options = ChatOptions { add_generation_prompt: false, now: Some(0), ..ChatOptions::default() };
        let Ok(rendered) = self.render_with(&messages, &options, Some(tokenizer)) else { return Vec::new() };
        let Some((_, after)) = rendered.text().split_once(ANSWER) else { return Vec::new() };
        let longest = tokenizer.special_tokens().filter(|(name, _)| after.trim_start().starts_with(name));
        let longest = longest.max_by_key(|(name, _)| name.len()).map(|(_, id)| id);
        let is_new = |id: &u32| {
            let ends = !tokenizer.eos_ids().contains(id) && tokenizer.message_end_id() != Some(*id);
            tokenizer.is_control(*id) && ends
        };
        longest.filter(is_new).into_iter().collect()
    }

    /// The template to use, chosen as Hugging Face does.
    fn choose(&self, options: &ChatOptions) -> Result<&NamedTemplate, Error> {
        let named = |wanted: &str| self.inner.templates.iter().find(|named| named.name == wanted);
        let found = match &options.template {
            Some(name) => named(name),
            None => options.tools.as_ref().and_then(|_| named("tool_use")).or_else(|| named("default")),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.inner.templates.iter().map(|named| named.name.as_str()).collect();
            Error::Template {
                field: "name of the template".into(),
                expected: format!("one of the model's: {}", names.join(", ")),
                found: options.template.clone().unwrap_or_else(|| "missing".into()),
            }
        })
    }

    /// Renders a conversation. If the template fails, also tries equivalent forms ([`adapted`]); if these fail too,
    /// returns the first error.
    pub(crate) fn render_with(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Rendered, Error> {
        let named = self.choose(options)?;
        let mut messages = match options.continue_final_message {
            true => Cow::from(with_tag(messages)?),
            false => Cow::from(messages),
        };
        if named.takes_one_call {
            messages = adapted::one_call_each(&messages).into();
        }
        let (template, special) = (named.template()?, self.special(tokenizer));
        let render = |messages: &[Message], options: &ChatOptions| match named.wants_parts {
            true => {
                let messages: Vec<Message> = messages.iter().map(adapted::in_parts).collect();
                render_once(template, &messages, options, &special)
            }
            false => render_once(template, messages, options, &special),
        };
        let mut first = render(&messages, options);
        if adapted::has_late_system(&messages) {
            let is_wrong = match &first {
                Ok(text) => adapted::loses_late_system(&messages, &text.text),
                Err((_, retry)) => matches!(retry, Retry::Adapted),
            };
            if is_wrong {
                messages = adapted::with_one_system(&messages).into();
                first = render(&messages, options).or(first);
            }
        }
        let text = match first {
            Ok(text) if !named.knows_tools && adapted::is_lost(&messages, &text.text) => {
                render(&adapted::without_calls(&messages), options).unwrap_or(text)
            }
            Ok(text) => text,
            Err((error, Retry::Adapted)) => {
                let (mut simplified, options) = (adapted::simplified(&messages), adapted::options(options));
                let mut found = render(&simplified, &options);
                if found.is_err() && adapted::has_calls(&messages) {
                    adapted::write_arguments(&mut simplified);
                    found =
                        render(&simplified, &options).or_else(|_| render(&adapted::without_calls(&messages), &options));
                }
                found.map_err(|_| error)?
            }
            Err((error, Retry::Never)) => return Err(error),
        };
        let text = if options.continue_final_message { without_tag(text)? } else { text };
        Ok(Rendered { text })
    }

    /// The texts of special tokens. A vocabulary without a start or end token has an empty text for it.
    fn special(&self, tokenizer: Option<&Tokenizer>) -> SpecialTexts {
        let mut special = SpecialTexts::new();
        let ids = tokenizer.map_or([None; 2], |tokenizer| {
            // The first is the vocabulary's own; the others only end an answer.
            [tokenizer.bos_id(), tokenizer.eos_ids().first().copied()]
        });
        let names = ["bos_token", "eos_token"];
        if tokenizer.is_some() {
            special.extend(names.map(|name| (name.to_owned(), Json::from(""))));
        }
        special.extend(self.inner.default_special.clone());
        for (name, id) in names.into_iter().zip(ids) {
            let text = id.zip(tokenizer).and_then(|(id, tokenizer)| tokenizer.token_bytes(id).ok());
            let text = text.and_then(|text| std::str::from_utf8(text).ok());
            special.extend(text.map(|text| (name.to_owned(), Json::from(text))));
        }
        special.extend(self.inner.special.clone());
        special
    }
}

/// Whether to try another form of a conversation that failed.
enum Retry {
    Adapted,
    /// The budget was exceeded.
    Never,
}

/// Renders a conversation in its given form.
fn render_once(
    template: &Template,
    messages: &[Message],
    options: &ChatOptions,
    special: &SpecialTexts,
) -> Result<TrackedText, (Error, Retry)> {
    let lists = options.tools.iter().chain(&options.documents).flatten().map(json_bytes);
    let variables = options.variables.iter().map(|(name, value)| name.len() + json_bytes(value));
    let input_bytes: usize = messages.iter().map(message_bytes).chain(lists).chain(variables).sum();
    let steps = STEPS.saturating_add(STEPS_PER_MESSAGE.saturating_mul(messages.len() as u64)).min(1 << 30);
    let bytes = WORK_BYTES.saturating_add(WORK_PER_INPUT_BYTE.saturating_mul(input_bytes as u64));
    let budget = Budget::new(steps, bytes);
    let variables = context(messages, options, special, &budget).map_err(|fault| {
        let found = match fault {
            RenderFault::Wrong(message) => message,
            _ => "too large".into(),
        };
        let expected = "plain values without deep nesting".into();
        (Error::Template { field: "messages".into(), expected, found }, Retry::Never)
    })?;
    engine::render(template, variables, options.now, &budget).map_err(|(fault, line)| {
        let retry =
            if matches!(fault, RenderFault::Raised(_) | RenderFault::Wrong(_)) { Retry::Adapted } else { Retry::Never };
        (failure(fault, line, Some(&budget)).error(), retry)
    })
}

/// Seconds since 1970 UTC in RFC 3339 format.
pub fn date_time(now: i64) -> String {
    date::format("%Y-%m-%dT%H:%M:%SZ", now).unwrap_or_default()
}

/// Parses a source.
fn parse(source: &str) -> Result<Template, TemplateFault> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(TemplateFault {
            field: "source".into(),
            expected: format!("at most {MAX_SOURCE_BYTES} bytes"),
            found: format!("{} bytes", source.len()),
        });
    }
    parser::parse(source).map_err(|(fault, line)| failure(fault, line, None))
}

/// Converts a fault in parsing, or in rendering within a budget.
fn failure(fault: RenderFault, line: u32, budget: Option<&Budget>) -> TemplateFault {
    /// The message may be long: it is the template's, or repeats a text.
    const MAX_CHARS: usize = 300;
    let shortened = |text: String| -> String { text.chars().take(MAX_CHARS).collect() };
    let (steps, bytes) = budget.map_or((0, 0), |budget| (budget.steps, budget.bytes));
    let (field, expected, found) = match fault {
        RenderFault::Raised(message) => {
            let found = format!("refused: {}", shortened(message));
            let (field, expected) = ("conversation".into(), "one that the template accepts".into());
            return TemplateFault { field, expected, found };
        }
        RenderFault::Steps => ("steps", format!("at most {steps}"), "more steps".into()),
        RenderFault::Work => ("work", format!("at most {bytes} bytes read and written"), "more bytes".into()),
        RenderFault::Depth => ("recursion", "moderate nesting of statements and calls".into(), "deeper nesting".into()),
        RenderFault::Wrong(message) if budget.is_some() => {
            ("expression", "a valid expression".into(), shortened(message))
        }
        RenderFault::Wrong(message) => ("syntax", "a Jinja template".into(), shortened(message)),
    };
    TemplateFault { field: format!("{field} in line {line}"), expected, found }
}

/// Marks where the model continues, as in `transformers`: later text is cut off. The space shows whether the template
/// trims content.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

fn open_message(found: &str) -> Error {
    let expected = "a last message with text that the template renders".into();
    Error::Template { field: "continue_final_message".into(), expected, found: found.into() }
}

/// The messages, the last one with the mark at its end.
fn with_tag(messages: &[Message]) -> Result<Vec<Message>, Error> {
    let mut messages = messages.to_vec();
    let last = messages.last_mut().ok_or_else(|| open_message("no message"))?;
    let text = match &mut last.content {
        Json::Array(parts) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        content => Some(content),
    };
    match text {
        Some(Json::String(text)) => text.push_str(TAG),
        _ => return Err(open_message("a message without text")),
    }
    Ok(messages)
}

/// Cuts a text at the mark.
fn without_tag(text: TrackedText) -> Result<TrackedText, Error> {
    let at = text.text.rfind(TAG.trim_end()).ok_or_else(|| open_message("a message that the template drops"))?;
    let is_whole = text.text.get(at..).is_some_and(|rest| rest.starts_with(TAG));
    let before = text.text.get(..at).unwrap_or_default();
    Ok(text.slice(0..if is_whole { at } else { before.trim_end().len() }))
}

/// Approximate size of a message as text.
fn message_bytes(message: &Message) -> usize {
    let fields = message.fields.iter().map(|(name, value)| name.len() + json_bytes(value));
    64 + message.role.len() + json_bytes(&message.content) + fields.sum::<usize>()
}

fn json_bytes(value: &Json) -> usize {
    16 + match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(json_bytes).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + json_bytes(value)).sum(),
        _ => 0,
    }
}

/// A message as the template sees it, without empty fields.
fn message_value(message: &Message, budget: &Budget) -> values::Result<Value> {
    let role = match ROLES.contains(&message.role.as_str()) {
        true => TrackedText::template(&message.role),
        false => TrackedText::user(&message.role),
    };
    let mut fields = vec![(TrackedText::template("role").into(), role.into())];
    let content = [("content", &message.content)];
    let others = message.fields.iter().map(|(name, value)| (name.as_str(), value));
    for (name, value) in content.into_iter().chain(others).filter(|(_, value)| !value.is_null()) {
        fields.push((TrackedText::user(name).into(), values::from_json(value, budget)?));
    }
    let given = |name: &&str| message.fields.get(*name).is_some_and(|value| !value.is_null());
    if let Some(reasoning) = REASONING.iter().find(|name| given(name)).and_then(|name| message.fields.get(*name)) {
        for name in REASONING.iter().take(2).filter(|name| !given(name)) {
            fields.push((TrackedText::template(*name).into(), values::from_json(reasoning, budget)?));
        }
    }
    Dict::build(fields, budget)
}

/// The template's variables.
fn context(
    messages: &[Message],
    options: &ChatOptions,
    special: &SpecialTexts,
    budget: &Budget,
) -> values::Result<HashMap<Arc<str>, Value>> {
    let mut all = HashMap::new();
    for (name, value) in special {
        let own = |text: &Json| Value::from(TrackedText::template(text.as_str().unwrap_or_default()));
        let value = match value {
            Json::Array(texts) => Seq::list(texts.iter().map(own).collect(), budget)?,
            text => own(text),
        };
        all.insert(name.as_str().into(), value);
    }
    for (name, value) in &options.variables {
        all.insert(name.as_str().into(), values::from_json(value, budget)?);
    }
    let messages: values::Result<Vec<Value>> = messages.iter().map(|message| message_value(message, budget)).collect();
    all.insert("messages".into(), Seq::list(messages?, budget)?);
    for (name, given) in [("tools", &options.tools), ("documents", &options.documents)] {
        let value = match given {
            Some(items) => {
                let items = items.iter().map(|item| values::from_json(item, budget));
                Seq::list(items.collect::<values::Result<_>>()?, budget)?
            }
            None => Value::None,
        };
        all.insert(name.into(), value);
    }
    let prompts = options.add_generation_prompt && !options.continue_final_message;
    all.insert("add_generation_prompt".into(), Value::Bool(prompts));
    Ok(all)
}

/// Encodes a text. Only the template's own stretches have control tokens.
fn encode(tokenizer: &Tokenizer, text: &TrackedText) -> Result<Vec<u32>, Error> {
    let tokens = special_tokens_in(tokenizer, text)?;
    let bos_id = tokenizer.bos_id();
    let has_bos = tokens.first().is_some_and(|token| token.at == 0 && !token.by_user && Some(token.id) == bos_id);
    let mut ids = Vec::new();
    if !has_bos && tokenizer.adds_bos()? {
        ids.extend(bos_id);
    }
    let n_before = ids.len();
    let own = |id: &&u32| tokenizer.is_control(**id);
    let wanted: Vec<u32> = tokens.iter().filter(|token| !token.by_user).map(|token| token.id).collect();
    let wanted: Vec<u32> = wanted.iter().filter(own).copied().collect();
    let is_wanted = |ids: &[u32]| ids.iter().filter(own).eq(&wanted);
    if !tokens.iter().any(|token| token.by_user) {
        // No token name overlaps user text: the tokenizer parses the whole text as usual, with its rules about spaces
        // around names.
        let whole = EncodeOptions { add_special: false, parse_special: true };
        ids.extend(tokenizer.encode_with(&text.text, whole)?);
        // A normalizing tokenizer may find names that were not in the text.
        if is_wanted(ids.get(n_before..).unwrap_or_default()) {
            return Ok(ids);
        }
        ids.truncate(n_before);
    }
    let plain = |part: &str| tokenizer.encode_with(part, EncodeOptions::default());
    let mut done = 0;
    for token in tokens.iter().filter(|token| !token.by_user) {
        let between = text.text.get(done..token.at).unwrap_or_default();
        if !between.is_empty() {
            ids.extend(plain(between)?);
        }
        ids.push(token.id);
        done = token.at + token.len;
    }
    let rest = text.text.get(done..).unwrap_or_default();
    if !rest.is_empty() {
        ids.extend(plain(rest)?);
    }
    match is_wanted(ids.get(n_before..).unwrap_or_default()) {
        true => Ok(ids),
        false => Err(Error::Tokenizer {
            field: "text".into(),
            expected: "text without control tokens".into(),
            found: "a message that becomes a control token".into(),
        }),
    }
}

/// The name of a special token in a text.
struct SpecialMatch {
    at: usize,
    len: usize,
    id: u32,
    /// Whether a user wrote part of it.
    by_user: bool,
}

/// Positions of control and unknown tokens: those in the template's own stretches, in order, then those that only a
/// search of the whole text finds, which include user text.
fn special_tokens_in(tokenizer: &Tokenizer, text: &TrackedText) -> Result<Vec<SpecialMatch>, Error> {
    let (names, ids): (Vec<&str>, Vec<u32>) = tokenizer.special_tokens().unzip();
    // The tokenizer's own search.
    let names = Search::new(&names).map_err(|error| Error::Tokenizer {
        field: "special tokens".into(),
        expected: "few and short enough to search for".into(),
        found: error.to_string(),
    })?;
    let search = |text: &str| -> Vec<(usize, usize, u32)> {
        let found = names.find_iter(text);
        found.filter_map(|found| Some((found.start(), found.len(), *ids.get(found.pattern().as_usize())?))).collect()
    };
    let mut tokens = Vec::new();
    let mut start = 0;
    for (stretch, by_user) in text.pieces() {
        if !by_user {
            let found = search(stretch).into_iter();
            tokens.extend(found.map(|(at, len, id)| SpecialMatch { at: start + at, len, id, by_user }));
        }
        start += stretch.len();
    }
    for (at, len, id) in search(&text.text) {
        // User stretches are ordered and disjoint, so the first one ending after the name's start decides.
        let next = text.user.partition_point(|user| user.end <= at);
        if text.user.get(next).is_some_and(|user| user.start < at + len) {
            tokens.push(SpecialMatch { at, len, id, by_user: true });
        }
    }
    Ok(tokens)
}
