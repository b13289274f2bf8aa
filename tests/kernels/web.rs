//! Conformance in a browser: the same cases through the page's WebGPU.

use tilewright::{BrowserAdapter, DType, Device, DeviceChoice, Error, Role, Tensor, Tier, Workspace, kernels};
use wasm_bindgen_futures::JsFuture;
use wasm_bindgen_test::{wasm_bindgen_test, wasm_bindgen_test_configure};

use crate::{BUDGET, FEWEST, all_cases, conform, judge};

wasm_bindgen_test_configure!(run_in_dedicated_worker);

/// Requests subgroups for every device, as the npm package does.
const REQUEST_SUBGROUPS: &str = "
    const original = GPUAdapter.prototype.requestDevice;
    GPUAdapter.prototype.requestDevice = function (descriptor) {
        const features = [...(descriptor?.requiredFeatures ?? [])];
        if (this.features.has('subgroups')) features.push('subgroups');
        return original.call(this, { ...descriptor, requiredFeatures: features });
    };";

/// Whether the browser's adapter has a feature. Chromium's software adapter has `subgroups`, Firefox on lavapipe `shader-f16`.
async fn has(feature: &str) -> bool {
    let asked = format!("navigator.gpu.requestAdapter().then((adapter) => adapter.features.has('{feature}'))");
    let promise = js_sys::eval(&asked).expect("a browser with WebGPU");
    JsFuture::from(js_sys::Promise::resolve(&promise)).await.expect("an adapter").is_truthy()
}

async fn adapter() -> BrowserAdapter {
    BrowserAdapter { name: "browser".into(), is_software: true, has_subgroups: has("subgroups").await }
}

#[wasm_bindgen_test]
async fn cpu_matches_oracle() {
    let (executed, failed) = conform(&Device::cpu(), &all_cases(), Some(BUDGET)).await;
    judge(executed, failed, FEWEST[1]);
}

#[wasm_bindgen_test]
async fn gpu_matches_oracle() {
    js_sys::eval(REQUEST_SUBGROUPS).expect("a browser with WebGPU");
    let (mut executed, mut failed) = (0, 0);
    let mut tiers = vec![Tier::Baseline, Tier::Scalar];
    for (tier, feature) in [(Tier::Subgroups, "subgroups"), (Tier::F16, "shader-f16")] {
        if has(feature).await {
            tiers.push(tier);
        }
    }
    assert!(tiers.len() > 2, "neither subgroups nor shader-f16");
    let adapter = adapter().await;
    for tier in tiers {
        let device = Device::open(&DeviceChoice::Gpu, Some(&adapter), Some(tier)).await.expect("an adapter");
        let of_tier = conform(&device, &all_cases(), Some(BUDGET)).await;
        (executed, failed) = (executed + of_tier.0, failed + of_tier.1);
    }
    judge(executed, failed, FEWEST[0]);
}

/// Gives the browser a broken shader until `restore` is called. The browser reports the shader's error only after it
/// has refused to run it.
const BREAK_SHADERS: &str = "
    const { createShaderModule, popErrorScope } = GPUDevice.prototype;
    globalThis.restore = () => Object.assign(GPUDevice.prototype, { createShaderModule, popErrorScope });
    GPUDevice.prototype.createShaderModule = function (descriptor) {
        const code = descriptor.code.replace('fn softmax(', 'fn softmax(undefined_type: Nothing, ');
        return createShaderModule.call(this, { ...descriptor, code });
    };
    GPUDevice.prototype.popErrorScope = async function () {
        const error = await popErrorScope.call(this);
        await new Promise((resolve) => setTimeout(resolve, 300));
        return error;
    };";

#[wasm_bindgen_test]
async fn a_shader_that_does_not_compile_is_an_error() {
    let adapter = adapter().await;
    let softmax = async || -> Result<Vec<f32>, Error> {
        let device = Device::open(&DeviceChoice::Gpu, Some(&adapter), Some(Tier::Baseline)).await?;
        let x = device.upload("x", &[1, 2], &[1.0f32, 1.0])?;
        let y = Tensor::declare("y", Role::Activations, &[1, 2], DType::F32)?;
        let mut rec = device.recorder();
        kernels::softmax(&mut rec, &x, &y)?;
        device.run(&rec.finish(&mut Workspace::default()))?;
        device.read(&y).await
    };
    assert_eq!(softmax().await.expect("the unmodified shader"), [0.5, 0.5]);
    js_sys::eval(BREAK_SHADERS).expect("a browser with WebGPU");
    let broken = softmax().await;
    js_sys::eval("restore()").expect("broken shaders");
    let Err(Error::Gpu { message, .. }) = &broken else { panic!("{broken:?}") };
    assert!(message.contains("Nothing"), "{message}");
}
