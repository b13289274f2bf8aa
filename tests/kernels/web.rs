//! Conformance in a browser: the same cases, through WebGPU as the page sees it.

use tilewright::{BrowserAdapter, Device, DeviceChoice, Tier};
use wasm_bindgen_test::{wasm_bindgen_test, wasm_bindgen_test_configure};

use crate::{conform, judge};

wasm_bindgen_test_configure!(run_in_dedicated_worker);

/// Asks for subgroups with every device, as the npm package does.
const REQUEST_SUBGROUPS: &str = "
    const original = GPUAdapter.prototype.requestDevice;
    GPUAdapter.prototype.requestDevice = function (descriptor) {
        const features = [...(descriptor?.requiredFeatures ?? [])];
        if (this.features.has('subgroups')) features.push('subgroups');
        return original.call(this, { ...descriptor, requiredFeatures: features });
    };";

#[wasm_bindgen_test]
async fn cpu_matches_oracle() {
    let (executed, failed) = conform(&Device::cpu()).await;
    judge(executed, failed);
}

#[wasm_bindgen_test]
async fn gpu_matches_oracle() {
    js_sys::eval(REQUEST_SUBGROUPS).expect("a browser with WebGPU");
    let adapter = BrowserAdapter { name: "browser".into(), is_software: true, has_subgroups: true };
    let (mut executed, mut failed) = (0, 0);
    for tier in [Tier::Baseline, Tier::Subgroups, Tier::Scalar] {
        let device = Device::open(&DeviceChoice::Gpu, Some(&adapter), Some(tier)).await.expect("an adapter");
        let of_tier = conform(&device).await;
        (executed, failed) = (executed + of_tier.0, failed + of_tier.1);
    }
    judge(executed, failed);
}
