//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::ChatRequest;
use tilewright::answer::CallPart;
use tilewright::chat::{Message, date_time};
use tilewright::generate::{GenerateOptions, StopReason};
use tilewright::grammar::{Constraint, ToolChoice};

use super::answers::{AnswerEvent, Answers, CallIds, Delta, End, RequestUsage};
use super::app::{ApiRequest, App, is_long, new_id};
use super::conversation::{Conversation, add_part, checked_choice, constraint_of, given_tools, prefill_of};
use super::errors::{ApiError, NO_THREADS};
use super::fields::Fields;
use super::limits::Limits;
use super::media;
use super::models::{ServedModel, Task};
use super::sampling::{self, MODEL, SEED, max_tokens_of, numbers, row_of, seed_of, stops};
use super::schema::{Endpoint, Field, Kind, Neutral, field, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};

/// `/v1/messages`.
pub const MESSAGES: Endpoint = Endpoint::post(
    "/v1/messages",
    "Answers a conversation, like Anthropic's Messages",
    &[CONVERSATION, &LIMIT, OPTIONS],
);

/// `/v1/messages/count_tokens`.
pub const COUNT_TOKENS: Endpoint = Endpoint::post(
    "/v1/messages/count_tokens",
    "Counts the tokens of a conversation, like Anthropic's",
    &[CONVERSATION, &[field("max_tokens", Kind::Whole(1, i32::MAX as i64), "", "Ignored.")], OPTIONS],
);

/// Fields of both endpoints.
const CONVERSATION: &[Field] = &[
    MODEL,
    required(
        "messages",
        Kind::Other(&["array"], "a list of messages"),
        "Messages of `user`, `assistant` and `system`: a text, or blocks `text`, `tool_use`, `tool_result`, `thinking`, \
         and `document` with a text. The answer continues a last message of `assistant`.",
    ),
    field("system", Kind::Other(&["string", "array"], "a text or a list of texts"), "", "The system prompt."),
    field(
        "tools",
        Kind::Other(&["array"], "a list of tools"),
        "",
        "Functions with an `input_schema`. Tools that Anthropic's servers run are ignored with a notice.",
    ),
    field("tool_choice", Kind::Other(&["object"], TOOL_CHOICE), "{\"type\": \"auto\"}", "Whether and what to call."),
    field(
        "thinking",
        Kind::Object(&[&[
            required("type", Kind::OneOf(&["enabled", "adaptive", "disabled", "between_tools"]), "Whether to think."),
            field("budget_tokens", Kind::Whole(1, i32::MAX as i64), "", "Ignored with a notice."),
            field(
                "display",
                Kind::OneOf(&["summarized", "omitted"]),
                "\"summarized\"",
                "Whether to send the thoughts.",
            ),
        ]]),
        "{\"type\": \"disabled\"}",
        "Whether the model may think.",
    ),
    field(
        "output_config",
        Kind::Object(&[&[
            field("effort", Kind::OneOf(&["low", "medium", "high", "xhigh", "max"]), "", "Reasoning effort."),
            field("format", Kind::Other(&["object"], FORMAT), "", "A JSON schema of the answer."),
        ]]),
        "",
        "Effort and format of the answer.",
    ),
    field("output_format", Kind::Other(&["object"], FORMAT), "", "An older name of `output_config.format`."),
    field("cache_control", Kind::Other(&["object"], "an object"), "", "Ignored: prompts are always cached."),
    field("context_management", Kind::Other(&["object"], "an object"), "", "Ignored with a notice unless it is empty."),
    neutral("mcp_servers", &[Neutral::Empty], "Servers of tools are not called."),
    neutral("speed", &[Neutral::AnyText], "Ignored."),
    neutral("user_profile_id", &[Neutral::AnyText], "Ignored."),
    neutral("workspace_id", &[Neutral::AnyText], "Ignored."),
];

const LIMIT: [Field; 1] = [required("max_tokens", Kind::Whole(1, i32::MAX as i64), "Maximum tokens of the answer.")];

/// The numbers of Anthropic's API.
const NUMBERS: [Field; 3] =
    [row_of(sampling::NUMBERS, "temperature"), row_of(sampling::NUMBERS, "top_k"), row_of(sampling::NUMBERS, "top_p")];

const OPTIONS: &[Field] = &[
    field(
        "stop_sequences",
        Kind::Other(&["array", "string"], "a list of texts"),
        "[]",
        "Texts that end the answer and are not part of it.",
    ),
    field("stream", Kind::Flag, "false", "Send the answer as server-sent events."),
    NUMBERS[0],
    NUMBERS[1],
    NUMBERS[2],
    SEED,
    field("cache_salt", Kind::Text, "", "Separates the prefix cache: only requests with the same text share it."),
    neutral("metadata", &[Neutral::AnyObject], "Ignored."),
    neutral("service_tier", &[Neutral::AnyText], "There is one tier."),
    neutral("inference_geo", &[Neutral::AnyText], "Ignored."),
    neutral("container", &[Neutral::Empty], "There are no containers."),
    neutral("diagnostics", &[Neutral::AnyObject], "Ignored."),
];

const TOOL_CHOICE: &str = r#"an object with the type "auto", "any", "tool" or "none""#;
const FORMAT: &str = r#"an object with the type "json_schema" and a schema"#;

/// The beginning of the line that Claude Code puts before its system prompt. It differs in each request, so it would
/// keep all of them out of the prefix cache, and says nothing to a model.
const BILLING: &str = "x-anthropic-billing-header:";

/// Stands for a tool's result that the model cannot read. Claude Code reads pictures without knowing the model; if they
/// were refused, so would each later request be that repeats the conversation.
const UNREADABLE: &str = "Error: this result is not a text, and the model reads only text.";

/// What a request asks for.
struct MessagesRequest {
    /// Without sampling options.
    request: ChatRequest,
    notices: Vec<String>,
    hides_thinking: bool,
}

/// `/v1/messages`.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    refuse_thread(fields)?;
    fields.check(MESSAGES.fields)?;
    let MessagesRequest { mut request, notices, hides_thinking } = MessagesRequest::read(fields, &app.limits)?;
    request.options = GenerateOptions { constraint: request.options.constraint, ..options_of(fields, &app.limits)? };
    let streams = fields.flag("stream")?.unwrap_or(false);
    let model = app.models.name_for(fields.text("model")?, Task::Generate).await?;
    let formatter = MessageFormatter {
        id: new_id("msg_"),
        ids: CallIds::new(request.messages.len()),
        stops: request.options.stop.clone(),
        begun: request.prefill.clone().unwrap_or_default(),
        hides_thinking,
        model,
    };
    let conversation = Conversation::with_one_answer(request);
    let answers = app.converse(&formatter.model, conversation, &asked.since).await?;
    let response = match streams {
        true => {
            let work = move |parts| MessageStreamer { formatter, parts, n_blocks: 0, open: None }.run(answers);
            streamed(Style::Messages, app.limits.keep_alive, work).await
        }
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    };
    Ok(app.noticed(MESSAGES.path, response?, &notices))
}

/// `/v1/messages/count_tokens`.
pub async fn count_tokens(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(COUNT_TOKENS.fields)?;
    let MessagesRequest { mut request, notices, .. } = MessagesRequest::read(fields, &app.limits)?;
    // Calls and formats change the answer, not the prompt.
    (request.enforce_calls, request.tool_choice) = (false, ToolChoice::Auto);
    let lease = app.models.get_for(fields.text("model")?, Task::Generate).await?;
    let decoder = lease.decoder()?;
    let conversation = Conversation { seeds: Vec::new(), request };
    let is_slow = conversation.has_media() || is_long(conversation.prompt_bytes());
    let prompt = app.prepare_in_turn(is_slow, move || conversation.prepare(&decoder)).await?;
    let response = Body(json!({"input_tokens": prompt.ids.len()})).into_response();
    Ok(app.noticed(COUNT_TOKENS.path, response, &notices))
}

/// A model in Anthropic's list of models.
pub fn model_json(name: &str, entry: &ServedModel, adapter: Option<&str>) -> Json {
    let name = adapter.map_or_else(|| name.to_owned(), |adapter| format!("{name}:{adapter}"));
    let created = date_time(i64::try_from(entry.created).unwrap_or_default());
    json!({"type": "model", "id": name, "display_name": name, "created_at": created})
}

/// Refuses a thread, a conversation that Anthropic's servers store. By the error's code, its clients send all messages
/// instead.
fn refuse_thread(fields: Fields<'_>) -> Result<(), ApiError> {
    if fields.get("thread").is_none() {
        return Ok(());
    }
    let message = "thread is not supported: this server stores no conversations; leave it out and send all messages";
    Err(ApiError { code: NO_THREADS, ..ApiError::unsupported("thread", message) })
}

fn options_of(fields: Fields<'_>, limits: &Limits) -> Result<GenerateOptions, ApiError> {
    let options = GenerateOptions {
        max_tokens: max_tokens_of(fields, limits, &LIMIT)?,
        seed: seed_of(fields)?,
        stop: stops(fields, "stop_sequences", limits)?,
        ..numbers(fields, &NUMBERS)
    };
    options.check()?;
    Ok(options)
}

impl MessagesRequest {
    fn read(fields: Fields<'_>, limits: &Limits) -> Result<MessagesRequest, ApiError> {
        let mut messages = Vec::new();
        if let Some(system) = fields.get("system") {
            let blocks = blocks_of(system, "system")?;
            let text = |(at, block): (usize, &Json)| text_of(block, &format!("system[{at}]"));
            let texts = blocks.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
            let texts = texts.into_iter().map(|text| without_billing(&text).to_owned());
            let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
            if !texts.is_empty() {
                messages.push(Message::new("system", texts.join("\n")));
            }
        }
        let given = fields.list("messages", "a list of messages")?.unwrap_or_default();
        if given.is_empty() {
            return Err(fields.wrong("messages", "a list of one message or more"));
        }
        for (at, message) in given.iter().enumerate() {
            add_message(&mut messages, message, &format!("messages[{at}]"))?;
        }
        let (tools, mut notices) = tools_of(fields, limits)?;
        let (tool_choice, parallel_calls) = choice_of(fields)?;
        let tool_choice = checked_choice(fields, tool_choice, &tools)?;
        let (thinking, hides_thinking) = thinking_of(fields, &mut notices)?;
        if fields.get("context_management").and_then(Json::as_object).is_some_and(|asked| !asked.is_empty()) {
            notices.push("context_management is not supported".into());
        }
        let (constraint, variables) = output_of(fields)?;
        let prefill = prefill_of(&mut messages);
        let request = ChatRequest {
            tools,
            tool_choice,
            parallel_calls,
            thinking,
            variables,
            prefill,
            options: GenerateOptions { constraint, ..GenerateOptions::default() },
            ..ChatRequest::new(messages)
        };
        Ok(MessagesRequest { request, notices, hides_thinking })
    }
}

/// A system prompt's text without Claude Code's billing line.
fn without_billing(text: &str) -> &str {
    match text.starts_with(BILLING) {
        true => text.split_once('\n').map_or("", |(_, rest)| rest),
        false => text,
    }
}

/// The blocks of a content, which may be a text.
fn blocks_of<'a>(content: &'a Json, param: &str) -> Result<Cow<'a, [Json]>, ApiError> {
    match content {
        Json::String(text) => Ok(vec![json!({"type": "text", "text": text})].into()),
        Json::Array(blocks) => Ok(blocks.into()),
        other => Err(ApiError::invalid(param, Some(other), "a text or a list of blocks")),
    }
}

fn kind_of(block: &Json) -> String {
    block.get("type").and_then(Json::as_str).unwrap_or("without a type").chars().take(60).collect()
}

/// Whether a block is a picture, or a document in another format than text.
fn is_unreadable(block: &Json) -> bool {
    let source = || block.pointer("/source/type").and_then(Json::as_str);
    match kind_of(block).as_str() {
        "image" => true,
        "document" => matches!(source(), Some("base64" | "url" | "file")),
        _ => false,
    }
}

/// The text of a block that must have one.
fn text_of(block: &Json, param: &str) -> Result<String, ApiError> {
    let text = |field: &'static str| block.pointer(field).and_then(Json::as_str).map(str::to_owned);
    let found = match kind_of(block).as_str() {
        "text" => text("/text"),
        "document" if block.pointer("/source/type").is_some_and(|kind| kind == "text") => text("/source/data"),
        "document" if block.pointer("/source/type").is_some_and(|kind| kind == "content") => text("/source/content"),
        kind => {
            let message = format!("{param} is a block of type {kind}; only text is supported here");
            return Err(ApiError::unsupported(param, message));
        }
    };
    found.ok_or_else(|| ApiError::invalid(param, Some(block), "a block with a text"))
}

/// Adds a message in the templates' format. Results of tools become messages of their own; consecutive messages of
/// one author become one, as in Anthropic's API.
fn add_message(messages: &mut Vec<Message>, message: &Json, param: &str) -> Result<(), ApiError> {
    let object = message.as_object().ok_or_else(|| ApiError::invalid(param, Some(message), "an object with a role"))?;
    let path = format!("{param}.");
    let fields = Fields::within(object, &path);
    let role = fields.some_text("role")?;
    if !["user", "assistant", "system"].contains(&role) {
        return Err(fields.wrong("role", r#""user", "assistant" or "system""#));
    }
    let content = fields.name("content");
    let blocks = fields.get("content").ok_or_else(|| fields.wrong("content", "a text or a list of blocks"))?;
    for (at, block) in blocks_of(blocks, &content)?.iter().enumerate() {
        let param = if blocks.is_string() { content.clone() } else { format!("{content}[{at}]") };
        match (role, kind_of(block).as_str()) {
            ("assistant", "thinking") => {
                let thinking = block.get("thinking").and_then(Json::as_str).unwrap_or_default();
                add_field_text(author(messages, role), "reasoning_content", thinking);
            }
            // Other servers' own; this one never sends it.
            ("assistant", "redacted_thinking") => {}
            ("assistant", "tool_use") => {
                let call = call_of(block, &param)?;
                let calls = author(messages, role).fields.entry("tool_calls").or_insert_with(|| json!([]));
                calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
            }
            ("user", "tool_result") => messages.push(result_of(block, &param)?),
            ("user", "image") => {
                let image = media::part_of(block, &param).transpose()?;
                image.into_iter().for_each(|image| add_part(author(messages, role), image));
            }
            _ => {
                let text = text_of(block, &param)?;
                add_text(author(messages, role), &text);
            }
        }
    }
    Ok(())
}

/// The last message if it is of this author and may be continued, else a new one.
fn author<'m>(messages: &'m mut Vec<Message>, role: &str) -> &'m mut Message {
    if messages.last().is_none_or(|last| last.role != role) {
        messages.push(Message::new(role, ""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// Adds a text to a message on a line of its own.
fn add_text(message: &mut Message, text: &str) {
    if message.content.is_array() {
        return add_part(message, json!({"type": "text", "text": text}));
    }
    let before = message.text().unwrap_or_default();
    message.content = match before.is_empty() || before.ends_with('\n') {
        true => format!("{before}{text}"),
        false => format!("{before}\n{text}"),
    }
    .into();
}

fn add_field_text(message: &mut Message, field: &str, text: &str) {
    let before = message.fields.get(field).and_then(Json::as_str).unwrap_or_default();
    let text = format!("{before}{text}");
    message.fields.insert(field.to_owned(), text.into());
}

/// A call of an earlier answer.
fn call_of(block: &Json, param: &str) -> Result<Json, ApiError> {
    let object = block.as_object().ok_or_else(|| ApiError::invalid(param, Some(block), "a block"))?;
    let path = format!("{param}.");
    let fields = Fields::within(object, &path);
    let (id, name) = (fields.some_text("id")?, fields.some_text("name")?);
    let input = fields.object("input", "an object")?.cloned().unwrap_or_default();
    Ok(json!({"type": "function", "id": id, "function": {"name": name, "arguments": input}}))
}

/// The result of a call.
fn result_of(block: &Json, param: &str) -> Result<Message, ApiError> {
    let object = block.as_object().ok_or_else(|| ApiError::invalid(param, Some(block), "a block"))?;
    let path = format!("{param}.");
    let fields = Fields::within(object, &path);
    let id = fields.some_text("tool_use_id")?;
    let blocks = match fields.get("content") {
        Some(content) => blocks_of(content, &fields.name("content"))?,
        None => Cow::default(),
    };
    let text = |(at, block): (usize, &Json)| match is_unreadable(block) {
        true => Ok(UNREADABLE.to_owned()),
        false => text_of(block, &format!("{}[{at}]", fields.name("content"))),
    };
    let text = blocks.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n");
    // Templates have no place for the flag.
    let fails = fields.flag("is_error")? == Some(true) && !text.to_lowercase().contains("error");
    let mut message = Message::new("tool", if fails { format!("Error: {text}") } else { text });
    message.fields.insert("tool_call_id".into(), id.into());
    Ok(message)
}

/// The tools in the templates' format, and notices about ignored ones.
fn tools_of(fields: Fields<'_>, limits: &Limits) -> Result<(Vec<Json>, Vec<String>), ApiError> {
    let (mut tools, mut notices) = (Vec::new(), Vec::new());
    for (at, tool) in given_tools(fields, limits)?.iter().enumerate() {
        let param = format!("tools[{at}]");
        let object = tool.as_object().ok_or_else(|| ApiError::invalid(&param, Some(tool), "a tool"))?;
        let path = format!("{param}.");
        let fields = Fields::within(object, &path);
        if fields.text("type")?.is_some_and(|kind| kind != "custom") {
            notices.push(format!("{param} is not a tool of the client; this server runs no tools"));
            continue;
        }
        let mut function = Map::new();
        function.insert("name".into(), fields.some_text("name")?.into());
        if let Some(description) = fields.text("description")? {
            function.insert("description".into(), description.into());
        }
        let schema = fields.object("input_schema", "a schema")?;
        let schema = schema.ok_or_else(|| fields.wrong("input_schema", "a schema"))?;
        function.insert("parameters".into(), schema.clone().into());
        tools.push(json!({"type": "function", "function": function}));
    }
    Ok((tools, notices))
}

/// The tool choice, and whether the answer may have several calls.
fn choice_of(fields: Fields<'_>) -> Result<(ToolChoice, bool), ApiError> {
    let Some(object) = fields.object("tool_choice", TOOL_CHOICE)? else { return Ok((ToolChoice::Auto, true)) };
    let asked = Fields::within(object, "tool_choice.");
    let choice = match asked.text("type")? {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => ToolChoice::Tool(asked.some_text("name")?.to_owned()),
        _ => return Err(fields.wrong("tool_choice", TOOL_CHOICE)),
    };
    Ok((choice, !asked.flag("disable_parallel_tool_use")?.unwrap_or(false)))
}

/// Whether the model may think, and whether its thoughts are not sent. Without the field it may not, as in Anthropic's
/// API: clients then expect a text first.
fn thinking_of(fields: Fields<'_>, notices: &mut Vec<String>) -> Result<(Option<bool>, bool), ApiError> {
    let Some(object) = fields.object("thinking", "an object")? else { return Ok((Some(false), false)) };
    let asked = Fields::within(object, "thinking.");
    let thinks = matches!(asked.text("type")?, Some("enabled" | "adaptive"));
    if thinks && asked.get("budget_tokens").is_some() {
        notices.push("thinking.budget_tokens is not supported".into());
    }
    Ok((Some(thinks), asked.text("display")? == Some("omitted")))
}

/// The constraint of the answer, and the variables for its template.
fn output_of(fields: Fields<'_>) -> Result<(Option<Constraint>, Map<String, Json>), ApiError> {
    let mut variables = Map::new();
    let none = Map::new();
    let config = Fields::within(fields.object("output_config", "an object")?.unwrap_or(&none), "output_config.");
    if let Some(effort) = config.text("effort")? {
        // The highest one of other APIs.
        let effort = if effort == "max" { "xhigh" } else { effort };
        variables.insert("reasoning_effort".into(), effort.into());
    }
    let constraint = match config.get("format") {
        Some(format) => constraint_of(Some(format), "output_config.format", "/schema")?,
        None => constraint_of(fields.get("output_format"), "output_format", "/schema")?,
    };
    Ok((constraint, variables))
}

/// Formats the answer.
struct MessageFormatter {
    id: String,
    model: String,
    ids: CallIds,
    /// The request's stop strings; those of the template come after them.
    stops: Vec<String>,
    /// The part of the answer's beginning that the request gave and that is not skipped yet.
    begun: String,
    hides_thinking: bool,
}

impl MessageFormatter {
    /// The message without its content and end.
    fn message(&self, usage: RequestUsage) -> Json {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage_json(usage),
        })
    }

    /// The reason and the stop string of an end.
    fn end(&self, end: Option<End>) -> (&'static str, Option<&str>) {
        let Some(end) = end else { return ("end_turn", None) };
        let stop = end.stop.filter(|_| end.reason == StopReason::StopText).and_then(|at| self.stops.get(at));
        let reason = match end.reason {
            StopReason::ContextFull => "model_context_window_exceeded",
            _ if end.is_cut() => "max_tokens",
            _ if stop.is_some() => "stop_sequence",
            _ if end.has_calls => "tool_use",
            _ => "end_turn",
        };
        (reason, stop.map(String::as_str))
    }

    /// Skips the text that the request gave, with which the answer's text begins.
    fn continued(&mut self, text: String) -> String {
        let n = text.bytes().zip(self.begun.bytes()).take_while(|(new, given)| new == given).count();
        // Both are at a character boundary, or the texts differ within a character.
        let whole = n == text.len() || n == self.begun.len();
        self.begun = if whole { self.begun.split_off(n) } else { String::new() };
        if whole { text.get(n..).unwrap_or_default().to_owned() } else { text }
    }

    fn call(&mut self, call: &CallPart, input: Json) -> Json {
        json!({"type": "tool_use", "id": self.ids.of(call), "name": call.name, "input": input})
    }

    fn thinking(&self, text: String) -> String {
        if self.hides_thinking { String::new() } else { text }
    }

    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let (delta, end) = answers.collect(most).await?.pop().unzip();
        let Delta { thinking, text, calls, .. } = delta.unwrap_or_default();
        let mut body = self.message(answers.usage());
        let mut content = Vec::new();
        if !thinking.is_empty() {
            content.push(json!({"type": "thinking", "thinking": self.thinking(thinking), "signature": ""}));
        }
        let text = self.continued(text);
        if !text.is_empty() || calls.is_empty() {
            content.push(json!({"type": "text", "text": text}));
        }
        content.extend(calls.iter().map(|call| self.call(call, complete_values(&call.arguments))));
        body["content"] = content.into();
        let (reason, stop) = self.end(end);
        (body["stop_reason"], body["stop_sequence"]) = (reason.into(), stop.into());
        Ok(Body(body).into_response())
    }
}

/// The complete values of an object that may be cut off: what Anthropic's clients make of a stream's partial JSON.
fn complete_values(object: &str) -> Json {
    let (mut open, mut complete, mut before) = (Vec::new(), (0, Vec::new()), ' ');
    // In a string: whether it is a key, and whether the next character is escaped.
    let mut string: Option<(bool, bool)> = None;
    for (at, c) in object.char_indices() {
        match (&mut string, c) {
            (Some((_, escaped)), _) if *escaped => *escaped = false,
            (Some((_, escaped)), '\\') => *escaped = true,
            (Some((is_key, _)), '"') => {
                if !*is_key {
                    complete = (at + 1, open.clone());
                }
                string = None;
            }
            (Some(_), _) => {}
            (None, '"') => string = Some((open.last() == Some(&'}') && before != ':', false)),
            (None, '{' | '[') => {
                open.push(if c == '{' { '}' } else { ']' });
                complete = (at + 1, open.clone());
            }
            (None, '}' | ']') => {
                open.pop();
                complete = (at + 1, open.clone());
            }
            // The end of a number or literal.
            (None, ',') => complete = (at, open.clone()),
            (None, _) => {}
        }
        before = c;
    }
    if string.is_none() && before.is_alphanumeric() {
        complete = (object.len(), open);
    }
    let (n, open) = complete;
    let text = object.get(..n).unwrap_or_default().chars().chain(open.into_iter().rev()).collect::<String>();
    serde_json::from_str(&text).unwrap_or_else(|_| json!({}))
}

/// Token counts: cached tokens are not input tokens here.
fn usage_json(RequestUsage { tokens, reasoning_tokens }: RequestUsage) -> Json {
    json!({
        "input_tokens": tokens.prompt_tokens.saturating_sub(tokens.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached_tokens,
        "output_tokens": tokens.completion_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    })
}

/// The type of an open block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

/// Sends an answer as events.
struct MessageStreamer {
    formatter: MessageFormatter,
    parts: PartSender,
    /// Blocks begun so far.
    n_blocks: usize,
    open: Option<Block>,
}

impl MessageStreamer {
    async fn run(mut self, mut answers: Answers) -> Result<PartSender, Disconnected> {
        let mut begun = false;
        let mut end = None;
        while let Some(event) = answers.next().await {
            let delta = match self.parts.checked(event).await? {
                AnswerEvent::Delta(_, delta) => delta,
                AnswerEvent::End(_, ended) => {
                    end = Some(ended);
                    Delta::default()
                }
            };
            // Sends nothing before the first token, so that an invalid request gets its own status.
            if !std::mem::replace(&mut begun, true) {
                let message = self.formatter.message(answers.usage());
                self.parts.send(json!({"type": "message_start", "message": message})).await?;
                self.parts.send(json!({"type": "ping"})).await?;
            }
            self.delta(delta).await?;
        }
        if self.n_blocks == 0 {
            self.open(Block::Text).await?;
        }
        self.close().await?;
        let (reason, stop) = self.formatter.end(end);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        let usage = usage_json(answers.usage());
        self.parts.send(json!({"type": "message_delta", "delta": delta, "usage": usage})).await?;
        self.parts.send(json!({"type": "message_stop"})).await?;
        Ok(self.parts)
    }

    async fn delta(&mut self, mut delta: Delta) -> Result<(), Disconnected> {
        if let Some(part) = delta.take_continued() {
            self.call(&part).await?;
        }
        if !delta.thinking.is_empty() {
            self.open(Block::Thinking).await?;
            let thinking = self.formatter.thinking(delta.thinking);
            if !thinking.is_empty() {
                self.send_delta(json!({"type": "thinking_delta", "thinking": thinking})).await?;
            }
        }
        let text = self.formatter.continued(delta.text);
        if !text.is_empty() {
            self.open(Block::Text).await?;
            self.send_delta(json!({"type": "text_delta", "text": text})).await?;
        }
        for part in &delta.calls {
            self.call(part).await?;
        }
        Ok(())
    }

    /// Sends a part of a call.
    async fn call(&mut self, part: &CallPart) -> Result<(), Disconnected> {
        if part.is_first {
            let block = self.formatter.call(part, json!({}));
            self.begin(Block::Call, block).await?;
        }
        if !part.arguments.is_empty() {
            self.send_delta(json!({"type": "input_json_delta", "partial_json": part.arguments})).await?;
        }
        if part.is_last { self.close().await } else { Ok(()) }
    }

    /// Opens a block of thoughts or text, unless it is open.
    async fn open(&mut self, block: Block) -> Result<(), Disconnected> {
        if self.open == Some(block) {
            return Ok(());
        }
        let empty = match block {
            Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            _ => json!({"type": "text", "text": ""}),
        };
        self.begin(block, empty).await
    }

    async fn close(&mut self) -> Result<(), Disconnected> {
        match self.open.take() {
            Some(_) => self.stop().await,
            None => Ok(()),
        }
    }

    /// Closes the open block and starts this one.
    async fn begin(&mut self, kind: Block, block: Json) -> Result<(), Disconnected> {
        self.close().await?;
        self.open = Some(kind);
        self.n_blocks += 1;
        let index = self.n_blocks - 1;
        self.parts.send(json!({"type": "content_block_start", "index": index, "content_block": block})).await
    }

    async fn send_delta(&self, delta: Json) -> Result<(), Disconnected> {
        let index = self.n_blocks.saturating_sub(1);
        self.parts.send(json!({"type": "content_block_delta", "index": index, "delta": delta})).await
    }

    async fn stop(&self) -> Result<(), Disconnected> {
        self.parts.send(json!({"type": "content_block_stop", "index": self.n_blocks.saturating_sub(1)})).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn billing_line_of_a_system_prompt_is_dropped() {
        assert_eq!(without_billing("x-anthropic-billing-header: cc_version=2; cch=1;"), "");
        assert_eq!(without_billing("x-anthropic-billing-header: cch=1;\nYou are."), "You are.");
        assert_eq!(
            without_billing("You are.\nx-anthropic-billing-header: cch=1;"),
            "You are.\nx-anthropic-billing-header: cch=1;"
        );
    }

    /// As `jiter` and `partial-json-parser`, which the official clients use, without incomplete strings.
    #[test]
    fn complete_values_of_a_cut_object_are_kept() {
        let whole = r#"{"a":1,"b":["x\"}",{"c":true}],"d":{"e":"f"}}"#;
        for (cut, expected) in [
            ("", json!({})),
            (r#"{"a"#, json!({})),
            (r#"{"a":1"#, json!({"a": 1})),
            (r#"{"a":1,"b"#, json!({"a": 1})),
            (r#"{"a":1,"b":"#, json!({"a": 1})),
            (r#"{"a":1,"b":["x\""#, json!({"a": 1, "b": []})),
            (r#"{"a":1,"b":["x\"}""#, json!({"a": 1, "b": ["x\"}"]})),
            (r#"{"a":1,"b":["x\"}",{"c":true"#, json!({"a": 1, "b": ["x\"}", {"c": true}]})),
            (whole, serde_json::from_str(whole).unwrap()),
        ] {
            assert!(whole.starts_with(cut), "{cut}");
            assert_eq!(complete_values(cut), expected, "{cut}");
        }
    }

    #[test]
    fn given_beginning_of_an_answer_is_skipped_however_split() {
        let skipped = |begun: &str, parts: &[&str]| {
            let (ids, model) = (CallIds::new(0), String::new());
            let mut formatter = MessageFormatter {
                id: String::new(),
                model,
                ids,
                stops: Vec::new(),
                begun: begun.into(),
                hides_thinking: false,
            };
            parts.iter().map(|part| formatter.continued((*part).into())).collect::<String>()
        };
        assert_eq!(skipped("Été ", &["É", "té ", "bleu"]), "bleu");
        assert_eq!(skipped("Été ", &["Été bleu"]), "bleu");
        assert_eq!(skipped("", &["Été", " bleu"]), "Été bleu");
        assert_eq!(skipped("É", &["È"]), "È");
    }

    #[test]
    fn messages_and_blocks_become_the_templates_messages() {
        let mut messages = Vec::new();
        let given = json!([
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": true},
                {"type": "text", "text": "d"},
            ]},
            {"role": "user", "content": "e"},
            {"role": "assistant", "content": "So"},
        ]);
        for message in given.as_array().unwrap() {
            add_message(&mut messages, message, "messages[0]").unwrap();
        }
        assert_eq!(prefill_of(&mut messages).as_deref(), Some("So"));
        let call = json!({"type": "function", "id": "t1", "function": {"name": "f", "arguments": {"x": 1}}});
        assert_eq!(
            json!(messages),
            json!([
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
                {"role": "tool", "content": "Error: no", "tool_call_id": "t1"},
                {"role": "user", "content": "d\ne"},
            ])
        );
        assert_eq!(prefill_of(&mut messages), None);
    }
}
