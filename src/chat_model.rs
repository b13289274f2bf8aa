//! Conversations with a model: messages to a prompt, what its answer is bound to, and the answer read as it comes.
//!
//! ```text
//! ChatRequest --template, format--> ChatPrompt (ids, options, reader) --session or engine--> pieces --reader--> events
//! ```
//!
//! Template, output format and grammar meet here: a request becomes the prompt, the generation options with what tool
//! calls are constrained to and what ends an answer, and the reader of the output. The server, the command line and
//! programs use it; the WASM modules do not, since none has both templates and grammars. It has the vocabulary and
//! nothing on a device, so it outlives a model that is loaded again.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use web_time::{SystemTime, UNIX_EPOCH};

use crate::answer::{AnswerReader, Event, Format, Mark, ToolCall, prompt_end};
use crate::chat::{ChatOptions, ChatTemplate, Message};
use crate::engine::{Engine, Request, Stream};
use crate::error::Error;
use crate::generate::{GenerateOptions, Generation, Model, Piece, Session, StopReason};
#[cfg(feature = "grammar")]
use crate::grammar::{Constraint, ToolChoice, ToolRules};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// What a model's conversations are made of: its chat template, the format in which it writes thoughts and calls, and
/// the tokens that end its answers. It knows the model's vocabulary and nothing on a device. Cloning shares it.
///
/// ```
/// use tilewright::answer::Event;
/// use tilewright::chat::{ChatTemplate, Message};
/// use tilewright::{ChatModel, ChatRequest, Device, Model};
///
/// # pollster::block_on(async {
/// let model = Model::builtin(&Device::cpu())?;
/// // The built-in model has no template of its own. Of one that has, it is `ChatModel::new(&model)?`.
/// let chat = ChatModel::of(&model, ChatTemplate::known("chatml"))?;
/// let mut session = model.session()?;
///
/// let mut request = ChatRequest::new(vec![Message::new("user", "Tell me of a dragon.")]);
/// let answer = chat.answer(&mut session, &request).await?;
/// println!("{} ({:?})", answer.text, answer.stop_reason);
///
/// // The conversation goes on, and the answer is printed as it comes.
/// request.push(answer);
/// request.messages.push(Message::new("user", "And then?"));
/// let mut stream = chat.stream(&mut session, &request)?;
/// while let Some(event) = stream.next().await {
///     match event? {
///         Event::Text(text) => print!("{text}"),
///         Event::Call(call) => println!("{} is called with {:?}", call.name, call.arguments),
///         _ => {}
///     }
/// }
/// # Ok::<(), tilewright::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct ChatModel {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    format: Format,
    /// Tokens that end an answer beyond those that end a text.
    stop_ids: Vec<u32>,
}

/// What is to be answered, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The conversation so far.
    pub messages: Vec<Message>,
    /// What the model may call, each in the shape `{"type": "function", "function": {...}}`.
    pub tools: Vec<Json>,
    /// Whether the answer has calls.
    #[cfg(feature = "grammar")]
    pub tool_choice: ToolChoice,
    /// Whether the answer may have several calls.
    #[cfg(feature = "grammar")]
    pub parallel_calls: bool,
    /// Whether what begins as a call has to be one, with arguments that are valid by the tool's schema. Otherwise the
    /// model is free, and its calls are read all the same. So it is where `prefill` or a constraint among the options
    /// leaves no room for calls, where the model's format is [`Format::Plain`], and without the feature `grammar`.
    /// Options that guess tokens are refused with tools unless this is false.
    #[cfg(feature = "grammar")]
    pub enforce_calls: bool,
    /// Whether the model may think; what its template does if `None`. Templates are told of it as `enable_thinking` and
    /// `thinking`.
    pub thinking: Option<bool>,
    /// Texts to answer from, usually `{"title": "...", "text": "..."}`.
    pub documents: Vec<Json>,
    /// Further variables of the template, such as `reasoning_effort`.
    pub variables: Map<String, Json>,
    /// Which of several templates of the model; see [`ChatOptions::template`].
    pub template: Option<String>,
    /// Seconds since 1970 UTC, for templates that mention the date; those of the clock if `None`.
    pub now: Option<i64>,
    /// How the answer begins: the model goes on from there.
    pub prefill: Option<String>,
    /// How tokens are chosen and when to stop. A constraint is on the answer's text: the model does not think then.
    pub options: GenerateOptions,
}

/// A prompt, and what its answer is generated and read by.
#[derive(Clone, Debug)]
pub struct ChatPrompt {
    /// The prompt's tokens.
    pub ids: Vec<u32>,
    /// The request's options, with what calls are bound to and what ends an answer.
    pub options: GenerateOptions,
    /// Reads the answer's pieces. Each answer to the prompt needs its own; they are clones.
    pub reader: AnswerReader,
}

/// An answer as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatAnswer {
    /// Its text, with what was given of it ([`ChatRequest::prefill`]) and without thoughts and calls.
    pub text: String,
    /// What the model thought.
    pub thinking: String,
    /// What it calls, in order.
    pub calls: Vec<ToolCall>,
    /// Why it ended.
    pub stop_reason: StopReason,
}

/// Where the pieces of an answer come from.
pub enum ChatPieces<'s> {
    /// A session, which computes them when they are asked for.
    Session(Box<Generation<'s>>),
    /// An engine.
    Engine(Stream),
}

/// An answer in progress: call [`ChatStream::next`] until it gives `None`. Dropping it ends the answer.
pub struct ChatStream<'s> {
    pieces: ChatPieces<'s>,
    reader: AnswerReader,
    /// What was read and not given out.
    events: VecDeque<Event>,
    is_over: bool,
}

impl ChatModel {
    /// With the template of the model's files, or the known one that its vocabulary was made for.
    ///
    /// # Errors
    /// [`Error::Template`] if there is none: the model continues texts. [`Error::Tokenizer`] if it has no tokenizer.
    pub fn new(model: &Model) -> Result<ChatModel, Error> {
        let chat = ChatModel::of(model, ChatTemplate::for_model(model.chat_source(), model.tokenizer()?))?;
        chat.template()?;
        Ok(chat)
    }

    /// With this template. Without one, it only continues texts ([`ChatModel::continue_text`]).
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the model has no tokenizer.
    pub fn of(model: &Model, template: Option<ChatTemplate>) -> Result<ChatModel, Error> {
        let tokenizer = model.encodings()?.shared_tokenizer();
        let sources = match &template {
            // Those that are built in know no tools.
            Some(template) if template.name() != "file" => String::new(),
            _ => model.chat_source().templates.iter().map(|(_, source)| source.as_str()).collect(),
        };
        let format = Format::detect(&sources, |name| tokenizer.special_id(name).is_some());
        let stop_ids = template.as_ref().map(|template| template.stop_ids(&tokenizer)).unwrap_or_default();
        Ok(ChatModel { tokenizer, template, format, stop_ids })
    }

    /// With another format than the one that the templates of the model's files and its vocabulary show.
    pub fn with_format(self, format: Format) -> ChatModel {
        ChatModel { format, ..self }
    }

    /// The template.
    ///
    /// # Errors
    /// [`Error::Template`] if there is none.
    pub fn template(&self) -> Result<&ChatTemplate, Error> {
        self.template.as_ref().ok_or_else(|| Error::Template {
            field: "chat template".into(),
            expected: "one in the model's file: this is a model that continues texts".into(),
            found: "missing".into(),
        })
    }

    /// How the model writes thoughts and calls.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The prompt of a conversation, and what its answer is generated and read by. This takes time by the length of the
    /// conversation.
    ///
    /// # Errors
    /// [`Error::Template`] if there is no template, or one that refuses the messages; [`Error::Option`] for a
    /// `tool_choice` that asks for a call where there can be none; [`Error::Constraint`] for tools that cannot be
    /// enforced; those of [`Tokenizer::encode`].
    pub fn prepare(&self, request: &ChatRequest) -> Result<ChatPrompt, Error> {
        let template = self.template()?;
        let ChatRequest { messages, prefill, .. } = request;
        let messages: Cow<'_, [Message]> = match prefill {
            Some(begun) => Cow::from([messages.as_slice(), &[Message::new("assistant", begun.as_str())]].concat()),
            None => Cow::from(messages),
        };
        let mut variables = request.variables.clone();
        if let Some(thinks) = request.thinking {
            for name in ["enable_thinking", "thinking"] {
                variables.entry(name).or_insert_with(|| thinks.into());
            }
        }
        let list = |list: &Vec<Json>| (!list.is_empty()).then(|| list.clone());
        let told = ChatOptions {
            continue_final_message: prefill.is_some(),
            tools: list(&request.tools),
            documents: list(&request.documents),
            variables,
            template: request.template.clone(),
            now: request.now.or_else(now),
            ..ChatOptions::default()
        };
        let mut ids = template.encode(&self.tokenizer, &messages, &told)?;
        // What is given of an answer is read as its beginning, and not as the prompt's end.
        let mut end = String::new();
        if prefill.is_none() {
            end = prompt_end(&self.tokenizer, &ids)?;
            if request.options.has_constraint() {
                ids.extend(self.opening(&end)?);
                end = prompt_end(&self.tokenizer, &ids)?;
            }
        }
        let (mut options, reader) = self.continue_text(&end, request)?;
        options.stop_ids.extend(&self.stop_ids);
        options.stop.extend(template.stop_texts().iter().map(|&text| text.to_owned()));
        Ok(ChatPrompt { ids, options, reader: reader.begun_with(prefill.as_deref().unwrap_or_default()) })
    }

    /// What an answer is generated and read by whose prompt no template has made. `prompt` is its text, or the end of
    /// it. Of the request only the options and what is said of tools and thinking counts, and the options have nothing
    /// that ends a message.
    ///
    /// # Errors
    /// [`Error::Option`] and [`Error::Constraint`] as [`ChatModel::prepare`].
    pub fn continue_text(&self, prompt: &str, request: &ChatRequest) -> Result<(GenerateOptions, AnswerReader), Error> {
        let mut options = request.options.clone();
        self.bind(prompt, request, &mut options)?;
        let reader = AnswerReader::for_tokenizer(self.format, &self.tokenizer).with_tools(&request.tools);
        Ok((options, reader.after_prompt(prompt)))
    }

    /// Begins an answer in a session of the same model. What the session has computed of the prompt's beginning is kept,
    /// so that a conversation that grows costs only what is new.
    ///
    /// # Errors
    /// Those of [`ChatModel::prepare`] and [`Session::generate_from`].
    pub fn stream<'s>(&self, session: &'s mut Session, request: &ChatRequest) -> Result<ChatStream<'s>, Error> {
        let ChatPrompt { ids, options, reader } = self.prepare(request)?;
        Ok(ChatStream::new(session.generate_from(&ids, &options)?, reader))
    }

    /// Has an engine of the same model begin an answer. For one with a deadline, a priority or the like, give the engine
    /// what [`ChatModel::prepare`] makes, and its stream with the reader to [`ChatStream::new`].
    ///
    /// # Errors
    /// Those of [`ChatModel::prepare`] and [`Engine::submit`].
    pub fn submit(&self, engine: &Engine, request: &ChatRequest) -> Result<ChatStream<'static>, Error> {
        let ChatPrompt { ids, options, reader } = self.prepare(request)?;
        Ok(ChatStream::new(engine.submit(Request::new(ids, options))?, reader))
    }

    /// The whole answer of [`ChatModel::stream`].
    ///
    /// # Errors
    /// Those of [`ChatModel::stream`] and [`ChatStream::next`].
    pub async fn answer(&self, session: &mut Session, request: &ChatRequest) -> Result<ChatAnswer, Error> {
        self.stream(session, request)?.whole().await
    }

    /// What stands between a prompt and an answer that has to match something from its first character on: the end of a
    /// thought that the prompt has begun, or the header that such an answer has.
    fn opening(&self, prompt_end: &str) -> Result<Vec<u32>, Error> {
        let special = EncodeOptions { add_special: false, parse_special: true };
        let encode = |text: &str| self.tokenizer.encode_with(text, special);
        if self.format == Format::Harmony {
            let is_open = prompt_end.trim_end().ends_with("assistant");
            return if is_open { encode("<|channel|>final<|message|>") } else { Ok(Vec::new()) };
        }
        let marks = self.format.marks();
        let opened =
            marks.iter().position(|(name, mark)| *mark == Mark::ThinkOpen && prompt_end.trim_end().ends_with(name));
        let closing = opened.and_then(|at| marks.get(at..)?.iter().find(|(_, mark)| *mark == Mark::ThinkClose));
        match closing {
            Some((name, _)) => encode(&format!("{name}\n\n")),
            None => Ok(Vec::new()),
        }
    }

    /// Binds an answer to calls that can be read and are valid, where it is not bound otherwise.
    #[cfg(feature = "grammar")]
    fn bind(&self, prompt: &str, request: &ChatRequest, options: &mut GenerateOptions) -> Result<(), Error> {
        let ChatRequest { tools, tool_choice: choice, parallel_calls: parallel, .. } = request;
        let is_bound = !request.enforce_calls || request.prefill.is_some() || options.has_constraint();
        if tools.is_empty() || is_bound {
            if let ToolChoice::Auto | ToolChoice::None = choice {
                return Ok(());
            }
            let lacks = match tools.is_empty() {
                true => "there are no tools",
                false => "a constraint, a beginning or calls that are not enforced leave no room for one",
            };
            let expected = format!("auto or none, since {lacks}");
            return Err(Error::Option { option: "tool_choice", expected, found: "a call".into() });
        }
        // Of a format that is not known, calls are neither read nor enforced.
        if self.format == Format::Plain && matches!(choice, ToolChoice::Auto | ToolChoice::None) {
            return Ok(());
        }
        let (choice, thinking) = (choice.clone(), request.thinking != Some(false));
        let rules = ToolRules { format: self.format, choice, parallel: *parallel, thinking };
        options.constraint = Some(Constraint::tools(tools, &rules, &self.tokenizer, prompt)?);
        Ok(())
    }

    #[cfg(not(feature = "grammar"))]
    fn bind(&self, _: &str, _: &ChatRequest, _: &mut GenerateOptions) -> Result<(), Error> {
        Ok(())
    }
}

/// Seconds since 1970 UTC.
fn now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

impl ChatRequest {
    /// Without tools, with the usual options. The model decides whether it thinks.
    pub fn new(messages: Vec<Message>) -> ChatRequest {
        ChatRequest {
            messages,
            tools: Vec::new(),
            #[cfg(feature = "grammar")]
            tool_choice: ToolChoice::Auto,
            #[cfg(feature = "grammar")]
            parallel_calls: true,
            #[cfg(feature = "grammar")]
            enforce_calls: true,
            thinking: None,
            documents: Vec::new(),
            variables: Map::new(),
            template: None,
            now: None,
            prefill: None,
            options: GenerateOptions::default(),
        }
    }

    /// Adds an answer to the messages.
    pub fn push(&mut self, answer: ChatAnswer) {
        let n_messages = self.messages.len();
        self.messages.push(answer.into_message(n_messages));
    }
}

impl ChatAnswer {
    /// The message that templates look for, after so many others. The thought is in `reasoning_content`, where each
    /// template keeps it or leaves it out. Calls that the model gave no id have one by the number of messages.
    pub fn into_message(self, n_messages: usize) -> Message {
        let mut message = Message::new("assistant", self.text);
        if !self.thinking.is_empty() {
            message.fields.insert("reasoning_content".into(), self.thinking.into());
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().enumerate().map(|(at, call)| call.to_json(n_messages * 100 + at));
            message.fields.insert("tool_calls".into(), calls.collect());
        }
        message
    }
}

impl ChatPieces<'_> {
    /// The next token with the text that it completes, or `None` at the end.
    ///
    /// # Errors
    /// As [`Generation::next`].
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        match self {
            ChatPieces::Session(generation) => generation.next().await,
            ChatPieces::Engine(stream) => stream.next().await,
        }
    }

    /// Why the text ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        match self {
            ChatPieces::Session(generation) => generation.stop_reason(),
            ChatPieces::Engine(stream) => stream.stop_reason(),
        }
    }
}

impl<'s> From<Generation<'s>> for ChatPieces<'s> {
    fn from(generation: Generation<'s>) -> Self {
        ChatPieces::Session(Box::new(generation))
    }
}

impl From<Stream> for ChatPieces<'_> {
    fn from(stream: Stream) -> Self {
        ChatPieces::Engine(stream)
    }
}

impl<'s> ChatStream<'s> {
    /// The answer that a generation or an engine's stream gives, read by the reader of its prompt.
    pub fn new(pieces: impl Into<ChatPieces<'s>>, reader: AnswerReader) -> ChatStream<'s> {
        ChatStream { pieces: pieces.into(), reader, events: VecDeque::new(), is_over: false }
    }

    /// Where the pieces come from: to cancel the answer, to go on after a lost device, or for what was counted.
    pub fn pieces(&mut self) -> &mut ChatPieces<'s> {
        &mut self.pieces
    }

    /// What comes next: a part of a thought or of the text, or a whole call. `None` at the end.
    ///
    /// # Errors
    /// As [`Generation::next`]. What was held back comes after it.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        while self.events.is_empty() && !self.is_over {
            let events = match self.pieces.next().await {
                Some(Ok(piece)) => self.reader.push(piece.id, &piece.text),
                Some(Err(error)) => Err(error),
                None => {
                    self.is_over = true;
                    Ok(self.reader.finish())
                }
            };
            match events {
                Ok(events) => self.events.extend(events),
                Err(error) => return Some(Err(error)),
            }
        }
        self.events.pop_front().map(Ok)
    }

    /// Why the answer ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.pieces.stop_reason()
    }

    /// All that comes.
    ///
    /// # Errors
    /// As [`ChatStream::next`].
    pub async fn whole(mut self) -> Result<ChatAnswer, Error> {
        let (mut text, mut thinking, mut calls) = (String::new(), String::new(), Vec::new());
        while let Some(event) = self.next().await {
            match event? {
                Event::Thinking(more) => thinking += &more,
                Event::Text(more) | Event::NotACall { text: more, .. } => text += &more,
                Event::Call(call) => calls.push(call),
                Event::Open(_) => {}
            }
        }
        let stop_reason = self.stop_reason().unwrap_or(StopReason::Cancelled);
        Ok(ChatAnswer { text, thinking, calls, stop_reason })
    }
}
