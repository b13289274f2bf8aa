//! Servers that lose their GPU: running requests continue, the CPU takes over after repeated losses, and metrics
//! report it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tilewright::engine::{Engine, EngineOptions};
use tilewright::{Breaker, BreakerOptions, Device, DeviceChoice, EmbedOptions, Embedder, Error, Model, Recovery};
use tilewright_serve::{Decoder, Loaded, ModelSpec, ServerOptions};

use super::client::{Connection, done, get, request};
use super::common;
use super::server::{Running, encoder_path, load_story, start, start_loading};

/// The opened GPU, reopened after a loss.
#[derive(Clone, Default)]
pub struct Gpu(Arc<Mutex<Option<Device>>>);

impl Gpu {
    pub fn open(&self) -> Result<Device, Error> {
        let mut device = self.0.lock().unwrap();
        match &*device {
            Some(device) if !device.is_lost() => Ok(device.clone()),
            _ => {
                let opened = pollster::block_on(Device::open_in(&DeviceChoice::Gpu, None, None))?;
                Ok(device.insert(opened).clone())
            }
        }
    }

    pub fn lose(&self) {
        self.0.lock().unwrap().as_ref().unwrap().destroy();
    }
}

/// A server with a model and an encoder on a GPU, which may be lost once: a second loss is too many.
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

/// A connection with a completion request.
fn completion(server: &Running, is_streamed: bool) -> Connection {
    let body = json!({
        "model": "story", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "stream": is_streamed,
        "logit_bias": {"2": -100},
    });
    let mut connection = Connection::open(server.address);
    let json = ("content-type", "application/json");
    connection.write(&request("POST", "/v1/completions", &[json], body.to_string().as_bytes()));
    connection
}

/// The rest of a partly read stream.
fn to_end(connection: &mut Connection, mut text: Vec<u8>) -> String {
    loop {
        match connection.chunk() {
            chunk if chunk.is_empty() => return String::from_utf8(text).unwrap(),
            chunk => text.extend(chunk),
        }
    }
}

/// Text of a streamed completion; calls `after` when its first chunk arrives.
fn streamed(server: &Running, after: impl FnOnce()) -> String {
    let mut connection = completion(server, true);
    assert_eq!(connection.head().status, 200);
    let first = connection.chunk();
    after();
    let text = to_end(&mut connection, first);
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let parts = events.filter_map(|event| serde_json::from_str::<Json>(event).ok());
    parts.map(|part| part["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{part}")).to_owned()).collect()
}

fn measured(server: &Running, name: &str) -> u64 {
    let text = String::from_utf8(get(server.address, "/metrics").body).unwrap();
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    found.unwrap_or_else(|| panic!("{name} in {text}"))
}

fn embedded(server: &Running) -> Vec<f64> {
    let answer = done(server.address, "/v1/embeddings", json!({"model": "nomic", "input": "a text"})).json();
    answer["data"][0]["embedding"].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn lost_gpu_delays_answers_and_repeated_loss_uses_the_cpu() {
    let gpu = Gpu::default();
    if common::gpu_from(gpu.open()).is_none() {
        return;
    }
    let server = on_gpu(&gpu);
    let (whole, vector) = (streamed(&server, || ()), embedded(&server));
    let health = || {
        let mut health = get(server.address, "/health").json();
        let backends =
            health["devices"].as_array().unwrap().iter().map(|device| device["backend"].clone()).collect::<Vec<_>>();
        health.as_object_mut().unwrap().retain(|name, _| !matches!(name.as_str(), "devices" | "version" | "failed"));
        (health, backends)
    };
    let expected = json!({"status": "ok", "models": 2, "loaded": 2, "down": 0, "fallback": 0, "device_lost": 0});
    let (found, backends) = health();
    assert!(found == expected && backends.iter().all(|backend| backend != "cpu"), "{found} {backends:?}");
    let measure = |name: &str| measured(&server, name);
    assert_eq!(streamed(&server, || gpu.lose()), whole);
    assert_eq!(embedded(&server), vector);
    let (found, _) = health();
    assert_eq!((&found["status"], &found["device_lost"]), (&json!("ok"), &json!(2)));
    for model in ["story", "nomic"] {
        let lost = format!("tilewright_device_lost_total{{model=\"{model}\",reason=\"destroyed\"}}");
        assert_eq!(measure(&lost), 1);
    }
    assert_eq!(measure("tilewright_fallback_tokens_total{model=\"story\"}"), 0);
    // The CPU continues the same completion; its vectors differ only by rounding.
    assert_eq!(streamed(&server, || gpu.lose()), whole);
    let product: f64 = embedded(&server).iter().zip(&vector).map(|(a, b)| a * b).sum();
    assert!((product - 1.0).abs() < 1e-5, "{product}");
    let expected = json!({"status": "degraded", "models": 2, "loaded": 2, "down": 0, "fallback": 2, "device_lost": 4});
    let (found, backends) = health();
    assert!(found == expected && backends.iter().all(|backend| backend == "cpu"), "{found} {backends:?}");
    let n_tokens = measure("tilewright_fallback_tokens_total{model=\"story\"}");
    assert!((1..24).contains(&n_tokens), "{n_tokens}");
    assert_eq!(measure("tilewright_fallbacks_total{model=\"story\"}"), 1);
    assert_eq!(measure("tilewright_fallback{model=\"story\"}"), 1);
    assert_eq!(measure("tilewright_recoveries_total{model=\"story\"}"), 2);
    assert_eq!(measure("tilewright_engine_failed_total{model=\"story\"}"), 0);
    // No GPU is left to lose.
    gpu.lose();
    assert_eq!(streamed(&server, || gpu.lose()), whole);
}

/// A panicking step ends its answer with an error. Probes report the reload, and queued requests are answered after
/// it. Repeated panics stop the engine, and all clients get an error.
#[cfg(feature = "fault-injection")]
#[test]
fn panic_ends_its_answer_and_shows_in_health_probes() {
    use std::sync::mpsc::channel;
    use tilewright::{Call, Effect, Faults};

    let faults = Faults::default();
    let open = |faults: &Faults| pollster::block_on(Device::open_with_faults(&DeviceChoice::Cpu, None, None, faults));
    // The reload signals its start and waits for permission.
    let (begins, begun) = channel();
    let (let_go, may_load) = channel();
    let (ends, of_spec) = (Mutex::new(Some((begins, may_load))), faults.clone());
    let story = move || {
        let (begins, may_load) = ends.lock().unwrap().take().expect("the engine reloads the model");
        let (model, faults) = (Model::builtin(&open(&of_spec)?)?, of_spec.clone());
        let load = move |device: &Device| {
            begins.send(()).unwrap();
            may_load.recv().unwrap();
            Model::builtin(device)
        };
        let options = BreakerOptions { within: Duration::from_secs(1 << 30), ..BreakerOptions::default() };
        let breaker = Arc::new(Breaker::new(options));
        let recovery = move || Recovery::new(move || open(&faults), load, |_| ()).with_breaker(breaker);
        let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
        let engine = Engine::spawn_with(vec![(model, recovery)], &options)?;
        Ok(Loaded::Decoder(Arc::new(Decoder::of(engine, Some("chatml"))?)))
    };
    let server = start(vec![ModelSpec::new("story", 1 << 20, story)], ServerOptions::default());
    let health = || {
        let answer = get(server.address, "/health");
        (answer.status, answer.json()["status"].clone())
    };
    let up = || measured(&server, "tilewright_engine_up{model=\"story\"}");
    assert_eq!((health(), up()), ((200, json!("ok")), 1));

    // Within an answer.
    faults.next(Call::Submit, 8, Effect::Panic);
    let mut broken = completion(&server, true);
    assert_eq!(broken.head().status, 200);
    let text = to_end(&mut broken, Vec::new());
    let parts: Vec<Json> =
        text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    assert!(parts.len() > 2 && parts[0]["choices"][0]["text"].is_string(), "{text}");
    assert_eq!(parts.last().unwrap()["error"]["code"], "panic", "{text}");
    assert!(parts.iter().all(|part| part["choices"][0]["finish_reason"].is_null()), "{text}");
    assert!(!text.contains("injected"), "a panic's message must not reach clients: {text}");
    begun.recv().unwrap();
    assert_eq!((health(), up()), ((503, json!("down")), 0));
    let mut waits = completion(&server, false);
    let_go.send(()).unwrap();
    assert_eq!(waits.answer().status, 200);
    assert_eq!((health(), up()), ((200, json!("ok")), 1));
    let measure = |name: &str| measured(&server, &format!("tilewright_engine_{name}_total{{model=\"story\"}}"));
    assert_eq!((measure("panics"), measure("failed"), measure("finished")), (1, 1, 1));

    // Three times are too many.
    faults.every(Call::Submit, Effect::Panic);
    let_go.send(()).unwrap();
    for (status, code) in [(500, "panic"), (500, "panic"), (503, "stopped"), (503, "stopped")] {
        let answer = completion(&server, false).answer();
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (status, &json!(code)));
    }
    assert_eq!((health(), up()), ((503, json!("down")), 0));
    assert_eq!(measure("panics"), 3);
}

/// The server answers at once: probes see that it is loading, and requests wait.
#[test]
fn server_answers_while_a_model_is_loaded() {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let slow = ModelSpec::new("slow", 1, move || {
        let _ = released.lock().unwrap().recv();
        load_story(&EngineOptions { max_sequences: 1, ..EngineOptions::default() }, None)
    });
    let server = start_loading(vec![slow], ServerOptions::default());
    let address = server.address;
    let health = get(address, "/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("loading")));
    // The load may not have begun.
    while get(address, "/v1/models/slow").json()["status"] != json!("loading") {
        std::thread::yield_now();
    }
    let asking = std::thread::spawn(move || {
        done(address, "/v1/completions", json!({"model": "slow", "prompt": "Once", "max_tokens": 1}))
    });
    release.send(()).unwrap();
    asking.join().unwrap();
    while get(address, "/health").status != 200 {
        std::thread::yield_now();
    }
}
