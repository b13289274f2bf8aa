//! Constraints of JSON Schema formats that llguidance does not enforce: days of each month, leap seconds, lengths of
//! names.

use serde_json::{Value, json};

use super::simplify::each_schema;

/// An additional pattern for a format.
fn pattern_of(format: &str) -> Option<&'static str> {
    // The 29th of February in leap years: divisible by 4, but by 100 only if also by 400.
    macro_rules! date {
        () => {
            "(?:[0-9]{4}-(?:0[13-9]|1[0-2])-..|[0-9]{4}-02-(?:[01].|2[0-8])|\
             (?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
        };
    }
    // A leap second occurs only at the end of a day in UTC; here it is refused.
    Some(match format {
        "date" => concat!("^", date!(), "$"),
        "date-time" => concat!("^", date!(), "[tT]..:..:[0-5]"),
        "time" => "^..:..:[0-5]",
        // RFC 5321, 4.5.3.1, and RFC 1035, 2.3.4; four labels keep the total below the limit.
        "email" => r"^[^@]{1,64}@(?:[^.]{1,63}\.){0,3}[^.]{1,60}$",
        "hostname" => r"^(?:[^.]{1,63}\.){0,3}[^.]{1,60}$",
        _ => return None,
    })
}

/// Adds these patterns to the formats in a schema, not in its data. The schema's depth was checked.
pub(super) fn tighten(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    let _ = each_schema(keywords, &mut |schema| {
        tighten(schema);
        Ok(())
    });
    let Some(pattern) = keywords.get("format").and_then(Value::as_str).and_then(pattern_of) else { return };
    if !keywords.contains_key("pattern") {
        keywords.insert("pattern".into(), pattern.into());
    } else if let Value::Array(all) = keywords.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({"pattern": pattern}));
    }
}
