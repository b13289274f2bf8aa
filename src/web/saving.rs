//! Files that leave WASM memory in pieces.

use wasm_bindgen::prelude::*;

use super::to_js_error;

/// A file's content, read from a device piece by piece.
#[wasm_bindgen]
pub struct Saving(pub(super) crate::Saving);

#[wasm_bindgen]
impl Saving {
    /// Size of the whole file.
    pub fn size(&self) -> f64 {
        self.0.size_bytes() as f64
    }

    /// The file's next bytes, or `undefined` at its end.
    pub async fn next(&mut self) -> Result<Option<js_sys::Uint8Array>, JsValue> {
        let piece = self.0.next().await.map_err(to_js_error)?;
        Ok(piece.map(|piece| js_sys::Uint8Array::from(piece.as_slice())))
    }
}
