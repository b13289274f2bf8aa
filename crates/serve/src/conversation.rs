//! Checks a conversation and its constraint, and makes the prompt.

use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use serde_json::{Map, Value as Json, json};
use tilewright::chat::Message;
use tilewright::grammar::{Constraint, ToolChoice};
use tilewright::{ChatPrompt, ChatRequest};

use super::answers::{AnswerOptions, PreparedPrompt};
use super::errors::ApiError;
use super::fields::Fields;
use super::limits::Limits;
use super::media::{Media, part_of, take_media};
use super::models::Decoder;
use super::sampling::drawn_seed;

/// Reasoning efforts; `none` disables thinking.
pub const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

/// Template variables that say whether the model may think.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

/// A request and its answers' seeds.
pub struct Conversation {
    pub request: ChatRequest,
    pub seeds: Vec<u64>,
}

impl Conversation {
    /// A request for one answer.
    pub fn with_one_answer(request: ChatRequest) -> Conversation {
        Conversation { seeds: vec![request.options.seed.unwrap_or_else(drawn_seed)], request }
    }

    /// Whether answers are constrained by a grammar, which must be parsed.
    pub fn has_grammar(&self) -> bool {
        self.request.options.constraint.is_some() || !self.request.tools.is_empty()
    }

    /// Sets template variables that the request leaves open. Those of thinking also decide whether the model may
    /// think.
    pub fn add_variables(&mut self, usual: &Map<String, Json>) {
        let variables = &mut self.request.variables;
        for (name, value) in usual {
            let is_open = !THINKING.contains(&name.as_str()) || self.request.thinking.is_none();
            if is_open && !variables.contains_key(name) {
                variables.insert(name.clone(), value.clone());
            }
        }
        let thinks = THINKING.iter().find_map(|name| variables.get(*name)?.as_bool());
        self.request.thinking = self.request.thinking.or(thinks);
    }

    /// Approximate size of the prompt's text.
    pub fn prompt_bytes(&self) -> usize {
        // Added by a template around a message.
        const AROUND: usize = 64;
        let text = |part: &Json| part.get("text").and_then(Json::as_str).map_or(AROUND, str::len);
        let bytes = |message: &Message| match &message.content {
            Json::Array(parts) => AROUND + parts.iter().map(text).sum::<usize>(),
            content => AROUND + content.as_str().map_or(0, str::len),
        };
        self.request.messages.iter().map(bytes).sum()
    }

    /// Whether messages have pictures or sounds, whose encoding takes long.
    pub fn has_media(&self) -> bool {
        self.request
            .messages
            .iter()
            .filter_map(|message| message.content.as_array())
            .flatten()
            .any(|part| part.get("data").is_some())
    }

    /// Makes the prompt and its constraint. The time grows with the conversation, its pictures and sounds.
    ///
    /// # Errors
    /// Errors of [`ChatModel::prepare`](tilewright::ChatModel::prepare), of pictures and of sounds.
    pub fn prepare(mut self, decoder: &Decoder) -> Result<PreparedPrompt, ApiError> {
        let Media { images, sounds } = take_media(&mut self.request.messages, decoder)?;
        (self.request.images, self.request.sounds) = (images, sounds);
        let ChatPrompt { ids, images, options, reader } = decoder.chat.prepare(&self.request)?;
        Ok(PreparedPrompt {
            ids,
            images,
            choices: Arc::new(AnswerOptions { options, seeds: self.seeds }),
            // The client has the beginning of the answer.
            reader: Some(reader.without_given().with_call_parts()),
        })
    }
}

/// Converts a message from OpenAI's format to the templates'.
///
/// # Errors
/// Errors naming a field.
pub fn message_of(message: &Json, param: &str) -> Result<Message, ApiError> {
    let object = message.as_object().ok_or_else(|| ApiError::invalid(param, Some(message), "an object with a role"))?;
    let path = format!("{param}.");
    let fields = Fields::within(object, &path);
    let role = fields.some_text("role")?;
    for field in ["function_call", "audio"] {
        if fields.get(field).is_some() {
            return Err(ApiError::unsupported(fields.name(field), format!("{} is not supported", fields.name(field))));
        }
    }
    let calls = match fields.list("tool_calls", "a list of calls")? {
        Some(calls) => {
            let converted = |(at, call): (usize, &Json)| call_of(call, &format!("{param}.tool_calls[{at}]"));
            Some(calls.iter().enumerate().map(converted).collect::<Result<Vec<Json>, ApiError>>()?)
        }
        None => None,
    };
    let content = match fields.get("content") {
        Some(Json::String(text)) => text.as_str().into(),
        None if calls.is_some() || fields.get("reasoning_content").is_some() => "".into(),
        Some(Json::Array(parts)) => content_of(parts, &fields.name("content"), &["text"])?,
        _ => return Err(fields.wrong("content", "a text or a list of texts, pictures and sounds")),
    };
    let mut message = Message { content, ..Message::new(if role == "developer" { "system" } else { role }, "") };
    if let Some(calls) = calls.filter(|calls| !calls.is_empty()) {
        message.fields.insert("tool_calls".into(), calls.into());
    }
    for field in ["tool_call_id", "name", "reasoning_content"] {
        if let Some(text) = fields.text(field)? {
            message.fields.insert(field.into(), text.into());
        }
    }
    Ok(message)
}

/// Takes the beginning of the answer out of the messages: the last one, if it is a text of the assistant.
pub fn prefill_of(messages: &mut Vec<Message>) -> Option<String> {
    let begins = |last: &mut Message| {
        last.role == "assistant" && last.fields.is_empty() && last.text().is_some_and(|text| !text.is_empty())
    };
    messages.pop_if(begins)?.text().map(str::to_owned)
}

/// The content of parts, of which those of these types are texts: a text, or a list where there are pictures or sounds.
pub fn content_of(parts: &[Json], param: &str, types: &[&str]) -> Result<Json, ApiError> {
    if !parts.iter().any(|part| part_of(part, "").is_some()) {
        return Ok(joined(parts, param, types)?.into());
    }
    let converted = |(at, part): (usize, &Json)| match part_of(part, &format!("{param}[{at}]")) {
        Some(converted) => converted,
        None => {
            let text = joined(std::slice::from_ref(part), &format!("{param}[{at}]"), types)?;
            Ok(json!({"type": "text", "text": text}))
        }
    };
    parts.iter().enumerate().map(converted).collect()
}

/// Adds a part to a message's content, which may be a text.
pub fn add_part(message: &mut Message, part: Json) {
    let mut parts = match std::mem::take(&mut message.content) {
        Json::Array(parts) => parts,
        Json::String(text) if !text.is_empty() => vec![json!({"type": "text", "text": text})],
        _ => Vec::new(),
    };
    parts.push(part);
    message.content = parts.into();
}

/// Joins content parts of these types.
pub fn joined(parts: &[Json], param: &str, types: &[&str]) -> Result<String, ApiError> {
    let mut text = String::new();
    for (at, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Json::as_str).unwrap_or("unknown");
        match part.get("text").and_then(Json::as_str).filter(|_| types.contains(&kind)) {
            Some(part) => text += part,
            None => {
                let kind: String = kind.chars().take(60).collect();
                let param = format!("{param}[{at}]");
                return Err(ApiError::unsupported(
                    &param,
                    format!("{param} has the type {kind}; only text, pictures and sounds are supported"),
                ));
            }
        }
    }
    Ok(text)
}

/// A call of an earlier answer. Templates expect arguments as an object.
fn call_of(call: &Json, param: &str) -> Result<Json, ApiError> {
    let name = call.pointer("/function/name").and_then(Json::as_str);
    let name = name.ok_or_else(|| ApiError::invalid(param, Some(call), "a call of a function"))?;
    let given = call.pointer("/function/arguments");
    let arguments = arguments_of(given, &format!("{param}.function.arguments"))?;
    let id = call.get("id").cloned().unwrap_or_default();
    Ok(json!({"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}))
}

/// A call's arguments: JSON in a string. An empty string means none, as many clients write it.
pub fn arguments_of(given: Option<&Json>, param: &str) -> Result<Json, ApiError> {
    let parsed = given.and_then(Json::as_str).and_then(|text| match text.trim() {
        "" => Some(json!({})),
        text => serde_json::from_str(text).ok(),
    });
    parsed.ok_or_else(|| ApiError::invalid(param, given, "JSON"))
}

/// The request's tools as they were sent.
///
/// # Errors
/// `invalid_value` if they are no list, or too many.
pub fn given_tools<'a>(fields: Fields<'a>, limits: &Limits) -> Result<&'a [Json], ApiError> {
    let given = fields.list("tools", "a list of tools")?.unwrap_or_default();
    match given.len() > limits.tools {
        true => Err(fields.wrong("tools", &format!("a list of at most {} tools", limits.tools))),
        false => Ok(given),
    }
}

/// The request's tools in the templates' format, and notices about ignored tools of unsupported types. `function`
/// returns a tool's function and its path in the tool.
///
/// # Errors
/// Errors naming a field.
pub fn tools_of<'a>(
    fields: Fields<'a>,
    limits: &Limits,
    function: impl Fn(&'a Json) -> (Option<&'a Json>, &'static str),
) -> Result<(Vec<Json>, Vec<String>), ApiError> {
    let (mut tools, mut notices) = (Vec::new(), Vec::new());
    for (at, tool) in given_tools(fields, limits)?.iter().enumerate() {
        let param = format!("tools[{at}]");
        let kind = tool.get("type").and_then(Json::as_str);
        if kind.is_some_and(|kind| kind != "function") || !tool.is_object() {
            notices.push(format!("{param} is not a function; only functions are supported"));
            continue;
        }
        let (function, place) = function(tool);
        tools.push(tool_of(function, &format!("{param}{place}"))?);
    }
    Ok((tools, notices))
}

/// Refuses a choice that these tools cannot meet.
pub fn checked_choice(fields: Fields<'_>, choice: ToolChoice, tools: &[Json]) -> Result<ToolChoice, ApiError> {
    let names: Vec<&str> = tools.iter().filter_map(|tool| tool.pointer("/function/name")?.as_str()).collect();
    match &choice {
        ToolChoice::Required | ToolChoice::Tool(_) if names.is_empty() => {
            Err(fields.wrong("tool_choice", "auto or none, since there are no tools"))
        }
        ToolChoice::Tool(name) if !names.contains(&name.as_str()) => {
            Err(fields.wrong("tool_choice", "the name of one of the tools"))
        }
        _ => Ok(choice),
    }
}

/// The response header that lists ignored or changed parts of the request.
const NOTICE: HeaderName = HeaderName::from_static("x-tilewright-notice");

/// Adds the notices to a response.
pub fn with_notices(response: Response, notices: &[String]) -> Response {
    notices.iter().fold(response, |response, notice| with_notice(response, &format!("{notice}; it was ignored")))
}

/// Adds a notice, which has none of the request's own text, to a response.
pub fn with_notice(mut response: Response, notice: &str) -> Response {
    if let Ok(notice) = HeaderValue::from_str(notice) {
        response.headers_mut().append(NOTICE, notice);
    }
    response
}

/// A tool in the templates' format, from its `function`. Calls match its parameters whether it is `strict` or not.
fn tool_of(function: Option<&Json>, param: &str) -> Result<Json, ApiError> {
    let name = function.and_then(|function| function.get("name"));
    let (Some(function), Some(_)) = (function.and_then(Json::as_object), name.and_then(Json::as_str)) else {
        return Err(ApiError::invalid(format!("{param}.name"), name, "a text"));
    };
    let path = format!("{param}.");
    let fields = Fields::within(function, &path);
    fields.text("description")?;
    fields.object("parameters", "a schema")?;
    let mut converted = Map::new();
    for field in ["name", "description", "parameters"] {
        converted.extend(fields.get(field).map(|value| (field.to_owned(), value.clone())));
    }
    Ok(json!({"type": "function", "function": converted}))
}

/// Whether the model may think, and the variables for its template.
pub fn effort_of(fields: Fields<'_>, field: &str) -> Result<(Option<bool>, Map<String, Json>), ApiError> {
    let mut variables = Map::new();
    Ok(match fields.text(field)? {
        None => (None, variables),
        Some("none") => (Some(false), variables),
        Some(effort) if EFFORTS.contains(&effort) => {
            variables.insert("reasoning_effort".into(), effort.into());
            (None, variables)
        }
        Some(_) => return Err(fields.wrong(field, &EFFORTS.join(", "))),
    })
}

/// The constraint of a response format in OpenAI's shape, named after its field. `schema` is the path to the schema in
/// the type `json_schema`.
pub fn constraint_of(format: Option<&Json>, param: &str, schema: &str) -> Result<Option<Constraint>, ApiError> {
    let Some(format) = format else { return Ok(None) };
    let of_schema = |found: Option<&Json>, path: &str| match found {
        Some(schema) if schema.is_object() => Ok(Constraint::JsonSchema(schema.clone())),
        found => Err(ApiError::invalid(format!("{param}{}", path.replace('/', ".")), found, "a schema")),
    };
    let constraint = match format.get("type").and_then(Json::as_str) {
        Some("text") => return Ok(None),
        Some("json_object") => match format.get("schema").filter(|schema| !schema.is_null()) {
            None => Constraint::JsonObject,
            // As in llama.cpp's server.
            Some(Json::Object(schema)) if schema.is_empty() => Constraint::JsonObject,
            found => of_schema(found, "/schema")?,
        },
        Some("json_schema") => of_schema(format.pointer(schema), schema)?,
        _ => {
            let expected = "an object with the type text, json_object or json_schema";
            return Err(ApiError::invalid(param, Some(format), expected));
        }
    };
    Ok(Some(constraint.named(param)))
}
