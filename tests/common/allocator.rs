//! An allocator that counts each thread's live and total bytes, so that tests can bound the memory of a parse and,
//! without a clock, its work.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static ASKED: Cell<usize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // A thread that is being torn down has no counters.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + change);
        PEAK.try_with(|peak| peak.set(peak.get().max(held.get())))
    });
    if change > 0 {
        let _ = ASKED.try_with(|asked| asked.set(asked.get() + change as usize));
        let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    }
}

// SAFETY: every call is forwarded unchanged to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Old and new memory may exist together while the contents move.
        count(new_size as isize);
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        count(-(layout.size() as isize));
        moved
    }
}

/// Allocations of a piece of work.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)] // not every test binary uses all fields
pub struct Asked {
    /// Peak of live bytes.
    pub peak: usize,
    /// Total bytes requested, with reallocations counted in full.
    pub total: usize,
    /// Number of allocations.
    pub calls: usize,
}

/// Result of `work`, and its allocations.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Asked) {
    let (held, total, calls) = (HELD.get(), ASKED.get(), CALLS.get());
    PEAK.set(held);
    let result = work();
    let peak = (PEAK.get() - held).max(0) as usize;
    (result, Asked { peak, total: ASKED.get() - total, calls: CALLS.get() - calls })
}

/// Result of `work`, and its peak of live bytes.
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let (result, asked) = measure(work);
    (result, asked.peak)
}

#[test]
fn allocator_counts_peak_bytes() {
    let (_, peak) = peak_bytes(|| {
        let large = vec![1_u8; 1 << 20];
        drop(large);
        vec![1_u8; 1 << 10]
    });
    assert!((1 << 20..1 << 21).contains(&peak), "{peak}");
}

#[test]
fn allocator_counts_calls_and_total_bytes() {
    let (_, asked) = measure(|| (0..100).for_each(|i| drop(std::hint::black_box(vec![i as u8; 1 << 10]))));
    assert_eq!((asked.calls, asked.total), (100, 100 << 10), "{asked:?}");
    assert!(asked.peak < 1 << 11, "{asked:?}");
}
