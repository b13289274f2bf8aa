//! Counts of what an executor did. They hold on every machine, so tests assert them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Totals since the device was opened; subtract two to get what happened in between.
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

        /// The running totals.
        #[derive(Debug, Default)]
        pub(crate) struct LiveCounters { $(pub $name: Count,)* }

        impl LiveCounters {
            pub fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.0.load(Relaxed),)* }
            }
        }
    };
}

/// One running total.
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
    /// Buffers created, staging buffers included.
    buffers_created,
    /// Bytes of buffers created, staging buffers excluded.
    bytes_allocated,
    /// Bind groups created.
    bind_groups_created,
    /// Pipelines compiled.
    pipelines_created,
    /// Buffer requests that the pool could serve from buffers given back earlier.
    pool_hits,
    /// Buffer requests for which a buffer had to be created.
    pool_misses,
    /// Bytes written by the host.
    bytes_uploaded,
    /// Reads by the host: one for each submission with results.
    reads,
    /// Bytes read back by the host.
    bytes_read,
}
