//! Mutations of valid input.

use serde_json::Value as Json;

use super::builder::Rng;

/// Boundary values.
const EDGES: [u64; 16] =
    [0, 1, 2, 7, 8, 31, 32, 127, 255, 256, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63, u64::MAX];

/// Pieces of text that are significant to some parser.
const PIECES: [&str; 40] = [
    "",
    "\0",
    "\n",
    " ",
    "\u{feff}",
    "\u{2581}",
    "é",
    "世界",
    "🐉",
    "\u{301}",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "null",
    "true",
    "-0",
    "1e999",
    "NaN",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "<s>",
    "</s>",
    "<0x0A>",
    "<|im_end|>",
    "data: [DONE]",
    "\r\n\r\n",
    "0123456789",
    "%s",
    "../",
    "(",
    ".*",
    "|",
];

/// Mostly one change: several are rarely accepted.
fn n_changes(rng: &mut Rng) -> usize {
    if rng.below(3) == 0 { 1 + rng.below(6) } else { 1 }
}

/// Overwrites the first bytes with a number.
pub fn number(rng: &mut Rng, bytes: &mut [u8]) {
    let number = if rng.below(4) == 0 { rng.next() } else { rng.pick(&EDGES) };
    let width = rng.pick(&[1, 2, 4, 8]).min(bytes.len());
    bytes[..width].copy_from_slice(&number.to_le_bytes()[..width]);
}

/// Changes bytes in some places below `end`.
pub fn bytes(rng: &mut Rng, bytes: &mut Vec<u8>, end: usize) {
    for _ in 0..n_changes(rng) {
        let end = end.min(bytes.len());
        if end == 0 {
            return bytes.extend(rng.next().to_le_bytes());
        }
        let at = rng.below(end);
        match rng.below(8) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.next() as u8,
            2 | 3 => number(rng, &mut bytes[at..]),
            4 => bytes.truncate(at),
            5 => {
                let len = rng.below(64).min(bytes.len() - at);
                bytes.drain(at..at + len);
            }
            6 => {
                let piece = rng.pick(&PIECES);
                bytes.splice(at..at, piece.bytes());
            }
            _ => {
                let len = rng.below(64).min(bytes.len() - at);
                let copied = bytes[at..at + len].to_vec();
                let to = rng.below(end);
                bytes.splice(to..to, copied);
            }
        }
    }
}

/// Changes a text, keeping it valid UTF-8.
pub fn text(rng: &mut Rng, text: &mut String) {
    for _ in 0..n_changes(rng) {
        let at = text.floor_char_boundary_of(rng.below(text.len() + 1));
        let to = text.floor_char_boundary_of((at + rng.below(40)).min(text.len()));
        match rng.below(4) {
            0 => text.replace_range(at..to, ""),
            1 => {
                let copied = text[at..to].to_owned();
                text.insert_str(at, &copied);
            }
            _ => text.insert_str(at, rng.pick(&PIECES)),
        }
    }
}

trait Boundary {
    fn floor_char_boundary_of(&self, at: usize) -> usize;
}

impl Boundary for String {
    fn floor_char_boundary_of(&self, at: usize) -> usize {
        (0..=at).rev().find(|&at| self.is_char_boundary(at)).unwrap_or(0)
    }
}

/// A text of pieces.
pub fn any_text(rng: &mut Rng, most: usize) -> String {
    (0..rng.below(most + 1))
        .map(|_| match rng.below(3) {
            0 => rng.pick(&PIECES).to_owned(),
            1 => ((b'a' + rng.below(26) as u8) as char).to_string(),
            _ => char::from_u32(rng.next() as u32 % 0x11_0000).unwrap_or(' ').to_string(),
        })
        .collect()
}

/// A random value of any kind.
pub fn any_json(rng: &mut Rng) -> Json {
    match rng.below(9) {
        0 => Json::Null,
        1 => (rng.below(2) == 0).into(),
        2 => rng.pick(&EDGES).into(),
        3 => (-(rng.below(1 << 20) as i64)).into(),
        4 => serde_json::Number::from_f64(f64::from_bits(rng.next())).map_or(Json::Null, Json::Number),
        5 => Json::Array(vec![]),
        6 => Json::Object(serde_json::Map::new()),
        7 => Json::Array(vec![any_text(rng, 3).into(); 1 + rng.below(3)]),
        _ => any_text(rng, 8).into(),
    }
}

/// Replaces, changes or removes some values anywhere in a JSON value.
pub fn json(rng: &mut Rng, value: &mut Json) {
    for _ in 0..n_changes(rng) {
        json_once(rng, value);
    }
}

fn json_once(rng: &mut Rng, value: &mut Json) {
    let goes_on = rng.below(8) > 0;
    match value {
        Json::Object(fields) if goes_on && !fields.is_empty() => {
            let at = rng.below(fields.len());
            let key = fields.keys().nth(at).cloned().unwrap_or_default();
            match rng.below(10) {
                0 => drop(fields.shift_remove(&key)),
                1 => {
                    let value = fields.get(&key).cloned().unwrap_or_default();
                    let mut key = key;
                    text(rng, &mut key);
                    fields.insert(key, value);
                }
                _ => json_once(rng, &mut fields[&key]),
            }
        }
        Json::Array(list) if goes_on && !list.is_empty() => {
            let at = rng.below(list.len());
            match rng.below(10) {
                0 => drop(list.remove(at)),
                1 => list.insert(at, list[at].clone()),
                2 => {
                    let to = rng.below(list.len());
                    list.swap(at, to);
                }
                _ => json_once(rng, &mut list[at]),
            }
        }
        Json::String(own) if goes_on => text(rng, own),
        Json::Number(_) if goes_on => *value = rng.pick(&EDGES).into(),
        _ => *value = any_json(rng),
    }
}
