//! Where the rows of pictures go in a prompt.

use std::sync::Arc;

use super::{ImageEmbeddings, ImageRows};
use crate::error::Error;
use crate::picture::{Family, TextPart};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Puts the images' rows, and the tokens around them, in place of a template's placeholders. Returns the prompt and the
/// rows in it. `family`: that of the model's vision encoder.
///
/// # Errors
/// [`Error::Template`] for another number of placeholders, or without an encoder; those of [`Tokenizer::encode`].
pub(crate) fn place_images(
    tokenizer: &Tokenizer,
    family: Option<Family>,
    ids: Vec<u32>,
    images: &[Arc<ImageEmbeddings>],
) -> Result<(Vec<u32>, Vec<Arc<ImageRows>>), Error> {
    let special = EncodeOptions { add_special: false, parse_special: true };
    let encode = |text: &str| tokenizer.encode_with(text, special);
    let Some(family) = family.filter(|_| !images.is_empty()) else {
        return match images.len() {
            0 => Ok((ids, Vec::new())),
            n => Err(wrong_images("none: the model was loaded without a vision encoder", n)),
        };
    };
    let placeholder = encode(family.placeholder())?;
    let (mut placed, mut rows, mut next) = (Vec::new(), Vec::new(), images.iter());
    let mut left = &ids[..];
    while let Some((&first, rest)) = left.split_first() {
        match left.strip_prefix(&placeholder[..]).filter(|_| !placeholder.is_empty()) {
            Some(after) => {
                let image =
                    next.next().ok_or_else(|| wrong_images("one for each part that is an image", images.len()))?;
                for part in &image.text {
                    match part {
                        TextPart::Text(text) => placed.extend(encode(text)?),
                        TextPart::Rows { tile, .. } => {
                            let Some(tile) = image.tiles.get(*tile) else { continue };
                            placed.extend(tile.ids.clone());
                            rows.push(tile.clone());
                        }
                    }
                }
                left = after;
            }
            None => {
                placed.push(first);
                left = rest;
            }
        }
    }
    match next.len() {
        0 => Ok((placed, rows)),
        n => {
            let found = format!("{} of {}", images.len() - n, images.len());
            let expected = format!("`{}` for each image", family.placeholder());
            Err(Error::Template { field: "images".into(), expected, found })
        }
    }
}

/// The error for a number of images that the messages or the model do not take.
fn wrong_images(expected: &str, found: usize) -> Error {
    Error::Template { field: "images".into(), expected: expected.into(), found: found.to_string() }
}
