//! Shared by the test binaries: devices or a visible skip, the data folder, seeded numbers, tolerances.
#![allow(dead_code)] // each binary uses a part

#[cfg(not(target_arch = "wasm32"))]
pub mod copier;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tilewright::Device;
#[cfg(not(target_arch = "wasm32"))]
use tilewright::generate::{Generation, StopReason};
#[cfg(not(target_arch = "wasm32"))]
use tilewright::{DeviceChoice, Error, Tier};
use web_time::SystemTime;

/// Waits for a future; tests may block.
#[cfg(not(target_arch = "wasm32"))]
pub fn block_on<F: Future>(future: F) -> F::Output {
    pollster::block_on(future)
}

/// Polls both on one thread.
#[cfg(not(target_arch = "wasm32"))]
pub async fn both<T>(first: impl Future<Output = T>, second: impl Future<Output = T>) -> [T; 2] {
    use std::{future::poll_fn, pin::pin, task::Poll};
    let (mut first, mut second) = (pin!(first), pin!(second));
    let mut done = [None, None];
    let all = poll_fn(|cx| {
        if done[0].is_none()
            && let Poll::Ready(value) = first.as_mut().poll(cx)
        {
            done[0] = Some(value);
        }
        if done[1].is_none()
            && let Poll::Ready(value) = second.as_mut().poll(cx)
        {
            done[1] = Some(value);
        }
        if done.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    });
    all.await;
    done.map(Option::unwrap)
}

/// Result of a generation: its ids, text and stop reason.
#[cfg(not(target_arch = "wasm32"))]
pub fn collect(generation: &mut Generation<'_>) -> (Vec<u32>, String, StopReason) {
    let (mut ids, mut text) = (Vec::new(), String::new());
    while let Some(piece) = block_on(generation.next()) {
        let piece = piece.unwrap();
        ids.push(piece.id);
        text += &piece.text;
    }
    (ids, text, generation.stop_reason().unwrap())
}

/// The first adapter in `tier`, or in its own tier. `None`, and the test reported as skipped, without an adapter or
/// the tier's features; without an adapter it fails if `REQUIRE_ADAPTER` is set. Reads and writes no files. Fails if
/// the self-test banned a variant, because a substitute would be tested in its place.
#[cfg(not(target_arch = "wasm32"))]
pub fn gpu(tier: Option<Tier>) -> Option<Device> {
    gpu_from(open_gpu(tier)).inspect(assert_none_banned)
}

/// Fails on any notice of the self-test, such as a pipeline without a check.
#[cfg(not(target_arch = "wasm32"))]
pub fn assert_tested(device: &Device) {
    // Notices about other tests' models may be among them.
    let mut notices = device.take_notices();
    notices.retain(|notice| notice.contains("untested") || notice.contains("self-test"));
    assert!(notices.is_empty(), "{notices:?}");
}

/// Counters of `device` after the self-test of the pipelines of `load` has run on a separate device: it runs once per
/// process and is not counted here.
#[cfg(not(target_arch = "wasm32"))]
pub fn counters_of_tested(device: &Device, load: impl FnOnce(&Device)) -> tilewright::Counters {
    if device.is_gpu() {
        load(&gpu(Some(device.tier())).expect("an adapter in this tier"));
    }
    device.counters()
}

/// The newly opened device; otherwise as [`gpu`].
#[cfg(not(target_arch = "wasm32"))]
pub fn gpu_from(opened: Result<Device, Error>) -> Option<Device> {
    there_or(opened, skip)
}

/// The first adapter in one of these tiers, the same for all tests of a run, or with `TILEWRIGHT_FULL` in each
/// supported one. Reports the others as left out; without any the test is skipped.
#[cfg(not(target_arch = "wasm32"))]
pub fn gpus(tiers: impl IntoIterator<Item = Tier>) -> Vec<Device> {
    or_skipped(gpus_beside_cpu(tiers))
}

/// As [`gpus`], for a test that also runs on the CPU and is never skipped.
#[cfg(not(target_arch = "wasm32"))]
pub fn gpus_beside_cpu(tiers: impl IntoIterator<Item = Tier>) -> Vec<Device> {
    in_drawn(open_gpu, tiers)
}

/// The available executors: always the CPU, and the first adapter or a note that it is missing.
#[cfg(not(target_arch = "wasm32"))]
pub fn executors() -> Vec<Device> {
    std::iter::once(cpu()).chain(found_by(open_gpu, [None])).collect()
}

/// The same functions with adapters opened once per process: on a software adapter, most of a test's time goes to
/// compiling pipelines. Not for tests that count a device's work, lose it, or inspect its memory.
#[cfg(not(target_arch = "wasm32"))]
pub mod shared {
    use std::sync::{Mutex, PoisonError};

    use tilewright::{Device, Error, Tier};

    static OPENED: Mutex<Vec<(Option<Tier>, Device)>> = Mutex::new(Vec::new());

    fn open_gpu(tier: Option<Tier>) -> Result<Device, Error> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device)) = opened.iter().find(|(known, _)| *known == tier) {
            return Ok(device.clone());
        }
        let device = super::open_gpu(tier)?;
        opened.push((tier, device.clone()));
        Ok(device)
    }

    /// See [`super::gpu`].
    pub fn gpu(tier: Option<Tier>) -> Option<Device> {
        super::gpu_from(open_gpu(tier)).inspect(super::assert_none_banned)
    }

    /// See [`super::gpus`].
    pub fn gpus(tiers: impl IntoIterator<Item = Tier>) -> Vec<Device> {
        super::or_skipped(gpus_beside_cpu(tiers))
    }

    /// See [`super::gpus_beside_cpu`].
    pub fn gpus_beside_cpu(tiers: impl IntoIterator<Item = Tier>) -> Vec<Device> {
        super::in_drawn(open_gpu, tiers)
    }

    /// The first adapter in each of these tiers that it supports. Without any the test is skipped.
    pub fn gpus_in_each(tiers: impl IntoIterator<Item = Tier>) -> Vec<Device> {
        super::or_skipped(super::found_by(open_gpu, tiers.into_iter().map(Some)).collect())
    }

    /// See [`super::executors`].
    pub fn executors() -> Vec<Device> {
        std::iter::once(super::cpu()).chain(super::found_by(open_gpu, [None])).collect()
    }
}

/// The adapter in the first supported tier of a random order, which is fixed for a run and begins with
/// `TILEWRIGHT_TIER` if set; in all supported tiers with `TILEWRIGHT_FULL`.
#[cfg(not(target_arch = "wasm32"))]
fn in_drawn(open: fn(Option<Tier>) -> Result<Device, Error>, tiers: impl IntoIterator<Item = Tier>) -> Vec<Device> {
    let tiers: Vec<Tier> = tiers.into_iter().collect();
    if is_full() || tiers.len() == 1 {
        return found_by(open, tiers.into_iter().map(Some)).collect();
    }
    let asked = std::env::var("TILEWRIGHT_TIER").ok();
    let mut order = shuffled(Tier::ALL.into_iter());
    order.sort_by_key(|tier| asked.as_deref() != Some(tier.name()));
    order.retain(|tier| tiers.contains(tier));
    let found: Vec<Device> = found_by(open, order.into_iter().map(Some)).take(1).collect();
    found.iter().for_each(|device| skip_part(format_args!("all tiers but {}", device.tier().name())));
    found
}

/// The adapter in each of these tiers, if available.
#[cfg(not(target_arch = "wasm32"))]
fn found_by(
    open: fn(Option<Tier>) -> Result<Device, Error>,
    tiers: impl IntoIterator<Item = Option<Tier>>,
) -> impl Iterator<Item = Device> {
    tiers.into_iter().filter_map(move |tier| there_or(open(tier), skip_part)).inspect(assert_none_banned)
}

#[cfg(not(target_arch = "wasm32"))]
fn or_skipped(found: Vec<Device>) -> Vec<Device> {
    if found.is_empty() {
        skip("no adapter has one of the tiers");
    }
    found
}

#[cfg(not(target_arch = "wasm32"))]
fn open_gpu(tier: Option<Tier>) -> Result<Device, Error> {
    block_on(Device::open_in(&DeviceChoice::Gpu, tier, None))
}

#[cfg(not(target_arch = "wasm32"))]
fn assert_none_banned(device: &Device) {
    let banned = device.banned();
    assert!(banned.is_empty(), "the self-test failed: {banned:?}");
}

#[cfg(not(target_arch = "wasm32"))]
fn there_or(opened: Result<Device, Error>, say: fn(String)) -> Option<Device> {
    match opened {
        Ok(device) => Some(device),
        Err(error @ Error::NoAdapter { .. }) => {
            assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set: {error}");
            say(format!("no adapter ({error})"));
            None
        }
        Err(error @ Error::Limit { .. }) => {
            say(error.to_string());
            None
        }
        Err(error) => panic!("an adapter is there and cannot be opened: {error}"),
    }
}

/// Whether to test everything (`scripts/test --full`). Otherwise a test with many cases of one kind samples them. A
/// browser has no environment: there the choice is made at compile time.
pub fn is_full() -> bool {
    if cfg!(target_arch = "wasm32") {
        option_env!("TILEWRIGHT_FULL").is_some()
    } else {
        std::env::var_os("TILEWRIGHT_FULL").is_some()
    }
}

/// Random seed of the run, printed on use so that another run can repeat the draw.
pub fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        let asked = std::env::var("TILEWRIGHT_SEED").ok();
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
        asked.map_or_else(now, |seed| seed.parse().expect("a number for TILEWRIGHT_SEED"))
    })
}

/// `n` of the items in a seeded order; with `TILEWRIGHT_FULL` all of them in their own order. For cases of one kind
/// that take seconds each.
pub fn drawn<T>(n: usize, items: impl IntoIterator<Item = T>) -> Vec<T> {
    let items = items.into_iter();
    if is_full() { items.collect() } else { shuffled(items).into_iter().take(n).collect() }
}

/// On a GPU as [`drawn`], because a software adapter compiles shaders for each. On the CPU all of them.
#[cfg(not(target_arch = "wasm32"))]
pub fn drawn_on<T>(device: &Device, n: usize, items: impl IntoIterator<Item = T>) -> Vec<T> {
    if device.is_gpu() { drawn(n, items) } else { items.into_iter().collect() }
}

fn shuffled<T>(items: impl Iterator<Item = T>) -> Vec<T> {
    println!("TILEWRIGHT_SEED={}", seed());
    let mut rng = Rng::new(seed());
    let mut ranked: Vec<(u32, T)> = items.map(|item| (rng.word(), item)).collect();
    ranked.sort_by_key(|&(rank, _)| rank);
    ranked.into_iter().map(|(_, item)| item).collect()
}

/// The CPU executor.
pub fn cpu() -> Device {
    Device::cpu()
}

/// Fills the buffers of a device's pool with this word.
pub fn poison_pool(device: &Device, word: u32) {
    // All at once: a dropped tensor returns its buffer to the pool.
    let mut held = Vec::new();
    for log_words in 2..=16 {
        for n in [4, 5, 6, 7] {
            for _ in 0..8 {
                let tensor = tilewright::Tensor::declare(
                    "poison",
                    tilewright::Role::Activations,
                    &[n << (log_words - 2)],
                    tilewright::DType::F32,
                )
                .unwrap();
                device.fill_buffer(&tensor, word).unwrap();
                held.push(tensor);
            }
        }
    }
}

/// Reports the whole test as skipped, after which it must return: `scripts/test` counts it as skipped, not as passed.
pub fn skip(reason: impl std::fmt::Display) {
    println!("skipped: {reason}");
}

/// Reports a skipped part of a test, such as a tier. The rest still proves something, so the test counts as passed.
pub fn skip_part(reason: impl std::fmt::Display) {
    println!("left out: {reason}");
}

/// The repository, also in tests of a package below it.
pub fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("tests/data").is_dir()).unwrap_or(package)
}

/// Folders of test data; the first with a file wins: committed files, files fetched by `scripts/test-data`, and
/// `TILEWRIGHT_DATA` (default: `../shared/data` beside the repository).
pub fn data_roots() -> Vec<PathBuf> {
    let repository = repository();
    let named = std::env::var_os("TILEWRIGHT_DATA").map(PathBuf::from);
    let roots = [
        repository.join("tests/data"),
        repository.join("target/test-data"),
        named.unwrap_or_else(|| repository.join("../shared/data")),
    ];
    roots.into_iter().filter(|root| root.is_dir()).collect()
}

/// Available sets of test data.
#[derive(Clone, Copy)]
pub struct Data(());

impl Data {
    /// Path of a file or folder, which begins with the name of its set.
    pub fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        find_data(path.as_ref()).unwrap_or_else(|| panic!("no test data `{}`", path.as_ref().display()))
    }
}

/// Path of a file or folder in the first data folder that has it.
pub fn find_data(path: &Path) -> Option<PathBuf> {
    data_roots().into_iter().map(|root| root.join(path)).find(|path| path.exists())
}

/// The test data, if all these sets (folders) are available. Otherwise reports the test as skipped.
pub fn data(sets: &[&str]) -> Option<Data> {
    match sets.iter().find(|set| find_data(Path::new(set)).is_none()) {
        None => Some(Data(())),
        Some(set) => {
            skip(format_args!(
                "no test data `{set}` (scripts/test-data fetches some; TILEWRIGHT_DATA may name a folder)"
            ));
            None
        }
    }
}

/// Reference tensors by name.
#[cfg(not(target_arch = "wasm32"))]
pub struct References {
    file: Vec<u8>,
    index: tilewright::formats::safetensors::Safetensors,
}

#[cfg(not(target_arch = "wasm32"))]
impl References {
    pub fn open(path: &std::path::Path) -> References {
        let file = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let index = tilewright::formats::safetensors::Safetensors::parse(&file, file.len() as u64).unwrap();
        References { file, index }
    }

    pub fn has(&self, name: &str) -> bool {
        self.index.tensor(name).is_some()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.tensor(name);
        let mut values = vec![0.0; tensor.n_elements() as usize];
        tilewright::formats::block::dequantize(tensor.block_type, tensor.bytes(&self.file).unwrap(), &mut values)
            .unwrap();
        values
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        bytemuck::pod_collect_to_vec(self.bytes(name))
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        self.tensor(name).bytes(&self.file).unwrap()
    }

    pub fn shape(&self, name: &str) -> &[u64] {
        &self.tensor(name).shape
    }

    fn tensor(&self, name: &str) -> &tilewright::formats::TensorInfo {
        self.index.tensor(name).unwrap_or_else(|| panic!("no reference `{name}`"))
    }
}

/// Seeded random numbers: splitmix64, Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators".
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 32) as u32
    }

    /// From 0 up to but not including `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.word()) * n as u64) >> 32) as usize
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        f64::from(self.word()) / 4_294_967_296.0
    }

    /// Uniform in [-1, 1).
    pub fn uniform(&mut self) -> f64 {
        2.0 * self.unit() - 1.0
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Student's t with three degrees of freedom: tails heavy enough for outliers in every few hundred draws.
    pub fn student(&mut self) -> f64 {
        let chi: f64 = (0..3).map(|_| self.normal().powi(2)).sum();
        self.normal() / (chi / 3.0).sqrt()
    }
}

/// `n` floats uniform in [-1, 1).
pub fn uniform(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.uniform() as f32).collect()
}

/// An expected element.
#[derive(Clone, Copy)]
pub struct Expected {
    pub value: f64,
    /// Maximum difference, beyond `floor`.
    pub bound: f64,
    /// Ignored difference: the effect of flushing subnormal operands to zero, as WGSL allows, or of rounding a halfway
    /// operand the other way.
    pub floor: f64,
    /// The element's share of the reference power; at least `value²`, more if a sum may cancel.
    pub power: f64,
}

impl Expected {
    pub fn new(value: f64, bound: f64, floor: f64) -> Expected {
        Expected { value, bound, floor, power: value * value }
    }
}

/// Normalised mean squared error, after checking each element against its own bound.
pub fn compare(got: &[f32], want: &[Expected]) -> Result<f64, String> {
    if got.len() != want.len() {
        return Err(format!("{} elements, expected {}", got.len(), want.len()));
    }
    let (mut noise, mut power) = (0.0, 0.0);
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let difference = (f64::from(got) - want.value).abs();
        let error = (difference - want.floor).max(0.0); // drops a NaN: `max` returns the other number
        if difference.is_nan() || error > want.bound {
            let Expected { value, bound, .. } = want;
            return Err(format!("element {i} is {got:e}, expected {value:e} within {bound:.1e}"));
        }
        noise += error * error;
        power += want.power;
    }
    Ok(if noise == 0.0 { 0.0 } else { noise / power })
}

/// Maximum absolute difference; infinite if the lengths differ or a number is not finite.
pub fn largest_difference(got: &[f32], want: &[f32]) -> f32 {
    if got.len() != want.len() {
        return f32::INFINITY;
    }
    let difference = |(a, b): (&f32, &f32)| if a.is_finite() && b.is_finite() { (a - b).abs() } else { f32::INFINITY };
    got.iter().zip(want).map(difference).fold(0.0, f32::max)
}

/// Keys among `n_keys` visible to the token at position `own`; a window of 0 is none.
pub fn visible_keys(own: u32, n_keys: u32, window: u32, causal: bool) -> Range<u32> {
    let end = if causal { n_keys.min(own + 1) } else { n_keys };
    match window {
        0 => 0..end,
        _ => end.min(own + 1).saturating_sub(window)..end,
    }
}

#[cfg(not(target_arch = "wasm32"))]
/// Pushes a loader what it wants of files, given by name and content, in pieces of lengths from `next_len`.
pub fn push_all<T: Send>(
    loader: &mut tilewright::load::Loader<T>,
    files: &[(String, Vec<u8>)],
    next_len: &mut dyn FnMut() -> usize,
) -> Result<(), tilewright::Error> {
    let mut last = None;
    while let Some(wanted @ (file, offset)) = loader.wanted() {
        assert_ne!(last, Some(wanted), "the loader does not move on");
        last = Some(wanted);
        let rest = files[file].1.get(offset as usize..).unwrap_or_default();
        match rest.len() {
            0 => loader.end()?,
            left => block_on(loader.push(&rest[..next_len().clamp(1, left)]))?,
        }
    }
    let (done, total) = loader.progress();
    assert!(done == total && total > 0, "{done} of {total} bytes");
    Ok(())
}
