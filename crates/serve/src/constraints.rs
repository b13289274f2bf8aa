//! The constraint on an answer, under OpenAI's, vLLM's and llama.cpp's names.

use serde_json::{Map, Value as Json};
use tilewright::grammar::Constraint;

use super::conversation::constraint_of;
use super::errors::ApiError;
use super::fields::Fields;
use super::schema::{Field, Kind, Neutral, field, neutral};

const SCHEMA: Kind = Kind::Other(&["object", "string"], "a JSON schema");
const CHOICE: Kind = Kind::Other(&["array"], "a list of texts");

/// Fields that constrain the answer. One of them may be given.
pub const FIELDS: &[Field] = &[
    field(
        "response_format",
        Kind::Other(&["object"], "an object with the type text, json_object or json_schema"),
        r#"{"type": "text"}"#,
        "JSON, by a schema or any. Schemas are enforced whether `strict` or not.",
    ),
    field("structured_outputs", Kind::Object(&[STRUCTURED]), "", "vLLM's constraint: one of its fields."),
    field("guided_json", SCHEMA, "", "vLLM's older name of `structured_outputs.json`."),
    field("guided_regex", Kind::Text, "", "vLLM's older name of `structured_outputs.regex`."),
    field("guided_choice", CHOICE, "", "vLLM's older name of `structured_outputs.choice`."),
    field("guided_grammar", Kind::Text, "", "vLLM's older name of `structured_outputs.grammar`."),
    neutral("guided_decoding_backend", &[Neutral::AnyText], "There is one backend."),
    neutral("guided_whitespace_pattern", &[Neutral::Empty], "White space is a space, or a line break and indentation."),
    field("regex", Kind::Text, "", "SGLang's name of a regular expression."),
    field("ebnf", Kind::Text, "", "SGLang's name of a grammar."),
    field("json_schema", SCHEMA, "", "llama.cpp's name of a JSON schema."),
    field("grammar", Kind::Text, "", "llama.cpp's grammar, in GBNF; also Lark's syntax."),
    neutral("grammar_lazy", &[Neutral::False], "A grammar covers the whole answer."),
    neutral("grammar_triggers", &[Neutral::Empty], "A grammar covers the whole answer."),
];

/// Fields of vLLM's `structured_outputs`.
const STRUCTURED: &[Field] = &[
    field("json", SCHEMA, "", "A JSON schema."),
    field("json_object", Kind::Flag, "false", "Any JSON object."),
    field("regex", Kind::Text, "", "A regular expression that matches the whole answer, without assertions."),
    field("choice", CHOICE, "", "The answer is one of these texts."),
    field("grammar", Kind::Text, "", "A grammar in GBNF or Lark's syntax."),
    neutral("structural_tag", &[Neutral::Empty], "No structural tags."),
    neutral("whitespace_pattern", &[Neutral::Empty], "White space is a space, or a line break and indentation."),
    neutral("disable_any_whitespace", &[Neutral::False], "White space is a space, or a line break and indentation."),
    neutral("disable_fallback", &[Neutral::AnyFlag], "There is one backend."),
    neutral("disable_additional_properties", &[Neutral::False], "The schema decides."),
];

/// Fields and the kinds of their constraints, as in [`STRUCTURED`].
const NAMES: &[(&str, &str)] = &[
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("regex", "regex"),
    ("ebnf", "grammar"),
    ("json_schema", "json"),
    ("grammar", "grammar"),
];

/// The constraint of checked fields.
///
/// # Errors
/// `invalid_value` for more than one; errors naming a field.
pub fn constraint(fields: Fields<'_>) -> Result<Option<Constraint>, ApiError> {
    let format = constraint_of(fields.get("response_format"), "response_format", "/json_schema/schema")?;
    let mut found: Option<(String, Constraint)> = format.map(|constraint| ("response_format".into(), constraint));
    let none = Map::new();
    let structured = fields.get("structured_outputs").and_then(Json::as_object).unwrap_or(&none);
    let structured = fields.inside(structured, "structured_outputs.");
    let own = NAMES.iter().copied();
    let nested = ["json", "json_object", "regex", "choice", "grammar"].map(|name| (structured, name, name));
    for (fields, name, kind) in own.map(|(name, kind)| (fields, name, kind)).chain(nested) {
        let Some(constraint) = one(fields, name, kind)? else { continue };
        let name = fields.name(name);
        match &found {
            Some((other, _)) => {
                let message = format!("{other} and {name} both constrain the answer, expected one of them");
                return Err(ApiError { message, ..ApiError::invalid(name, None, "") });
            }
            None => found = Some((name, constraint)),
        }
    }
    Ok(found.map(|(_, constraint)| constraint))
}

/// The error of a constraint that cannot be used, with its name in the request.
pub fn named(error: ApiError, fields: Fields<'_>) -> ApiError {
    let Some(reason) = error.message.strip_prefix("constraint: ") else { return error };
    let (kind, reason) = reason.split_at(reason.find([':', ' ']).unwrap_or(reason.len()));
    let nested = [("structured_outputs", "json"), ("structured_outputs", "regex"), ("structured_outputs", "choice")]
        .into_iter()
        .chain([("structured_outputs", "grammar"), ("text", "format"), ("output_config", "format")])
        .filter(|(outer, inner)| fields.get(outer).and_then(|outer| outer.get(inner)).is_some_and(|one| !one.is_null()))
        .map(|(outer, inner)| format!("{outer}.{inner}"));
    let own = NAMES.iter().map(|(name, _)| *name).filter(|name| fields.get(name).is_some_and(|one| one != ""));
    let formats = ["response_format", "output_format", "format"].into_iter().filter(|name| fields.get(name).is_some());
    let param = match kind {
        "tools" => Some(kind.to_owned()),
        _ => own.map(str::to_owned).chain(nested).chain(formats.map(str::to_owned)).next(),
    };
    let message = format!("{}{reason}", param.as_deref().unwrap_or(kind));
    ApiError { message, param, ..error }
}

fn one(fields: Fields<'_>, name: &str, kind: &str) -> Result<Option<Constraint>, ApiError> {
    let Some(value) = fields.get(name) else { return Ok(None) };
    Ok(match (kind, value) {
        ("json", Json::String(text)) => {
            Some(Constraint::json_schema(text).map_err(|_| fields.wrong(name, "a JSON schema"))?)
        }
        ("json", schema) => Some(Constraint::JsonSchema(schema.clone())),
        ("json_object", value) => (value == true).then_some(Constraint::JsonObject),
        ("choice", value) => Some(choice(value).ok_or_else(|| fields.wrong(name, "a list of one text or more"))?),
        ("regex", Json::String(text)) => Some(Constraint::Regex(text.clone())),
        // An empty grammar is llama.cpp's default.
        ("grammar", Json::String(text)) if text.is_empty() => None,
        ("grammar", Json::String(text)) => Some(Constraint::grammar_of(text.clone())),
        _ => return Err(fields.wrong(name, "a text")),
    })
}

/// A constraint to one of several texts.
fn choice(texts: &Json) -> Option<Constraint> {
    let texts = texts.as_array().filter(|texts| !texts.is_empty())?;
    let texts: Option<Vec<String>> = texts.iter().map(|text| Some(escaped(text.as_str()?))).collect();
    Some(Constraint::Regex(texts?.join("|")))
}

/// A regular expression that matches this text.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if r"\.+*?()|[]{}^$#&-~/".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}
