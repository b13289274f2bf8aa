//! Reading buffers without blocking: staging buffers that are reused, and a thread that waits for the GPU.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use super::buffer_pool::{BufferPool, free};
use super::faults::Faults;
use super::outcome::{Failure, Fault, Outcome, Reports};
#[cfg(not(target_arch = "wasm32"))]
use super::polling::poll;
use super::signal::{Completion, Signal, complete};
use crate::counters::LiveCounters;
use crate::error::Error;
use crate::loss::LossReason;
#[cfg(not(target_arch = "wasm32"))]
use crate::panics::caught;

/// A staging buffer and, until it is first used, whether it could be allocated, where that is not known yet.
type Stage = (wgpu::Buffer, Option<Outcome>);

/// Staging buffers by size, each in use by at most one read.
#[derive(Debug)]
pub(crate) struct Staging {
    idle: Mutex<HashMap<u64, Vec<Stage>>>,
    counters: Arc<LiveCounters>,
}

impl Staging {
    pub fn new(counters: Arc<LiveCounters>) -> Arc<Self> {
        Arc::new(Staging { idle: Mutex::default(), counters })
    }

    /// A buffer of this size. Small ones are made eight at a time: as many reads of a token can be in flight, and how many
    /// are depends on time.
    pub fn take(&self, pool: &BufferPool, device: &wgpu::Device, size: u64) -> Result<Stage, Failure> {
        const SMALL_BYTES: u64 = 1 << 10;
        const TOGETHER: usize = 8;
        let make = || {
            self.counters.buffers_created.add(1);
            let (buffer, outcome) = pool.create(
                device,
                &wgpu::BufferDescriptor {
                    label: Some("staging"),
                    size,
                    usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                },
            );
            Ok((buffer, outcome?))
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = idle.entry(size).or_default();
        if let Some(stage) = idle.pop() {
            return Ok(stage);
        }
        for _ in 1..if size <= SMALL_BYTES { TOGETHER } else { 1 } {
            idle.push(make()?);
        }
        make()
    }

    fn give_back(&self, buffer: wgpu::Buffer) {
        /// Larger ones are for one-off reads and are freed.
        const MAX_KEPT_BYTES: u64 = 1 << 20;
        if buffer.size() <= MAX_KEPT_BYTES {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.entry(buffer.size()).or_default().push((buffer, None));
        } else {
            free(buffer);
        }
    }
}

/// Asks for a buffer to be mapped; the copy into it has been submitted.
pub(crate) fn map(buffer: &wgpu::Buffer) -> Completion {
    let (signal, mapped) = Completion::new();
    buffer.slice(..).map_async(wgpu::MapMode::Read, move |result| {
        let lost = |e: wgpu::BufferAsyncError| Error::DeviceLost {
            reason: LossReason::Driver,
            context: "reading a buffer".into(),
            message: e.to_string(),
        };
        complete(&signal, result.map_err(lost));
    });
    mapped
}

/// Gives a device up. The error that says so, or that it was lost before.
fn lose(fault: &Fault, reason: LossReason, context: &str, message: String) -> Result<(), Error> {
    fault.lose(reason, message);
    fault.check_lost(context)
}

/// The content of a staging buffer, once the GPU has written it and everything that led to it is known to be sound.
pub(crate) struct ReadFuture {
    /// `None` once given back.
    buffer: Option<wgpu::Buffer>,
    staging: Arc<Staging>,
    fault: Fault,
    reports: Reports,
    mapped: Completion,
}

impl ReadFuture {
    pub fn new(
        buffer: wgpu::Buffer,
        staging: Arc<Staging>,
        fault: Fault,
        reports: Reports,
        mapped: Completion,
    ) -> Self {
        ReadFuture { buffer: Some(buffer), staging, fault, reports, mapped }
    }
}

impl Future for ReadFuture {
    type Output = Result<Mapped, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(sound) = self.reports.poll(cx) else { return Poll::Pending };
        // What went wrong on the way says more than a buffer that cannot be mapped, or one full of zeros; and more than
        // either, that the device is gone.
        if let Err(failure) = sound {
            return Poll::Ready(self.fault.check("running").and(Err(failure.into_error())));
        }
        let Poll::Ready(result) = Pin::new(&mut self.mapped).poll(cx) else { return Poll::Pending };
        // One that is waited for and cannot be mapped loses the device; one that was given up says the same, to nobody.
        let result = result.or_else(|error| match error {
            Error::DeviceLost { reason, context, message } => lose(&self.fault, reason, &context, message),
            other => Err(other),
        });
        let Some(buffer) = self.buffer.take() else { return Poll::Pending };
        let staging = self.staging.clone();
        Poll::Ready(self.fault.check("running").and(result).map(|()| Mapped { buffer, staging }))
    }
}

/// A staging buffer that is mapped.
pub(crate) struct Mapped {
    buffer: wgpu::Buffer,
    staging: Arc<Staging>,
}

impl Mapped {
    /// Its words.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn words(self) -> Result<Vec<u32>, Error> {
        self.take(|view| bytemuck::pod_collect_to_vec(view))
    }

    /// Its words. As a slice the view would be a copy of what the browser has mapped, and the words a copy of that.
    #[cfg(target_arch = "wasm32")]
    pub fn words(self) -> Result<Vec<u32>, Error> {
        self.take(|view| {
            let mapped = view.as_uint8array();
            let mut words = vec![0; mapped.length() as usize / 4];
            mapped.copy_to(bytemuck::cast_slice_mut(&mut words));
            words
        })
    }

    /// Its first `size_bytes` bytes outside WASM memory, so that they are copied once.
    #[cfg(all(target_arch = "wasm32", feature = "web-kernels"))]
    pub fn array(self, size_bytes: u32) -> Result<js_sys::Uint8Array, Error> {
        self.take(|view| view.as_uint8array().slice(0, size_bytes))
    }

    fn take<T>(self, copied: impl FnOnce(&wgpu::BufferView) -> T) -> Result<T, Error> {
        let view = self
            .buffer
            .slice(..)
            .get_mapped_range()
            .map_err(|e| Error::Gpu { context: "reading a buffer".into(), message: e.to_string() })?;
        let content = copied(&view);
        drop(view);
        self.buffer.unmap();
        self.staging.give_back(self.buffer);
        Ok(content)
    }
}

/// Waits for submissions on a thread of its own and so fires the callbacks of reads. In a browser the event loop does
/// that, and there is no thread.
#[derive(Debug)]
pub(crate) struct Poller {
    /// `None` once the poller is being dropped.
    #[cfg(not(target_arch = "wasm32"))]
    requests: Option<std::sync::mpsc::Sender<(wgpu::SubmissionIndex, Arc<Mutex<Signal>>)>>,
    #[cfg(not(target_arch = "wasm32"))]
    thread: Option<std::thread::JoinHandle<()>>,
    #[cfg(not(target_arch = "wasm32"))]
    fault: Fault,
}

/// Longer than any driver's watchdog: a device that needs this long is not going to answer.
#[cfg(not(target_arch = "wasm32"))]
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);

#[cfg(not(target_arch = "wasm32"))]
impl Poller {
    /// `timeout` instead of the usual one is for tests.
    pub fn new(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        fault: Fault,
        timeout: Option<std::time::Duration>,
        faults: Faults,
    ) -> Self {
        let (requests, received) = std::sync::mpsc::channel::<(wgpu::SubmissionIndex, Arc<Mutex<Signal>>)>();
        let (device, queue, timeout) = (device.clone(), queue.clone(), timeout.unwrap_or(TIMEOUT));
        let of_thread = fault.clone();
        let work = move |fault: &Fault| {
            let mut is_answered = true;
            // To the end and not in slices: a wait whose time runs out can panic.
            let wait = |index| {
                // No time at all is a device that never answers, however fast it is.
                if timeout.is_zero() {
                    return Err("no answer within 0 s".to_string());
                }
                let wait = wgpu::PollType::Wait { submission_index: index, timeout: Some(timeout) };
                let polled = poll(&device, fault, &faults, wait);
                polled.map_err(|e| format!("no answer within {} s: {e}", timeout.as_secs_f64()))
            };
            // Ends when the sender is dropped with its device.
            serve(received, fault, |index| {
                let answer = wait(Some(index));
                is_answered &= answer.is_ok();
                answer
            });
            // Letting go of a queue waits for its work, without a limit: the process could not end. One that was given up as slow
            // may still be done.
            let is_slow = fault.lost() == Some(LossReason::SlowStep);
            let lets_go = is_answered || is_slow && wait(None).is_ok();
            if !lets_go {
                std::mem::forget((device.clone(), queue));
            }
        };
        // Without this thread, reads would wait for ever.
        let thread = std::thread::spawn(move || {
            if let Err(panic) = caught("waiting for the device", || work(&of_thread)) {
                of_thread.lose(LossReason::Driver, panic.to_string());
            }
        });
        Poller { requests: Some(requests), thread: Some(thread), fault }
    }

    /// Gives the signal if the submission is not to be waited for, because the device is lost; the callback gives it otherwise.
    pub fn wait_for(&self, index: wgpu::SubmissionIndex, signal: Arc<Mutex<Signal>>) {
        self.fault.tell(&signal);
        let is_taken = self.requests.as_ref().is_some_and(|requests| requests.send((index, signal)).is_ok());
        if !is_taken {
            self.fault.lose(LossReason::Driver, "the thread that waits for it is gone".into());
        }
    }
}

/// Waits for each submission in turn. One that cannot be waited for loses the device, and those after it fail at once.
#[cfg(not(target_arch = "wasm32"))]
fn serve<I>(
    requests: impl IntoIterator<Item = (I, Arc<Mutex<Signal>>)>,
    fault: &Fault,
    mut wait: impl FnMut(I) -> Result<(), String>,
) {
    let context = "waiting for a submission";
    for (index, signal) in requests {
        let answer = fault
            .check_lost(context)
            .and_then(|()| wait(index).or_else(|message| lose(fault, LossReason::NoAnswer, context, message)));
        if let Err(lost) = answer {
            complete(&signal, Err(lost));
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Drop for Poller {
    /// Waits for the thread: left alone, it could let go of the device while the process ends and the driver with it,
    /// which crashes some drivers. One that hangs in a driver whose device was given up is left alone.
    fn drop(&mut self) {
        drop(self.requests.take());
        if self.fault.lost() == Some(LossReason::SlowStep) {
            return;
        }
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(target_arch = "wasm32")]
impl Poller {
    pub fn new(_: &wgpu::Device, _: &wgpu::Queue, _: Fault, _: Option<std::time::Duration>, _: Faults) -> Self {
        Poller {}
    }

    pub fn wait_for(&self, _index: wgpu::SubmissionIndex, _signal: Arc<Mutex<Signal>>) {}
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;
    use std::task::Waker;

    #[test]
    fn a_submission_that_is_not_answered_is_waited_for_once() {
        let fault = Fault::default();
        let reads: Vec<_> = (0..5).map(|_| Completion::new()).collect();
        let mut waited = Vec::new();
        let requests = (0..).zip(reads.iter().map(|(signal, _)| signal.clone()));
        serve(requests, &fault, |index: u32| {
            waited.push(index);
            if index < 2 { Ok(()) } else { Err("no answer".into()) }
        });
        assert_eq!(waited, [0, 1, 2], "those after the first without an answer fail at once");
        let mut states =
            reads.into_iter().map(|(_, mut read)| Pin::new(&mut read).poll(&mut Context::from_waker(Waker::noop())));
        for answered in 0..2 {
            // Their maps complete them.
            assert!(matches!(states.next(), Some(Poll::Pending)), "{answered}");
        }
        for state in states {
            let Poll::Ready(Err(Error::DeviceLost { message, .. })) = state else { panic!("{state:?}") };
            assert_eq!(message, "no answer");
        }
        assert!(matches!(fault.check("running"), Err(Error::DeviceLost { .. })));
    }
}
