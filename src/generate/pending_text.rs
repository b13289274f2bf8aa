//! Counts tokens whose text is still pending.

use std::collections::VecDeque;

/// Counts the latest tokens without emitted text: their characters are incomplete or may begin a stop string.
#[derive(Debug, Default)]
pub(super) struct PendingText {
    /// Byte offset in the completion at which each token's text begins.
    starts: VecDeque<usize>,
    n_decoded: usize,
    n_out: usize,
}

impl PendingText {
    /// Adds a token that decoded to `n_bytes`.
    pub fn decoded(&mut self, n_bytes: usize) {
        self.starts.push_back(self.n_decoded);
        self.n_decoded += n_bytes;
    }

    /// Counts `n_bytes` more as emitted and returns how many of the latest tokens have no emitted text.
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
    fn token_is_held_until_part_of_its_text_is_emitted() {
        let mut held = PendingText::default();
        // Bytes decoded and emitted per token: "ab", half of "é", its other half, a control token, "cd" whose "d"
        // may begin a stop string, and "e", which rules that out.
        let tokens = [(2, 2), (0, 0), (2, 2), (0, 0), (2, 1), (1, 2)];
        let got = tokens.map(|(n_decoded, n_out)| {
            held.decoded(n_decoded);
            held.given_out(n_out)
        });
        assert_eq!(got, [0, 1, 0, 1, 0, 0]);
        // Three tokens of a stop string; the first begins with other text.
        let got = [(3, 1), (2, 0), (1, 0)].map(|(n_decoded, n_out)| {
            held.decoded(n_decoded);
            held.given_out(n_out)
        });
        assert_eq!(got, [0, 1, 2]);
    }
}
