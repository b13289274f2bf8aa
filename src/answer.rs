//! The output of a model, taken apart while it streams: reasoning, text, tool calls.
//!
//! ```text
//! pieces (token id, text) --marks by id, or by text where they are no tokens--> state --> events
//!                                            call: scanner finds its end --> values read it whole
//! ```
//! This module knows the tokenizer, and no device, model or template. However the output is cut into pieces, its
//! events are the same, except for where texts are cut. Time is linear in the output.
//!
//! - `format.rs` has each family's marks and finds the family by the template's text. `body.rs` finds the end of a
//!   call character by character; `values.rs` reads the whole call.
//! - A mark that is a token counts by its id, so a model may write about `<think>`. Otherwise its letters count,
//!   those of a reasoning mark only at the beginning. A mark inside a string of a call is text.
//! - Text may lag behind its id (stop texts, incomplete characters), so the reader decodes ids itself to place a
//!   mark.
//! - A scanner refuses a character that cannot stand where it does, so text that is no call is passed on at once and
//!   a call after it is still found. A call has at most 1 MiB and 64 levels. Broken calls are passed on as they were
//!   written, with a `Problem`.
//! - Only known mistakes are repaired: missing tags of Qwen3-Coder, calls inside an open thought, missing closing
//!   marks, arguments as a string of JSON, malformed harmony headers, plain quotes of Gemma 4.
//! - Values in `<parameter=...>` have no type: the tool's schema decides about strings. Without one, JSON and
//!   Python's literals are values.

mod body;
mod format;
mod harmony;
mod values;

use std::collections::{HashMap, VecDeque};

use serde_json::{Map, Value as Json};

use crate::error::Error;
use crate::tokenizer::{StreamDecoder, Tokenizer};
use body::{Scan, Step};
pub use format::Format;
pub(crate) use format::Mark;
use harmony::{Channel, Header};
#[cfg(feature = "grammar")]
pub(crate) use values::GEMMA_QUOTE;
use values::{Types, Wrong};

/// Whether these are the letters of a mark of any format.
#[cfg(feature = "grammar")]
pub(crate) fn is_mark(bytes: &[u8]) -> bool {
    Format::ALL.iter().any(|format| format.marks().iter().any(|(name, _)| name.as_bytes() == bytes))
}

/// A call with everything in it. Real ones are mostly below a kilobyte; this is a file that is to be written.
const MAX_CALL_BYTES: usize = 1 << 20;

/// Text is looked at in parts of this size, so that what is looked at twice is little.
const PART_BYTES: usize = 1024;

/// A tool that the model calls.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments by name.
    pub arguments: Map<String, Json>,
    /// The model's own name for the call, in formats that have one.
    pub id: Option<String>,
}

impl ToolCall {
    /// The call in the shape that chat templates and OpenAI's interface have it in `tool_calls`. Where the model gave it no
    /// id, it has one by its number in the conversation.
    pub fn to_json(&self, number: usize) -> Json {
        let id = self.id.clone().unwrap_or_else(|| call_id(number));
        serde_json::json!({
            "type": "function",
            "id": id,
            "function": {"name": self.name, "arguments": self.arguments},
        })
    }
}

/// An id for the call of that number: nine letters and digits, as Mistral's templates want them.
pub(crate) fn call_id(number: usize) -> String {
    format!("call{:05}", number % 100_000)
}

/// The text of a prompt's end, in which its template may have begun a thought or a header.
///
/// # Errors
/// [`Error::Tokenizer`] for an id outside the vocabulary.
#[cfg(any(feature = "chat", all(target_arch = "wasm32", feature = "web-text")))]
pub(crate) fn prompt_end(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String, Error> {
    /// More than any template ends with of these.
    const MOST_TOKENS: usize = 16;
    tokenizer.decode(ids.get(ids.len().saturating_sub(MOST_TOKENS)..).unwrap_or_default(), false)
}

/// What is wrong with a part of an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("answer ({format}): at byte {position} is {found}, expected {expected}")]
pub struct Problem {
    /// The format that was read.
    pub format: Format,
    /// Byte in the answer, in which each mark counts with its name.
    pub position: usize,
    /// What the format has there.
    pub expected: String,
    /// What stands there.
    pub found: String,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Further text of a thought, without the marks around it and the white space next to them.
    Thinking(String),
    /// Further text of the answer. White space between text and a thought or a call belongs to the format and is left out.
    Text(String),
    /// A complete call.
    Call(ToolCall),
    /// What began as a call and is none, as the model wrote it with its marks: for a reader it is text.
    NotACall {
        /// The whole part.
        text: String,
        /// Why it is no call.
        problem: Problem,
    },
    /// At the end: a thought that was not closed.
    Open(Problem),
}

/// Reads an answer piece by piece.
///
/// ```
/// use tilewright::answer::{AnswerReader, Event, Format};
///
/// let mut reader = AnswerReader::new(Format::Hermes);
/// let mut events = reader.push_text("<think>Sunny?</think>Let me look. <tool_call>{\"name\": \"sun\"");
/// events.extend(reader.push_text(", \"arguments\": {\"day\": 2}}</tool_call>"));
/// events.extend(reader.finish());
/// assert_eq!(events[..2], [Event::Thinking("Sunny?".into()), Event::Text("Let me look.".into())]);
/// assert!(matches!(&events[2], Event::Call(call) if call.name == "sun" && call.arguments["day"] == 2));
/// ```
#[derive(Debug, Clone)]
pub struct AnswerReader {
    format: Format,
    marks: &'static [(&'static str, Mark)],
    /// Of each mark, whether it is a token, and no text is that mark.
    is_token: Vec<bool>,
    tokens: Option<Tokens>,
    /// Whether what is read came as tokens.
    by_token: bool,
    /// Parameters of the tools that there are; `None`: any tool.
    types: Option<Types>,
    state: State,
    /// The beginning of what may be a mark.
    held: String,
    /// White space that is left out if a mark follows.
    space: String,
    /// Whether white space that comes now is left out: a mark precedes.
    trims: bool,
    /// Whether an answer, or a part of one, has not begun.
    at_start: bool,
    /// Bytes that were read.
    position: usize,
    events: Vec<Event>,
}

/// Marks that are tokens, and where they stand in the text. The text of pieces lags behind their ids: a stop text may begin
/// in it, or a character be incomplete.
#[derive(Debug, Clone)]
struct Tokens {
    /// A mark's place in the list of marks, by token id.
    marks: HashMap<u32, usize>,
    decoder: StreamDecoder,
    /// Bytes of text that belong to the ids so far.
    n_decoded: usize,
    /// Bytes of text so far.
    n_given: usize,
    /// Marks that the text has not reached: where, and how many bytes of text are their names.
    due: VecDeque<(usize, usize, usize)>,
    /// Bytes to come that are the name of a mark.
    skip: usize,
}

#[derive(Debug, Clone)]
enum State {
    Answer,
    Thinking,
    /// Gemma's `thought` up to the end of the line.
    ThoughtName(String),
    Call(Box<Call>),
    /// After a call; whether a semicolon came, which Llama has between two.
    AfterCall(bool),
    /// A header of harmony.
    Header(Header),
}

/// A call in progress.
#[derive(Debug, Clone)]
struct Call {
    /// What stood in front: a mark, or a header with the tool's name.
    lead: String,
    raw: String,
    scan: Scan,
    position: usize,
    /// The name, where the header has it.
    name: Option<String>,
    in_thought: bool,
    is_bare: bool,
}

enum Found {
    /// At a byte, so many bytes long, by its place in the list.
    Mark(usize, usize, usize),
    /// The end from here on may become one.
    Perhaps(usize),
    No,
}

impl AnswerReader {
    /// A reader of text alone.
    pub fn new(format: Format) -> Self {
        let marks = format.marks();
        let state = if format == Format::Harmony { State::Header(Header::default()) } else { State::Answer };
        AnswerReader {
            format,
            marks,
            is_token: vec![false; marks.len()],
            tokens: None,
            by_token: false,
            types: None,
            state,
            held: String::new(),
            space: String::new(),
            trims: false,
            at_start: true,
            position: 0,
            events: Vec::new(),
        }
    }

    /// A reader of a generation's pieces: a mark that is a token of the vocabulary is told by its id alone, and the same
    /// letters in other tokens are text.
    pub fn for_tokenizer(format: Format, tokenizer: &Tokenizer) -> Self {
        let mut reader = AnswerReader::new(format);
        let of_token = |(at, (name, _)): (usize, &(&str, Mark))| Some((tokenizer.special_id(name)?, at));
        let marks: HashMap<u32, usize> = reader.marks.iter().enumerate().filter_map(of_token).collect();
        for (at, is_token) in reader.is_token.iter_mut().enumerate() {
            *is_token = marks.values().any(|&mark| mark == at);
        }
        let decoder = tokenizer.decoder().continuing();
        reader.tokens = Some(Tokens { marks, decoder, n_decoded: 0, n_given: 0, due: VecDeque::new(), skip: 0 });
        reader
    }

    /// Tells of the tools that there are, in the shape that chat templates take. An answer
    /// without a mark is a call only of one of them, and a parameter that is a string by its schema is none other.
    pub fn with_tools(mut self, tools: &[Json]) -> Self {
        self.types = Some(values::types_of(tools));
        self
    }

    /// Tells of the text in front of the answer: templates may end it with the mark that begins a thought, or, of harmony,
    /// with a header.
    pub fn after_prompt(mut self, prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        let begins = |(name, mark): &(&str, Mark)| *mark == Mark::ThinkOpen && prompt.ends_with(name);
        if self.marks.iter().any(begins) {
            self.open_thought();
        }
        if self.format == Format::Harmony
            && let Some(begun) = prompt.rfind("<|start|>").and_then(|at| prompt.get(at..))
        {
            self.by_token = false;
            self.text(begun);
            self.events.clear();
            self.position = 0;
            match &mut self.state {
                State::Header(header) => header.n_given = header.text.len(),
                State::Call(call) => call.lead.clear(),
                _ => {}
            }
        }
        self
    }

    /// Tells of the answer's beginning, which is given and not generated: all marks in it count. Its events come with the
    /// next ones.
    pub fn begun_with(mut self, text: &str) -> Self {
        self.by_token = false;
        self.text(text);
        self
    }

    /// The format that is read.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether a thought is open.
    #[cfg(any(feature = "serve", all(target_arch = "wasm32", feature = "web-text")))]
    pub(crate) fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking | State::ThoughtName(_))
    }

    /// Whether a header of harmony is being written, or has to be.
    #[cfg(all(target_arch = "wasm32", feature = "web-text"))]
    pub(crate) fn is_in_header(&self) -> bool {
        matches!(self.state, State::Header(_))
    }

    /// The tokens that begin and end a thought, where the vocabulary has both.
    #[cfg(all(target_arch = "wasm32", feature = "web-text"))]
    pub(crate) fn thought_ids(&self) -> Option<[u32; 2]> {
        let tokens = self.tokens.as_ref()?;
        let id_of = |wanted: Mark| {
            let is_wanted = |(_, at): &(&u32, &usize)| self.marks.get(**at).is_some_and(|(_, mark)| *mark == wanted);
            tokens.marks.iter().find(is_wanted).map(|(&id, _)| id)
        };
        Some([id_of(Mark::ThinkOpen)?, id_of(Mark::ThinkClose)?])
    }

    /// Reads a piece as [`Piece`](crate::generate::Piece) has it: a token, and the text that came with it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary.
    pub fn push(&mut self, id: u32, text: &str) -> Result<Vec<Event>, Error> {
        let Some(mut tokens) = self.tokens.take() else { return Ok(self.push_text(text)) };
        self.by_token = true;
        let read = self.piece(&mut tokens, id, text);
        self.tokens = Some(tokens);
        read?;
        Ok(std::mem::take(&mut self.events))
    }

    /// Reads text that came without tokens: all marks in it count.
    pub fn push_text(&mut self, text: &str) -> Vec<Event> {
        self.by_token = false;
        self.text(text);
        std::mem::take(&mut self.events)
    }

    /// The end of the answer: what was held back, and what was left open.
    pub fn finish(&mut self) -> Vec<Event> {
        let held = std::mem::take(&mut self.held);
        self.plain_all(&held);
        if matches!(self.state, State::Call(_))
            && let State::Call(call) = std::mem::replace(&mut self.state, State::Answer)
        {
            let expected = if call.scan.is_in_text() { "the end of a string" } else { "the end of a call" };
            match call.is_empty_of_harmony() {
                true => self.close_call(*call),
                false => self.not_a_call(*call, (expected.into(), "the end of the answer".into()), self.position),
            }
        }
        match std::mem::replace(&mut self.state, State::Answer) {
            State::Header(header) if !header.is_empty() => {
                let problem = self.problem("`<|message|>`".into(), "the end of the answer".into(), self.position);
                self.events.push(Event::NotACall { text: header.own().into(), problem });
            }
            State::Thinking | State::ThoughtName(_) => {
                let problem =
                    self.problem("the end of a thought".into(), "the end of the answer".into(), self.position);
                self.events.push(Event::Open(problem));
            }
            State::AfterCall(true) => self.answer(";"),
            State::Answer if !self.trims => {
                let space = std::mem::take(&mut self.space);
                self.emit(Event::Text(space));
            }
            _ => {}
        }
        std::mem::take(&mut self.events)
    }

    fn piece(&mut self, tokens: &mut Tokens, id: u32, mut text: &str) -> Result<(), Error> {
        // As where texts are generated: an id beyond the vocabulary has no text.
        let decoded = tokens.decoder.push(id).unwrap_or_default();
        tokens.n_decoded += decoded.len();
        if let Some(&mark) = tokens.marks.get(&id) {
            let name = self.marks.get(mark).map_or("", |mark| mark.0);
            // Control tokens have no text.
            let n_shown = if decoded.ends_with(name) { name.len() } else { 0 };
            tokens.due.push_back((tokens.n_decoded - n_shown, n_shown, mark));
        }
        loop {
            let n_skipped = tokens.skip.min(text.len());
            text = text.get(n_skipped..).unwrap_or_default();
            tokens.skip -= n_skipped;
            tokens.n_given += n_skipped;
            let due =
                tokens.due.front().copied().filter(|due| tokens.skip == 0 && due.0 <= tokens.n_given + text.len());
            let Some((at, n_shown, mark)) = due else { break };
            let n_before = at.saturating_sub(tokens.n_given);
            let n_before = (n_before..text.len()).find(|&n| text.is_char_boundary(n)).unwrap_or(text.len());
            self.text(text.get(..n_before).unwrap_or_default());
            text = text.get(n_before..).unwrap_or_default();
            tokens.n_given += n_before;
            tokens.skip = n_shown;
            tokens.due.pop_front();
            self.token(mark);
        }
        tokens.n_given += text.len();
        self.text(text);
        Ok(())
    }

    /// A mark that is a token.
    fn token(&mut self, at: usize) {
        let Some(&(name, mark)) = self.marks.get(at) else { return };
        // What was held back has no part in it.
        let held = std::mem::take(&mut self.held);
        self.plain_all(&held);
        if matches!(self.state, State::Call(_)) {
            // As its letters would be: part of a string, or the end of what was to be a call.
            let (n, again) = self.call(name);
            let is_mark = n == again.len() && !matches!(self.state, State::Call(_));
            if !is_mark {
                self.plain_all(&(again + name.get(n..).unwrap_or_default()));
                return;
            }
        }
        match self.is_active(mark, true) {
            true => self.mark(name, mark),
            false => self.plain_all(name),
        }
    }

    /// Text in which marks that are no tokens are marks.
    fn text(&mut self, text: &str) {
        let mut rest = text;
        while !rest.is_empty() {
            let n = (1..=PART_BYTES.min(rest.len())).rev().find(|&n| rest.is_char_boundary(n));
            let (part, after) = rest.split_at(n.unwrap_or(rest.len()));
            rest = after;
            let mut joined = std::mem::take(&mut self.held) + part;
            let mut done = 0;
            while let Some(rest) = joined.get(done..).filter(|rest| !rest.is_empty()) {
                if matches!(self.state, State::Call(_)) {
                    let (n, again) = self.call(rest);
                    done += n;
                    if !again.is_empty() {
                        joined = again + joined.get(done..).unwrap_or_default();
                        done = 0;
                    }
                    continue;
                }
                match self.find(rest) {
                    Found::Mark(0, len, at) => {
                        done += len;
                        if let Some(&(name, mark)) = self.marks.get(at) {
                            self.mark(name, mark);
                        }
                    }
                    Found::Perhaps(0) => {
                        self.held = rest.into();
                        break;
                    }
                    Found::Mark(n, ..) | Found::Perhaps(n) => {
                        let before = rest.get(..n).unwrap_or_default();
                        done += self.plain(before);
                    }
                    Found::No => done += self.plain(rest),
                }
            }
        }
    }

    /// Text without marks.
    fn plain_all(&mut self, text: &str) {
        let mut rest = text.to_owned();
        while !rest.is_empty() {
            if matches!(self.state, State::Call(_)) {
                let (n, again) = self.call(&rest);
                rest = again + rest.get(n..).unwrap_or_default();
            } else {
                let n = self.plain(&rest);
                rest.drain(..n);
            }
        }
    }

    /// The first mark that counts here, of those that are no tokens.
    fn find(&self, text: &str) -> Found {
        let active = |(at, (_, mark)): &(usize, &(&str, Mark))| {
            !(self.by_token && self.is_token.get(*at) == Some(&true)) && self.is_active(*mark, false)
        };
        let marks: Vec<(usize, &str)> =
            self.marks.iter().enumerate().filter(active).map(|(at, (name, _))| (at, *name)).collect();
        for (at, _) in text.match_indices(['<', '[']) {
            let rest = text.get(at..).unwrap_or_default();
            if let Some(&(mark, name)) = marks.iter().find(|(_, name)| rest.starts_with(name)) {
                return Found::Mark(at, name.len(), mark);
            }
            if marks.iter().any(|(_, name)| name.starts_with(rest)) {
                return Found::Perhaps(at);
            }
        }
        Found::No
    }

    /// Whether a mark is one in this state.
    fn is_active(&self, mark: Mark, is_token: bool) -> bool {
        let of_message = matches!(mark, Mark::Start | Mark::Channel | Mark::End);
        match &self.state {
            // An answer may tell of `<think>`, but not begin with it.
            State::Answer if mark == Mark::ThinkOpen => is_token || self.at_start,
            State::Answer => of_message || matches!(mark, Mark::CallOpen | Mark::Function | Mark::Silent),
            // Qwen's models call tools in the midst of a thought that they do not close.
            State::Thinking | State::ThoughtName(_) => of_message || matches!(mark, Mark::ThinkClose | Mark::CallOpen),
            State::AfterCall(_) => !matches!(mark, Mark::ThinkClose | Mark::Message | Mark::Inner),
            State::Header(_) => of_message || mark == Mark::Message,
            State::Call(_) => false,
        }
    }

    fn mark(&mut self, name: &'static str, mark: Mark) {
        let position = self.position;
        self.position += name.len();
        let state = std::mem::replace(&mut self.state, State::Answer);
        match (mark, state) {
            (Mark::ThinkOpen, _) => self.open_thought(),
            (Mark::ThinkClose, _) => self.begin_answer(),
            (Mark::CallOpen | Mark::Function, state) => {
                let is_function = mark == Mark::Function;
                self.state = State::Call(Box::new(Call {
                    lead: if is_function { String::new() } else { name.into() },
                    raw: if is_function { name.into() } else { String::new() },
                    scan: if is_function { Scan::function() } else { Scan::new(self.format) },
                    position,
                    name: None,
                    in_thought: matches!(state, State::Thinking | State::ThoughtName(_)),
                    is_bare: false,
                }));
            }
            (Mark::Silent | Mark::CallClose, _) => self.begin_answer(),
            (Mark::Message, State::Header(header)) => {
                self.begin_answer();
                match header.channel() {
                    Channel::Thought => self.state = State::Thinking,
                    Channel::Answer => {}
                    Channel::Call(tool) => {
                        self.state = State::Call(Box::new(Call {
                            lead: header.own().to_owned() + name,
                            raw: String::new(),
                            scan: Scan::new(self.format),
                            position,
                            name: Some(tool),
                            in_thought: false,
                            is_bare: false,
                        }));
                    }
                }
            }
            // A channel in a header belongs to it; elsewhere the end of the message before is missing.
            (Mark::Channel, State::Header(mut header)) => {
                header.text += name;
                self.state = State::Header(header);
            }
            (_, state) => {
                if let State::Header(header) = state
                    && !header.is_empty()
                {
                    let problem = self.problem("`<|message|>`".into(), format!("`{name}`"), position);
                    self.events.push(Event::NotACall { text: header.own().into(), problem });
                }
                self.begin_answer();
                let text = if mark == Mark::End { String::new() } else { name.into() };
                self.state = State::Header(Header { text, n_given: 0 });
            }
        }
    }

    fn open_thought(&mut self) {
        self.begin_answer();
        self.state = match self.format {
            Format::Gemma4 => State::ThoughtName(String::new()),
            _ => State::Thinking,
        };
    }

    /// What comes now is a part of its own.
    fn begin_answer(&mut self) {
        self.state = State::Answer;
        self.space.clear();
        self.trims = true;
        self.at_start = true;
    }

    /// Takes text, or so much of it as belongs to this state.
    fn plain(&mut self, text: &str) -> usize {
        let n = match &mut self.state {
            State::Answer => return self.answer_or_bare(text),
            State::Thinking => {
                self.spaced(text, Event::Thinking);
                text.len()
            }
            State::ThoughtName(name) => {
                let n = text.find('\n').map_or(text.len(), |at| at + 1);
                *name += text.get(..n).unwrap_or_default();
                let name = name.clone();
                if !"thought\n".starts_with(name.as_str()) {
                    self.state = State::Thinking;
                    self.spaced(&name, Event::Thinking);
                } else if name.ends_with('\n') {
                    self.state = State::Thinking;
                }
                n
            }
            State::AfterCall(separated) => {
                let n = text.len() - text.trim_start().len();
                match text.get(n..).and_then(|rest| rest.chars().next()) {
                    None => n,
                    Some(';') if self.format == Format::Llama3 && !*separated => {
                        *separated = true;
                        n + 1
                    }
                    Some(next) => {
                        let separated = *separated;
                        self.begin_answer();
                        if separated && next != '{' {
                            self.answer(";");
                        }
                        n
                    }
                }
            }
            State::Header(header) => {
                header.text += text;
                if !header.is_possible() {
                    // An answer without a header: text, as a reader would want it.
                    let own = header.own();
                    let begun = own.strip_prefix("<|start|>");
                    let text = begun.map_or(own, |rest| rest.strip_prefix("assistant").unwrap_or(rest)).to_owned();
                    self.begin_answer();
                    self.answer(&text);
                }
                text.len()
            }
            State::Call(_) => 0,
        };
        self.position += n;
        n
    }

    /// Text of an answer, or the beginning of a call that has no mark.
    fn answer_or_bare(&mut self, text: &str) -> usize {
        let n_space = text.len() - text.trim_start().len();
        let first = text.get(n_space..).and_then(|rest| rest.chars().next());
        let begins = first == Some('{') || (first == Some('[') && self.format == Format::Json);
        let has_tools = self.types.as_ref().is_none_or(|types| !types.is_empty());
        if !(begins && has_tools && self.at_start && self.format.is_bare()) {
            self.position += text.len();
            self.answer(text);
            return text.len();
        }
        self.position += n_space;
        self.answer(text.get(..n_space).unwrap_or_default());
        self.state = State::Call(Box::new(Call {
            lead: String::new(),
            raw: String::new(),
            scan: Scan::new(self.format),
            position: self.position,
            name: None,
            in_thought: false,
            is_bare: true,
        }));
        n_space
    }

    fn answer(&mut self, text: &str) {
        self.spaced(text, Event::Text);
    }

    /// Gives text out, but for white space that a mark may follow.
    fn spaced(&mut self, text: &str, event: fn(String) -> Event) {
        let text = if self.trims { text.trim_start() } else { text };
        let kept = text.trim_end();
        if !kept.is_empty() {
            let given = std::mem::take(&mut self.space) + kept;
            self.trims = false;
            self.at_start = false;
            self.emit(event(given));
        }
        self.space += text.get(kept.len()..).unwrap_or_default();
    }

    /// Texts that follow each other are one.
    fn emit(&mut self, event: Event) {
        match (self.events.last_mut(), event) {
            (Some(Event::Text(text)), Event::Text(more)) => *text += &more,
            (Some(Event::Thinking(text)), Event::Thinking(more)) => *text += &more,
            (_, Event::Text(text) | Event::Thinking(text)) if text.is_empty() => {}
            (_, event) => self.events.push(event),
        }
    }

    /// Reads on in a call. Returns how many bytes that were, and what before them has to be looked at again.
    fn call(&mut self, text: &str) -> (usize, String) {
        for (at, c) in text.char_indices() {
            let State::Call(call) = &mut self.state else { return (at, String::new()) };
            let step = match call.raw.len() + c.len_utf8() > MAX_CALL_BYTES {
                true => Step::Bad("a call of at most 1 MiB", 0),
                false if call.is_hopeless() => Step::Bad("a call", 0),
                false => call.scan.step(c),
            };
            match step {
                Step::More => {
                    call.raw.push(c);
                    self.position += c.len_utf8();
                }
                Step::Done => {
                    call.raw.push(c);
                    self.position += c.len_utf8();
                    if let State::Call(call) = std::mem::replace(&mut self.state, State::Answer) {
                        self.close_call(*call);
                    }
                    return (at + c.len_utf8(), String::new());
                }
                Step::Bad(expected, n_back) => {
                    let found = if call.raw.len() >= MAX_CALL_BYTES { "more".into() } else { format!("{c:?}") };
                    let again = self.break_call(expected, &found, n_back);
                    return (at, again);
                }
            }
        }
        (text.len(), String::new())
    }

    /// A call that is complete.
    fn close_call(&mut self, call: Call) {
        let parsed = match &call.name {
            Some(name) => values_of_header(&call.raw, name),
            None => values::parse(self.format, &call.raw, self.types.as_ref()),
        };
        let is_tool = |tool: &ToolCall| self.types.as_ref().is_none_or(|types| types.contains_key(&tool.name));
        match parsed {
            // An object that is a whole answer is a call only if it says all that a call says.
            Ok(calls)
                if call.is_bare && !(calls.iter().all(is_tool) && has_arguments(&call.raw) && !calls.is_empty()) =>
            {
                self.answer(&call.raw);
            }
            Err(_) if call.is_bare => self.answer(&call.raw),
            Ok(calls) if !calls.is_empty() => {
                self.begin_answer();
                self.events.extend(calls.into_iter().map(Event::Call));
                self.state = State::AfterCall(false);
            }
            Ok(_) => {
                let position = call.position;
                self.not_a_call(call, ("a call".into(), "an empty list".into()), position);
            }
            Err(wrong) => {
                let position = call.position;
                self.not_a_call(call, wrong, position);
            }
        }
    }

    /// A call that cannot go on. Returns what has to be looked at again.
    fn break_call(&mut self, expected: &str, found: &str, n_back: usize) -> String {
        let State::Call(mut call) = std::mem::replace(&mut self.state, State::Answer) else { return String::new() };
        // A message without arguments to a tool that has none.
        if call.is_empty_of_harmony() && found == "'<'" {
            self.close_call(*call);
            return String::new();
        }
        let again = call.raw.split_off(call.raw.len().saturating_sub(n_back));
        self.position -= again.len();
        self.not_a_call(*call, (expected.into(), found.into()), self.position);
        again
    }

    /// Gives out as text what is no call.
    fn not_a_call(&mut self, call: Call, (expected, found): Wrong, position: usize) {
        let text = call.lead + &call.raw;
        if call.in_thought {
            self.state = State::Thinking;
            self.spaced(&text, Event::Thinking);
            return;
        }
        self.state = State::Answer;
        if call.is_bare && !has_arguments(&text) {
            self.answer(&text);
            return;
        }
        let space = std::mem::take(&mut self.space);
        if !self.trims {
            self.emit(Event::Text(space));
        }
        (self.trims, self.at_start) = (false, false);
        let problem = self.problem(expected, found, position);
        self.events.push(Event::NotACall { text, problem });
    }

    fn problem(&self, expected: String, found: String, position: usize) -> Problem {
        Problem { format: self.format, position, expected, found }
    }
}

impl Call {
    /// Whether it can be no call any more, in an answer that has no mark in front: its first key is another.
    fn is_hopeless(&self) -> bool {
        const KEYS: [&str; 6] = ["name", "arguments", "parameters", "type", "id", "function"];
        if !self.is_bare || self.raw.len() > 32 {
            return false;
        }
        let Some(first) = self.raw.trim_start_matches(['{', '[', ' ', '\n', '\t', '\r']).strip_prefix('"') else {
            return false;
        };
        !KEYS
            .iter()
            .any(|key| key.starts_with(first) || first.strip_prefix(key).is_some_and(|rest| rest.starts_with('"')))
    }

    fn is_empty_of_harmony(&self) -> bool {
        self.name.is_some() && self.raw.trim().is_empty()
    }
}

/// Whether an answer without a mark has the keys of a call.
fn has_arguments(raw: &str) -> bool {
    ["\"arguments\"", "\"parameters\""].iter().any(|key| raw.contains(key))
}

/// The call of a message whose header names the tool.
fn values_of_header(raw: &str, name: &str) -> Result<Vec<ToolCall>, Wrong> {
    let raw = if raw.trim().is_empty() { "{}" } else { raw };
    let value = serde_json::from_str(raw).map_err(|error| ("JSON".to_owned(), error.to_string()))?;
    Ok(vec![ToolCall { name: name.into(), arguments: values::arguments(value)?, id: None }])
}

/// What a problem says of a text: its beginning.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    let mut short: String = text.chars().take(MAX_CHARS).collect();
    if short.len() < text.len() {
        short += "...";
    }
    if short.is_empty() { "nothing".into() } else { format!("{short:?}") }
}
