//! Which tokens have no text out yet.

use std::collections::VecDeque;

/// Counts the latest tokens of which no text was given out, because a character is incomplete or may begin a stop text.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Where the texts of these tokens begin, in bytes of the whole text.
    starts: VecDeque<usize>,
    n_decoded: usize,
    n_out: usize,
}

impl Held {
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
