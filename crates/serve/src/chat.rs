//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::ChatRequest;
use tilewright::chat::Message;
use tilewright::generate::GenerateOptions;
use tilewright::grammar::ToolChoice;

use super::answers::{AnswerEvent, AnswerOptions, Answers, CallIds, Delta, ScoredToken, usage_json};
use super::app::{AnswerMetadata, ApiRequest, App};
use super::constraints::{self, constraint};
use super::conversation::{Conversation, EFFORTS, checked_choice, effort_of, message_of, tools_of};
use super::errors::ApiError;
use super::extras::Extras;
use super::fields::Fields;
use super::limits::Limits;
use super::models::Task;
use super::sampling::{self, RequestSampling, max_tokens_rows};
use super::schema::{Endpoint, Field, Kind, Neutral, field, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};

/// `/v1/chat/completions`.
pub const ENDPOINT: Endpoint = Endpoint::post(
    "/v1/chat/completions",
    "Answers a conversation, like OpenAI's Chat Completions",
    &[
        FIELDS,
        &MAX_TOKENS,
        OF_TOOLS,
        sampling::FIELDS,
        sampling::NUMBERS,
        sampling::REPORTS,
        sampling::NO_PROBS,
        constraints::FIELDS,
    ],
);

const FIELDS: &[Field] = &[
    required(
        "messages",
        Kind::Other(&["array"], "a list of messages"),
        "The conversation. A content is a text, or a list of parts: `text`, `image_url` (data URLs) for models with a \
         vision encoder, `input_audio` (`wav` or `mp3`) for models that take sound.",
    ),
    field("logprobs", Kind::Flag, "false", "Add the log probability of each token."),
    field(
        "top_logprobs",
        Kind::Whole(0, sampling::MAX_LOGPROBS),
        "0",
        "Number of most likely tokens with each token. Requires `logprobs`.",
    ),
    field(
        "reasoning_effort",
        Kind::OneOf(&EFFORTS),
        "the template's",
        "`none` disables thinking; other values are the template's `reasoning_effort`.",
    ),
    TEMPLATE_VARIABLES,
    field("documents", Kind::Other(&["array"], "a list of documents"), "[]", "Documents for the template."),
    ADD_GENERATION_PROMPT,
    field(
        "continue_final_message",
        Kind::Flag,
        "false",
        "Continue the last message, of the assistant, instead of starting an answer.",
    ),
    neutral("best_of", &[Neutral::Number(1.0)], "All generated answers are returned."),
    neutral("echo", &[Neutral::False], "The answer has no text of the conversation."),
    neutral("add_special_tokens", &[Neutral::False], "The template adds special tokens."),
    neutral("chat_template", &[Neutral::Empty], "The model's template is used; see `serve --template`."),
    neutral("mm_processor_kwargs", &[Neutral::Empty], "Only text is supported."),
    neutral("verbosity", &[Neutral::Text("medium")], "The model decides."),
    neutral("store", &[Neutral::False], "Chat completions are not stored."),
    neutral(
        "reasoning_format",
        &[Neutral::Text("auto"), Neutral::Text("deepseek")],
        "Thoughts are `reasoning_content`.",
    ),
    neutral("separate_reasoning", &[Neutral::True], "Thoughts are `reasoning_content`."),
    neutral("include_reasoning", &[Neutral::True], "Thoughts are `reasoning_content`."),
    neutral("stream_reasoning", &[Neutral::True], "Thoughts are streamed."),
];

/// Variables of the chat template.
pub const TEMPLATE_VARIABLES: Field = field(
    "chat_template_kwargs",
    Kind::Other(&["object"], "an object of template variables"),
    "{}",
    "Variables of the chat template, such as `enable_thinking`.",
);

/// Whether the prompt ends with the start of an answer.
pub const ADD_GENERATION_PROMPT: Field =
    field("add_generation_prompt", Kind::Flag, "true", "End the prompt with the start of the assistant's answer.");

/// The row of tools.
pub const TOOLS: Field =
    field("tools", Kind::Other(&["array"], "a list of tools"), "[]", "Functions that the model may call.");

const OF_TOOLS: &[Field] = &[
    TOOLS,
    field("tool_choice", Kind::Other(&["string", "object"], CHOICES), "\"auto\"", "Whether and what the answer calls."),
    field("parallel_tool_calls", Kind::Flag, "true", "Whether the answer may have several calls."),
    neutral("parse_tool_calls", &[Neutral::True], "Calls are parsed."),
    neutral("functions", &[Neutral::Empty], "Use `tools`."),
    neutral("function_call", &[Neutral::Text("none"), Neutral::Text("auto")], "Use `tool_choice`."),
];

const CHOICES: &str = r#""auto", "none", "required" or { type: "function", function: { name } }"#;

/// The token limit.
const MAX_TOKENS: [Field; 3] = max_tokens_rows(["max_completion_tokens", "max_tokens", "n_predict"], "-1");

/// Answers a conversation.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(ENDPOINT.fields)?;
    let model = app.models.name_for(fields.text("model")?, Task::Generate).await?;
    let sampling = RequestSampling::read(fields, &app.limits, &MAX_TOKENS, sampling::NUMBERS)?;
    let (conversation, notices) = conversation_of(fields, &sampling, &app.limits)?;
    let n_messages = conversation.request.messages.len();
    let has_logprobs = conversation.request.options.logprobs.is_some();
    let extras = sampling.extras;
    let answers = app.converse(&model, conversation, &asked.since.with(sampling.run)).await?;
    let head = AnswerMetadata::new("chatcmpl-", &model);
    let formatter = ChatFormatter { head, has_logprobs, extras, ids: CallIds::new(n_messages) };
    let response = match sampling.streams {
        true => streamed(Style::Data, app.limits.keep_alive, move |parts| formatter.stream(answers, parts)).await,
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    };
    Ok(app.noticed(ENDPOINT.path, response?, &notices))
}

fn conversation_of(
    fields: Fields<'_>,
    sampling: &RequestSampling,
    limits: &Limits,
) -> Result<(Conversation, Vec<String>), ApiError> {
    let messages = fields.get("messages").and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    if messages.is_empty() {
        return Err(fields.wrong("messages", "a list of one message or more"));
    }
    let parse = |(at, message): (usize, &Json)| message_of(message, &format!("messages[{at}]"));
    let mut messages = messages.iter().enumerate().map(parse).collect::<Result<Vec<_>, ApiError>>()?;
    let prefill = prefill_of(fields, &mut messages)?;
    let has_logprobs = fields.checked_flag("logprobs") == Some(true);
    let top = fields.checked_whole("top_logprobs");
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
            None => Err(fields.wrong("tool_choice", CHOICES)),
        },
    });
    let tool_choice = checked_choice(fields, choice.transpose()?.unwrap_or_default(), &tools)?;
    let (thinking, mut variables) = effort_of(fields, "reasoning_effort")?;
    let given = fields.get("chat_template_kwargs").and_then(Json::as_object);
    variables.extend(given.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    let documents = fields.get("documents").and_then(Json::as_array);
    let request = ChatRequest {
        tools,
        prefill,
        documents: documents.cloned().unwrap_or_default(),
        add_generation_prompt: fields.checked_flag("add_generation_prompt").unwrap_or(true),
        tool_choice,
        parallel_calls: fields.checked_flag("parallel_tool_calls").unwrap_or(true),
        thinking,
        variables,
        options: GenerateOptions { logprobs, constraint: constraint(fields)?, ..options },
        ..ChatRequest::new(messages)
    };
    Ok((Conversation { request, seeds }, notices))
}

/// Takes the last message as the beginning of the answer, if it is to be continued.
fn prefill_of(fields: Fields<'_>, messages: &mut Vec<Message>) -> Result<Option<String>, ApiError> {
    if fields.checked_flag("continue_final_message") != Some(true) {
        return Ok(None);
    }
    if fields.checked_flag("add_generation_prompt") == Some(true) {
        let expected = "false with continue_final_message";
        return Err(fields.wrong("add_generation_prompt", expected));
    }
    match messages.pop_if(|last| last.role == "assistant" && !last.fields.contains_key("tool_calls")) {
        Some(last) => Ok(Some(last.text().unwrap_or_default().to_owned())),
        None => Err(fields.wrong("continue_final_message", "false unless the last message is the assistant's text")),
    }
}

/// Formats answers.
struct ChatFormatter {
    head: AnswerMetadata,
    has_logprobs: bool,
    extras: Extras,
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
            let mut choice =
                json!({"index": index, "message": message, "finish_reason": end.finish(), "logprobs": logprobs});
            if self.extras.token_ids {
                choice["token_ids"] = delta.ids.into();
            }
            choices.push(choice);
        }
        let mut body = self.head.object("chat.completion");
        body.insert("choices".into(), choices.into());
        body.insert("usage".into(), usage_json(answers.usage()));
        if let Some(prompt) = answers.prompt(0) {
            body.extend(self.extras.of_prompt(prompt, answers.tokenizer()?)?);
        }
        self.extras.add_timings(&mut body, &answers);
        Ok(Body(Json::Object(body)).into_response())
    }

    fn chunk(&self, choices: Json, answers: &Answers) -> Map<String, Json> {
        let mut body = self.head.object("chat.completion.chunk");
        body.insert("choices".into(), choices);
        self.extras.add(&mut body, answers);
        body
    }

    async fn stream(mut self, mut answers: Answers, parts: PartSender) -> Result<PartSender, Disconnected> {
        let mut is_first = true;
        // Per answer: `Some` once begun, with its number of calls.
        let mut begun: Vec<Option<usize>> = Vec::new();
        while let Some(event) = answers.next().await {
            let (index, delta, finish) = match parts.checked(event).await? {
                AnswerEvent::Delta(index, delta) => (index, delta, None),
                AnswerEvent::End(index, end) => (index, Delta::default(), Some(end.finish())),
            };
            let mut ids = Some(delta.ids).filter(|ids| self.extras.token_ids && !ids.is_empty());
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
                    *n_calls += usize::from(call.is_first);
                    body["index"] = n_calls.saturating_sub(1).into();
                    body
                });
                deltas.push((json!({"tool_calls": calls.collect::<Vec<_>>()}), logprobs.take()));
            }
            if finish.is_some() || (deltas.is_empty() && ids.is_some()) {
                deltas.push((json!({}), Json::Null));
            }
            let last = deltas.len().saturating_sub(1);
            for (at, (delta, logprobs)) in deltas.into_iter().enumerate() {
                let finish = finish.filter(|_| at == last);
                let mut choice = json!({"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs});
                if at == last
                    && let Some(ids) = ids.take()
                {
                    choice["token_ids"] = ids.into();
                }
                let mut body = self.chunk(json!([choice]), &answers);
                if std::mem::take(&mut is_first) && self.extras.token_ids {
                    body.extend(answers.prompt(0).map(|prompt| ("prompt_token_ids".into(), json!(prompt.ids))));
                }
                parts.send(Json::Object(body)).await?;
            }
        }
        if self.extras.usage {
            let mut body = self.chunk(json!([]), &answers);
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
        json["top_logprobs"] = token.top.iter().map(|(_, bytes, logprob)| token_json(bytes, *logprob)).collect();
        json
    };
    tokens.iter().map(of_token).collect()
}
