//! `/v1/responses`.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::ChatRequest;
use tilewright::answer::CallPart;
use tilewright::chat::Message;
use tilewright::generate::GenerateOptions;
use tilewright::grammar::ToolChoice;

use super::answers::{AnswerEvent, AnswerOptions, Answers, CallIds, Delta, End, RequestUsage};
use super::app::{AnswerMetadata, ApiRequest, App, RequestContext};
use super::chat::tokens_json;
use super::conversation::{
    Conversation, EFFORTS, arguments_of, checked_choice, constraint_of, content_of, effort_of, joined, tools_of,
};
use super::errors::ApiError;
use super::fields::Fields;
use super::limits::Limits;
use super::models::Task;
use super::sampling::{self, RequestSampling, max_tokens_rows};
use super::schema::{Endpoint, Field, Kind, Neutral, field, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};
use super::stored::Items;

/// `/v1/responses`.
pub const ENDPOINT: Endpoint = Endpoint::post(
    "/v1/responses",
    "Answers an input, like OpenAI's Responses",
    &[FIELDS, &MAX_TOKENS, sampling::FIELDS, sampling::NUMBERS, sampling::NO_PROBS],
);

/// The token limit.
const MAX_TOKENS: [Field; 1] = max_tokens_rows(["max_output_tokens"], "-1");

const FIELDS: &[Field] = &[
    required("input", Kind::Other(&["string", "array"], "a text or a list of items"), "The input."),
    field("instructions", Kind::Text, "", "The system message."),
    field(
        "previous_response_id",
        Kind::Text,
        "",
        "A stored response, whose input and output come before this input; its instructions do not.",
    ),
    field("store", Kind::Flag, "true", "Keep the response in memory for `previous_response_id`."),
    field("top_logprobs", Kind::Whole(0, sampling::MAX_LOGPROBS), "0", "Number of most likely tokens with each token."),
    field("include", Kind::Other(&["array"], "a list of names"), "[]", "`message.output_text.logprobs` adds them."),
    field("tools", Kind::Other(&["array"], "a list of tools"), "[]", "Functions; other tools are left out."),
    field("tool_choice", Kind::Other(&["string", "object"], CHOICES), "\"auto\"", "Whether and what the answer calls."),
    field("parallel_tool_calls", Kind::Flag, "true", "Whether the answer may have several calls."),
    field("reasoning", Kind::Object(&[REASONING]), "", "How much the model thinks."),
    field("text", Kind::Object(&[TEXT]), "", "The format of the answer."),
    neutral("background", &[Neutral::False], "Responses are answered at once."),
    neutral("context_management", &[Neutral::Empty], "The conversation is not changed."),
    neutral("max_tool_calls", &[Neutral::AnyNumber], "There are no built-in tools."),
    neutral("truncation", &[Neutral::Text("disabled"), Neutral::Text("auto")], "An input that is too long is refused."),
];

/// Fields of `reasoning`.
const REASONING: &[Field] = &[
    field("effort", Kind::OneOf(&EFFORTS), "the template's", "`none` disables thinking; others are for the template."),
    neutral("summary", &[Neutral::AnyText], "Thoughts are not summarised."),
    neutral("generate_summary", &[Neutral::AnyText], "Thoughts are not summarised."),
];

/// Fields of `text`.
const TEXT: &[Field] = &[
    field(
        "format",
        Kind::Other(&["object"], "an object with the type text, json_object or json_schema"),
        r#"{"type": "text"}"#,
        "JSON, by a schema or any.",
    ),
    neutral("verbosity", &[Neutral::Text("medium")], "The model decides."),
];

const CHOICES: &str = r#""auto", "none", "required" or { type: "function", name }"#;

/// Supported values of `include`. Clients that store no answers ask for the second one, which has no effect here.
const INCLUDED: [&str; 2] = ["message.output_text.logprobs", "reasoning.encrypted_content"];

/// Answers an input.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(ENDPOINT.fields)?;
    let model = app.models.name_for(fields.text("model")?, Task::Generate).await?;
    let sampling = RequestSampling::read(fields, &app.limits, &MAX_TOKENS, sampling::NUMBERS)?;
    let context = context_of(&app, fields, &asked.since)?;
    let (conversation, notices) = conversation_of(fields, &context, &sampling, &app.limits)?;
    let ids = CallIds::new(conversation.request.messages.len());
    let has_logprobs = conversation.request.options.logprobs.is_some();
    let head = AnswerMetadata::new("resp_", &model);
    let stores = fields.checked_flag("store").unwrap_or(true);
    let storage =
        stores.then(|| Storage { app: app.clone(), key: asked.since.key.clone(), input: items_of(fields, &context) });
    let echoed = echoed(fields, stores);
    let answers = app.converse(&model, conversation, &asked.since.with(sampling.run)).await?;
    let formatter = ResponseFormatter { head, echoed, ids, has_logprobs, items: Vec::new(), storage };
    let response = match sampling.streams {
        true => {
            let work = move |parts| ResponseStreamer { formatter, parts, n_sent: 0, open: None }.run(answers);
            streamed(Style::Named, app.limits.keep_alive, work).await
        }
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    };
    Ok(app.noticed(ENDPOINT.path, response?, &notices))
}

/// The conversation up to the previous response; empty without one.
///
/// # Errors
/// 404 `previous_response_not_found`.
fn context_of(app: &App, fields: Fields<'_>, since: &RequestContext) -> Result<Items, ApiError> {
    let Some(id) = fields.text("previous_response_id")?.filter(|id| !id.is_empty()) else {
        return Ok(Items::default());
    };
    app.responses.get(&since.key, id).ok_or_else(|| {
        let name = "previous_response_id";
        let expected = "a response that this server has stored and still keeps; otherwise send the whole conversation";
        let (status, code) = (StatusCode::NOT_FOUND, "previous_response_not_found");
        ApiError { status, code, ..ApiError::invalid(name, fields.get(name), expected) }
    })
}

/// The conversation up to this request's input, without instructions.
fn items_of(fields: Fields<'_>, context: &Items) -> Items {
    let mut items = context.clone();
    match fields.get("input") {
        Some(Json::Array(input)) => items.extend(input.iter().cloned().map(Arc::new)),
        Some(text) => items.push(Arc::new(json!({"role": "user", "content": text}))),
        None => {}
    }
    items
}

/// Request fields that the response repeats.
fn echoed(fields: Fields<'_>, stores: bool) -> Json {
    let or = |field: &str, usual: Json| fields.get(field).cloned().unwrap_or(usual);
    json!({
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": or("metadata", json!({})),
        "parallel_tool_calls": or("parallel_tool_calls", true.into()),
        "previous_response_id": fields.get("previous_response_id"),
        "reasoning": or("reasoning", json!({"effort": null, "summary": null})),
        "store": stores,
        "temperature": or("temperature", 1.0.into()),
        "text": or("text", json!({"format": {"type": "text"}})),
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": functions_of(fields),
        // From the decimal digits: an f32 widened to f64 would be 0.949999988.
        "top_p": or("top_p", GenerateOptions::default().top_p.to_string().parse().unwrap_or(Json::Null)),
        "truncation": or("truncation", "disabled".into()),
    })
}

/// The request's function tools, which are the supported ones.
fn functions_of(fields: Fields<'_>) -> Json {
    let tools = fields.get("tools").and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    tools.iter().filter(|tool| tool["type"] == "function").cloned().collect()
}

fn conversation_of(
    fields: Fields<'_>,
    context: &Items,
    sampling: &RequestSampling,
    limits: &Limits,
) -> Result<(Conversation, Vec<String>), ApiError> {
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(Message::new("system", instructions));
    }
    for (at, item) in context.iter().enumerate() {
        add(&mut messages, item, &format!("previous_response_id[{at}]"))?;
    }
    match fields.get("input") {
        Some(Json::String(text)) => messages.push(Message::new("user", text.as_str())),
        Some(Json::Array(items)) if !items.is_empty() => {
            for (at, item) in items.iter().enumerate() {
                add(&mut messages, item, &format!("input[{at}]"))?;
            }
        }
        _ => return Err(fields.wrong("input", "a text or a list of items")),
    }
    let included = fields.get("include").and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    if let Some(other) = included.iter().find(|name| !INCLUDED.iter().any(|known| *name == known)) {
        return Err(ApiError::invalid("include", Some(other), &INCLUDED.join(" or ")));
    }
    let has_logprobs = included.iter().any(|name| *name == INCLUDED[0]);
    let top = fields.checked_whole("top_logprobs");
    let AnswerOptions { options, seeds } = sampling.choices.clone();
    let logprobs = (has_logprobs || top.is_some_and(|n| n > 0)).then_some(top.unwrap_or(0) as u32);
    let (tools, notices) = tools_of(fields, limits, |tool| (Some(tool), ""))?;
    let choice =
        fields.get("tool_choice").map(|choice| match choice.as_str().or_else(|| choice.get("name")?.as_str()) {
            Some("auto") if choice.is_string() => Ok(ToolChoice::Auto),
            Some("none") if choice.is_string() => Ok(ToolChoice::None),
            Some("required") if choice.is_string() => Ok(ToolChoice::Required),
            Some(name) if choice.is_object() => Ok(ToolChoice::Tool(name.to_owned())),
            _ => Err(fields.wrong("tool_choice", CHOICES)),
        });
    let tool_choice = checked_choice(fields, choice.transpose()?.unwrap_or_default(), &tools)?;
    let (thinking, variables) = match fields.get("reasoning").and_then(Json::as_object) {
        Some(reasoning) => effort_of(fields.inside(reasoning, "reasoning."), "effort")?,
        None => (None, Map::new()),
    };
    let format = fields.get("text").and_then(|text| text.get("format"));
    let request = ChatRequest {
        tools,
        tool_choice,
        parallel_calls: fields.checked_flag("parallel_tool_calls").unwrap_or(true),
        thinking,
        variables,
        options: GenerateOptions {
            logprobs,
            constraint: constraint_of(format.filter(|format| !format.is_null()), "text.format", "/schema")?,
            ..options
        },
        ..ChatRequest::new(messages)
    };
    Ok((Conversation { request, seeds }, notices))
}

/// Adds an input item to the messages. Calls and reasoning join the adjacent assistant message.
fn add(messages: &mut Vec<Message>, item: &Json, param: &str) -> Result<(), ApiError> {
    let expected = "a message, function_call, function_call_output or reasoning";
    let object = item.as_object().ok_or_else(|| ApiError::invalid(param, Some(item), expected))?;
    let path = format!("{param}.");
    let fields = Fields::within(object, &path);
    let content = |field: &str| match fields.get(field) {
        Some(Json::String(text)) => Ok(Json::from(text.as_str())),
        Some(Json::Array(parts)) => content_of(parts, &fields.name(field), &["input_text", "output_text", "text"]),
        _ => Err(fields.wrong(field, "a text or a list of texts, pictures and sounds")),
    };
    match fields.text("type")?.unwrap_or("message") {
        "message" => {
            let role = fields.some_text("role")?;
            let content = content("content")?;
            let follows = role == "assistant"
                && messages.last().is_some_and(|last| {
                    last.role == role && last.text() == Some("") && !last.fields.contains_key("tool_calls")
                });
            match messages.last_mut().filter(|_| follows) {
                // The text after the reasoning.
                Some(last) => last.content = content,
                None => {
                    let role = if role == "developer" { "system" } else { role };
                    messages.push(Message { content, ..Message::new(role, "") });
                }
            }
        }
        "function_call" => {
            let name = fields.some_text("name")?;
            let id = fields.some_text("call_id")?;
            let arguments = arguments_of(fields.get("arguments"), &fields.name("arguments"))?;
            let call = json!({"type": "function", "id": id, "function": {"name": name, "arguments": arguments}});
            if messages.last().is_none_or(|last| last.role != "assistant") {
                messages.push(Message::new("assistant", ""));
            }
            if let Some(last) = messages.last_mut() {
                match last.fields.entry("tool_calls").or_insert_with(|| json!([])) {
                    Json::Array(calls) => calls.push(call),
                    other => *other = json!([call]),
                }
            }
        }
        "function_call_output" => {
            let mut message = Message { content: content("output")?, ..Message::new("tool", "") };
            message.fields.insert("tool_call_id".into(), fields.some_text("call_id")?.into());
            messages.push(message);
        }
        "reasoning" => {
            let parts = fields.list("content", "a list of texts")?.unwrap_or_default();
            let mut message = Message::new("assistant", "");
            message.fields.insert(
                "reasoning_content".into(),
                joined(parts, &fields.name("content"), &["reasoning_text"])?.into(),
            );
            messages.push(message);
        }
        _ => return Err(fields.wrong("type", expected)),
    }
    Ok(())
}

/// Formats the answer.
struct ResponseFormatter {
    head: AnswerMetadata,
    /// Request fields that the response repeats.
    echoed: Json,
    ids: CallIds,
    has_logprobs: bool,
    /// Complete items.
    items: Vec<Json>,
    /// Set if the response is to be stored.
    storage: Option<Storage>,
}

/// Where a response is stored, and the conversation before it.
struct Storage {
    app: Arc<App>,
    key: Option<String>,
    input: Items,
}

impl ResponseFormatter {
    /// The response object in its current state.
    fn object(&self, status: &str, end: Option<End>, usage: Option<RequestUsage>) -> Json {
        let cut = end.filter(End::is_cut).map(|_| json!({"reason": "max_output_tokens"}));
        let mut body = json!({
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": null,
            "incomplete_details": cut,
            "model": self.head.model,
            "output": self.items,
            "usage": usage.map(|RequestUsage { tokens: usage, reasoning_tokens }| json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            })),
        });
        if let (Some(body), Some(echoed)) = (body.as_object_mut(), self.echoed.as_object()) {
            body.extend(echoed.clone());
        }
        body
    }

    /// Stores the conversation with all complete items.
    fn store(&mut self) {
        if let Some(Storage { app, key, mut input }) = self.storage.take() {
            // A call that was cut off has no result, which would be required.
            let is_cut = |item: &&Json| item["type"] == "function_call" && item["status"] == "incomplete";
            input.extend(self.items.iter().filter(|item| !is_cut(item)).cloned().map(Arc::new));
            app.responses.put(key, self.head.id.clone(), input);
        }
    }

    fn id(&self, kind: &str) -> String {
        format!("{kind}_{}_{}", self.head.id.trim_start_matches("resp_"), self.items.len())
    }

    fn reasoning(&self, text: &str) -> Json {
        let content = if text.is_empty() { json!([]) } else { json!([{"type": "reasoning_text", "text": text}]) };
        json!({"id": self.id("rs"), "type": "reasoning", "summary": [], "content": content})
    }

    fn text_part(&self, delta: &Delta) -> Json {
        let logprobs = if self.has_logprobs { tokens_json(&delta.tokens) } else { Vec::new() };
        json!({"type": "output_text", "text": delta.text, "annotations": [], "logprobs": logprobs})
    }

    fn message(&self, status: &str, content: Json) -> Json {
        json!({"id": self.id("msg"), "type": "message", "role": "assistant", "status": status, "content": content})
    }

    fn call(&mut self, call: &CallPart) -> Json {
        json!({
            "id": self.id("fc"),
            "type": "function_call",
            "status": if call.is_last { "completed" } else { "incomplete" },
            "call_id": self.ids.of(call),
            "name": call.name,
            "arguments": call.arguments,
        })
    }

    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let (delta, end) = answers.collect(most).await?.pop().unzip();
        let delta = delta.unwrap_or_default();
        let status = if end.is_some_and(|end: End| end.is_cut()) { "incomplete" } else { "completed" };
        if !delta.thinking.is_empty() {
            self.items.push(self.reasoning(&delta.thinking));
        }
        if !delta.text.is_empty() || delta.calls.is_empty() {
            self.items.push(self.message(status, json!([self.text_part(&delta)])));
        }
        for call in &delta.calls {
            let item = self.call(call);
            self.items.push(item);
        }
        self.store();
        Ok(Body(self.object(status, end, Some(answers.usage()))).into_response())
    }
}

/// The part of an open item sent so far.
enum Open {
    Thought(Delta),
    Text(Delta),
    /// The item.
    Call(Json),
}

/// Sends an answer as events.
struct ResponseStreamer {
    formatter: ResponseFormatter,
    parts: PartSender,
    n_sent: usize,
    open: Option<Open>,
}

impl ResponseStreamer {
    async fn run(mut self, mut answers: Answers) -> Result<PartSender, Disconnected> {
        // Sends nothing before the first token, so that an invalid request gets its own status.
        let mut begun = false;
        let mut end = None;
        while let Some(event) = answers.next().await {
            let mut delta = match self.parts.checked(event).await? {
                AnswerEvent::Delta(_, delta) => delta,
                AnswerEvent::End(_, ended) => {
                    end = Some(ended);
                    Delta::default()
                }
            };
            if !std::mem::replace(&mut begun, true) {
                let object = self.formatter.object("in_progress", None, None);
                self.send("response.created", json!({"response": object})).await?;
                self.send("response.in_progress", json!({"response": object})).await?;
            }
            if let Some(part) = delta.take_continued() {
                self.call(&part).await?;
            }
            if !delta.thinking.is_empty() {
                self.add(true, Delta { thinking: delta.thinking, ..Delta::default() }).await?;
            }
            if !delta.text.is_empty() || (!delta.tokens.is_empty() && matches!(self.open, Some(Open::Text(_)))) {
                self.add(false, Delta { text: delta.text, tokens: delta.tokens, ..Delta::default() }).await?;
            }
            for part in &delta.calls {
                self.call(part).await?;
            }
        }
        let status = if end.is_some_and(|end| end.is_cut()) { "incomplete" } else { "completed" };
        if self.open.is_none() && self.formatter.items.is_empty() {
            self.add(false, Delta::default()).await?;
        }
        self.close(status).await?;
        self.formatter.store();
        let object = self.formatter.object(status, end, Some(answers.usage()));
        self.send(&format!("response.{status}"), json!({"response": object})).await?;
        Ok(self.parts)
    }

    async fn send(&mut self, kind: &str, fields: Json) -> Result<(), Disconnected> {
        let mut event = json!({"type": kind, "sequence_number": self.n_sent});
        if let (Some(event), Json::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        self.n_sent += 1;
        self.parts.send(event).await
    }

    /// Adds to the open reasoning or text item, or closes it and starts one of the other kind.
    async fn add(&mut self, is_thought: bool, delta: Delta) -> Result<(), Disconnected> {
        let is_open = match &self.open {
            Some(Open::Thought(_)) => is_thought,
            Some(Open::Text(_)) => !is_thought,
            _ => false,
        };
        if !is_open {
            self.close("completed").await?;
            let at = self.formatter.items.len();
            let (item, part) = match is_thought {
                true => (self.formatter.reasoning(""), json!({"type": "reasoning_text", "text": ""})),
                false => {
                    (self.formatter.message("in_progress", json!([])), self.formatter.text_part(&Delta::default()))
                }
            };
            let id = item["id"].clone();
            self.send("response.output_item.added", json!({"output_index": at, "item": item})).await?;
            let added = json!({"item_id": id, "output_index": at, "content_index": 0, "part": part});
            self.send("response.content_part.added", added).await?;
            let open = if is_thought { Open::Thought } else { Open::Text };
            self.open = Some(open(Delta::default()));
        }
        let at = self.formatter.items.len();
        let mut event = json!({"output_index": at, "content_index": 0});
        let kind = match is_thought {
            true => {
                event["item_id"] = self.formatter.id("rs").into();
                event["delta"] = delta.thinking.as_str().into();
                "response.reasoning_text.delta"
            }
            false => {
                event["item_id"] = self.formatter.id("msg").into();
                event["delta"] = delta.text.as_str().into();
                event["logprobs"] =
                    if self.formatter.has_logprobs { tokens_json(&delta.tokens).into() } else { json!([]) };
                "response.output_text.delta"
            }
        };
        if let Some(Open::Thought(so_far) | Open::Text(so_far)) = &mut self.open {
            so_far.append(delta);
        }
        self.send(kind, event).await
    }

    /// Completes the open item.
    async fn close(&mut self, status: &str) -> Result<(), Disconnected> {
        let at = self.formatter.items.len();
        let (item, part, kind) = match self.open.take() {
            None => return Ok(()),
            Some(Open::Call(item)) => return self.close_call(item).await,
            Some(Open::Thought(so_far)) => {
                let item = self.formatter.reasoning(&so_far.thinking);
                (item, json!({"type": "reasoning_text", "text": so_far.thinking}), "response.reasoning_text.done")
            }
            Some(Open::Text(so_far)) => {
                let part = self.formatter.text_part(&so_far);
                (self.formatter.message(status, json!([part])), part, "response.output_text.done")
            }
        };
        let place = json!({"item_id": item["id"], "output_index": at, "content_index": 0});
        let with = |name: &str, value: &Json| {
            let mut event = place.clone();
            event[name] = value.clone();
            event
        };
        let mut done = with("text", &part["text"]);
        if let Some(logprobs) = part.get("logprobs") {
            done["logprobs"] = logprobs.clone();
        }
        self.send(kind, done).await?;
        self.send("response.content_part.done", with("part", &part)).await?;
        self.send("response.output_item.done", json!({"output_index": at, "item": item})).await?;
        self.formatter.items.push(item);
        Ok(())
    }

    /// Sends a part of a call.
    async fn call(&mut self, part: &CallPart) -> Result<(), Disconnected> {
        if part.is_first {
            self.close("completed").await?;
            let mut item = self.formatter.call(part);
            (item["status"], item["arguments"]) = ("in_progress".into(), "".into());
            let at = self.formatter.items.len();
            self.send("response.output_item.added", json!({"output_index": at, "item": item})).await?;
            item["status"] = "incomplete".into();
            self.open = Some(Open::Call(item));
        }
        let Some(Open::Call(item)) = &mut self.open else { return Ok(()) };
        if let Json::String(so_far) = &mut item["arguments"] {
            *so_far += &part.arguments;
        }
        let (id, at) = (item["id"].clone(), self.formatter.items.len());
        if part.is_last {
            item["status"] = "completed".into();
        }
        if !part.arguments.is_empty() {
            let delta = json!({"item_id": id, "output_index": at, "delta": part.arguments});
            self.send("response.function_call_arguments.delta", delta).await?;
        }
        if part.is_last { self.close("completed").await } else { Ok(()) }
    }

    async fn close_call(&mut self, item: Json) -> Result<(), Disconnected> {
        let at = self.formatter.items.len();
        let done =
            json!({"item_id": item["id"], "output_index": at, "name": item["name"], "arguments": item["arguments"]});
        self.send("response.function_call_arguments.done", done).await?;
        self.send("response.output_item.done", json!({"output_index": at, "item": item})).await?;
        self.formatter.items.push(item);
        Ok(())
    }
}
