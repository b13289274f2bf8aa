//! Where the rows of pictures and sounds go in a prompt.

use std::sync::Arc;

use super::{ImageEmbeddings, ImageRows};
use crate::error::Error;
use crate::picture::{Family, TextPart};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Inputs of one kind, in order.
pub(crate) struct Inputs<'a> {
    /// For errors: `images` or `sounds`.
    pub field: &'static str,
    /// The text of one in a template; `None` for a model that was loaded without their encoder.
    pub placeholder: Option<&'static str>,
    pub embeddings: &'a [Arc<ImageEmbeddings>],
}

impl<'a> Inputs<'a> {
    /// Images of a model whose vision encoder is of this family.
    pub fn images(family: Option<Family>, embeddings: &'a [Arc<ImageEmbeddings>]) -> Inputs<'a> {
        Inputs { field: "images", placeholder: family.map(Family::placeholder), embeddings }
    }

    /// The error for a number of them that the messages or the model do not take.
    fn wrong(&self, expected: String, found: impl ToString) -> Error {
        Error::Template { field: self.field.into(), expected, found: found.to_string() }
    }
}

/// An input's placeholder in tokens, and those that are still to be placed.
struct Waiting<'a> {
    inputs: &'a Inputs<'a>,
    placeholder: Vec<u32>,
    left: std::slice::Iter<'a, Arc<ImageEmbeddings>>,
}

/// Puts the inputs' rows, and the tokens around them, in place of a template's placeholders. Returns the prompt and the
/// rows in it.
///
/// # Errors
/// [`Error::Template`] for another number of placeholders, or without an encoder; those of [`Tokenizer::encode`].
pub(crate) fn place_rows(
    tokenizer: &Tokenizer,
    ids: Vec<u32>,
    inputs: &[Inputs<'_>],
) -> Result<(Vec<u32>, Vec<Arc<ImageRows>>), Error> {
    let special = EncodeOptions { add_special: false, parse_special: true };
    let encode = |text: &str| tokenizer.encode_with(text, special);
    let mut waiting = Vec::new();
    for inputs in inputs.iter().filter(|inputs| !inputs.embeddings.is_empty()) {
        let placeholder = inputs.placeholder.ok_or_else(|| {
            inputs.wrong("none: the model was loaded without an encoder of them".into(), inputs.embeddings.len())
        })?;
        waiting.push(Waiting { inputs, placeholder: encode(placeholder)?, left: inputs.embeddings.iter() });
    }
    if waiting.is_empty() {
        return Ok((ids, Vec::new()));
    }
    let (mut placed, mut rows) = (Vec::new(), Vec::new());
    let mut left = &ids[..];
    while let Some((&first, rest)) = left.split_first() {
        let found = waiting.iter_mut().filter(|waiting| !waiting.placeholder.is_empty()).find_map(|waiting| {
            let after = left.strip_prefix(&waiting.placeholder[..])?;
            Some((waiting, after))
        });
        let Some((Waiting { inputs, left: next, .. }, after)) = found else {
            placed.push(first);
            left = rest;
            continue;
        };
        let expected = || "one for each part of their type in the messages".into();
        let embeddings = next.next().ok_or_else(|| inputs.wrong(expected(), inputs.embeddings.len()))?;
        for part in &embeddings.text {
            match part {
                TextPart::Text(text) => placed.extend(encode(text)?),
                TextPart::Rows { tile, .. } => {
                    let Some(tile) = embeddings.tiles.get(*tile) else { continue };
                    placed.extend(tile.ids.clone());
                    rows.push(tile.clone());
                }
            }
        }
        left = after;
    }
    match waiting.iter().find(|waiting| waiting.left.len() > 0) {
        None => Ok((placed, rows)),
        Some(Waiting { inputs, left, .. }) => {
            let n = inputs.embeddings.len();
            let expected = format!("`{}` in the template's text for each", inputs.placeholder.unwrap_or_default());
            Err(inputs.wrong(expected, format!("{} of {n}", n - left.len())))
        }
    }
}
