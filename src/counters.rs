//! Counts of an executor's work. They do not depend on the machine, so tests assert them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Totals since the device was opened; subtract two for the work between.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct Counters { $($(#[$doc])* pub $name: u64,)* }

        impl std::ops::Sub for Counters {
            type Output = Counters;
            fn sub(self, earlier: Counters) -> Counters {
                Counters { $($name: self.$name - earlier.$name,)* }
            }
        }

        impl std::ops::Add for Counters {
            type Output = Counters;
            fn add(self, other: Counters) -> Counters {
                Counters { $($name: self.$name + other.$name,)* }
            }
        }

        /// Running totals.
        #[derive(Debug, Default)]
        pub(crate) struct LiveCounters { $(pub $name: Count,)* }

        impl LiveCounters {
            pub fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.0.load(Relaxed),)* }
            }
        }
    };
}

/// A running total.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }
}

counters! {
    /// Kernels run.
    dispatches,
    /// Command buffers submitted (GPU) or recordings run (CPU).
    submits,
    /// Buffers created, including staging buffers.
    buffers_created,
    /// Bytes of buffers created, excluding staging buffers.
    bytes_allocated,
    /// Bind groups created.
    bind_groups_created,
    /// Pipelines compiled.
    pipelines_created,
    /// Buffer requests served from the pool.
    pool_hits,
    /// Buffer requests that created a buffer.
    pool_misses,
    /// Bytes written by the host.
    bytes_uploaded,
    /// Reads by the host, one per submission with results.
    reads,
    /// Bytes read back by the host.
    bytes_read,
}
