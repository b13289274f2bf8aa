//! The JavaScript interface, wrapped by the npm package in `npm/`. Outside this module, only `platform` and byte
//! readers use JavaScript types.
//!
//! JavaScript objects have camelCase keys. Errors are `Error` objects whose `code` is [`Error::code`].

#[cfg(feature = "web")]
mod bench;
#[cfg(target_feature = "atomics")]
mod cpu;
#[cfg(feature = "web-device")]
mod device;
#[cfg(feature = "web")]
mod embedder;
#[cfg(feature = "web")]
mod encoder;
#[cfg(feature = "web")]
mod engine;
#[cfg(feature = "web")]
mod header;
#[cfg(feature = "web")]
mod index;
#[cfg(feature = "web-kernels")]
mod kernels;
#[cfg(any(feature = "web", feature = "web-speech"))]
mod loader;
#[cfg(feature = "web")]
mod model;
#[cfg(feature = "web")]
mod mol;
#[cfg(feature = "web")]
mod reranker;
#[cfg(feature = "web")]
mod saving;
#[cfg(feature = "web-text")]
mod text;
#[cfg(feature = "web-speech")]
mod transcriber;
#[cfg(feature = "web")]
mod vision;
#[cfg(any(feature = "web", feature = "web-speech"))]
mod work;

#[cfg(feature = "web-device")]
use serde::Serialize;
#[cfg(feature = "web-device")]
use serde::de::DeserializeOwned;
use wasm_bindgen::prelude::*;

use crate::error::Error;
#[cfg(feature = "web-device")]
use device::Device;

#[wasm_bindgen(start)]
fn start() {
    // A panic traps without a message. The console adds the stack, and the package reads the property.
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.to_string().into();
        web_sys::console::error_1(&message);
        let _ = js_sys::Reflect::set(&js_sys::global(), &"tilewrightPanic".into(), &message);
    }));
}

/// The crate's version.
#[wasm_bindgen]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").into()
}

/// A JavaScript error with a `code`.
fn to_js_error(error: Error) -> JsValue {
    as_js_error(&error)
}

/// Like [`to_js_error`], for an error that is still needed. An option is named as in JavaScript.
fn as_js_error(error: &Error) -> JsValue {
    let mut message = error.to_string();
    if let Error::Option { option, .. } = error {
        message = message.replacen(option, &camel_case(option), 1);
    }
    let js = js_sys::Error::new(&message);
    // Setting a property of a new object never fails.
    let _ = js_sys::Reflect::set(&js, &"code".into(), &error.code().into());
    js.into()
}

/// `context_length` as `contextLength`.
fn camel_case(name: &str) -> String {
    let mut parts = name.split('_');
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |name, part| {
        let (initial, rest) = part.split_at(part.len().min(1));
        name + &initial.to_ascii_uppercase() + rest
    })
}

/// A plain JavaScript object.
#[cfg(feature = "web-device")]
fn to_js(value: &impl Serialize) -> Result<JsValue, JsValue> {
    value.serialize(&serde_wasm_bindgen::Serializer::json_compatible()).map_err(JsValue::from)
}

/// Bytes on the device: `{ weightsBytes, cacheBytes, activationsBytes, totalBytes }`.
#[cfg(any(feature = "web", feature = "web-speech"))]
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

/// Deserialises an argument.
#[cfg(feature = "web-device")]
fn from_js<T: DeserializeOwned>(option: &'static str, value: JsValue) -> Result<T, JsValue> {
    serde_wasm_bindgen::from_value(value).map_err(|e| {
        let (expected, found) = ("an object as documented".into(), format!("refused: {e}"));
        to_js_error(Error::Option { option, expected, found })
    })
}

/// The element of `all` with the given name, if any.
#[cfg(feature = "web-device")]
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
