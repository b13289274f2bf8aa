//! Messages typed at a terminal: line editing, history across runs, several lines, pastes as one message.

use std::io;
use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::config::{Behavior, Config};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Editor, Helper};
use tilewright::Error;

/// What opens and closes a message of several lines, on lines of its own.
const QUOTES: &str = "\"\"\"";

/// Entries of the history.
const MAX_HISTORY: usize = 1000;

/// The editor and its history.
pub struct LineEditor {
    editor: Editor<MessageHelper, FileHistory>,
    history: Option<PathBuf>,
}

impl LineEditor {
    /// Opens the terminal and loads the history.
    ///
    /// # Errors
    /// [`Error::Io`] if the terminal cannot be set up.
    pub fn open() -> Result<Self, Error> {
        let config = Config::builder().max_history_size(MAX_HISTORY).map_err(failed)?;
        // Answers alone go to stdout, which may be a file.
        let config = config.behavior(Behavior::PreferTerm).auto_add_history(true).build();
        let mut editor = Editor::with_history(config.clone(), FileHistory::with_config(&config)).map_err(failed)?;
        editor.set_helper(Some(MessageHelper));
        let history = history_file();
        if let Some(path) = history.as_deref().filter(|path| path.exists())
            && let Err(error) = editor.load_history(path)
        {
            warning!("{}: the history was not read: {error}", path.display());
        }
        Ok(LineEditor { editor, history })
    }

    /// The next message or command; `None` at the end of the input. Ctrl-C clears the line.
    ///
    /// # Errors
    /// [`Error::Io`] if the terminal fails.
    pub fn read(&mut self) -> Result<Option<String>, Error> {
        loop {
            match self.editor.readline("> ") {
                Ok(line) => {
                    self.save_history();
                    return Ok(Some(unfolded(&line)));
                }
                Err(ReadlineError::Interrupted) => say!("Ctrl-D or /quit ends the chat"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    say!("error: the input is not UTF-8");
                }
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Saves the history at once: a program that is killed loses none of it.
    fn save_history(&mut self) {
        let Some(path) = &self.history else { return };
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(ReadlineError::Io);
        if let Err(error) = made.and_then(|()| self.editor.append_history(path)) {
            warning!("{}: the history is not saved: {error}", path.display());
            self.history = None;
        }
    }
}

fn failed(error: ReadlineError) -> Error {
    Error::Io { path: "the terminal".into(), source: io::Error::other(error) }
}

/// `TILEWRIGHT_HISTORY`, or a file in the user's state folder; `None` if the variable is empty.
fn history_file() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("TILEWRIGHT_HISTORY") {
        return Some(PathBuf::from(path)).filter(|path| !path.as_os_str().is_empty());
    }
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = match cfg!(windows) {
        true => set("LOCALAPPDATA"),
        false => set("XDG_STATE_HOME").or_else(|| std::env::home_dir().map(|home| home.join(".local/state"))),
    };
    Some(state?.join("tilewright").join("chat_history"))
}

/// Asks for another line while a message is not complete.
struct MessageHelper;

impl Completer for MessageHelper {
    type Candidate = String;
}

impl Hinter for MessageHelper {
    type Hint = String;
}

impl Highlighter for MessageHelper {}

impl Helper for MessageHelper {}

impl Validator for MessageHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_complete(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

/// Whether Enter ends a message: not after a backslash, and not between two lines of [`QUOTES`].
pub fn is_complete(text: &str) -> bool {
    let mut lines = text.lines();
    match lines.next().is_some_and(is_quotes) {
        true => lines.any(is_quotes),
        false => !text.ends_with('\\'),
    }
}

/// Whether a line opens or closes a message of several lines.
pub fn is_quotes(line: &str) -> bool {
    line.trim() == QUOTES
}

/// A message without the marks that continue its lines.
pub fn unfolded(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    match text.split_once('\n') {
        Some((first, rest)) if is_quotes(first) => {
            rest.lines().take_while(|line| !is_quotes(line)).collect::<Vec<_>>().join("\n")
        }
        _ => text.replace("\\\n", "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_continues_after_a_backslash_and_between_quotes() {
        for text in ["a", "", "a\nb", "a\\\nb", "\"\"\"\na\n\"\"\"", "say \"\"\"", "\"\"\"\n\"\"\""] {
            assert!(is_complete(text), "{text:?}");
        }
        for text in ["a\\", "a\\\nb\\", "\"\"\"", "\"\"\"\na", " \"\"\" \na\\"] {
            assert!(!is_complete(text), "{text:?}");
        }
    }

    #[test]
    fn message_has_no_continuation_marks() {
        let cases = [
            ("a", "a"),
            ("a\\\nb", "a\nb"),
            ("a\nb\\c", "a\nb\\c"),
            ("a\r\nb\rc", "a\nb\nc"),
            ("\"\"\"\na\\\nb\n\"\"\"", "a\\\nb"),
            ("\"\"\"\n\"\"\"", ""),
        ];
        for (typed, message) in cases {
            assert_eq!(unfolded(typed), message, "{typed:?}");
        }
    }
}
