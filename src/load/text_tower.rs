//! The text encoder of a model that embeds texts and pictures in one space: CLIP and SigLIP.

use std::borrow::Cow;

use super::architectures::PROJECTION;
use super::huggingface::TOKENIZER_CONFIG;
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::model::{DenseConfig, ModelConfig, WeightSource};
use crate::tokenizer::Tokenizer;

/// How such an encoder reads a text, whose vector is that of its last row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextTower {
    /// The token that ends a text; those behind it do not count: `eos_token_id`. CLIP.
    pub end: Option<u32>,
    /// The padding that a text gets, which its tokens see: SigLIP.
    pub padding: Option<Padding>,
    /// How a text is written before it becomes tokens.
    pub canonical: Canonical,
}

/// Padding of each text to one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Padding {
    /// The token: `pad_token`; `pad_token_id`.
    pub id: u32,
    /// Tokens of a padded text: `max_position_embeddings`.
    pub len: u32,
    /// `padding_side`.
    pub side: PaddingSide,
}

/// The side of a text that gets padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PaddingSide {
    /// The beginning.
    Left,
    /// The end.
    #[default]
    Right,
}

/// How a text is written before it becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canonical {
    /// As it is; the tokenizer may change it.
    AsIs,
    /// In lower case: SigLIP 2.
    LowerCase,
    /// In lower case, without ASCII punctuation, words one space apart: SigLIP.
    Words,
}

impl TextTower {
    /// That of a folder's text encoder; `None` for one that has no image encoder beside it.
    ///
    /// # Errors
    /// [`Error::Config`] for a key of another type.
    pub(super) fn of(config: &ModelConfig, json: &ConfigJson) -> Result<Option<TextTower>, Error> {
        // What transformers saves for files of OpenAI: the row of the highest id counts, which is the end's.
        const OLD_END: u32 = 2;
        let is_clip = config.architecture.starts_with("clip");
        if !is_clip && !config.architecture.starts_with("siglip") {
            return Ok(None);
        }
        if is_clip {
            let end = json.get_u32("eos_token_id")?.unwrap_or(49_407);
            let end = if end == OLD_END { config.vocab_size.saturating_sub(1) } else { end };
            return Ok(Some(TextTower { end: Some(end), padding: None, canonical: Canonical::AsIs }));
        }
        let id = json.get_u32("pad_token_id")?.unwrap_or(1);
        let padding = Padding { id, len: config.max_seq_len, side: PaddingSide::Right };
        Ok(Some(TextTower { end: None, padding: Some(padding), canonical: Canonical::LowerCase }))
    }

    /// The layer after pooling.
    ///
    /// # Errors
    /// [`Error::Config`] if it is missing.
    pub(super) fn projection(config: &ModelConfig, tensors: &dyn WeightSource) -> Result<DenseConfig, Error> {
        let name = |suffix: &str| format!("{PROJECTION}.{suffix}");
        let rows = tensors.describe(&name("weight")).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok());
        let outputs = rows.ok_or_else(|| super::huggingface::missing(&name("weight")))?;
        let bias = tensors.describe(&name("bias")).is_some();
        Ok(DenseConfig { name: PROJECTION, inputs: config.dim, outputs, bias, activation: None })
    }

    /// Takes the padding, and how a text is written, from the tokenizer's files, which know better than `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] for a key of another type or an unknown token.
    pub(super) fn read_tokenizer(&mut self, json: &[u8], tokenizer: &Tokenizer) -> Result<(), Error> {
        let Some(padding) = &mut self.padding else { return Ok(()) };
        let json = ConfigJson::parse(json).map_err(|e| e.in_file(TOKENIZER_CONFIG))?;
        let wrong = |field: &str, expected: &str, found: &str| {
            let (expected, found) = (expected.into(), format!("`{}`", found.escape_debug()));
            Error::Config { field: field.into(), expected, found }.in_file(TOKENIZER_CONFIG)
        };
        let text = |key: &str| json.get(key).map(|value| value.and_then(|value| value.as_str()));
        let name = match json.get("pad_token")? {
            Some(token) => token.as_str().or_else(|| token.get("content")?.as_str()),
            None => None,
        };
        if let Some(name) = name {
            let id = tokenizer.token_id(name);
            padding.id = id.ok_or_else(|| wrong("pad_token", "a token of the vocabulary", name))?;
        }
        padding.side = match text("padding_side")? {
            None | Some("right") => PaddingSide::Right,
            Some("left") => PaddingSide::Left,
            Some(other) => return Err(wrong("padding_side", "left or right", other)),
        };
        // SigLIP 2 has the tokenizer of Gemma, or one of its own.
        if text("tokenizer_class")?.is_some_and(|class| class.starts_with("SiglipTokenizer")) {
            self.canonical = Canonical::Words;
        }
        Ok(())
    }

    /// A text as it becomes tokens.
    pub(crate) fn canonical<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.canonical {
            Canonical::AsIs => Cow::Borrowed(text),
            Canonical::LowerCase => Cow::Owned(text.to_lowercase()),
            Canonical::Words => {
                let text = text.to_lowercase().replace(|c: char| c.is_ascii_punctuation(), "");
                Cow::Owned(text.split_whitespace().collect::<Vec<_>>().join(" "))
            }
        }
    }

    /// The tokens of a text as the encoder takes them: cut behind its end, or padded.
    pub(crate) fn complete(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(end) = self.end.and_then(|end| ids.iter().position(|&id| id == end)) {
            ids.truncate(end + 1);
        }
        let Some(Padding { id, len, side }) = self.padding else { return ids };
        let n_pads = (len as usize).saturating_sub(ids.len());
        match side {
            PaddingSide::Right => ids.extend(std::iter::repeat_n(id, n_pads)),
            PaddingSide::Left => ids.splice(..0, std::iter::repeat_n(id, n_pads)).for_each(drop),
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_end_or_are_padded() {
        let clip = TextTower { end: Some(9), padding: None, canonical: Canonical::AsIs };
        assert_eq!(clip.complete(vec![8, 1, 9, 2, 9]), [8, 1, 9]);
        assert_eq!(clip.complete(vec![8, 1]), [8, 1]);
        let padded = |side| {
            let padding = Some(Padding { id: 7, len: 4, side });
            TextTower { end: None, padding, canonical: Canonical::Words }
        };
        assert_eq!(padded(PaddingSide::Right).complete(vec![3, 1]), [3, 1, 7, 7]);
        assert_eq!(padded(PaddingSide::Left).complete(vec![3, 1]), [7, 7, 3, 1]);
        assert_eq!(padded(PaddingSide::Left).complete(vec![1; 5]), [1; 5]);
    }

    #[test]
    fn texts_are_canonical() {
        let of = |canonical, text| TextTower { end: None, padding: None, canonical }.canonical(text).into_owned();
        let text = " A CAT,  it's \n (Ärger)!";
        assert_eq!(of(Canonical::AsIs, text), text);
        assert_eq!(of(Canonical::LowerCase, text), " a cat,  it's \n (ärger)!");
        assert_eq!(of(Canonical::Words, text), "a cat its ärger");
    }
}
