//! JSON schemas as people write them: made up from a seed, and those of tools.

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
/// None of them allows texts of any length.
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

/// A schema of at most `depth` levels more.
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
    // What else there may be is counted where all that is named is there.
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

/// The schema of a seed.
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
        // A list that ends somewhere: each node is followed by another one or by none.
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
