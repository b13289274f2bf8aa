//! Threads of a browser: workers that share the module's memory and wait in [`Pool::help`] for work that the engine's thread
//! shares out. They come and go with the engine's worker, which JavaScript starts them for.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};

/// Work of one kernel, shared by the threads that join before it is done.
type Job<'a> = dyn Fn() + Sync + 'a;

/// Flag in [`Pool::state`]: helpers may join.
const OPEN: u32 = 1 << 31;
/// How often a thread checks for a change before it sleeps. Kernels are microseconds apart, and waking takes longer.
const LOOKS: u32 = 4000;

/// The threads of the process, besides the one that shares work out.
pub(crate) struct Pool {
    n_helpers: AtomicUsize,
    /// Helpers that do the current job, and [`OPEN`] while there is more to do; zero between jobs.
    state: AtomicU32,
    /// Set between jobs alone, and read by threads that `state` counts.
    job: UnsafeCell<Option<*const Job<'static>>>,
    /// Counts jobs.
    count: AtomicU32,
    has_failed: AtomicBool,
    sleeping: Sleeping,
    waiting: Sleeping,
}

// SAFETY: `job` is set only while no helper reads it, see `share`.
unsafe impl Sync for Pool {}

/// Threads that wait for a change.
struct Sleeping {
    n: AtomicUsize,
    lock: Mutex<()>,
    change: Condvar,
}

impl Sleeping {
    const fn new() -> Sleeping {
        Sleeping { n: AtomicUsize::new(0), lock: Mutex::new(()), change: Condvar::new() }
    }

    /// Waits until `is_over`.
    fn wait(&self, is_over: impl Fn() -> bool) {
        for _ in 0..LOOKS {
            if is_over() {
                return;
            }
            spin_loop();
        }
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before the check: either the waker sees this thread in the count, or this thread sees the change.
        self.n.fetch_add(1, SeqCst);
        while !is_over() {
            lock = self.change.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
        self.n.fetch_sub(1, SeqCst);
    }

    /// Wakes all, after a change.
    fn wake(&self) {
        if self.n.load(SeqCst) > 0 {
            let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.change.notify_all();
        }
    }
}

impl Pool {
    pub const fn new() -> Pool {
        Pool {
            n_helpers: AtomicUsize::new(0),
            state: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            count: AtomicU32::new(0),
            has_failed: AtomicBool::new(false),
            sleeping: Sleeping::new(),
            waiting: Sleeping::new(),
        }
    }

    /// Says how many threads are in [`Pool::help`], or soon will be.
    pub fn set_helpers(&self, n: usize) {
        self.n_helpers.store(n, SeqCst);
    }

    /// Number of threads that share work.
    pub fn threads(&self) -> usize {
        1 + self.n_helpers.load(SeqCst)
    }

    /// Calls a worker with each number below `n`. Each thread has its own worker.
    ///
    /// # Panics
    /// If a helper failed.
    pub fn for_each_number<'a>(&self, n: usize, worker: &(dyn Fn() -> Box<dyn FnMut(usize) + 'a> + Sync)) {
        let next = AtomicUsize::new(0);
        let take = || Some(next.fetch_add(1, SeqCst)).filter(|&i| i < n);
        self.share(&|| {
            if let Some(first) = take() {
                let mut work = worker();
                work(first);
                while let Some(i) = take() {
                    work(i);
                }
            }
        });
    }

    /// Does a job on this thread, and on helpers that join before this thread is done, then waits for those.
    fn share(&self, job: &Job<'_>) {
        // A job within a job, of whichever thread, stays on its thread.
        if self.n_helpers.load(SeqCst) == 0 || self.state.load(SeqCst) != 0 {
            return job();
        }
        // SAFETY: it is borrowed until this function returns, after all helpers have left; a failed one never runs again.
        let job_of_helpers: *const Job<'static> =
            unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        // SAFETY: no helper is in a job, and none comes before `OPEN` is set. Only the engine's thread gets here.
        unsafe { *self.job.get() = Some(job_of_helpers) };
        self.state.store(OPEN, SeqCst);
        self.count.fetch_add(1, SeqCst);
        self.sleeping.wake();
        job();
        self.state.fetch_and(!OPEN, SeqCst);
        self.waiting.wait(|| self.state.load(SeqCst) == 0 || self.has_failed.load(SeqCst));
        assert!(!self.has_failed.load(SeqCst), "a thread of the CPU failed");
    }

    /// Does what the engine's thread shares out, forever.
    pub fn help(&self) -> ! {
        let mut seen = 0;
        loop {
            self.sleeping.wait(|| self.count.load(SeqCst) != seen);
            seen = self.count.load(SeqCst);
            let come = |state| (state & OPEN != 0).then_some(state + 1);
            if self.state.fetch_update(SeqCst, SeqCst, come).is_err() {
                continue;
            }
            // SAFETY: `state` counts this thread, so the job stays.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: as above.
                unsafe { (*job)() };
            }
            if self.state.fetch_sub(1, SeqCst) == 1 {
                self.waiting.wake();
            }
        }
    }

    /// Says that a helper ended, perhaps within a job, which then fails.
    pub fn fail(&self) {
        self.has_failed.store(true, SeqCst);
        self.waiting.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    use super::*;

    /// A pool whose threads last as long as the process.
    fn pool(n_helpers: usize) -> &'static Pool {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new()));
        for _ in 0..n_helpers {
            thread::spawn(|| pool.help());
        }
        pool.set_helpers(n_helpers);
        pool
    }

    #[test]
    fn each_number_is_taken_once_in_every_job() {
        for n_helpers in [0, 1, 3] {
            let pool = pool(n_helpers);
            assert_eq!(pool.threads(), 1 + n_helpers);
            for job in 0..3000 {
                let taken: Vec<AtomicU32> = (0..job % 40).map(|_| AtomicU32::new(0)).collect();
                pool.for_each_number(taken.len(), &|| {
                    Box::new(|i| {
                        taken[i].fetch_add(1, SeqCst);
                    })
                });
                assert!(taken.iter().all(|taken| taken.load(SeqCst) == 1), "{n_helpers} helpers, job {job}");
                if job % 500 == 0 {
                    // All go to sleep.
                    thread::sleep(std::time::Duration::from_millis(20));
                }
            }
        }
    }

    #[test]
    fn several_threads_work_at_a_time_and_a_job_within_a_job_stays_on_its_thread() {
        let pool = pool(1);
        let (arrived, inner) = (AtomicU32::new(0), AtomicU32::new(0));
        pool.for_each_number(2, &|| {
            Box::new(|_| {
                arrived.fetch_add(1, SeqCst);
                // Ends only if another thread takes the other number.
                while arrived.load(SeqCst) < 2 {
                    thread::yield_now();
                }
                let own = thread::current().id();
                pool.for_each_number(5, &|| {
                    assert_eq!(thread::current().id(), own);
                    Box::new(|_| {
                        inner.fetch_add(1, SeqCst);
                    })
                });
            })
        });
        assert_eq!(inner.load(SeqCst), 10);
    }

    #[test]
    fn a_failed_helper_fails_the_job_instead_of_keeping_it() {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new()));
        pool.set_helpers(1);
        // A helper that comes and never leaves.
        thread::spawn(|| {
            while pool.state.fetch_update(SeqCst, SeqCst, |state| (state & OPEN != 0).then_some(state + 1)).is_err() {
                thread::yield_now();
            }
            thread::sleep(std::time::Duration::from_millis(50));
            pool.fail();
        });
        let wait_for_it = || {
            while pool.state.load(SeqCst) & !OPEN == 0 {
                thread::yield_now();
            }
        };
        let job = || pool.for_each_number(1, &|| Box::new(|_| wait_for_it()));
        assert!(catch_unwind(AssertUnwindSafe(job)).is_err());
    }
}
