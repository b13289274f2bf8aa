//! The decoder of a `tokenizer.json`, as a matter of single tokens: its steps are applied to each token once, when the
//! file is loaded, so text can be decoded as it comes.

use serde_json::Value;

use super::{flag, kind, steps, unsupported};
use crate::error::Error;
use crate::tokenizer::bpe::token_bytes;
use crate::tokenizer::decode::Strip;
use crate::tokenizer::vocab::parse_byte;

/// What a file's decoder does to one token.
#[derive(Debug)]
pub(super) struct Decoder {
    replacements: Vec<(String, String)>,
    spelling: Spelling,
    byte_fallback: bool,
    pub strip: Strip,
}

#[derive(Debug)]
enum Spelling {
    Plain,
    /// GPT-2's characters for bytes.
    Bytes,
    /// A token stands behind a space unless it has the prefix.
    Words {
        prefix: String,
        cleanup: bool,
    },
}

impl Decoder {
    /// # Errors
    /// [`Error::Unsupported`] for a step that is not a matter of one token.
    pub fn new(component: Option<&Value>) -> Result<Self, Error> {
        let mut decoder = Decoder {
            replacements: Vec::new(),
            spelling: Spelling::Plain,
            byte_fallback: false,
            strip: Strip::Spaces(0),
        };
        let steps = steps(component, "decoders");
        if steps.is_empty() {
            // The crate puts a space between tokens if nothing says how to join them.
            let words = Spelling::Words { prefix: String::new(), cleanup: false };
            return Ok(Decoder { spelling: words, strip: Strip::Spaces(1), ..decoder });
        }
        let mut fused = false;
        for step in steps {
            let text = |field: &str| step.get(field).and_then(Value::as_str).map(str::to_owned);
            let number = |field: &str| step.get(field).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
            let refuse = || {
                unsupported(
                    "decoder",
                    kind(step),
                    "ByteLevel, WordPiece, Metaspace, Replace, ByteFallback, Fuse, Strip",
                )
            };
            match kind(step) {
                "ByteLevel" => decoder.spelling = Spelling::Bytes,
                "ByteFallback" => decoder.byte_fallback = true,
                "Fuse" => fused = true,
                "Metaspace" => {
                    decoder.replacements.push((text("replacement").ok_or_else(refuse)?, " ".into()));
                    let prefixed =
                        flag(step, "add_prefix_space", true) && text("prepend_scheme").as_deref() != Some("never");
                    if prefixed {
                        decoder.strip = Strip::FirstToken;
                    }
                }
                "Replace" => {
                    let pattern = step.get("pattern").and_then(|pattern| pattern.get("String")?.as_str());
                    let pattern = pattern.filter(|pattern| !pattern.is_empty()).ok_or_else(refuse)?;
                    decoder.replacements.push((pattern.to_owned(), text("content").ok_or_else(refuse)?));
                }
                "Strip" if fused && text("content").as_deref() == Some(" ") && number("stop") == Some(0) => {
                    decoder.strip = Strip::Spaces(number("start").ok_or_else(refuse)?);
                }
                "WordPiece" => {
                    let prefix = text("prefix").ok_or_else(refuse)?;
                    decoder.spelling = Spelling::Words { prefix, cleanup: flag(step, "cleanup", true) };
                    decoder.strip = Strip::Spaces(1);
                }
                _ => return Err(refuse()),
            }
        }
        Ok(decoder)
    }

    /// The bytes of a token in the middle of a text. An empty text is that of a number that no token has.
    pub fn piece(&self, id: u32, token: &str) -> Vec<u8> {
        if token.is_empty() {
            return Vec::new();
        }
        let mut text = token.to_owned();
        for (pattern, content) in &self.replacements {
            text = text.replace(pattern, content);
        }
        if self.byte_fallback
            && let Ok(byte) = parse_byte(id, &text)
        {
            return vec![byte];
        }
        match &self.spelling {
            Spelling::Plain => text.into(),
            Spelling::Bytes => token_bytes(&text),
            Spelling::Words { prefix, cleanup } => match text.strip_prefix(prefix).filter(|_| !prefix.is_empty()) {
                Some(rest) => rest.into(),
                None if *cleanup && matches!(text.as_str(), "." | "?" | "!" | ",") => text.into(),
                None => format!(" {text}").into(),
            },
        }
    }
}
