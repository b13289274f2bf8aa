//! Shared by the benches: measured devices, sampling times and clocks.
#![allow(dead_code)] // each bench uses a part

use std::time::{Duration, Instant};

use criterion::Criterion;
use tilewright::{Device, DeviceChoice, Error, Recording, Tensor, Tier, shaders};

/// Whether to measure all sizes, with more samples. Otherwise a bench takes a few minutes on two slow cores.
pub fn is_full() -> bool {
    std::env::var_os("TILEWRIGHT_BENCH").is_some_and(|value| value == "full")
}

/// Sample counts and times of the mode; the command line overrides them.
pub fn criterion() -> Criterion {
    let (samples, warm_up_ms, measure_ms) = if is_full() { (30, 1000, 5000) } else { (10, 200, 600) };
    Criterion::default()
        .sample_size(samples)
        .warm_up_time(Duration::from_millis(warm_up_ms))
        .measurement_time(Duration::from_millis(measure_ms))
        .without_plots()
        .configure_from_args()
}

/// A device and its name in results.
pub struct Target {
    /// Tier, or `cpu`.
    pub name: &'static str,
    pub device: Device,
    /// Whether the executor itself times kernels, rather than the host from submission to completion.
    has_timer: bool,
}

/// The CPU executor and each tier of the first adapter. Prints each, and the reason if there is no adapter.
pub fn targets() -> Vec<Target> {
    let mut targets = Vec::new();
    for tier in Tier::ALL {
        match pollster::block_on(Device::open(&DeviceChoice::Gpu, Some(tier))) {
            Ok(device) => {
                let adapters = pollster::block_on(Device::adapters());
                let name = &device.info().name;
                let has_timer = adapters.iter().any(|a| a.name == *name && a.has_timestamps);
                targets.push(Target { name: tier.name(), device, has_timer });
            }
            Err(error @ Error::NoAdapter { .. }) => {
                println!("skipped: {error}");
                break;
            }
            Err(error) => println!("skipped: tier {}: {error}", tier.name()),
        }
    }
    targets.push(Target { name: "cpu", device: Device::cpu(), has_timer: true });
    for target in &targets {
        let info = target.device.info();
        let clock = match (target.device.is_gpu(), target.has_timer) {
            (true, true) => "GPU timestamps",
            (true, false) => "submission to completion",
            (false, _) => "the host's clock around each kernel",
        };
        println!("{:<10} {} ({} {}), clock: {clock}", target.name, info.name, info.backend, info.driver);
    }
    targets
}

impl Target {
    /// Whether this device runs its own variant of a kernel: a tier without one uses the baseline's. A name may have
    /// suffixes: `attention/decode/F16` is the kernel `attention_decode`. On the CPU the naive matrix product equals
    /// the tiled one.
    pub fn has_own(&self, kernel: &str) -> bool {
        if !self.device.is_gpu() {
            return kernel != "matmul_naive";
        }
        let (name, _) = kernel.split_once(", ").unwrap_or((kernel, ""));
        let parts: Vec<&str> = name.trim_end_matches("_naive").split('/').take(2).collect();
        let (kernel, tier) = (parts.join("_"), self.device.tier());
        let found = shaders::ALL.iter().find(|k| k.name == kernel).unwrap_or_else(|| panic!("{kernel} is a kernel"));
        tier == Tier::Baseline || found.variants.iter().any(|v| v.tier == tier)
    }

    /// Time of `n` runs of a recording. `result` is a tensor that the last kernel writes: reading it is how the host
    /// waits for a GPU without timestamps.
    pub fn time(&self, recording: &Recording, result: &Tensor, n: u64) -> Duration {
        if self.has_timer {
            let run = || pollster::block_on(self.device.run_profiled(recording)).expect("the recording runs");
            return (0..n).flat_map(|_| run()).map(|(_, time)| time).sum();
        }
        let start = Instant::now();
        for _ in 1..n {
            self.device.run(recording).expect("the recording runs");
        }
        let done = self.device.run_and_read(recording, result).and_then(pollster::block_on);
        done.expect("the recording runs");
        start.elapsed()
    }
}

/// Seeded numbers in [-1, 1): a bench needs ordinary floats, not good randomness.
pub fn uniform(n: usize) -> Vec<f32> {
    words(n).map(|word| word as f32 / (1u64 << 31) as f32 - 1.0).collect()
}

/// Seeded 32-bit words: the high bits of a linear congruential generator (Knuth, MMIX).
pub fn words(n: usize) -> impl Iterator<Item = u32> {
    let next =
        |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    std::iter::successors(Some(1u64), next).skip(1).take(n).map(|state| (state >> 32) as u32)
}
