//! Stop texts in a stream: what might be the beginning of one is held back until it is known.
//!
//! Each stop text remembers how much of its beginning the text so far ends with, and moves on byte by byte, as Knuth, Morris and
//! Pratt have it: what a token costs depends on its own bytes and on how many stop texts there are, never on how long they are.

/// Passes text through up to the first stop text: the one that is complete first, and the longest of those.
#[derive(Debug, Default)]
pub(super) struct StopFilter {
    stops: Vec<Stop>,
    held: String,
}

impl StopFilter {
    pub fn new(stops: &[String]) -> Self {
        StopFilter { stops: stops.iter().map(|stop| Stop::new(stop)).collect(), held: String::new() }
    }

    /// Adds text. Returns what can be emitted, and whether a stop text was reached.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        let n_held = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            let ended = self.stops.iter_mut().filter_map(|stop| stop.push(byte).then_some(stop.text.len())).max();
            if let Some(len) = ended {
                self.held.truncate(n_held + at + 1 - len);
                return (self.finish(), true);
            }
        }
        // Both ends of what a stop text has matched are ends of characters.
        let n_kept = self.stops.iter().map(|stop| stop.n_matched).max().unwrap_or(0);
        (self.held.drain(..self.held.len() - n_kept).collect(), false)
    }

    /// What was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.n_matched = 0);
        std::mem::take(&mut self.held)
    }
}

/// A stop text and how far it has matched.
#[derive(Debug)]
struct Stop {
    text: Box<[u8]>,
    /// After so many matched bytes and one more that is not the next: how many bytes match all the same.
    shorter: Box<[u32]>,
    n_matched: usize,
    /// Bytes that were compared.
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
        // The text without its first byte is matched with itself.
        for (at, byte) in text.bytes().enumerate().skip(1) {
            stop.push(byte);
            stop.shorter[at + 1] = stop.n_matched as u32;
        }
        stop.n_matched = 0;
        stop
    }

    /// Goes on by a byte. True at the end of the stop text.
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

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut filter = StopFilter::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        let mut out = String::new();
        for piece in pieces {
            let (text, stopped) = filter.push(piece);
            out += &text;
            if stopped {
                return (out, true);
            }
        }
        (out + &filter.finish(), false)
    }

    #[test]
    fn text_is_cut_at_the_first_stop_however_it_is_split() {
        for cut in 0..=11 {
            let text = "one END two";
            assert_eq!(run(&["END", "two"], &[&text[..cut], &text[cut..]]), ("one ".into(), true), "cut at {cut}");
        }
        // One within the other, and one that ends with the other.
        for cut in 0..=4 {
            assert_eq!(run(&["abcd", "bc"], &[&"abcd"[..cut], &"abcd"[cut..]]), ("a".into(), true), "cut at {cut}");
            assert_eq!(run(&["cd", "bcd"], &[&"abcd"[..cut], &"abcd"[cut..]]), ("a".into(), true), "cut at {cut}");
        }
    }

    #[test]
    fn the_beginning_of_a_stop_is_held_back_and_given_out_later() {
        let mut filter = StopFilter::new(&["abc".into()]);
        assert_eq!(filter.push("xab"), ("x".into(), false));
        assert_eq!(filter.push("abd"), ("ababd".into(), false));
        assert_eq!(filter.push("é a"), ("é ".into(), false));
        assert_eq!(filter.finish(), "a");
    }

    #[test]
    fn characters_of_several_bytes_are_not_split() {
        assert_eq!(run(&["é!"], &["caf", "é", " é", "! rest"]), ("café ".into(), true));
        // The last byte of one character and the first two of the next are no beginning of anything.
        assert_eq!(run(&["é€"], &["éé", "€"]), ("é".into(), true));
    }

    /// Next to looking for each stop text and for each of its beginnings, over all texts of few letters.
    #[test]
    fn what_is_held_is_the_longest_beginning_of_a_stop() {
        let letters = ["a", "b", "é"];
        let text_of = |mut n: usize, len: usize| -> Vec<&str> {
            let next = |_| (letters[n % 3], n /= 3).0;
            (0..len).map(next).collect()
        };
        for stops in [&["abaab"][..], &["aab", "ba"], &["éaéé", "aéa"], &["bbbb", "abb"]] {
            for n in 0..3usize.pow(7) {
                let mut filter = StopFilter::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>());
                let (mut so_far, mut out) = (String::new(), String::new());
                for letter in text_of(n, 7) {
                    so_far += letter;
                    let (text, stopped) = filter.push(letter);
                    out += &text;
                    let longest = stops.iter().filter(|stop| so_far.ends_with(**stop)).map(|stop| stop.len()).max();
                    assert_eq!(stopped, longest.is_some(), "{so_far}");
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

    /// A stop text of a hundred thousand bytes costs what one of ten does: two comparisons a byte at most, also where the text
    /// goes on as if to be that stop text, and where it nearly was.
    #[test]
    fn what_a_token_costs_does_not_depend_on_the_length_of_stop_texts() {
        for len in [10, 100_000] {
            let stops =
                [["a".repeat(len), "b".into()].concat(), ["ab".repeat(len / 2), "c".into()].concat(), "q".repeat(len)];
            let mut filter = StopFilter::new(&stops);
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
