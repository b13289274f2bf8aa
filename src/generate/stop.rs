//! Stop strings in a stream: holds back text that may be the beginning of one.
//!
//! Each stop string tracks how many of its bytes the text so far ends with, as in Knuth, Morris and Pratt: a token's
//! cost depends on its bytes and the number of stop strings, never on their length.

use std::cmp::Reverse;

/// Passes text through up to the first complete stop string; of several that end together, the longest counts.
#[derive(Debug, Default)]
pub(super) struct StopFilter {
    stops: Vec<Stop>,
    held: String,
    /// Whether the stop string itself passes, too.
    includes_stop: bool,
}

impl StopFilter {
    pub fn new(stops: &[String], includes_stop: bool) -> Self {
        let stops = stops.iter().map(|stop| Stop::new(stop)).collect();
        StopFilter { stops, held: String::new(), includes_stop }
    }

    /// Adds text. Returns the text to emit, and the index of the stop string that was reached.
    pub fn push(&mut self, text: &str) -> (String, Option<usize>) {
        let n_held = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            // Equal lengths mean equal strings: the first one counts.
            let stops = self.stops.iter_mut().enumerate();
            let ended = stops.filter_map(|(i, stop)| stop.push(byte).then_some((stop.text.len(), Reverse(i)))).max();
            if let Some((len, Reverse(stop))) = ended {
                let n_left_out = if self.includes_stop { 0 } else { len };
                self.held.truncate(n_held + at + 1 - n_left_out);
                return (self.finish(), Some(stop));
            }
        }
        // A match begins and ends at character boundaries.
        let n_kept = self.stops.iter().map(|stop| stop.n_matched).max().unwrap_or(0);
        (self.held.drain(..self.held.len() - n_kept).collect(), None)
    }

    /// The held text, at the end of the stream.
    pub fn finish(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.n_matched = 0);
        std::mem::take(&mut self.held)
    }
}

/// A stop string and its match so far.
#[derive(Debug)]
struct Stop {
    text: Box<[u8]>,
    /// The KMP failure table: bytes still matched after a mismatch, by bytes matched before.
    shorter: Box<[u32]>,
    n_matched: usize,
    /// Bytes compared.
    #[cfg(test)]
    n_compared: usize,
}

impl Stop {
    fn new(text: &str) -> Stop {
        let mut stop = Stop {
            text: text.as_bytes().into(),
            shorter: vec![0; text.len() + 1].into(),
            n_matched: 0,
            #[cfg(test)]
            n_compared: 0,
        };
        // Match the string without its first byte against itself.
        for (at, byte) in text.bytes().enumerate().skip(1) {
            stop.push(byte);
            stop.shorter[at + 1] = stop.n_matched as u32;
        }
        stop.n_matched = 0;
        stop
    }

    /// Advances by a byte; true at the end of the stop string.
    fn push(&mut self, byte: u8) -> bool {
        loop {
            #[cfg(test)]
            (self.n_compared += 1);
            if self.text.get(self.n_matched) == Some(&byte) {
                self.n_matched += 1;
                return self.n_matched == self.text.len();
            }
            if self.n_matched == 0 {
                return false;
            }
            self.n_matched = self.shorter[self.n_matched] as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text before the first stop string, and its index.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        run_with(stops, pieces, false)
    }

    fn run_with(stops: &[&str], pieces: &[&str], includes_stop: bool) -> (String, Option<usize>) {
        let mut filter = StopFilter::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>(), includes_stop);
        let mut out = String::new();
        for piece in pieces {
            let (text, stopped) = filter.push(piece);
            out += &text;
            if stopped.is_some() {
                return (out, stopped);
            }
        }
        (out + &filter.finish(), None)
    }

    #[test]
    fn text_is_cut_at_the_first_stop_text_however_split() {
        for cut in 0..=11 {
            let text = "one END two";
            let pieces = [&text[..cut], &text[cut..]];
            assert_eq!(run(&["END", "two"], &pieces), ("one ".into(), Some(0)), "cut at {cut}");
            assert_eq!(run_with(&["END", "two"], &pieces, true), ("one END".into(), Some(0)), "cut at {cut}");
        }
        // One inside the other, and one that ends with the other.
        for cut in 0..=4 {
            assert_eq!(run(&["abcd", "bc"], &[&"abcd"[..cut], &"abcd"[cut..]]), ("a".into(), Some(1)), "cut at {cut}");
            assert_eq!(
                run(&["cd", "bcd", "bcd"], &[&"abcd"[..cut], &"abcd"[cut..]]),
                ("a".into(), Some(1)),
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn partial_stop_text_is_held_back_then_emitted() {
        let mut filter = StopFilter::new(&["abc".into()], false);
        assert_eq!(filter.push("xab"), ("x".into(), None));
        assert_eq!(filter.push("abd"), ("ababd".into(), None));
        assert_eq!(filter.push("é a"), ("é ".into(), None));
        assert_eq!(filter.finish(), "a");
    }

    #[test]
    fn multibyte_characters_are_not_split() {
        assert_eq!(run(&["é!"], &["caf", "é", " é", "! rest"]), ("café ".into(), Some(0)));
        // The last byte of one character and the first two of the next begin no stop string.
        assert_eq!(run(&["é€"], &["éé", "€"]), ("é".into(), Some(0)));
    }

    /// Compared with a search for every stop string and prefix, over all texts of a few letters.
    #[test]
    fn held_text_is_the_longest_prefix_of_a_stop_text() {
        let letters = ["a", "b", "é"];
        let text_of = |mut n: usize, len: usize| -> Vec<&str> {
            let next = |_| (letters[n % 3], n /= 3).0;
            (0..len).map(next).collect()
        };
        for stops in [&["abaab"][..], &["aab", "ba"], &["éaéé", "aéa"], &["bbbb", "abb"]] {
            for n in 0..3usize.pow(7) {
                let mut filter = StopFilter::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>(), false);
                let (mut so_far, mut out) = (String::new(), String::new());
                for letter in text_of(n, 7) {
                    so_far += letter;
                    let (text, stopped) = filter.push(letter);
                    out += &text;
                    let longest = stops.iter().filter(|stop| so_far.ends_with(**stop)).map(|stop| stop.len()).max();
                    assert_eq!(stopped.map(|at| stops[at].len()), longest, "{so_far}");
                    if let Some(longest) = longest {
                        assert_eq!(out, so_far[..so_far.len() - longest]);
                        break;
                    }
                    let begins = |end: &&str| stops.iter().any(|stop| stop.starts_with(*end));
                    let held = so_far.char_indices().map(|(at, _)| &so_far[at..]).find(begins).unwrap_or_default();
                    assert_eq!(out, so_far[..so_far.len() - held.len()], "of {so_far}");
                }
            }
        }
    }

    /// A stop string of 100,000 bytes costs as much as one of ten, at most two comparisons per byte, even if the
    /// text nearly matches it.
    #[test]
    fn cost_per_token_does_not_depend_on_stop_text_length() {
        for len in [10, 100_000] {
            let stops =
                [["a".repeat(len), "b".into()].concat(), ["ab".repeat(len / 2), "c".into()].concat(), "q".repeat(len)];
            let mut filter = StopFilter::new(&stops, false);
            let made: usize = filter.stops.iter().map(|stop| stop.n_compared).sum();
            assert!(made <= 2 * stops.iter().map(String::len).sum::<usize>(), "{made} for stops of {len}");
            let text = ["a".repeat(1000), "ab".repeat(1000), "x".repeat(1000)].concat();
            for at in 0..text.len() {
                filter.push(&text[at..=at]);
            }
            let compared = filter.stops.iter().map(|stop| stop.n_compared).sum::<usize>() - made;
            assert!(compared <= 2 * stops.len() * text.len(), "{compared} for stops of {len}");
        }
    }
}
