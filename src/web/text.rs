//! Constraints and answers: what the second module exports. It has no model. What it has to know of a model's vocabulary, the
//! caller brings from the module that has.

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

/// Bytes of a constraint as JSON: more than the limits of `grammar` leave room for.
const MOST_JSON_BYTES: usize = 2 << 20;

thread_local! {
    /// Encodes texts for the one vocabulary there is.
    static ENCODE: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Token ids of a text in the middle of a text.
fn encode_within(text: &str) -> Option<Vec<u32>> {
    let encode = ENCODE.with_borrow(Clone::clone)?;
    let ids = encode.call1(&JsValue::UNDEFINED, &text.into()).ok()?;
    Some(ids.dyn_into::<Uint32Array>().ok()?.to_vec())
}

/// A model's vocabulary. There is one at a time.
#[wasm_bindgen]
pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    n_logits: u32,
    /// Made when a constraint needs it first.
    grammars: RefCell<Option<Arc<Grammars>>>,
}

#[wasm_bindgen]
impl Vocabulary {
    /// `tokens`, `bytes`, `end_ids` and `encode` as `Model` of the other module has them (`tokens`, `tokenBytes`, `endIds`,
    /// `encodeWithin`); `n_logits` is the model's `vocabSize`.
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
            to_js_error(Error::Tokenizer { field, expected, found: "others".into() })
        })?;
        ENCODE.set(Some(encode));
        let tokenizer = Arc::new(Tokenizer::elsewhere(tokens, end_ids, encode_within));
        Ok(Vocabulary { tokenizer, n_logits, grammars: RefCell::default() })
    }

    /// Begins a text that must match a constraint: JSON of `{ type, schema?, pattern?, grammar? }`, as `ResponseFormat` of the
    /// npm package. `end_ids` may end it where it is complete.
    pub fn guide(&self, constraint: &str, end_ids: Vec<u32>) -> Result<Guide, JsValue> {
        self.begin(constraint, end_ids, None).map_err(to_js_error)
    }

    /// Begins an answer of a model that has tools, as `reader` was told of them and of the prompt. `choice`: `auto`, `none` or
    /// `required`, unless it is `tool` that is to be called; `parallel`: whether several calls may come. A format without calls
    /// needs no guide where none is required.
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
            Ok(Some(Guide { guide, lead: None, end_ids, n_logits: self.n_logits }))
        };
        begin().map_err(to_js_error)
    }

    /// As `guide`, for an answer: what is matched begins where a thought ends, if the answer begins in one or, if it
    /// `may_think`, with one. A thought that the prompt has begun ends at once if it may not. Of answers with channels
    /// (gpt-oss), the text of the final one is matched.
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
            let lead = self.channels(reader, may_think).map_err(to_js_error)?;
            return self.begin(constraint, end_ids, lead).map_err(to_js_error);
        }
        let lead = match (reader.thought_ids(), reader.is_thinking()) {
            (Some([_, close]), true) if may_think => Some(Lead::Thought { close, barred: Vec::new(), then: None }),
            (Some([_, close]), true) => Some(Lead::written(vec![close])),
            (Some([open, close]), false) if may_think => Some(Lead::Perhaps { open, close }),
            (None, true) => {
                let (field, found) = ("thinking".into(), "text of this model".into());
                let expected = "tokens that end a thought, for a constraint on what follows".into();
                return Err(to_js_error(Error::Constraint { field, expected, found }));
            }
            _ => None,
        };
        self.begin(constraint, end_ids, lead).map_err(to_js_error)
    }

    /// Reads an answer, in the format that these chat templates write. `tools`: JSON of a list, as templates take it.
    /// `prompt`: the tokens in front of the answer, where templates may begin a thought. `begun`: the beginning of the answer,
    /// if it was given. `first_call` counts calls that have no id of the model's.
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
                // It is no part of what is generated.
                Some(begun) => drop(reader.push_text(begun)),
                None => reader = reader.after_prompt(&prompt_end),
            }
            Ok(AnswerReader { reader, tools, prompt_end, n_calls: first_call })
        };
        make().map_err(to_js_error)
    }

    fn begin(&self, constraint: &str, end_ids: Vec<u32>, lead: Option<Lead>) -> Result<Guide, Error> {
        let guide = self.grammars()?.begin(&read_constraint(constraint)?, &end_ids)?;
        Ok(Guide { guide, lead, end_ids, n_logits: self.n_logits })
    }

    /// What stands in front of the final channel's text: a message of the channel `analysis`, if the answer may think, and
    /// the headers; nothing where the prompt ends in the final channel's message.
    fn channels(&self, reader: &answer::AnswerReader, may_think: bool) -> Result<Option<Lead>, Error> {
        let missing = |what: &str| Error::Constraint {
            field: "responseFormat".into(),
            expected: "a vocabulary with the marks of channels, for a constraint on the final one".into(),
            found: format!("one without `{what}`"),
        };
        let mark = |name: &str| self.tokenizer.special_id(name).ok_or_else(|| missing(name));
        let word = |text: &str| self.tokenizer.encode_within(text).ok_or_else(|| missing(text));
        let [start, channel, message, close] =
            [mark("<|start|>")?, mark("<|channel|>")?, mark("<|message|>")?, mark("<|end|>")?];
        let header = |name: &str| Ok::<_, Error>([&[channel], word(name)?.as_slice(), &[message]].concat());
        let (thought, answer) = (header("analysis")?, header("final")?);
        let next = [&[start], word("assistant")?.as_slice(), &answer].concat();
        let inner = |then| Lead::Thought { close, barred: vec![start, channel, message], then: Some(Box::new(then)) };
        Ok(match (reader.is_thinking(), reader.is_in_header()) {
            (true, _) if may_think => Some(inner(Lead::written(next))),
            (true, _) => Some(Lead::written([&[close], next.as_slice()].concat())),
            (_, true) if may_think => Some(Lead::Either(vec![
                Way { ids: answer, then: None },
                Way { ids: thought, then: Some(Box::new(inner(Lead::written(next)))) },
            ])),
            (_, true) => Some(Lead::written(answer)),
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
    if text.len() > MOST_JSON_BYTES {
        return Err(error(format!("at most {MOST_JSON_BYTES} bytes"), text.len().to_string()));
    }
    let given = serde_json::from_str(text);
    Ok(match given.map_err(|refused| error("one as documented".into(), format!("refused: {refused}")))? {
        Given::JsonObject => Constraint::JsonObject,
        Given::JsonSchema { schema } => Constraint::JsonSchema(schema),
        Given::Regex { pattern } => Constraint::Regex(pattern),
        Given::Grammar { grammar } => Constraint::Lark(grammar),
        Given::Gbnf { grammar } => Constraint::Gbnf(grammar),
    })
}

/// What stands in front of the text that must match.
enum Lead {
    /// A thought, if this token opens one.
    Perhaps { open: u32, close: u32 },
    /// A thought: free, but for some tokens, until one closes it. Then comes what is next.
    Thought { close: u32, barred: Vec<u32>, then: Option<Box<Lead>> },
    /// One of these, whichever the model begins.
    Either(Vec<Way>),
}

/// Tokens, and what comes after them.
struct Way {
    ids: Vec<u32>,
    then: Option<Box<Lead>>,
}

impl Lead {
    /// These tokens, of which there are some.
    fn written(ids: Vec<u32>) -> Lead {
        Lead::Either(vec![Way { ids, then: None }])
    }

    /// Whether a token is part of it, and not of the text.
    fn has(&self, id: u32) -> bool {
        !matches!(self, Lead::Perhaps { open, .. } if *open != id)
    }

    /// What is left of it after a token.
    fn after(self, id: u32) -> Option<Lead> {
        match self {
            Lead::Perhaps { open, close } if id == open => {
                Some(Lead::Thought { close, barred: Vec::new(), then: None })
            }
            Lead::Perhaps { .. } => None,
            Lead::Thought { close, then, .. } if id == close => then.map(|next| *next),
            Lead::Thought { .. } => Some(self),
            Lead::Either(mut ways) => {
                ways.retain_mut(|way| way.ids.first() == Some(&id) && way.ids.remove(0) == id);
                match ways.iter().position(|way| way.ids.is_empty()) {
                    Some(at) => ways.swap_remove(at).then.map(|next| *next),
                    None => Some(Lead::Either(ways)),
                }
            }
        }
    }
}

/// A text in progress that must match a constraint.
#[wasm_bindgen]
pub struct Guide {
    guide: grammar::Guide,
    lead: Option<Lead>,
    end_ids: Vec<u32>,
    n_logits: u32,
}

#[wasm_bindgen]
impl Guide {
    /// The tokens that may come next: a bit for each of the vocabulary.
    pub fn allowed(&mut self) -> Result<Vec<u32>, JsValue> {
        let n_words = self.n_logits.div_ceil(32) as usize;
        match &self.lead {
            Some(Lead::Thought { barred, .. }) => {
                let mut all: Vec<u32> = vec![u32::MAX; n_words];
                if let (Some(last), rest @ 1..) = (all.last_mut(), self.n_logits % 32) {
                    *last &= (1 << rest) - 1;
                }
                self.end_ids.iter().chain(barred).for_each(|&id| set(&mut all, id, false));
                return Ok(all);
            }
            Some(Lead::Either(ways)) => {
                let mut some = vec![0; n_words];
                ways.iter().filter_map(|way| way.ids.first()).for_each(|&id| set(&mut some, id, true));
                return Ok(some);
            }
            Some(Lead::Perhaps { .. }) | None => {}
        }
        let mut allowed = self.guide.allowed().map(<[u32]>::to_vec).map_err(to_js_error)?;
        if let Some(Lead::Perhaps { open, .. }) = self.lead {
            set(&mut allowed, open, true);
        }
        Ok(allowed)
    }

    /// Goes on with a token. Returns those that must come next, or nothing if the text is complete.
    pub fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, JsValue> {
        if let Some(lead) = self.lead.take() {
            let is_lead = lead.has(id);
            self.lead = lead.after(id);
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

/// Takes an answer apart while it comes.
#[wasm_bindgen]
pub struct AnswerReader {
    reader: answer::AnswerReader,
    tools: Vec<Json>,
    prompt_end: String,
    /// Calls so far, and those of the messages before.
    n_calls: u32,
}

#[wasm_bindgen]
impl AnswerReader {
    /// Takes a token and the text that came with it. Returns what is certain now, as JSON of
    /// `{ text, thinking?, toolCalls?, problem? }`.
    pub fn push(&mut self, id: u32, text: &str) -> Result<String, JsValue> {
        let events = self.reader.push(id, text).map_err(to_js_error)?;
        Ok(self.told(events))
    }

    /// What is left at the end of the answer.
    pub fn finish(&mut self) -> String {
        let events = self.reader.finish();
        self.told(events)
    }

    fn told(&mut self, events: Vec<Event>) -> String {
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
                Event::Open(_) => {}
            }
        }
        let mut told = Map::new();
        told.insert("text".into(), text.into());
        if !thinking.is_empty() {
            told.insert("thinking".into(), thinking.into());
        }
        if !calls.is_empty() {
            told.insert("toolCalls".into(), calls.into());
        }
        if !problems.is_empty() {
            told.insert("problem".into(), problems.join("; ").into());
        }
        Json::Object(told).to_string()
    }
}
