//! The surface for JavaScript. This module alone knows JavaScript; the npm package in `npm/` wraps it for people.
//!
//! Objects of JavaScript have camelCase keys. Errors are `Error` objects whose `code` is [`Error::code`].

#[cfg(feature = "web")]
mod bench;
#[cfg(feature = "web")]
mod embedder;
#[cfg(feature = "web")]
mod encoder;
#[cfg(feature = "web")]
mod index;
mod kernels;
#[cfg(feature = "web")]
mod loader;
#[cfg(feature = "web")]
mod model;
#[cfg(feature = "web")]
mod mol;
#[cfg(feature = "web")]
mod reranker;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::Digest;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

use crate::device::DeviceChoice;
use crate::error::Error;
use crate::gpu::BrowserAdapter;
use crate::shaders::{self, Tier};

#[wasm_bindgen(start)]
fn start() {
    // A panic ends the module with a trap that does not say why. The console adds the stack.
    std::panic::set_hook(Box::new(|panic| web_sys::console::error_1(&panic.to_string().into())));
}

/// The crate's version.
#[wasm_bindgen]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").into()
}

/// Every linked shader as a browser compiles it: `{ label, tier, entryPoint, source }[]`.
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

/// A SHA-256 in progress.
#[wasm_bindgen]
#[derive(Default)]
pub struct Sha256(sha2::Sha256);

#[wasm_bindgen]
impl Sha256 {
    /// Of nothing yet.
    #[wasm_bindgen(constructor)]
    pub fn new() -> Sha256 {
        Sha256::default()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far, in lower-case hexadecimal digits.
    pub fn hex(&self) -> String {
        self.0.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A device that models and kernels run on.
#[wasm_bindgen]
pub struct Device(crate::Device);

#[wasm_bindgen]
impl Device {
    /// Opens `auto`, `gpu` or `cpu`. `adapter` is what the page knows of the browser's adapter:
    /// `{ name, isSoftware, hasSubgroups }`; without it there is only the CPU. `tier` overrides the shader tier.
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

    /// Totals since the device was opened: `{ dispatches, submits, buffersCreated, bindGroupsCreated, pipelinesCreated,
    /// bytesUploaded, reads, bytesRead }`.
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

    /// What the self-test has had to say since this was last asked for.
    #[wasm_bindgen(js_name = takeNotices)]
    pub fn take_notices(&self) -> Vec<String> {
        self.0.take_notices()
    }

    /// Whether kernels run on a GPU adapter.
    #[wasm_bindgen(js_name = isGpu)]
    pub fn is_gpu(&self) -> bool {
        self.0.is_gpu()
    }

    /// Gives a GPU device up, with all its memory.
    pub fn destroy(&self) {
        self.0.destroy();
    }
}

/// Resolves in the event loop's next turn.
pub(crate) async fn next_turn() {
    // Windows, Node and Deno are no workers, but have this method as well.
    let scope = js_sys::global().unchecked_into::<web_sys::WorkerGlobalScope>();
    let promise = js_sys::Promise::new(&mut |resolve, _| {
        // Its errors are those of a callback that is text.
        let _ = scope.set_timeout_with_callback_and_timeout_and_arguments_0(&resolve, 0);
    });
    // The promise is never rejected.
    let _ = JsFuture::from(promise).await;
}

/// A JavaScript error with a `code`.
fn to_js_error(error: Error) -> JsValue {
    let js = js_sys::Error::new(&error.to_string());
    // Setting a property of a new object succeeds.
    let _ = js_sys::Reflect::set(&js, &"code".into(), &error.code().into());
    js.into()
}

/// A plain object of JavaScript.
fn to_js(value: &impl Serialize) -> Result<JsValue, JsValue> {
    value.serialize(&serde_wasm_bindgen::Serializer::json_compatible()).map_err(JsValue::from)
}

/// Bytes on the device: `{ weightsBytes, cacheBytes, activationsBytes, totalBytes }`.
#[cfg(feature = "web")]
fn plan_to_js(plan: &crate::MemoryPlan) -> Result<JsValue, JsValue> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Memory {
        weights_bytes: u64,
        cache_bytes: u64,
        activations_bytes: u64,
        total_bytes: u64,
    }
    to_js(&Memory {
        weights_bytes: plan.weights_bytes,
        cache_bytes: plan.cache_bytes,
        activations_bytes: plan.activations_bytes,
        total_bytes: plan.total_bytes(),
    })
}

/// Reads an argument.
fn from_js<T: DeserializeOwned>(option: &'static str, value: JsValue) -> Result<T, JsValue> {
    serde_wasm_bindgen::from_value(value).map_err(|e| {
        let (expected, found) = ("an object as documented".into(), format!("refused: {e}"));
        to_js_error(Error::Option { option, expected, found })
    })
}

/// The one of `all` with this name, if one is given.
fn pick<T: Copy>(
    option: &'static str,
    given: Option<String>,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<Option<T>, JsValue> {
    let Some(given) = given else { return Ok(None) };
    match all.iter().find(|&&one| name(one) == given) {
        Some(&found) => Ok(Some(found)),
        None => {
            let expected = all.iter().map(|&one| name(one)).collect::<Vec<_>>().join(", ");
            Err(to_js_error(Error::Option { option, expected, found: given }))
        }
    }
}
