//! `config.json` of a Hugging Face checkpoint as keys and values, without model knowledge.
//!
//! Keys are paths: `rope_scaling.factor` is `factor` in the object `rope_scaling`. `null` counts as absent, because
//! transformers writes `None` that way. It also writes `Infinity` and `NaN`, which JSON lacks: these parse, but match
//! none of the requested types.

use super::text::{FLOAT, JsonFault, read_json};
use super::{Error, Shown};
use serde_json::{Map, Value};

const FORMAT: &str = "config.json";
/// Published files are below 100 KiB even with thousands of class labels.
const MAX_BYTES: usize = 4 << 20;

/// The contents of a `config.json`.
///
/// Each `get_*` returns `None` for an absent key, and [`Error::Config`] naming the key for a value of another type or
/// a path through a non-object.
#[derive(Clone, Debug)]
pub struct ConfigJson {
    root: Map<String, Value>,
}

impl ConfigJson {
    /// Reads the file's bytes.
    ///
    /// # Errors
    /// [`Error::Format`] if the bytes are not one JSON object, nest more than 128 deep, or exceed 4 MiB.
    pub fn parse(json: &[u8]) -> Result<Self, Error> {
        let broken = |offset: usize, expected: &str, found: String| Error::Format {
            format: FORMAT,
            field: "file".into(),
            offset: offset as u64,
            expected: expected.into(),
            found,
        };
        if json.len() > MAX_BYTES {
            return Err(broken(MAX_BYTES, "at most 4 MiB", format!("{} bytes", json.len())));
        }
        let root = read_json(json).map_err(|JsonFault { offset, message }| broken(offset, "a JSON object", message))?;
        Ok(Self { root })
    }

    /// The value at `path`, of any type.
    ///
    /// # Errors
    /// [`Error::Config`] if the path passes through a non-object.
    pub fn get(&self, path: &str) -> Result<Option<&Value>, Error> {
        let mut object = &self.root;
        let mut keys = path.split('.').peekable();
        while let Some(key) = keys.next() {
            match object.get(key) {
                None | Some(Value::Null) => return Ok(None),
                Some(value) if keys.peek().is_none() => return Ok(Some(value)),
                Some(Value::Object(inner)) => object = inner,
                Some(other) => return Err(wrong(path, &format!("an object under `{key}`"), other)),
            }
        }
        Ok(None)
    }

    /// The object under `key` as a configuration, which inherits missing `shared` keys; `self` without that object.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is not an object.
    pub fn part(mut self, key: &str, shared: &[&str]) -> Result<ConfigJson, Error> {
        match self.root.remove(key) {
            None | Some(Value::Null) => Ok(self),
            Some(Value::Object(mut part)) => {
                for &name in shared {
                    if let Some(value) = self.root.remove(name) {
                        part.entry(name).or_insert(value);
                    }
                }
                Ok(ConfigJson { root: part })
            }
            Some(other) => Err(wrong(key, "an object", &other)),
        }
    }

    /// As [`ConfigJson::part`], where the object must be there.
    ///
    /// # Errors
    /// [`Error::Config`] if there is none.
    pub fn required_part(self, key: &str, shared: &[&str]) -> Result<ConfigJson, Error> {
        match self.root.get(key) {
            Some(Value::Object(_)) => self.part(key, shared),
            found => Err(wrong(key, "an object", found.unwrap_or(&Value::Null))),
        }
    }

    /// Adds a value, if there is one, unless the key has one.
    pub fn or_value(mut self, key: &str, value: Option<Value>) -> ConfigJson {
        if let Some(value) = value {
            self.root.entry(key).or_insert(value);
        }
        self
    }

    /// All of it.
    pub fn into_value(self) -> Value {
        Value::Object(self.root)
    }

    /// Adds missing keys from `defaults`, a JSON object.
    ///
    /// # Errors
    /// [`Error::Format`] if `defaults` is not an object.
    pub fn or_defaults(mut self, defaults: &str) -> Result<ConfigJson, Error> {
        for (key, value) in ConfigJson::parse(defaults.as_bytes())?.root {
            self.root.entry(key).or_insert(value);
        }
        Ok(self)
    }

    /// The path of the first value that satisfies `is_sought`, searching inside non-empty objects.
    pub fn find(&self, is_sought: impl Fn(&str, &Value) -> bool) -> Option<String> {
        let mut left: Vec<(String, &Value)> = self.root.iter().rev().map(|(key, value)| (key.clone(), value)).collect();
        while let Some((path, value)) = left.pop() {
            match value {
                _ if !is_sought(&path, value) => {}
                Value::Object(values) => {
                    left.extend(values.iter().rev().map(|(key, value)| (format!("{path}.{key}"), value)));
                }
                _ => return Some(path),
            }
        }
        None
    }

    /// An integer.
    pub fn get_u32(&self, path: &str) -> Result<Option<u32>, Error> {
        self.typed(path, "an integer from 0 to 4294967295", to_u32)
    }

    /// A number rounded to 32 bits; out of range is an error.
    pub fn get_f32(&self, path: &str) -> Result<Option<f32>, Error> {
        self.typed(path, "a number", to_f32)
    }

    /// A bool.
    pub fn get_bool(&self, path: &str) -> Result<Option<bool>, Error> {
        self.typed(path, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn get_str(&self, path: &str) -> Result<Option<&str>, Error> {
        self.typed(path, "a string", Value::as_str)
    }

    /// An array of integers.
    pub fn get_u32_array(&self, path: &str) -> Result<Option<Vec<u32>>, Error> {
        self.typed(path, "an array of integers from 0 to 4294967295", |value| {
            value.as_array()?.iter().map(to_u32).collect()
        })
    }

    /// An array of numbers, rounded to 32 bits.
    pub fn get_f32_array(&self, path: &str) -> Result<Option<Vec<f32>>, Error> {
        self.typed(path, "an array of numbers", |value| value.as_array()?.iter().map(to_f32).collect())
    }

    /// An array of strings.
    pub fn get_str_array(&self, path: &str) -> Result<Option<Vec<&str>>, Error> {
        self.typed(path, "an array of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    fn typed<'a, T>(
        &'a self,
        path: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(path)? else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| wrong(path, expected, value))
    }
}

fn to_u32(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn to_f32(value: &Value) -> Option<f32> {
    Some(value.as_f64()? as f32).filter(|number| number.is_finite())
}

fn wrong(path: &str, expected: &str, found: &Value) -> Error {
    let found = match found {
        Value::Array(elements) => format!("an array of {}", elements.len()),
        Value::Object(values) => match values.get(FLOAT).and_then(Value::as_str) {
            Some(float) => Shown(float).to_string(),
            None => "an object".into(),
        },
        Value::String(text) => format!("\"{}\"", Shown(text)),
        scalar => scalar.to_string(),
    };
    Error::Config { field: path.into(), expected: expected.into(), found }
}
