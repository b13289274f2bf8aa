//! Removes or rewrites redundant keywords of a schema.
//!
//! llguidance refuses keywords that it does not enforce, even if they allow everything, and interprets some
//! differently. This module rewrites a schema with supported keywords and refuses what would be enforced wrongly.

use serde_json::{Map, Value, json};

use super::limits::Excess;

/// Enforced formats. Others are annotations (JSON Schema 2020-12, validation, 7.2.1).
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Keywords that may refuse a value. A schema without them allows everything.
const ASSERTIONS: [&str; 43] = [
    "$dynamicRef",
    "$recursiveRef",
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Keywords that apply to one type only, of those that are not enforced everywhere.
const OF_KINDS: [(&str, &[&str]); 2] = [
    ("array", &["contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"]),
    (
        "object",
        &[
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "maxProperties",
            "minProperties",
            "propertyNames",
            "unevaluatedProperties",
        ],
    ),
];

/// Keywords that apply further schemas to the same value, which count as evaluating it.
const IN_PLACE: [&str; 11] = [
    "$dynamicRef",
    "$recursiveRef",
    "$ref",
    "allOf",
    "anyOf",
    "dependencies",
    "dependentSchemas",
    "if",
    "not",
    "oneOf",
    "then",
];

/// Keywords with integers, which may be written as 2.0.
const COUNTS: [&str; 8] =
    ["maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties"];

/// Calls `visit` for each direct subschema, not for data.
pub(super) fn each_schema(
    keywords: &mut Map<String, Value>,
    visit: &mut impl FnMut(&mut Value) -> Result<(), Excess>,
) -> Result<(), Excess> {
    const MAPS: [&str; 6] =
        ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
    const LISTS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
    const SCHEMAS: [&str; 11] = [
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ];
    for (key, value) in keywords.iter_mut() {
        let key = key.as_str();
        match value {
            Value::Object(members) if MAPS.contains(&key) => members.values_mut().try_for_each(&mut *visit)?,
            Value::Array(schemas) if LISTS.contains(&key) => schemas.iter_mut().try_for_each(&mut *visit)?,
            Value::Object(_) | Value::Bool(_) if SCHEMAS.contains(&key) => visit(value)?,
            _ => {}
        }
    }
    Ok(())
}

/// Rewrites a schema with enforced keywords. Its depth was checked.
///
/// # Errors
/// Keywords that would be enforced wrongly.
pub(super) fn simplify(schema: &mut Value) -> Result<(), Excess> {
    let Value::Object(keywords) = schema else { return Ok(()) };
    each_schema(keywords, &mut simplify)?;
    characters(keywords)?;
    for key in COUNTS {
        let whole = keywords.get(key).and_then(Value::as_f64).filter(|number| number.fract() == 0.0);
        if let Some(whole) = whole.filter(|whole| (0.0..9e15).contains(whole)) {
            keywords.insert(key.into(), (whole as u64).into());
        }
    }
    // References to these are refused.
    for key in ["$dynamicAnchor", "$recursiveAnchor"] {
        keywords.shift_remove(key);
    }
    if keywords.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        keywords.shift_remove("format");
    }
    for (kind, of_kind) in OF_KINDS {
        if !may_be(keywords, kind) {
            keywords.retain(|key, _| !of_kind.contains(&key.as_str()));
        }
    }
    multiples(keywords);
    conditions(keywords);
    arrays(keywords);
    objects(keywords)?;
    match keywords.get("not") {
        Some(not) if is_never(not) => {
            keywords.shift_remove("not");
        }
        // The root stays an object if it has options or definitions.
        Some(not) if is_always(not) && !keywords.keys().any(|key| key.starts_with('$') || key == "definitions") => {
            *schema = false.into();
        }
        _ => {}
    }
    Ok(())
}

/// Refuses control characters without a short JSON escape: `\u` is not generated, since names could then be spelled
/// in two ways. Character classes may contain them.
fn characters(keywords: &Map<String, Value>) -> Result<(), Excess> {
    let refused = |of| Excess {
        of,
        expected: "characters without `\\u` escapes in JSON".into(),
        found: "a control character".into(),
    };
    for of in ["const", "enum"] {
        let mut rest: Vec<&Value> = keywords.get(of).into_iter().collect();
        while let Some(value) = rest.pop() {
            match value {
                Value::String(text) if text.chars().any(is_control) => return Err(refused(of)),
                Value::Array(values) => rest.extend(values),
                Value::Object(members) => rest.extend(members.values()),
                _ => {}
            }
        }
    }
    let names = keywords.get("patternProperties").and_then(Value::as_object);
    let patterns = keywords.get("pattern").and_then(Value::as_str).into_iter();
    match patterns.chain(names.into_iter().flat_map(Map::keys).map(String::as_str)).any(has_control) {
        true => Err(refused("pattern")),
        false => Ok(()),
    }
}

fn is_control(c: char) -> bool {
    c == '\x7F' || (c < ' ' && !matches!(c, '\x08' | '\t' | '\n' | '\x0C' | '\r'))
}

/// Whether a pattern has such a character outside a class.
fn has_control(pattern: &str) -> bool {
    let mut chars = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(c) = chars.next() {
        let found = match c {
            '\\' => match chars.next() {
                Some('0') => '\0',
                Some('a' | 'c') => '\x07',
                Some('v') => '\x0B',
                Some(kind @ ('x' | 'u')) => {
                    let n_digits = match chars.next_if_eq(&'{') {
                        Some(_) => 8,
                        None if kind == 'x' => 2,
                        None => 4,
                    };
                    let digit = std::iter::from_fn(|| chars.next_if(char::is_ascii_hexdigit));
                    let code = u32::from_str_radix(&digit.take(n_digits).collect::<String>(), 16);
                    code.ok().and_then(char::from_u32).unwrap_or(' ')
                }
                _ => ' ',
            },
            '[' => {
                in_class = true;
                ' '
            }
            ']' => {
                in_class = false;
                ' '
            }
            c => c,
        };
        if !in_class && is_control(found) {
            return true;
        }
    }
    false
}

/// Whether a schema allows everything.
fn is_always(schema: &Value) -> bool {
    match schema {
        Value::Object(keywords) => !keywords.keys().any(|key| ASSERTIONS.contains(&key.as_str())),
        other => *other == true,
    }
}

/// Whether a schema obviously allows nothing.
fn is_never(schema: &Value) -> bool {
    match schema {
        Value::Object(keywords) => keywords.get("not").is_some_and(is_always),
        other => *other == false,
    }
}

/// Whether the schema allows this type.
fn may_be(keywords: &Map<String, Value>, kind: &str) -> bool {
    match keywords.get("type") {
        Some(Value::String(found)) => found == kind,
        Some(Value::Array(kinds)) => kinds.iter().any(|found| found == kind),
        _ => true,
    }
}

fn count(keywords: &Map<String, Value>, key: &str) -> Option<u64> {
    keywords.get(key).and_then(Value::as_u64)
}

fn take_if(keywords: &mut Map<String, Value>, key: &str, is_neutral: impl FnOnce(&Value) -> bool) {
    if keywords.get(key).is_some_and(is_neutral) {
        keywords.shift_remove(key);
    }
}

/// Limits multiples to 10^15, or less with decimal places: 64-bit floats do not have all digits of larger ones.
fn multiples(keywords: &mut Map<String, Value>) {
    const MAX_DIGITS: u32 = 15;
    let Some(of) = keywords.get("multipleOf").and_then(Value::as_f64) else { return };
    let places = of.to_string().split_once('.').map_or(0, |(_, places)| places.len() as u32);
    let most = 10_i64.pow(MAX_DIGITS.saturating_sub(places));
    let limits = [("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)];
    for (limit, exclusive, sign) in limits {
        let given = [limit, exclusive].into_iter().filter_map(|key| keywords.get(key)?.as_f64());
        if !given.map(|given| given * f64::from(sign)).any(|given| given <= most as f64) {
            keywords.insert(limit.into(), (most * i64::from(sign)).into());
        }
    }
}

fn conditions(keywords: &mut Map<String, Value>) {
    take_if(keywords, "then", is_always);
    take_if(keywords, "else", is_always);
    let found = match keywords.get("if") {
        None => None,
        Some(condition) if is_always(condition) => Some("then"),
        Some(condition) if is_never(condition) => Some("else"),
        Some(_) if ["then", "else"].iter().any(|key| keywords.contains_key(*key)) => return,
        Some(_) => None,
    };
    let mut part = |key: &str| keywords.shift_remove(key);
    let applied = found.and_then(&mut part);
    ["if", "then", "else"].into_iter().for_each(|key| drop(part(key)));
    if let Some(applied) = applied {
        match keywords.entry("allOf").or_insert_with(|| json!([])) {
            Value::Array(all) => all.push(applied),
            other => *other = json!([applied]),
        }
    }
}

fn arrays(keywords: &mut Map<String, Value>) {
    let items_is_list = keywords.get("items").is_some_and(Value::is_array);
    if !items_is_list {
        keywords.shift_remove("additionalItems");
    }
    if !keywords.contains_key("contains") {
        keywords.shift_remove("minContains");
        keywords.shift_remove("maxContains");
    }
    if count(keywords, "minContains") == Some(0) && !keywords.contains_key("maxContains") {
        keywords.shift_remove("contains");
        keywords.shift_remove("minContains");
    }
    if keywords.get("contains").is_some_and(is_always) {
        let least = count(keywords, "minContains").unwrap_or(1).max(count(keywords, "minItems").unwrap_or(0));
        let most = [count(keywords, "maxContains"), count(keywords, "maxItems")].into_iter().flatten().min();
        for key in ["contains", "minContains", "maxContains"] {
            keywords.shift_remove(key);
        }
        keywords.insert("minItems".into(), least.into());
        keywords.extend(most.map(|most| ("maxItems".to_owned(), most.into())));
    }
    let is_short = count(keywords, "maxItems").is_some_and(|most| most <= 1);
    take_if(keywords, "uniqueItems", |unique| *unique == false || is_short);
    take_if(keywords, "unevaluatedItems", is_always);
    let looks_elsewhere = IN_PLACE.iter().any(|key| keywords.contains_key(*key));
    if !items_is_list && keywords.contains_key("items") {
        keywords.shift_remove("unevaluatedItems");
    } else if !items_is_list
        && !looks_elsewhere
        && !keywords.contains_key("contains")
        && let Some(rest) = keywords.shift_remove("unevaluatedItems")
    {
        keywords.insert("items".into(), rest);
    }
}

fn objects(keywords: &mut Map<String, Value>) -> Result<(), Excess> {
    let has_none = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let all = |value: &Value, is_neutral: &dyn Fn(&Value) -> bool| {
        value.as_object().is_some_and(|members| members.values().all(is_neutral))
    };
    take_if(keywords, "dependentRequired", |value| all(value, &has_none));
    take_if(keywords, "dependentSchemas", |value| all(value, &is_always));
    take_if(keywords, "dependencies", |value| all(value, &|value| has_none(value) || is_always(value)));
    take_if(keywords, "unevaluatedProperties", is_always);
    if keywords.contains_key("additionalProperties") {
        keywords.shift_remove("unevaluatedProperties");
    } else if !IN_PLACE.iter().any(|key| keywords.contains_key(*key))
        && let Some(rest) = keywords.shift_remove("unevaluatedProperties")
    {
        keywords.insert("additionalProperties".into(), rest);
    }
    names(keywords);
    listed_names(keywords);
    let members = |key: &str| keywords.get(key).and_then(Value::as_object);
    let mut required: Vec<&str> =
        keywords.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    required.sort_unstable();
    required.dedup();
    let n_required = required.len() as u64;
    let is_closed = keywords.get("additionalProperties").is_some_and(is_never)
        && members("patternProperties").is_none_or(Map::is_empty);
    let properties = members("properties");
    let n_properties = properties.map_or(0, Map::len) as u64
        + required.iter().filter(|name| properties.is_none_or(|all| !all.contains_key(**name))).count() as u64;
    take_if(keywords, "minProperties", |least| least.as_u64().is_some_and(|least| least <= n_required));
    take_if(keywords, "maxProperties", |most| is_closed && most.as_u64().is_some_and(|most| most >= n_properties));
    match count(keywords, "minProperties") {
        // A name could appear twice but count once.
        Some(least) if !is_closed && least > n_required + 1 => Err(Excess {
            of: "minProperties",
            expected: "at most one more than `required`, if other names are allowed".into(),
            found: format!("{least}, with {n_required} required"),
        }),
        _ => Ok(()),
    }
}

/// Replaces patterns that list names by properties: a pattern with all its names taken would be a dead end.
fn listed_names(keywords: &mut Map<String, Value>) {
    let Some(Value::Object(patterns)) = keywords.get_mut("patternProperties") else { return };
    let listed: Vec<String> = patterns.keys().filter(|pattern| names_of(pattern).is_some()).cloned().collect();
    let listed: Vec<(String, Value)> =
        listed.into_iter().filter_map(|pattern| Some((pattern.clone(), patterns.shift_remove(&pattern)?))).collect();
    if listed.is_empty() {
        return;
    }
    if patterns.is_empty() {
        keywords.shift_remove("patternProperties");
    }
    let Value::Object(properties) = keywords.entry("properties").or_insert_with(|| json!({})) else { return };
    for (pattern, schema) in listed {
        for name in names_of(&pattern).unwrap_or_default() {
            let own = properties.get_mut(name).map(Value::take);
            let both = own.map_or(schema.clone(), |own| json!({"allOf": [own, schema]}));
            properties.insert(name.into(), both);
        }
    }
}

/// The names in a pattern such as `^a$` or `^(a|b)$`.
fn names_of(pattern: &str) -> Option<Vec<&str>> {
    let within = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let group = within.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
    let group = group.map(|rest| rest.strip_prefix("?:").unwrap_or(rest));
    let names: Vec<&str> = match group {
        Some(group) => group.split('|').collect(),
        None => vec![within],
    };
    let is_plain = |name: &&str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_- ".contains(c));
    names.iter().all(is_plain).then_some(names)
}

/// Rewrites `propertyNames` as properties and patterns.
fn names(keywords: &mut Map<String, Value>) {
    let Some(mut names) = keywords.get("propertyNames").cloned() else { return };
    if let Some(of_names) = names.as_object_mut() {
        // Names are always strings.
        if may_be(of_names, "string") {
            of_names.shift_remove("type");
        }
        take_if(of_names, "minLength", |least| *least == 0);
    }
    if is_always(&names) {
        keywords.shift_remove("propertyNames");
        return;
    }
    let has_names = ["properties", "patternProperties"].iter().any(|key| keywords.contains_key(*key));
    let looks_elsewhere = IN_PLACE.iter().any(|key| keywords.contains_key(*key));
    let Value::Object(of_names) = names else { return };
    let mut said = of_names.iter().filter(|(key, _)| ASSERTIONS.contains(&key.as_str()));
    let (Some((key, value)), None, false, false) = (said.next(), said.next(), has_names, looks_elsewhere) else {
        return;
    };
    let rest = || keywords.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
    let (key, members) = match (key.as_str(), value) {
        ("pattern", Value::String(pattern)) => ("patternProperties", Map::from_iter([(pattern.clone(), rest())])),
        ("enum", Value::Array(names)) => {
            let names = names.iter().filter_map(Value::as_str);
            ("properties", names.map(|name| (name.to_owned(), rest())).collect())
        }
        ("const", Value::String(name)) => ("properties", Map::from_iter([(name.clone(), rest())])),
        _ => return,
    };
    keywords.shift_remove("propertyNames");
    keywords.insert(key.into(), members.into());
    keywords.insert("additionalProperties".into(), false.into());
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::simplify;

    /// Each with the equivalent schema.
    #[test]
    fn schema_keywords_without_effect_are_removed() {
        for (given, expected) in [
            (json!({"type": "string", "format": "int64"}), json!({"type": "string"})),
            (json!({"items": true, "uniqueItems": false}), json!({"items": true})),
            (json!({"uniqueItems": true, "maxItems": 1.0}), json!({"maxItems": 1})),
            (json!({"type": "string", "uniqueItems": true}), json!({"type": "string"})),
            (json!({"propertyNames": {"type": "string", "title": "a name"}}), json!({})),
            (json!({"propertyNames": {"format": "none"}, "unevaluatedProperties": {"description": "x"}}), json!({})),
            (json!({"not": false, "if": {"type": "null"}, "then": true}), json!({})),
            (json!({"not": {"not": {}}, "else": false}), json!({})),
            (json!({"properties": {"a": {"not": {}}}}), json!({"properties": {"a": false}})),
            (json!({"if": {}, "then": {"type": "null"}, "else": false}), json!({"allOf": [{"type": "null"}]})),
            (json!({"contains": {"type": "null"}, "minContains": 0}), json!({})),
            (json!({"contains": true, "maxContains": 3}), json!({"minItems": 1, "maxItems": 3})),
            (
                json!({"dependentRequired": {"a": []}, "dependentSchemas": {"b": {}}, "dependencies": {"c": []}}),
                json!({}),
            ),
            (json!({"minProperties": 1, "required": ["a"]}), json!({"required": ["a"]})),
            (json!({"additionalProperties": false, "maxProperties": 2}), json!({"additionalProperties": false})),
            (json!({"unevaluatedProperties": false}), json!({"additionalProperties": false})),
            (
                json!({"propertyNames": {"enum": ["a"]}}),
                json!({"properties": {"a": true}, "additionalProperties": false}),
            ),
            (
                json!({"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}}),
                json!({"additionalProperties": false, "patternProperties": {"^a": {"type": "null"}}}),
            ),
            (
                json!({"properties": {"a": {"type": "null"}}, "patternProperties": {"^(a|b)$": {"maximum": 3}}}),
                json!({"properties": {"a": {"allOf": [{"type": "null"}, {"maximum": 3}]}, "b": {"maximum": 3}}}),
            ),
            (
                json!({"multipleOf": 0.25, "minimum": 0}),
                json!({"multipleOf": 0.25, "minimum": 0, "maximum": 10_000_000_000_000_i64}),
            ),
            // Data and names are not keywords.
            (json!({"const": {"uniqueItems": false}}), json!({"const": {"uniqueItems": false}})),
            (json!({"properties": {"not": {"not": false}}}), json!({"properties": {"not": {}}})),
        ] {
            let mut found = given.clone();
            assert!(simplify(&mut found).is_ok(), "{given}");
            assert_eq!(found, expected, "{given}");
        }
    }

    #[test]
    fn schema_with_control_characters_is_refused() {
        for schema in [
            json!({"const": "a\u{0}"}),
            json!({"enum": [1, {"a": ["\u{7f}"]}]}),
            json!({"pattern": r"^a\x00b$"}),
            json!({"items": {"pattern": r"\u{1b}\["}}),
            json!({"patternProperties": {r"^\v": true}}),
        ] {
            assert!(simplify(&mut schema.clone()).is_err(), "{schema}");
        }
        for schema in [
            json!({"const": "a\n\t\u{8}", "pattern": r"^[^\x00-\x1F\x7F]*\t\x41\u00e4$"}),
            json!({"properties": {"\u{1}": true}, "default": "\u{0}"}),
        ] {
            assert!(simplify(&mut schema.clone()).is_ok(), "{schema}");
        }
    }

    #[test]
    fn schema_keywords_with_effect_are_kept() {
        for schema in [
            json!({"uniqueItems": true}),
            json!({"not": {"type": "null"}}),
            json!({"propertyNames": {"maxLength": 3}}),
            json!({"if": {"type": "null"}, "then": false}),
            json!({"allOf": [{"properties": {"a": true}}], "unevaluatedProperties": false}),
            json!({"contains": {"type": "null"}}),
            json!({"minProperties": 1}),
            json!({"format": "uuid"}),
        ] {
            let mut found = schema.clone();
            assert!(simplify(&mut found).is_ok(), "{schema}");
            assert_eq!(found, schema);
        }
        let mut never: Value = json!({"patternProperties": {"^a": true}, "minProperties": 2});
        assert!(simplify(&mut never).is_err_and(|excess| excess.of == "minProperties"));
    }
}
