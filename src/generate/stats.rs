//! Token counts and times of a generation.

use std::collections::HashMap;
use std::time::Duration;

/// Tokens and time of one phase of a generation.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Stats {
    /// Computed tokens.
    pub tokens: usize,
    /// Time in seconds.
    pub seconds: f64,
}

impl Stats {
    pub(super) fn add(&mut self, tokens: usize, time: Duration) {
        self.tokens += tokens;
        self.seconds += time.as_secs_f64();
    }

    /// Tokens per second; 0 without any.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 }
    }
}

/// Results of speculative decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Speculation {
    /// Draft tokens.
    pub drafted: usize,
    /// Draft tokens that the model accepted.
    pub accepted: usize,
    /// Passes that verified drafts. Each yields one token more than it accepts.
    pub passes: usize,
}

/// Calls and time of each kernel.
#[derive(Debug, Default)]
pub(super) struct Profile(HashMap<&'static str, (u64, Duration)>);

impl Profile {
    pub fn add(&mut self, label: &'static str, time: Duration) {
        let (calls, total) = self.0.entry(label).or_default();
        *calls += 1;
        *total += time;
    }

    /// Label, calls and total time, slowest first.
    pub fn rows(&self) -> Vec<(&'static str, u64, Duration)> {
        let mut rows: Vec<_> = self.0.iter().map(|(&label, &(calls, time))| (label, calls, time)).collect();
        crate::sort::by_key(&mut rows, |&(label, _, time)| (std::cmp::Reverse(time), label));
        rows
    }
}
