//! Fields of all endpoints that generate text: sampling, stop conditions, and how the answer is sent.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use tilewright::generate::GenerateOptions;
use tilewright::random_seed;

use super::answers::AnswerOptions;
use super::app::RunOptions;
use super::errors::ApiError;
use super::extras::Extras;
use super::fields::Fields;
use super::limits::Limits;
use super::schema::{self, Field, Kind, Neutral, field, id_of, neutral};

/// The row of the model's name.
pub const MODEL: Field =
    field("model", Kind::Text, "the only model that can do it", "Name of the model, or `MODEL:ADAPTER`.");

/// The row of the seed.
pub const SEED: Field = field(
    "seed",
    Kind::Other(&["integer"], "a whole number from -2^63 to 2^63"),
    "-1",
    "Sampling seed; -1 draws one. Further answers add 1 each.",
);

/// The row of stop strings.
pub const STOP: Field = field(
    "stop",
    Kind::Other(&["string", "array"], "a text or a list of texts"),
    "[]",
    "Texts that end the answer and are not part of it.",
);

/// The fields of all endpoints that generate text, besides the [`numbers`](number_rows) and the token limit.
pub const FIELDS: &[Field] = &[
    MODEL,
    field(
        "repetition_penalty",
        Kind::Number(0.0, 100.0),
        "1",
        "vLLM's `repeat_penalty`: covers the whole context unless `repeat_last_n` is given.",
    ),
    SEED,
    STOP,
    field(
        "stop_token_ids",
        Kind::Other(&["array"], "a list of token ids"),
        "[]",
        "Tokens that end the answer, besides the model's; also with `ignore_eos`.",
    ),
    field(
        "include_stop_str_in_output",
        Kind::Flag,
        "false",
        "Keep the stop text, or the text of the stop token, at the end of the answer.",
    ),
    field("ignore_eos", Kind::Flag, "false", "Continue past the model's end tokens."),
    field(
        "min_tokens",
        Kind::Whole(0, NO_LIMIT),
        "0",
        "Tokens before which no end token can be chosen and no stop text counts. Excludes drafts.",
    ),
    field("skip_special_tokens", Kind::Flag, "true", "Leave special tokens out of the text."),
    field(
        "logit_bias",
        Kind::Other(&["object", "array"], "an object of biases by token ids, or a list of pairs [id, bias]"),
        "{}",
        "Biases of -100 to 100 added to logits; `false` in a pair bans the token.",
    ),
    field(
        "prompt_lookup",
        Kind::Whole(0, GenerateOptions::MAX_DRAFT_TOKENS as i64),
        "0",
        "Draft tokens per pass by prompt lookup. Requires temperature 0 without penalties, constraint or logprobs.",
    ),
    field("stream", Kind::Flag, "false", "Send the answer as server-sent events."),
    field("stream_options", Kind::Object(&[STREAM_OPTIONS]), "", "Options of a stream."),
    field(
        "priority",
        Kind::Whole(i32::MIN as i64, i32::MAX as i64),
        "0",
        "Requests of a lower number start first, as in vLLM.",
    ),
    field("cache_prompt", Kind::Flag, "true", "Use the cached beginning of the prompt; `false` computes all of it."),
    field(
        "cache_salt",
        Kind::Text,
        "",
        "Separates the prefix cache: only requests with the same text share cached prompts.",
    ),
    field("no_stop_trim", Kind::Flag, "false", "SGLang's `include_stop_str_in_output`."),
    neutral("modalities", &[Neutral::Only("text")], "Only text is supported."),
    neutral("user", &[Neutral::AnyText], "Ignored."),
    neutral("request_id", &[Neutral::AnyText], "Ignored."),
    neutral("rid", &[Neutral::AnyText], "Ignored."),
    neutral("metadata", &[Neutral::AnyObject], "Ignored."),
    neutral("safety_identifier", &[Neutral::AnyText], "Ignored."),
    neutral(
        "prompt_cache_key",
        &[Neutral::AnyText],
        "Ignored: requests with the same API key and `cache_salt` share cached prompts.",
    ),
    neutral(
        "prompt_cache_retention",
        &[Neutral::Text("in_memory"), Neutral::Text("in-memory")],
        "Prompts are cached in memory.",
    ),
    neutral("service_tier", &[Neutral::Text("auto"), Neutral::Text("default")], "There is one tier."),
    neutral("bad_words", &[Neutral::Empty], "Use `logit_bias`."),
    neutral("allowed_token_ids", &[Neutral::Empty], "Use a grammar or `logit_bias`."),
    neutral("detokenize", &[Neutral::True], "Answers have their text."),
    neutral("use_beam_search", &[Neutral::False], "No beam search."),
    neutral("length_penalty", &[Neutral::Number(1.0)], "No beam search."),
    neutral("early_stopping", &[Neutral::False], "No beam search."),
    neutral("typical_p", &[Neutral::Number(1.0)], "No locally typical sampling."),
    neutral("tfs_z", &[Neutral::Number(1.0)], "No tail-free sampling."),
    neutral("top_n_sigma", &[Neutral::Number(-1.0)], "No top-n-sigma sampling."),
    neutral("top_a", &[Neutral::Number(0.0)], "No top-a sampling."),
    neutral("mirostat", &[Neutral::Number(0.0)], "No Mirostat."),
    neutral("mirostat_tau", &[Neutral::AnyNumber], "No Mirostat."),
    neutral("mirostat_eta", &[Neutral::AnyNumber], "No Mirostat."),
    neutral("xtc_probability", &[Neutral::Number(0.0)], "No XTC."),
    neutral("xtc_threshold", &[Neutral::AnyNumber], "No XTC."),
    neutral("dry_multiplier", &[Neutral::Number(0.0)], "No DRY penalty."),
    neutral("dry_base", &[Neutral::AnyNumber], "No DRY penalty."),
    neutral("dry_allowed_length", &[Neutral::AnyNumber], "No DRY penalty."),
    neutral("dry_penalty_last_n", &[Neutral::AnyNumber], "No DRY penalty."),
    neutral("dynatemp_range", &[Neutral::Number(0.0)], "No dynamic temperature."),
    neutral("dynatemp_exponent", &[Neutral::AnyNumber], "No dynamic temperature."),
    neutral("min_keep", &[Neutral::Number(0.0), Neutral::Number(1.0)], "Sampling keeps one token or more."),
    neutral("n_keep", &[Neutral::AnyNumber], "A prompt is never shifted."),
    neutral("id_slot", &[Neutral::AnyNumber], "Slots are chosen by the server."),
    neutral("spaces_between_special_tokens", &[Neutral::AnyFlag], "The tokenizer decides."),
    neutral("truncate_prompt_tokens", &[Neutral::Number(-1.0)], "A prompt that is too long is refused."),
];

/// A field of llama.cpp's API that others lack.
pub const NO_PROBS: &[Field] = &[neutral("n_probs", &[Neutral::Number(0.0)], "Use `logprobs`.")];

/// Fields about what answers report, and their number.
pub const REPORTS: &[Field] = &[
    field("n", Kind::Whole(1, i32::MAX as i64), "1", "Number of answers to each prompt."),
    field("timings_per_token", Kind::Flag, "false", "Add llama.cpp's `timings`; in a stream, to each part."),
    field(
        "return_token_ids",
        Kind::Flag,
        "false",
        "Add the ids of the prompt's and the answer's tokens, as vLLM does.",
    ),
    field(
        "prompt_logprobs",
        Kind::Whole(0, MAX_LOGPROBS),
        "",
        "Add the log probability of each prompt token and of this many most likely tokens, as vLLM does. Not in a stream.",
    ),
    neutral("return_hidden_states", &[Neutral::False], "Hidden states are not reported."),
    neutral("return_tokens_as_token_ids", &[Neutral::False], "Use `return_token_ids`."),
];

/// Maximum number of most likely tokens reported with each token.
pub const MAX_LOGPROBS: i64 = 20;

/// Fields of `stream_options`.
const STREAM_OPTIONS: &[Field] = &[
    field("include_usage", Kind::Flag, "false", "End with a part that has the usage."),
    field("continuous_usage_stats", Kind::Flag, "false", "With `include_usage`: the usage so far in every part."),
    neutral("include_obfuscation", &[Neutral::False], "Parts are not padded."),
];

/// The numbers, with OpenAI's bounds.
pub const NUMBERS: &[Field] = &number_rows(OPENAI_BOUNDS, "1");

/// Rows of the token limit under these names, of which the first present one counts.
pub const fn max_tokens_rows<const N: usize>(names: [&'static str; N], default: &'static str) -> [Field; N] {
    const DOC: &str = "Maximum number of generated tokens; -1: up to the context.";
    let mut rows = [field("", Kind::Whole(-1, NO_LIMIT), default, DOC); N];
    let mut at = 0;
    while at < N {
        rows[at].name = names[at];
        at += 1;
    }
    rows
}

/// Bounds of another API that differ from ours, by the number's name.
pub type OwnBounds = (&'static str, [f64; 2]);

/// Bounds of OpenAI's API that are narrower than ours, and -1 as in vLLM's and llama.cpp's.
const OPENAI_BOUNDS: &[OwnBounds] = &[
    ("temperature", [0.0, 2.0]),
    ("presence_penalty", [-2.0, 2.0]),
    ("frequency_penalty", [-2.0, 2.0]),
    ("top_k", [-1.0, u32::MAX as f64]),
    ("repeat_last_n", [-1.0, u32::MAX as f64]),
];

/// More tokens than fit in any context.
const NO_LIMIT: i64 = (1 << 31) - 1;

/// The numeric sampling options as rows. `own`: bounds that differ from ours.
pub const fn number_rows(own: &[OwnBounds], temperature: &'static str) -> [Field; GenerateOptions::NUMBERS.len()] {
    let mut rows = [field("", Kind::Flag, "", ""); GenerateOptions::NUMBERS.len()];
    let mut at = 0;
    while at < rows.len() {
        let number = &GenerateOptions::NUMBERS[at];
        let [least, most] = bounds_of(number.name, number.bounds, own);
        let kind = match number.is_whole {
            true => Kind::Whole(least as i64, most as i64),
            false => Kind::Number(least, most),
        };
        let default = if is_same(number.name, "temperature") { temperature } else { number.default };
        rows[at] = field(number.name, kind, default, doc_of(number.name));
        at += 1;
    }
    rows
}

/// The row of a name.
pub const fn row_of(rows: &[Field], name: &str) -> Field {
    let mut at = 0;
    while !is_same(rows[at].name, name) {
        at += 1;
    }
    rows[at]
}

const fn doc_of(name: &str) -> &'static str {
    let mut at = 0;
    while at < GenerateOptions::DOCS.len() {
        if is_same(GenerateOptions::DOCS[at].0, name) {
            return GenerateOptions::DOCS[at].1;
        }
        at += 1;
    }
    panic!("a number without documentation")
}

const fn bounds_of(name: &str, usual: [f64; 2], own: &[OwnBounds]) -> [f64; 2] {
    let mut at = 0;
    while at < own.len() {
        if is_same(own[at].0, name) {
            return own[at].1;
        }
        at += 1;
    }
    usual
}

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// A request's sampling parameters.
pub struct RequestSampling {
    pub choices: AnswerOptions,
    pub streams: bool,
    pub extras: Extras,
    pub run: RunOptions,
}

impl RequestSampling {
    /// Reads checked fields. `max_tokens` and `rows`: the endpoint's rows of the token limit and of the numbers.
    pub fn read(
        fields: Fields<'_>,
        limits: &Limits,
        max_tokens: &[Field],
        rows: &[Field],
    ) -> Result<RequestSampling, ApiError> {
        let n = fields.checked_whole("n").unwrap_or(1) as u64;
        if n > limits.choices as u64 {
            return Err(fields.wrong("n", &format!("a whole number from 1 to {}", limits.choices)));
        }
        let seed = seed_of(fields)?;
        let mut options = numbers(fields, rows);
        repetition_penalty(fields, &mut options)?;
        let options = GenerateOptions {
            max_tokens: max_tokens_of(fields, limits, max_tokens)?,
            min_tokens: fields.checked_whole("min_tokens").map_or(0, |n| n as usize),
            logit_bias: biases(fields)?,
            prompt_lookup: fields.checked_whole("prompt_lookup").map_or(0, |n| n as u32),
            stop: stops(fields, "stop", limits)?,
            stop_ids: ids_of(fields, "stop_token_ids")?,
            include_stop: ["include_stop_str_in_output", "no_stop_trim"]
                .iter()
                .any(|name| fields.checked_flag(name) == Some(true)),
            ignore_eos: fields.checked_flag("ignore_eos").unwrap_or(false),
            prompt_logprobs: prompt_logprobs(fields)?,
            skip_special_tokens: fields.checked_flag("skip_special_tokens").unwrap_or(true),
            ..options
        };
        options.check()?;
        let of_stream = |name: &str| {
            let asked = fields.get("stream_options").and_then(|asked| asked.get(name));
            asked.and_then(Json::as_bool).unwrap_or(false)
        };
        let streams = fields.checked_flag("stream").unwrap_or(false);
        let usage = of_stream("include_usage");
        let token_ids = fields.checked_flag("return_token_ids").unwrap_or(false);
        Ok(RequestSampling {
            choices: AnswerOptions {
                options,
                seeds: (0..n).map(|at| seed.map_or_else(drawn_seed, |seed| seed.wrapping_add(at))).collect(),
            },
            streams,
            extras: Extras {
                usage,
                continuous_usage: usage && of_stream("continuous_usage_stats"),
                timings: fields.checked_flag("timings_per_token").unwrap_or(false),
                token_ids,
                prompt_logprobs: fields.get("prompt_logprobs").is_some(),
            },
            run: RunOptions {
                // Lower numbers come first in vLLM, higher ones in the engine.
                priority: fields
                    .checked_whole("priority")
                    .map_or(0, |n| n.saturating_neg().min(i32::MAX.into()) as i32),
                reads_cache: fields.checked_flag("cache_prompt").unwrap_or(true),
                reports_ids: token_ids,
                // Clients that score a prompt expect one generated token after it (lm-eval drops the last).
                reports_ends: fields.checked_flag("echo").unwrap_or(false),
            },
        })
    }
}

fn prompt_logprobs(fields: Fields<'_>) -> Result<Option<u32>, ApiError> {
    let n = fields.checked_whole("prompt_logprobs").map(|n| n as u32);
    match n.is_some() && fields.checked_flag("stream") == Some(true) {
        true => Err(fields.wrong("prompt_logprobs", "none in a stream")),
        false => Ok(n),
    }
}

/// The token limit: of the first present row, or its default. Negative ones are no limit.
pub fn max_tokens_of(fields: Fields<'_>, limits: &Limits, rows: &[Field]) -> Result<usize, ApiError> {
    let limit = limits.max_tokens.map_or(NO_LIMIT, |most| most.try_into().unwrap_or(NO_LIMIT));
    let given = || rows.iter().filter_map(|row| Some((row.name, fields.checked_whole(row.name)?)));
    if let Some((name, found)) = given().find(|(_, found)| *found > limit) {
        let expected = format!("at most {limit}, the server's limit");
        return Err(ApiError::invalid(fields.name(name), Some(&found.into()), &expected));
    }
    let usual = || rows.first().and_then(|row| row.default.parse().ok());
    let n = given().next().map(|(_, n)| n).or_else(usual).filter(|&n| n >= 0);
    Ok(n.unwrap_or(NO_LIMIT).min(limit) as usize)
}

/// A seed; `None` if one is to be drawn.
pub fn seed_of(fields: Fields<'_>) -> Result<Option<u64>, ApiError> {
    Ok(fields.seed("seed")?.filter(|&seed| seed != u64::MAX))
}

/// A random seed of 32 bits, which clients in JavaScript can send back. The largest one asks llama.cpp's server to draw
/// one.
pub fn drawn_seed() -> u64 {
    random_seed() % u64::from(u32::MAX)
}

/// vLLM's name for `repeat_penalty`. There it covers the whole context.
fn repetition_penalty(fields: Fields<'_>, options: &mut GenerateOptions) -> Result<(), ApiError> {
    let Some(given) = fields.checked_number("repetition_penalty") else { return Ok(()) };
    if fields.checked_number("repeat_penalty").is_some_and(|other| other != given) {
        return Err(fields.wrong("repetition_penalty", "the value of repeat_penalty, its other name"));
    }
    options.repeat_penalty = given as f32;
    if fields.get("repeat_last_n").is_none() {
        options.repeat_last_n = i32::MAX as u32;
    }
    Ok(())
}

/// The numeric sampling options of checked fields; for those that are missing, the defaults of their rows. -1 disables
/// `top_k`, and is the whole context for `repeat_last_n`.
pub fn numbers(fields: Fields<'_>, rows: &[Field]) -> GenerateOptions {
    let mut options = GenerateOptions::default();
    for number in &GenerateOptions::NUMBERS {
        let Some(row) = rows.iter().find(|row| row.name == number.name) else { continue };
        if let Some(value) = fields.checked_number(number.name).or_else(|| row.default.parse().ok()) {
            let is_all = number.name == "repeat_last_n" && value < 0.0;
            (number.set)(&mut options, if is_all { f64::from(i32::MAX) } else { value });
        }
    }
    options
}

/// Rows with another default of one.
pub const fn with_default<const N: usize>(
    mut rows: [Field; N],
    name: &'static str,
    default: &'static str,
) -> [Field; N] {
    let mut at = 0;
    while at < N {
        if is_same(rows[at].name, name) {
            rows[at].default = default;
        }
        at += 1;
    }
    rows
}

/// A list of token ids.
pub fn ids_of(fields: Fields<'_>, field: &str) -> Result<Vec<u32>, ApiError> {
    let ids = fields.get(field).and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    schema::ids_of(ids)
        .filter(|ids| ids.len() <= MAX_IDS)
        .ok_or_else(|| fields.wrong(field, &format!("a list of at most {MAX_IDS} token ids")))
}

/// Maximum number of stop tokens.
const MAX_IDS: usize = 1024;

/// Reads stop strings.
pub fn stops(fields: Fields<'_>, field: &str, limits: &Limits) -> Result<Vec<String>, ApiError> {
    if fields.get(field).and_then(Json::as_array).is_some_and(Vec::is_empty) {
        return Ok(Vec::new());
    }
    let stops = fields.texts(field, limits.stops)?.unwrap_or_default();
    let most = GenerateOptions::MAX_STOP_BYTES;
    match stops.iter().all(|stop| (1..=most).contains(&stop.len())) {
        true => Ok(stops.into_iter().map(str::to_owned).collect()),
        false => {
            let expected = format!("a text or a list of texts, none of them empty or longer than {most} bytes");
            Err(fields.wrong(field, &expected))
        }
    }
}

fn biases(fields: Fields<'_>) -> Result<BTreeMap<u32, f32>, ApiError> {
    match fields.get("logit_bias") {
        Some(Json::Object(biases)) => biases.iter().map(|(id, bias)| bias_of(id, bias)).collect(),
        Some(Json::Array(pairs)) => pairs.iter().enumerate().map(bias_pair).collect(),
        _ => Ok(BTreeMap::new()),
    }
}

/// A bias by the token's id as a text.
fn bias_of(id: &str, bias: &Json) -> Result<(u32, f32), ApiError> {
    // A sign or leading zeros would spell the same token differently.
    let Some(number) = id.parse::<u32>().ok().filter(|number| number.to_string() == *id) else {
        let shown = Json::from(id.chars().take(60).collect::<String>());
        let message = format!("logit_bias has the key {shown}, expected a token's id");
        return Err(ApiError { message, ..ApiError::invalid("logit_bias", None, "") });
    };
    match bias.as_f64().filter(|bias| bias.abs() <= 100.0) {
        Some(bias) => Ok((number, bias as f32)),
        None => Err(ApiError::invalid(format!("logit_bias[\"{number}\"]"), Some(bias), "a number from -100 to 100")),
    }
}

/// llama.cpp's pair of a token's id and its bias, or `false`, which bans the token.
fn bias_pair((at, pair): (usize, &Json)) -> Result<(u32, f32), ApiError> {
    let read = || {
        let [id, bias] = pair.as_array()?.as_slice() else { return None };
        let bias = match bias {
            Json::Bool(false) => BAN,
            bias => bias.as_f64().filter(|bias| bias.abs() <= 100.0)?,
        };
        Some((id_of(id)?, bias as f32))
    };
    let expected = "a token's id and a bias of -100 to 100, or false to ban the token";
    read().ok_or_else(|| ApiError::invalid(format!("logit_bias[{at}]"), Some(pair), expected))
}

/// The bias of a banned token: the lowest that the engine accepts.
const BAN: f64 = -1000.0;
