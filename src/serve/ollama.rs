//! Ollama's interface: `/api/generate`, `/api/chat`, `/api/embed`, and what its clients ask about models.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};

use super::answers::{Answers, Ask, Delta, End, Said};
use super::app::{App, Asked, now};
use super::conversation::{Conversation, message_of, tool_of};
use super::embeddings::vectors_of;
use super::errors::ApiError;
use super::fields::{Fields, MOST_EXACT};
use super::models::{Entry, Lease, Loaded};
use super::sampling::{random, stops};
use super::sse::{Gone, Parts, Style, streamed};
use crate::chat::{Message, date_time};
use crate::generate::{GenerateOptions, StopReason};
use crate::grammar::Constraint;

/// Fields that both kinds of generation have.
const COMMON: &[&str] = &["model", "stream", "format", "options", "keep_alive", "think"];

/// Options that say where and how to compute: that is the server's to say.
const OF_DEVICES: &[&str] = &[
    "num_ctx",
    "num_gpu",
    "num_thread",
    "num_batch",
    "num_keep",
    "main_gpu",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "numa",
];

/// Options that are known.
const OPTIONS: &[&str] = &[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "num_predict",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
];

/// What both kinds of generation ask for.
struct Common {
    model: String,
    streams: bool,
    options: GenerateOptions,
    constraint: Option<Constraint>,
    keep: Option<Option<Duration>>,
    thinking: Option<bool>,
    variables: Map<String, Json>,
}

impl Common {
    fn read(fields: Fields<'_>, app: &App) -> Result<Common, ApiError> {
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
        Ok(Common {
            model: fields.some_text("model")?.to_owned(),
            streams: fields.flag("stream")?.unwrap_or(true),
            options: options_of(fields, app)?,
            constraint,
            keep: keep_of(fields)?,
            thinking,
            variables,
        })
    }

    /// The model, kept for as long as the request says.
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
    let given = Fields::within(given, "options.");
    given.only(&[OF_DEVICES, OPTIONS])?;
    let usual = GenerateOptions::default();
    let number = |field, least, most, usual: f32| {
        Ok::<f32, ApiError>(given.number(field, least, most)?.map_or(usual, |number| number as f32))
    };
    let limit = app.limits.max_tokens.unwrap_or(i32::MAX as usize);
    // -1 is without a limit, -2 until the context is full.
    let n = given.number("num_predict", -2.0, f64::from(i32::MAX))?.filter(|&n| n >= 0.0);
    let last_n = given.number("repeat_last_n", -1.0, f64::from(i32::MAX))?;
    let options = GenerateOptions {
        max_tokens: n.map_or(limit, |n| (n as usize).min(limit)),
        temperature: number("temperature", 0.0, 100.0, usual.temperature)?,
        top_k: given.whole("top_k", 0, u64::from(u32::MAX))?.map_or(usual.top_k, |k| k as u32),
        top_p: number("top_p", 0.0, 1.0, usual.top_p)?,
        min_p: number("min_p", 0.0, 1.0, usual.min_p)?,
        repeat_penalty: number("repeat_penalty", 0.0, 100.0, usual.repeat_penalty)?,
        repeat_last_n: last_n.map_or(usual.repeat_last_n, |n| if n < 0.0 { i32::MAX as u32 } else { n as u32 }),
        presence_penalty: number("presence_penalty", -100.0, 100.0, 0.0)?,
        frequency_penalty: number("frequency_penalty", -100.0, 100.0, 0.0)?,
        seed: given.whole("seed", 0, MOST_EXACT)?.unwrap_or_else(random),
        stop: stops(given, "stop", &app.limits)?,
        ..usual
    };
    options.check()?;
    Ok(options)
}

/// How long a model is kept: seconds or a text such as `5m`, for ever if it is negative.
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

/// Seconds of a time such as `1h30m`, `-1` or `500ms`.
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
pub async fn generate(State(app): State<Arc<App>>, asked: Asked) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.only(&[COMMON, &["prompt", "system", "raw", "suffix", "template", "context", "images"]])?;
    for field in ["suffix", "template", "context", "images"] {
        let is_empty = |value: &Json| value == "" || value.as_array().is_some_and(Vec::is_empty);
        if fields.get(field).is_some_and(|value| !is_empty(value)) {
            return Err(ApiError::unsupported(field, format!("{field} is not supported")));
        }
    }
    let common = Common::read(fields, &app)?;
    let prompt = fields.text("prompt")?.unwrap_or_default().to_owned();
    let system = fields.text("system")?.unwrap_or_default().to_owned();
    let raw = fields.flag("raw")?.unwrap_or(false);
    if prompt.is_empty() {
        return only_load(&app, &common, Shape::Generate).await;
    }
    let begun = Instant::now();
    let lease = common.lease(&app).await?;
    let load = begun.elapsed();
    let has_template = lease.decoder()?.template.is_some();
    let Common { model, streams, options, constraint, thinking, variables, .. } = common;
    let answers = match raw || !has_template {
        true => {
            let has_grammar = constraint.is_some();
            let ask = move |decoder: &super::models::Decoder| {
                let each = vec![GenerateOptions { constraint, ..options }];
                Ok(vec![Ask { ids: decoder.model().encode(&prompt)?, each, reading: None }])
            };
            app.answer(lease, &asked.since, has_grammar, ask).await?
        }
        false => {
            let system = (!system.is_empty()).then(|| Message::new("system", system));
            let messages = system.into_iter().chain([Message::new("user", prompt)]).collect();
            let conversation = Conversation {
                messages,
                tools: Vec::new(),
                choice: None,
                parallel: true,
                thinking,
                variables,
                constraint,
                each: vec![options],
            };
            app.answer_conversation(lease, &asked.since, conversation).await?
        }
    };
    Told { model, shape: Shape::Generate, since: asked.since.at, load, first: None }.tell(&app, answers, streams).await
}

/// `/api/chat`.
pub async fn chat(State(app): State<Arc<App>>, asked: Asked) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.only(&[COMMON, &["messages", "tools"]])?;
    let common = Common::read(fields, &app)?;
    let given = fields.list("messages", "a list of messages")?.unwrap_or_default();
    if given.is_empty() {
        return only_load(&app, &common, Shape::Chat).await;
    }
    let told = |(at, message): (usize, &Json)| chat_message(message, &format!("messages[{at}]"));
    let messages = given.iter().enumerate().map(told).collect::<Result<Vec<_>, ApiError>>()?;
    let tools = fields.list("tools", "a list of tools")?.unwrap_or_default().iter().enumerate();
    let tools = tools.map(|(at, tool)| tool_of(tool.get("function"), &format!("tools[{at}].function")));
    let tools = tools.collect::<Result<Vec<_>, ApiError>>()?;
    let begun = Instant::now();
    let lease = common.lease(&app).await?;
    let load = begun.elapsed();
    let Common { model, streams, options, constraint, thinking, variables, .. } = common;
    let each = vec![options];
    let conversation =
        Conversation { messages, tools, choice: None, parallel: true, thinking, variables, constraint, each };
    let answers = app.answer_conversation(lease, &asked.since, conversation).await?;
    Told { model, shape: Shape::Chat, since: asked.since.at, load, first: None }.tell(&app, answers, streams).await
}

/// A message as Ollama has it: calls have objects as arguments and no ids, thoughts and tools other names.
fn chat_message(message: &Json, param: &str) -> Result<Message, ApiError> {
    let mut told = message.clone();
    if let Some(fields) = told.as_object_mut() {
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
    message_of(&told, param)
}

/// Loads a model, or unloads it where it is to be kept for no time, as clients ask for by a request without a text.
async fn only_load(app: &App, common: &Common, shape: Shape) -> Result<Response, ApiError> {
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
    let mut told = Told { model, shape, since: begun, load, first: None }.part(Delta::default());
    told["done"] = true.into();
    told["done_reason"] = reason.into();
    Ok(Body(told).into_response())
}

/// Which of the two.
#[derive(Clone, Copy)]
enum Shape {
    Generate,
    Chat,
}

/// How an answer is told.
struct Told {
    model: String,
    shape: Shape,
    since: Instant,
    load: Duration,
    /// When the first token came.
    first: Option<Instant>,
}

impl Told {
    async fn tell(self, app: &App, answers: Answers, streams: bool) -> Result<Response, ApiError> {
        match streams {
            true => streamed(Style::Lines, app.limits.keep_alive, move |parts| self.stream(answers, parts)).await,
            false => self.whole(answers).await,
        }
    }

    fn part(&self, delta: Delta) -> Json {
        let Delta { text, thinking, calls, .. } = delta;
        let mut told = json!({"model": self.model, "created_at": time()});
        let thinking = (!thinking.is_empty()).then_some(thinking);
        match self.shape {
            Shape::Generate => {
                told["response"] = text.into();
                if let Some(thinking) = thinking {
                    told["thinking"] = thinking.into();
                }
            }
            Shape::Chat => {
                told["message"] = json!({"role": "assistant", "content": text});
                if let Some(thinking) = thinking {
                    told["message"]["thinking"] = thinking.into();
                }
                if !calls.is_empty() {
                    let call = |call: &crate::answer::ToolCall| json!({"function": {"name": call.name, "arguments": call.arguments}});
                    told["message"]["tool_calls"] = calls.iter().map(call).collect();
                }
            }
        }
        told["done"] = false.into();
        told
    }

    fn end(&self, delta: Delta, end: &End) -> Json {
        let mut told = self.part(delta);
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
        told["done"] = true.into();
        told["done_reason"] = if end.is_cut() && end.reason != StopReason::Deadline { "length" } else { "stop" }.into();
        for (name, number) in numbers {
            told[name] = u64::try_from(number).unwrap_or(u64::MAX).into();
        }
        told
    }

    async fn whole(mut self, mut answers: Answers) -> Result<Response, ApiError> {
        let mut all = Delta::default();
        while let Some(said) = answers.next().await {
            self.first.get_or_insert_with(Instant::now);
            match said? {
                Said::Delta(_, delta) => {
                    all.text += &delta.text;
                    all.thinking += &delta.thinking;
                    all.calls.extend(delta.calls);
                }
                Said::End(_, end) => return Ok(Body(self.end(all, &end)).into_response()),
            }
        }
        Ok(Body(self.part(all)).into_response())
    }

    async fn stream(mut self, mut answers: Answers, parts: Parts) -> Result<Parts, Gone> {
        while let Some(said) = answers.next().await {
            self.first.get_or_insert_with(Instant::now);
            match said {
                Ok(Said::Delta(_, delta)) => parts.send(self.part(delta)).await?,
                Ok(Said::End(_, end)) => parts.send(self.end(Delta::default(), &end)).await?,
                Err(error) => {
                    parts.fail(error).await?;
                    return Err(Gone);
                }
            }
        }
        Ok(parts)
    }
}

/// The time as Ollama tells it.
fn time() -> String {
    date_time(i64::try_from(now().as_secs()).unwrap_or_default())
}

/// `/api/embed`.
pub async fn embed(State(app): State<Arc<App>>, asked: Asked) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.only(&[&["model", "input", "truncate", "options", "keep_alive", "dimensions"]])?;
    let model = fields.some_text("model")?;
    let texts = fields.texts("input", app.limits.texts)?;
    let texts =
        texts.ok_or_else(|| fields.wrong("input", &format!("a text or a list of 1 to {} texts", app.limits.texts)))?;
    let texts: Vec<String> = texts.into_iter().map(str::to_owned).collect();
    if fields.flag("truncate")? == Some(false) {
        return Err(ApiError::unsupported("truncate", "truncate is false, and longer texts are cut"));
    }
    let keep = keep_of(fields)?;
    let dimensions = fields.whole("dimensions", 1, u64::from(u32::MAX))?;
    let lease = app.models.get(model).await?;
    let dims = lease.embedder()?.dims();
    if dimensions.is_some_and(|dimensions| dimensions != u64::from(dims)) {
        return Err(ApiError::unsupported(
            "dimensions",
            format!("dimensions is not {dims}, and vectors cannot be cut"),
        ));
    }
    if let Some(keep) = keep {
        lease.entry.keep_for(keep);
    }
    let load = asked.since.at.elapsed();
    let (vectors, n) = vectors_of(&app, lease, &asked.since.trace, texts).await?;
    Ok(Body(json!({
        "model": model,
        "embeddings": vectors,
        "total_duration": asked.since.at.elapsed().as_nanos() as u64,
        "load_duration": load.as_nanos() as u64,
        "prompt_eval_count": n,
    }))
    .into_response())
}

fn entry_told(entry: &Entry) -> Json {
    let quantisation = match entry.loaded() {
        Some(Loaded::Decoder(decoder)) => decoder.model().block_types().first().map(ToString::to_string),
        Some(Loaded::Embedder(embedder)) => embedder.block_types().first().map(ToString::to_string),
        Some(Loaded::Reranker(reranker)) => reranker.block_types().first().map(ToString::to_string),
        None => None,
    };
    json!({
        "name": entry.name(),
        "model": entry.name(),
        "modified_at": date_time(i64::try_from(entry.created).unwrap_or_default()),
        "size": entry.size_bytes(),
        "digest": "",
        "details": {
            "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
            "quantization_level": quantisation.unwrap_or_default(),
        },
    })
}

/// `/api/tags`.
pub async fn tags(State(app): State<Arc<App>>) -> Body<Json> {
    Body(json!({"models": app.models.entries.iter().map(|entry| entry_told(entry)).collect::<Vec<_>>()}))
}

/// `/api/ps`: those that are loaded.
pub async fn loaded(State(app): State<Arc<App>>) -> Body<Json> {
    let told = |entry: &Arc<Entry>| {
        let plan = entry.loaded()?.plan().unwrap_or_default();
        let mut told = entry_told(entry);
        told["size"] = plan.total_bytes().into();
        Some(told)
    };
    Body(json!({"models": app.models.entries.iter().filter_map(told).collect::<Vec<_>>()}))
}

/// `/api/show`.
pub async fn show(State(app): State<Arc<App>>, asked: Asked) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    // `name` is what older clients say.
    fields.only(&[&["model", "name", "verbose"]])?;
    let name = match fields.text("model")? {
        Some(name) => name,
        None => fields.some_text("name").map_err(|_| fields.wrong("model", "a text"))?,
    };
    let entry = app.models.find(name)?;
    let mut told = json!({"details": entry_told(entry)["details"], "model_info": {}, "capabilities": []});
    match entry.loaded() {
        Some(Loaded::Decoder(decoder)) => {
            let templates = &decoder.model().chat_source().templates;
            told["template"] = templates.first().map(|(_, source)| source.as_str()).unwrap_or_default().into();
            told["model_info"] = json!({
                "general.name": decoder.model().name(),
                "general.context_length": decoder.model().context_length(),
            });
            told["capabilities"] = match decoder.template.is_some() {
                true => json!(["completion", "tools"]),
                false => json!(["completion"]),
            };
        }
        Some(Loaded::Embedder(embedder)) => {
            told["model_info"] = json!({"general.name": embedder.name(), "general.embedding_length": embedder.dims()});
            told["capabilities"] = json!(["embedding"]);
        }
        _ => {}
    }
    Ok(Body(told).into_response())
}

/// `/api/version`: this program's own.
pub async fn version() -> Body<Json> {
    Body(json!({"version": env!("CARGO_PKG_VERSION")}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_clients_write_them() {
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
