//! Constraints that must be refused within 250 ms each (`cargo bench --bench hostile`), and their errors.

use serde_json::{Map, Value, json};
use tilewright::grammar::Constraint;

fn schema(schema: Value, says: &'static str) -> (Constraint, &'static str) {
    (Constraint::JsonSchema(schema), says)
}

/// Definitions, each referring to the next.
fn chain(n: usize, link: impl Fn(Value) -> Value, end: Value) -> Value {
    let mut definitions = Map::new();
    for i in 0..n {
        definitions.insert(format!("d{i}"), link(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
    }
    definitions.insert(format!("d{n}"), end);
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

/// `n` properties of an object, or elements of an array.
fn many(n: usize, member: impl Fn(usize) -> (String, Value)) -> (Map<String, Value>, Vec<Value>) {
    let members: Map<String, Value> = (0..n).map(member).collect();
    let values = members.values().cloned().collect();
    (members, values)
}

pub fn all() -> Vec<(Constraint, &'static str)> {
    let never = json!({"type": "integer", "minimum": 5, "maximum": 3});
    let deep = (0..300).fold(json!({"type": "integer"}), |inner, _| json!({"type": "array", "items": inner}));
    let patterns = |i: usize| (i.to_string(), json!({"pattern": format!("a.{{{i}}}b")}));
    let referred = many(30, |i| (format!("d{i}"), json!({"pattern": format!("a.{{{i}}}b")}))).0;
    let referring: Vec<Value> = (0..30).map(|i| json!({"$ref": format!("#/$defs/d{i}")})).collect();
    let twice =
        |next: Value| json!({"type": "object", "properties": {"a": {"allOf": [next, next]}}, "required": ["a"]});
    let mut all = vec![
        // Contradictions.
        schema(never.clone(), "minimum"),
        schema(json!(false), "false"),
        schema(json!({"type": "string", "enum": [1, 2]}), "incompatible types"),
        schema(json!({"type": "string", "minLength": 5, "maxLength": 3}), "minLength"),
        schema(json!({"type": "array", "minItems": 3, "maxItems": 2}), "minItems"),
        schema(json!({"allOf": [{"type": "string"}, {"type": "number"}]}), "incompatible types"),
        schema(json!({"type": "object", "properties": {"a": false}, "required": ["a"]}), "required property 'a'"),
        schema(json!({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}), "multiple of 10"),
        schema(json!({"type": "string", "pattern": "^a$", "minLength": 3}), "empty"),
        schema(json!({"$ref": "#"}), "unusable"),
        schema(chain(2, |next| json!({"allOf": [next]}), json!({"$ref": "#/$defs/d0"})), "unusable"),
        // Numbers without an exact spelling.
        schema(json!({"const": (1u64 << 53) + 1}), "magnitude"),
        schema(json!({"enum": [1, u64::MAX]}), "magnitude"),
        schema(json!({"const": {"a": [i64::MIN]}}), "magnitude"),
        // Not schemas.
        schema(json!(3), "object or boolean"),
        schema(json!({"type": "strung"}), "strung"),
        schema(json!({"type": "string", "pattern": "("}), "unclosed group"),
        schema(json!({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        schema(json!({"$ref": "#/$defs/x"}), "$defs"),
        schema(json!({"$ref": "https://example.com/x"}), "example.com"),
        // Keywords that cannot be enforced.
        schema(json!({"not": {"type": "string"}}), "not"),
        schema(json!({"if": {"type": "string"}, "then": {"minLength": 3}}), "if"),
        schema(json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        schema(json!({"type": "array", "contains": {"type": "integer"}}), "contains"),
        schema(json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        // Bombs.
        schema(deep, "depth"),
        schema(json!({"enum": many(100_000, |i| (i.to_string(), json!(format!("value {i}")))).1}), "number of values"),
        schema(json!({"enum": many(1_000_000, |i| (i.to_string(), json!(i))).1}), "number of values"),
        schema(json!({"const": "x".repeat(1 << 20)}), "bytes of strings"),
        schema(json!({"properties": many(4000, |i| (format!("p{i}"), json!(true))).0}), "squares of property counts"),
        schema(
            json!({"required": many(9000, |i| (i.to_string(), json!(i.to_string()))).1}),
            "squares of property counts",
        ),
        schema(json!({"patternProperties": many(300, |i| (format!("^k{i}_"), json!(true))).0}), "patternProperties"),
        schema(json!({"type": "string", "allOf": many(32, patterns).1}), "number of patterns"),
        schema(json!({"type": "string", "allOf": many(16, patterns).1}), "unusable"),
        schema(json!({"type": "string", "allOf": referring, "$defs": referred}), "number of patterns"),
        schema(
            chain(30, |next| json!({"$ref": next["$ref"], "pattern": "a.{9}b"}), json!({"pattern": "c"})),
            "number of patterns",
        ),
        schema(json!({"type": "string", "pattern": "[ab]c?".repeat(20_000)}), "bytes of patterns"),
        schema(json!({"type": "string", "pattern": "^(a{1000}){1000}$"}), "length of a pattern's text"),
        schema(json!({"type": "integer", "multipleOf": 1_000_003}), "multipleOf"),
        schema(
            json!({"type": "integer", "allOf": [{"multipleOf": 101}, {"multipleOf": 103}, {"multipleOf": 107}]}),
            "multipleOf",
        ),
        schema(chain(5000, |next| json!({"properties": {"n": next}}), json!({})), "number of values"),
        schema(chain(25, twice, never.clone()), "unusable"),
        schema(chain(25, |next| json!({"anyOf": [next, next]}), never), "unusable"),
        schema(
            json!({"allOf": vec![json!({"anyOf": many(8, |i| {
            let name = format!("p{i}");
            (name.clone(), json!({"type": "object", "properties": {&name: {"type": "string"}}, "required": [name]}))
        }).1}); 12]}),
            "too large",
        ),
    ];
    let regex = |pattern: &str, says| (Constraint::Regex(pattern.into()), says);
    all.extend([
        regex("(", "unclosed group"),
        regex("(a)\\1", "backreferences"),
        regex(r"\bfoo\b", "lookarounds"),
        regex(r"[^\s\S]", "unusable"),
        regex(&format!("{}a{}", "(".repeat(2000), ")".repeat(2000)), "unusable"),
        regex(&"(a|b|ab)*c?".repeat(1000), "unusable"),
        regex(&"abc[0-9]".repeat(100_000), "bytes"),
        regex("(a{1000}){1000}", "length of its text"),
        regex("((a{1000}){1000}){1000}", "length of its text"),
    ]);
    let lark = |grammar: &str, says| (Constraint::Lark(grammar.into()), says);
    let doubled = |name: &str| -> String {
        let lines = (0..30).map(|i| format!("{name}{i}: {name}{} {name}{}\n", i + 1, i + 1));
        format!("start: {name}0\n{}{name}30: \"x\"", lines.collect::<String>())
    };
    let rules = |n: usize| (0..n).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect::<String>();
    all.extend([
        lark("", "no start"),
        lark("start: \"a", "1(10)"),
        lark("start: b", "unknown name"),
        lark("start: start", "unusable"),
        lark("start: a\na: b\nb: a", "unusable"),
        lark(&format!("start: {}\"a\"{}", "(".repeat(2000), ")".repeat(2000)), "nested"),
        lark(&format!("start: r0\n{}r50000: \"x\"", rules(50_000)), "bytes"),
        lark("start: %json {\"type\": \"integer\", \"minimum\": 5, \"maximum\": 3}", "minimum"),
        lark("start: %json {\"type\": \"integer\", \"multipleOf\": 1000003}", "multipleOf"),
        lark(&doubled("T"), "length of its text"),
        lark(&doubled("r"), "length of its text"),
        lark("start: A\nA: B{1000}\nB: C{1000}\nC: \"x\"", "length of its text"),
        lark("start: a a a\na: A A\nA: /a{19000}/", "length of its text"),
        lark("start: A\nA: /(.*a.{200}){3}/ & /(.*b.{300}){3}/ & ~/(.*c.{100}){2}/", "fuel"),
    ]);
    let gbnf = |grammar: String, says| (Constraint::Gbnf(grammar), says);
    let chain: String = (0..900).map(|i| format!("r{i} ::= r{}\n", i + 1)).collect();
    all.extend([
        gbnf(format!("root ::= {}\"a\"{}", "(".repeat(5000), ")".repeat(5000)), "groups"),
        gbnf(format!("root ::= r0\n{chain}r900 ::= r0"), "left recursion"),
        gbnf("root ::= \"a\"\n".repeat(2000), "bytes"),
        gbnf("root ::= a{2000}\na ::= b{2000}\nb ::= \"x\"".into(), "length of its text"),
    ]);
    all
}

/// Large, valid ones, parsed within the same time.
pub fn large() -> Vec<Constraint> {
    let schemas = [
        json!({"enum": many(9000, |i| (i.to_string(), json!(format!("value {i}")))).1}),
        json!({"enum": many(4500, |i| (i.to_string(), json!({"k": i}))).1}),
        json!({"properties": many(900, |i| (format!("property{i}"), json!({"type": "string"}))).0}),
        json!({"patternProperties": many(60, |i| (format!("^k{i}_[a-z]*$"), json!({"type": "integer"}))).0}),
        json!({"type": "integer", "multipleOf": 19_997}),
        json!({"type": "string", "pattern": r"\p{L}\p{N}\w".repeat(1000)}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000}),
        json!({"type": "string", "minLength": 1000, "maxLength": 1_000_000_000}),
        chain(1900, |next| json!({"type": "object", "properties": {"n": next}}), json!({"type": "null"})),
        chain(4900, |next| next, json!({"type": "null"})),
        (0..190).fold(json!({"type": "integer"}), |inner, _| json!({"items": inner})),
    ];
    let regexes = [r"(?i)\p{L}\p{N}\w".repeat(1000), "a{19000}".into(), "(.*a.{100}){50}".into()];
    let terminals: String = (0..2000).map(|i| format!("T{i}: \"a\" T{}\n", i + 1)).collect();
    let rules: String = (0..2000).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect();
    let grammars = [
        format!("start: T0\n{terminals}T2000: \"x\""),
        format!("start: r0\n{rules}r2000: \"x\""),
        "start: e\ne: e e | \"a\" | ".into(),
        "start: \"a\"{6000}".into(),
    ];
    let schemas = schemas.into_iter().map(Constraint::JsonSchema);
    schemas.chain(regexes.map(Constraint::Regex)).chain(grammars.map(Constraint::Lark)).collect()
}
