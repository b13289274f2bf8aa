//! Sampling fields of OpenAI's requests, and the number of answers.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde_json::Value as Json;
use tilewright::generate::GenerateOptions;

use super::answers::AnswerOptions;
use super::errors::ApiError;
use super::fields::Fields;
use super::limits::Limits;

/// Fields that [`RequestSampling::read`] reads.
pub const FIELDS: &[&str] = &[
    "model",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
    "stream",
    "stream_options",
    "user",
    "top_k",
    "min_p",
    "repeat_penalty",
    "prompt_lookup",
    "cache_salt",
];

/// More tokens than fit in any context.
const NO_LIMIT: u64 = (1 << 31) - 1;

/// A request's sampling parameters.
pub struct RequestSampling {
    pub choices: AnswerOptions,
    pub streams: bool,
    pub with_usage: bool,
}

impl RequestSampling {
    /// Reads and checks the fields. `max_tokens` names the fields for the token limit, the first present one counts;
    /// the default is `usual`, or the available room.
    pub fn read(
        fields: Fields<'_>,
        limits: &Limits,
        max_tokens: &[&str],
        usual: Option<u64>,
    ) -> Result<RequestSampling, ApiError> {
        let n = fields.whole("n", 1, limits.choices as u64)?.unwrap_or(1);
        let seed = fields.seed("seed")?;
        let limit = limits.max_tokens.map_or(NO_LIMIT, |most| most as u64);
        let mut asked = None;
        for name in max_tokens {
            let found = fields.whole(name, 0, NO_LIMIT)?;
            asked = asked.or(found);
            if let Some(found) = found.filter(|&found| found > limit) {
                let expected = format!("at most {limit}, the server's limit");
                return Err(ApiError::invalid(fields.name(name), Some(&found.into()), &expected));
            }
        }
        let usual_options = GenerateOptions::default();
        let number = |field, least, most, usual: f32| {
            Ok::<f32, ApiError>(fields.number(field, least, most)?.map_or(usual, |number| number as f32))
        };
        let options = GenerateOptions {
            max_tokens: asked.or(usual).unwrap_or(NO_LIMIT).min(limit) as usize,
            temperature: number("temperature", 0.0, 2.0, 1.0)?,
            top_p: number("top_p", 0.0, 1.0, usual_options.top_p)?,
            top_k: fields.whole("top_k", 0, u64::from(u32::MAX))?.map_or(usual_options.top_k, |k| k as u32),
            min_p: number("min_p", 0.0, 1.0, usual_options.min_p)?,
            repeat_penalty: number("repeat_penalty", 0.0, 100.0, usual_options.repeat_penalty)?,
            presence_penalty: number("presence_penalty", -2.0, 2.0, 0.0)?,
            frequency_penalty: number("frequency_penalty", -2.0, 2.0, 0.0)?,
            logit_bias: biases(fields)?,
            prompt_lookup: fields.whole("prompt_lookup", 0, u64::from(GenerateOptions::MAX_DRAFT_TOKENS))?.unwrap_or(0)
                as u32,
            stop: stops(fields, "stop", limits)?,
            ..usual_options
        };
        options.check()?;
        fields.text("user")?;
        let streams = fields.flag("stream")?.unwrap_or(false);
        let with_usage = match fields.object("stream_options", "an object")? {
            Some(asked) => {
                let asked = Fields::within(asked, "stream_options.");
                asked.only(&[&["include_usage", "include_obfuscation"]])?;
                if asked.flag("include_obfuscation")? == Some(true) {
                    let name = "stream_options.include_obfuscation";
                    return Err(ApiError::unsupported(name, format!("{name} is not supported")));
                }
                asked.flag("include_usage")?.unwrap_or(false)
            }
            None => false,
        };
        let seeds = (0..n).map(|at| seed.map_or_else(random, |seed| seed.wrapping_add(at))).collect();
        Ok(RequestSampling { choices: AnswerOptions { options, seeds }, streams, with_usage })
    }
}

/// A random seed.
pub fn random() -> u64 {
    RandomState::new().hash_one(std::time::SystemTime::now())
}

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
    let mut biases = BTreeMap::new();
    for (id, bias) in fields.object("logit_bias", "an object of biases by token ids")?.into_iter().flatten() {
        // A sign or leading zeros would spell the same token differently.
        let number = id.parse::<u32>().ok().filter(|number| number.to_string() == *id);
        let Some(number) = number else {
            let shown = Json::from(id.chars().take(60).collect::<String>());
            let message = format!("logit_bias has the key {shown}, expected a token's id");
            let refusal = ApiError::invalid("logit_bias", None, "");
            return Err(ApiError { message, ..refusal });
        };
        let Some(value) = bias.as_f64().filter(|bias| bias.abs() <= 100.0) else {
            return Err(ApiError::invalid(
                format!("logit_bias[\"{number}\"]"),
                Some(bias),
                "a number from -100 to 100",
            ));
        };
        biases.insert(number, value as f32);
    }
    Ok(biases)
}
