//! Constraints and answer parsing: the exports of the second module. It has no model; the caller passes the
//! vocabulary from the module that has one.

use std::cell::RefCell;
use std::sync::Arc;

use js_sys::{Function, Uint32Array};
use serde::Deserialize;
use serde_json::{Map, Value as Json};
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;

use super::to_js_error;
use crate::answer::{self, Event, Format};
use crate::error::Error;
use crate::grammar::{self, Constraint, Grammars, Next, ToolChoice, ToolRules};
use crate::tokenizer::{TokenType, Tokenizer};

/// Maximum bytes of a constraint as JSON, above the limits of `grammar`.
const MAX_JSON_BYTES: usize = 2 << 20;

thread_local! {
    /// Encodes texts for the only vocabulary.
    static ENCODE: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Token ids of a text inside another.
fn encode_within(text: &str) -> Option<Vec<u32>> {
    let encode = ENCODE.with_borrow(Clone::clone)?;
    let ids = encode.call1(&JsValue::UNDEFINED, &text.into()).ok()?;
    Some(ids.dyn_into::<Uint32Array>().ok()?.to_vec())
}

/// A model's vocabulary, one at a time.
#[wasm_bindgen]
pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    n_logits: u32,
    /// Created for the first constraint.
    grammars: RefCell<Option<Arc<Grammars>>>,
}

#[wasm_bindgen]
impl Vocabulary {
    /// `tokens`, `bytes`, `end_ids` and `encode` are those of the other module's `Model` (`tokens`, `tokenBytes`,
    /// `endIds`, `encodeWithin`); `n_logits` is the model's `vocabSize`.
    #[wasm_bindgen(constructor)]
    pub fn new(
        tokens: &[u32],
        bytes: &[u8],
        end_ids: Vec<u32>,
        n_logits: u32,
        encode: Function,
    ) -> Result<Vocabulary, JsValue> {
        let mut rest = bytes;
        let mut token = |&word: &u32| {
            let (bytes, after) = rest.split_at_checked(word as usize / 8)?;
            rest = after;
            Some((bytes.to_vec(), TokenType::try_from(word % 8).ok()?))
        };
        let tokens: Option<Vec<_>> = tokens.iter().map(&mut token).collect();
        let tokens = tokens.ok_or_else(|| {
            let (field, expected) = ("tokens".into(), "lengths and types of `bytes`".into());
            to_js_error(Error::Tokenizer { field, expected, found: "other numbers".into() })
        })?;
        ENCODE.set(Some(encode));
        let tokenizer = Arc::new(Tokenizer::elsewhere(tokens, end_ids, encode_within));
        Ok(Vocabulary { tokenizer, n_logits, grammars: RefCell::default() })
    }

    /// Starts a text that must match a constraint: JSON of `{ type, schema?, pattern?, grammar? }`, the npm package's
    /// `ResponseFormat`. `end_ids` may end a complete text.
    pub fn guide(&self, constraint: &str, end_ids: Vec<u32>) -> Result<Guide, JsValue> {
        self.begin(constraint, end_ids, None).map_err(to_js_error)
    }

    /// Starts an answer with the tools and prompt of `reader`. `choice`: `auto`, `none` or `required`, unless `tool`
    /// must be called; `parallel`: whether several calls are allowed. A format without calls needs no guide unless a
    /// call is required.
    #[wasm_bindgen(js_name = toolGuide)]
    pub fn tool_guide(
        &self,
        reader: &AnswerReader,
        choice: &str,
        tool: Option<String>,
        parallel: bool,
        may_think: bool,
        end_ids: Vec<u32>,
    ) -> Result<Option<Guide>, JsValue> {
        let begin = || {
            let choice = match tool {
                Some(name) => ToolChoice::Tool(name),
                None => choice.parse().unwrap_or_default(),
            };
            let format = reader.reader.format();
            if format == Format::Plain && matches!(choice, ToolChoice::Auto | ToolChoice::None) {
                return Ok(None);
            }
            let rules = ToolRules { format, choice, parallel, thinking: may_think };
            let constraint = Constraint::tools(&reader.tools, &rules, &self.tokenizer, &reader.prompt_end)?;
            let guide = self.grammars()?.begin(&constraint, &end_ids)?;
            Ok(Some(Guide { guide, prefix: None, end_ids, n_logits: self.n_logits }))
        };
        begin().map_err(to_js_error)
    }

    /// Like `guide`, for an answer: matching starts after the reasoning, if the answer starts inside it or, if it
    /// `may_think`, with it. If not, reasoning opened by the prompt ends at once. For answers with channels
    /// (gpt-oss), the final channel's text is matched.
    #[wasm_bindgen(js_name = answerGuide)]
    pub fn answer_guide(
        &self,
        constraint: &str,
        end_ids: Vec<u32>,
        reader: &AnswerReader,
        may_think: bool,
    ) -> Result<Guide, JsValue> {
        let reader = &reader.reader;
        if reader.format() == Format::Harmony {
            let prefix = self.channels(reader, may_think).map_err(to_js_error)?;
            return self.begin(constraint, end_ids, prefix).map_err(to_js_error);
        }
        let prefix = match (reader.thought_ids(), reader.is_thinking()) {
            (Some([_, close]), true) if may_think => Some(Prefix::Thought { close, barred: Vec::new(), then: None }),
            (Some([_, close]), true) => Some(Prefix::written(vec![close])),
            (Some([open, close]), false) if may_think => Some(Prefix::Perhaps { open, close }),
            (None, true) => {
                let (field, found) = ("thinking".into(), "text of this model".into());
                let expected = "tokens that end the reasoning, for a constraint on the rest".into();
                return Err(to_js_error(Error::Constraint { field, expected, found }));
            }
            _ => None,
        };
        self.begin(constraint, end_ids, prefix).map_err(to_js_error)
    }

    /// A parser for answers in the format of these chat templates. `tools`: a JSON list in the templates' format.
    /// `prompt`: the tokens before the answer, where templates may open reasoning. `begun`: the answer's given start.
    /// `first_call` numbers calls without the model's id.
    #[wasm_bindgen(js_name = answerReader)]
    pub fn answer_reader(
        &self,
        templates: &str,
        tools: Option<String>,
        prompt: &[u32],
        begun: Option<String>,
        first_call: u32,
    ) -> Result<AnswerReader, JsValue> {
        let make = || {
            let format = Format::detect(templates, |name| self.tokenizer.special_id(name).is_some());
            let tools = tools.as_deref().map(serde_json::from_str::<Vec<Json>>).transpose();
            let tools = tools.map_err(|error| Error::Option {
                option: "tools",
                expected: "a list of objects".into(),
                found: format!("refused: {error}"),
            })?;
            let tools = tools.unwrap_or_default();
            let prompt_end = answer::prompt_end(&self.tokenizer, prompt)?;
            let mut reader = answer::AnswerReader::for_tokenizer(format, &self.tokenizer).with_tools(&tools);
            match &begun {
                // The given start is not generated.
                Some(begun) => drop(reader.push_text(begun)),
                None => reader = reader.after_prompt(&prompt_end),
            }
            Ok(AnswerReader { reader, tools, prompt_end, n_calls: first_call })
        };
        make().map_err(to_js_error)
    }

    fn begin(&self, constraint: &str, end_ids: Vec<u32>, prefix: Option<Prefix>) -> Result<Guide, Error> {
        let guide = self.grammars()?.begin(&read_constraint(constraint)?, &end_ids)?;
        Ok(Guide { guide, prefix, end_ids, n_logits: self.n_logits })
    }

    /// The tokens before the final channel's text: an `analysis` message, if the answer may think, and the headers;
    /// `None` if the prompt ends with the final channel's header.
    fn channels(&self, reader: &answer::AnswerReader, may_think: bool) -> Result<Option<Prefix>, Error> {
        let missing = |what: &str| Error::Constraint {
            field: "responseFormat".into(),
            expected: "a vocabulary with the marks of channels, for a constraint on the final one".into(),
            found: format!("a vocabulary without `{what}`"),
        };
        let mark = |name: &str| self.tokenizer.special_id(name).ok_or_else(|| missing(name));
        let word = |text: &str| self.tokenizer.encode_within(text).ok_or_else(|| missing(text));
        let [start, channel, message, close] =
            [mark("<|start|>")?, mark("<|channel|>")?, mark("<|message|>")?, mark("<|end|>")?];
        let header = |name: &str| Ok::<_, Error>([&[channel], word(name)?.as_slice(), &[message]].concat());
        let (thought, answer) = (header("analysis")?, header("final")?);
        let next = [&[start], word("assistant")?.as_slice(), &answer].concat();
        let inner = |then| Prefix::Thought { close, barred: vec![start, channel, message], then: Some(Box::new(then)) };
        Ok(match (reader.is_thinking(), reader.is_in_header()) {
            (true, _) if may_think => Some(inner(Prefix::written(next))),
            (true, _) => Some(Prefix::written([&[close], next.as_slice()].concat())),
            (_, true) if may_think => Some(Prefix::Either(vec![
                PrefixChoice { ids: answer, then: None },
                PrefixChoice { ids: thought, then: Some(Box::new(inner(Prefix::written(next)))) },
            ])),
            (_, true) => Some(Prefix::written(answer)),
            (_, false) => None,
        })
    }

    fn grammars(&self) -> Result<Arc<Grammars>, Error> {
        let mut made = self.grammars.borrow_mut();
        if let Some(grammars) = &*made {
            return Ok(Arc::clone(grammars));
        }
        let grammars = Arc::new(Grammars::new(Arc::clone(&self.tokenizer), self.n_logits)?);
        Ok(Arc::clone(made.insert(grammars)))
    }
}

fn read_constraint(text: &str) -> Result<Constraint, Error> {
    #[derive(Deserialize)]
    #[serde(tag = "type", rename_all = "snake_case")]
    enum Given {
        JsonObject,
        JsonSchema { schema: Json },
        Regex { pattern: String },
        Grammar { grammar: String },
        Gbnf { grammar: String },
    }
    let error = |expected: String, found: String| Error::Constraint { field: "responseFormat".into(), expected, found };
    if text.len() > MAX_JSON_BYTES {
        return Err(error(format!("at most {MAX_JSON_BYTES} bytes"), text.len().to_string()));
    }
    let given = serde_json::from_str(text);
    Ok(match given.map_err(|refused| error("a documented format".into(), format!("refused: {refused}")))? {
        Given::JsonObject => Constraint::JsonObject,
        Given::JsonSchema { schema } => Constraint::JsonSchema(schema),
        Given::Regex { pattern } => Constraint::Regex(pattern),
        Given::Grammar { grammar } => Constraint::Lark(grammar),
        Given::Gbnf { grammar } => Constraint::Gbnf(grammar),
    })
}

/// The unconstrained start of a text that must match.
enum Prefix {
    /// Reasoning, if this token opens it.
    Perhaps { open: u32, close: u32 },
    /// Reasoning: any tokens but some, until one closes it; then `then`.
    Thought { close: u32, barred: Vec<u32>, then: Option<Box<Prefix>> },
    /// One of these, as the model chooses.
    Either(Vec<PrefixChoice>),
}

/// Tokens and the prefix after them.
struct PrefixChoice {
    ids: Vec<u32>,
    then: Option<Box<Prefix>>,
}

impl Prefix {
    /// These tokens; not empty.
    fn written(ids: Vec<u32>) -> Prefix {
        Prefix::Either(vec![PrefixChoice { ids, then: None }])
    }

    /// Whether a token is part of the prefix rather than the text.
    fn has(&self, id: u32) -> bool {
        !matches!(self, Prefix::Perhaps { open, .. } if *open != id)
    }

    /// The rest of the prefix after a token.
    fn after(self, id: u32) -> Option<Prefix> {
        match self {
            Prefix::Perhaps { open, close } if id == open => {
                Some(Prefix::Thought { close, barred: Vec::new(), then: None })
            }
            Prefix::Perhaps { .. } => None,
            Prefix::Thought { close, then, .. } if id == close => then.map(|next| *next),
            Prefix::Thought { .. } => Some(self),
            Prefix::Either(mut choices) => {
                choices.retain_mut(|choice| choice.ids.first() == Some(&id) && choice.ids.remove(0) == id);
                match choices.iter().position(|choice| choice.ids.is_empty()) {
                    Some(at) => choices.swap_remove(at).then.map(|next| *next),
                    None => Some(Prefix::Either(choices)),
                }
            }
        }
    }
}

/// The state of a text that must match a constraint.
#[wasm_bindgen]
pub struct Guide {
    guide: grammar::Guide,
    prefix: Option<Prefix>,
    end_ids: Vec<u32>,
    n_logits: u32,
}

#[wasm_bindgen]
impl Guide {
    /// The bitmask of allowed tokens.
    pub fn allowed(&mut self) -> Result<Vec<u32>, JsValue> {
        let n_words = self.n_logits.div_ceil(32) as usize;
        match &self.prefix {
            Some(Prefix::Thought { barred, .. }) => {
                let mut all: Vec<u32> = vec![u32::MAX; n_words];
                if let (Some(last), rest @ 1..) = (all.last_mut(), self.n_logits % 32) {
                    *last &= (1 << rest) - 1;
                }
                self.end_ids.iter().chain(barred).for_each(|&id| set(&mut all, id, false));
                return Ok(all);
            }
            Some(Prefix::Either(choices)) => {
                let mut some = vec![0; n_words];
                choices.iter().filter_map(|choice| choice.ids.first()).for_each(|&id| set(&mut some, id, true));
                return Ok(some);
            }
            Some(Prefix::Perhaps { .. }) | None => {}
        }
        let mut allowed = self.guide.allowed().map(<[u32]>::to_vec).map_err(to_js_error)?;
        if let Some(Prefix::Perhaps { open, .. }) = self.prefix {
            set(&mut allowed, open, true);
        }
        Ok(allowed)
    }

    /// Appends a token. Returns the tokens that must follow, or `undefined` if the text is complete.
    pub fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, JsValue> {
        if let Some(prefix) = self.prefix.take() {
            let is_lead = prefix.has(id);
            self.prefix = prefix.after(id);
            if is_lead {
                return Ok(Some(Vec::new()));
            }
        }
        Ok(match self.guide.accept(id).map_err(to_js_error)? {
            Next::Open => Some(Vec::new()),
            Next::Forced(ids) => Some(ids),
            Next::Complete => None,
        })
    }
}

/// Sets a token's bit.
fn set(bits: &mut [u32], id: u32, to: bool) {
    if let Some(word) = bits.get_mut(id as usize / 32) {
        *word = if to { *word | 1 << (id % 32) } else { *word & !(1 << (id % 32)) };
    }
}

/// Parses an answer while it streams.
#[wasm_bindgen]
pub struct AnswerReader {
    reader: answer::AnswerReader,
    tools: Vec<Json>,
    prompt_end: String,
    /// Calls so far, including earlier messages'.
    n_calls: u32,
}

#[wasm_bindgen]
impl AnswerReader {
    /// Adds a token and its text. Returns new parts as JSON: `{ text, thinking?, toolCalls?, problem? }`.
    pub fn push(&mut self, id: u32, text: &str) -> Result<String, JsValue> {
        let events = self.reader.push(id, text).map_err(to_js_error)?;
        Ok(self.output_json(events))
    }

    /// Ends the answer and returns the rest.
    pub fn finish(&mut self) -> String {
        let events = self.reader.finish();
        self.output_json(events)
    }

    fn output_json(&mut self, events: Vec<Event>) -> String {
        let (mut text, mut thinking) = (String::new(), String::new());
        let (mut calls, mut problems) = (Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Thinking(more) => thinking += &more,
                Event::Text(more) => text += &more,
                Event::Call(call) => {
                    calls.push(call.to_json(self.n_calls as usize));
                    self.n_calls += 1;
                }
                Event::NotACall { text: more, problem } => {
                    text += &more;
                    problems.push(problem.to_string());
                }
                Event::Open(_) | Event::CallPart(_) => {}
            }
        }
        let mut output_json = Map::new();
        output_json.insert("text".into(), text.into());
        if !thinking.is_empty() {
            output_json.insert("thinking".into(), thinking.into());
        }
        if !calls.is_empty() {
            output_json.insert("toolCalls".into(), calls.into());
        }
        if !problems.is_empty() {
            output_json.insert("problem".into(), problems.join("; ").into());
        }
        Json::Object(output_json).to_string()
    }
}
