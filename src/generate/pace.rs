//! Chooses how many submissions a generation keeps in flight.

/// Minimum, including the one being read: the GPU computes one while the host reads another.
const FEWEST: usize = 2;
/// Tolerance, as a fraction of a submission: clocks are coarse and waits end late.
const JITTER: f64 = 0.125;
/// Weight of the latest interval in the moving average.
const WEIGHT: f64 = 0.25;

/// Measures the latency of results and the interval between them, in seconds of any clock.
///
/// An idle GPU returns one result per round trip and submission in flight, so the interval shows how many more it
/// could have had; a busy GPU returns one per submission's compute time. The shortest round trip counts, because
/// queueing lengthens the others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Shortest time from a submission to its result.
    round_trip: Option<f64>,
    /// Moving average of the time between results.
    interval: Option<f64>,
    /// Time of the last result.
    last: Option<f64>,
}

impl Pace {
    /// Maximum depth: submissions beyond the end of a completion are wasted.
    pub const MOST: usize = 8;

    /// Skips the next interval, which spans another generation or an idle queue.
    pub fn pause(&mut self) {
        self.last = None;
    }

    /// Records a result.
    pub fn seen(&mut self, submitted: f64, now: f64) {
        let round_trip = (now - submitted).max(0.0);
        self.round_trip = Some(self.round_trip.map_or(round_trip, |shortest| shortest.min(round_trip)));
        if let Some(last) = self.last {
            let interval = (now - last).max(0.0);
            self.interval = Some(self.interval.map_or(interval, |mean| mean + WEIGHT * (interval - mean)));
        }
        self.last = Some(now);
    }

    /// Number of submissions to keep in flight: those completed during a round trip, plus one.
    pub fn depth(&self) -> usize {
        let (Some(round_trip), Some(interval)) = (self.round_trip, self.interval) else { return FEWEST };
        // Casts of NaN or out-of-range floats saturate.
        let passing = (round_trip / interval.max(f64::MIN_POSITIVE) - JITTER).ceil() as usize;
        passing.saturating_add(1).clamp(FEWEST, Pace::MOST)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Simulates a GPU that takes `pass` seconds per submission and a host that sees results `latency` later.
    /// Returns the depth, and the results per second of GPU time over the last tenth of 400 results.
    fn run(pass: f64, latency: f64) -> (usize, f64) {
        let mut pace = Pace::default();
        let mut unread: VecDeque<(f64, f64)> = VecDeque::new();
        let (mut now, mut free) = (0.0f64, 0.0f64);
        let mut last_tenth = 0.0;
        for i in 0..400 {
            while unread.len() < pace.depth() {
                free = free.max(now) + pass;
                unread.push_back((now, free));
            }
            let (submitted, done) = unread.pop_front().expect("some are in flight");
            now = now.max(done + latency);
            pace.seen(submitted, now);
            if i == 359 {
                last_tenth = now;
            }
        }
        (pace.depth(), 40.0 * pass / (now - last_tenth))
    }

    #[test]
    fn just_enough_passes_are_in_flight_to_keep_the_gpu_busy() {
        // Natively a map takes less than a pass: two suffice, and one more covers the host's work.
        for (pass, latency) in [(1e-3, 1e-5), (1e-2, 1e-3), (1e-4, 5e-5)] {
            let (depth, rate) = run(pass, latency);
            assert!((2..=3).contains(&depth) && rate > 0.99, "{pass} {latency}: {depth}, {rate}");
        }
        // In browsers a map takes as long as several passes.
        for (pass, latency, fewest) in [(5e-3, 1e-2, 3), (4e-3, 1.5e-2, 5), (2e-3, 1e-2, 6)] {
            let (depth, rate) = run(pass, latency);
            assert!(depth >= fewest && depth <= fewest + 2 && rate > 0.99, "{pass} {latency}: {depth}, {rate}");
        }
        // Capped: more are wasted at the end of a completion.
        assert_eq!(run(1e-4, 1e-2).0, 8);
    }

    #[test]
    fn stopped_or_backward_clocks_keep_the_depth_in_range() {
        let mut pace = Pace::default();
        assert_eq!(pace.depth(), 2);
        for (submitted, now) in [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (0.5, 0.5)] {
            pace.seen(submitted, now);
            assert!((2..=8).contains(&pace.depth()), "{pace:?}");
        }
        // The pause between two generations is no interval.
        let mut pace = Pace::default();
        pace.seen(0.0, 1.0);
        pace.seen(0.5, 1.5);
        let before = pace.depth();
        pace.pause();
        pace.seen(1000.0, 1001.0);
        assert_eq!(pace.depth(), before);
    }
}
