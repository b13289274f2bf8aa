//! Files whose pieces leave WASM memory one by one.

use wasm_bindgen::prelude::*;

use super::to_js_error;

/// A file's content, of which one piece after the other is read from a device.
#[wasm_bindgen]
pub struct Saving(pub(super) crate::Saving);

#[wasm_bindgen]
impl Saving {
    /// Bytes of the whole file.
    pub fn size(&self) -> f64 {
        self.0.size_bytes() as f64
    }

    /// The file's next bytes, or `undefined` at its end.
    pub async fn next(&mut self) -> Result<Option<js_sys::Uint8Array>, JsValue> {
        let piece = self.0.next().await.map_err(to_js_error)?;
        Ok(piece.map(|piece| js_sys::Uint8Array::from(piece.as_slice())))
    }
}
