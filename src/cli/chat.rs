//! `tilewright chat`: a conversation on the terminal or from a pipe.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::Value as Json;
use tilewright::chat::{ChatOptions, ChatTemplate, Message};
use tilewright::generate::{CancelHandle, StopReason};
use tilewright::{Error, GenerateOptions, Model, Recovery, Session};

use super::guess::{self, Draft};
use super::lost::each_piece;
use super::run::{ModelArgs, SamplingArgs};
use super::{Failure, tell_findings};

/// Talk to a model.
///
/// Each line is a message; one that ends in a backslash goes on in the next line. `/help` lists the commands. From a
/// pipe, lines are taken in the same way, and only the answers are printed.
#[derive(Args)]
pub struct ChatArgs {
    /// GGUF file, or folder with config.json and safetensors, or address hf:OWNER/REPO[:QUANTISATION]; the built-in model if absent.
    model: Option<PathBuf>,
    #[command(flatten)]
    device: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// What the model is told about its part, before all else.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Template that is built in, instead of the file's own.
    #[arg(long, value_parser = ChatTemplate::KNOWN, value_name = "NAME")]
    template: Option<String>,
    #[command(flatten)]
    told: TemplateArgs,
    /// File that keeps the conversation and what was computed of it: it goes on with what is there, and is written at `/quit`
    /// or the end of the input, not at Ctrl-C or after an error. `/save` and `/load` do the same at any time.
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Text with which each answer begins.
    #[arg(long, value_name = "TEXT")]
    prefill: Option<String>,
}

/// What the template is told besides the messages.
#[derive(Args)]
struct TemplateArgs {
    /// JSON file with a list of what the model may call: {"type": "function", "function": {...}}.
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// JSON file with a list of texts to answer from, such as {"title": "...", "text": "..."}.
    #[arg(long, value_name = "FILE")]
    documents: Option<PathBuf>,
    /// Variable of the template, such as enable_thinking=false or reasoning_effort=high; can be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    template_var: Vec<(String, Json)>,
    /// Which of several templates of the file; tool_use with --tools, or else default, if absent.
    #[arg(long, value_name = "NAME", conflicts_with = "template")]
    template_name: Option<String>,
}

impl ChatArgs {
    /// The model, and the one that guesses.
    pub fn models(&mut self) -> (Option<&mut PathBuf>, Option<&mut PathBuf>) {
        (self.model.as_mut(), self.sampling.guess.draft.as_mut())
    }
}

impl TemplateArgs {
    fn options(&self) -> Result<ChatOptions, Error> {
        let list = |path: &Option<PathBuf>| path.as_deref().map(read_list).transpose();
        Ok(ChatOptions {
            tools: list(&self.tools)?,
            documents: list(&self.documents)?,
            variables: self.template_var.iter().cloned().collect(),
            template: self.template_name.clone(),
            ..ChatOptions::default()
        })
    }
}

/// A variable's name and its value: JSON, or else a text.
fn parse_variable(given: &str) -> Result<(String, Json), String> {
    let (name, value) = given.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| Json::from(value))))
}

/// A list of JSON objects in a file.
fn read_list(path: &Path) -> Result<Vec<Json>, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let objects = |list: &Vec<Json>| list.iter().all(Json::is_object);
    let parsed = serde_json::from_str(&text).map_err(|error| error.to_string());
    parsed.and_then(|list| if objects(&list) { Ok(list) } else { Err("another list".into()) }).map_err(|found| {
        let (field, expected) = (path.display().to_string(), "a JSON list of objects".into());
        Error::Template { field, expected, found }
    })
}

const HELP: &str = "\
/clear         forget the conversation, but for the system message
/system TEXT   tell the model its part; without TEXT, nothing
/regen         answer the last message anew
/save FILE     write the conversation and what was computed of it; as JSON alone if FILE ends in .json
/load FILE     go on with what /save wrote
/quit          end
//TEXT         a message that begins with a slash
Ctrl-C stops an answer, and ends where there is none. A backslash at the end of a line continues it.";

pub fn chat(args: &ChatArgs) -> Result<(), Failure> {
    let options = args.sampling.options()?;
    options.check()?;
    let told = args.told.options()?;
    let interrupt = Interrupt::install()?;
    let mut recovery = args.device.recovery(args.model.as_deref());
    let session = recovery.load(&args.device.open()?)?.session()?;
    let template = template(session.model(), args)?;
    let mut chat = Chat::new(session, recovery, template, told, options, interrupt)?;
    chat.draft = args.sampling.guess.load(chat.session.model())?;
    chat.prefill.clone_from(&args.prefill);
    if let Some(path) = args.session.as_deref().filter(|path| path.exists()) {
        chat.load(path)?;
    }
    if let Some(system) = &args.system {
        chat.set_system(system);
    }
    let talks = io::stdin().is_terminal();
    if talks {
        let model = chat.session.model();
        eprintln!("{} on {}; /help lists the commands", model.name(), model.device().info().name);
    }
    let mut lines = io::stdin().lock();
    while let Some(line) = read_message(&mut lines, talks)? {
        match chat.obey(&line) {
            Ok(true) => {}
            Ok(false) => break,
            // The next message may fare better; a script should not go on as if nothing had been.
            Err(Failure::Error(error)) if talks => eprintln!("error: {error}"),
            Err(failure) => return Err(failure),
        }
    }
    if let Some(path) = &args.session {
        chat.save(path)?;
    }
    let device = chat.session.model().device();
    tell_findings(device);
    if let Err(error) = device.save_pipeline_cache() {
        eprintln!("warning: the pipeline cache was not saved: {error}");
    }
    Ok(())
}

/// The template asked for, the file's own, or the one its vocabulary was made for.
fn template(model: &Model, args: &ChatArgs) -> Result<ChatTemplate, Error> {
    let found = match &args.template {
        Some(name) => ChatTemplate::known(name),
        None => ChatTemplate::for_model(model.chat_source(), model.tokenizer()?)?,
    };
    found.ok_or_else(|| Error::Template {
        field: "chat template".into(),
        expected: format!(
            "one in the model's file: this is a model that continues texts (`tilewright run`); to talk to it all the \
             same, choose a template with --template: {}",
            ChatTemplate::KNOWN.join(", ")
        ),
        found: "missing".into(),
    })
}

/// The next message or command; `None` at the end of the input.
fn read_message(lines: &mut impl BufRead, talks: bool) -> Result<Option<String>, Failure> {
    let mut message = String::new();
    loop {
        if talks {
            eprint!("{}", if message.is_empty() { "> " } else { ". " });
        }
        let mut line = String::new();
        let n_bytes = lines.read_line(&mut line).map_err(|source| Error::Io { path: "stdin".into(), source })?;
        let line = line.trim_end_matches(['\r', '\n']);
        let (line, continues) = line.strip_suffix('\\').map_or((line, false), |line| (line, true));
        message += line;
        if n_bytes == 0 && message.is_empty() {
            return Ok(None);
        }
        if n_bytes == 0 || !continues {
            return Ok(Some(message));
        }
        message += "\n";
    }
}

/// Ctrl-C: ends the answer in progress, and the program if there is none.
#[derive(Clone)]
struct Interrupt(Arc<Mutex<Option<CancelHandle>>>);

impl Interrupt {
    fn install() -> Result<Self, Error> {
        let interrupt = Interrupt(Arc::default());
        let of_handler = interrupt.clone();
        let handler = move || match of_handler.current().take() {
            Some(answer) => answer.cancel(),
            // What a shell reports for a program that Ctrl-C ended.
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
    template: ChatTemplate,
    told: ChatOptions,
    options: GenerateOptions,
    interrupt: Interrupt,
    /// How each answer begins.
    prefill: Option<String>,
    system: Option<Message>,
    messages: Vec<Message>,
}

impl<'a> Chat<'a> {
    fn new(
        session: Session,
        recovery: Recovery<'a, Model>,
        template: ChatTemplate,
        told: ChatOptions,
        mut options: GenerateOptions,
        interrupt: Interrupt,
    ) -> Result<Self, Error> {
        options.stop_ids = template.stop_ids(session.model().tokenizer()?)?;
        options.stop.extend(template.stop_texts().iter().map(|text| text.to_string()));
        let (draft, prefill, system, messages) = (None, None, None, Vec::new());
        Ok(Chat { session, draft, recovery, template, told, options, interrupt, prefill, system, messages })
    }

    /// Does what a line says; false at the end of the conversation.
    fn obey(&mut self, line: &str) -> Result<bool, Failure> {
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "/quit" | "/exit" => return Ok(false),
            "/help" => eprintln!("{HELP}"),
            "/clear" => self.messages.clear(),
            "/system" => self.set_system(rest.trim()),
            "/save" => self.save(Path::new(rest.trim()))?,
            "/load" => self.load(Path::new(rest.trim()))?,
            "/regen" => {
                let before = self.messages.len();
                let is_answer = |message: &Message| message.role == "assistant";
                let answer = self.messages.pop_if(|message| is_answer(message));
                if self.messages.is_empty() {
                    eprintln!("there is no message to answer");
                    return Ok(true);
                }
                // With the same seed it would be the same answer.
                self.options.seed = self.options.seed.wrapping_add(1);
                let result = self.answer();
                if self.messages.len() < before {
                    self.messages.extend(answer);
                }
                result?;
            }
            _ if line.trim().is_empty() => {}
            _ if command.starts_with('/') && !command.starts_with("//") => {
                eprintln!("there is no command {command}; /help lists them, and // begins a message with a slash");
            }
            _ => {
                let text = if line.starts_with("//") { line.get(1..).unwrap_or_default() } else { line };
                self.messages.push(Message::new("user", text));
                let result = self.answer();
                if result.is_err() {
                    // A message that was not answered is none of the conversation.
                    self.messages.pop_if(|message| message.role == "user");
                }
                result?;
            }
        }
        Ok(true)
    }

    fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| Message::new("system", text));
    }

    fn conversation(&self) -> Vec<Message> {
        self.system.iter().chain(&self.messages).cloned().collect()
    }

    /// Answers the last message, printing as it goes. What the session has computed already is kept.
    fn answer(&mut self) -> Result<(), Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let now = now.and_then(|since| i64::try_from(since.as_secs()).ok());
        let mut conversation = self.conversation();
        conversation.extend(self.prefill.as_ref().map(|begin| Message::new("assistant", begin)));
        let continue_final_message = self.prefill.is_some();
        let chat_options = ChatOptions { now, continue_final_message, ..self.told.clone() };
        let tokenizer = self.session.model().tokenizer()?;
        let ids = self.template.encode(tokenizer, &conversation, &chat_options)?;
        let mut generation = self.session.generate_from(&ids, &self.options)?;
        if let Some(draft) = &mut self.draft {
            draft.guess_for(&mut generation)?;
        }
        *self.interrupt.current() = Some(generation.cancel_handle());
        let mut out = io::stdout().lock();
        let mut text = self.prefill.clone().unwrap_or_default();
        write!(out, "{text}")?;
        let ended = each_piece(&mut generation, &mut self.recovery, |piece| {
            text += &piece.text;
            write!(out, "{}", piece.text)?;
            Ok(out.flush()?)
        });
        *self.interrupt.current() = None;
        let (reason, prefill, decode) = (generation.stop_reason(), generation.prefill(), generation.decode());
        let speculation = generation.speculation();
        if !matches!(ended, Err(Failure::StdoutClosed)) {
            writeln!(out, "{}", if ended.is_err() { " [broken off]" } else { "" })?;
        }
        ended?;
        self.messages.push(Message::new("assistant", text));
        if io::stderr().is_terminal() {
            let note = match reason {
                Some(StopReason::MaxTokens) => "; as long as --max-tokens allows",
                Some(StopReason::ContextFull) => "; the context is full, /clear makes room",
                _ => "",
            };
            let is_asked_for = self.options.prompt_lookup > 0 || self.draft.is_some();
            let guessed = guess::told(is_asked_for, speculation).map_or(String::new(), |told| format!("; {told}"));
            eprintln!(
                "[{} new tokens read, {} written at {:.1}/s{guessed}{note}]",
                prefill.tokens,
                decode.tokens + 1,
                decode.rate()
            );
        }
        Ok(())
    }

    fn save(&self, path: &Path) -> Result<(), Error> {
        let json = format!("{:#}\n", serde_json::json!(self.conversation()));
        if is_json(path) {
            return std::fs::write(path, json).map_err(|source| Error::Io { path: path.into(), source });
        }
        pollster::block_on(self.session.save(path, &json))
    }

    fn load(&mut self, path: &Path) -> Result<(), Error> {
        let json = match is_json(path) {
            true => std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?,
            false => self.session.load(path)?,
        };
        let mut messages: Vec<Message> = serde_json::from_str(&json).map_err(|error| {
            let (field, expected) = ("conversation".into(), "a JSON list of messages".into());
            Error::Template { field, expected, found: error.to_string() }.in_file(path)
        })?;
        let is_system = messages.first().is_some_and(|message| message.role == "system");
        self.system = is_system.then(|| messages.remove(0));
        self.messages = messages;
        Ok(())
    }
}

/// Whether a file has the conversation alone.
fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}
