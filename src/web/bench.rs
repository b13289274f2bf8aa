//! Benchmarks of a device.

use js_sys::Function;
use wasm_bindgen::prelude::*;

use super::{Device, to_js_error};
use crate::bench::report::{self, OtherTiers};

#[wasm_bindgen]
impl Device {
    /// Measures probes and kernels. `half` is the same adapter in the tier `f16`. `on_row(json, done, total)` is
    /// called for each row when measured. Returns the rest of the report as JSON.
    pub async fn bench(&self, half: Option<Device>, quick: bool, on_row: Function) -> Result<String, JsValue> {
        let others = OtherTiers { half: half.as_ref().map(|half| &half.0), ..OtherTiers::default() };
        let tell = &mut |row: report::Measured<'_>, done: usize, total: usize| {
            let json = serde_json::to_string(&row).unwrap_or_default();
            // Errors of the callback are the caller's.
            let _ = on_row.call3(&JsValue::NULL, &json.into(), &(done as u32).into(), &(total as u32).into());
        };
        let found = report::measure(&self.0, others, quick, tell).await.map_err(to_js_error)?;
        Ok(report::head_to_json(&self.0, &found))
    }
}
