//! Prints an answer while it streams: thinking dimmed or between marks, each tool call on a line of its own.

use std::io::{self, IsTerminal, Write};

use serde_json::Value as Json;
use tilewright::answer::{Event, ToolCall};

use super::CommandFailure;
use super::word_wrap::WordWrap;

/// The printer, and the answer so far.
pub struct AnswerPrinter<W> {
    out: W,
    /// At a terminal.
    wrap: Option<WordWrap>,
    /// Whether thinking is dimmed by escape codes: on a terminal, unless `NO_COLOR` is set.
    dims: bool,
    in_thought: bool,
    /// Whether the output ends with a newline.
    at_line_start: bool,
    pub thought: String,
    pub text: String,
    pub calls: Vec<ToolCall>,
}

impl<W: Write> AnswerPrinter<W> {
    pub fn new(out: W) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let wrap = is_terminal.then(WordWrap::default);
        let dims = is_terminal && std::env::var_os("NO_COLOR").is_none();
        let (thought, text, calls) = (String::new(), String::new(), Vec::new());
        AnswerPrinter { out, wrap, dims, in_thought: false, at_line_start: false, thought, text, calls }
    }

    /// Prints events. Without dimming, thinking is printed between `<think>` and `</think>`, whatever marks the model
    /// uses.
    pub fn take(&mut self, events: Vec<Event>) -> Result<(), CommandFailure> {
        for event in events {
            match event {
                Event::Thinking(text) => {
                    if !self.in_thought {
                        self.in_thought = true;
                        self.mark("\x1b[2m", "<think>\n")?;
                    }
                    self.print(&text)?;
                    self.thought += &text;
                }
                Event::Text(text) | Event::NotACall { text, .. } => {
                    self.end_thought()?;
                    self.print(&text)?;
                    self.at_line_start = text.ends_with('\n');
                    self.text += &text;
                }
                Event::Call(call) => {
                    self.end_thought()?;
                    if !self.at_line_start && !self.text.is_empty() {
                        self.print("\n")?;
                    }
                    self.print(&format!("call {} {}\n", call.name, Json::Object(call.arguments.clone())))?;
                    self.at_line_start = true;
                    self.calls.push(call);
                }
                Event::Open(_) | Event::CallPart(_) => self.end_thought()?,
            }
        }
        Ok(self.out.flush()?)
    }

    /// Prints plain text.
    pub fn write(&mut self, text: &str) -> Result<(), CommandFailure> {
        self.print(text)?;
        Ok(self.out.flush()?)
    }

    fn print(&mut self, text: &str) -> io::Result<()> {
        match &mut self.wrap {
            // The user may have resized the terminal since the last piece.
            Some(wrap) => {
                let (_, width) = console::Term::stdout().size_checked().unwrap_or((0, u16::MAX));
                self.out.write_all(wrap.wrap(text, width.into()).as_bytes())
            }
            None => self.out.write_all(text.as_bytes()),
        }
    }

    /// Prints an escape code, or a mark without dimming.
    fn mark(&mut self, code: &str, mark: &str) -> io::Result<()> {
        if self.dims { self.out.write_all(code.as_bytes()) } else { self.print(mark) }
    }

    fn end_thought(&mut self) -> Result<(), CommandFailure> {
        if std::mem::take(&mut self.in_thought) {
            self.mark("\x1b[0m", "\n</think>")?;
            self.print("\n\n")?;
            self.at_line_start = true;
        }
        Ok(())
    }

    /// Ends the last line.
    pub fn end(&mut self, is_broken_off: bool) -> Result<(), CommandFailure> {
        self.end_thought()?;
        match (is_broken_off, self.calls.is_empty() || !self.at_line_start) {
            (true, _) => writeln!(self.out, " [interrupted]")?,
            (false, true) => writeln!(self.out)?,
            (false, false) => {}
        }
        Ok(())
    }
}
