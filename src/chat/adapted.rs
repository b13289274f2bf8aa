//! Equivalent forms of a conversation for templates that cannot render it as it is.
//!
//! Templates support different conversations: some know no tools, some allow one call per message, some refuse text
//! next to reasoning, or want arguments as text. Clients send such answers back in the next request, so they are
//! converted here.

use std::iter;

use serde_json::{Value as Json, json};

use super::{ChatOptions, Message, REASONING, date};

/// A message with its text as a list of parts.
pub fn in_parts(message: &Message) -> Message {
    let mut adapted = message.clone();
    if let Json::String(text) = &message.content {
        adapted.content = json!([{"type": "text", "text": text}]);
    }
    adapted
}

/// Whether any message has tool calls or is a tool's result.
pub fn has_calls(messages: &[Message]) -> bool {
    messages.iter().any(|message| message.role == "tool" || !calls_of(message).is_empty())
}

/// Whether the template dropped a tool's results but kept the users' messages.
pub fn is_lost(messages: &[Message], rendered: &str) -> bool {
    let has_all = |role: &str| {
        let mut of_role = messages.iter().filter(|message| message.role == role).filter_map(Message::text);
        of_role.all(|text| rendered.contains(text.trim()))
    };
    has_all("user") && !has_all("tool")
}

/// Whether a system message is not the first message.
pub fn has_late_system(messages: &[Message]) -> bool {
    messages.iter().skip(1).any(|message| message.role == "system")
}

/// Whether the template dropped a system message that is not the first message.
pub fn loses_late_system(messages: &[Message], rendered: &str) -> bool {
    let mut late = messages.iter().skip(1).filter(|message| message.role == "system").filter_map(Message::text);
    !late.all(|text| rendered.contains(text.trim()))
}

/// Rewrites a conversation for a template whose only system message is the first: those directly after it join it,
/// and later ones, which Claude Code sends, become text of the user. They keep their place, so that the prompt before
/// them stays the same and cached.
pub fn with_one_system(messages: &[Message]) -> Vec<Message> {
    let mut adapted: Vec<Message> = Vec::new();
    let mut follows_late = false;
    for message in messages {
        let mut message = message.clone();
        let is_late = message.role == "system" && adapted.iter().any(|before| before.role != "system");
        if is_late {
            message.role = "user".into();
        }
        let joins = is_late || follows_late || message.role == "system";
        // Join neighbours of one author: many templates require users and assistants to alternate.
        if let Some(last) = adapted.last_mut().filter(|last| joins && last.role == message.role)
            && let (Some(before), Some(text)) = (last.text(), message.text())
        {
            last.content = format!("{before}\n\n{text}").into();
            last.fields.extend(message.fields);
            follows_late |= is_late;
            continue;
        }
        follows_late = is_late;
        adapted.push(message);
    }
    adapted
}

fn calls_of(message: &Message) -> &[Json] {
    message.fields.get("tool_calls").and_then(Json::as_array).map_or(&[], Vec::as_slice)
}

/// Rewrites calls for a template without tools: calls become assistant text, and results become user messages in
/// turns.
pub fn without_calls(messages: &[Message]) -> Vec<Message> {
    let mut adapted: Vec<Message> = Vec::new();
    let mut answers_calls = false;
    for message in messages {
        let mut message = message.clone();
        let calls: Vec<Json> = calls_of(&message)
            .iter()
            .map(|call| {
                let function = call.get("function").unwrap_or(call);
                json!({"name": function.get("name"), "arguments": function.get("arguments")})
            })
            .collect();
        message.fields.shift_remove("tool_calls");
        if !calls.is_empty() {
            let calls = match &calls[..] {
                [call] => call.to_string(),
                calls => Json::from(calls).to_string(),
            };
            let text = message.text().filter(|text| !text.is_empty());
            message.content = text.map_or(calls.clone(), |text| format!("{text}\n{calls}")).into();
        }
        let is_result = message.role == "tool";
        if is_result {
            message.role = "user".into();
            // Join consecutive results into one turn.
            if let Some(last) = adapted.last_mut().filter(|_| answers_calls)
                && let (Some(before), Some(text)) = (last.text(), message.text())
            {
                last.content = format!("{before}\n{text}").into();
                continue;
            }
        }
        answers_calls = is_result;
        adapted.push(message);
    }
    adapted
}

/// Splits messages into one call each, followed by its result.
pub fn one_call_each(messages: &[Message]) -> Vec<Message> {
    let mut adapted = Vec::new();
    let mut rest = messages.iter().peekable();
    while let Some(message) = rest.next() {
        let calls = calls_of(message);
        if calls.len() < 2 {
            adapted.push(message.clone());
            continue;
        }
        let mut results: Vec<&Message> = iter::from_fn(|| rest.next_if(|message| message.role == "tool")).collect();
        for (at, call) in calls.iter().enumerate() {
            let mut one = if at == 0 { message.clone() } else { Message::new("assistant", "") };
            one.fields.insert("tool_calls".into(), json!([call]));
            adapted.push(one);
            let id = call.get("id").and_then(Json::as_str);
            // Results without ids follow the order of the calls.
            let is_own = |result: &&Message| match result.fields.get("tool_call_id").and_then(Json::as_str) {
                Some(of) => id == Some(of),
                None => true,
            };
            if let Some(own) = results.iter().position(is_own) {
                adapted.push(results.remove(own).clone());
            }
        }
        adapted.extend(results.into_iter().cloned());
    }
    adapted
}

/// One call per message, and no text between reasoning and call: the text joins the reasoning, as in gpt-oss's
/// template.
pub fn simplified(messages: &[Message]) -> Vec<Message> {
    let mut adapted = one_call_each(messages);
    for message in adapted.iter_mut().filter(|message| !calls_of(message).is_empty()) {
        let thought = REASONING.iter().find_map(|name| message.fields.get(*name)?.as_str());
        let text = message.text().filter(|text| !text.is_empty());
        if let (Some(thought), Some(text)) = (thought.filter(|thought| !thought.is_empty()), text) {
            let joined = format!("{thought}\n\n{text}");
            for name in REASONING {
                message.fields.shift_remove(name);
            }
            message.fields.insert("reasoning_content".into(), joined.into());
            message.content = "".into();
        }
    }
    adapted
}

/// Writes call arguments as JSON texts, for a template that concatenates them.
pub fn write_arguments(messages: &mut [Message]) {
    let calls = |message: &mut Message| -> Vec<Json> {
        match message.fields.get_mut("tool_calls").map(Json::take) {
            Some(Json::Array(calls)) => calls,
            _ => Vec::new(),
        }
    };
    for message in messages.iter_mut().filter(|message| !calls_of(message).is_empty()) {
        let mut calls = calls(message);
        for call in &mut calls {
            if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|arguments| !arguments.is_string())
            {
                *arguments = arguments.to_string().into();
            }
        }
        message.fields.insert("tool_calls".into(), calls.into());
    }
}

/// Options for a template that requires a list of tools, or has other names for it and the time: Firefunction's.
pub fn options(options: &ChatOptions) -> ChatOptions {
    let mut adapted = options.clone();
    let tools = adapted.tools.get_or_insert_default();
    let functions = serde_json::to_string_pretty(tools).unwrap_or_default();
    adapted.variables.entry("functions").or_insert_with(|| functions.into());
    if let Some(date) = adapted.now.and_then(|now| date::format("%Y-%m-%d", now).ok()) {
        adapted.variables.entry("datetime").or_insert_with(|| date.into());
    }
    adapted
}
