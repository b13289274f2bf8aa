//! Reads a request's fields, checking type and range. `null` counts as missing.

use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value as Json};

use super::errors::ApiError;
use super::schema::whole_of;

/// Names of fields that a lenient server ignores instead of refusing them.
#[derive(Debug, Default)]
pub struct IgnoredFields(Mutex<Vec<String>>);

impl IgnoredFields {
    /// The names, in the order of the request.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// An object of a request.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    object: &'a Map<String, Json>,
    /// The object's path in errors, with a trailing dot; empty for the request itself.
    path: &'a str,
    /// Set on a lenient server.
    ignored: Option<&'a IgnoredFields>,
}

impl<'a> Fields<'a> {
    /// The request's top-level fields. `ignored`: set on a lenient server.
    ///
    /// # Errors
    /// If it is not an object.
    pub fn of(request: &'a Json, ignored: Option<&'a IgnoredFields>) -> Result<Fields<'a>, ApiError> {
        let object = request
            .as_object()
            .ok_or_else(|| ApiError { param: None, ..ApiError::invalid("the request", Some(request), "an object") })?;
        Ok(Fields { object, path: "", ignored })
    }

    /// Fields of an object that no table checks.
    pub fn within(object: &'a Map<String, Json>, path: &'a str) -> Fields<'a> {
        Fields { object, path, ignored: None }
    }

    /// Fields of a nested object.
    pub fn inside<'b>(&self, object: &'b Map<String, Json>, path: &'b str) -> Fields<'b>
    where
        'a: 'b,
    {
        Fields { object, path, ignored: self.ignored }
    }

    /// All fields that are not `null`.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Json)> {
        self.object.iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.as_str(), value))
    }

    /// Notes a field as ignored on a lenient server; otherwise refuses it by its shortened name.
    ///
    /// # Errors
    /// That of `refusal`.
    pub fn ignore_or(&self, field: &str, refusal: impl FnOnce(String) -> ApiError) -> Result<(), ApiError> {
        let name = self.name(&field.chars().take(60).collect::<String>());
        match self.ignored {
            Some(IgnoredFields(names)) => {
                names.lock().unwrap_or_else(PoisonError::into_inner).push(name);
                Ok(())
            }
            None => Err(refusal(name)),
        }
    }

    /// A field's name in errors.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
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

    /// A number of a checked field.
    pub fn checked_number(&self, field: &str) -> Option<f64> {
        self.get(field).and_then(Json::as_f64)
    }

    /// An integer of a checked field.
    pub fn checked_whole(&self, field: &str) -> Option<i64> {
        self.get(field).and_then(whole_of)
    }

    /// `true` or `false` of a checked field.
    pub fn checked_flag(&self, field: &str) -> Option<bool> {
        self.get(field).and_then(Json::as_bool)
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
