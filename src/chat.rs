//! Conversations to token ids, by the template that comes with a model.
//!
//! ```text
//! messages --template--> text, each stretch with its author --template's own text: control tokens--> token ids
//! ```
//! A template is a program in the Jinja language that a stranger wrote, so it runs with a budget of steps, depth and
//! bytes. What users wrote is told apart from what the template wrote throughout (`values`): only the template's own
//! text can become control tokens, whatever a message contains and wherever the template puts it.

mod date;
mod engine;
mod filters;
mod known;
mod operators;
mod values;

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use minijinja::Value;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use values::{Budget, Map, Seq, Text};

/// Roles that programs give to messages. A template may build a control token from one of them (`<|user|>`), and from
/// no other.
const ROLES: [&str; 9] =
    ["system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "tool_response"];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// What is said.
    #[serde(default)]
    pub content: String,
    /// What else the template may look for, such as `tool_calls`.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// A message of that role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into(), fields: serde_json::Map::new() }
    }
}

/// What a template is told besides the messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ChatOptions {
    /// Ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Further variables of the template: `tools`, `enable_thinking` and the like.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Seconds since 1970 UTC, for templates that mention the date; without it they take one of their own.
    pub now: Option<i64>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        ChatOptions { add_generation_prompt: true, variables: serde_json::Map::new(), now: None }
    }
}

/// The names of tokens that templates ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTexts {
    /// `bos_token`: begins a text.
    pub bos: Option<String>,
    /// `eos_token`: ends a text.
    pub eos: Option<String>,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    text: Text,
}

impl Rendered {
    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text.text
    }

    /// The text in pieces, and whether a user wrote the piece.
    pub fn stretches(&self) -> impl Iterator<Item = (&str, bool)> {
        self.text.stretches()
    }
}

/// A chat template. Cloning shares it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: &'static str,
    /// The source as it is compiled.
    source: String,
    special: SpecialTexts,
    /// What the model's publisher uses, where neither caller nor vocabulary says.
    default_special: SpecialTexts,
    stop_texts: &'static [&'static str],
}

impl ChatTemplate {
    /// A template from a model's file: `tokenizer.chat_template` of GGUF, `chat_template.jinja`.
    ///
    /// # Errors
    /// [`Error::Template`] with the line that cannot be compiled, or for a source of more than 256 KiB.
    pub fn from_source(source: &str, special: SpecialTexts) -> Result<Self, Error> {
        let source = engine::prepare(source)?;
        engine::compile(&source)?;
        let inner = Inner { name: "file", source, special, default_special: SpecialTexts::default(), stop_texts: &[] };
        Ok(ChatTemplate { inner: Arc::new(inner) })
    }

    /// The template of a model: that of its file, or the known one that its vocabulary was made for. `None` for a base
    /// model.
    ///
    /// # Errors
    /// As [`ChatTemplate::from_source`].
    pub fn for_model(source: Option<&str>, tokenizer: &Tokenizer) -> Result<Option<Self>, Error> {
        match source {
            Some(source) => ChatTemplate::from_source(source, SpecialTexts::default()).map(Some),
            None => Ok(ChatTemplate::detect(|name| tokenizer.special_id(name).is_some())),
        }
    }

    /// A template that is built in: one of [`ChatTemplate::KNOWN`].
    pub fn known(name: &str) -> Option<Self> {
        let known = known::TEMPLATES.iter().find(|known| known.name == name)?;
        let special = |text: &str| Some(text.to_owned());
        let inner = Inner {
            name: known.name,
            source: known.source.to_owned(),
            special: SpecialTexts::default(),
            default_special: SpecialTexts { bos: special(known.bos), eos: special(known.eos) },
            stop_texts: known.stop_texts,
        };
        Some(ChatTemplate { inner: Arc::new(inner) })
    }

    /// Names of the templates that are built in.
    pub const KNOWN: [&str; known::TEMPLATES.len()] = known::NAMES;

    /// The template that a vocabulary was made for, by its special tokens, for files that come without one.
    /// `None` for vocabularies of base models and those whose markers are plain text.
    pub fn detect(is_special: impl Fn(&str) -> bool) -> Option<Self> {
        let fits = |markers: &&(&str, &[&str])| markers.1.iter().all(|marker| is_special(marker));
        ChatTemplate::known(known::MARKERS.iter().find(fits)?.0)
    }

    /// `file`, or the name of a known template.
    pub fn name(&self) -> &str {
        self.inner.name
    }

    /// Texts that end the assistant's turn where no token does.
    pub fn stop_texts(&self) -> &[&str] {
        self.inner.stop_texts
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`Error::Template`] if the template refuses the conversation, is wrong, or exceeds its budget.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<Rendered, Error> {
        self.render_with(messages, options, &SpecialTexts::default())
    }

    /// The token ids of a conversation, with the tokens that the vocabulary expects in front of a text. Nothing that a
    /// message, a role or a variable contains becomes a control token.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and those of [`Tokenizer::encode`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, Error> {
        let name = |id: u32| tokenizer.token_bytes(id).ok().and_then(|name| String::from_utf8(name.to_vec()).ok());
        // The first of them is the vocabulary's own, the others only end an answer as well.
        let eos = tokenizer.eos_ids().first().copied();
        let of_vocab = SpecialTexts { bos: tokenizer.bos_id().and_then(name), eos: eos.and_then(name) };
        encode(tokenizer, &self.render_with(messages, options, &of_vocab)?.text)
    }

    /// Control tokens that end the assistant's turn beyond those of [`Tokenizer::eos_ids`]: those that the template
    /// itself puts behind an answer.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::encode`], but for a template that refuses the two messages it is tried with: then there
    /// is nothing to be learnt.
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, Error> {
        /// Stands for the answer; no template has it.
        const ANSWER: &str = "answer-7c1e";
        let messages = [Message::new("user", "question"), Message::new("assistant", ANSWER)];
        let options = ChatOptions { add_generation_prompt: false, ..ChatOptions::default() };
        let rendered = match self.render(&messages, &options) {
            Err(Error::Template { field, .. }) if field == engine::REFUSED => return Ok(Vec::new()),
            rendered => rendered?,
        };
        let Some((_, after)) = rendered.text().split_once(ANSWER) else { return Ok(Vec::new()) };
        let longest = tokenizer.special_tokens().filter(|(name, _)| after.trim_start().starts_with(name));
        let longest = longest.max_by_key(|(name, _)| name.len()).map(|(_, id)| id);
        let is_new = |id: &u32| {
            let ends = !tokenizer.eos_ids().contains(id) && tokenizer.message_end_id() != Some(*id);
            tokenizer.is_control(*id) && ends
        };
        Ok(longest.filter(is_new).into_iter().collect())
    }

    fn render_with(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        of_vocab: &SpecialTexts,
    ) -> Result<Rendered, Error> {
        let inner = &*self.inner;
        let special = SpecialTexts {
            bos: inner.special.bos.as_ref().or(of_vocab.bos.as_ref()).or(inner.default_special.bos.as_ref()).cloned(),
            eos: inner.special.eos.as_ref().or(of_vocab.eos.as_ref()).or(inner.default_special.eos.as_ref()).cloned(),
        };
        let input_bytes = messages.iter().map(message_bytes).sum::<usize>()
            + options.variables.iter().map(|(name, value)| name.len() + json_bytes(value)).sum::<usize>();
        let budget = engine::budget(input_bytes);
        let context = context(messages, options, &special, &budget).map_err(|error| Error::Template {
            field: "messages".into(),
            expected: "plain values that are not nested deeply".into(),
            found: error.to_string(),
        })?;
        let text = engine::render(&inner.source, context, messages.len(), options.now, &budget)?;
        Ok(Rendered { text })
    }
}

/// Roughly what a message takes as text.
fn message_bytes(message: &Message) -> usize {
    let fields = message.fields.iter().map(|(name, value)| name.len() + json_bytes(value));
    64 + message.role.len() + message.content.len() + fields.sum::<usize>()
}

fn json_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value as Json;
    16 + match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(json_bytes).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + json_bytes(value)).sum(),
        _ => 0,
    }
}

/// What the template sees.
fn context(
    messages: &[Message],
    options: &ChatOptions,
    special: &SpecialTexts,
    budget: &Budget,
) -> Result<Value, minijinja::Error> {
    let own = |text: &str| Text::template(values::without_marks(text)).into_value();
    let mut all = Vec::with_capacity(messages.len());
    for message in messages {
        let role = match ROLES.contains(&message.role.as_str()) {
            true => own(&message.role),
            false => Text::user(values::without_marks(&message.role)).into_value(),
        };
        let content = Text::user(values::without_marks(&message.content)).into_value();
        let mut fields = vec![(Value::from("role"), role), (Value::from("content"), content)];
        for (name, value) in &message.fields {
            fields.push((Value::from(values::without_marks(name).as_ref()), values::from_json(value, budget)?));
        }
        all.push(Map::build(fields, budget)?);
    }
    let mut variables = vec![
        (Value::from("messages"), Seq::list(all, budget)?),
        (Value::from("add_generation_prompt"), Value::from(options.add_generation_prompt)),
    ];
    for (name, text) in [("bos_token", &special.bos), ("eos_token", &special.eos)] {
        variables.extend(text.as_ref().map(|text| (Value::from(name), own(text))));
    }
    for (name, value) in &options.variables {
        variables.push((Value::from(values::without_marks(name).as_ref()), values::from_json(value, budget)?));
    }
    Map::build(variables, budget)
}

/// The ids of a text whose control tokens are those in the template's own stretches.
fn encode(tokenizer: &Tokenizer, text: &Text) -> Result<Vec<u32>, Error> {
    let tokens = special_tokens_in(tokenizer, text)?;
    let bos_id = tokenizer.bos_id();
    let has_bos = tokens.first().is_some_and(|token| token.at == 0 && !token.by_user && Some(token.id) == bos_id);
    let mut ids = Vec::new();
    if !has_bos && bos_id.is_some() && tokenizer.encode("", true)?.first().copied() == bos_id {
        ids.extend(bos_id);
    }
    let n_before = ids.len();
    let own = |id: &&u32| tokenizer.is_control(**id);
    let wanted: Vec<u32> = tokens.iter().filter(|token| !token.by_user).map(|token| token.id).collect();
    let wanted: Vec<u32> = wanted.iter().filter(own).copied().collect();
    let is_wanted = |ids: &[u32]| ids.iter().filter(own).eq(&wanted);
    if !tokens.iter().any(|token| token.by_user) {
        // No name of a token touches what users wrote: the tokenizer reads the names in the text as the model's own
        // does, with all it knows about the spaces around them.
        let whole = EncodeOptions { add_special: false, parse_special: true };
        ids.extend(tokenizer.encode_with(&text.text, whole)?);
        // A tokenizer that normalizes text may find names where none was written.
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
            expected: "text that becomes no control token".into(),
            found: "a message that does".into(),
        }),
    }
}

/// The name of a special token in a text.
struct Found {
    at: usize,
    len: usize,
    id: u32,
    /// Whether any of it is a user's.
    by_user: bool,
}

/// Where names of control and unknown tokens stand: those in the template's own stretches, in order, and then those that
/// a search of the whole text finds besides, any of which is in part a user's.
fn special_tokens_in(tokenizer: &Tokenizer, text: &Text) -> Result<Vec<Found>, Error> {
    let (names, ids): (Vec<&str>, Vec<u32>) = tokenizer.special_tokens().unzip();
    // As the tokenizer itself searches.
    let names = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(names);
    let names = names.map_err(|error| Error::Tokenizer {
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
    for (stretch, by_user) in text.stretches() {
        if !by_user {
            let found = search(stretch).into_iter();
            tokens.extend(found.map(|(at, len, id)| Found { at: start + at, len, id, by_user }));
        }
        start += stretch.len();
    }
    for (at, len, id) in search(&text.text) {
        // A user's stretches are in order and apart, so the first that ends behind the name's start decides.
        let next = text.user.partition_point(|user| user.end <= at);
        if text.user.get(next).is_some_and(|user| user.start < at + len) {
            tokens.push(Found { at, len, id, by_user: true });
        }
    }
    Ok(tokens)
}
