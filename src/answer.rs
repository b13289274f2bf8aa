//! Parses a model's streamed output into reasoning, text and tool calls.
//!
//! ```text
//! pieces (token id, text) --marks by id, or by text where they are no tokens--> state --> events
//!                                            call: scanner finds its end --> values read it whole
//! ```
//! This module uses the tokenizer, but no device, model or template. The events do not depend on how the output is
//! split into pieces, except for where text is split. Time is linear in the output.
//!
//! - `format.rs` lists each family's marks and detects the family from the template. `body.rs` finds the end of a
//!   call character by character; `values.rs` parses the whole call. `tags.rs` and `section.rs` do both for two kinds
//!   of calls.
//! - A mark that is a token counts by its id, so a model may write about `<think>`. Otherwise its text counts, for a
//!   reasoning mark only at the start. A mark inside a string of a call is text.
//! - Text may lag behind its id (stop strings, incomplete characters), so the reader decodes ids itself to place a
//!   mark.
//! - A scanner rejects an invalid character at once, so text that is not a call is passed on early and a call after
//!   it is still found. A call has at most 1 MiB and 64 levels. Malformed calls are passed on as text, with a
//!   `Problem`.
//! - Only known mistakes are repaired: missing tags of Qwen3-Coder, calls inside open reasoning, missing closing
//!   marks, arguments as a JSON string, malformed harmony headers, plain quotes of Gemma 4.
//! - Values between tags are untyped: the tool's schema says which are strings. Without a schema, JSON and Python
//!   literals are values.

mod begun;
mod body;
mod format;
mod harmony;
mod section;
mod tags;
mod values;

use std::collections::{HashMap, VecDeque};

use serde_json::{Map, Value as Json};

use crate::error::Error;
use crate::tokenizer::{StreamDecoder, Tokenizer};
use begun::{BegunCall, begun_calls};
#[cfg(feature = "grammar")]
pub(crate) use body::is_name;
use body::{Scan, ScanStep};
pub use format::Format;
pub(crate) use format::Mark;
use harmony::{HarmonyChannel, HarmonyHeader};
#[cfg(feature = "grammar")]
pub(crate) use tags::CallTags;
#[cfg(feature = "grammar")]
pub(crate) use values::GEMMA_QUOTE;
use values::{Types, Wrong};

/// Whether these bytes are a mark of any format.
#[cfg(feature = "grammar")]
pub(crate) fn is_mark(bytes: &[u8]) -> bool {
    Format::ALL.iter().any(|format| format.marks().iter().any(|(name, _)| name.as_bytes() == bytes))
}

/// Maximum size of a call. Most have less than a kilobyte; large ones write a file.
const MAX_CALL_BYTES: usize = 1 << 20;

/// Text is parsed in parts of this size, which bounds repeated scanning.
const PART_BYTES: usize = 1024;

/// A tool call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// The arguments by name.
    pub arguments: Map<String, Json>,
    /// The model's own id for the call, in formats with ids.
    pub id: Option<String>,
}

impl ToolCall {
    /// The call as chat templates and OpenAI's `tool_calls` represent it. A missing id is made from the call's number
    /// in the conversation.
    pub fn to_json(&self, number: usize) -> Json {
        let id = self.id.clone().unwrap_or_else(|| call_id(number));
        serde_json::json!({
            "type": "function",
            "id": id,
            "function": {"name": self.name, "arguments": self.arguments},
        })
    }
}

/// An id from a call's number in the conversation: nine letters and digits, as Mistral's templates require.
pub fn call_id(number: usize) -> String {
    format!("call{:05}", number % 100_000)
}

/// The text at a prompt's end, after its last picture, where its template may have opened reasoning or a header.
///
/// # Errors
/// Those of [`Tokenizer::decode`].
#[cfg(any(feature = "chat", all(target_arch = "wasm32", feature = "web-text")))]
pub(crate) fn prompt_end(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String, Error> {
    /// More tokens than any template's end has.
    const MAX_TOKENS: usize = 16;
    // Ids that stand for rows of pictures are above the vocabulary.
    let text = ids.rsplit(|&id| id as usize >= tokenizer.vocab_size()).next().unwrap_or_default();
    tokenizer.decode(text.get(text.len().saturating_sub(MAX_TOKENS)..).unwrap_or_default(), false)
}

/// An error in a part of an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("answer ({format}): at byte {position} is {found}, expected {expected}")]
pub struct Problem {
    /// The answer's format.
    pub format: Format,
    /// Byte offset in the answer, in which each mark counts with its name.
    pub position: usize,
    /// What the format requires there.
    pub expected: String,
    /// The text there.
    pub found: String,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// More reasoning, without its marks and the white space next to them.
    Thinking(String),
    /// More text of the answer. White space between text and reasoning or a call is part of the format and dropped.
    Text(String),
    /// A complete call.
    Call(ToolCall),
    /// More of a call, instead of the complete one: only [`AnswerReader::with_call_parts`].
    CallPart(CallPart),
    /// A malformed call, exactly as written, marks included: show it as text.
    NotACall {
        /// Its whole text.
        text: String,
        /// Why it is not a call.
        problem: Problem,
    },
    /// At the end: reasoning was not closed.
    Open(Problem),
}

/// A part of a call. The parts of a call follow each other; without its last one, the answer was cut off in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPart {
    /// The tool's name.
    pub name: String,
    /// The model's own id for the call, if it came before the arguments.
    pub id: Option<String>,
    /// More of the arguments, as JSON without white space.
    pub arguments: String,
    /// Whether it begins the call.
    pub is_first: bool,
    /// Whether the call is complete.
    pub is_last: bool,
}

/// Parses an answer piece by piece.
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
    /// For each mark: whether it is a token, so that its text is not a mark.
    is_token: Vec<bool>,
    tokens: Option<MarkTokens>,
    /// Whether the current input is tokens.
    by_token: bool,
    /// Parameters of the request's tools; `None`: any tool.
    types: Option<Types>,
    /// Whether calls are given in parts.
    by_parts: bool,
    state: State,
    /// A possible start of a mark.
    held: String,
    /// White space, dropped if a mark follows.
    space: String,
    /// Whether to drop leading white space: after a mark.
    trims: bool,
    /// Whether the answer, or a part of it, is still empty.
    at_start: bool,
    /// Bytes parsed.
    position: usize,
    events: Vec<Event>,
}

/// Marks that are tokens, and their positions in the text. The text of pieces lags behind their ids: it may start a
/// stop string, or have an incomplete character.
#[derive(Debug, Clone)]
struct MarkTokens {
    /// The index of a mark by token id.
    marks: HashMap<u32, usize>,
    decoder: StreamDecoder,
    /// Bytes of text of the ids so far.
    n_decoded: usize,
    /// Bytes of text received so far.
    n_given: usize,
    /// Marks that the text has not reached: offset, length of the name in the text, index.
    due: VecDeque<(usize, usize, usize)>,
    /// Bytes of a mark's name still to skip.
    skip: usize,
}

#[derive(Debug, Clone)]
enum State {
    Answer,
    Thinking,
    /// Gemma's `thought` to the end of the line.
    ThoughtName(String),
    Call(Box<PartialCall>),
    /// After a call; whether a semicolon followed, Llama's separator.
    AfterCall(bool),
    /// A harmony header.
    Header(HarmonyHeader),
}

/// An unfinished call.
#[derive(Debug, Clone)]
struct PartialCall {
    /// The text before it: a mark, or a header with the tool's name.
    lead: String,
    raw: String,
    scan: Scan,
    position: usize,
    /// The name, if in the header.
    name: Option<String>,
    in_thought: bool,
    is_bare: bool,
    /// Bytes of each call's arguments given as parts.
    n_given: Vec<usize>,
    /// The length at which it is parsed for the next part.
    next_len: usize,
}

enum FoundMark {
    /// Offset, length, and index of the mark.
    Mark(usize, usize, usize),
    /// The rest from this offset may become one.
    Perhaps(usize),
    No,
}

impl AnswerReader {
    /// A reader for plain text.
    pub fn new(format: Format) -> Self {
        let marks = format.marks();
        let state = if format == Format::Harmony { State::Header(HarmonyHeader::default()) } else { State::Answer };
        AnswerReader {
            format,
            marks,
            is_token: vec![false; marks.len()],
            tokens: None,
            by_token: false,
            types: None,
            by_parts: false,
            state,
            held: String::new(),
            space: String::new(),
            trims: false,
            at_start: true,
            position: 0,
            events: Vec::new(),
        }
    }

    /// A reader for generated pieces: a mark that is a token of the vocabulary counts only by its id, and the same
    /// letters in other tokens are text.
    pub fn for_tokenizer(format: Format, tokenizer: &Tokenizer) -> Self {
        let mut reader = AnswerReader::new(format);
        let of_token = |(at, (name, _)): (usize, &(&str, Mark))| Some((tokenizer.special_id(name)?, at));
        let marks: HashMap<u32, usize> = reader.marks.iter().enumerate().filter_map(of_token).collect();
        for (at, is_token) in reader.is_token.iter_mut().enumerate() {
            *is_token = marks.values().any(|&mark| mark == at);
        }
        let decoder = tokenizer.decoder().continuing();
        reader.tokens = Some(MarkTokens { marks, decoder, n_decoded: 0, n_given: 0, due: VecDeque::new(), skip: 0 });
        reader
    }

    /// Sets the request's tools, in the templates' format. An answer without a mark is a call only of one of these,
    /// and a parameter that is a string in its schema stays a string.
    pub fn with_tools(mut self, tools: &[Json]) -> Self {
        self.types = Some(values::types_of(tools));
        self
    }

    /// Emits calls as [`Event::CallPart`]s while they are generated. A call that is malformed after its first part
    /// stays unfinished and is not emitted as text.
    pub fn with_call_parts(mut self) -> Self {
        self.by_parts = true;
        self
    }

    /// Expects the names of special tokens in the text of pieces
    /// ([`GenerateOptions::skip_special_tokens`](crate::GenerateOptions::skip_special_tokens) is false).
    pub fn with_special(mut self) -> Self {
        self.tokens = self.tokens.map(|tokens| MarkTokens { decoder: tokens.decoder.with_special(), ..tokens });
        self
    }

    /// Sets the text before the answer: templates may end with the mark that opens reasoning, or with a harmony
    /// header.
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

    /// Sets the answer's given start, which was not generated: all marks in it count. Its events come with the next
    /// ones.
    pub fn begun_with(mut self, text: &str) -> Self {
        self.by_token = false;
        self.text(text);
        self
    }

    /// Leaves the given start out of the events, so that they are only of generated text.
    pub fn without_given(mut self) -> Self {
        self.events.clear();
        self.space.clear();
        self
    }

    /// The answer's format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether reasoning is open.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking | State::ThoughtName(_))
    }

    /// Whether a harmony header is open or required.
    #[cfg(all(target_arch = "wasm32", feature = "web-text"))]
    pub(crate) fn is_in_header(&self) -> bool {
        matches!(self.state, State::Header(_))
    }

    /// The tokens that start and end reasoning, if the vocabulary has both.
    #[cfg(all(target_arch = "wasm32", feature = "web-text"))]
    pub(crate) fn thought_ids(&self) -> Option<[u32; 2]> {
        let tokens = self.tokens.as_ref()?;
        let id_of = |wanted: Mark| {
            let is_wanted = |(_, at): &(&u32, &usize)| self.marks.get(**at).is_some_and(|(_, mark)| *mark == wanted);
            tokens.marks.iter().find(is_wanted).map(|(&id, _)| id)
        };
        Some([id_of(Mark::ThinkOpen)?, id_of(Mark::ThinkClose)?])
    }

    /// Parses a [`Piece`](crate::generate::Piece): a token and its text.
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

    /// Parses text without token ids: all marks in it count.
    pub fn push_text(&mut self, text: &str) -> Vec<Event> {
        self.by_token = false;
        self.text(text);
        std::mem::take(&mut self.events)
    }

    /// As [`AnswerReader::finish`], for an answer that a limit cut off: leaves out a call whose name is incomplete.
    pub fn finish_cut(&mut self) -> Vec<Event> {
        if let State::Call(call) = &self.state
            && !call.in_thought
            && (!call.is_bare || self.types.as_ref().is_some_and(|types| call.names_one_of(types)))
        {
            self.begin_answer();
        }
        self.finish()
    }

    /// Ends the answer: returns held text and unclosed parts.
    pub fn finish(&mut self) -> Vec<Event> {
        let held = std::mem::take(&mut self.held);
        self.plain_all(&held);
        if matches!(self.state, State::Call(_))
            && let State::Call(call) = std::mem::replace(&mut self.state, State::Answer)
        {
            let expected = if call.scan.is_in_string() { "the end of a string" } else { "the end of a call" };
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
                    self.problem("the end of the reasoning".into(), "the end of the answer".into(), self.position);
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

    fn piece(&mut self, tokens: &mut MarkTokens, id: u32, mut text: &str) -> Result<(), Error> {
        // As in generation: an id outside the vocabulary has no text.
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
        // Held text is not part of it.
        let held = std::mem::take(&mut self.held);
        self.plain_all(&held);
        if matches!(self.state, State::Call(_)) {
            // Treated like its text: part of a string, or the end of a malformed call.
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

    /// Parses text, matching marks by their letters.
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
                    FoundMark::Mark(0, len, at) => {
                        done += len;
                        if let Some(&(name, mark)) = self.marks.get(at) {
                            self.mark(name, mark);
                        }
                    }
                    FoundMark::Perhaps(0) => {
                        self.held = rest.into();
                        break;
                    }
                    FoundMark::Mark(n, ..) | FoundMark::Perhaps(n) => {
                        let before = rest.get(..n).unwrap_or_default();
                        done += self.plain(before);
                    }
                    FoundMark::No => done += self.plain(rest),
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

    /// The first active mark, of those that are not tokens.
    fn find(&self, text: &str) -> FoundMark {
        let active = |(at, (_, mark)): &(usize, &(&str, Mark))| {
            !(self.by_token && self.is_token.get(*at) == Some(&true)) && self.is_active(*mark, false)
        };
        let marks: Vec<(usize, &str)> =
            self.marks.iter().enumerate().filter(active).map(|(at, (name, _))| (at, *name)).collect();
        for (at, _) in text.match_indices(['<', '[']) {
            let rest = text.get(at..).unwrap_or_default();
            if let Some(&(mark, name)) = marks.iter().find(|(_, name)| rest.starts_with(name)) {
                return FoundMark::Mark(at, name.len(), mark);
            }
            if marks.iter().any(|(_, name)| name.starts_with(rest)) {
                return FoundMark::Perhaps(at);
            }
        }
        FoundMark::No
    }

    /// Whether a mark counts in this state.
    fn is_active(&self, mark: Mark, is_token: bool) -> bool {
        let of_message = matches!(mark, Mark::Start | Mark::Channel | Mark::End);
        match &self.state {
            // An answer may mention `<think>`, but not start with it.
            State::Answer if mark == Mark::ThinkOpen => is_token || self.at_start,
            State::Answer => of_message || matches!(mark, Mark::CallOpen | Mark::Function | Mark::Silent),
            // Qwen's models call tools inside reasoning that they do not close.
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
                let scan = if is_function { Scan::function(self.format) } else { Scan::new(self.format) };
                self.state = State::Call(Box::new(PartialCall {
                    lead: if is_function { String::new() } else { name.into() },
                    raw: if is_function { name.into() } else { String::new() },
                    in_thought: matches!(state, State::Thinking | State::ThoughtName(_)),
                    ..PartialCall::new(scan, position)
                }));
            }
            (Mark::Silent, _) => self.begin_answer(),
            // The end of the section may follow.
            (Mark::CallClose, _) => {
                self.begin_answer();
                self.state = State::AfterCall(false);
            }
            (Mark::Message, State::Header(header)) => {
                self.begin_answer();
                match header.channel() {
                    HarmonyChannel::Thought => self.state = State::Thinking,
                    HarmonyChannel::Answer => {}
                    HarmonyChannel::Call(tool) => {
                        self.state = State::Call(Box::new(PartialCall {
                            lead: header.own().to_owned() + name,
                            name: Some(tool),
                            ..PartialCall::new(Scan::new(self.format), position)
                        }));
                    }
                }
            }
            // A channel in a header is part of it; elsewhere the previous message's end is missing.
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
                self.state = State::Header(HarmonyHeader { text, n_given: 0 });
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

    /// Starts a new part.
    fn begin_answer(&mut self) {
        self.state = State::Answer;
        self.space.clear();
        self.trims = true;
        self.at_start = true;
    }

    /// Consumes text as far as it belongs to this state.
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
                    // An answer without a header is plain text.
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

    /// Text of an answer, or the start of a call without a mark.
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
        let call = PartialCall::new(Scan::new(self.format), self.position);
        self.state = State::Call(Box::new(PartialCall { is_bare: true, ..call }));
        n_space
    }

    fn answer(&mut self, text: &str) {
        self.spaced(text, Event::Text);
    }

    /// Emits text, but holds back white space that may precede a mark.
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

    /// Emits an event; adjacent texts are joined.
    fn emit(&mut self, event: Event) {
        match (self.events.last_mut(), event) {
            (Some(Event::Text(text)), Event::Text(more)) => *text += &more,
            (Some(Event::Thinking(text)), Event::Thinking(more)) => *text += &more,
            (_, Event::Text(text) | Event::Thinking(text)) if text.is_empty() => {}
            (_, event) => self.events.push(event),
        }
    }

    /// Continues a call. Returns the bytes consumed, and earlier text to parse again.
    fn call(&mut self, text: &str) -> (usize, String) {
        for (at, c) in text.char_indices() {
            let State::Call(call) = &mut self.state else { return (at, String::new()) };
            let step = match call.raw.len() + c.len_utf8() > MAX_CALL_BYTES {
                true => ScanStep::Invalid("a call of at most 1 MiB", 0),
                false if call.is_hopeless() => ScanStep::Invalid("a call", 0),
                false => call.scan.step(c),
            };
            match step {
                ScanStep::More => {
                    call.raw.push(c);
                    self.position += c.len_utf8();
                }
                ScanStep::Done => {
                    call.raw.push(c);
                    self.position += c.len_utf8();
                    if let State::Call(call) = std::mem::replace(&mut self.state, State::Answer) {
                        self.close_call(*call);
                    }
                    return (at + c.len_utf8(), String::new());
                }
                ScanStep::Invalid(expected, n_back) => {
                    let found =
                        if call.raw.len() >= MAX_CALL_BYTES { "a longer call".into() } else { format!("{c:?}") };
                    let again = self.break_call(expected, &found, n_back);
                    return (at, again);
                }
            }
        }
        self.give_parts();
        (text.len(), String::new())
    }

    /// Emits what is new of an unfinished call. A large call is parsed only after it grew by a part of its size, so
    /// that the time stays linear.
    fn give_parts(&mut self) {
        let State::Call(call) = &mut self.state else { return };
        let may_be_text = call.in_thought || (call.is_bare && !has_arguments(&call.raw));
        if !self.by_parts || may_be_text || call.raw.len() < call.next_len {
            return;
        }
        call.next_len = call.raw.len() + 1 + call.raw.len() / 64;
        let begun = begun_calls(self.format, &call.raw, self.types.as_ref(), call.name.as_deref());
        let is_tool = |call: &BegunCall| self.types.as_ref().is_none_or(|types| types.contains_key(&call.name));
        if !call.is_bare || begun.iter().all(is_tool) {
            let parts = call.parts(begun);
            self.events.extend(parts);
        }
    }

    /// Completes a call.
    fn close_call(&mut self, mut call: PartialCall) {
        let parsed = match &call.name {
            Some(name) => values_of_header(&call.raw, name),
            None => values::parse(self.format, &call.raw, self.types.as_ref()),
        };
        let is_tool = |tool: &ToolCall| self.types.as_ref().is_none_or(|types| types.contains_key(&tool.name));
        match parsed {
            // An object that is a whole answer is a call only if it has all keys of a call.
            Ok(calls)
                if call.is_bare
                    && call.n_given.is_empty()
                    && !(calls.iter().all(is_tool) && has_arguments(&call.raw) && !calls.is_empty()) =>
            {
                self.answer(&call.raw);
            }
            Err(_) if call.is_bare && call.n_given.is_empty() => self.answer(&call.raw),
            Ok(calls) if !calls.is_empty() => {
                self.begin_answer();
                match self.by_parts {
                    true => {
                        let begun = begun_calls(self.format, &call.raw, self.types.as_ref(), call.name.as_deref());
                        let whole = |(at, tool): (usize, ToolCall)| match begun.get(at).filter(|call| call.is_whole) {
                            Some(call) => call.clone(),
                            None => BegunCall {
                                arguments: Json::Object(tool.arguments).to_string(),
                                is_whole: true,
                                ..BegunCall::new(&tool.name, tool.id)
                            },
                        };
                        let parts = call.parts(calls.into_iter().enumerate().map(whole).collect());
                        self.events.extend(parts);
                    }
                    false => self.events.extend(calls.into_iter().map(Event::Call)),
                }
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

    /// Ends a malformed call. Returns the text to parse again.
    fn break_call(&mut self, expected: &str, found: &str, n_back: usize) -> String {
        let State::Call(mut call) = std::mem::replace(&mut self.state, State::Answer) else { return String::new() };
        // A message without arguments, to a tool without parameters.
        if call.is_empty_of_harmony() && found == "'<'" {
            self.close_call(*call);
            return String::new();
        }
        let again = call.raw.split_off(call.raw.len().saturating_sub(n_back));
        self.position -= again.len();
        self.not_a_call(*call, (expected.into(), found.into()), self.position);
        again
    }

    /// Emits a malformed call as text.
    fn not_a_call(&mut self, call: PartialCall, (expected, found): Wrong, position: usize) {
        let text = call.lead + &call.raw;
        if call.in_thought {
            self.state = State::Thinking;
            self.spaced(&text, Event::Thinking);
            return;
        }
        self.state = State::Answer;
        // The client has it as an unfinished call.
        if !call.n_given.is_empty() {
            return self.begin_answer();
        }
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

impl PartialCall {
    fn new(scan: Scan, position: usize) -> PartialCall {
        PartialCall {
            lead: String::new(),
            raw: String::new(),
            scan,
            position,
            name: None,
            in_thought: false,
            is_bare: false,
            n_given: Vec::new(),
            next_len: 0,
        }
    }

    /// Its next parts: of the calls whose names are known, arguments that were not given before.
    fn parts(&mut self, calls: Vec<BegunCall>) -> Vec<Event> {
        let mut parts = Vec::new();
        for (at, BegunCall { name, id, arguments, is_whole }) in calls.into_iter().enumerate() {
            let is_first = at >= self.n_given.len();
            if is_first {
                self.n_given.push(0);
            }
            let n_given = self.n_given.get_mut(at);
            let before =
                n_given.map_or(0, |n| std::mem::replace(n, if is_whole { usize::MAX } else { arguments.len() }));
            if before == usize::MAX {
                continue;
            }
            let arguments = arguments.get(before..).unwrap_or_default().to_owned();
            if is_first || is_whole || !arguments.is_empty() {
                parts.push(Event::CallPart(CallPart { name, id, arguments, is_first, is_last: is_whole }));
            }
        }
        parts
    }

    /// Whether an answer without a mark can no longer be a call: its first key is unknown.
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

    /// Whether an answer without a mark begins like a call of one of these tools.
    fn names_one_of(&self, types: &Types) -> bool {
        let begun = self.raw.trim_start_matches(['{', '[', ' ', '\n', '\t', '\r']).strip_prefix("\"name\"");
        let Some(value) = begun.map(|rest| rest.trim_start_matches([':', ' ', '"'])) else { return false };
        match value.split_once('"') {
            Some((name, _)) => types.contains_key(name),
            None => types.keys().any(|tool| tool.starts_with(value)),
        }
    }

    fn is_empty_of_harmony(&self) -> bool {
        self.name.is_some() && self.raw.trim().is_empty()
    }
}

/// Whether an answer without a mark has a call's keys.
fn has_arguments(raw: &str) -> bool {
    ["\"arguments\"", "\"parameters\""].iter().any(|key| raw.contains(key))
}

/// The call of a message with the tool's name in its header.
fn values_of_header(raw: &str, name: &str) -> Result<Vec<ToolCall>, Wrong> {
    let raw = if raw.trim().is_empty() { "{}" } else { raw };
    let value = serde_json::from_str(raw).map_err(|error| ("JSON".to_owned(), error.to_string()))?;
    Ok(vec![ToolCall { name: name.into(), arguments: values::arguments(value)?, id: None }])
}

/// The start of a text, for a problem.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    let mut short: String = text.chars().take(MAX_CHARS).collect();
    if short.len() < text.len() {
        short += "...";
    }
    if short.is_empty() { "nothing".into() } else { format!("{short:?}") }
}
