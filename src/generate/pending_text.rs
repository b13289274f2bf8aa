//! Which tokens have no text out yet.

use std::collections::VecDeque;

/// Counts the latest tokens of which no text was given out, because a character is incomplete or may begin a stop text.
#[derive(Debug, Default)]
pub(super) struct PendingText {
    /// Where the texts of these tokens begin, in bytes of the whole text.
    starts: VecDeque<usize>,
    n_decoded: usize,
    n_out: usize,
}

impl PendingText {
    /// Adds a token, which completed so many bytes.
    pub fn decoded(&mut self, n_bytes: usize) {
        self.starts.push_back(self.n_decoded);
        self.n_decoded += n_bytes;
    }

    /// So many bytes more are given out. Returns how many of the latest tokens have none among all that were.
    pub fn given_out(&mut self, n_bytes: usize) -> usize {
        self.n_out += n_bytes;
        while self.starts.front().is_some_and(|&start| start < self.n_out) {
            self.starts.pop_front();
        }
        self.starts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_held_until_some_of_its_text_is_out() {
        let mut held = PendingText::default();
        // Decoded and given out with each token: "ab", half of "é", the rest of it, a control token, "cd" of which "d" may
        // begin a stop text, "e" that is none.
        let tokens = [(2, 2), (0, 0), (2, 2), (0, 0), (2, 1), (1, 2)];
        let got = tokens.map(|(n_decoded, n_out)| {
            held.decoded(n_decoded);
            held.given_out(n_out)
        });
        assert_eq!(got, [0, 1, 0, 1, 0, 0]);
        // Three tokens of a stop text, the first of which begins with text.
        let got = [(3, 1), (2, 0), (1, 0)].map(|(n_decoded, n_out)| {
            held.decoded(n_decoded);
            held.given_out(n_out)
        });
        assert_eq!(got, [0, 1, 2]);
    }
}
