//! Sampling fields of OpenAI's requests, and the number of answers.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde_json::Value as Json;
use tilewright::generate::GenerateOptions;

use super::answers::AnswerOptions;
use super::errors::ApiError;
use super::fields::Fields;
use super::limits::Limits;

/// Fields that [`RequestSampling::read`] reads, besides [`GenerateOptions::NUMBERS`].
pub const FIELDS: &[&str] =
    &["model", "stop", "seed", "logit_bias", "n", "stream", "stream_options", "user", "prompt_lookup", "cache_salt"];

/// Bounds of OpenAI's API that are narrower than ours.
const OPENAI_BOUNDS: &[(&str, [f64; 2])] =
    &[("temperature", [0.0, 2.0]), ("presence_penalty", [-2.0, 2.0]), ("frequency_penalty", [-2.0, 2.0])];

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
        let mut options = GenerateOptions { temperature: 1.0, ..GenerateOptions::default() };
        numbers(fields, OPENAI_BOUNDS, &mut options)?;
        let options = GenerateOptions {
            max_tokens: asked.or(usual).unwrap_or(NO_LIMIT).min(limit) as usize,
            logit_bias: biases(fields)?,
            prompt_lookup: fields.whole("prompt_lookup", 0, u64::from(GenerateOptions::MAX_DRAFT_TOKENS))?.unwrap_or(0)
                as u32,
            stop: stops(fields, "stop", limits)?,
            ..options
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

/// Names of the numeric sampling options.
pub fn number_names() -> [&'static str; GenerateOptions::NUMBERS.len()] {
    GenerateOptions::NUMBERS.map(|number| number.name)
}

/// Reads the numeric sampling options. `own`: bounds that differ from ours.
pub fn numbers(fields: Fields<'_>, own: &[(&str, [f64; 2])], options: &mut GenerateOptions) -> Result<(), ApiError> {
    for number in &GenerateOptions::NUMBERS {
        let [least, most] = own.iter().find(|(name, _)| *name == number.name).map_or(number.bounds, |(_, own)| *own);
        let given = match number.is_whole && least >= 0.0 {
            true => fields.whole(number.name, least as u64, most as u64)?.map(|n| n as f64),
            false => fields.number(number.name, least, most)?,
        };
        if let Some(given) = given {
            (number.set)(options, given);
        }
    }
    Ok(())
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
