//! Non-blocking buffer reads: reusable staging buffers, and a thread that waits for the GPU.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use super::buffer_pool::{BufferPool, free};
use super::faults::Faults;
use super::outcome::{Failure, Fault, Outcome, Reports};
use super::polling::poll;
use super::signal::{Signal, SignalFuture, complete};
use crate::counters::LiveCounters;
use crate::error::Error;
use crate::loss::LossReason;
use crate::panics::caught;
use crate::platform::{BoxFuture, IS_BROWSER, Native, join, native, spawn};

/// A staging buffer and, until its first use, its allocation's outcome if not known yet.
type StagingBuffer = (wgpu::Buffer, Option<Outcome>);

/// Staging buffers by size, each in use by at most one read.
#[derive(Debug)]
pub(crate) struct Staging {
    idle: Mutex<HashMap<u64, Vec<StagingBuffer>>>,
    counters: Arc<LiveCounters>,
}

impl Staging {
    pub fn new(counters: Arc<LiveCounters>) -> Arc<Self> {
        Arc::new(Staging { idle: Mutex::default(), counters })
    }

    /// A buffer of this size. Small ones are created eight at a time: up to eight reads of tokens are in flight, and
    /// how many depends on timing.
    pub fn take(&self, pool: &BufferPool, device: &wgpu::Device, size: u64) -> Result<StagingBuffer, Failure> {
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
        /// Larger buffers serve rare reads and are freed.
        const MAX_KEPT_BYTES: u64 = 1 << 20;
        if buffer.size() <= MAX_KEPT_BYTES {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.entry(buffer.size()).or_default().push((buffer, None));
        } else {
            free(buffer);
        }
    }
}

/// Maps a buffer after the copy into it was submitted.
pub(crate) fn map(buffer: &wgpu::Buffer) -> SignalFuture {
    let (signal, mapped) = SignalFuture::new();
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

/// Marks the device as lost and returns the error of its first loss.
fn lose(fault: &Fault, reason: LossReason, context: &str, message: String) -> Result<(), Error> {
    fault.lose(reason, message);
    fault.check_lost(context)
}

/// Resolves to a staging buffer's content when the GPU has written it and all earlier operations have succeeded. Hides the
/// types of `wgpu`, see [`AnyExecutor`](crate::device).
pub(crate) type ReadFuture = BoxFuture<'static, Result<Mapped, Error>>;

/// The future behind a [`ReadFuture`].
pub(crate) struct MappedRead {
    /// `None` once returned to the pool.
    buffer: Option<wgpu::Buffer>,
    staging: Arc<Staging>,
    fault: Fault,
    reports: Reports,
    mapped: SignalFuture,
}

impl MappedRead {
    pub fn new(
        buffer: wgpu::Buffer,
        staging: Arc<Staging>,
        fault: Fault,
        reports: Reports,
        mapped: SignalFuture,
    ) -> Self {
        MappedRead { buffer: Some(buffer), staging, fault, reports, mapped }
    }
}

impl Future for MappedRead {
    type Output = Result<Mapped, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(sound) = self.reports.poll(cx) else { return Poll::Pending };
        // An earlier failure explains more than a failed map or a buffer of zeros; a lost device, more than either.
        if let Err(failure) = sound {
            return Poll::Ready(self.fault.check("running").and(Err(failure.into_error())));
        }
        let Poll::Ready(result) = Pin::new(&mut self.mapped).poll(cx) else { return Poll::Pending };
        // A failed map loses the device. A dropped read ignores its map's failure.
        let result = result.or_else(|error| match error {
            Error::DeviceLost { reason, context, message } => lose(&self.fault, reason, &context, message),
            other => Err(other),
        });
        let Some(buffer) = self.buffer.take() else { return Poll::Pending };
        let staging = self.staging.clone();
        Poll::Ready(self.fault.check("running").and(result).map(|()| Mapped { buffer, staging }))
    }
}

/// A mapped staging buffer.
pub(crate) struct Mapped {
    buffer: wgpu::Buffer,
    staging: Arc<Staging>,
}

impl Mapped {
    /// Reads the words.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn words(self) -> Result<Vec<u32>, Error> {
        self.take(|view| bytemuck::pod_collect_to_vec(view))
    }

    /// Reads the words. A slice of the view would add a copy: from the browser's mapping to WASM memory to the result.
    #[cfg(target_arch = "wasm32")]
    pub fn words(self) -> Result<Vec<u32>, Error> {
        self.take(|view| {
            let mapped = view.as_uint8array();
            let mut words = vec![0; mapped.length() as usize / 4];
            mapped.copy_to(bytemuck::cast_slice_mut(&mut words));
            words
        })
    }

    /// Copies the first `size_bytes` bytes to JavaScript memory, once.
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

/// A submission to wait for, and the signal of its read.
type PollRequest = (wgpu::SubmissionIndex, Arc<Mutex<Signal>>);

/// Waits for submissions on a separate thread, which fires the callbacks of reads. In a browser, the event loop does
/// so without a thread.
#[derive(Debug)]
pub(crate) struct Poller {
    /// `None` during drop.
    requests: Option<Native<std::sync::mpsc::Sender<PollRequest>>>,
    thread: Option<Native<std::thread::JoinHandle<()>>>,
    fault: Fault,
}

/// Longer than any driver's watchdog: a device this slow will not answer.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);

impl Poller {
    /// Tests pass another `timeout` than the default.
    pub fn new(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        fault: Fault,
        timeout: Option<std::time::Duration>,
        faults: Faults,
    ) -> Self {
        if IS_BROWSER {
            return Poller { requests: None, thread: None, fault };
        }
        let (requests, received) = std::sync::mpsc::channel::<PollRequest>();
        let (device, queue, timeout) = (device.clone(), queue.clone(), timeout.unwrap_or(TIMEOUT));
        let of_thread = fault.clone();
        let work = move |fault: &Fault| {
            let mut is_answered = true;
            // One wait without time slices: a wait that times out can panic.
            let wait = |index| {
                // A timeout of zero, for tests, never answers, however fast the device is.
                if timeout.is_zero() {
                    return Err("no answer within 0 s".to_string());
                }
                let wait = wgpu::PollType::Wait { submission_index: index, timeout: Some(timeout) };
                let polled = poll(&device, fault, &faults, wait);
                polled.map_err(|e| format!("no answer within {} s: {e}", timeout.as_secs_f64()))
            };
            // Returns when the sender is dropped with its device.
            serve(received, fault, |index| {
                let answer = wait(Some(index));
                is_answered &= answer.is_ok();
                answer
            });
            // Dropping a queue waits for its work without a limit, which could block the process's exit. A device
            // that was lost as slow may still finish.
            let is_slow = fault.lost() == Some(LossReason::SlowStep);
            let lets_go = is_answered || is_slow && wait(None).is_ok();
            if !lets_go {
                std::mem::forget((device.clone(), queue));
            }
        };
        // If this thread died, reads would wait forever.
        let thread = spawn("tilewright poller", move || {
            if let Err(panic) = caught("waiting for the device", || work(&of_thread)) {
                of_thread.lose(LossReason::Driver, panic.to_string());
            }
        });
        let lose = |error: std::io::Error| fault.lose(LossReason::Driver, format!("no thread waits for it: {error}"));
        Poller { requests: Some(native(requests)), thread: thread.map(native).map_err(lose).ok(), fault }
    }

    /// Completes the signal at once if the device is lost; otherwise the callback completes it.
    pub fn wait_for(&self, index: wgpu::SubmissionIndex, signal: Arc<Mutex<Signal>>) {
        if IS_BROWSER {
            return;
        }
        self.fault.tell(&signal);
        let is_taken = self.requests.as_ref().is_some_and(|requests| requests.send((index, signal)).is_ok());
        if !is_taken {
            self.fault.lose(LossReason::Driver, "its waiting thread has ended".into());
        }
    }
}

/// Waits for each submission in order. A failed wait loses the device, and later waits fail at once.
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

impl Drop for Poller {
    /// Joins the thread: otherwise it could drop the device while the process unloads the driver, which crashes some
    /// drivers. A thread that hangs in a lost device's driver is not joined.
    fn drop(&mut self) {
        if IS_BROWSER {
            return;
        }
        drop(self.requests.take());
        if self.fault.lost() == Some(LossReason::SlowStep) {
            return;
        }
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = join(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    #[test]
    fn unanswered_submission_is_awaited_only_once() {
        let fault = Fault::default();
        let reads: Vec<_> = (0..5).map(|_| SignalFuture::new()).collect();
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
            // The callbacks of their maps complete these.
            assert!(matches!(states.next(), Some(Poll::Pending)), "{answered}");
        }
        for state in states {
            let Poll::Ready(Err(Error::DeviceLost { message, .. })) = state else { panic!("{state:?}") };
            assert_eq!(message, "no answer");
        }
        assert!(matches!(fault.check("running"), Err(Error::DeviceLost { .. })));
    }
}
