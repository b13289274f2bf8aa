//! Circuit breaker: when the CPU replaces a failing GPU, and when the GPU is tried again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use web_time::Instant;

use crate::loss::LossReason;

/// Thresholds of a [`Breaker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerOptions {
    /// Losses within [`BreakerOptions::within`] that open the circuit, so that the CPU replaces the GPU.
    pub losses: usize,
    /// Period in which losses are counted.
    pub within: Duration,
    /// Time until the GPU is tried again, in long-running programs such as a server; never if `None`.
    pub retry_after: Option<Duration>,
}

impl Default for BreakerOptions {
    /// Three losses within a minute; a trial after five minutes.
    fn default() -> Self {
        let retry_after = Some(Duration::from_secs(300));
        BreakerOptions { losses: 3, within: Duration::from_secs(60), retry_after }
    }
}

/// State of a [`Breaker`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Circuit {
    /// The GPU is used.
    #[default]
    Closed,
    /// The CPU replaces the GPU.
    Open,
    /// The GPU is on trial: a loss opens the circuit again, none for [`BreakerOptions::within`] closes it.
    HalfOpen,
}

/// Counters of a [`Breaker`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BreakerStats {
    /// State of the circuit.
    pub circuit: Circuit,
    losses: [u64; LossReason::ALL.len()],
    /// How often the circuit opened.
    pub n_opened: u64,
    /// How often the GPU was tried again.
    pub n_trials: u64,
}

impl BreakerStats {
    /// Losses by reason, for all reasons in order.
    pub fn losses(&self) -> impl Iterator<Item = (LossReason, u64)> {
        LossReason::ALL.into_iter().zip(self.losses)
    }

    /// Losses for any reason.
    pub fn n_losses(&self) -> u64 {
        self.losses.iter().sum()
    }
}

/// Combines several breakers: the sums, and the circuit furthest from closed.
impl std::ops::Add for BreakerStats {
    type Output = BreakerStats;

    fn add(self, other: BreakerStats) -> BreakerStats {
        let circuit = match [self.circuit, other.circuit] {
            circuits if circuits.contains(&Circuit::Open) => Circuit::Open,
            circuits if circuits.contains(&Circuit::HalfOpen) => Circuit::HalfOpen,
            _ => Circuit::Closed,
        };
        let mut losses = self.losses;
        losses.iter_mut().zip(other.losses).for_each(|(n, more)| *n += more);
        let [n_opened, n_trials] = [self.n_opened + other.n_opened, self.n_trials + other.n_trials];
        BreakerStats { circuit, losses, n_opened, n_trials }
    }
}

/// Counts the losses of a GPU by reason, and decides whether it is opened again. Callers pass the time, so that tests
/// need no clock.
#[derive(Debug, Default)]
pub struct Breaker {
    options: BreakerOptions,
    state: Mutex<BreakerState>,
}

#[derive(Debug, Default)]
struct BreakerState {
    stats: BreakerStats,
    /// Times of the losses that still count.
    recent: Vec<Instant>,
    /// When the circuit became open or half open.
    since: Option<Instant>,
}

impl BreakerState {
    fn open(&mut self, now: Instant) {
        self.since = Some(now);
        self.recent.clear();
        if self.stats.circuit != Circuit::Open {
            self.stats.circuit = Circuit::Open;
            self.stats.n_opened += 1;
        }
    }
}

impl Breaker {
    /// A breaker with a closed circuit.
    pub fn new(options: BreakerOptions) -> Breaker {
        Breaker { options, state: Mutex::default() }
    }

    /// The thresholds.
    pub fn options(&self) -> BreakerOptions {
        self.options
    }

    /// The state at `now`.
    fn state(&self, now: Instant) -> MutexGuard<'_, BreakerState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let held = state.since.map(|since| now.saturating_duration_since(since));
        if state.stats.circuit == Circuit::HalfOpen && held.is_some_and(|held| held > self.options.within) {
            state.stats.circuit = Circuit::Closed;
            state.since = None;
        }
        state
    }

    /// Counts a loss.
    pub fn lost(&self, reason: LossReason, now: Instant) {
        let mut state = self.state(now);
        // `ALL` is in the order of declaration.
        if let Some(n) = state.stats.losses.get_mut(reason as usize) {
            *n += 1;
        }
        state.recent.retain(|&earlier| now.saturating_duration_since(earlier) <= self.options.within);
        state.recent.push(now);
        if state.stats.circuit == Circuit::HalfOpen || state.recent.len() >= self.options.losses {
            state.open(now);
        }
    }

    /// Opens the circuit: from now on the CPU replaces the GPU.
    pub fn open(&self, now: Instant) {
        self.state(now).open(now);
    }

    /// Whether the circuit is open, even if a trial is due.
    pub fn is_open(&self, now: Instant) -> bool {
        self.state(now).stats.circuit == Circuit::Open
    }

    /// Whether the circuit is open and a trial of the GPU is due.
    pub fn is_due(&self, now: Instant) -> bool {
        let state = self.state(now);
        let held = state.since.map(|since| now.saturating_duration_since(since));
        let is_over = held.zip(self.options.retry_after).is_some_and(|(held, after)| held >= after);
        state.stats.circuit == Circuit::Open && is_over
    }

    /// Whether a model may be loaded onto the GPU. Begins a trial if one is due.
    pub fn admits(&self, now: Instant) -> bool {
        if self.is_due(now) {
            let mut state = self.state(now);
            state.stats.circuit = Circuit::HalfOpen;
            state.stats.n_trials += 1;
            state.since = Some(now);
        }
        !self.is_open(now)
    }

    /// Counters and state at `now`.
    pub fn stats(&self, now: Instant) -> BreakerStats {
        self.state(now).stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circuit after each move: `l` loses the GPU, `?` asks whether it is admitted, at the given second.
    fn played(options: BreakerOptions, moves: &[(char, u64)]) -> String {
        let (breaker, start) = (Breaker::new(options), Instant::now());
        let mut seen = String::new();
        for &(what, second) in moves {
            let now = start + Duration::from_secs(second);
            match what {
                'l' => breaker.lost(LossReason::Driver, now),
                _ => drop(breaker.admits(now)),
            }
            seen.push(match breaker.stats(now).circuit {
                Circuit::Closed => 'c',
                Circuit::Open => 'o',
                Circuit::HalfOpen => 'h',
            });
        }
        seen
    }

    #[test]
    fn circuit_opens_after_repeated_losses_and_is_retried_later() {
        let usual = BreakerOptions::default();
        let twice = BreakerOptions { losses: 2, within: Duration::from_secs(30), ..usual };
        let never = BreakerOptions { retry_after: None, ..usual };
        /// Options, moves with their seconds, and the circuit after each.
        type Case<'a> = (BreakerOptions, &'a [(char, u64)], &'a str);
        let cases: [Case<'_>; 9] = [
            (usual, &[('l', 0), ('l', 1), ('l', 2)], "cco"),
            (usual, &[('l', 0), ('l', 30), ('l', 60)], "cco"),
            (usual, &[('l', 0), ('l', 30), ('l', 61), ('l', 90)], "ccco"),
            (usual, &[('l', 0), ('l', 61), ('l', 122), ('l', 183), ('l', 244)], "ccccc"),
            (twice, &[('l', 0), ('l', 30)], "co"),
            (twice, &[('l', 0), ('l', 31)], "cc"),
            // Half open: a loss opens the circuit again, for as long as before.
            (twice, &[('l', 0), ('l', 1), ('?', 300), ('?', 301), ('l', 302), ('?', 601), ('?', 602)], "coohooh"),
            (twice, &[('l', 0), ('l', 1), ('?', 301), ('?', 331), ('?', 332), ('l', 333)], "cohhcc"),
            (never, &[('l', 0), ('l', 0), ('l', 0), ('?', 1 << 30)], "ccoo"),
        ];
        for (options, moves, expected) in cases {
            assert_eq!(played(options, moves), expected, "{moves:?}");
        }
    }

    #[test]
    fn losses_are_counted_by_reason() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        for reason in LossReason::ALL {
            for _ in 0..=reason as usize {
                breaker.lost(reason, now);
            }
        }
        let stats = breaker.stats(now);
        assert!(stats.losses().enumerate().all(|(i, (reason, n))| reason as usize == i && n == i as u64 + 1));
        assert_eq!((stats.n_losses(), stats.n_opened), (36, 1));
        let both = stats + BreakerStats::default();
        assert_eq!((both, (stats + stats).n_losses()), (stats, 72));
    }
}
