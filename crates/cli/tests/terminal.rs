//! `tilewright chat` at a terminal: a pseudo-terminal whose keys the test types.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::pty::{Winsize, openpty};
use serde_json::Value;

use crate::files;

/// A program that shows nothing for this long has failed.
const PATIENCE: Duration = Duration::from_secs(120);

struct Terminal {
    child: Child,
    keys: File,
    shown: Receiver<Vec<u8>>,
    /// What was shown and not yet awaited.
    rest: String,
    saved: String,
}

impl Terminal {
    /// A chat with the built-in model, whose answers have three tokens, with a history file of this name.
    fn open(name: &str) -> Terminal {
        Terminal::run(name, &["chat"])
    }

    /// The program with these words.
    fn run(name: &str, words: &[&str]) -> Terminal {
        let size = Winsize { ws_row: 24, ws_col: 60, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        // A session of its own, so that `/dev/tty` is this terminal.
        let mut command = Command::new("setsid");
        command.args(["--ctty", env!("CARGO_BIN_EXE_tilewright")]).args(words).args(["--device", "cpu", "-n", "3"]);
        let file = |ending: &str| format!("{}/terminal_{name}{ending}", env!("CARGO_TARGET_TMPDIR"));
        command.env("TERM", "xterm").env("TILEWRIGHT_HISTORY", file("")).env("TILEWRIGHT_CACHE_DIR", "");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keys = File::from(pty.master);
        let mut screen = keys.try_clone().unwrap();
        let (sender, shown) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n) = screen.read(&mut bytes)
                && n > 0
                && sender.send(bytes[..n].to_vec()).is_ok()
            {}
        });
        let mut terminal = Terminal { child, keys, shown, rest: String::new(), saved: file(".json") };
        terminal.wait("/help lists the commands");
        terminal.wait("> ");
        terminal
    }

    /// Without a history.
    fn fresh(name: &str) -> Terminal {
        let _ = std::fs::remove_file(format!("{}/terminal_{name}", env!("CARGO_TARGET_TMPDIR")));
        Terminal::open(name)
    }

    fn wait(&mut self, text: &str) {
        while !self.rest.contains(text) {
            let bytes = self.shown.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.rest));
            self.rest += &String::from_utf8_lossy(&bytes);
        }
        self.rest.drain(..self.rest.find(text).unwrap() + text.len());
    }

    fn keys(&mut self, keys: impl AsRef<[u8]>) {
        self.keys.write_all(keys.as_ref()).unwrap();
    }

    /// Sends a message and waits for the end of its answer.
    fn send(&mut self, keys: impl AsRef<[u8]>) {
        self.keys(keys);
        self.wait("[prefill ");
        self.wait("> ");
    }

    /// The messages of the user so far.
    fn messages(&mut self) -> Vec<String> {
        let saved = self.saved.clone();
        self.keys(format!("/save {saved}\r"));
        self.wait("saved ");
        self.wait("> ");
        let all: Vec<Value> = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
        let of_user = all.iter().filter(|message| message["role"] == "user");
        of_user.map(|message| message["content"].as_str().unwrap().to_owned()).collect()
    }

    /// Leaves by Ctrl-D.
    fn leave(mut self) {
        self.keys("\x04");
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn keys_edit_the_line_and_history_outlives_the_program() {
    let mut terminal = Terminal::fresh("edit");
    // Three to the left, then a letter; a backspace over an emoji.
    terminal.send("h\u{e9}llo wrld\x1b[D\x1b[D\x1b[Do\x1b[C\x1b[C\x1b[C\u{1f642}\x7f\r");
    assert_eq!(terminal.messages(), ["h\u{e9}llo world"]);
    terminal.leave();
    let mut terminal = Terminal::open("edit");
    // Up twice: past the command, to the message.
    terminal.send("\x1b[A\x1b[A!\r");
    assert_eq!(terminal.messages(), ["h\u{e9}llo world!"]);
    terminal.leave();
}

#[test]
fn paste_and_continued_lines_are_one_message() {
    let mut terminal = Terminal::fresh("lines");
    terminal.send("\x1b[200~one\ntwo\r\nthree\x1b[201~\r");
    terminal.send("four\\\rfive\r");
    terminal.send("\"\"\"\rsix\\\r\rseven\r\"\"\"\r");
    assert_eq!(terminal.messages(), ["one\ntwo\nthree", "four\nfive", "six\\\n\nseven"]);
    terminal.leave();
}

/// As without bracketed paste: the lines arrive before the program asks for them.
#[test]
fn lines_typed_ahead_are_messages_of_their_own() {
    let mut terminal = Terminal::fresh("ahead");
    terminal.send("one\rtwo\rthree\r");
    for _ in 0..2 {
        terminal.wait("[prefill ");
        terminal.wait("> ");
    }
    assert_eq!(terminal.messages(), ["one", "two", "three"]);
    terminal.leave();
}

#[test]
fn ctrl_c_clears_the_line() {
    let mut terminal = Terminal::fresh("cleared");
    terminal.keys("some words\x03");
    terminal.wait("Ctrl-D or /quit");
    terminal.wait("> ");
    terminal.send("others\r");
    assert_eq!(terminal.messages(), ["others"]);
    terminal.leave();
}

#[test]
fn invalid_utf8_and_a_too_long_paste_lose_no_messages() {
    let mut terminal = Terminal::fresh("bytes");
    terminal.send("first\r");
    terminal.keys(b"a\xff");
    terminal.wait("error: the input is not UTF-8");
    terminal.wait("> ");
    // Longer than the context.
    let paste = "word ".repeat(20_000);
    terminal.keys(format!("\x1b[200~{paste}\x1b[201~\r"));
    terminal.wait("error: context full: ");
    terminal.wait("/clear empties it");
    terminal.wait("> ");
    terminal.send("last\r");
    assert_eq!(terminal.messages(), ["first", "last"]);
    terminal.leave();
}

#[test]
fn model_with_a_template_converses_without_a_command() {
    let path = format!("{}/terminal_model.gguf", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&path, files::with_templates("{{ messages[0].content }}", &[])).unwrap();
    let mut terminal = Terminal::run("model", &["-m", &path]);
    terminal.send("hello\r");
    assert_eq!(terminal.messages(), ["hello"]);
    terminal.leave();
}
