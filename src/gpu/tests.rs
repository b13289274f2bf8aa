//! Tests of the executor's handling of GPU failures, on the first adapter; skipped without one.

use std::process::Command;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::outcome::{Failure, Outcome};
use super::{Gpu, Setup, adapters};
use crate::counters::LiveCounters;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels;
use crate::recording::{Recorder, Workspace};
use crate::shaders::Tier;
use crate::target::{Target, TargetKind};
use crate::tensor::{Role, Tensor};

const MIB: u64 = 1 << 20;

fn open(setup: Setup<'_>) -> Option<(Gpu, Arc<LiveCounters>)> {
    let reports = pollster::block_on(adapters());
    let Some(report) = reports.first() else {
        assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set and there is no adapter");
        println!("skipped: no adapter");
        return None;
    };
    let counters = Arc::new(LiveCounters::default());
    let gpu = pollster::block_on(Gpu::open(report, &[report.tier], setup, counters.clone())).unwrap();
    Some((gpu, counters))
}

/// A tensor of four words with `size_bytes` of GPU memory.
fn allocated(gpu: &Gpu, label: &str, size_bytes: u64) -> Result<Tensor, Error> {
    let tensor = Tensor::declare(label, Role::Activations, &[4], DType::U32)?;
    let block = tensor.storage.block().expect("not a temporary");
    block.memory.attach(gpu.allocate(label, size_bytes)?);
    Ok(tensor)
}

#[test]
fn an_error_belongs_to_the_call_that_caused_it() {
    let Some((gpu, _)) = open(Setup::default()) else { return };
    let [good, bad] = ["good", "bad"].map(|label| allocated(&gpu, label, 4096).unwrap());
    // More threads than processors, so that some are interrupted between a call and its result.
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (gpu, good, bad) = (&gpu, &good, &bad);
            scope.spawn(move || {
                for i in 0..4000 {
                    if thread % 2 == 0 {
                        let written = gpu.write(good, 0, &[0; 16]);
                        assert!(written.is_ok(), "{i}: {written:?}");
                    } else {
                        let beyond = gpu.write(bad, 1 << 30, &[0; 16]);
                        let is_own = matches!(&beyond, Err(Error::Gpu { context, .. }) if context == "uploading");
                        assert!(is_own, "{i}: {beyond:?}");
                    }
                }
            });
        }
    });
}

/// Threads that request two pipelines at the same time compile each once.
#[test]
fn pipelines_compile_in_parallel_and_only_once() {
    let Some((gpu, counters)) = open(Setup::default()) else { return };
    let mut rec = Recorder::new(Target::new(TargetKind::Gpu, Tier::Baseline, Target::cpu().limits()));
    let tensor = |label| Tensor::declare(label, Role::Activations, &[2, 4], DType::F32).unwrap();
    let [x, y] = ["x", "y"].map(tensor);
    for _ in 0..3 {
        kernels::silu(&mut rec, &x, &y).unwrap();
        kernels::softmax(&mut rec, &x, &y).unwrap();
    }
    let recording = rec.finish(&mut Workspace::default());
    let steps = || recording.steps.iter();
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| gpu.compile(steps())))));
    assert_eq!(counters.snapshot().pipelines_created, 2);
}

#[test]
fn failed_buffer_is_never_reused() {
    let Some((gpu, counters)) = open(Setup::default()) else { return };
    let failure = || Some(Failure::Refused { context: "allocating".into(), message: "refused".into() });
    // As in a browser, the allocation's outcome is known at a later poll: the first at once, the second when the
    // buffer is returned to the pool, the third when it would be reused.
    let known_at = |look: u32, failure: Option<Failure>| {
        let mut looks = 0;
        let check = std::future::poll_fn(move |_| {
            looks += 1;
            if looks >= look { Poll::Ready(failure.clone()) } else { Poll::Pending }
        });
        Outcome::of(Box::pin(check)).unwrap()
    };
    // The outcome, whether the buffer is reused, and whether its next user must still learn the outcome.
    let cases = [
        (None, true, false),
        (known_at(2, None), true, false),
        (known_at(3, None), true, false),
        (known_at(u32::MAX, None), true, true),
        (known_at(2, failure()), false, false),
        (known_at(3, failure()), false, false),
    ];
    for (i, (outcome, serves, unknown)) in cases.into_iter().enumerate() {
        let size = 4096 << i;
        let mut buffer = gpu.allocate("first", size).unwrap();
        buffer.outcome = outcome;
        drop(buffer);
        let before = counters.snapshot();
        let second = gpu.allocate("second", size).unwrap();
        assert_eq!((counters.snapshot() - before).pool_hits, u64::from(serves), "case {i}");
        assert_eq!(second.outcome.is_some(), unknown, "case {i}");
    }
}

#[test]
fn a_buffer_beyond_the_limit_is_refused_with_the_limit() {
    let Some((gpu, _)) = open(Setup::default()) else { return };
    let refused = gpu.allocate("huge", 1 << 50);
    let Err(Error::Operand { operand: "size_bytes", expected, found, .. }) = &refused else { panic!("{refused:?}") };
    assert!(expected.contains("max_buffer_size") && found.contains("`huge`"), "{expected}; {found}");
    assert!(gpu.allocate("small", 4096).is_ok());
}

/// Runs [`out_of_memory_is_an_error`] in a process with limited memory.
#[test]
#[cfg(target_os = "linux")]
fn out_of_memory_is_a_distinct_and_recoverable_error() {
    let reports = pollster::block_on(adapters());
    if !reports.first().is_some_and(|report| report.is_software) {
        println!("skipped: the adapter's memory cannot be limited");
        return;
    }
    let output = Command::new("sh")
        .args([
            "-c",
            "ulimit -v 6000000 && exec \"$0\" --exact gpu::tests::out_of_memory_is_an_error --ignored --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}{output:?}");
}

#[test]
#[ignore = "run by out_of_memory_is_a_distinct_and_recoverable_error"]
fn out_of_memory_is_an_error() {
    let Some((gpu, _)) = open(Setup::default()) else { return };
    let mut buffers = Vec::new();
    let error = loop {
        assert!(buffers.len() < 40, "there is no limit");
        match gpu.allocate("weights", 200 * MIB) {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => break error,
        }
    };
    let Error::OutOfMemory { label, size_bytes, allocated_bytes, .. } = &error else { panic!("{error}") };
    assert_eq!((label.as_str(), *size_bytes), ("weights", 200 * MIB));
    assert_eq!(*allocated_bytes, buffers.len() as u64 * 200 * MIB);
    // A failed buffer must not be reused.
    let again = gpu.allocate("weights", 200 * MIB);
    assert!(matches!(again, Err(Error::OutOfMemory { .. })), "{again:?}");
    // A returned buffer makes room for smaller ones, although the pool keeps it for its own size.
    drop(buffers.pop());
    let smaller = allocated(&gpu, "smaller", 100 * MIB).unwrap();
    gpu.write(&smaller, 0, &[7; 16]).unwrap();
    let words = pollster::block_on(gpu.read(&smaller, smaller.all_words()).unwrap()).unwrap().words().unwrap();
    assert_eq!(words, [0x0707_0707; 4]);
}

#[test]
fn unresponsive_device_is_lost_for_every_later_call() {
    let Some((gpu, _)) = open(Setup { timeout: Some(Duration::ZERO), ..Setup::default() }) else { return };
    let a = allocated(&gpu, "a", 4096).unwrap();
    for _ in 0..3 {
        // The first read is submitted; later ones may fail at once.
        let read = gpu.read(&a, a.all_words()).and_then(|read| pollster::block_on(read).map(drop));
        let Err(Error::DeviceLost { message, .. }) = &read else { panic!("{read:?}") };
        assert!(message.contains("no answer within"), "{message}");
    }
    assert!(matches!(gpu.allocate("c", 4096), Err(Error::DeviceLost { .. })));
    assert!(matches!(gpu.write(&a, 0, &[0; 16]), Err(Error::DeviceLost { .. })));
    assert!(matches!(gpu.read(&a, a.all_words()).map(|_| ()), Err(Error::DeviceLost { .. })));
    let drained = gpu.drained().and_then(pollster::block_on);
    assert!(matches!(drained, Err(Error::DeviceLost { .. })), "{drained:?}");
}
