//! Texts by other programs: with a byte order mark, and JSON with Python's extra numbers.

use std::borrow::Cow;

use serde::de::DeserializeOwned;

/// The byte order mark, which editors and PowerShell write before UTF-8 text.
pub(crate) const MARK: char = '\u{feff}';

/// The text without its byte order mark.
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(MARK.encode_utf8(&mut [0; 4]).as_bytes()).unwrap_or(bytes)
}

/// An error in a JSON file, with its byte offset.
pub(crate) struct JsonFault {
    pub offset: usize,
    pub message: String,
}

/// Parses JSON. Python's `json` writes `Infinity`, `-Infinity` and `NaN`, which JSON lacks: each is read as newer
/// releases of transformers write it, an object with the single key [`FLOAT`].
///
/// # Errors
/// [`JsonFault`] for invalid JSON or another type than `T`.
pub(crate) fn read_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonFault> {
    let text = without_mark(bytes);
    let n_before = bytes.len() - text.len();
    let error = match serde_json::from_slice(text) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    let (strict, added) = with_floats_as_objects(text);
    let error = match (&strict, serde_json::from_slice(&strict)) {
        (Cow::Owned(_), Ok(value)) => return Ok(value),
        (Cow::Owned(_), Err(error)) => error,
        (Cow::Borrowed(_), _) => error,
    };
    let lines_before = strict.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
    let at = lines_before.map(<[u8]>::len).sum::<usize>() + error.column().saturating_sub(1);
    let n_added: usize = added.iter().filter(|(end, _)| *end <= at).map(|(_, n)| n).sum();
    let mut message = error.to_string();
    if !added.is_empty()
        && let Some(position) = message.rfind(" at line ")
    {
        message.truncate(position); // a position in the changed text
    }
    Err(JsonFault { offset: n_before + at.saturating_sub(n_added), message })
}

/// The key of an object that replaces a number that JSON lacks: `{"__float__": "Infinity"}`.
pub(crate) const FLOAT: &str = "__float__";

/// Replaces Python's number literals with objects; also returns the end of each and the bytes added.
fn with_floats_as_objects(text: &[u8]) -> (Cow<'_, [u8]>, Vec<(usize, usize)>) {
    const LITERALS: [&str; 3] = ["Infinity", "-Infinity", "NaN"];
    let (mut changed, mut added) = (Vec::new(), Vec::new());
    let (mut done, mut at, mut in_string) = (0, 0, false);
    while let Some(&byte) = text.get(at) {
        at += 1;
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => at += 1,
            b'I' | b'-' | b'N' if !in_string => {
                let rest = text.get(at - 1..).unwrap_or_default();
                let Some(literal) = LITERALS.into_iter().find(|literal| rest.starts_with(literal.as_bytes())) else {
                    continue;
                };
                let object = format!("{{\"{FLOAT}\":\"{literal}\"}}");
                changed.extend_from_slice(text.get(done..at - 1).unwrap_or_default());
                changed.extend_from_slice(object.as_bytes());
                at += literal.len() - 1;
                done = at;
                added.push((changed.len(), object.len() - literal.len()));
            }
            _ => {}
        }
    }
    if added.is_empty() {
        return (Cow::Borrowed(text), added);
    }
    changed.extend_from_slice(text.get(done..).unwrap_or_default());
    (Cow::Owned(changed), added)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(text: &str) -> Value {
        read_json(text.as_bytes())
            .unwrap_or_else(|fault: JsonFault| panic!("{text}: {} at {}", fault.message, fault.offset))
    }

    #[test]
    fn byte_order_mark_is_stripped_from_text() {
        assert_eq!(without_mark("\u{feff}a\u{feff}".as_bytes()), "a\u{feff}".as_bytes());
        assert_eq!(without_mark(b"\xef\xbb"), b"\xef\xbb");
        assert_eq!(read("\u{feff}{\"a\": \"\u{feff}\"}"), json!({ "a": "\u{feff}" }));
    }

    #[test]
    fn python_float_literals_are_read_outside_strings() {
        let float = |name: &str| json!({ FLOAT: name });
        assert_eq!(
            read("{\"a\": [0.0, Infinity], \"b\":-Infinity,\"c\": NaN, \"d\": \"Infinity, \\\"NaN, \\\\\"}"),
            json!({
                "a": [0.0, float("Infinity")], "b": float("-Infinity"), "c": float("NaN"), "d": "Infinity, \"NaN, \\"
            })
        );
        assert_eq!(read("NaN"), float("NaN"));
        assert_eq!(read("[-1, -1e-3]"), json!([-1, -1e-3]));
    }

    #[test]
    fn json_error_offset_is_the_position_in_the_file() {
        for (text, offset) in [
            ("{\"a\": ?}", 6),
            ("\u{feff}{\"a\":\n ?}", 10),
            ("{\"a\": [NaN, Infinity],\n\"b\": ?}", 28),
            ("{\"b\": ?, \"a\": NaN}", 6),
            ("[nan]", 2),
            ("[Infinit]", 1),
            ("[Infinityx]", 9),
        ] {
            let Err(fault) = read_json::<Value>(text.as_bytes()) else { panic!("{text}") };
            assert_eq!(fault.offset, offset, "{text}: {}", fault.message);
        }
    }
}
