//! Realistic lists of tools.

use serde_json::{Value, json};

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}})
}

/// Sets of tools. All valid calls are finite, if long.
pub fn sets() -> Vec<Vec<Value>> {
    let weather = tool(
        "get_weather",
        json!({"type": "object", "properties": {
            "location": {"type": "string", "description": "City and state, e.g. Boston, MA", "maxLength": 24},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["location"]}),
    );
    let time = json!({"type": "function", "function": {"name": "get_time", "description": "The time."}});
    let calculator = tool(
        "calculate",
        json!({"type": "object", "properties": {
            "a": {"type": "number"}, "b": {"type": "number"}, "op": {"enum": ["+", "-", "*", "/"]},
            "digits": {"type": "integer", "minimum": 0, "maximum": 12}, "exact": {"type": "boolean"}},
            "required": ["a", "b", "op"], "additionalProperties": false}),
    );
    let edit = tool(
        "edit_file",
        json!({"type": "object", "properties": {
            "path": {"type": "string", "pattern": "^(/[a-z0-9_.]{1,8}){1,3}$"},
            "edits": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "object", "properties": {
                "old": {"type": "string", "maxLength": 30}, "new": {"type": "string", "maxLength": 30},
                "all": {"type": "boolean"}}, "required": ["old", "new"]}},
            "dry_run": {"type": "boolean", "default": false}},
            "required": ["path", "edits"]}),
    );
    let write = tool(
        "write_file",
        json!({"type": "object", "properties": {
            "path": {"type": "string", "minLength": 1, "maxLength": 40}, "content": {"type": "string"},
            "mode": {"type": ["string", "null"], "maxLength": 4}},
            "required": ["path", "content"], "additionalProperties": false}),
    );
    let search = tool(
        "search",
        json!({"type": "object", "properties": {
            "query": {"type": "string", "minLength": 1, "maxLength": 40},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
            "sort": {"type": "string", "enum": ["newest", "best match", "it's \"so\""]},
            "filters": {"type": "array", "maxItems": 3, "items": {"type": "object", "properties": {
                "field": {"enum": ["title", "author", "year"]}, "op": {"enum": ["=", "<", ">"]},
                "value": {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "integer", "minimum": 0, "maximum": 9999}]}},
                "required": ["field", "op", "value"], "additionalProperties": false}},
            "since": {"type": "string", "format": "date"}},
            "required": ["query"]}),
    );
    let matrix = tool(
        "multiply",
        json!({"type": "object", "properties": {
            "m": {"type": "array", "minItems": 1, "maxItems": 3,
                  "items": {"type": "array", "maxItems": 3, "items": {"type": "number", "minimum": -9, "maximum": 9}}},
            "names": {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 8}},
            "scale": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]}},
            "required": ["m"]}),
    );
    let order = tool(
        "place-order",
        json!({"type": "object", "properties": {
            "items": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/item"}},
            "ship_to": {"$ref": "#/$defs/address"}, "note": {"type": "string", "maxLength": 12},
            "gift": {"const": true}, "id": {"type": "string", "format": "uuid"}},
            "required": ["items", "ship_to"],
            "$defs": {
                "item": {"type": "object", "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "n": {"type": "integer", "minimum": 1}},
                    "required": ["sku", "n"]},
                "address": {"type": "object", "properties": {
                    "street": {"type": "string", "maxLength": 20}, "country": {"enum": ["AT", "DE", "JP"]}},
                    "required": ["street", "country"]}}}),
    );
    // Names with common prefixes.
    let get = tool("get", json!({"type": "object", "properties": {"k": {"type": "string", "maxLength": 5}}}));
    let get_all = tool(
        "get_all",
        json!({"type": "object", "properties": {
        "k": {"type": "boolean"}, "key": {"type": "integer"}, "ke": {"type": "null"}}}),
    );
    vec![
        vec![weather.clone(), time.clone()],
        vec![calculator.clone(), search.clone()],
        vec![edit.clone(), write.clone()],
        vec![matrix.clone(), order.clone(), get.clone(), get_all.clone()],
        vec![weather, time, calculator, edit, write, search, matrix, order, get, get_all],
    ]
}
