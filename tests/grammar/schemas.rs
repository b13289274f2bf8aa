//! Realistic JSON schemas, generated from a seed, and those of tools.

use serde_json::{Map, Value, json};

use crate::common::Rng;

const NAMES: [&str; 16] = [
    "name",
    "age",
    "city",
    "tags",
    "price",
    "id",
    "kind",
    "items",
    "email",
    "created_at",
    "is_active",
    "größe",
    "unit",
    "max tokens",
    "a/b",
    "value",
];
const WORDS: [&str; 8] = ["red", "green", "blue", "on", "off", "north east", "it's \"so\"", "naïve"];
/// All with bounded length.
const PATTERNS: [&str; 8] = [
    "^[a-z]{2,6}$",
    "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$",
    r"^\d{3}-\d{4}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^v\d{1,2}\.\d{1,2}\.\d{1,3}$",
    "^(yes|no|maybe)$",
    r"^\+?[0-9]{5,9}$",
    "^[äöüß]{1,4}$",
];
const FORMATS: [&str; 8] = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration"];

/// A schema with at most `depth` further levels.
fn schema(rng: &mut Rng, depth: usize) -> Value {
    let n_kinds = if depth == 0 { 9 } else { 15 };
    match rng.below(n_kinds) {
        0 => {
            let least = rng.below(4);
            json!({"type": "string", "minLength": least, "maxLength": least + rng.below(12)})
        }
        1 => json!({"type": "string", "pattern": PATTERNS[rng.below(PATTERNS.len())]}),
        2 => json!({"type": "string", "format": FORMATS[rng.below(FORMATS.len())], "maxLength": 40}),
        3 => json!({"enum": some(rng, &WORDS)}),
        4 => {
            let values = [json!(7), json!("fixed"), json!(true), json!(null), json!([1, {"a": "b"}])];
            json!({"const": values[rng.below(values.len())]})
        }
        5 => {
            let lowest = rng.below(2000) as i64 - 1000;
            let mut integer = json!({"type": "integer", "minimum": lowest, "maximum": lowest + rng.below(5000) as i64});
            if rng.below(3) == 0 {
                integer =
                    json!({"type": "integer", "minimum": 0, "exclusiveMaximum": 1000, "multipleOf": 1 + rng.below(12)});
            }
            integer
        }
        6 => {
            let lowest = rng.below(200) as f64 / 4.0 - 25.0;
            json!({"type": "number", "minimum": lowest, "maximum": lowest + 0.5 + rng.below(40) as f64})
        }
        7 => json!({"type": ["boolean", "null"]}),
        8 => json!({"type": ["string", "null", "integer"], "maxLength": 6, "minimum": 0, "maximum": 99}),
        9 | 10 => object(rng, depth - 1),
        11 => {
            let least = rng.below(2);
            json!({"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + rng.below(3)})
        }
        12 => {
            let first: Vec<Value> = (0..1 + rng.below(2)).map(|_| schema(rng, depth - 1)).collect();
            json!({"type": "array", "minItems": first.len(), "prefixItems": first, "items": false})
        }
        13 => json!({"anyOf": [schema(rng, depth - 1), {"type": "null"}, schema(rng, depth - 1)]}),
        _ => json!({"$ref": format!("#/$defs/{}", ["point", "list"][rng.below(2)])}),
    }
}

/// Some of these, at least one.
fn some(rng: &mut Rng, all: &[&str]) -> Vec<Value> {
    let first = rng.below(all.len());
    (0..1 + rng.below(3)).map(|i| json!(all[(first + i) % all.len()])).collect()
}

fn object(rng: &mut Rng, depth: usize) -> Value {
    let mut properties = Map::new();
    for _ in 0..rng.below(5) {
        properties.insert(NAMES[rng.below(NAMES.len())].into(), schema(rng, depth));
    }
    // With additional properties all named ones are required, so that the limit bounds the others.
    let is_open = rng.below(4) == 0;
    let required: Vec<&String> = properties.keys().filter(|_| is_open || rng.below(3) > 0).collect();
    let most = properties.len() + 2;
    let mut object = json!({"type": "object", "properties": properties, "required": required});
    object["additionalProperties"] = json!(false);
    if is_open {
        object["additionalProperties"] = json!({"type": "boolean"});
        object["maxProperties"] = json!(most);
    }
    object
}

/// The schema for a seed.
pub fn generated(seed: u64) -> Value {
    let mut rng = Rng::new(seed);
    let mut root = match rng.below(4) {
        0 => json!({"oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "is": schema(&mut rng, 1)},
             "required": ["kind", "is"], "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"], "additionalProperties": false},
            {"type": "integer", "minimum": 1, "maximum": 9},
        ]}),
        1 => schema(&mut rng, 2),
        _ => object(&mut rng, 2),
    };
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    root["$defs"] = json!({
        "point": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 640}, "y": {"$ref": "#/$defs/small"}},
                  "required": ["x", "y"], "additionalProperties": false},
        "small": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        // A finite list: each node is followed by another one or by none.
        "list": {"type": "object", "properties": {"head": {"type": "boolean"}, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}},
                 "required": ["head"], "additionalProperties": false},
    });
    root
}

/// Arguments of tools.
pub fn tools() -> Vec<Value> {
    vec![
        json!({"type": "object", "properties": {
            "location": {"type": "string", "description": "City and state, e.g. San Francisco, CA", "maxLength": 30},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["location"], "additionalProperties": false}),
        json!({"type": "object", "properties": {
            "query": {"type": "string", "minLength": 1, "maxLength": 40},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
            "filters": {"type": "array", "maxItems": 3, "items": {"type": "object", "properties": {
                "field": {"enum": ["title", "author", "year"]}, "op": {"enum": ["=", "<", ">"]},
                "value": {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "integer", "minimum": 0, "maximum": 9999}]}},
                "required": ["field", "op", "value"], "additionalProperties": false}}},
            "required": ["query"], "additionalProperties": false}),
        json!({"type": "object", "properties": {
            "to": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "string", "format": "email", "maxLength": 24}},
            "subject": {"type": "string", "maxLength": 20}, "body": {"type": "string", "maxLength": 60},
            "send_at": {"type": ["string", "null"], "format": "date-time", "maxLength": 40}},
            "required": ["to", "subject", "body", "send_at"], "additionalProperties": false}),
        json!({"anyOf": [
            {"type": "object", "properties": {"name": {"const": "get_time"}, "arguments": {"type": "object", "additionalProperties": false}},
             "required": ["name", "arguments"], "additionalProperties": false},
            {"type": "object", "properties": {"name": {"const": "add"}, "arguments": {"type": "object", "properties": {
                "a": {"type": "number", "minimum": -1000, "maximum": 1000}, "b": {"type": "number", "minimum": -1000, "maximum": 1000}},
                "required": ["a", "b"], "additionalProperties": false}},
             "required": ["name", "arguments"], "additionalProperties": false}]}),
        json!({"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/call"}, "$defs": {
            "call": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^call_[a-zA-Z0-9]{8}$"},
                "function": {"enum": ["read_file", "write_file", "list"]}, "path": {"type": "string", "pattern": "^(/[a-z0-9_.]{1,8}){1,3}$"}},
                "required": ["id", "function", "path"], "additionalProperties": false}}}),
        json!({"type": "object", "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "amount": {"type": "integer", "minimum": 1},
            "price": {"type": "number", "minimum": 0, "maximum": 10000, "multipleOf": 0.01},
            "address": {"type": "object", "properties": {
                "street": {"type": "string", "maxLength": 20}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"type": "string", "enum": ["AT", "CH", "DE", "FR", "JP", "US"]}},
                "required": ["street", "zip", "country"], "additionalProperties": false}},
            "required": ["sku", "amount", "price", "address"], "additionalProperties": false}),
        json!({"type": "object", "patternProperties": {"^x_[a-z]{1,4}$": {"type": "integer", "minimum": 0, "maximum": 9}},
            "additionalProperties": false, "maxProperties": 3}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 50}, "b": {"type": "boolean"}}, "required": ["b"]}],
            "properties": {"a": {}, "b": {}}, "additionalProperties": false}),
    ]
}

/// Arbitrary combinations of keywords, including ineffective, contradictory and unenforceable ones.
pub fn mixed(seed: u64) -> Value {
    let mut rng = Rng::new(seed ^ 0xA5A5);
    mix(&mut rng, 2)
}

fn mix(rng: &mut Rng, depth: usize) -> Value {
    const SHORT: [&str; 4] = ["a", "b", "ab", "s"];
    const NAMED: [&str; 6] = ["^s$", "^[ab]$", "^(a|b)$", "^a", "b$", "^x[0-9]$"];
    let sub = |rng: &mut Rng| match (depth, rng.below(6)) {
        (0, 0) | (_, 1) => json!(rng.below(4) > 0),
        (0, _) | (_, 2) => leaf(rng),
        _ => mix(rng, depth - 1),
    };
    let mut schema = Map::new();
    for _ in 0..1 + rng.below(5) {
        let small = rng.below(4);
        let (key, value) = match rng.below(36) {
            0..=2 => ("type", json!(["object", "array", "string", "integer", "number", "boolean"][rng.below(6)])),
            3 => ("type", json!([["object", "null"], ["string", "array"], ["integer", "string"]][rng.below(3)])),
            4..=6 => {
                let names = some(rng, &SHORT);
                let members = names.iter().map(|name| (name.as_str().unwrap().to_owned(), sub(rng)));
                ("properties", Value::Object(members.collect()))
            }
            7 => (
                "required",
                some(rng, &SHORT).into_iter().fold(json!([]), |mut all, name| {
                    let list = all.as_array_mut().unwrap();
                    if !list.contains(&name) {
                        list.push(name);
                    }
                    all
                }),
            ),
            8 | 9 => ("additionalProperties", sub(rng)),
            10 | 11 => ("patternProperties", json!({NAMED[rng.below(NAMED.len())]: sub(rng)})),
            12 => ("minProperties", json!(small)),
            13 => ("maxProperties", json!(small)),
            14 => (
                "propertyNames",
                [
                    json!({"type": "string"}),
                    json!({}),
                    json!({"pattern": "^[ab]$"}),
                    json!({"enum": ["a", "s"]}),
                    json!({"maxLength": 2}),
                ][rng.below(5)]
                .clone(),
            ),
            15 => ("unevaluatedProperties", sub(rng)),
            16 => ("items", sub(rng)),
            17 => ("prefixItems", json!([sub(rng)])),
            18 => ("minItems", json!(small)),
            19 => ("maxItems", json!(small)),
            20 => ("uniqueItems", json!(rng.below(3) == 0)),
            21 => ("contains", sub(rng)),
            22 => ("minContains", json!(small)),
            23 => ("unevaluatedItems", sub(rng)),
            24 => ("not", [json!(false), json!({}), json!({"not": {}}), json!({"type": "null"})][rng.below(4)].clone()),
            25 => ("if", sub(rng)),
            26 => (["then", "else"][rng.below(2)], sub(rng)),
            27 => ("dependentRequired", [json!({}), json!({"a": []}), json!({"a": ["b"]})][rng.below(3)].clone()),
            28 => (["allOf", "anyOf"][rng.below(2)], json!([sub(rng), sub(rng)])),
            29 => ("oneOf", json!([sub(rng), false])),
            30 => ("format", json!(["int64", "date", "uuid", "password", "ipv6", "regex"][rng.below(6)])),
            31 => ("pattern", json!(["^a$", "^[a-c]{2,3}$", "b"][rng.below(3)])),
            32 => ("minLength", json!(small)),
            33 => ("maxLength", json!(small as f64)),
            34 => ("enum", json!([1, "a", "ab", {"a": 1}, [1], null])),
            _ => {
                let (key, value) = [
                    ("minimum", json!(2)),
                    ("maximum", json!(9.5)),
                    ("multipleOf", json!(5)),
                    ("exclusiveMinimum", json!(0)),
                ][rng.below(4)]
                .clone();
                (key, value)
            }
        };
        schema.insert(key.into(), value);
    }
    schema.into()
}

/// A schema whose texts are short.
fn leaf(rng: &mut Rng) -> Value {
    [
        json!({"type": "integer", "minimum": 0, "maximum": 9}),
        json!({"const": "x"}),
        json!({"type": "string", "maxLength": 3}),
        json!({"type": "boolean"}),
        json!({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}),
    ][rng.below(5)]
    .clone()
}

/// Schemas with ineffective keywords.
pub fn neutral() -> Vec<Value> {
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let object = |more: Value| {
        let mut schema =
            json!({"type": "object", "properties": {"s": digit}, "required": ["s"], "additionalProperties": false});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    vec![
        object(json!({"properties": {"s": {"type": "string", "format": "int64", "maxLength": 4}}})),
        object(json!({"properties": {"s": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 99}}})),
        object(
            json!({"propertyNames": {"type": "string"}, "unevaluatedProperties": true, "minProperties": 0, "maxProperties": 4}),
        ),
        object(json!({"propertyNames": {}, "dependentRequired": {}, "dependentSchemas": {"s": true}, "not": false})),
        object(json!({"patternProperties": {"^s$": {"type": "integer"}}})),
        object(json!({"patternProperties": {"^(s|t)$": digit}, "minProperties": 1.0})),
        object(json!({"if": {"required": ["s"]}, "else": true, "then": {}, "not": {"not": true}})),
        object(json!({"$dynamicAnchor": "node", "uniqueItems": true, "minContains": 3, "then": false})),
        json!({"type": "array", "items": {"const": 1}, "uniqueItems": false, "maxItems": 2}),
        json!({"type": "array", "items": digit, "contains": {}, "minContains": 1, "maxItems": 2, "unevaluatedItems": false}),
        json!({"type": "array", "prefixItems": [digit], "unevaluatedItems": false, "contains": digit, "minContains": 0}),
        json!({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": digit}),
        json!({"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": digit, "maxProperties": 2}),
        json!({"type": "object", "properties": {"s": digit}, "unevaluatedProperties": false, "maxProperties": 1}),
        json!({"type": "string", "maxLength": 3.0, "uniqueItems": true, "propertyNames": false, "dependentRequired": {"a": ["b"]}}),
    ]
}
