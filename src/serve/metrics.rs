//! Measures of the server, in the text that Prometheus reads.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

use super::models::{Entry, Models};
use super::telemetry::Telemetry;
use crate::counters::Counters;
use crate::engine::{DeviceStats, EngineState, EngineStats, Usage};
use crate::recovery::{BreakerStats, Circuit};

/// Names and values of a measure's labels.
type Labels<const N: usize> = [(&'static str, String); N];

/// From a millisecond to a minute.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

type Times = Family<Labels<1>, Histogram, fn() -> Histogram>;

fn times() -> Times {
    Family::new_with_constructor(|| Histogram::new(SECONDS))
}

fn of_model(model: &str) -> Labels<1> {
    [("model", model.to_owned())]
}

/// Reads a count of an engine.
type Read = fn(&EngineStats) -> u64;

/// Numbers of an engine as they are now.
const NOW: [(&str, &str, Read); 8] = [
    ("requests_queued", "Requests that wait for a place in a batch", |stats| stats.n_queued as u64),
    ("requests_running", "Requests that are computed", |stats| stats.n_running as u64),
    ("cache_tokens", "Tokens that the cache of keys and values has room for", |stats| stats.cache_tokens),
    ("cache_pages", "Pages of the cache of keys and values", |stats| stats.n_pages as u64),
    ("cache_free_pages", "Pages that hold nothing", |stats| stats.n_free_pages as u64),
    ("cache_kept_pages", "Pages of earlier sequences that a new one can take", |stats| stats.n_kept_pages as u64),
    ("cache_host_pages", "Pages of earlier sequences in the host's memory", |stats| stats.n_host_pages as u64),
    ("cache_host_bytes", "Bytes of pages in the host's memory", |stats| stats.host_page_bytes),
];

/// Numbers of an engine since its model was loaded.
const SINCE: [(&str, &str, Read); 19] = [
    ("engine_prompt_tokens", "Tokens of prompts that were computed", |stats| stats.prompt_tokens),
    ("engine_cached_tokens", "Tokens of prompts that an earlier sequence had computed", |stats| stats.cached_tokens),
    ("engine_generated_tokens", "Tokens that were generated, also of answers that are not over", |stats| {
        stats.generated_tokens
    }),
    ("engine_submitted", "Requests that the engine took", |stats| stats.n_submitted),
    ("engine_refused", "Requests that were refused because the queue was full", |stats| stats.n_refused),
    ("engine_finished", "Texts that ended by themselves", |stats| stats.n_finished),
    ("engine_cancelled", "Texts that were cancelled, or whose time was over", |stats| stats.n_cancelled),
    ("engine_failed", "Texts that ended with an error", |stats| stats.n_failed),
    ("engine_panics", "Steps that panicked; the model is loaded again after each", |stats| stats.n_panics),
    ("engine_drafted_tokens", "Tokens that were guessed", |stats| stats.drafted_tokens),
    ("engine_accepted_tokens", "Guessed tokens that the model chose as well", |stats| stats.accepted_tokens),
    ("engine_decode_passes", "Passes that computed a token of each running sequence", |stats| stats.n_decode_passes),
    (
        "engine_ahead_passes",
        "Of these the ones that a GPU had before the tokens of the one before were read",
        |stats| stats.n_ahead_passes,
    ),
    ("engine_prompt_passes", "Passes over a part of a prompt", |stats| stats.n_prompt_passes),
    ("spilled_pages", "Pages that went to the host's memory", |stats| stats.spilled_pages),
    ("restored_pages", "Pages that came back from the host's memory", |stats| stats.restored_pages),
    ("recoveries", "Times that texts went on with the model loaded again", |stats| stats.n_recoveries),
    ("slow_steps", "Steps that took longer than their limit", |stats| stats.n_slow_steps),
    ("fallback_tokens", "Tokens that the CPU generated in a GPU's place", |stats| stats.fallback_tokens),
];

/// Reads a count of losses.
type ReadLosses = fn(&BreakerStats) -> u64;

/// Numbers of what became of lost devices.
const LOSSES: [(&str, &str, ReadLosses); 2] = [
    ("fallbacks", "Times that the CPU took the place of a GPU that failed", |stats| stats.n_opened),
    ("fallback_trials", "Times that such a GPU was tried again", |stats| stats.n_trials),
];

/// Numbers of each of an engine's devices.
const OF_DEVICES: [(&str, &str, Read); 3] = [
    ("device_prompt_tokens", "Tokens of prompts that a device computed", |stats| stats.prompt_tokens),
    ("device_generated_tokens", "Tokens that a device generated", |stats| stats.generated_tokens),
    ("device_finished", "Texts that ended by themselves on a device", |stats| stats.n_finished),
];

/// Reads a count of a device.
type ReadDevice = fn(&Counters) -> u64;

/// Numbers of a device since it was opened. Models of one device have the same.
const COUNTED: [(&str, &str, ReadDevice); 7] = [
    ("device_dispatches", "Kernels run", |counters| counters.dispatches),
    ("device_submits", "Submissions to a GPU, or recordings that the CPU ran", |counters| counters.submits),
    ("device_uploaded_bytes", "Bytes written by the host", |counters| counters.bytes_uploaded),
    ("device_read_bytes", "Bytes read back by the host", |counters| counters.bytes_read),
    ("device_buffers_created", "Buffers created", |counters| counters.buffers_created),
    ("pool_hits", "Buffers that the pool had", |counters| counters.pool_hits),
    ("pool_misses", "Buffers that had to be created for the pool", |counters| counters.pool_misses),
];

/// What is measured.
pub struct Metrics {
    registry: Registry,
    requests: Family<Labels<2>, Counter>,
    request_times: Times,
    first_token_times: Times,
    token_times: Times,
    tokens: Family<Labels<2>, Counter>,
    connections: Gauge<i64, AtomicI64>,
    memory: Family<Labels<2>, Gauge>,
    loaded: Family<Labels<1>, Gauge>,
    now: Vec<Family<Labels<1>, Gauge>>,
    since: Vec<Family<Labels<1>, Counter<u64, AtomicU64>>>,
    counted: Vec<Family<Labels<1>, Counter<u64, AtomicU64>>>,
    busy: Family<Labels<1>, Counter<f64, AtomicU64>>,
    device_lost: Family<Labels<2>, Counter<u64, AtomicU64>>,
    fallback: Family<Labels<1>, Gauge>,
    up: Family<Labels<1>, Gauge>,
    losses: Vec<Family<Labels<1>, Counter<u64, AtomicU64>>>,
    device_running: Family<Labels<2>, Gauge>,
    of_devices: Vec<Family<Labels<2>, Counter<u64, AtomicU64>>>,
}

fn register<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

fn register_times(registry: &mut Registry, name: &str, help: &str) -> Times {
    let times = times();
    registry.register_with_unit(name, help, Unit::Seconds, times.clone());
    times
}

impl Metrics {
    /// With those of traces, if there are any.
    pub fn new(telemetry: &Telemetry) -> Metrics {
        let mut registry = Registry::with_prefix("tilewright");
        let all = &mut registry;
        let requests = register(all, "http_requests", "Requests by endpoint and status", Family::default());
        let request_times = register_times(all, "request", "From a request's headers to the end of its answer");
        let first_token_times =
            register_times(all, "time_to_first_token", "From a request to the first token of an answer");
        let token_times = register_times(all, "time_between_tokens", "From one token of an answer to the next");
        let tokens = register(
            all,
            "tokens",
            "Tokens of answered requests: of prompts, of those the ones that were cached, and generated",
            Family::default(),
        );
        let connections = register(all, "connections", "Connections that are open", Gauge::default());
        let memory = Family::<Labels<2>, Gauge>::default();
        all.register_with_unit("memory", "Memory of loaded models by kind", Unit::Bytes, memory.clone());
        let loaded = register(all, "model_loaded", "Whether a model is loaded", Family::default());
        let now = NOW.map(|(name, help, _)| register(all, name, help, Family::default()));
        let since = SINCE.map(|(name, help, _)| register(all, name, help, Family::default()));
        let busy = Family::<Labels<1>, Counter<f64, AtomicU64>>::default();
        let help = "Time in steps of the engine, on a GPU with the waiting for it";
        all.register_with_unit("engine_busy", help, Unit::Seconds, busy.clone());
        let counted = COUNTED.map(|(name, help, _)| register(all, name, help, Family::default()));
        let device_lost = register(all, "device_lost", "Losses of a model's GPU, by reason", Family::default());
        let fallback =
            register(all, "fallback", "Whether the CPU has the place of a GPU that failed", Family::default());
        let up = register(
            all,
            "engine_up",
            "Whether a model's engine computes, or would if it were loaded",
            Family::default(),
        );
        let losses = LOSSES.map(|(name, help, _)| register(all, name, help, Family::default()));
        let device_running =
            register(all, "device_requests_running", "Requests that a device computes", Family::default());
        let of_devices = OF_DEVICES.map(|(name, help, _)| register(all, name, help, Family::default()));
        telemetry.register(all);
        Metrics {
            device_lost,
            fallback,
            up,
            losses: losses.into(),
            device_running,
            of_devices: of_devices.into(),
            registry,
            requests,
            request_times,
            first_token_times,
            token_times,
            tokens,
            connections,
            memory,
            loaded,
            now: now.into(),
            since: since.into(),
            counted: counted.into(),
            busy,
        }
    }

    /// A request was answered.
    pub fn answered(&self, endpoint: &str, status: u16) {
        self.requests.get_or_create(&[("endpoint", endpoint.to_owned()), ("status", status.to_string())]).inc();
    }

    /// A request's answer is out, or its client is gone.
    pub fn ended(&self, endpoint: &str, time: Duration) {
        self.request_times.get_or_create(&[("endpoint", endpoint.to_owned())]).observe(time.as_secs_f64());
    }

    /// The first token of an answer came so long after the request.
    pub fn first_token(&self, model: &str, time: Duration) {
        self.first_token_times.get_or_create(&of_model(model)).observe(time.as_secs_f64());
    }

    /// A further token came so long after the one before.
    pub fn further_token(&self, model: &str, time: Duration) {
        self.token_times.get_or_create(&of_model(model)).observe(time.as_secs_f64());
    }

    /// An answer is over, or was given up.
    pub fn used(&self, model: &str, usage: Usage) {
        let count = |kind: &str, n: usize| {
            let labels = [("model", model.to_owned()), ("kind", kind.to_owned())];
            self.tokens.get_or_create(&labels).inc_by(n as u64);
        };
        count("prompt", usage.prompt_tokens);
        count("cached", usage.cached_tokens);
        count("generated", usage.completion_tokens);
    }

    /// Counts a connection until what it gives is dropped.
    pub fn connected(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }

    fn tell_losses(&self, entry: &Entry) {
        let (labels, stats) = (of_model(entry.name()), entry.losses());
        for (reason, n) in stats.losses() {
            let labels = [("model", entry.name().to_owned()), ("reason", reason.name().to_owned())];
            self.device_lost.get_or_create(&labels).inner().store(n, Ordering::Relaxed);
        }
        self.fallback.get_or_create(&labels).set(i64::from(stats.circuit == Circuit::Open));
        for ((_, _, read), counter) in LOSSES.iter().zip(&self.losses) {
            counter.get_or_create(&labels).inner().store(read(&stats), Ordering::Relaxed);
        }
    }

    fn tell_devices(&self, entry: &Entry) {
        // One that is replaced has another name, and computes nothing any more.
        for DeviceStats { device, stats, .. } in entry.devices() {
            let labels = [("model", entry.name().to_owned()), ("device", device)];
            self.device_running.get_or_create(&labels).set(stats.n_running.try_into().unwrap_or(i64::MAX));
            for ((_, _, read), counter) in OF_DEVICES.iter().zip(&self.of_devices) {
                counter.get_or_create(&labels).inner().store(read(&stats), Ordering::Relaxed);
            }
        }
    }

    /// All of it.
    pub fn text(&self, models: &Models) -> String {
        for entry in &models.entries {
            let labels = of_model(entry.name());
            let plan = entry.loaded().map(|loaded| loaded.plan());
            self.loaded.get_or_create(&labels).set(i64::from(plan.is_some()));
            let plan = plan.flatten().unwrap_or_default();
            let kinds =
                [("weights", plan.weights_bytes), ("cache", plan.cache_bytes), ("activations", plan.activations_bytes)];
            for (kind, bytes) in kinds {
                let labels = [("model", entry.name().to_owned()), ("kind", kind.to_owned())];
                self.memory.get_or_create(&labels).set(bytes.try_into().unwrap_or(i64::MAX));
            }
            if let Some(counters) = entry.counters() {
                for ((_, _, read), counter) in COUNTED.iter().zip(&self.counted) {
                    counter.get_or_create(&labels).inner().store(read(&counters), Ordering::Relaxed);
                }
            }
            self.up.get_or_create(&labels).set(i64::from(entry.engine_state() == EngineState::Running));
            self.tell_losses(entry);
            self.tell_devices(entry);
            let Some(stats) = entry.stats() else { continue };
            let seconds = stats.busy_micros as f64 / 1e6;
            self.busy.get_or_create(&labels).inner().store(seconds.to_bits(), Ordering::Relaxed);
            for ((_, _, read), gauge) in NOW.iter().zip(&self.now) {
                gauge.get_or_create(&labels).set(read(&stats).try_into().unwrap_or(i64::MAX));
            }
            for ((_, _, read), counter) in SINCE.iter().zip(&self.since) {
                counter.get_or_create(&labels).inner().store(read(&stats), Ordering::Relaxed);
            }
        }
        let mut text = String::new();
        // Writing to a text does not fail.
        match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(_) => String::new(),
        }
    }
}

/// An open connection.
pub struct Connected(Gauge<i64, AtomicI64>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}
