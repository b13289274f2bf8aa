//! How many submissions are in flight while a generation goes on.

/// Submissions in flight at least, the one that is being read included: the GPU computes one while the host reads another.
const FEWEST: usize = 2;
/// Submissions in flight at most: what was submitted after the end of a text is computed for nothing.
const MOST: usize = 8;
/// What counts as a whole submission's time, in parts of it: clocks are coarse, and waiting ends late.
const JITTER: f64 = 0.125;
/// Weight of the latest interval in their mean.
const WEIGHT: f64 = 0.25;

/// Measures how long after its submission a result is there, and at which rate results come, in seconds of any clock.
///
/// A GPU that has nothing to do while the host waits for a map delivers a result for each round trip and submission in
/// flight, so the rate says how many more it could have had. One that is always busy delivers one for each submission's time.
/// The shortest round trip counts, because a queue of several makes the others longer than they are by themselves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// From a submission to when its result was there, the shortest so far.
    round_trip: Option<f64>,
    /// From one result to the next, on average.
    interval: Option<f64>,
    /// When the last result was there.
    last: Option<f64>,
}

impl Pace {
    /// The time before the next result is no interval: it is another text's, or nothing was in flight.
    pub fn pause(&mut self) {
        self.last = None;
    }

    /// A result is there.
    pub fn seen(&mut self, submitted: f64, now: f64) {
        let round_trip = (now - submitted).max(0.0);
        self.round_trip = Some(self.round_trip.map_or(round_trip, |shortest| shortest.min(round_trip)));
        if let Some(last) = self.last {
            let interval = (now - last).max(0.0);
            self.interval = Some(self.interval.map_or(interval, |mean| mean + WEIGHT * (interval - mean)));
        }
        self.last = Some(now);
    }

    /// Submissions to have in flight: as many as pass during a round trip, and one.
    pub fn depth(&self) -> usize {
        let (Some(round_trip), Some(interval)) = (self.round_trip, self.interval) else { return FEWEST };
        // A float that is too large, or none, becomes the largest or smallest number.
        let passing = (round_trip / interval.max(f64::MIN_POSITIVE) - JITTER).ceil() as usize;
        passing.saturating_add(1).clamp(FEWEST, MOST)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A GPU that takes `pass` seconds for each submission in turn, and a host that sees results `latency` later. Returns the
    /// depth and the rate that it had over the last tenth of 400 results, in results for each second of a busy GPU.
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
    fn as_many_are_in_flight_as_keep_the_gpu_busy() {
        // Natively a map takes less than a pass; two would do, and one more is for what the host does meanwhile.
        for (pass, latency) in [(1e-3, 1e-5), (1e-2, 1e-3), (1e-4, 5e-5)] {
            let (depth, rate) = run(pass, latency);
            assert!((2..=3).contains(&depth) && rate > 0.99, "{pass} {latency}: {depth}, {rate}");
        }
        // In browsers a map takes several passes.
        for (pass, latency, fewest) in [(5e-3, 1e-2, 3), (4e-3, 1.5e-2, 5), (2e-3, 1e-2, 6)] {
            let (depth, rate) = run(pass, latency);
            assert!(depth >= fewest && depth <= fewest + 2 && rate > 0.99, "{pass} {latency}: {depth}, {rate}");
        }
        // More than is of use after the end of a text.
        assert_eq!(run(1e-4, 1e-2).0, 8);
    }

    #[test]
    fn clocks_that_stand_still_or_go_back_do_no_harm() {
        let mut pace = Pace::default();
        assert_eq!(pace.depth(), 2);
        for (submitted, now) in [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (0.5, 0.5)] {
            pace.seen(submitted, now);
            assert!((2..=8).contains(&pace.depth()), "{pace:?}");
        }
        // The pause between two texts is no interval.
        let mut pace = Pace::default();
        pace.seen(0.0, 1.0);
        pace.seen(0.5, 1.5);
        let before = pace.depth();
        pace.pause();
        pace.seen(1000.0, 1001.0);
        assert_eq!(pace.depth(), before);
    }
}
