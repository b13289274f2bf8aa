//! The decoder of a `tokenizer.json`: its steps are applied once to each token on loading, so that text can be
//! decoded incrementally.

use serde_json::Value;

use super::{flag, kind, steps, unsupported};
use crate::error::Error;
use crate::tokenizer::bpe::token_bytes;
use crate::tokenizer::decode::Strip;
use crate::tokenizer::vocab::parse_byte;

/// A file's decoder steps for one token.
#[derive(Debug)]
pub(super) struct DecoderSteps {
    replacements: Vec<(String, String)>,
    spelling: Spelling,
    byte_fallback: bool,
    pub strip: Strip,
}

#[derive(Debug)]
enum Spelling {
    Plain,
    /// GPT-2's spelling of bytes.
    Bytes,
    /// A space precedes tokens without the prefix.
    Words {
        prefix: String,
        cleanup: bool,
    },
}

impl DecoderSteps {
    /// # Errors
    /// [`Error::Unsupported`] for a step that needs more than one token.
    pub fn new(component: Option<&Value>) -> Result<Self, Error> {
        let mut decoder = DecoderSteps {
            replacements: Vec::new(),
            spelling: Spelling::Plain,
            byte_fallback: false,
            strip: Strip::Spaces(0),
        };
        let steps = steps(component, "decoders");
        if steps.is_empty() {
            // Without steps the crate joins tokens with spaces.
            let words = Spelling::Words { prefix: String::new(), cleanup: false };
            return Ok(DecoderSteps { spelling: words, strip: Strip::Spaces(1), ..decoder });
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

    /// The bytes of a token in the middle of a text. An empty text means an unused id.
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
