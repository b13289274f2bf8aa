//! Servers whose GPU is lost: texts in hand go on, the CPU takes over where that happens too often, and measures tell of it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tilewright::engine::{Engine, EngineOptions};
use tilewright::serve::{Decoder, Loaded, ModelSpec, ServerOptions};
use tilewright::{Breaker, BreakerOptions, Device, DeviceChoice, EmbedOptions, Embedder, Error, Model, Recovery};

use super::client::{Connection, done, get, request};
use super::common;
use super::server::{Running, encoder_path, start};

/// The GPU that is opened, and opened anew when it was lost.
#[derive(Clone, Default)]
struct Gpu(Arc<Mutex<Option<Device>>>);

impl Gpu {
    fn open(&self) -> Result<Device, Error> {
        let mut device = self.0.lock().unwrap();
        match &*device {
            Some(device) if !device.is_lost() => Ok(device.clone()),
            _ => {
                let opened = pollster::block_on(Device::open_in(&DeviceChoice::Gpu, None, None))?;
                Ok(device.insert(opened).clone())
            }
        }
    }

    fn lose(&self) {
        self.0.lock().unwrap().as_ref().unwrap().destroy();
    }
}

/// A server with a model and an encoder on a GPU, which may be lost once: the second time is too often.
fn on_gpu(gpu: &Gpu) -> Running {
    let options = BreakerOptions { losses: 2, within: Duration::from_secs(1 << 30), retry_after: None };
    let breakers = [(); 2].map(|()| Arc::new(Breaker::new(options)));
    let [of_story, of_encoder] = breakers.clone();
    let [for_story, for_encoder] = [gpu.clone(), gpu.clone()];
    let story = move || {
        let (gpu, breaker) = (for_story.clone(), of_story.clone());
        let recovery = move || Recovery::new(move || gpu.open(), Model::builtin, |_| ()).with_breaker(breaker);
        let model = Model::builtin(&for_story.open()?)?;
        let engine = Engine::spawn_with(vec![(model, recovery)], &EngineOptions::default())?;
        Ok(Loaded::Decoder(Arc::new(Decoder::of(engine, Some("chatml"))?)))
    };
    let encoder = move || {
        let device = match of_encoder.admits(std::time::Instant::now()) {
            true => for_encoder.open()?,
            false => common::cpu(),
        };
        Ok(Loaded::Embedder(Embedder::load(&device, encoder_path("nomic"), EmbedOptions::default())?))
    };
    let [of_story, of_encoder] = breakers;
    let models = vec![
        ModelSpec::new("story", 1 << 20, story).with_breakers(vec![of_story]),
        ModelSpec::new("nomic", 1 << 20, encoder).with_breakers(vec![of_encoder]),
    ];
    start(models, ServerOptions::default())
}

/// The text of a streamed completion; `after` is called when its first part is there.
fn streamed(server: &Running, after: impl FnOnce()) -> String {
    let body = json!({
        "model": "story", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "stream": true,
        "logit_bias": {"2": -100},
    });
    let mut connection = Connection::open(server.address);
    let json = ("content-type", "application/json");
    connection.write(&request("POST", "/v1/completions", &[json], body.to_string().as_bytes()));
    assert_eq!(connection.head().status, 200);
    let mut text = connection.chunk();
    after();
    loop {
        match connection.chunk() {
            chunk if chunk.is_empty() => break,
            chunk => text.extend(chunk),
        }
    }
    let text = String::from_utf8(text).unwrap();
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let parts = events.filter_map(|event| serde_json::from_str::<Json>(event).ok());
    parts.map(|part| part["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{part}")).to_owned()).collect()
}

fn embedded(server: &Running) -> Vec<f64> {
    let answer = done(server.address, "/v1/embeddings", json!({"model": "nomic", "input": "a text"})).json();
    answer["data"][0]["embedding"].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn a_lost_gpu_is_a_pause_and_one_that_is_lost_again_is_replaced() {
    let gpu = Gpu::default();
    if common::gpu_from(gpu.open()).is_none() {
        return;
    }
    let server = on_gpu(&gpu);
    let (whole, vector) = (streamed(&server, || ()), embedded(&server));
    let health = || get(server.address, "/health").json();
    let expected = json!({"status": "ok", "models": 2, "loaded": 2, "fallback": 0, "device_lost": 0});
    assert_eq!(health(), expected);
    let measure = |name: &str| {
        let text = String::from_utf8(get(server.address, "/metrics").body).unwrap();
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        found.unwrap_or_else(|| panic!("{name} in {text}"))
    };
    assert_eq!(streamed(&server, || gpu.lose()), whole);
    assert_eq!(embedded(&server), vector);
    assert_eq!((health()["status"].clone(), health()["device_lost"].clone()), (json!("ok"), json!(2)));
    for model in ["story", "nomic"] {
        let lost = format!("tilewright_device_lost_total{{model=\"{model}\",reason=\"destroyed\"}}");
        assert_eq!(measure(&lost), 1);
    }
    assert_eq!(measure("tilewright_fallback_tokens_total{model=\"story\"}"), 0);
    // The CPU goes on with the same text; its vectors differ in rounding alone.
    assert_eq!(streamed(&server, || gpu.lose()), whole);
    let product: f64 = embedded(&server).iter().zip(&vector).map(|(a, b)| a * b).sum();
    assert!((product - 1.0).abs() < 1e-5, "{product}");
    let expected = json!({"status": "degraded", "models": 2, "loaded": 2, "fallback": 2, "device_lost": 4});
    assert_eq!(health(), expected);
    let n_tokens = measure("tilewright_fallback_tokens_total{model=\"story\"}");
    assert!((1..24).contains(&n_tokens), "{n_tokens}");
    assert_eq!(measure("tilewright_fallbacks_total{model=\"story\"}"), 1);
    assert_eq!(measure("tilewright_fallback{model=\"story\"}"), 1);
    assert_eq!(measure("tilewright_recoveries_total{model=\"story\"}"), 2);
    assert_eq!(measure("tilewright_engine_failed_total{model=\"story\"}"), 0);
    // There is no GPU any more that could be lost.
    gpu.lose();
    assert_eq!(streamed(&server, || gpu.lose()), whole);
}
