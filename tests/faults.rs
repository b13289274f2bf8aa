//! Faults of a GPU, on demand: texts go on with the same tokens, or a request fails with the right error; nothing hangs, nothing
//! is left behind, and what is asked for next is answered.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{block_on, find_data};
use tilewright::engine::{Driver, Engine, EngineOptions, EngineStats, Request, Stream};
use tilewright::{
    Breaker, BreakerOptions, Call, Circuit, Device, DeviceChoice, Effect, Error, Faults, GenerateOptions, LoadOptions,
    LossReason, Model, Recovery,
};

/// Losses count however slow the test is.
const EVER: Duration = Duration::from_secs(1 << 30);

fn open(faults: &Faults) -> Result<Device, Error> {
    block_on(Device::open_with_faults(&DeviceChoice::Gpu, None, None, faults))
}

fn load(device: &Device) -> Result<Model, Error> {
    let path = find_data(&Path::new("tiny-random").join("llama3-rope")).expect("the model is in the repository");
    Model::load(device, path, LoadOptions::default())
}

fn requests() -> Vec<Request> {
    let greedy = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(5) };
    [3, 70].into_iter().map(|n| Request::new((1..=n).collect(), greedy.clone())).collect()
}

fn collect(mut stream: Stream) -> Result<Vec<u32>, Error> {
    let mut ids = Vec::new();
    while let Some(piece) = block_on(stream.next()) {
        ids.push(piece?.id);
    }
    Ok(ids)
}

/// What the texts are that nothing disturbs, on the CPU.
fn undisturbed() -> Vec<Vec<u32>> {
    let model = load(&common::cpu()).unwrap();
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let streams: Vec<Stream> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    while block_on(driver.step()).unwrap() {}
    streams.into_iter().map(|stream| collect(stream).unwrap()).collect()
}

/// What a service goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Load,
    Idle,
    Prefill,
    Decode,
    MidStream,
    Unload,
}

impl Phase {
    const ALL: [Phase; 6] =
        [Phase::Load, Phase::Idle, Phase::Prefill, Phase::Decode, Phase::MidStream, Phase::Unload];
}

/// What became of a service.
struct Served {
    /// `None` if nothing could be loaded at first: then it was told by an error, and served by loading once more.
    refused: Option<Error>,
    breaker: Arc<Breaker>,
    stats: EngineStats,
    is_on_gpu: bool,
}

/// Loads a model, and has an engine generate both texts and then one more, all with faults; `enter` is called before each phase.
/// All texts have to be those that nothing disturbs, and all memory has to be given back.
fn serve(whole: &[Vec<u32>], faults: &Faults, breaker: BreakerOptions, mut enter: impl FnMut(Phase, &Breaker)) -> Served {
    serve_with(whole, faults, breaker, EngineOptions::default(), &mut enter)
}

fn serve_with(
    whole: &[Vec<u32>],
    faults: &Faults,
    breaker: BreakerOptions,
    options: EngineOptions,
    enter: &mut dyn FnMut(Phase, &Breaker),
) -> Served {
    let breaker = Arc::new(Breaker::new(breaker));
    let opened = std::cell::RefCell::new(Vec::new());
    let open = || open(faults).inspect(|device| opened.borrow_mut().push(device.clone()));
    let mut recovery = Recovery::new(open, load, |_| ()).with_breaker(breaker.clone());
    enter(Phase::Load, &breaker);
    let mut first = || open().and_then(|device| recovery.load(&device));
    let (model, refused) = match first() {
        Ok(model) => (model, None),
        // It was told, and asking once more helps.
        Err(error) => (first().unwrap_or_else(|_| recovery.load(&common::cpu()).unwrap()), Some(error)),
    };
    let (engine, mut driver) = Engine::new(&model, &options).unwrap();
    drop(model);
    enter(Phase::Idle, &breaker);
    let mut streams: Vec<Stream> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    enter(Phase::Prefill, &breaker);
    let mut step = |driver: &mut Driver| block_on(driver.step_with(&mut recovery)).unwrap();
    step(&mut driver);
    enter(Phase::Decode, &breaker);
    step(&mut driver);
    enter(Phase::MidStream, &breaker);
    while step(&mut driver) {}
    for (i, stream) in streams.drain(..).enumerate() {
        assert_eq!(collect(stream).unwrap(), whole[i], "text {i}");
    }
    let next = engine.submit(requests().remove(0)).unwrap();
    while step(&mut driver) {}
    assert_eq!(collect(next).unwrap(), whole[0], "the next text");
    let stats = engine.stats();
    assert_eq!((stats.n_failed, stats.n_running, stats.n_queued), (0, 0, 0));
    assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages, "pages are back");
    enter(Phase::Unload, &breaker);
    let opened_last = engine.devices().remove(0).device;
    drop((engine, driver));
    drop(recovery);
    let opened = opened.into_inner();
    for device in &opened {
        assert_eq!(device.used_bytes(), 0, "memory is back");
    }
    let is_on_gpu = opened.last().is_some_and(|device| device.info().name == opened_last);
    Served { refused, breaker, stats, is_on_gpu }
}

/// Whether there is a GPU; what pipelines compute is tested once, so that later services do the same calls.
fn warm_up(whole: &[Vec<u32>]) -> Option<Faults> {
    common::gpu_from(open(&Faults::default()))?;
    serve(whole, &Faults::default(), BreakerOptions::default(), |_, _| ());
    let clean = Faults::default();
    let served = serve(whole, &clean, BreakerOptions::default(), |_, _| ());
    assert!(served.refused.is_none() && served.is_on_gpu && served.stats.n_recoveries == 0);
    Some(clean)
}

#[test]
fn probe() {
    let whole = undisturbed();
    let start = std::time::Instant::now();
    let Some(clean) = warm_up(&whole) else { return };
    println!("{:?}", start.elapsed());
    for call in Call::ALL {
        println!("{call:?}: {}", clean.count(call));
    }
    let start = std::time::Instant::now();
    serve(&whole, &Faults::default(), BreakerOptions::default(), |_, _| ());
    println!("{:?}", start.elapsed());
}
