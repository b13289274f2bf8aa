//! Ollama's interface: `/api/generate`, `/api/chat`, `/api/embed`, and queries about models.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};
use tilewright::ChatRequest;
use tilewright::chat::{Message, date_time};
use tilewright::generate::{GenerateOptions, StopReason};
use tilewright::grammar::Constraint;

use super::answers::{AnswerEvent, AnswerOptions, Answers, Delta, End, PreparedPrompt};
use super::app::{ApiRequest, App, is_long, now};
use super::completions::raw;
use super::conversation::{Conversation, message_of, tools_of, with_notices};
use super::embeddings::vectors_of;
use super::errors::ApiError;
use super::fields::Fields;
use super::models::{Lease, Loaded, ServedModel};
use super::sampling::{OwnBounds, number_rows, numbers, random, seed_of, stops};
use super::schema::{Endpoint, Field, Kind, Neutral, field, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};

/// The Ollama version with these endpoints. Editors refuse servers below 0.6.4, other clients below 0.5.
const OLLAMA: &str = "0.12.6";

/// Seconds until a permanently loaded model expires: a hundred years.
const FOR_EVER: i64 = 100 * 365 * 86_400;

const MODEL: Field = required("model", Kind::Text, "Name of the model.");
const KEEP_ALIVE: Field = field(
    "keep_alive",
    Kind::Other(&["string", "number"], "a number of seconds or a time such as 5m"),
    "the server's",
    "How long to keep the model loaded; negative: for ever.",
);

/// Fields of both `/api/generate` and `/api/chat`.
const COMMON: &[Field] = &[
    MODEL,
    field("stream", Kind::Flag, "true", "Send the answer in parts, one JSON object per line."),
    field("format", Kind::Other(&["string", "object"], "\"json\" or a schema"), "", "JSON, or JSON by a schema."),
    field("options", Kind::Object(OPTIONS), "{}", "Sampling options."),
    KEEP_ALIVE,
    field(
        "think",
        Kind::Other(&["boolean", "string"], "true, false, low, medium or high"),
        "the template's",
        "Whether, and how much, the model may think.",
    ),
    neutral("logprobs", &[Neutral::False], "Log probabilities are not reported."),
    neutral("top_logprobs", &[Neutral::Number(0.0)], "Log probabilities are not reported."),
    neutral("truncate", &[Neutral::AnyFlag], "A prompt that is too long is refused."),
    neutral("shift", &[Neutral::AnyFlag], "A full context ends the answer."),
];

/// `/api/generate`.
pub const GENERATE: Endpoint = Endpoint::post(
    "/api/generate",
    "Continues or answers a text, as Ollama's",
    &[
        COMMON,
        &[
            field("prompt", Kind::Text, "\"\"", "The text; without one, the model is loaded."),
            field("system", Kind::Text, "\"\"", "The system message."),
            field("raw", Kind::Flag, "false", "Use no template."),
            neutral("suffix", &[Neutral::Empty], "Nothing can follow the answer."),
            neutral("template", &[Neutral::Empty], "The model's template is used."),
            neutral("context", &[Neutral::Empty], "Prompts are cached by their text."),
            neutral("images", &[Neutral::Empty], "Only text is supported."),
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
                "The conversation; without one, the model is loaded.",
            ),
            field("tools", Kind::Other(&["array"], "a list of tools"), "[]", "Functions that the model may call."),
        ],
    ],
);

/// `/api/embed`.
pub const EMBED: Endpoint = Endpoint::post(
    "/api/embed",
    "Computes embeddings, as Ollama's",
    &[&[
        MODEL,
        required("input", Kind::Other(&["string", "array"], "a text or a list of texts"), "The texts."),
        field("truncate", Kind::Flag, "true", "Cut texts that are too long, instead of refusing them."),
        field("options", Kind::Other(&["object"], "an object"), "", "Ignored."),
        KEEP_ALIVE,
        field("dimensions", Kind::Whole(1, u32::MAX as i64), "", "Width of the vectors: the model's own."),
    ]],
);

/// `/api/show`.
pub const SHOW: Endpoint = Endpoint::post(
    "/api/show",
    "Shows a model, as Ollama's",
    &[&[
        field("model", Kind::Text, "", "Name of the model."),
        field("name", Kind::Text, "", "The same, as older clients write it."),
        field("verbose", Kind::Flag, "false", "Ignored."),
    ]],
);

/// Bounds that differ from ours.
const OWN_BOUNDS: &[OwnBounds] = &[("repeat_last_n", [-1.0, i32::MAX as f64])];

/// Fields of `options`, and the numbers. Those about devices are the operator's: ignored.
const OPTIONS: &[&[Field]] = &[
    &number_rows(OWN_BOUNDS, "0.8"),
    &[
        field(
            "num_predict",
            Kind::Whole(-2, i32::MAX as i64),
            "-1",
            "Maximum number of generated tokens; negative: up to the context.",
        ),
        field(
            "seed",
            Kind::Other(&["integer"], "a whole number from -2^63 to 2^63"),
            "-1",
            "Sampling seed; -1 draws one.",
        ),
        field(
            "stop",
            Kind::Other(&["string", "array"], "a text or a list of texts"),
            "[]",
            "Texts that end the answer.",
        ),
        neutral("mirostat", &[Neutral::Number(0.0)], "No Mirostat."),
        neutral("mirostat_tau", &[Neutral::AnyNumber], "No Mirostat."),
        neutral("mirostat_eta", &[Neutral::AnyNumber], "No Mirostat."),
        neutral("tfs_z", &[Neutral::Number(1.0)], "No tail-free sampling."),
        neutral("typical_p", &[Neutral::Number(1.0)], "No locally typical sampling."),
        neutral("penalize_newline", &[Neutral::AnyFlag], "Penalties cover all tokens."),
        neutral("vocab_only", &[Neutral::False], "The operator decides."),
        neutral("logits_all", &[Neutral::False], "The operator decides."),
        neutral("f16_kv", &[Neutral::AnyFlag], "The operator decides."),
        neutral("num_ctx", &[Neutral::AnyNumber], "The operator decides."),
        neutral("num_gpu", &[Neutral::AnyNumber], "The operator decides."),
        neutral("num_thread", &[Neutral::AnyNumber], "The operator decides."),
        neutral("num_batch", &[Neutral::AnyNumber], "The operator decides."),
        neutral("num_keep", &[Neutral::AnyNumber], "The operator decides."),
        neutral("main_gpu", &[Neutral::AnyNumber], "The operator decides."),
        neutral("use_mmap", &[Neutral::AnyFlag], "The operator decides."),
        neutral("use_mlock", &[Neutral::AnyFlag], "The operator decides."),
        neutral("low_vram", &[Neutral::AnyFlag], "The operator decides."),
        neutral("numa", &[Neutral::AnyFlag], "The operator decides."),
    ],
];

/// The common fields.
struct CommonFields {
    model: String,
    streams: bool,
    /// Without messages and tools.
    request: ChatRequest,
    keep: Option<Option<Duration>>,
}

impl CommonFields {
    fn read(fields: Fields<'_>, app: &App) -> Result<CommonFields, ApiError> {
        let constraint = match fields.get("format") {
            None => None,
            Some(Json::String(name)) if name.is_empty() => None,
            Some(Json::String(name)) if name == "json" => Some(Constraint::JsonObject),
            Some(schema @ Json::Object(_)) => Some(Constraint::JsonSchema(schema.clone())),
            Some(_) => return Err(fields.wrong("format", r#""json" or a schema"#)),
        };
        let mut variables = Map::new();
        let thinking = match fields.get("think") {
            None => None,
            Some(Json::Bool(thinks)) => Some(*thinks),
            Some(Json::String(effort)) if ["low", "medium", "high", "max"].contains(&effort.as_str()) => {
                variables.insert("reasoning_effort".into(), effort.as_str().into());
                Some(true)
            }
            Some(_) => return Err(fields.wrong("think", "true, false, low, medium or high")),
        };
        Ok(CommonFields {
            model: fields.some_text("model")?.to_owned(),
            streams: fields.flag("stream")?.unwrap_or(true),
            request: ChatRequest {
                thinking,
                variables,
                options: GenerateOptions { constraint, ..options_of(fields, app)? },
                ..ChatRequest::new(Vec::new())
            },
            keep: keep_of(fields)?,
        })
    }

    /// Loads the model and sets its `keep_alive`.
    async fn lease(&self, app: &App) -> Result<Lease, ApiError> {
        let lease = app.models.get(&self.model).await?;
        if let Some(keep) = self.keep {
            lease.entry.keep_for(keep);
        }
        Ok(lease)
    }
}

fn options_of(fields: Fields<'_>, app: &App) -> Result<GenerateOptions, ApiError> {
    let none = Map::new();
    let given = fields.object("options", "an object")?.unwrap_or(&none);
    let given = fields.inside(given, "options.");
    let mut options = GenerateOptions::default();
    numbers(given, &mut options);
    let limit = app.limits.max_tokens.unwrap_or(i32::MAX as usize);
    // -1: no limit; -2: until the context is full.
    let n = given.checked_whole("num_predict").filter(|&n| n >= 0);
    let options = GenerateOptions {
        max_tokens: n.map_or(limit, |n| (n as usize).min(limit)),
        seed: seed_of(given)?.unwrap_or_else(random),
        stop: stops(given, "stop", &app.limits)?,
        ..options
    };
    options.check()?;
    Ok(options)
}

/// Ollama returns one answer per request.
fn one_answer(request: ChatRequest) -> Conversation {
    Conversation { seeds: vec![request.options.seed], request }
}

/// How long to keep a model: seconds or a text such as `5m`; negative: forever.
fn keep_of(fields: Fields<'_>) -> Result<Option<Option<Duration>>, ApiError> {
    let seconds = match fields.get("keep_alive") {
        None => return Ok(None),
        Some(Json::String(text)) => seconds_of(text),
        Some(other) => other.as_f64(),
    };
    match seconds {
        Some(seconds) if seconds < 0.0 => Ok(Some(None)),
        Some(seconds) if seconds <= 1e9 => Ok(Some(Some(Duration::from_secs_f64(seconds)))),
        _ => Err(fields.wrong("keep_alive", "a number of seconds or a time such as 5m")),
    }
}

/// Seconds of a duration such as `1h30m`, `-1` or `500ms`.
fn seconds_of(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    if let Ok(seconds) = rest.parse::<u32>() {
        return Some(sign * f64::from(seconds));
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(unit_at);
        let end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let factor = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            _ => return None,
        };
        sum += number.parse::<f64>().ok()? * factor;
        rest = after;
    }
    (!text.is_empty()).then_some(sign * sum)
}

/// `/api/generate`.
pub async fn generate(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(GENERATE.fields)?;
    let common = CommonFields::read(fields, &app)?;
    let prompt = fields.text("prompt")?.unwrap_or_default().to_owned();
    let system = fields.text("system")?.unwrap_or_default().to_owned();
    let is_raw = fields.flag("raw")?.unwrap_or(false);
    if prompt.is_empty() {
        return only_load(&app, &common, OllamaEndpoint::Generate).await;
    }
    let begun = Instant::now();
    let lease = common.lease(&app).await?;
    let load = begun.elapsed();
    let has_template = lease.decoder()?.chat.template().is_ok();
    let CommonFields { model, streams, mut request, .. } = common;
    let answers = match is_raw || !has_template {
        true => {
            let options = request.options;
            let is_slow = options.constraint.is_some() || is_long(prompt.len());
            let ask = move |decoder: &super::models::Decoder| {
                let choices = AnswerOptions { seeds: vec![options.seed], options };
                Ok(vec![PreparedPrompt {
                    ids: raw(decoder.model(), &prompt)?,
                    choices: Arc::new(choices),
                    reader: None,
                }])
            };
            app.answer(lease, &asked.since, is_slow, ask).await?
        }
        false => {
            let system = (!system.is_empty()).then(|| Message::new("system", system));
            request.messages = system.into_iter().chain([Message::new("user", prompt)]).collect();
            app.answer_conversation(lease, &asked.since, one_answer(request)).await?
        }
    };
    OllamaFormatter { model, shape: OllamaEndpoint::Generate, since: asked.since.at, load, first: None }
        .respond(&app, answers, streams)
        .await
}

/// `/api/chat`.
pub async fn chat(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(CHAT.fields)?;
    let common = CommonFields::read(fields, &app)?;
    let given = fields.list("messages", "a list of messages")?.unwrap_or_default();
    if given.is_empty() {
        return only_load(&app, &common, OllamaEndpoint::Chat).await;
    }
    let parse = |(at, message): (usize, &Json)| chat_message(message, &format!("messages[{at}]"));
    let messages = given.iter().enumerate().map(parse).collect::<Result<Vec<_>, ApiError>>()?;
    let (tools, notices) = tools_of(fields, &app.limits, |tool| (tool.get("function"), ".function"))?;
    let begun = Instant::now();
    let lease = common.lease(&app).await?;
    let load = begun.elapsed();
    let CommonFields { model, streams, request, .. } = common;
    let request = ChatRequest { messages, tools, ..request };
    let answers = app.answer_conversation(lease, &asked.since, one_answer(request)).await?;
    let formatter = OllamaFormatter { model, shape: OllamaEndpoint::Chat, since: asked.since.at, load, first: None };
    Ok(with_notices(formatter.respond(&app, answers, streams).await?, &notices))
}

/// Converts Ollama's message: calls have object arguments and no ids; reasoning and tool names have other keys.
fn chat_message(message: &Json, param: &str) -> Result<Message, ApiError> {
    let mut converted = message.clone();
    if let Some(fields) = converted.as_object_mut() {
        if fields.remove("images").is_some_and(|images| images.as_array().is_some_and(|images| !images.is_empty())) {
            let param = format!("{param}.images");
            return Err(ApiError::unsupported(&param, format!("{param} is not supported")));
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
    message_of(&converted, param)
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
            common.lease(app).await?.decoder()?;
            "load"
        }
    };
    let (model, load) = (common.model.clone(), begun.elapsed());
    let mut body = OllamaFormatter { model, shape, since: begun, load, first: None }.part(Delta::default());
    body["done"] = true.into();
    body["done_reason"] = reason.into();
    Ok(Body(body).into_response())
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
    /// When the first token arrived.
    first: Option<Instant>,
}

impl OllamaFormatter {
    async fn respond(self, app: &App, answers: Answers, streams: bool) -> Result<Response, ApiError> {
        match streams {
            true => streamed(Style::Lines, app.limits.keep_alive, move |parts| self.stream(answers, parts)).await,
            false => self.whole(answers).await,
        }
    }

    fn part(&self, delta: Delta) -> Json {
        let Delta { text, thinking, calls, .. } = delta;
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
                    let call = |call: &tilewright::answer::ToolCall| json!({"function": {"name": call.name, "arguments": call.arguments}});
                    body["message"]["tool_calls"] = calls.iter().map(call).collect();
                }
            }
        }
        body["done"] = false.into();
        body
    }

    fn end(&self, delta: Delta, end: &End) -> Json {
        let mut body = self.part(delta);
        let (total, now) = (self.since.elapsed(), Instant::now());
        let first = self.first.unwrap_or(now);
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
        for (name, number) in numbers {
            body[name] = u64::try_from(number).unwrap_or(u64::MAX).into();
        }
        body
    }

    async fn whole(mut self, mut answers: Answers) -> Result<Response, ApiError> {
        let mut all = Delta::default();
        while let Some(event) = answers.next().await {
            self.first.get_or_insert_with(Instant::now);
            match event? {
                AnswerEvent::Delta(_, delta) => {
                    all.text += &delta.text;
                    all.thinking += &delta.thinking;
                    all.calls.extend(delta.calls);
                }
                AnswerEvent::End(_, end) => return Ok(Body(self.end(all, &end)).into_response()),
            }
        }
        Ok(Body(self.part(all)).into_response())
    }

    async fn stream(mut self, mut answers: Answers, parts: PartSender) -> Result<PartSender, Disconnected> {
        while let Some(event) = answers.next().await {
            self.first.get_or_insert_with(Instant::now);
            match event {
                Ok(AnswerEvent::Delta(_, delta)) => parts.send(self.part(delta)).await?,
                Ok(AnswerEvent::End(_, end)) => parts.send(self.end(Delta::default(), &end)).await?,
                Err(error) => {
                    parts.fail(error).await?;
                    return Err(Disconnected);
                }
            }
        }
        Ok(parts)
    }
}

/// The time in Ollama's format.
fn time() -> String {
    date_time(i64::try_from(now().as_secs()).unwrap_or_default())
}

/// Serialised from the numbers themselves, as in OpenAI's interface.
#[derive(Serialize)]
struct EmbedResponse<'a> {
    model: &'a str,
    embeddings: Vec<Vec<f32>>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// `/api/embed`.
pub async fn embed(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(EMBED.fields)?;
    let model = fields.some_text("model")?;
    let texts = fields.texts("input", app.limits.texts)?;
    let texts =
        texts.ok_or_else(|| fields.wrong("input", &format!("a text or a list of 1 to {} texts", app.limits.texts)))?;
    let texts: Vec<String> = texts.into_iter().map(str::to_owned).collect();
    let cuts = fields.flag("truncate")?.unwrap_or(true);
    let keep = keep_of(fields)?;
    let dimensions = fields.whole("dimensions", 1, u64::from(u32::MAX))?;
    let lease = app.models.get(model).await?;
    let embedder = lease.embedder()?;
    let dims = embedder.dims();
    let texts = match cuts {
        true => texts,
        // Checking takes as long as encoding.
        false => {
            let check = move || match texts.iter().position(|text| embedder.is_cut(text).unwrap_or(false)) {
                None => Ok(texts),
                Some(at) => {
                    let message =
                        format!("input[{at}] has more than the {} tokens of the model", embedder.max_tokens());
                    Err(ApiError { message, ..ApiError::invalid("input", None, "") })
                }
            };
            app.prepare(check).await?
        }
    };
    if dimensions.is_some_and(|dimensions| dimensions != u64::from(dims)) {
        return Err(ApiError::unsupported(
            "dimensions",
            format!("dimensions is not {dims}, and vectors cannot be truncated"),
        ));
    }
    if let Some(keep) = keep {
        lease.entry.keep_for(keep);
    }
    let load = asked.since.at.elapsed();
    let (vectors, n) = vectors_of(&app, lease, &asked.since.trace, texts).await?;
    let total_duration = asked.since.at.elapsed().as_nanos() as u64;
    let load_duration = load.as_nanos() as u64;
    let body = EmbedResponse { model, embeddings: vectors, total_duration, load_duration, prompt_eval_count: n };
    Ok(Body(body).into_response())
}

fn format_of(entry: &ServedModel) -> &'static str {
    if entry.is_gguf() { "gguf" } else { "safetensors" }
}

fn model_json(entry: &ServedModel) -> Json {
    let details = entry.about().map(|about| about.details(format_of(entry)));
    // Clients show the beginning of the digest, and compare digests.
    let digest = Sha256::digest(format!("{} {}", entry.name(), entry.size_bytes()));
    json!({
        "name": entry.name(),
        "model": entry.name(),
        "modified_at": date_time(i64::try_from(entry.created).unwrap_or_default()),
        "size": entry.size_bytes(),
        "digest": digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        "details": details.unwrap_or_else(|| json!({})),
    })
}

/// `/api/tags`.
pub async fn tags(State(app): State<Arc<App>>) -> Result<Body<Json>, ApiError> {
    let of = app.clone();
    let models = app.prepare(move || Ok(of.models.entries.iter().map(|entry| model_json(entry)).collect::<Vec<_>>()));
    Ok(Body(json!({"models": models.await?})))
}

/// `/api/ps`: lists the loaded models.
pub async fn loaded(State(app): State<Arc<App>>) -> Result<Body<Json>, ApiError> {
    let of = app.clone();
    let models = app.prepare(move || {
        let describe = |entry: &Arc<ServedModel>| {
            let loaded = entry.loaded()?;
            let plan = loaded.plan().unwrap_or_default();
            let mut body = model_json(entry);
            body["size"] = plan.total_bytes().into();
            body["size_vram"] = plan.total_bytes().into();
            // A model without a set time stays loaded.
            body["expires_at"] = date_time(i64::try_from(now().as_secs()).unwrap_or_default() + FOR_EVER).into();
            if let Loaded::Decoder(decoder) = &loaded {
                body["context_length"] = decoder.model().context_length().into();
            }
            Some(body)
        };
        Ok(of.models.entries.iter().filter_map(describe).collect::<Vec<_>>())
    });
    Ok(Body(json!({"models": models.await?})))
}

/// `/api/show`.
pub async fn show(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    // Older clients send `name`.
    fields.check(SHOW.fields)?;
    let name = match fields.text("model")? {
        Some(name) => name,
        None => fields.some_text("name").map_err(|_| fields.wrong("model", "a text"))?,
    };
    let entry = app.models.find(name)?.clone();
    let body = app.prepare(move || {
        let context_length = match entry.loaded() {
            Some(Loaded::Decoder(decoder)) => Some(decoder.model().context_length()),
            _ => None,
        };
        let mut body = entry.about().map_or_else(
            || json!({"details": {}, "model_info": {}, "capabilities": []}),
            |about| about.shown(format_of(&entry), context_length),
        );
        body["modified_at"] = date_time(i64::try_from(entry.created).unwrap_or_default()).into();
        Ok(body)
    });
    Ok(Body(body.await?).into_response())
}

/// `/api/version`: the compatible version of Ollama, since clients require a minimum, and this program's own.
pub async fn version() -> Body<Json> {
    Body(json!({"version": OLLAMA, "tilewright": env!("CARGO_PKG_VERSION")}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ollama_keep_alive_durations_are_parsed() {
        let known =
            [("5m", 300.0), ("1h30m", 5400.0), ("-1", -1.0), ("0", 0.0), ("90", 90.0), ("1.5s", 1.5), ("-2m", -120.0)];
        for (text, seconds) in known {
            assert_eq!(seconds_of(text), Some(seconds), "{text}");
        }
        for text in ["", "m", "5 m", "1d", "5m3", "forever"] {
            assert_eq!(seconds_of(text), None, "{text}");
        }
    }
}
