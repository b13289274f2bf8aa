//! Devices, and functions that need no model.

use serde::Serialize;
use sha2::Digest;
use wasm_bindgen::prelude::*;

use super::{from_js, pick, to_js, to_js_error};
use crate::device::DeviceChoice;
use crate::error::Error;
use crate::gpu::BrowserAdapter;
use crate::shaders::{self, Tier};

/// Every linked shader as the browser compiles it: `{ label, tier, entryPoint, source }[]`.
#[wasm_bindgen(js_name = shaderVariants)]
pub fn shader_variants() -> Result<JsValue, JsValue> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shader {
        label: &'static str,
        tier: &'static str,
        entry_point: &'static str,
        source: String,
    }
    let shader = |kernel: &shaders::Kernel, variant: &shaders::Variant| Shader {
        label: variant.label,
        tier: variant.tier.name(),
        entry_point: kernel.name,
        source: variant.browser_source(),
    };
    let all: Vec<_> = shaders::ALL
        .iter()
        .flat_map(|kernel| kernel.variants.iter().map(move |variant| shader(kernel, variant)))
        .collect();
    to_js(&all)
}

/// An incremental SHA-256.
#[wasm_bindgen]
#[derive(Default)]
pub struct Sha256(sha2::Sha256);

#[wasm_bindgen]
impl Sha256 {
    /// An empty hash.
    #[wasm_bindgen(constructor)]
    pub fn new() -> Sha256 {
        Sha256::default()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far, in lower-case hexadecimal.
    pub fn hex(&self) -> String {
        self.0.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A device for models and kernels.
#[wasm_bindgen]
pub struct Device(pub(super) crate::Device);

#[wasm_bindgen]
impl Device {
    /// Opens `auto`, `gpu` or `cpu`. `adapter` describes the browser's adapter: `{ name, isSoftware, hasSubgroups }`;
    /// without it only the CPU is available. `tier` overrides the shader tier.
    pub async fn open(choice: String, adapter: JsValue, tier: Option<String>) -> Result<Device, JsValue> {
        let adapter: Option<BrowserAdapter> = from_js("adapter", adapter)?;
        let tier = pick("tier", tier, &Tier::ALL, Tier::name)?;
        let choice = match choice.as_str() {
            "auto" => DeviceChoice::Auto,
            "gpu" => DeviceChoice::Gpu,
            "cpu" => DeviceChoice::Cpu,
            other => {
                let (expected, found) = ("auto, gpu or cpu".into(), other.into());
                return Err(to_js_error(Error::Option { option: "device", expected, found }));
            }
        };
        crate::Device::open(&choice, adapter.as_ref(), tier).await.map(Device).map_err(to_js_error)
    }

    /// `{ name, backend, driver, tier, reason }`.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        to_js(self.0.info())
    }

    /// Totals since the device was opened: `{ dispatches, submits, buffersCreated, bindGroupsCreated,
    /// pipelinesCreated, bytesUploaded, reads, bytesRead }`.
    pub fn counters(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Totals {
            dispatches: u64,
            submits: u64,
            buffers_created: u64,
            bind_groups_created: u64,
            pipelines_created: u64,
            bytes_uploaded: u64,
            reads: u64,
            bytes_read: u64,
        }
        let totals = self.0.counters();
        to_js(&Totals {
            dispatches: totals.dispatches,
            submits: totals.submits,
            buffers_created: totals.buffers_created,
            bind_groups_created: totals.bind_groups_created,
            pipelines_created: totals.pipelines_created,
            bytes_uploaded: totals.bytes_uploaded,
            reads: totals.reads,
            bytes_read: totals.bytes_read,
        })
    }

    /// Notices of the self-test since the last call.
    #[wasm_bindgen(js_name = takeNotices)]
    pub fn take_notices(&self) -> Vec<String> {
        self.0.take_notices()
    }

    /// Whether kernels run on a GPU adapter.
    #[wasm_bindgen(js_name = isGpu)]
    pub fn is_gpu(&self) -> bool {
        self.0.is_gpu()
    }

    /// Memory available for a model, in bytes, if known.
    #[wasm_bindgen(js_name = availableBytes)]
    pub fn available_bytes(&self) -> Option<f64> {
        self.0.available_bytes().map(|bytes| bytes as f64)
    }

    /// Destroys a GPU device and frees its memory.
    pub fn destroy(&self) {
        self.0.destroy();
    }
}
