//! `tilewright chat`: a conversation at the terminal or from a pipe, or one answer.

use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use serde_json::Value as Json;
use tilewright::answer::Format;
use tilewright::chat::{ChatTemplate, Message};
use tilewright::generate::{CancelHandle, StopReason};
use tilewright::grammar::ToolChoice;
use tilewright::{ChatAnswer, ChatModel, ChatPrompt, ChatRequest, Error, Model, Recovery, Session};

use super::answer::AnswerPrinter;
use super::attachments::{self, Attachments, Kind};
use super::failure::describe;
use super::line_editor::{LineEditor, is_complete, is_quotes, unfolded};
use super::lost::each_piece;
use super::run::{ModelArgs, SamplingArgs, after_pipe, rate_text};
use super::speculation::{self, Draft};
use super::{
    CommandFailure, MARK, check_session, command_line, has_folder, invalid, progress, read_list, read_text,
    save_pipeline_caches, tell_findings,
};

/// Chat with a model, in the terminal or through a pipe.
///
/// At a terminal, each line is a message: a backslash at the end continues it on the next line, lines between two lines
/// of `"""` are one message, and so is a paste. `/help` lists the commands. Messages are kept in a history file
/// (TILEWRIGHT_HISTORY; empty: none).
///
/// A PROMPT, the text from a pipe, or both together are one message: its answer is printed, and the chat ends.
#[derive(Args)]
pub struct ChatArgs {
    /// Model: GGUF file, folder or hf:OWNER/REPO[:QUANTISATION] [default: the built-in model].
    ///
    /// A folder is one of Hugging Face, with config.json and safetensors.
    model: Option<PathBuf>,
    /// The model, as a flag; a word without a flag is then the prompt.
    #[arg(long = "model", short = 'm', value_name = "MODEL")]
    named: Option<PathBuf>,
    /// Message to answer, after the text from a pipe, if any.
    #[arg(value_name = "PROMPT", conflicts_with = "prompt")]
    message: Option<String>,
    /// Message to answer, as a flag.
    #[arg(long, short, value_name = "PROMPT")]
    prompt: Option<String>,
    /// Read each line from a pipe as a message or command, like at a terminal.
    #[arg(long, conflicts_with_all = ["message", "prompt"])]
    lines: bool,
    #[command(flatten)]
    device: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// System message.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Built-in chat template to use instead of the model's own.
    #[arg(long, value_parser = ChatTemplate::KNOWN, value_name = "NAME")]
    template: Option<String>,
    #[command(flatten)]
    template_args: TemplateArgs,
    /// Tool call format [default: detected from the chat template or the vocabulary].
    #[arg(long, value_parser = Format::ALL.map(Format::name), value_name = "NAME")]
    tool_format: Option<String>,
    #[command(flatten)]
    calls: super::constrain::CallArgs,
    /// Session file: resume from it if it exists, and write it at the end.
    ///
    /// It holds the conversation and its KV cache. Written at `/quit` or the end of the input, not at Ctrl-C or after
    /// an error. `/save` and `/load` do the same at any time.
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Text that each answer starts with.
    #[arg(long, value_name = "TEXT")]
    prefill: Option<String>,
    /// Picture for the first message: PNG, JPEG, WebP or GIF; repeatable.
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Sound for the first message: WAV, FLAC, MP3, M4A (AAC), Ogg or WebM (Opus, Vorbis); repeatable.
    #[arg(long, value_name = "FILE")]
    audio: Vec<PathBuf>,
}

/// Template inputs besides the messages.
#[derive(Args)]
struct TemplateArgs {
    /// JSON file with a list of tools that the model may call.
    ///
    /// Each is {"type": "function", "function": {...}}.
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// JSON file with a list of documents to answer from, such as {"title": "...", "text": "..."}.
    #[arg(long, value_name = "FILE")]
    documents: Option<PathBuf>,
    /// Chat template variable, such as enable_thinking=false or reasoning_effort=high; repeatable.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    template_var: Vec<(String, Json)>,
    /// Chat template to use if the model has several [default: tool_use with --tools, else default].
    #[arg(long, value_name = "NAME", conflicts_with = "template")]
    template_name: Option<String>,
}

impl ChatArgs {
    /// Puts `--model` in the place of the model.
    ///
    /// # Errors
    /// A message, if there are two models or prompts.
    pub fn join(&mut self) -> Result<(), String> {
        command_line::join(&mut self.model, self.named.take(), &mut self.message, self.prompt.is_some())?;
        match &self.message {
            Some(message) if self.lines => Err(format!("--lines reads the messages from stdin, beside `{message}`")),
            _ => Ok(()),
        }
    }

    /// The model and the draft model.
    pub fn models(&mut self) -> (Option<&mut PathBuf>, Option<&mut PathBuf>) {
        (self.model.as_mut(), self.sampling.speculation.draft.path.as_mut())
    }
}

impl TemplateArgs {
    fn request(&self) -> Result<ChatRequest, Error> {
        let list = |path: &Option<PathBuf>| path.as_deref().map_or(Ok(Vec::new()), read_list);
        Ok(ChatRequest {
            tools: list(&self.tools)?,
            documents: list(&self.documents)?,
            variables: self.template_var.iter().cloned().collect(),
            template: self.template_name.clone(),
            ..ChatRequest::new(Vec::new())
        })
    }
}

/// Parses the name and the value of a variable: JSON, else text.
pub fn parse_variable(given: &str) -> Result<(String, Json), String> {
    let (name, value) = given.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| Json::from(value))))
}

const HELP: &str = "\
/image FILE    add a picture to the next message
/audio FILE    add a sound to the next message
/clear         forget the conversation, except the system message
/system TEXT   set the system message; without TEXT, remove it
/regen         answer the last message again
/history       print the conversation
/tools         list the tools from --tools
/result TEXT   give the result of a tool call; with several calls, one after the other
/save FILE     save the conversation and its KV cache; only the conversation, as JSON, if FILE ends in .json
/load FILE     load what /save wrote
/quit          quit
//TEXT         send a message that starts with a slash
Ctrl-C stops an answer or clears the line; Ctrl-D quits. A backslash at the end of a line continues the message; lines
between two lines of \"\"\" are one message. Up and Down step through earlier messages, Ctrl-R searches them.";

pub fn chat(args: &ChatArgs) -> Result<(), CommandFailure> {
    let options = args.sampling.options()?;
    options.check()?;
    check_session(args.session.as_deref())?;
    let mut request = ChatRequest { options, prefill: args.prefill.clone(), ..args.template_args.request()? };
    let interrupt = Interrupt::install()?;
    let mut recovery = args.device.recovery(args.model.as_deref(), &args.sampling.speculation, None);
    let session = recovery.load(&args.device.open()?)?.session()?;
    let model = chat_model(session.model(), args)?;
    if args.template_args.tools.is_some() {
        args.calls.enforce(&mut request, &model, args.sampling.speculation.is_asked_for())?;
    }
    let draft = args.sampling.speculation.draft.load_session(session.model())?;
    let attachments = Attachments::default();
    let mut chat =
        Chat { session, draft, recovery, model, attachments, request, interrupt, system: None, messages: Vec::new() };
    if let Some(path) = args.session.as_deref().filter(|path| path.exists()) {
        chat.load(path)?;
    }
    if let Some(system) = &args.system {
        chat.set_system(system);
    }
    for (kind, paths) in [(Kind::Image, &args.image), (Kind::Sound, &args.audio)] {
        paths.iter().try_for_each(|path| chat.attach(kind, path))?;
    }
    let prompt = args.message.as_deref().or(args.prompt.as_deref());
    match (args.lines, prompt.is_none() && io::stdin().is_terminal()) {
        (true, _) => chat.follow_lines(io::stdin().lock())?,
        (false, true) => chat.converse()?,
        (false, false) => {
            let message = after_pipe(prompt)?.ok_or_else(|| Error::Io {
                path: "stdin".into(),
                source: io::Error::new(io::ErrorKind::UnexpectedEof, "no text, expected a message there or as PROMPT"),
            })?;
            chat.send(&message)?;
        }
    }
    if let Some(path) = &args.session {
        chat.save(path)?;
    }
    let model = chat.session.model();
    model.devices().for_each(tell_findings);
    save_pipeline_caches(model.devices());
    Ok(())
}

/// The model with the requested template, the file's own, or the built-in one for its vocabulary.
fn chat_model(model: &Model, args: &ChatArgs) -> Result<ChatModel, Error> {
    let found = match &args.template {
        Some(name) => ChatTemplate::known(name),
        None => ChatTemplate::for_model(model.chat_source(), model.tokenizer()?),
    };
    for error in found.iter().flat_map(ChatTemplate::unreadable) {
        warning!("{}: {error}; --template selects a built-in template", model.name());
    }
    let template = found.or_else(|| {
        notice!(
            "{} has no chat template and continues the text of the messages; --template selects one of {}",
            model.name(),
            ChatTemplate::KNOWN.join(", ")
        );
        ChatTemplate::known("plain")
    });
    let chat = ChatModel::of(model, template)?;
    Ok(match args.tool_format.as_deref().and_then(Format::from_name) {
        Some(format) => chat.with_format(format),
        None => chat,
    })
}

/// The next message or command of a pipe; `None` at its end.
fn read_message(lines: &mut impl BufRead) -> Result<Option<String>, CommandFailure> {
    let mut message = String::new();
    // Whether it is between quotes, after its first line.
    let mut is_quoted = None;
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line).map_err(|source| Error::Io { path: "stdin".into(), source })? == 0 {
            return Ok(is_quoted.map(|_| unfolded(&(message + "\n"))));
        }
        let line = line.strip_suffix('\n').unwrap_or(&line);
        let line = line.strip_suffix('\r').unwrap_or(line);
        let is_last = match is_quoted {
            None => is_complete(line),
            Some(true) => is_quotes(line),
            Some(false) => !line.ends_with('\\'),
        };
        if is_quoted.is_some() {
            message.push('\n');
        }
        message += line;
        if is_last {
            return Ok(Some(unfolded(&message)));
        }
        is_quoted.get_or_insert_with(|| is_quotes(line));
    }
}

/// Ctrl-C: cancels the answer in progress, or ends the program if there is none.
#[derive(Clone)]
struct Interrupt(Arc<Mutex<Option<CancelHandle>>>);

impl Interrupt {
    fn install() -> Result<Self, Error> {
        let interrupt = Interrupt(Arc::default());
        let of_handler = interrupt.clone();
        let handler = move || match of_handler.current().take() {
            Some(answer) => answer.cancel(),
            // The exit code of shells for a program that Ctrl-C ended.
            None => std::process::exit(130),
        };
        let failed = |error: ctrlc::Error| Error::Io { path: "Ctrl-C".into(), source: io::Error::other(error) };
        ctrlc::set_handler(handler).map_err(failed)?;
        Ok(interrupt)
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Option<CancelHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A conversation in progress.
struct Chat<'a> {
    session: Session,
    draft: Option<Draft>,
    recovery: Recovery<'a, Model>,
    model: ChatModel,
    attachments: Attachments,
    /// The request of each answer, without messages.
    request: ChatRequest,
    interrupt: Interrupt,
    system: Option<Message>,
    messages: Vec<Message>,
}

impl Chat<'_> {
    /// Answers what the user types until `/quit` or Ctrl-D. After an error the user can try again.
    fn converse(&mut self) -> Result<(), CommandFailure> {
        let model = self.session.model();
        summary!("{} on {}; /help lists the commands", model.name(), model.device().info().name);
        let mut editor = LineEditor::open()?;
        while let Some(line) = editor.read()? {
            match self.obey(&line) {
                Ok(true) => {}
                Ok(false) => break,
                Err(CommandFailure::Error(error)) => say!("error: {}", describe(&error)),
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Answers the lines of a pipe. A script must not continue after an error.
    fn follow_lines(&mut self, mut lines: impl BufRead) -> Result<(), CommandFailure> {
        let mut is_first = true;
        while let Some(line) = read_message(&mut lines)? {
            let line = if std::mem::take(&mut is_first) { line.strip_prefix(MARK).unwrap_or(&line) } else { &line };
            if !self.obey(line)? {
                break;
            }
        }
        Ok(())
    }

    /// Answers a message. Without an answer it is not part of the conversation.
    fn send(&mut self, text: &str) -> Result<(), CommandFailure> {
        let message = match self.attachments.take_next() {
            files if files.is_empty() => Message::new("user", text),
            files => attachments::message(text, &files),
        };
        self.messages.push(message);
        let result = self.answer();
        if result.is_err() {
            self.messages.pop_if(|message| message.role == "user");
        }
        result
    }

    /// Adds a file to the next message.
    fn attach(&mut self, kind: Kind, path: &Path) -> Result<(), Error> {
        let n_rows = self.attachments.add(self.session.model(), kind, path)?;
        summary!("{}: {n_rows} tokens, for the next message", path.display());
        Ok(())
    }

    /// Runs a command or answers a message. Returns `false` at the end of the conversation.
    fn obey(&mut self, line: &str) -> Result<bool, CommandFailure> {
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "/quit" | "/exit" | "/bye" => return Ok(false),
            "/help" | "/?" => say!("{HELP}"),
            "/image" | "/audio" if rest.trim().is_empty() => say!("{command} needs the name of a file"),
            "/image" => self.attach(Kind::Image, Path::new(rest.trim()))?,
            "/audio" => self.attach(Kind::Sound, Path::new(rest.trim()))?,
            "/clear" => {
                self.messages.clear();
                say!("the conversation is empty");
            }
            "/system" => {
                self.set_system(rest.trim());
                say!("{}", if self.system.is_some() { "system message set" } else { "no system message" });
            }
            "/history" => self.print_history(),
            "/tools" => self.print_tools(),
            "/result" => self.take_result(rest.trim())?,
            "/save" | "/load" if rest.trim().is_empty() => say!("{command} needs the name of a file"),
            "/save" => {
                self.save(Path::new(rest.trim()))?;
                say!("saved {} messages to {}", self.messages.len(), rest.trim());
            }
            "/load" => {
                self.load(Path::new(rest.trim()))?;
                say!("loaded {} messages from {}", self.messages.len(), rest.trim());
            }
            "/regen" => {
                let before = self.messages.len();
                let is_answer = |message: &Message| message.role == "assistant";
                let answer = self.messages.pop_if(|message| is_answer(message));
                if self.messages.is_empty() {
                    say!("no message to answer");
                    return Ok(true);
                }
                // The same seed would give the same answer.
                let seed = &mut self.request.options.seed;
                *seed = seed.map(|seed| seed.wrapping_add(1));
                let result = self.answer();
                if self.messages.len() < before {
                    self.messages.extend(answer);
                }
                result?;
            }
            _ if line.trim().is_empty() => {}
            _ if command.starts_with('/') && !command.starts_with("//") => {
                say!("no command {command}; /help lists all commands, and // starts a message with a slash");
            }
            _ => {
                self.send(if line.starts_with("//") { line.get(1..).unwrap_or_default() } else { line })?;
            }
        }
        Ok(true)
    }

    fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| Message::new("system", text));
    }

    fn print_history(&self) {
        for message in self.conversation() {
            say!("{}: {}", message.role, attachments::text_of(&message));
            let calls = message.fields.get("tool_calls").and_then(Json::as_array).into_iter().flatten();
            for call in calls.filter_map(|call| call.get("function")) {
                let text = |key: &str| call.get(key).map_or(String::new(), Json::to_string);
                say!("call {} {}", text("name").trim_matches('"'), text("arguments"));
            }
        }
        if self.conversation().is_empty() {
            say!("the conversation is empty");
        }
    }

    fn print_tools(&self) {
        let tools = &self.request.tools;
        for tool in tools.iter().map(|tool| tool.get("function").unwrap_or(tool)) {
            let text = |key: &str| tool.get(key).and_then(Json::as_str).unwrap_or_default();
            say!("{:<14} {}", text("name"), text("description").lines().next().unwrap_or_default());
        }
        if tools.is_empty() {
            say!("no tools; --tools FILE sets them");
        }
    }

    /// Adds the result of the next tool call of the last answer. After the last call, the model continues.
    fn take_result(&mut self, result: &str) -> Result<(), CommandFailure> {
        let n_given = self.messages.iter().rev().take_while(|message| message.role == "tool").count();
        let before = self.messages.len() - n_given;
        let asking = before.checked_sub(1).and_then(|at| self.messages.get(at));
        let calls = asking.and_then(|message| message.fields.get("tool_calls")).and_then(Json::as_array);
        let Some(call) = calls.and_then(|calls| calls.get(n_given)) else {
            say!("no call to answer");
            return Ok(());
        };
        let is_last = calls.is_some_and(|calls| n_given + 1 == calls.len());
        let mut message = Message::new("tool", result);
        let fields = [("tool_call_id", call.get("id")), ("name", call.pointer("/function/name"))];
        for (name, value) in fields {
            message.fields.extend(value.map(|value| (name.to_owned(), value.clone())));
        }
        self.messages.push(message);
        let answered = if is_last { self.answer() } else { Ok(()) };
        if answered.is_err() {
            self.messages.pop();
        }
        answered
    }

    fn conversation(&self) -> Vec<Message> {
        self.system.iter().chain(&self.messages).cloned().collect()
    }

    /// The request for the next answer.
    fn request(&self) -> ChatRequest {
        let messages = self.conversation();
        let [images, sounds] = [Kind::Image, Kind::Sound].map(|kind| self.attachments.of(&messages, kind));
        let mut request = ChatRequest { images, sounds, messages, ..self.request.clone() };
        if request.messages.last().is_some_and(|message| message.role == "tool")
            && request.tool_choice != ToolChoice::None
        {
            // The model may answer from a tool's result without another call.
            request.tool_choice = ToolChoice::Auto;
        }
        request
    }

    /// Answers the last message and prints the answer while it streams. Tokens in the session's KV cache are not
    /// computed again.
    fn answer(&mut self) -> Result<(), CommandFailure> {
        let ChatPrompt { ids, images, options, mut reader } = self.model.prepare(&self.request())?;
        self.session.set_images(&images)?;
        let mut generation = self.session.generate_from(&ids, &options)?;
        if let Some(draft) = &mut self.draft {
            draft.draft_for(&mut generation)?;
        }
        *self.interrupt.current() = Some(generation.cancel_handle());
        let mut answer = AnswerPrinter::new(io::stdout().lock());
        // Prints the prefill.
        answer.take(reader.push_text(""))?;
        let mut ended =
            each_piece(&mut generation, &mut self.recovery, |piece| answer.take(reader.push(piece.id, &piece.text)?));
        if !matches!(ended, Err(CommandFailure::StdoutClosed)) {
            // Text that the reader held back belongs to the answer, even if it was interrupted.
            ended = answer.take(reader.finish()).and(ended);
        }
        *self.interrupt.current() = None;
        let (reason, prefill, decode) = (generation.stop_reason(), generation.prefill(), generation.decode());
        let speculation = generation.speculation();
        if !matches!(ended, Err(CommandFailure::StdoutClosed)) {
            answer.end(ended.is_err())?;
        }
        ended?;
        let AnswerPrinter { text, thought: thinking, calls, .. } = answer;
        let answer = ChatAnswer { text, thinking, calls, stop_reason: reason.unwrap_or(StopReason::Cancelled) };
        self.messages.push(answer.into_message(self.messages.len()));
        if progress::is_shown() {
            let note = match reason {
                Some(StopReason::MaxTokens) => "; stopped at --max-tokens",
                Some(StopReason::ContextFull) => {
                    "; the context is full: /clear empties it, --slide drops its older half"
                }
                _ => "",
            };
            let is_asked_for = options.prompt_lookup > 0 || options.mtp_tokens > 0 || self.draft.is_some();
            let drafted =
                speculation::summary(is_asked_for, speculation).map_or(String::new(), |summary| format!("; {summary}"));
            let decoded = rate_text(decode.tokens + 1, decode);
            say!("[prefill {} tokens, decode {decoded}{drafted}{note}]", prefill.tokens);
        }
        Ok(())
    }

    fn save(&self, path: &Path) -> Result<(), Error> {
        if !has_folder(path) {
            let source = io::Error::new(io::ErrorKind::NotFound, "the folder does not exist");
            return Err(Error::Io { path: path.into(), source });
        }
        let json = format!("{:#}\n", serde_json::json!(self.conversation()));
        if is_json(path) {
            return tilewright::replace_file(path, json.as_bytes());
        }
        pollster::block_on(self.session.save(path, &json))
    }

    fn load(&mut self, path: &Path) -> Result<(), Error> {
        let json = match is_json(path) {
            true => read_text(path)?,
            false => self.session.load(path)?,
        };
        let mut messages: Vec<Message> = serde_json::from_str(&json)
            .map_err(|error| invalid(path, &error.to_string(), "a conversation, which is a JSON list of messages"))?;
        let is_system = messages.first().is_some_and(|message| message.role == "system");
        self.system = is_system.then(|| messages.remove(0));
        self.attachments.load(self.session.model(), &messages)?;
        self.messages = messages;
        Ok(())
    }
}

/// Whether a file holds only the conversation, as JSON.
fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_pipe_are_joined_to_messages() {
        let text = "one\r\ntwo\\\n\n\"\"\"\nthree\\\n\n\"\"\"\n\nfour\\";
        let (mut lines, mut messages) = (text.as_bytes(), Vec::new());
        while let Ok(Some(message)) = read_message(&mut lines) {
            messages.push(message);
        }
        assert_eq!(messages, ["one", "two\n", "three\\\n", "", "four\n"]);
    }
}
