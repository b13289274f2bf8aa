//! `/api/generate` and `/api/chat`.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Json as Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};
use tilewright::ChatRequest;
use tilewright::answer::CallPart;
use tilewright::chat::Message;
use tilewright::generate::StopReason;

use super::super::answers::{AnswerEvent, AnswerOptions, Answers, CallIds, Delta, End, PreparedPrompt};
use super::super::app::{ApiRequest, App, RunOptions, is_long};
use super::super::chat::{TOOLS, tokens_json};
use super::super::completions::raw;
use super::super::conversation::{Conversation, add_part, message_of, prefill_of, tools_of, with_notice, with_notices};
use super::super::errors::ApiError;
use super::super::media;
use super::super::models::Decoder;
use super::super::sampling::ids_of;
use super::super::schema::{Endpoint, Kind, Neutral, field, neutral};
use super::super::sse::{Disconnected, PartSender, Style, streamed};
use super::options::{COMMON, CommonFields};
use super::time;

/// `/api/generate`.
pub const GENERATE: Endpoint = Endpoint::post(
    "/api/generate",
    "Continues or answers a text, as Ollama's",
    &[
        COMMON,
        &[
            field(
                "prompt",
                Kind::Text,
                "\"\"",
                "The text. Without it the request only loads the model, or with `keep_alive: 0` unloads it.",
            ),
            field("system", Kind::Text, "\"\"", "The system message."),
            field("raw", Kind::Flag, "false", "Use no template."),
            field(
                "context",
                Kind::Other(&["array"], "a list of token ids"),
                "[]",
                "The conversation so far, as an earlier answer has it.",
            ),
            neutral("suffix", &[Neutral::Empty], "Nothing can follow the answer."),
            neutral("template", &[Neutral::Empty], "The model's template is used; `raw` needs none."),
            field(
                "images",
                Kind::Other(&["array"], "a list of pictures in base64"),
                "[]",
                "Pictures before the text, for models with a vision encoder.",
            ),
        ],
    ],
);

/// `/api/chat`.
pub const CHAT: Endpoint = Endpoint::post(
    "/api/chat",
    "Answers a conversation, as Ollama's",
    &[
        COMMON,
        &[
            field(
                "messages",
                Kind::Other(&["array"], "a list of messages"),
                "[]",
                "The conversation. Without it the request only loads the model, or with `keep_alive: 0` unloads it.",
            ),
            TOOLS,
        ],
    ],
);

/// Answers `/api/generate`.
pub async fn generate(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(GENERATE.fields)?;
    let common = CommonFields::read(fields, &app)?;
    app.report_notices(GENERATE.path, &common.notices);
    let prompt = fields.text("prompt")?.unwrap_or_default().to_owned();
    let system = fields.text("system")?.unwrap_or_default().to_owned();
    let is_raw = fields.checked_flag("raw").unwrap_or(false);
    let context = ids_of(fields, "context")?;
    if prompt.is_empty() {
        return only_load(&app, &common, OllamaEndpoint::Generate).await;
    }
    let images = images_of(fields.get("images"), "images")?;
    if let Some(field) =
        ["system", "context", "images"].into_iter().find(|field| is_raw && !is_empty(fields.get(field)))
    {
        return Err(ApiError::unsupported(field, format!("{field} and raw exclude each other")));
    }
    let begun = Instant::now();
    let lease = common.lease(&app).await?;
    let load = begun.elapsed();
    let is_plain = is_raw || lease.decoder()?.chat.template().is_err();
    if is_plain && !system.is_empty() {
        let message = format!("system is set, but {} has no chat template", common.model);
        return Err(ApiError::unsupported("system", message));
    }
    let CommonFields { model, streams, request, n_ctx, notices, .. } = common;
    let mut formatter = OllamaFormatter::new(model, OllamaEndpoint::Generate, asked.since.at, load);
    formatter.has_logprobs = request.options.logprobs.is_some();
    // Ids of pictures mean nothing to another request.
    formatter.has_context = !is_raw && images.is_empty();
    let system = (!system.is_empty()).then(|| Message::new("system", system));
    let messages = system.into_iter().chain([with_images(Message::new("user", prompt.as_str()), images)]).collect();
    let mut conversation = Conversation::with_one_answer(ChatRequest { messages, ..request });
    conversation.add_variables(&app.variables);
    let is_slow = conversation.has_grammar() || conversation.has_media() || is_long(conversation.prompt_bytes());
    let limit = ContextLimit { n_ctx, truncates: false };
    let ask = move |decoder: &Decoder| {
        let mut prepared = match is_plain {
            true => {
                let Conversation { request, seeds } = conversation;
                let options = AnswerOptions { options: request.options, seeds };
                let ids = raw(decoder.model(), &prompt)?;
                PreparedPrompt { ids, images: Vec::new(), choices: Arc::new(options), reader: None }
            }
            false => conversation.prepare(decoder)?,
        };
        prepared.ids = after(context, prepared.ids, decoder);
        limit.apply(&mut prepared, decoder)?;
        Ok(vec![prepared])
    };
    let since = asked.since.with(RunOptions { reports_ids: !is_raw, ..asked.since.run });
    let answers = app.answer(lease, &since, is_slow, ask).await?;
    Ok(with_notices(formatter.respond(&app, answers, streams).await?, &notices))
}

fn is_empty(value: Option<&Json>) -> bool {
    match value {
        None => true,
        Some(Json::String(text)) => text.is_empty(),
        Some(Json::Array(list)) => list.is_empty(),
        Some(_) => false,
    }
}

/// A prompt that continues a conversation, whose beginning has the only token of the text's beginning.
fn after(context: Vec<u32>, prompt: Vec<u32>, decoder: &Decoder) -> Vec<u32> {
    let begin = decoder.model().tokenizer().ok().and_then(|tokenizer| tokenizer.bos_id());
    let n_begin = usize::from(!context.is_empty() && begin.is_some() && prompt.first().copied() == begin);
    [context, prompt[n_begin..].to_vec()].concat()
}

/// Answers `/api/chat`.
pub async fn chat(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(CHAT.fields)?;
    let common = CommonFields::read(fields, &app)?;
    app.report_notices(CHAT.path, &common.notices);
    let given = fields.list("messages", "a list of messages")?.unwrap_or_default();
    if given.is_empty() {
        return only_load(&app, &common, OllamaEndpoint::Chat).await;
    }
    let parse = |(at, message): (usize, &Json)| chat_message(message, &format!("messages[{at}]"));
    let mut messages = given.iter().enumerate().map(parse).collect::<Result<Vec<_>, ApiError>>()?;
    let prefill = prefill_of(&mut messages);
    let (tools, ignored) = tools_of(fields, &app.limits, |tool| (tool.get("function"), ".function"))?;
    let begun = Instant::now();
    let lease = common.lease(&app).await?;
    let load = begun.elapsed();
    let CommonFields { model, streams, request, n_ctx, truncates, notices, .. } = common;
    let mut formatter = OllamaFormatter::new(model, OllamaEndpoint::Chat, asked.since.at, load);
    formatter.has_logprobs = request.options.logprobs.is_some();
    formatter.calls = CallIds::new(messages.len());
    let mut conversation = Conversation::with_one_answer(ChatRequest { messages, tools, prefill, ..request });
    conversation.add_variables(&app.variables);
    let is_slow = conversation.has_grammar() || conversation.has_media() || is_long(conversation.prompt_bytes());
    let limit = ContextLimit { n_ctx, truncates };
    let left_out: Arc<OnceLock<usize>> = Arc::default();
    let (of_thread, name) = (left_out.clone(), lease.entry.name().to_owned());
    let ask = move |decoder: &Decoder| {
        let (mut prepared, n_left_out) = limit.fitted(conversation, decoder)?;
        limit.apply(&mut prepared, decoder)?;
        let _ = of_thread.set(n_left_out);
        Ok(vec![prepared])
    };
    let answers = app.answer(lease, &asked.since, is_slow, ask).await?;
    let response = formatter.respond(&app, answers, streams).await?;
    let response = with_notices(app.noticed(CHAT.path, response, &ignored), &notices);
    Ok(match left_out.get() {
        None | Some(0) => response,
        Some(n) => {
            let notice = format!("the {n} oldest messages were left out: the conversation exceeds the context");
            app.report_once(format!("{name}: conversations exceed the context, and lose their oldest messages"));
            with_notice(response, &notice)
        }
    })
}

/// How requests use the context.
#[derive(Clone, Copy)]
struct ContextLimit {
    /// The request's `num_ctx`.
    n_ctx: Option<u32>,
    /// Whether a conversation that does not fit loses its oldest messages.
    truncates: bool,
}

impl ContextLimit {
    /// The request's context, at most the model's.
    fn tokens(self, decoder: &Decoder) -> usize {
        let context = decoder.model().context_length();
        self.n_ctx.map_or(context, |n| n.min(context)) as usize
    }

    /// Limits an answer to the request's context, if that is smaller than the model's.
    ///
    /// # Errors
    /// `context_length_exceeded` for a prompt that fills it.
    fn apply(self, prompt: &mut PreparedPrompt, decoder: &Decoder) -> Result<(), ApiError> {
        let most = self.tokens(decoder);
        if most == decoder.model().context_length() as usize {
            return Ok(());
        }
        let n = prompt.ids.len();
        if n >= most {
            let message = format!("the prompt has {n} tokens, expected fewer than options.num_ctx, which is {most}");
            let param = Some("options.num_ctx".into());
            let refusal = ApiError::refusal(StatusCode::BAD_REQUEST, "context_length_exceeded", message);
            return Err(ApiError { param, ..refusal });
        }
        let options = &mut Arc::make_mut(&mut prompt.choices).options;
        options.max_tokens = options.max_tokens.min(most - n);
        Ok(())
    }

    /// The prompt of a conversation, and the number of messages left out: the fewest of the oldest turns, so that the
    /// rest leaves an eighth of the context for the answer, or all but the last turn. System messages stay.
    fn fitted(self, conversation: Conversation, decoder: &Decoder) -> Result<(PreparedPrompt, usize), ApiError> {
        let starts = turns_of(&conversation.request.messages);
        let Some((&last, mut rest)) = starts.split_last().filter(|_| self.truncates) else {
            return Ok((conversation.prepare(decoder)?, 0));
        };
        let most = self.tokens(decoder);
        let room = conversation.request.options.max_tokens.min(most / 8);
        let fits = |prompt: &PreparedPrompt| prompt.ids.len() + room <= most;
        // The latest turns from this one on.
        let latest = |start: usize| {
            let ChatRequest { messages, .. } = &conversation.request;
            let is_kept = |at: usize, message: &Message| at >= start || message.role == "system";
            let kept = messages.iter().enumerate().filter(|(at, message)| is_kept(*at, message));
            let kept: Vec<Message> = kept.map(|(_, message)| message.clone()).collect();
            let n_left_out = messages.len() - kept.len();
            let request = ChatRequest { messages: kept, ..conversation.request.clone() };
            let prompt = Conversation { request, seeds: conversation.seeds.clone() }.prepare(decoder)?;
            Ok::<_, ApiError>((prompt, n_left_out))
        };
        let whole = latest(0)?;
        if fits(&whole.0) {
            return Ok(whole);
        }
        let mut best = latest(last)?;
        // Fewer turns make a shorter prompt.
        while let Some(&start) = rest.get(rest.len() / 2) {
            let found = latest(start)?;
            rest = match fits(&found.0) {
                true => {
                    best = found;
                    &rest[..rest.len() / 2]
                }
                false => &rest[rest.len() / 2 + 1..],
            };
        }
        Ok(best)
    }
}

/// Where the second and later turns begin: at the user's messages.
fn turns_of(messages: &[Message]) -> Vec<usize> {
    let is_user = |(at, message): (usize, &Message)| (message.role == "user").then_some(at);
    messages.iter().enumerate().filter_map(is_user).skip(1).collect()
}

/// Converts Ollama's message: calls have object arguments; reasoning and tool names have other keys; roles may have
/// capitals.
fn chat_message(message: &Json, param: &str) -> Result<Message, ApiError> {
    let mut converted = message.clone();
    let mut images = Vec::new();
    if let Some(fields) = converted.as_object_mut() {
        images = images_of(fields.remove("images").as_ref(), &format!("{param}.images"))?;
        if let Some(Json::String(role)) = fields.get_mut("role") {
            role.make_ascii_lowercase();
        }
        for (from, to) in [("thinking", "reasoning_content"), ("tool_name", "name")] {
            if let Some(value) = fields.shift_remove(from).filter(|value| !value.is_null()) {
                fields.insert(to.into(), value);
            }
        }
        for call in fields.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|arguments| arguments.is_object()) {
                *arguments = arguments.to_string().into();
            }
        }
    }
    Ok(with_images(message_of(&converted, param)?, images))
}

/// A message with images before its text.
fn with_images(mut message: Message, images: Vec<Json>) -> Message {
    if !images.is_empty() {
        let text = std::mem::replace(&mut message.content, images.into());
        add_part(&mut message, json!({"type": "text", "text": text}));
    }
    message
}

/// Pictures in base64 as parts of a message.
fn images_of(given: Option<&Json>, param: &str) -> Result<Vec<Json>, ApiError> {
    let of = |(at, image): (usize, &Json)| media::of_base64(image.as_str(), &format!("{param}[{at}]"));
    match given.filter(|given| !given.is_null()) {
        None => Ok(Vec::new()),
        Some(Json::Array(images)) => images.iter().enumerate().map(of).collect(),
        found => Err(ApiError::invalid(param, found, "a list of pictures in base64")),
    }
}

/// A request without a text loads the model, or unloads it if `keep_alive` is 0.
async fn only_load(app: &App, common: &CommonFields, shape: OllamaEndpoint) -> Result<Response, ApiError> {
    let begun = Instant::now();
    let reason = match common.keep {
        Some(Some(Duration::ZERO)) => {
            app.models.find(&common.model)?.unload();
            "unload"
        }
        _ => {
            common.lease(app).await?;
            "load"
        }
    };
    let mut formatter = OllamaFormatter::new(common.model.clone(), shape, begun, begun.elapsed());
    let mut body = formatter.part(Delta::default());
    body["done"] = true.into();
    body["done_reason"] = reason.into();
    Ok(with_notices(Body(body).into_response(), &common.notices))
}

/// The endpoint.
#[derive(Clone, Copy)]
enum OllamaEndpoint {
    Generate,
    Chat,
}

/// Formats an answer.
struct OllamaFormatter {
    model: String,
    shape: OllamaEndpoint,
    since: Instant,
    load: Duration,
    has_logprobs: bool,
    calls: CallIds,
    n_calls: usize,
    /// Parts of an unfinished call: here calls are objects, and one that is cut off is left out, as in Ollama.
    unfinished: Delta,
    /// Whether the answer ends with the tokens of prompt and answer.
    has_context: bool,
}

impl OllamaFormatter {
    fn new(model: String, shape: OllamaEndpoint, since: Instant, load: Duration) -> OllamaFormatter {
        let (has_logprobs, calls, n_calls, has_context) = (false, CallIds::new(0), 0, false);
        let unfinished = Delta::default();
        OllamaFormatter { model, shape, since, load, has_logprobs, calls, n_calls, unfinished, has_context }
    }

    async fn respond(self, app: &App, answers: Answers, streams: bool) -> Result<Response, ApiError> {
        match streams {
            true => streamed(Style::Lines, app.limits.keep_alive, move |parts| self.stream(answers, parts)).await,
            false => self.whole(answers, app.limits.answer_bytes).await,
        }
    }

    /// The calls that these parts complete.
    fn whole_calls(&mut self, parts: Vec<CallPart>) -> Vec<CallPart> {
        parts.into_iter().for_each(|part| self.unfinished.add_call(part));
        self.unfinished.calls.extract_if(.., |call| call.is_last).collect()
    }

    fn part(&mut self, delta: Delta) -> Json {
        let Delta { text, thinking, calls, tokens, .. } = delta;
        let mut body = json!({"model": self.model, "created_at": time()});
        let thinking = (!thinking.is_empty()).then_some(thinking);
        match self.shape {
            OllamaEndpoint::Generate => {
                body["response"] = text.into();
                if let Some(thinking) = thinking {
                    body["thinking"] = thinking.into();
                }
            }
            OllamaEndpoint::Chat => {
                body["message"] = json!({"role": "assistant", "content": text});
                if let Some(thinking) = thinking {
                    body["message"]["thinking"] = thinking.into();
                }
                if !calls.is_empty() {
                    body["message"]["tool_calls"] = calls.iter().map(|call| self.call_json(call)).collect();
                }
            }
        }
        if self.has_logprobs && !tokens.is_empty() {
            body["logprobs"] = tokens_json(&tokens).into();
        }
        body["done"] = false.into();
        body
    }

    fn call_json(&mut self, call: &CallPart) -> Json {
        let arguments: Json = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        let function = json!({"index": self.n_calls, "name": call.name, "arguments": arguments});
        self.n_calls += 1;
        json!({"id": self.calls.of(call), "function": function})
    }

    /// The last part. `ids`: the answer's tokens.
    fn end(&mut self, delta: Delta, end: &End, answers: &Answers, ids: &[u32]) -> Json {
        let mut body = self.part(delta);
        let (total, now) = (self.since.elapsed(), Instant::now());
        let first = answers.first().unwrap_or(now);
        let numbers: [(&str, u128); 6] = [
            ("total_duration", total.as_nanos()),
            ("load_duration", self.load.as_nanos()),
            ("prompt_eval_count", end.usage.prompt_tokens as u128),
            ("prompt_eval_duration", (first - self.since).saturating_sub(self.load).as_nanos()),
            ("eval_count", end.usage.completion_tokens as u128),
            ("eval_duration", (now - first).as_nanos()),
        ];
        body["done"] = true.into();
        body["done_reason"] = if end.is_cut() && end.reason != StopReason::Deadline { "length" } else { "stop" }.into();
        if let Some(prompt) = answers.prompt(0).filter(|_| self.has_context) {
            body["context"] = [&prompt.ids, ids].concat().into();
        }
        for (name, number) in numbers {
            body[name] = u64::try_from(number).unwrap_or(u64::MAX).into();
        }
        body
    }

    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let all = answers.collect(most).await?.pop();
        let body = all.map(|(mut delta, end)| {
            delta.calls = self.whole_calls(delta.calls);
            let ids = std::mem::take(&mut delta.ids);
            self.end(delta, &end, &answers, &ids)
        });
        Ok(Body(body.unwrap_or_default()).into_response())
    }

    async fn stream(mut self, mut answers: Answers, parts: PartSender) -> Result<PartSender, Disconnected> {
        let mut ids = Vec::new();
        while let Some(event) = answers.next().await {
            match parts.checked(event).await? {
                AnswerEvent::Delta(_, mut delta) => {
                    ids.append(&mut delta.ids);
                    delta.calls = self.whole_calls(delta.calls);
                    if !delta.is_empty() {
                        parts.send(self.part(delta)).await?;
                    }
                }
                AnswerEvent::End(_, end) => parts.send(self.end(Delta::default(), &end, &answers, &ids)).await?,
            }
        }
        Ok(parts)
    }
}
