//! Prints an answer while it streams: thinking dimmed or between marks, each tool call on a line of its own.

use std::io::{self, IsTerminal, Write};

use serde_json::Value as Json;
use tilewright::answer::{Event, ToolCall};

use super::CommandFailure;

/// The printer, and the answer so far.
pub struct AnswerPrinter<W> {
    out: W,
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
        let dims = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let (thought, text, calls) = (String::new(), String::new(), Vec::new());
        AnswerPrinter { out, dims, in_thought: false, at_line_start: false, thought, text, calls }
    }

    /// Prints events. Without dimming, thinking is printed between `<think>` and `</think>`, whatever marks the model
    /// uses.
    pub fn take(&mut self, events: Vec<Event>) -> Result<(), CommandFailure> {
        for event in events {
            match event {
                Event::Thinking(text) => {
                    if !self.in_thought {
                        self.in_thought = true;
                        write!(self.out, "{}", if self.dims { "\x1b[2m" } else { "<think>\n" })?;
                    }
                    write!(self.out, "{text}")?;
                    self.thought += &text;
                }
                Event::Text(text) | Event::NotACall { text, .. } => {
                    self.end_thought()?;
                    write!(self.out, "{text}")?;
                    self.at_line_start = text.ends_with('\n');
                    self.text += &text;
                }
                Event::Call(call) => {
                    self.end_thought()?;
                    if !self.at_line_start && !self.text.is_empty() {
                        writeln!(self.out)?;
                    }
                    writeln!(self.out, "call {} {}", call.name, Json::Object(call.arguments.clone()))?;
                    self.at_line_start = true;
                    self.calls.push(call);
                }
                Event::Open(_) => self.end_thought()?,
            }
        }
        Ok(self.out.flush()?)
    }

    /// Prints plain text.
    pub fn write(&mut self, text: std::fmt::Arguments<'_>) -> Result<(), CommandFailure> {
        self.out.write_fmt(text)?;
        Ok(self.out.flush()?)
    }

    fn end_thought(&mut self) -> Result<(), CommandFailure> {
        if std::mem::take(&mut self.in_thought) {
            write!(self.out, "{}", if self.dims { "\x1b[0m\n\n" } else { "\n</think>\n\n" })?;
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
