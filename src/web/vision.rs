//! Vision encoders, and pictures of prompts.

use std::sync::Arc;

use serde::Deserialize;
use wasm_bindgen::prelude::*;

use super::model::Model;
use super::{from_js, to_js_error};
use crate::error::Error;
use crate::picture::Picture;
use crate::{ImageEmbeddings, ImageRows, VisionOptions};

/// A vision encoder with its weights on a device, for [`Model::use_vision`].
#[wasm_bindgen]
pub struct VisionEncoder(crate::VisionEncoder);

impl VisionEncoder {
    pub(super) fn new(encoder: crate::VisionEncoder) -> VisionEncoder {
        VisionEncoder(encoder)
    }

    pub(super) fn inner(&self) -> &crate::VisionEncoder {
        &self.0
    }
}

/// The pictures of a prompt, in order.
#[wasm_bindgen]
#[derive(Default)]
pub struct Pictures(Vec<Arc<ImageEmbeddings>>);

#[wasm_bindgen]
impl Pictures {
    /// No pictures.
    #[wasm_bindgen(constructor)]
    pub fn new() -> Pictures {
        Pictures::default()
    }

    /// Adds a picture for a model: its pixels, 3 or 4 bytes each. Alpha is dropped. Resolves to the number of tokens that
    /// it takes.
    pub async fn add(&mut self, model: &Model, width: u32, height: u32, pixels: Vec<u8>) -> Result<u32, JsValue> {
        let encoder = model.vision().map_err(to_js_error)?.clone();
        let picture = picture(width, height, pixels).map_err(to_js_error)?;
        let image = encoder.encode(&picture).await.map_err(to_js_error)?;
        let n_rows = image.n_rows() as u32;
        self.0.push(image);
        Ok(n_rows)
    }
}

impl Pictures {
    pub(super) fn images(&self) -> &[Arc<ImageEmbeddings>] {
        &self.0
    }

    /// The rows of all pictures, in order.
    pub(super) fn rows(&self) -> Vec<Arc<ImageRows>> {
        self.0.iter().flat_map(|image| &image.tiles).cloned().collect()
    }
}

/// A picture from pixels of 3 or 4 bytes. Alpha is dropped.
pub(super) fn picture(width: u32, height: u32, pixels: Vec<u8>) -> Result<Picture, Error> {
    let has_alpha = pixels.len() as u64 == u64::from(width) * u64::from(height) * 4;
    match has_alpha {
        true => Picture::from_rgba(width, height, &pixels),
        false => Picture::new(width, height, pixels),
    }
}

/// The encoder's options, `{ maxTokens? }`.
pub(super) fn read_options(value: JsValue) -> Result<VisionOptions, JsValue> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Options {
        max_tokens: Option<u32>,
    }
    let given: Option<Options> = from_js("options", value)?;
    let max_rows = given.unwrap_or_default().max_tokens.unwrap_or(VisionOptions::default().max_rows);
    match max_rows {
        0 => {
            let (expected, found) = ("1 or more".into(), "0".into());
            Err(to_js_error(Error::Option { option: "vision.maxTokens", expected, found }))
        }
        max_rows => Ok(VisionOptions { max_rows }),
    }
}
