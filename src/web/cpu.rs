//! Entry points of workers that help the engine's worker, see `platform/pool.rs`. All share a module and its memory.

use wasm_bindgen::prelude::*;

use crate::platform::POOL;

/// Helps as long as the worker lives.
#[wasm_bindgen(js_name = helpCpu)]
pub fn help_cpu() {
    POOL.help();
}

/// Called where `helpCpu` has thrown.
#[wasm_bindgen(js_name = failCpu)]
pub fn fail_cpu() {
    POOL.fail();
}

/// Called by the engine's worker when this many others are about to help.
#[wasm_bindgen(js_name = setCpuHelpers)]
pub fn set_cpu_helpers(n: usize) {
    POOL.set_helpers(n);
}
