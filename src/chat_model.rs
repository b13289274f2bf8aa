//! Conversations with a model: from messages to a prompt, and from generated pieces to an answer.
//!
//! ```text
//! ChatRequest --template, format--> ChatPrompt (ids, options, reader) --session or engine--> pieces --reader-> events
//! ```
//!
//! A request becomes the prompt, the generation options (with the constraint on tool calls and the stop conditions)
//! and the output reader. Used by the server, the command line and users of the library, but not by the WASM modules,
//! none of which has both templates and grammars. Holds the vocabulary and nothing on a device, so it outlives a
//! reloaded model.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use web_time::{SystemTime, UNIX_EPOCH};

use crate::answer::{AnswerReader, Event, Format, Mark, ToolCall, prompt_end};
#[cfg(feature = "sound")]
use crate::audio::AudioEncoder;
use crate::chat::{ChatOptions, ChatTemplate, Message};
use crate::engine::{Engine, Request, Stream};
use crate::error::Error;
use crate::generate::{GenerateOptions, Generation, Model, Piece, Session, StopReason};
#[cfg(feature = "grammar")]
use crate::grammar::{Constraint, ToolChoice, ToolRules};
use crate::picture::Family;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use crate::vision::{ImageEmbeddings, ImageRows, Inputs, VisionEncoder, place_rows};

/// A model's chat template, output format (reasoning and tool calls) and end tokens. Holds the vocabulary and
/// nothing on a device. Clones share it.
///
/// ```
/// use tilewright::answer::Event;
/// use tilewright::chat::{ChatTemplate, Message};
/// use tilewright::{ChatModel, ChatRequest, Device, Model};
///
/// # pollster::block_on(async {
/// let model = Model::builtin(&Device::cpu())?;
/// // The built-in model has no template; with one, use `ChatModel::new(&model)?`.
/// let chat = ChatModel::of(&model, ChatTemplate::known("chatml"))?;
/// let mut session = model.session()?;
///
/// let mut request = ChatRequest::new(vec![Message::new("user", "Tell me about a dragon.")]);
/// let answer = chat.answer(&mut session, &request).await?;
/// println!("{} ({:?})", answer.text, answer.stop_reason);
///
/// // Continue the conversation, and print the answer as it is generated.
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
    /// End tokens of an answer besides the model's.
    stop_ids: Vec<u32>,
    /// The family whose images the model takes.
    images: Option<Family>,
    /// The placeholder of a sound in the template's text, if the model takes any.
    #[cfg(feature = "sound")]
    sounds: Option<&'static str>,
}

/// A request for an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The conversation so far.
    pub messages: Vec<Message>,
    /// The images of its messages, one for each part `{"type": "image"}` of their contents, in order.
    pub images: Vec<Arc<ImageEmbeddings>>,
    /// Its sounds, one for each part `{"type": "audio"}`, in order.
    #[cfg(feature = "sound")]
    pub sounds: Vec<Arc<ImageEmbeddings>>,
    /// Tools that the model may call, each `{"type": "function", "function": {...}}`.
    pub tools: Vec<Json>,
    /// Whether and what the answer may call.
    #[cfg(feature = "grammar")]
    pub tool_choice: ToolChoice,
    /// Whether the answer may have several calls.
    #[cfg(feature = "grammar")]
    pub parallel_calls: bool,
    /// Whether calls are constrained to be valid, with arguments that match the tool's schema; otherwise they are
    /// only parsed. Ignored with `prefill` or a constraint in the options, for [`Format::Plain`], and without the
    /// feature `grammar`. Options with drafts are refused with tools unless this is false.
    #[cfg(feature = "grammar")]
    pub enforce_calls: bool,
    /// Whether the model may think; `None`: the template's default. Templates receive it as `enable_thinking` and
    /// `thinking`.
    pub thinking: Option<bool>,
    /// Documents to answer from, usually `{"title": "...", "text": "..."}`.
    pub documents: Vec<Json>,
    /// Further template variables, such as `reasoning_effort`.
    pub variables: Map<String, Json>,
    /// Name of the template, if the model has several; see [`ChatOptions::template`].
    pub template: Option<String>,
    /// Seconds since 1970 UTC, for templates that mention the date; `None`: now.
    pub now: Option<i64>,
    /// Whether the prompt ends with the start of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Beginning of the answer, which the model continues.
    pub prefill: Option<String>,
    /// Sampling and stop options. A constraint applies to the answer's text and disables thinking.
    pub options: GenerateOptions,
}

/// A prompt with the options and reader for its answer.
#[derive(Clone, Debug)]
pub struct ChatPrompt {
    /// The prompt's tokens, and ids that stand for rows of its images and sounds.
    pub ids: Vec<u32>,
    /// Rows of the images and sounds, for [`Session::set_images`] or [`Request::images`].
    pub images: Vec<Arc<ImageRows>>,
    /// The request's options, with the constraint on tool calls and the stop conditions.
    pub options: GenerateOptions,
    /// Reads the answer's pieces. Clone it for each answer to the prompt.
    pub reader: AnswerReader,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatAnswer {
    /// Its text, including [`ChatRequest::prefill`], without reasoning and calls.
    pub text: String,
    /// Reasoning.
    pub thinking: String,
    /// Tool calls, in order.
    pub calls: Vec<ToolCall>,
    /// Why it ended.
    pub stop_reason: StopReason,
}

/// The source of an answer's pieces.
pub enum ChatPieces<'s> {
    /// A session, which computes pieces on demand.
    Session(Box<Generation<'s>>),
    /// An engine.
    Engine(Stream),
}

/// An answer in progress: call [`ChatStream::next`] until it returns `None`. Dropping it cancels the answer.
pub struct ChatStream<'s> {
    pieces: ChatPieces<'s>,
    reader: AnswerReader,
    /// Events read but not yet returned.
    events: VecDeque<Event>,
    is_over: bool,
}

/// A request's messages with its prefill, and the other inputs of the template.
fn template_inputs(request: &ChatRequest) -> (Cow<'_, [Message]>, ChatOptions) {
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
    let options = ChatOptions {
        add_generation_prompt: request.add_generation_prompt,
        continue_final_message: prefill.is_some(),
        tools: list(&request.tools),
        documents: list(&request.documents),
        variables,
        template: request.template.clone(),
        now: request.now.or_else(now),
    };
    (messages, options)
}

impl ChatModel {
    /// Uses the template of the model's files, or the known one for its vocabulary.
    ///
    /// # Errors
    /// [`Error::Template`] if there is none: the model only continues texts. [`Error::Tokenizer`] if it has no
    /// tokenizer.
    pub fn new(model: &Model) -> Result<ChatModel, Error> {
        let chat = ChatModel::of(model, ChatTemplate::for_model(model.chat_source(), model.tokenizer()?))?;
        chat.template()?;
        Ok(chat)
    }

    /// Uses this template. Without one, it only continues texts ([`ChatModel::continue_text`]).
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the model has no tokenizer.
    pub fn of(model: &Model, template: Option<ChatTemplate>) -> Result<ChatModel, Error> {
        let tokenizer = model.encodings()?.shared_tokenizer();
        let sources = match &template {
            // Built-in templates do not support tools.
            Some(template) if template.name() != "file" => String::new(),
            _ => model.chat_source().templates.iter().map(|(_, source)| source.as_str()).collect(),
        };
        let format = Format::detect(&sources, |name| tokenizer.special_id(name).is_some());
        let stop_ids = template.as_ref().map(|template| template.stop_ids(&tokenizer)).unwrap_or_default();
        let images = model.vision().map(VisionEncoder::family);
        Ok(ChatModel {
            tokenizer,
            template,
            format,
            stop_ids,
            images,
            #[cfg(feature = "sound")]
            sounds: model.audio().map(AudioEncoder::placeholder),
        })
    }

    /// Overrides the format detected from the templates and the vocabulary.
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
            expected: "one in the model's file: this model only continues texts".into(),
            found: "missing".into(),
        })
    }

    /// The model's format of reasoning and tool calls.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The prompt of a conversation, with the options and reader for its answer. Takes time proportional to the
    /// conversation's length.
    ///
    /// # Errors
    /// [`Error::Template`] without a template, or if it refuses the messages; [`Error::Option`] for a `tool_choice`
    /// that requires a call where none is possible; [`Error::Constraint`] for tools that cannot be enforced; those
    /// of [`Tokenizer::encode`].
    pub fn prepare(&self, request: &ChatRequest) -> Result<ChatPrompt, Error> {
        let template = self.template()?;
        let prefill = &request.prefill;
        let (messages, template_options) = template_inputs(request);
        let ids = template.encode(&self.tokenizer, &messages, &template_options)?;
        let inputs = [
            Inputs::images(self.images, &request.images),
            #[cfg(feature = "sound")]
            Inputs { field: "sounds", placeholder: self.sounds, embeddings: &request.sounds },
        ];
        let (mut ids, images) = place_rows(&self.tokenizer, ids, &inputs)?;
        // A prefill is read as the answer's beginning, not as the prompt's end.
        let mut end = String::new();
        if prefill.is_none() {
            end = prompt_end(&self.tokenizer, &ids)?;
            if request.options.has_constraint() {
                ids.extend(self.opening(&end)?);
                end = prompt_end(&self.tokenizer, &ids)?;
            }
        }
        let (mut options, reader) = self.continue_text(&end, request)?;
        if !options.ignore_eos {
            options.stop_ids.extend(&self.stop_ids);
            options.stop.extend(template.stop_texts().iter().map(|&text| text.to_owned()));
        }
        let reader = reader.begun_with(prefill.as_deref().unwrap_or_default());
        Ok(ChatPrompt { ids, images, options, reader })
    }

    /// The text of a conversation's prompt, as the template writes it.
    ///
    /// # Errors
    /// [`Error::Template`] without a template, or if it refuses the messages.
    pub fn prompt_text(&self, request: &ChatRequest) -> Result<String, Error> {
        let (messages, options) = template_inputs(request);
        Ok(self.template()?.render_with(&messages, &options, Some(&self.tokenizer))?.text().to_owned())
    }

    /// The options and reader for an answer to a prompt without a template. `prompt`: its text, or the end of it.
    /// Uses only the request's options, tools and thinking, and adds no stop conditions.
    ///
    /// # Errors
    /// [`Error::Option`] and [`Error::Constraint`] as [`ChatModel::prepare`].
    pub fn continue_text(&self, prompt: &str, request: &ChatRequest) -> Result<(GenerateOptions, AnswerReader), Error> {
        let mut options = request.options.clone();
        self.bind(prompt, request, &mut options)?;
        let reader = AnswerReader::for_tokenizer(self.format, &self.tokenizer).with_tools(&request.tools);
        let reader = if options.skip_special_tokens { reader } else { reader.with_special() };
        Ok((options, reader.after_prompt(prompt)))
    }

    /// Starts an answer in a session of the same model. The common prefix stays cached, so a growing conversation
    /// only computes what is new.
    ///
    /// # Errors
    /// Those of [`ChatModel::prepare`] and [`Session::generate_from`].
    pub fn stream<'s>(&self, session: &'s mut Session, request: &ChatRequest) -> Result<ChatStream<'s>, Error> {
        let ChatPrompt { ids, images, options, reader } = self.prepare(request)?;
        session.set_images(&images)?;
        Ok(ChatStream::new(session.generate_from(&ids, &options)?, reader))
    }

    /// Starts an answer in an engine of the same model. For a deadline, priority and so on, submit the result of
    /// [`ChatModel::prepare`] and pass the stream and the reader to [`ChatStream::new`].
    ///
    /// # Errors
    /// Those of [`ChatModel::prepare`] and [`Engine::submit`].
    pub fn submit(&self, engine: &Engine, request: &ChatRequest) -> Result<ChatStream<'static>, Error> {
        let ChatPrompt { ids, images, options, reader } = self.prepare(request)?;
        Ok(ChatStream::new(engine.submit(Request { images, ..Request::new(ids, options) })?, reader))
    }

    /// The complete answer of [`ChatModel::stream`].
    ///
    /// # Errors
    /// Those of [`ChatModel::stream`] and [`ChatStream::next`].
    pub async fn answer(&self, session: &mut Session, request: &ChatRequest) -> Result<ChatAnswer, Error> {
        self.stream(session, request)?.whole().await
    }

    /// Tokens between a prompt and an answer constrained from its first character: the end of open reasoning, or the
    /// header of a final answer.
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

    /// Constrains tool calls, unless the answer is constrained otherwise.
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
                false => "a constraint, a prefill or unenforced calls rule one out",
            };
            let expected = format!("auto or none, since {lacks}");
            return Err(Error::Option { option: "tool_choice", expected, found: "a call".into() });
        }
        // In an unknown format, calls are neither parsed nor enforced.
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
    /// A request with default options and without tools. The model decides whether to think.
    pub fn new(messages: Vec<Message>) -> ChatRequest {
        ChatRequest {
            messages,
            images: Vec::new(),
            #[cfg(feature = "sound")]
            sounds: Vec::new(),
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
            add_generation_prompt: true,
            prefill: None,
            options: GenerateOptions::default(),
        }
    }

    /// Appends an answer to the messages.
    pub fn push(&mut self, answer: ChatAnswer) {
        let n_messages = self.messages.len();
        self.messages.push(answer.into_message(n_messages));
    }
}

impl ChatAnswer {
    /// The message for templates, as number `n_messages`. Reasoning is in `reasoning_content`, which each template
    /// keeps or drops. Calls without an id get one from the number of messages.
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
    /// The next token and the text it completes, or `None` at the end.
    ///
    /// # Errors
    /// As [`Generation::next`].
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        match self {
            ChatPieces::Session(generation) => generation.next().await,
            ChatPieces::Engine(stream) => stream.next().await,
        }
    }

    /// Why the completion ended; `None` while it runs.
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
    /// The answer from a generation or an engine's stream, read by its prompt's reader.
    pub fn new(pieces: impl Into<ChatPieces<'s>>, reader: AnswerReader) -> ChatStream<'s> {
        ChatStream { pieces: pieces.into(), reader, events: VecDeque::new(), is_over: false }
    }

    /// The source of the pieces, to cancel the answer, resume after a lost device, or read statistics.
    pub fn pieces(&mut self) -> &mut ChatPieces<'s> {
        &mut self.pieces
    }

    /// The next event: some reasoning or text, or a complete call. `None` at the end.
    ///
    /// Tasks of a runtime may await it, however deep in futures of their own:
    ///
    /// ```
    /// # #![recursion_limit = "80"] // 128 by default
    /// use tilewright::ChatStream;
    ///
    /// fn spawned(mut stream: ChatStream<'static>) -> impl Future<Output = usize> + Send {
    ///     async move {
    ///         let mut n_events = 0;
    ///         while stream.next().await.is_some() {
    ///             n_events += 1;
    ///         }
    ///         n_events
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Generation::next`]. Held events follow the error.
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

    /// Why the answer ended; `None` while it runs.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.pieces.stop_reason()
    }

    /// Collects the complete answer.
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
                // Only of readers that give calls in parts.
                Event::Open(_) | Event::CallPart(_) => {}
            }
        }
        let stop_reason = self.stop_reason().unwrap_or(StopReason::Cancelled);
        Ok(ChatAnswer { text, thinking, calls, stop_reason })
    }
}
