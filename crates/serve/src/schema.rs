//! The table of endpoints and the fields of their requests. Requests are checked by it ([`Fields::check`]), and
//! `/openapi.json` and docs/api.md are made from it.
//!
//! An endpoint is a constant in its own module: method, path, summary, and groups of rows, some of which it shares with
//! other endpoints. [`openapi::ENDPOINTS`](super::openapi) lists them all.

use serde_json::{Map, Value as Json, json};
use strsim::generic_levenshtein;

use super::errors::{ApiError, shown};
use super::fields::Fields;

/// The media type of JSON.
pub const JSON: &str = "application/json";

/// The media type of forms with files.
pub const FORM: &str = "multipart/form-data";

/// An endpoint.
#[derive(Debug)]
pub struct Endpoint {
    pub method: &'static str,
    pub path: &'static str,
    pub summary: &'static str,
    /// Media type of its request.
    pub media: &'static str,
    /// Rows of its request, in groups; none for an endpoint without a body.
    pub fields: &'static [&'static [Field]],
}

impl Endpoint {
    /// An endpoint that reads no body.
    pub const fn get(path: &'static str, summary: &'static str) -> Endpoint {
        Endpoint { method: "get", path, summary, media: JSON, fields: &[] }
    }

    /// An endpoint that reads an object with these fields.
    pub const fn post(path: &'static str, summary: &'static str, fields: &'static [&'static [Field]]) -> Endpoint {
        Endpoint { method: "post", path, summary, media: JSON, fields }
    }

    /// An endpoint that reads a form with these fields.
    pub const fn form(path: &'static str, summary: &'static str, fields: &'static [&'static [Field]]) -> Endpoint {
        Endpoint { method: "post", path, summary, media: FORM, fields }
    }
}

/// A field of a request.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    /// The default, as JSON or in words; empty: nothing.
    pub default: &'static str,
    /// One sentence or more.
    pub doc: &'static str,
    pub is_required: bool,
}

/// An optional field. `default`: as JSON or in words; empty: nothing.
pub const fn field(name: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Field {
    Field { name, kind, default, doc, is_required: false }
}

/// A required field.
pub const fn required(name: &'static str, kind: Kind, doc: &'static str) -> Field {
    Field { name, kind, default: "", doc, is_required: true }
}

/// A field without support: only values that change nothing pass.
pub const fn neutral(name: &'static str, values: &'static [Neutral], doc: &'static str) -> Field {
    field(name, Kind::Only(values), "", doc)
}

/// A field's type and range.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Flag,
    /// A number within these bounds.
    Number(f64, f64),
    /// An integer within these bounds; a fraction of zero is allowed.
    Whole(i64, i64),
    Text,
    /// A file of a form, which the endpoint reads; its value is the file's name.
    File,
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// An object with these fields, in groups.
    Object(&'static [&'static [Field]]),
    /// Values of these JSON types, in words; the endpoint checks the rest.
    Other(&'static [&'static str], &'static str),
    /// Only these values, which change nothing.
    Only(&'static [Neutral]),
}

/// A value, or a kind of value, that changes nothing.
#[derive(Clone, Copy, Debug)]
pub enum Neutral {
    False,
    True,
    Number(f64),
    Text(&'static str),
    /// An empty text, list or object.
    Empty,
    /// A list that has only this text.
    Only(&'static str),
    /// A list of these texts in this order, with any of `idle` between them.
    InOrder {
        texts: &'static [&'static str],
        idle: &'static [&'static str],
    },
    AnyFlag,
    AnyNumber,
    AnyText,
    AnyObject,
}

impl Neutral {
    fn is(&self, value: &Json) -> bool {
        match self {
            Neutral::False => value == false,
            Neutral::True => value == true,
            Neutral::Number(number) => value.as_f64() == Some(*number),
            Neutral::Text(text) => value == text,
            Neutral::Empty => match value {
                Json::String(text) => text.is_empty(),
                Json::Array(list) => list.is_empty(),
                Json::Object(object) => object.is_empty(),
                _ => false,
            },
            Neutral::Only(text) => value.as_array().is_some_and(|list| list.iter().all(|one| one == text)),
            Neutral::InOrder { texts, idle } => value.as_array().is_some_and(|list| {
                let is_idle = |one: &&Json| one.as_str().is_some_and(|one| idle.contains(&one));
                list.iter().filter(|one| !is_idle(one)).eq(texts.iter())
            }),
            Neutral::AnyFlag => value.is_boolean(),
            Neutral::AnyNumber => value.is_number(),
            Neutral::AnyText => value.is_string(),
            Neutral::AnyObject => value.is_object(),
        }
    }

    fn words(&self) -> String {
        match self {
            Neutral::False => "false".into(),
            Neutral::True => "true".into(),
            Neutral::Number(number) => number.to_string(),
            Neutral::Text(text) => format!("{text:?}"),
            Neutral::Empty => "an empty value".into(),
            Neutral::Only(text) => format!("[{text:?}]"),
            Neutral::InOrder { texts, .. } => format!("{texts:?}"),
            Neutral::AnyFlag => "true or false".into(),
            Neutral::AnyNumber => "a number".into(),
            Neutral::AnyText => "a text".into(),
            Neutral::AnyObject => "an object".into(),
        }
    }

    fn schema(&self) -> Json {
        match self {
            Neutral::False => json!({"const": false}),
            Neutral::True => json!({"const": true}),
            Neutral::Number(number) => json!({"const": number_json(*number)}),
            Neutral::Text(text) => json!({"const": text}),
            Neutral::Empty => json!({"maxLength": 0, "maxItems": 0, "maxProperties": 0}),
            Neutral::Only(text) => json!({"type": "array", "items": {"const": text}}),
            Neutral::InOrder { texts, idle } => {
                let all = [*texts, *idle].concat();
                json!({"type": "array", "items": {"enum": all}})
            }
            Neutral::AnyFlag => json!({"type": "boolean"}),
            Neutral::AnyNumber => json!({"type": "number"}),
            Neutral::AnyText => json!({"type": "string"}),
            Neutral::AnyObject => json!({"type": "object"}),
        }
    }
}

/// A number as JSON, without a fraction where it has none.
fn number_json(number: f64) -> Json {
    if number.fract() == 0.0 && number.abs() < 1e15 { (number as i64).into() } else { number.into() }
}

/// Whether a value has this JSON type.
fn has_type(value: &Json, name: &str) -> bool {
    match name {
        "boolean" => value.is_boolean(),
        "integer" | "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

/// An integer, also one written with a fraction of zero, if it is exact in every language.
pub fn whole_of(value: &Json) -> Option<i64> {
    const MAX_EXACT: f64 = ((1u64 << 53) - 1) as f64;
    let exact = |number: &f64| number.fract() == 0.0 && number.abs() <= MAX_EXACT;
    value.as_i64().or_else(|| value.as_f64().filter(exact).map(|number| number as i64))
}

/// A list of token ids.
pub fn ids_of(list: &[Json]) -> Option<Vec<u32>> {
    list.iter().map(id_of).collect()
}

/// A token's id.
pub fn id_of(value: &Json) -> Option<u32> {
    whole_of(value).and_then(|id| u32::try_from(id).ok())
}

impl Kind {
    /// What is expected, in words.
    pub fn words(&self) -> String {
        match self {
            Kind::Flag => "true or false".into(),
            Kind::Number(least, most) => format!("a number from {least} to {most}"),
            Kind::Whole(least, most) => format!("a whole number from {least} to {most}"),
            Kind::Text => "a text".into(),
            Kind::File => "a file".into(),
            Kind::OneOf(texts) => texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", "),
            Kind::Object(_) => "an object".into(),
            Kind::Other(_, words) => (*words).into(),
            Kind::Only(values) => values.iter().map(Neutral::words).collect::<Vec<_>>().join(" or "),
        }
    }

    fn is(&self, value: &Json) -> bool {
        match self {
            Kind::Flag => value.is_boolean(),
            Kind::Number(least, most) => value.as_f64().is_some_and(|number| (*least..=*most).contains(&number)),
            Kind::Whole(least, most) => whole_of(value).is_some_and(|number| (*least..=*most).contains(&number)),
            Kind::Text | Kind::File => value.is_string(),
            Kind::OneOf(texts) => value.as_str().is_some_and(|text| texts.contains(&text)),
            Kind::Object(_) => value.is_object(),
            Kind::Other(types, _) => types.iter().any(|name| has_type(value, name)),
            Kind::Only(values) => values.iter().any(|neutral| neutral.is(value)),
        }
    }

    /// Its JSON Schema.
    fn schema(&self) -> Json {
        match self {
            Kind::Flag => json!({"type": "boolean"}),
            Kind::Number(least, most) => {
                json!({"type": "number", "minimum": number_json(*least), "maximum": number_json(*most)})
            }
            Kind::Whole(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
            Kind::Text => json!({"type": "string"}),
            Kind::File => json!({"type": "string", "format": "binary"}),
            Kind::OneOf(texts) => json!({"type": "string", "enum": texts}),
            Kind::Object(rows) => object_schema(rows),
            Kind::Other([one], _) => json!({"type": one}),
            Kind::Other(types, _) => json!({"type": types}),
            Kind::Only([one]) => one.schema(),
            Kind::Only(values) => json!({"anyOf": values.iter().map(Neutral::schema).collect::<Vec<_>>()}),
        }
    }
}

impl Field {
    /// Its JSON Schema. `x-expected` has the type and range in words; `x-unsupported` is set where only values that
    /// change nothing pass.
    fn schema(&self) -> Json {
        let mut schema = self.kind.schema();
        schema["description"] = self.doc.trim().into();
        schema["x-expected"] = self.kind.words().into();
        if let Kind::Only(_) = self.kind {
            schema["x-unsupported"] = true.into();
        }
        match serde_json::from_str::<Json>(self.default) {
            Ok(default) => schema["default"] = default,
            Err(_) if !self.default.is_empty() => schema["x-default"] = self.default.into(),
            Err(_) => {}
        }
        schema
    }
}

/// The JSON Schema of an object with these fields. Other fields are refused.
pub fn object_schema(rows: &[&[Field]]) -> Json {
    let all = || rows.iter().copied().flatten();
    let properties: Map<String, Json> = all().map(|row| (row.name.to_owned(), row.schema())).collect();
    let required: Vec<&str> = all().filter(|row| row.is_required).map(|row| row.name).collect();
    let mut schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema
}

impl<'a> Fields<'a> {
    /// Checks names, types and ranges. A server started with `--lenient` notes unknown fields and values without
    /// support as ignored.
    ///
    /// # Errors
    /// `unsupported_value` and `invalid_value`, naming the field.
    pub fn check(&self, rows: &[&[Field]]) -> Result<(), ApiError> {
        let all = || rows.iter().copied().flatten();
        for (name, value) in self.entries() {
            match all().find(|row| row.name == name) {
                None => self.ignore_or(name, |shown_name| unknown(&shown_name, name, all()))?,
                Some(Field { kind: Kind::Object(nested), .. }) => {
                    let path = format!("{}.", self.name(name));
                    if let Some(inner) = self.object(name, "an object")? {
                        self.inside(inner, &path).check(nested)?;
                    }
                }
                Some(row) if row.kind.is(value) => {}
                Some(row @ Field { kind: Kind::Only(_), .. }) => {
                    self.ignore_or(name, |name| row.unsupported(name, value))?;
                }
                Some(row) => return Err(self.wrong(name, &row.kind.words())),
            }
        }
        match all().find(|row| row.is_required && self.get(row.name).is_none()) {
            Some(row) => Err(self.wrong(row.name, &row.kind.words())),
            None => Ok(()),
        }
    }
}

impl Field {
    fn unsupported(&self, name: String, value: &Json) -> ApiError {
        let message = format!(
            "{name} is {}, which is not supported; leave it out or send {}",
            shown(Some(value)),
            self.kind.words()
        );
        ApiError::unsupported(name, message)
    }
}

/// The refusal of an unknown field, with the nearest known one.
fn unknown<'r>(shown_name: &str, name: &str, rows: impl Iterator<Item = &'r Field>) -> ApiError {
    let plain = plain(name);
    let supported: Vec<&Field> = rows.filter(|row| !matches!(row.kind, Kind::Only(_))).collect();
    let near = supported.iter().map(|row| (generic_levenshtein(&plain, &self::plain(row.name)), row.name)).min();
    // A third of the letters may be wrong.
    let near = near.filter(|(distance, _)| 3 * distance <= plain.len());
    let holder = supported.iter().find(|row| match row.kind {
        Kind::Object(nested) => nested.iter().copied().flatten().any(|inner| inner.name == name),
        _ => false,
    });
    let hint = match (holder, near) {
        (Some(holder), _) => format!("did you mean `{}.{name}`?", holder.name),
        (None, Some((_, near))) => format!("did you mean `{near}`?"),
        (None, None) => "GET /openapi.json lists the supported fields".into(),
    };
    ApiError::unsupported(shown_name, format!("{shown_name} is not supported; {hint}"))
}

/// A name for comparison: `maxTokens` and `max-tokens` are spellings of `max_tokens`.
fn plain(name: &str) -> Vec<u8> {
    let letters = name.bytes().filter(|byte| !matches!(byte, b'_' | b'-' | b'.'));
    letters.take(60).map(|byte| byte.to_ascii_lowercase()).collect()
}
