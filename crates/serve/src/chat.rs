//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::ChatRequest;
use tilewright::generate::GenerateOptions;
use tilewright::grammar::ToolChoice;

use super::answers::{AnswerEvent, AnswerOptions, Answers, CallIds, Delta, ScoredToken, usage_json};
use super::app::{AnswerMetadata, ApiRequest, App};
use super::conversation::{Conversation, constraint_of, effort_of, message_of, tools_of, with_notices};
use super::errors::ApiError;
use super::fields::Fields;
use super::limits::Limits;
use super::sampling::{self, RequestSampling};
use super::sse::{Disconnected, PartSender, Style, streamed};

const FIELDS: &[&str] = &[
    "messages",
    "max_completion_tokens",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
];

/// Answers a conversation.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.only(&[sampling::FIELDS, &sampling::number_names(), FIELDS])?;
    let model = fields.some_text("model")?.to_owned();
    let sampling = RequestSampling::read(fields, &app.limits, &["max_completion_tokens", "max_tokens"], None)?;
    let (conversation, notices) = conversation_of(fields, &sampling, &app.limits)?;
    let n_messages = conversation.request.messages.len();
    let has_logprobs = conversation.request.options.logprobs.is_some();
    let answers = app.converse(&model, conversation, &asked.since).await?;
    let formatter =
        ChatFormatter { head: AnswerMetadata::new("chatcmpl", &model), has_logprobs, ids: CallIds::new(n_messages) };
    let response = match sampling.streams {
        true => {
            let with_usage = sampling.with_usage;
            streamed(Style::Data, app.limits.keep_alive, move |parts| formatter.stream(answers, parts, with_usage))
                .await
        }
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    };
    Ok(with_notices(response?, &notices))
}

fn conversation_of(
    fields: Fields<'_>,
    sampling: &RequestSampling,
    limits: &Limits,
) -> Result<(Conversation, Vec<String>), ApiError> {
    let messages = fields.list("messages", "a list of messages")?;
    let messages = messages.ok_or_else(|| fields.wrong("messages", "a list of messages"))?;
    if messages.is_empty() {
        return Err(fields.wrong("messages", "a list of one message or more"));
    }
    let parse = |(at, message): (usize, &Json)| message_of(message, &format!("messages[{at}]"));
    let messages = messages.iter().enumerate().map(parse).collect::<Result<Vec<_>, ApiError>>()?;
    let has_logprobs = fields.flag("logprobs")? == Some(true);
    let top = fields.whole("top_logprobs", 0, 20)?;
    if top.is_some_and(|n| n > 0) && !has_logprobs {
        return Err(fields.wrong("top_logprobs", "none unless logprobs is true"));
    }
    let AnswerOptions { options, seeds } = sampling.choices.clone();
    let logprobs = has_logprobs.then_some(top.unwrap_or(0) as u32);
    let (tools, notices) = tools_of(fields, limits, |tool| (tool.get("function"), ".function"))?;
    let choice = fields.get("tool_choice").map(|choice| match choice {
        Json::String(choice) if choice == "auto" => Ok(ToolChoice::Auto),
        Json::String(choice) if choice == "none" => Ok(ToolChoice::None),
        Json::String(choice) if choice == "required" => Ok(ToolChoice::Required),
        other => match other.pointer("/function/name").and_then(Json::as_str) {
            Some(name) => Ok(ToolChoice::Tool(name.to_owned())),
            None => {
                let expected = r#""auto", "none", "required" or { type: "function", function: { name } }"#;
                Err(fields.wrong("tool_choice", expected))
            }
        },
    });
    let (thinking, variables) = effort_of(fields, "reasoning_effort")?;
    let request = ChatRequest {
        tools,
        tool_choice: choice.transpose()?.unwrap_or_default(),
        parallel_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
        thinking,
        variables,
        options: GenerateOptions {
            logprobs,
            constraint: constraint_of(fields.get("response_format"), "response_format", "/json_schema/schema")?,
            ..options
        },
        ..ChatRequest::new(messages)
    };
    Ok((Conversation { request, seeds }, notices))
}

/// Formats answers.
struct ChatFormatter {
    head: AnswerMetadata,
    has_logprobs: bool,
    ids: CallIds,
}

impl ChatFormatter {
    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let mut choices = Vec::new();
        for (index, (delta, end)) in answers.collect(most).await?.into_iter().enumerate() {
            let mut message = json!({"role": "assistant", "content": delta.text, "refusal": null});
            if !delta.calls.is_empty() {
                message["tool_calls"] = delta.calls.iter().map(|call| self.ids.call_json(call)).collect();
            }
            if !delta.thinking.is_empty() {
                message["reasoning_content"] = delta.thinking.into();
            }
            let logprobs = if self.has_logprobs { logprobs_of(&delta.tokens) } else { Json::Null };
            choices
                .push(json!({"index": index, "message": message, "finish_reason": end.finish(), "logprobs": logprobs}));
        }
        let mut body = self.head.object("chat.completion");
        body.insert("choices".into(), choices.into());
        body.insert("usage".into(), usage_json(answers.usage()));
        Ok(Body(Json::Object(body)).into_response())
    }

    fn chunk(&self, choices: Json, with_usage: bool) -> Map<String, Json> {
        let mut body = self.head.object("chat.completion.chunk");
        body.insert("choices".into(), choices);
        if with_usage {
            body.insert("usage".into(), Json::Null);
        }
        body
    }

    async fn stream(
        mut self,
        mut answers: Answers,
        parts: PartSender,
        with_usage: bool,
    ) -> Result<PartSender, Disconnected> {
        // Per answer: `Some` once begun, with its number of calls.
        let mut begun: Vec<Option<usize>> = Vec::new();
        while let Some(event) = answers.next().await {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    parts.fail(error).await?;
                    return Err(Disconnected);
                }
            };
            let (index, delta, finish) = match event {
                AnswerEvent::Delta(index, delta) => (index, delta, None),
                AnswerEvent::End(index, end) => (index, Delta::default(), Some(end.finish())),
            };
            if begun.len() <= index {
                begun.resize(index + 1, None);
            }
            let mut deltas = Vec::new();
            let n_calls = begun[index].get_or_insert_with(|| {
                deltas.push((json!({"role": "assistant", "content": ""}), Json::Null));
                0
            });
            // Tokens are sent with the first delta of their piece.
            let has_tokens = self.has_logprobs && !delta.tokens.is_empty();
            let mut logprobs = if has_tokens { logprobs_of(&delta.tokens) } else { Json::Null };
            if !delta.thinking.is_empty() {
                deltas.push((json!({"reasoning_content": delta.thinking}), logprobs.take()));
            }
            if !delta.text.is_empty() || (!logprobs.is_null() && delta.calls.is_empty()) {
                deltas.push((json!({"content": delta.text}), logprobs.take()));
            }
            if !delta.calls.is_empty() {
                let calls = delta.calls.iter().map(|call| {
                    let mut body = self.ids.call_json(call);
                    body["index"] = (*n_calls).into();
                    *n_calls += 1;
                    body
                });
                deltas.push((json!({"tool_calls": calls.collect::<Vec<_>>()}), logprobs.take()));
            }
            if finish.is_some() {
                deltas.push((json!({}), Json::Null));
            }
            let last = deltas.len().saturating_sub(1);
            for (at, (delta, logprobs)) in deltas.into_iter().enumerate() {
                let finish = finish.filter(|_| at == last);
                let choice = json!({"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs});
                parts.send(Json::Object(self.chunk(json!([choice]), with_usage))).await?;
            }
        }
        if with_usage {
            let mut body = self.chunk(json!([]), false);
            body.insert("usage".into(), usage_json(answers.usage()));
            parts.send(Json::Object(body)).await?;
        }
        Ok(parts)
    }
}

/// Tokens with their log probabilities.
pub fn logprobs_of(tokens: &[ScoredToken]) -> Json {
    json!({"content": tokens_json(tokens), "refusal": null})
}

/// Each token with its most likely alternatives.
pub fn tokens_json(tokens: &[ScoredToken]) -> Vec<Json> {
    let token_json =
        |bytes: &[u8], logprob: f32| json!({"token": ScoredToken::text(bytes), "logprob": logprob, "bytes": bytes});
    let of_token = |token: &ScoredToken| {
        let mut json = token_json(&token.bytes, token.logprob);
        json["top_logprobs"] = token.top.iter().map(|(bytes, logprob)| token_json(bytes, *logprob)).collect();
        json
    };
    tokens.iter().map(of_token).collect()
}
