//! Reads a request's fields, checking type and range. `null` counts as missing.

use serde_json::{Map, Value as Json};

use super::errors::ApiError;

/// The largest integer that is exact in every language.
const MAX_EXACT: u64 = (1 << 53) - 1;

/// An object of a request.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    object: &'a Map<String, Json>,
    /// The object's path in errors, with a trailing dot; empty for the request itself.
    path: &'a str,
}

impl<'a> Fields<'a> {
    /// The request's top-level fields.
    ///
    /// # Errors
    /// If it is not an object.
    pub fn of(request: &'a Json) -> Result<Fields<'a>, ApiError> {
        let object = request
            .as_object()
            .ok_or_else(|| ApiError { param: None, ..ApiError::invalid("the request", Some(request), "an object") })?;
        Ok(Fields { object, path: "" })
    }

    /// Fields of a nested object.
    pub fn within(object: &'a Map<String, Json>, path: &'a str) -> Fields<'a> {
        Fields { object, path }
    }

    /// A field's name in errors.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// Refuses fields that are not in `known`, unless their value asks for nothing.
    ///
    /// # Errors
    /// `unsupported_value` naming the field.
    pub fn only(&self, known: &[&[&str]]) -> Result<(), ApiError> {
        for (field, value) in self.object {
            let is_known = known.iter().any(|names| names.contains(&field.as_str()));
            if !is_known && !value.is_null() && !is_neutral(field, value) {
                let name = self.name(&field.chars().take(60).collect::<String>());
                return Err(ApiError::unsupported(&name, format!("{name} is not supported")));
            }
        }
        Ok(())
    }

    /// A field's value.
    pub fn get(&self, field: &str) -> Option<&'a Json> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// An error about a field.
    pub fn wrong(&self, field: &str, expected: &str) -> ApiError {
        ApiError::invalid(self.name(field), self.get(field), expected)
    }

    fn read<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl FnOnce(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(field, expected))
    }

    /// A number within these bounds.
    pub fn number(&self, field: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let expected = format!("a number from {least} to {most}");
        self.read(field, &expected, |value| value.as_f64().filter(|number| (least..=most).contains(number)))
    }

    /// An integer within these bounds; a fraction of zero is allowed.
    pub fn whole(&self, field: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let expected = format!("a whole number from {least} to {most}");
        let read = |value: &Json| {
            let exact = |number: &f64| number.fract() == 0.0 && (0.0..=MAX_EXACT as f64).contains(number);
            let number = value.as_u64().or_else(|| value.as_f64().filter(exact).map(|number| number as u64));
            number.filter(|number| (least..=most).contains(number))
        };
        self.read(field, &expected, read)
    }

    /// A seed: any 64-bit integer, signed or unsigned.
    pub fn seed(&self, field: &str) -> Result<Option<u64>, ApiError> {
        let read = |value: &Json| {
            // A number written with `.0` was rounded; so is the end of the range in OpenAI's own description.
            let whole = |number: &f64| number.fract() == 0.0 && number.abs() <= -(i64::MIN as f64);
            let signed = value.as_i64().map(|seed| seed as u64).or_else(|| value.as_u64());
            signed.or_else(|| value.as_f64().filter(whole).map(|seed| seed as i64 as u64))
        };
        self.read(field, "a whole number from -2^63 to 2^63", read)
    }

    /// `true` or `false`.
    pub fn flag(&self, field: &str) -> Result<Option<bool>, ApiError> {
        self.read(field, "true or false", Json::as_bool)
    }

    /// A text.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(field, "a text", Json::as_str)
    }

    /// A required text.
    pub fn some_text(&self, field: &str) -> Result<&'a str, ApiError> {
        self.text(field)?.ok_or_else(|| self.wrong(field, "a text"))
    }

    /// A list.
    pub fn list(&self, field: &str, expected: &str) -> Result<Option<&'a [Json]>, ApiError> {
        self.read(field, expected, |value| value.as_array().map(Vec::as_slice))
    }

    /// An object.
    pub fn object(&self, field: &str, expected: &str) -> Result<Option<&'a Map<String, Json>>, ApiError> {
        self.read(field, expected, Json::as_object)
    }

    /// A text or a list of at most `most` texts.
    pub fn texts(&self, field: &str, most: usize) -> Result<Option<Vec<&'a str>>, ApiError> {
        let expected = format!("a text or a list of 1 to {most} texts");
        self.read(field, &expected, |value| match value {
            Json::String(text) => Some(vec![text.as_str()]),
            Json::Array(list) if (1..=most).contains(&list.len()) => list.iter().map(Json::as_str).collect(),
            _ => None,
        })
    }
}

/// Whether an unknown field has no effect: it has the default value of OpenAI's or Ollama's API, or is the client's
/// own metadata.
fn is_neutral(field: &str, value: &Json) -> bool {
    let is_empty = || match value {
        Json::String(text) => text.is_empty(),
        Json::Array(list) => list.is_empty(),
        Json::Object(object) => object.is_empty(),
        _ => false,
    };
    match field {
        "store" | "background" | "vocab_only" | "logits_all" => value == false,
        // Ollama's default: no list of the most likely tokens.
        "logprobs" => value == false,
        "top_logprobs" => value == 0,
        "service_tier" => value == "auto" || value == "default",
        // Overlong prompts are always refused, never truncated.
        "truncation" => value == "disabled" || value == "auto",
        "truncate" | "shift" => value.is_boolean(),
        "modalities" => value.as_array().is_some_and(|list| list.iter().all(|kind| kind == "text")),
        "verbosity" => value == "medium",
        // As many answers as are returned.
        "best_of" => value == 1,
        "prompt_cache_retention" => value == "in_memory" || value == "in-memory",
        "function_call" => value == "none" || value == "auto",
        // Limits built-in tools, which this server does not have.
        "max_tool_calls" => value.as_u64().is_some_and(|n| n > 0),
        // Ollama's disabled samplers.
        "mirostat" => value == 0,
        "mirostat_tau" | "mirostat_eta" => value.is_number(),
        "tfs_z" | "typical_p" => value.as_f64() == Some(1.0),
        "penalize_newline" | "f16_kv" => value.is_boolean(),
        // Client metadata.
        "metadata" => value.is_object(),
        "prompt_cache_key" | "safety_identifier" => value.is_string(),
        "functions"
        | "suffix"
        | "previous_response_id"
        | "context_management"
        | "images"
        | "context"
        | "system"
        | "template" => is_empty(),
        _ => false,
    }
}
