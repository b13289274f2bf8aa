//! Buffer pool by size class. A dropped buffer returns to the pool and serves the next request of its size.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use super::faults::Faults;
use super::outcome::{Failure, Fault, Outcome, scoped};
use super::polling::poll;
use crate::counters::LiveCounters;
use crate::platform::IS_BROWSER;
use crate::recording::size_class;

/// Maximum bytes of idle buffers in the pool; beyond that, buffers are freed.
const MAX_IDLE_BYTES: u64 = 256 << 20;

/// Usages of a tensor's buffer.
pub const BUFFER_USAGES: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

#[derive(Debug)]
pub(crate) struct BufferPool {
    idle: Mutex<IdleBuffers>,
    /// Bytes of buffers in use or idle.
    allocated_bytes: AtomicU64,
    counters: Arc<LiveCounters>,
    fault: Fault,
    faults: Faults,
}

#[derive(Debug, Default)]
struct IdleBuffers {
    by_size: HashMap<u64, Vec<IdleBuffer>>,
    total_bytes: u64,
}

/// A buffer and, in browsers, its allocation's outcome while unknown.
type IdleBuffer = (wgpu::Buffer, Option<Outcome>);

/// The outcome of an allocation if still unknown; an error if it failed.
fn still_unknown(outcome: Option<Outcome>) -> Result<Option<Outcome>, Failure> {
    match outcome.as_ref().map(Outcome::now) {
        None | Some(Poll::Ready(None)) => Ok(None),
        Some(Poll::Ready(Some(failure))) => Err(failure),
        Some(Poll::Pending) => Ok(outcome),
    }
}

impl BufferPool {
    pub fn new(counters: Arc<LiveCounters>, fault: Fault, faults: Faults) -> Arc<Self> {
        Arc::new(BufferPool { idle: Mutex::default(), allocated_bytes: AtomicU64::new(0), counters, fault, faults })
    }

    /// A buffer of at least `size_bytes`, from the pool or new.
    pub fn take(
        self: &Arc<Self>,
        device: &wgpu::Device,
        label: &str,
        size_bytes: u64,
    ) -> Result<PooledBuffer, Failure> {
        // Large buffers, mostly weights, are not rounded up: they are few, and rounding could waste an eighth.
        let class = if size_bytes <= 1 << 20 { size_class(size_bytes) } else { size_bytes.next_multiple_of(256) };
        if let Some((buffer, outcome)) = self.reuse(class) {
            self.counters.pool_hits.add(1);
            return Ok(PooledBuffer { buffer, outcome, pool: Some(self.clone()) });
        }
        self.counters.pool_misses.add(1);
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size: class, usage: BUFFER_USAGES, mapped_at_creation: false };
        let (mut buffer, mut outcome) = self.create(device, &descriptor);
        if matches!(outcome, Err(Failure::OutOfMemory { .. })) && self.clear() > 0 {
            // Idle buffers may hold the missing memory. Polling releases those that the GPU has finished using.
            if !IS_BROWSER {
                let _ = poll(device, &self.fault, &self.faults, wgpu::PollType::Poll);
            }
            (buffer, outcome) = self.create(device, &descriptor);
        }
        let outcome = outcome?;
        self.counters.buffers_created.add(1);
        self.counters.bytes_allocated.add(class);
        self.allocated_bytes.fetch_add(class, Ordering::Relaxed);
        Ok(PooledBuffer { buffer, outcome, pool: Some(self.clone()) })
    }

    /// An idle buffer of a size. Drops buffers whose allocation turned out to have failed.
    fn reuse(&self, class: u64) -> Option<IdleBuffer> {
        loop {
            let (buffer, outcome) = {
                let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
                let found = idle.by_size.get_mut(&class).and_then(Vec::pop)?;
                idle.total_bytes -= class;
                found
            };
            match still_unknown(outcome) {
                Ok(outcome) => return Some((buffer, outcome)),
                Err(_) => self.give_up(buffer),
            }
        }
    }

    /// Frees a buffer instead of returning it to the pool.
    fn give_up(&self, buffer: wgpu::Buffer) {
        self.allocated_bytes.fetch_sub(buffer.size(), Ordering::Relaxed);
        free(buffer);
    }

    /// Creates a buffer, possibly with usages other than the pool's, and returns its outcome.
    pub fn create(
        &self,
        device: &wgpu::Device,
        descriptor: &wgpu::BufferDescriptor<'_>,
    ) -> (wgpu::Buffer, Result<Option<Outcome>, Failure>) {
        let (label, size_bytes) = (descriptor.label.unwrap_or_default().to_string(), descriptor.size);
        let allocated_bytes = self.allocated_bytes.load(Ordering::Relaxed);
        let explain = move |error: wgpu::Error| {
            let message = error.to_string();
            match error {
                wgpu::Error::OutOfMemory { .. } => Failure::OutOfMemory { label, size_bytes, allocated_bytes, message },
                _ => Failure::Refused { context: format!("allocating {size_bytes} bytes for `{label}`"), message },
            }
        };
        let filters = [wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation];
        let begun =
            self.faults.begin_buffer(device, descriptor.label.unwrap_or_default(), [size_bytes, allocated_bytes]);
        let _done = match begun {
            Ok(done) => done,
            Err(failure) => return (device.create_buffer(descriptor), Err(failure)),
        };
        scoped(device, &filters, explain, || device.create_buffer(descriptor))
    }

    /// Bytes of buffers in use.
    pub fn used_bytes(&self) -> u64 {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        self.allocated_bytes.load(Ordering::Relaxed) - idle.total_bytes
    }

    /// Frees all idle buffers and returns their total bytes.
    pub fn clear(&self) -> u64 {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        self.allocated_bytes.fetch_sub(idle.total_bytes, Ordering::Relaxed);
        idle.by_size.into_values().flatten().for_each(|(buffer, _)| free(buffer));
        idle.total_bytes
    }
}

/// A buffer borrowed from the pool.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    pub buffer: wgpu::Buffer,
    /// The allocation's outcome if not known at once.
    pub outcome: Option<Outcome>,
    /// `None` for a buffer of the caller's, which is not reused.
    pool: Option<Arc<BufferPool>>,
}

impl PooledBuffer {
    /// A buffer of the caller's.
    pub fn foreign(buffer: wgpu::Buffer) -> PooledBuffer {
        PooledBuffer { buffer, outcome: None, pool: None }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let Some(pool) = &self.pool else { return };
        let size = self.buffer.size();
        // A failed buffer is never reused. If the outcome is unknown, the next user gets it.
        let outcome = still_unknown(self.outcome.take());
        let mut idle = pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(outcome) if idle.total_bytes + size <= MAX_IDLE_BYTES => {
                idle.total_bytes += size;
                idle.by_size.entry(size).or_default().push((self.buffer.clone(), outcome));
            }
            _ => {
                drop(idle);
                pool.give_up(self.buffer.clone());
            }
        }
    }
}

/// Frees a buffer. Natively, dropping the last handle frees it; `destroy` would wait until no thread waits for the
/// GPU, which prevents two batches in flight. In a browser, dropping frees nothing until garbage collection, so the
/// buffer is destroyed. Not tested: wgpu does not report whether a thread waits, so a test would depend on timing.
pub(super) fn free(buffer: wgpu::Buffer) {
    if IS_BROWSER {
        buffer.destroy();
    }
}
