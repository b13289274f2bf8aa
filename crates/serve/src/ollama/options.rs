//! Fields of both `/api/generate` and `/api/chat`, and Ollama's options.

use std::time::Duration;

use serde_json::{Map, Value as Json};
use tilewright::ChatRequest;
use tilewright::generate::GenerateOptions;
use tilewright::grammar::Constraint;

use super::super::app::App;
use super::super::errors::ApiError;
use super::super::fields::Fields;
use super::super::models::Lease;
use super::super::sampling::{OwnBounds, SEED, STOP, number_rows, numbers, seed_of, stops, with_default};
use super::super::schema::{Field, Kind, Neutral, field, neutral, required};

/// The model's name.
pub const MODEL: Field = required("model", Kind::Text, "Name of the model; `:latest` may follow.");

/// The model's name, for endpoints where older clients send `name`.
pub const EITHER_NAME: &[Field] =
    &[field("model", Kind::Text, "", "Name of the model."), field("name", Kind::Text, "", "Older name of `model`.")];

/// How long to keep the model.
pub const KEEP_ALIVE: Field = field(
    "keep_alive",
    Kind::Other(&["string", "number"], "a number of seconds or a time such as 5m"),
    "the server's",
    "How long to keep the model loaded after this request; negative: for ever.",
);

/// `/api/generate` and `/api/chat`.
pub const COMMON: &[Field] = &[
    MODEL,
    field("stream", Kind::Flag, "true", "Send the answer in parts, one JSON object per line."),
    field("format", Kind::Other(&["string", "object"], "\"json\" or a schema"), "", "JSON, or JSON by a schema."),
    OPTIONS,
    KEEP_ALIVE,
    field(
        "think",
        Kind::Other(&["boolean", "string"], "true, false, low, medium, high or max"),
        "the template's",
        "Whether, and how much, the model may think.",
    ),
    field("logprobs", Kind::Flag, "false", "Report the log probabilities of the answer's tokens."),
    field("top_logprobs", Kind::Whole(0, 20), "0", "With `logprobs`: report this many of the most likely tokens."),
    field("truncate", Kind::Flag, "true", "Leave out the oldest turns of a conversation that is too long."),
    neutral("shift", &[Neutral::AnyFlag], "A full context ends the answer."),
    neutral("_debug_render_only", &[Neutral::False], "Prompts are not reported."),
];

/// Ollama's options.
pub const OPTIONS: Field = field("options", Kind::Object(ROWS), "{}", "Sampling options, and how the model is run.");

/// Bounds that differ from ours.
const OWN_BOUNDS: &[OwnBounds] = &[("repeat_last_n", [-1.0, i32::MAX as f64])];

/// Defaults as Ollama documents them.
const NUMBERS: [Field; GenerateOptions::NUMBERS.len()] =
    with_default(with_default(number_rows(OWN_BOUNDS, "0.8"), "top_p", "0.9"), "min_p", "0");

const ROWS: &[&[Field]] = &[
    &NUMBERS,
    &[
        field(
            "num_predict",
            Kind::Whole(-2, i32::MAX as i64),
            "-1",
            "Maximum number of generated tokens; negative: up to the context.",
        ),
        field(
            "num_ctx",
            Kind::Whole(0, i32::MAX as i64),
            "0",
            "Tokens of the context that the request uses at most; a larger one than the server's changes nothing.",
        ),
        SEED,
        STOP,
        neutral("typical_p", &[Neutral::Number(1.0)], "No locally typical sampling."),
    ],
    &OF_OPERATOR,
    &FORMER,
];

const fn of_operator(name: &'static str) -> Field {
    field(name, Kind::Other(&["number", "boolean"], "a number or a flag"), "", "Ignored: the server's flags decide it.")
}

/// Options about devices and memory, which do not change the text.
const OF_OPERATOR: [Field; 14] = [
    of_operator("draft_num_predict"),
    of_operator("embedding_only"),
    of_operator("f16_kv"),
    of_operator("logits_all"),
    of_operator("low_vram"),
    of_operator("main_gpu"),
    of_operator("num_batch"),
    of_operator("num_gpu"),
    of_operator("num_keep"),
    of_operator("num_thread"),
    of_operator("numa"),
    of_operator("use_mlock"),
    of_operator("use_mmap"),
    of_operator("vocab_only"),
];

const fn former(name: &'static str) -> Field {
    field(name, Kind::Other(&["number", "boolean"], "a number or a flag"), "", "Ignored, as by Ollama today.")
}

/// Options that Ollama once had and ignores today.
const FORMER: [Field; 7] = [
    former("mirostat"),
    former("mirostat_eta"),
    former("mirostat_tau"),
    former("penalize_newline"),
    former("rope_frequency_base"),
    former("rope_frequency_scale"),
    former("tfs_z"),
];

/// Whether a former option never did anything with this value.
fn did_nothing(name: &str, value: &Json) -> bool {
    match name {
        // These two act with `mirostat` only.
        "mirostat_eta" | "mirostat_tau" => true,
        "penalize_newline" => value == true,
        "tfs_z" => value.as_f64() == Some(1.0),
        _ => value.as_f64() == Some(0.0),
    }
}

/// The common fields.
pub struct CommonFields {
    pub model: String,
    pub streams: bool,
    /// Without messages and tools.
    pub request: ChatRequest,
    /// See [`RequestOptions::n_ctx`].
    pub n_ctx: Option<u32>,
    /// Whether a conversation that does not fit loses its oldest messages.
    pub truncates: bool,
    pub keep: Option<Option<Duration>>,
    /// What the client is told in a header.
    pub notices: Vec<String>,
}

impl CommonFields {
    pub fn read(fields: Fields<'_>, app: &App) -> Result<CommonFields, ApiError> {
        let constraint = match fields.get("format") {
            None => None,
            Some(Json::String(name)) if name.is_empty() => None,
            Some(Json::String(name)) if name == "json" => Some(Constraint::JsonObject),
            Some(schema @ Json::Object(_)) => Some(Constraint::JsonSchema(schema.clone())),
            Some(_) => return Err(fields.wrong("format", r#""json" or a schema"#)),
        };
        let constraint = constraint.map(|constraint| constraint.named("format"));
        let mut variables = Map::new();
        let thinking = match fields.get("think") {
            None => None,
            Some(Json::Bool(thinks)) => Some(*thinks),
            Some(Json::String(effort)) if ["low", "medium", "high", "max"].contains(&effort.as_str()) => {
                // No template knows more than high.
                let effort = if effort == "max" { "high" } else { effort };
                variables.insert("reasoning_effort".into(), effort.into());
                Some(true)
            }
            Some(_) => return Err(fields.wrong("think", "true, false, low, medium, high or max")),
        };
        let n_top = fields.checked_whole("top_logprobs").unwrap_or(0) as u32;
        let logprobs = fields.checked_flag("logprobs").unwrap_or(false).then_some(n_top);
        let RequestOptions { options, n_ctx, notices } = RequestOptions::read(fields, app)?;
        Ok(CommonFields {
            model: fields.some_text("model")?.to_owned(),
            streams: fields.checked_flag("stream").unwrap_or(true),
            request: ChatRequest {
                thinking,
                variables,
                options: GenerateOptions { constraint, logprobs, ..options },
                ..ChatRequest::new(Vec::new())
            },
            n_ctx,
            truncates: fields.checked_flag("truncate").unwrap_or(true),
            keep: keep_of(fields)?,
            notices,
        })
    }

    /// Loads the model, sets its `keep_alive`, and checks what depends on it.
    pub async fn lease(&self, app: &App) -> Result<Lease, ApiError> {
        let lease = app.models.get(&self.model).await?;
        let decoder = lease.decoder()?;
        if let Some(keep) = self.keep {
            lease.entry.keep_for(keep);
        }
        let can_think = decoder.chat.template().is_ok() && decoder.chat.format().can_think();
        if self.request.thinking == Some(true) && !can_think {
            let message = format!("think is set, but {} does not think; leave it out or send false", self.model);
            return Err(ApiError::unsupported("think", message));
        }
        let (name, context) = (lease.entry.name(), decoder.model().context_length());
        if let Some(n_ctx) = self.n_ctx.filter(|&n| n > context) {
            app.report_once(format!(
                "a request's options.num_ctx is {n_ctx}, but the context of {name} has {context} tokens; --ctx sets it"
            ));
        }
        Ok(lease)
    }
}

/// Ollama's `options`.
pub struct RequestOptions {
    pub options: GenerateOptions,
    /// The context that the request wants at most; the server's is not enlarged.
    pub n_ctx: Option<u32>,
    /// What the client is told in a header.
    pub notices: Vec<String>,
}

impl RequestOptions {
    pub fn read(fields: Fields<'_>, app: &App) -> Result<RequestOptions, ApiError> {
        let none = Map::new();
        let given = fields.object("options", "an object")?.unwrap_or(&none);
        let given = fields.inside(given, "options.");
        let limit = app.limits.max_tokens.unwrap_or(i32::MAX as usize);
        // Below 0: until the context is full.
        let n = given.checked_whole("num_predict").filter(|&n| n >= 0);
        let options = GenerateOptions {
            max_tokens: n.map_or(limit, |n| (n as usize).min(limit)),
            seed: seed_of(given)?,
            stop: stops(given, "stop", &app.limits)?,
            ..numbers(given, &NUMBERS)
        };
        options.check()?;
        // 0: the server's.
        let n_ctx = given.checked_whole("num_ctx").filter(|&n| n > 0).map(|n| n as u32);
        Ok(RequestOptions { options, n_ctx, notices: ignored(given, app) })
    }
}

/// Notices about ignored options that would change the text; the operator is told of all ignored ones.
fn ignored(given: Fields<'_>, app: &App) -> Vec<String> {
    for Field { name, .. } in OF_OPERATOR.iter().filter(|row| given.get(row.name).is_some()) {
        app.report_once(format!("a request sets options.{name}, which is ignored: flags of `serve` decide it"));
    }
    let sets = |row: &&Field| given.get(row.name).is_some_and(|value| !did_nothing(row.name, value));
    FORMER.iter().filter(sets).map(|row| format!("options.{} is not supported", row.name)).collect()
}

/// How long to keep a model: seconds or a text such as `5m`; negative: forever.
pub fn keep_of(fields: Fields<'_>) -> Result<Option<Option<Duration>>, ApiError> {
    let seconds = match fields.get("keep_alive") {
        None => return Ok(None),
        Some(Json::String(text)) => seconds_of(text),
        Some(other) => other.as_f64(),
    };
    match seconds {
        Some(seconds) if seconds < 0.0 => Ok(Some(None)),
        // Go's longest time is 292 years, which its clients send for ever.
        Some(seconds) if seconds > 1e9 => Ok(Some(None)),
        Some(seconds) => Ok(Some(Some(Duration::from_secs_f64(seconds)))),
        None => Err(fields.wrong("keep_alive", "a number of seconds or a time such as 5m")),
    }
}

/// Seconds of a duration in Go's notation, such as `1h30m`, `-1m` or `500ms`, or of a plain number.
fn seconds_of(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if let Ok(seconds) = rest.parse::<u32>() {
        return Some(sign * f64::from(seconds));
    }
    if rest.is_empty() {
        return None;
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
            // The micro sign, and the Greek letter.
            "us" | "µs" | "μs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        sum += number.parse::<f64>().ok()? * factor;
        rest = after;
    }
    Some(sign * sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_alive_durations_are_parsed() {
        let known = [
            ("5m", 300.0),
            ("1h30m", 5400.0),
            ("-1", -1.0),
            ("0", 0.0),
            ("90", 90.0),
            ("1.5s", 1.5),
            ("-2m", -120.0),
            ("+1m0s", 60.0),
            ("2500us", 0.0025),
            ("2562047h47m16.854775807s", 9_223_372_036.854_776),
        ];
        for (text, seconds) in known {
            assert_eq!(seconds_of(text), Some(seconds), "{text}");
        }
        for text in ["", "-", "+", "m", "5 m", "1d", "5m3", "forever"] {
            assert_eq!(seconds_of(text), None, "{text}");
        }
    }
}
