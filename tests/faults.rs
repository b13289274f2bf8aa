//! Injected GPU faults: completions continue with the same tokens, or a request fails with the right error; nothing
//! hangs or leaks, and the next request is answered.

use crate::common;

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::{block_on, find_data};
use tilewright::engine::{Engine, EngineOptions, EngineState, EngineStats, Request, Stream};
use tilewright::generate::{DeviceLayers, StopReason};
use tilewright::{
    Breaker, BreakerOptions, BreakerStats, Call, Circuit, Device, DeviceChoice, Effect, Error, Faults, GenerateOptions,
    LoadOptions, LossReason, Model, Recovery, Tier,
};
use web_time::Instant;

/// Longer than any test.
const EVER: Duration = Duration::from_secs(1 << 30);

fn load(device: &Device) -> Result<Model, Error> {
    load_with(device, None)
}

/// The same with the first layer on another device.
fn load_with(device: &Device, other: Option<Device>) -> Result<Model, Error> {
    let path = find_data(&Path::new("tiny-random").join("llama3-rope")).expect("the model is in the repository");
    let layers_on = other.map(|device| DeviceLayers { device, n_layers: 1 }).into_iter().collect();
    Model::load(device, path, LoadOptions { layers_on, ..LoadOptions::default() })
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

/// The undisturbed completions, on the CPU.
fn undisturbed() -> Vec<Vec<u32>> {
    let model = load(&common::cpu()).unwrap();
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let streams: Vec<Stream> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    while block_on(driver.step()).unwrap() {}
    streams.into_iter().map(|stream| collect(stream).unwrap()).collect()
}

/// Phases of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Load,
    Idle,
    Prefill,
    Decode,
    MidStream,
    Unload,
}

/// Handles that inject a fault.
struct Hand<'a> {
    faults: &'a Faults,
    breaker: &'a Breaker,
    /// The device opened last.
    device: Option<Device>,
}

/// Result of a service.
struct Served {
    /// Error of the first load, if it failed; then it was retried, or done on the CPU.
    refused: Option<Error>,
    losses: Vec<(LossReason, u64)>,
    circuit: Circuit,
    stats: EngineStats,
    is_on_gpu: bool,
}

impl Served {
    fn lost(&self, reason: LossReason) -> u64 {
        self.losses.iter().find(|(known, _)| *known == reason).map_or(0, |(_, n)| *n)
    }

    fn n_losses(&self) -> u64 {
        self.losses.iter().map(|(_, n)| n).sum()
    }
}

/// Settings of a service.
struct Setup {
    faults: Faults,
    tier: Option<Tier>,
    breaker: BreakerOptions,
    engine: EngineOptions,
    /// Whether a second device has the first layer.
    on_two: bool,
}

impl Setup {
    fn new(faults: Faults) -> Setup {
        // Losses count however slow the test is, and nothing is retried.
        let breaker = BreakerOptions { within: EVER, retry_after: None, ..BreakerOptions::default() };
        Setup { faults, tier: None, breaker, engine: EngineOptions::default(), on_two: false }
    }
}

/// Loads a model, has an engine generate both completions and then one more, and unloads it; calls `enter` before each
/// phase. All completions must equal the undisturbed ones, and all pages and memory must be released.
fn serve(whole: &[Vec<u32>], setup: &Setup, mut enter: impl FnMut(Phase, Hand<'_>)) -> Served {
    let Setup { faults, tier, breaker, engine, on_two } = setup;
    let breaker = Arc::new(Breaker::new(*breaker));
    let opened: RefCell<Vec<Device>> = RefCell::default();
    let open = || {
        let device = block_on(Device::open_with_faults(&DeviceChoice::Gpu, *tier, None, faults))?;
        opened.borrow_mut().push(device.clone());
        Ok(device)
    };
    let mut enter = |phase| {
        let device = opened.borrow().last().cloned();
        enter(phase, Hand { faults, breaker: &breaker, device });
    };
    let load = |device: &Device| {
        let other = (*on_two && device.is_gpu()).then(open).transpose()?;
        load_with(device, other)
    };
    let mut recovery = Recovery::new(open, load, |notice| println!("  {notice}")).with_breaker(breaker.clone());
    enter(Phase::Load);
    let mut first = || open().and_then(|device| recovery.load(&device));
    let (model, refused) = match first() {
        Ok(model) => (model, None),
        // The load reported an error. A retry succeeds, or else another device.
        Err(error) => (first().or_else(|_| load_with(&common::cpu(), None)).unwrap(), Some(error)),
    };
    let begun = Engine::new(&model, engine);
    drop(model);
    let (refused, (engine, mut driver)) = match begun {
        Ok(begun) => (refused, begun),
        // The error was reported.
        Err(error) => (Some(error), Engine::new(&load_with(&common::cpu(), None).unwrap(), engine).unwrap()),
    };
    enter(Phase::Idle);
    let streams: Vec<Stream> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut step = || block_on(driver.step_with(&mut recovery)).unwrap();
    for phase in [Phase::Prefill, Phase::Decode] {
        enter(phase);
        step();
    }
    enter(Phase::MidStream);
    while step() {}
    for (stream, whole) in streams.into_iter().zip(whole) {
        assert_eq!(collect(stream).unwrap(), *whole);
    }
    let next = engine.submit(requests().remove(0)).unwrap();
    while step() {}
    assert_eq!(collect(next).unwrap(), whole[0], "what is asked for next");
    let (stats, name) = (engine.stats(), engine.devices().remove(0).device);
    assert_eq!((stats.n_failed, stats.n_running, stats.n_queued), (0, 0, 0));
    assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages, "pages are back");
    enter(Phase::Unload);
    drop((engine, driver, recovery));
    let BreakerStats { circuit, .. } = breaker.stats(Instant::now());
    let losses = breaker.stats(Instant::now()).losses().collect();
    let opened = opened.take();
    assert!(opened.iter().all(|device| device.used_bytes() == 0), "memory is back");
    // With two devices the names of both.
    let is_on_gpu = opened.last().is_some_and(|device| name.ends_with(&device.info().name));
    Served { refused, losses, circuit, stats, is_on_gpu }
}

/// The undisturbed completions and the calls of a service, if there is a GPU. A first service ran the self-test, so
/// that later services make the same calls.
fn warm() -> Option<&'static (Vec<Vec<u32>>, Faults)> {
    static WARM: OnceLock<Option<(Vec<Vec<u32>>, Faults)>> = OnceLock::new();
    WARM.get_or_init(|| {
        common::gpu_from(block_on(Device::open_in(&DeviceChoice::Gpu, None, None)))?;
        let whole = undisturbed();
        serve(&whole, &Setup::new(Faults::default()), |_, _| ());
        let clean = Setup::new(Faults::default());
        let served = serve(&whole, &clean, |_, _| ());
        assert!(served.refused.is_none() && served.is_on_gpu && served.stats.n_recoveries == 0);
        Some((whole, clean.faults))
    })
    .as_ref()
}

/// Faults at each call in turn: it fails, or the device is lost after it, or every call from it on fails; one of the
/// three if there are many calls. By default one of the submissions and one of the buffers.
#[test]
fn failure_of_any_gpu_call_is_recovered_or_refused() {
    let Some((whole, clean)) = warm() else { return };
    let mut n_cases = 0;
    for call in Call::ALL {
        let n_calls = clean.count(call);
        assert!(n_calls > 0, "{call:?}");
        for n in 1..=n_calls {
            // The kind of fault, if not all are tried.
            let one = match call {
                // There are many similar calls of these kinds.
                Call::CreateBuffer | Call::Write if common::is_full() => Some(n as usize % 3),
                _ if common::is_full() => None,
                Call::Submit if n == n_calls / 2 => Some(1),
                Call::CreateBuffer if n == n_calls - 1 => Some(0),
                _ => continue,
            };
            let faults = [
                ("fails", Faults::default().at(call, n, Effect::Fail)),
                ("loses", Faults::default().at(call, n, Effect::LoseAfter)),
                ("always fails", Faults::default().from(call, n, Effect::Fail)),
            ];
            for (j, (what, faults)) in faults.into_iter().enumerate() {
                if one.is_some_and(|one| one != j) {
                    continue;
                }
                println!("{call:?} {n} of {n_calls} {what}");
                let setup = Setup::new(faults);
                let served = serve(whole, &setup, |_, _| ());
                let (count, Served { refused, losses, stats, .. }) = (setup.faults.count(call), &served);
                assert!(count >= n, "{call:?} {n} was never reached: {count}, {refused:?}, {losses:?}, {stats:?}");
                let code = served.refused.as_ref().map(Error::code);
                assert!(matches!(code, None | Some("gpu" | "device_lost")), "{call:?} {n} {what}: {code:?}");
                n_cases += 1;
            }
        }
    }
    println!("{n_cases} cases of {} calls", Call::ALL.map(|call| clean.count(call)).iter().sum::<u64>());
}

/// A fault injected in a phase, and its expected result.
type Cell = (&'static str, Phase, fn(Hand<'_>), fn(&Served) -> bool);

/// F1 to F4, F6, F9 to F11, F14 and F16 of `RELIABILITY`, and panicking polls, in the phases in which they can occur.
const CELLS: &[Cell] = {
    use Phase::{Decode, Idle, Load, MidStream, Prefill, Unload};
    const fn once(served: &Served) -> bool {
        served.stats.n_recoveries == 1 && served.is_on_gpu
    }
    fn destroy(hand: Hand<'_>) {
        hand.device.unwrap().destroy();
    }
    fn destroyed(served: &Served) -> bool {
        once(served) && served.lost(LossReason::Destroyed) == 1
    }
    fn untouched(served: &Served) -> bool {
        served.n_losses() == 0
    }
    fn submit_loses(hand: Hand<'_>) {
        hand.faults.next(Call::Submit, 1, Effect::LoseAfter);
    }
    fn by_driver(served: &Served) -> bool {
        once(served) && served.lost(LossReason::Driver) == 1
    }
    fn adapter_gone(hand: Hand<'_>) {
        hand.faults.every(Call::Open, Effect::Fail);
        destroy(hand);
    }
    fn on_cpu(served: &Served) -> bool {
        !served.is_on_gpu && served.circuit == Circuit::Open
    }
    fn no_memory(hand: Hand<'_>) {
        hand.faults.next(Call::CreateBuffer, 1, Effect::OutOfMemory);
    }
    fn refused_for_memory(served: &Served) -> bool {
        matches!(served.refused, Some(Error::OutOfMemory { .. })) && served.n_losses() == 0
    }
    fn lost_for_memory(served: &Served) -> bool {
        once(served) && served.lost(LossReason::OutOfMemory) == 1
    }
    fn pipeline_refused(hand: Hand<'_>) {
        hand.faults.next(Call::CreatePipeline, 1, Effect::Fail);
    }
    fn refused(served: &Served) -> bool {
        once(served) && served.lost(LossReason::Refused) == 1
    }
    fn map_fails(hand: Hand<'_>) {
        hand.faults.next(Call::Map, 1, Effect::Fail);
    }
    fn no_answer(hand: Hand<'_>) {
        hand.faults.next(Call::Poll, 1, Effect::Fail);
    }
    fn unanswered(served: &Served) -> bool {
        once(served) && served.lost(LossReason::NoAnswer) == 1
    }
    fn bad_shader(hand: Hand<'_>) {
        hand.faults.next(Call::CreatePipeline, 1, Effect::BadShader);
    }
    fn lost_untold(hand: Hand<'_>) {
        hand.faults.next(Call::Submit, 1, Effect::LoseUntold);
    }
    fn poll_panics(hand: Hand<'_>) {
        hand.faults.next(Call::Poll, 1, Effect::Panic);
    }
    /// After the GPU refuses a submission, the refused thread polls.
    fn submit_fails_and_poll_panics(hand: Hand<'_>) {
        hand.faults.next(Call::Submit, 1, Effect::Fail);
        poll_panics(hand);
    }
    fn recovered(served: &Served) -> bool {
        served.stats.n_recoveries >= 1
    }
    fn ask_for_cpu(hand: Hand<'_>) {
        hand.breaker.open(Instant::now());
    }
    &[
        ("F1 device.destroy()", MidStream, destroy, destroyed),
        ("F1 device.destroy()", Idle, destroy, destroyed),
        ("F1 device.destroy()", Prefill, destroy, destroyed),
        ("F1 device.destroy()", Decode, destroy, destroyed),
        ("F1 device.destroy()", Unload, destroy, untouched),
        ("F2 destroyed as it submits", MidStream, submit_loses, by_driver),
        ("F2 destroyed as it submits", Load, submit_loses, by_driver),
        ("F2 destroyed as it submits", Prefill, submit_loses, by_driver),
        ("F2 destroyed as it submits", Decode, submit_loses, by_driver),
        ("F3 adapter gone", Prefill, adapter_gone, on_cpu),
        ("F3 adapter gone", Idle, adapter_gone, on_cpu),
        ("F3 adapter gone", Decode, adapter_gone, on_cpu),
        ("F3 adapter gone", MidStream, adapter_gone, on_cpu),
        ("F4 out of memory", Load, no_memory, refused_for_memory),
        ("F4 out of memory", Prefill, no_memory, lost_for_memory),
        ("F4 out of memory", Decode, no_memory, lost_for_memory),
        ("F6 pipeline refused", Prefill, pipeline_refused, refused),
        ("F6 pipeline refused", Decode, pipeline_refused, refused),
        ("F9 map fails", MidStream, map_fails, by_driver),
        ("F9 map fails", Prefill, map_fails, by_driver),
        ("F9 map fails", Decode, map_fails, by_driver),
        ("F10 no answer to a poll", Decode, no_answer, unanswered),
        ("F10 no answer to a poll", Prefill, no_answer, unanswered),
        ("F10 no answer to a poll", MidStream, no_answer, unanswered),
        ("F11 shader error", Prefill, bad_shader, refused),
        ("F11 shader error", Decode, bad_shader, refused),
        ("F14 lost, unreported", MidStream, lost_untold, recovered),
        ("F14 lost, unreported", Prefill, lost_untold, recovered),
        ("F14 lost, unreported", Decode, lost_untold, recovered),
        ("F17 a poll panics", Decode, poll_panics, by_driver),
        ("F17 a poll panics", Prefill, poll_panics, by_driver),
        ("F17 a poll panics", MidStream, poll_panics, by_driver),
        ("F18 a poll after a refusal panics", Decode, submit_fails_and_poll_panics, by_driver),
        ("F18 a poll after a refusal panics", Prefill, submit_fails_and_poll_panics, by_driver),
        ("F16 CPU asked for", MidStream, ask_for_cpu, on_cpu),
        ("F16 CPU asked for", Idle, ask_for_cpu, on_cpu),
        ("F16 CPU asked for", Prefill, ask_for_cpu, on_cpu),
        ("F16 CPU asked for", Decode, ask_for_cpu, on_cpu),
    ]
};

#[test]
fn fault_in_any_phase_only_delays_output() {
    bring_about_all(false);
}

/// Either of two devices that share the layers has the fault; the whole model is reloaded.
#[test]
fn fault_of_one_of_two_devices_only_delays_output() {
    bring_about_all(true);
}

/// By default five faults: a destroyed device, a refused pipeline, an unreported loss, and a panicking poll in either
/// thread. With two devices a random two of the five.
fn bring_about_all(on_two: bool) {
    let Some((whole, _)) = warm() else { return };
    let few = [
        ("F1", Phase::MidStream),
        ("F6", Phase::Prefill),
        ("F14", Phase::Decode),
        ("F17", Phase::Decode),
        ("F18", Phase::Decode),
    ];
    let few = common::drawn(if on_two { 2 } else { few.len() }, few);
    for (name, phase, bring_about, is_right) in CELLS {
        let is_one_of_few = few.iter().any(|(few, at)| name.split(' ').next() == Some(few) && phase == at);
        if !common::is_full() && !is_one_of_few {
            continue;
        }
        println!("{name} in {phase:?}");
        let mut n = 0;
        let setup = Setup { on_two, ..Setup::new(Faults::default()) };
        let served = serve(whole, &setup, |at, hand| {
            if at == *phase {
                n += 1;
                bring_about(hand);
            }
        });
        let Served { refused, losses, circuit, stats, is_on_gpu } = &served;
        assert!(
            n == 1 && is_right(&served),
            "{name} in {phase:?}: {refused:?}, {losses:?}, {circuit:?}, on GPU: {is_on_gpu}, {stats:?}"
        );
    }
}

/// F4 and F5: memory runs out at some point, with an error or a device loss.
#[test]
fn out_of_memory_is_an_error_or_falls_back_to_the_cpu() {
    let Some((whole, _)) = warm() else { return };
    // Limits too small for the weights, or only large enough for them.
    for (bytes, loses) in [(100 << 10, false), (300 << 10, false), (100 << 10, true), (300 << 10, true)] {
        if !common::is_full() && (bytes, loses) != (300 << 10, false) {
            continue;
        }
        let served = serve(whole, &Setup::new(Faults::default().with_memory(bytes, loses)), |_, _| ());
        println!("{bytes} bytes, loses: {loses}: {:?}, {:?}", served.refused, served.losses);
        assert!(!served.is_on_gpu, "{bytes} {loses}");
        match &served.refused {
            Some(Error::OutOfMemory { size_bytes, allocated_bytes, .. }) => {
                assert!(size_bytes + allocated_bytes > bytes)
            }
            other => assert!(other.is_none() && served.circuit == Circuit::Open, "{other:?}"),
        }
    }
}

/// F7 and F8: only the limits and features that WebGPU guarantees.
#[test]
fn optional_gpu_features_are_not_required() {
    let Some((whole, _)) = warm() else { return };
    let optional = ["timestamp-query", "pipeline-cache", "subgroups", "shader-f16"];
    let all = optional.into_iter().fold(Faults::default().with_minimum_limits(), Faults::without);
    let mut cases = vec![("all of it", all)];
    if common::is_full() {
        cases.push(("F7 limits", Faults::default().with_minimum_limits()));
        cases.extend(optional.map(|feature| (feature, Faults::default().without(feature))));
    }
    for (name, faults) in cases {
        let served = serve(whole, &Setup::new(faults), |_, _| ());
        assert!(served.refused.is_none() && served.is_on_gpu && served.n_losses() == 0, "{name}");
    }
    // Tiers name the feature that they need.
    for (tier, feature) in [(Tier::Subgroups, "subgroups"), (Tier::F16, "shader-f16")] {
        let faults = Faults::default().without(feature);
        let refused = block_on(Device::open_with_faults(&DeviceChoice::Gpu, Some(tier), None, &faults)).err();
        let Some(Error::Limit { limit, .. }) = &refused else { panic!("{refused:?}") };
        assert!(limit.contains(feature), "{limit}");
    }
}

/// For tests run only by `--full`: each takes seconds.
fn warm_in_full() -> Option<&'static (Vec<Vec<u32>>, Faults)> {
    if !common::is_full() {
        common::skip_part("a step that hangs and a slow device: with --full");
        return None;
    }
    warm()
}

/// F12: a dispatch never completes. The limit is longer than a step takes; if it is not, the step is abandoned as
/// well, and the completion is the same.
#[test]
fn hanging_step_is_abandoned_and_recovered() {
    let Some((whole, _)) = warm_in_full() else { return };
    for on_two in [false, true] {
        let mut setup = Setup { on_two, ..Setup::new(Faults::default()) };
        setup.engine.step_limit = Some(Duration::from_secs(3));
        let served = serve(whole, &setup, |at, hand| {
            if at == Phase::MidStream {
                hand.faults.next(Call::Poll, 1, Effect::Hang);
            }
        });
        assert!(served.stats.n_slow_steps >= 1 && served.lost(LossReason::SlowStep) == served.stats.n_slow_steps);
    }
}

/// F13: each submission takes 10 ms longer.
#[test]
fn slow_device_is_not_treated_as_lost() {
    let Some((whole, _)) = warm_in_full() else { return };
    let slow = Effect::Wait(Duration::from_millis(10));
    let served = serve(whole, &Setup::new(Faults::default().from(Call::Submit, 1, slow)), |_, _| ());
    assert!(served.n_losses() == 0 && served.is_on_gpu && served.stats.n_slow_steps == 0);
}

/// F15: two losses within the window that allows one. The CPU takes over until the GPU is retried after a while.
#[test]
fn twice_lost_device_falls_back_to_the_cpu_temporarily() {
    let Some((whole, _)) = warm() else { return };
    let mut setup = Setup::new(Faults::default());
    setup.breaker.losses = 2;
    let lose = |at, hand: Hand<'_>| {
        if at == Phase::Decode {
            // Also in a newly opened device.
            (1..=2).for_each(|i| hand.faults.next(Call::Map, 2 * i, Effect::LoseAfter));
        }
    };
    let served = serve(whole, &setup, lose);
    assert_eq!((served.n_losses(), served.circuit, served.is_on_gpu), (2, Circuit::Open, false));
    assert!(served.stats.fallback_tokens > 0 && served.stats.fallback_tokens < served.stats.generated_tokens);
    if !common::is_full() {
        return;
    }
    // The same with an immediate retry of the GPU, which is not lost again.
    setup = Setup::new(Faults::default());
    (setup.breaker.losses, setup.breaker.retry_after) = (2, Some(Duration::ZERO));
    let served = serve(whole, &setup, lose);
    assert_eq!((served.n_losses(), served.circuit, served.is_on_gpu), (2, Circuit::HalfOpen, true));
}

/// Reloads a model after each panic, and counts the loads.
fn reloading<'a>(choice: DeviceChoice, faults: &'a Faults, n_loads: &'a RefCell<usize>) -> Recovery<'a, Model> {
    let open = move || block_on(Device::open_with_faults(&choice, None, None, faults));
    let load = |device: &Device| {
        *n_loads.borrow_mut() += 1;
        load(device)
    };
    let breaker = BreakerOptions { within: EVER, retry_after: None, ..BreakerOptions::default() };
    Recovery::new(open, load, |notice| println!("  {notice}")).with_breaker(Arc::new(Breaker::new(breaker)))
}

/// If a step panics, in the driver or in a CPU thread, its completions end with an error, and the model is reloaded
/// for queued requests.
#[test]
fn panic_ends_its_own_sequences_and_no_others() {
    let Some((whole, _)) = warm() else { return };
    for choice in [DeviceChoice::Cpu, DeviceChoice::Gpu] {
        let (faults, n_loads) = (Faults::default(), RefCell::new(0));
        let mut recovery = reloading(choice.clone(), &faults, &n_loads);
        let device = block_on(Device::open_with_faults(&choice, None, None, &faults)).unwrap();
        let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
        let (engine, mut driver) = Engine::new(&recovery.load(&device).unwrap(), &options).unwrap();
        let [short, long] = [0, 1].map(|i| engine.submit(requests().remove(i)).unwrap());
        // The first one is running.
        for _ in 0..2 {
            block_on(driver.step_with(&mut recovery)).unwrap();
        }
        faults.next(Call::Submit, 1, Effect::Panic);
        while block_on(driver.step_with(&mut recovery)).unwrap() {}
        assert_eq!(short.stop_reason(), None, "{choice:?}");
        assert_eq!(collect(short).map_err(|error| error.code()), Err("panic"), "{choice:?}");
        assert_eq!(collect(long).unwrap(), whole[1], "{choice:?}");
        assert_eq!(*n_loads.borrow(), 2, "{choice:?}");
        let stats = engine.stats();
        assert_eq!((stats.n_failed, stats.n_finished, stats.n_running, stats.n_queued), (1, 1, 0, 0));
        assert_eq!((stats.n_panics, stats.n_recoveries, engine.state()), (1, 1, EngineState::Running));
        assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages, "pages are back");
    }
}

/// During a reload, queued requests still end at their deadlines.
#[test]
fn deadlines_hold_during_a_model_reload() {
    let (faults, engine) = (Faults::default(), RefCell::new(None));
    let open = || block_on(Device::open_with_faults(&DeviceChoice::Cpu, None, None, &faults));
    let waited = RefCell::new(None);
    let load_again = |device: &Device| {
        if let Some(engine) = &*engine.borrow() {
            assert_eq!(Engine::state(engine), EngineState::Restarting);
            let late = Request { deadline: Some(Instant::now()), ..requests().remove(0) };
            let mut stream = engine.submit(late).unwrap();
            // Would wait for ever if deadlines were not checked.
            *waited.borrow_mut() = Some((block_on(stream.next()).is_none(), stream.stop_reason()));
        }
        load(device)
    };
    let mut recovery = Recovery::new(open, load_again, |notice| println!("  {notice}"));
    let model = recovery.load(&open().unwrap()).unwrap();
    let (made, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    *engine.borrow_mut() = Some(made.clone());
    let text = made.submit(requests().remove(0)).unwrap();
    faults.next(Call::Submit, 2, Effect::Panic);
    while block_on(driver.step_with(&mut recovery)).unwrap() {}
    assert_eq!(collect(text).map_err(|error| error.code()), Err("panic"));
    assert_eq!(*waited.borrow(), Some((true, Some(StopReason::Deadline))));
    assert_eq!(made.state(), EngineState::Running);
}

/// Repeated panics do not reload for ever: eventually the engine stops, and reports that to all requests.
#[test]
fn engine_stops_after_repeated_panics() {
    let (faults, n_loads) = (Faults::default(), RefCell::new(0));
    let mut recovery = reloading(DeviceChoice::Cpu, &faults, &n_loads);
    let device = block_on(Device::open_with_faults(&DeviceChoice::Cpu, None, None, &faults)).unwrap();
    let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
    let (engine, mut driver) = Engine::new(&recovery.load(&device).unwrap(), &options).unwrap();
    let streams: Vec<Stream> = (0..5).map(|_| engine.submit(requests().remove(0)).unwrap()).collect();
    faults.every(Call::Submit, Effect::Panic);
    let error = loop {
        match block_on(driver.step_with(&mut recovery)) {
            Ok(is_busy) => assert!(is_busy),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Stopped { .. }), "{error}");
    let codes: Vec<_> = streams.into_iter().map(|stream| collect(stream).unwrap_err().code()).collect();
    assert_eq!(codes, ["panic", "panic", "panic", "stopped", "stopped"]);
    assert_eq!((*n_loads.borrow(), engine.state()), (3, EngineState::Stopped));
    assert_eq!(engine.submit(requests().remove(0)).err().map(|error| error.code()), Some("stopped"));
    assert!(block_on(driver.step_with(&mut recovery)).is_err());
    let stats = engine.stats();
    assert_eq!((stats.n_panics, stats.n_failed, stats.n_queued), (3, 5, 0));
}

/// Without a way to reload the model, one panic is enough.
#[test]
fn engine_without_reload_stops_at_the_first_panic() {
    let faults = Faults::default();
    let device = block_on(Device::open_with_faults(&DeviceChoice::Cpu, None, None, &faults)).unwrap();
    let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
    let (engine, mut driver) = Engine::new(&load(&device).unwrap(), &options).unwrap();
    faults.next(Call::Submit, 3, Effect::Panic);
    let streams: Vec<Stream> = (0..3).map(|_| engine.submit(requests().remove(0)).unwrap()).collect();
    // The driver ends by itself.
    block_on(driver.run());
    let codes: Vec<_> = streams.into_iter().map(|stream| collect(stream).unwrap_err().code()).collect();
    assert_eq!(codes, ["panic", "stopped", "stopped"]);
    assert_eq!(engine.state(), EngineState::Stopped);
}

/// A cache fits in the available memory, and a running engine does not run out of it at its first request. An explicit
/// size is accepted or refused.
#[test]
fn kv_cache_shrinks_to_the_available_memory() {
    let Some((whole, _)) = warm() else { return };
    let options = EngineOptions::default();
    let faults = Faults::default();
    let open = || block_on(Device::open_with_faults(&DeviceChoice::Gpu, None, None, &faults));
    let (all, plan) = {
        let (engine, _driver) = Engine::new(&load(&open().unwrap()).unwrap(), &options).unwrap();
        (engine.stats().n_pages, engine.plan())
    };
    // Three quarters of the cache.
    let bytes = plan.weights_bytes + plan.activations_bytes + plan.cache_bytes * 3 / 4;
    let _ = faults.clone().with_memory(bytes, false);
    let device = open().unwrap();
    let model = load(&device).unwrap();
    let n_tokens = u32::try_from(64 * all).unwrap();
    let asked = EngineOptions { cache_tokens: Some(n_tokens), ..options.clone() };
    assert_eq!(Engine::new(&model, &asked).err().map(|error| error.code()), Some("out_of_memory"));
    let (engine, mut driver) = Engine::new(&model, &options).unwrap();
    assert_eq!((engine.stats().n_pages, device.is_lost()), (all / 2, false));
    let streams: Vec<Stream> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    while block_on(driver.step()).unwrap() {}
    for (stream, whole) in streams.into_iter().zip(whole) {
        assert_eq!(collect(stream).unwrap(), *whole);
    }
    assert_eq!((engine.stats().n_recoveries, engine.stats().cache_tokens), (0, 64 * all as u64 / 2));
    // The same after a loss, with less memory than before, which does not count as a loss.
    let breaker = Arc::new(Breaker::default());
    let mut notices = Vec::new();
    let mut recovery =
        Recovery::new(open, load, |notice| notices.push(notice.to_string())).with_breaker(breaker.clone());
    let streams: Vec<Stream> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    block_on(driver.step_with(&mut recovery)).unwrap();
    let _ = faults.clone().with_memory(plan.weights_bytes + plan.activations_bytes + plan.cache_bytes * 3 / 8, false);
    device.destroy();
    while block_on(driver.step_with(&mut recovery)).unwrap() {}
    drop(recovery);
    for (stream, whole) in streams.into_iter().zip(whole) {
        assert_eq!(collect(stream).unwrap(), *whole);
    }
    assert_eq!((engine.stats().n_recoveries, engine.stats().n_pages), (1, all / 4));
    assert_eq!(breaker.stats(Instant::now()).n_losses(), 1);
    assert!(notices.iter().any(|notice| notice.contains(&format!("now holds {} tokens", 64 * all / 4))), "{notices:?}");
}
