//! Buffers by size class. A buffer that is dropped goes back to the pool and serves the next request of its size.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::counters::LiveCounters;
use crate::recording::size_class;

/// Bytes that the pool keeps unused at most; beyond that, buffers are freed.
const MAX_IDLE_BYTES: u64 = 256 << 20;

#[derive(Debug)]
pub(crate) struct BufferPool {
    idle: Mutex<Idle>,
    counters: Arc<LiveCounters>,
}

#[derive(Debug, Default)]
struct Idle {
    by_size: HashMap<u64, Vec<wgpu::Buffer>>,
    total_bytes: u64,
}

impl BufferPool {
    pub fn new(counters: Arc<LiveCounters>) -> Arc<Self> {
        Arc::new(BufferPool { idle: Mutex::default(), counters })
    }

    /// A buffer of at least `size_bytes`, from the pool or new.
    pub fn take(self: &Arc<Self>, device: &wgpu::Device, label: &str, size_bytes: u64) -> PooledBuffer {
        // Large buffers, weights above all, are not rounded up: they are few and an eighth of them is much.
        let class = if size_bytes <= 1 << 20 { size_class(size_bytes) } else { size_bytes.next_multiple_of(256) };
        let reused = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            let buffer = idle.by_size.get_mut(&class).and_then(Vec::pop);
            if buffer.is_some() {
                idle.total_bytes -= class;
            }
            buffer
        };
        let buffer = match reused {
            Some(buffer) => {
                self.counters.pool_hits.add(1);
                buffer
            }
            None => {
                self.counters.pool_misses.add(1);
                self.counters.buffers_created.add(1);
                self.counters.bytes_allocated.add(class);
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(label),
                    size: class,
                    usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                })
            }
        };
        PooledBuffer { buffer, pool: self.clone() }
    }

    /// Frees all buffers that nothing uses.
    pub fn clear(&self) {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        idle.by_size.into_values().flatten().for_each(|buffer| free(&buffer));
    }
}

/// A buffer on loan from the pool.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    pub buffer: wgpu::Buffer,
    pool: Arc<BufferPool>,
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let size = self.buffer.size();
        let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.total_bytes + size <= MAX_IDLE_BYTES {
            idle.total_bytes += size;
            idle.by_size.entry(size).or_default().push(self.buffer.clone());
        } else {
            free(&self.buffer);
        }
    }
}

/// In a browser a handle that is only dropped frees nothing until garbage is collected.
fn free(buffer: &wgpu::Buffer) {
    buffer.destroy();
}
