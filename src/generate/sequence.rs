//! A session's tokens, and which of them are in the KV cache.

use std::ops::Range;
use std::sync::Arc;

use super::images::{PlacedImages, Run, is_row};
use crate::kernels;
use crate::model::Ring;
use crate::vision::ImageRows;

/// Number of recurrent states on the device.
pub(super) const N_STATES: usize = kernels::N_STATES as usize;

/// Keeps the first token and the latest ones, half a context in all, and no part of an image.
pub(crate) fn slide(ids: &mut Vec<u32>, context_length: usize) {
    let n = (context_length / 2).max(1);
    if ids.len() > n {
        let first = ids.len() - (n - 1);
        let is_next_row = |i: usize| is_row(ids[i]) && ids[i - 1].checked_add(1) == Some(ids[i]);
        let n_cut = (first..ids.len()).take_while(|&i| is_next_row(i)).count();
        ids.drain(1..first + n_cut);
    }
}

/// A session's tokens, and the passes submitted for them.
///
/// A GPU runs ahead of the host: it chooses a token, computes its keys and values and chooses the next before the
/// host has read the first. The host decides which of these tokens to keep: a stop string, a cancelled generation or
/// an end token discards the rest. So the two are counted separately:
///
/// ```text
/// position       0   1   2   3   4   5   6
/// ids            a   b   c   d                kept
/// in the cache   a   b   c   d   e   f        the first `n_cached` are kept tokens; ignore the rest
/// n_ahead                        e   f   g    chosen on the device in this order, not kept yet
/// ```
///
/// [`Sequence::keep`] takes the oldest token chosen ahead. Every other change discards them all; the cache entries
/// of their passes come after the kept tokens, where later passes overwrite them before reading.
///
/// Always: `n_cached <= ids.len()`. While the device follows the sequence (`n_ahead` is `Some`), it has the keys of
/// all kept tokens, except those of the last one if nothing was submitted after that token's choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    ids: Vec<u32>,
    /// Images among them.
    images: PlacedImages,
    n_cached: usize,
    /// Tokens that submitted passes choose and that are not kept yet. `None` if the device's position and token are
    /// not at the sequence's end, so that passes cannot run ahead.
    n_ahead: Option<usize>,
    /// Verified draft tokens that are not kept yet; their keys are cached.
    n_verified: usize,
    /// RoPE table row of position 0 in the cached keys.
    rope_offset: u32,
    /// Positions after which the device has recurrent states, by slot. `None` for a model without recurrent layers.
    states: Option<[usize; N_STATES]>,
    /// The sliding-window layers' ring, if any.
    ring: Option<Ring>,
    /// End of the positions written since position 0, including padding.
    written: usize,
}

/// Cache contents for a sequence without passes in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachedTokens {
    /// Number of leading tokens with keys and values or states.
    pub n: usize,
    /// RoPE table row of position 0.
    pub rope_offset: u32,
    /// Positions after which there are states, for recurrent models.
    pub states: Option<[usize; N_STATES]>,
    /// End of the written positions.
    pub written: usize,
}

impl Sequence {
    /// An empty sequence, for a recurrent model or not, with or without sliding-window layers.
    pub fn new(is_recurrent: bool, ring: Option<Ring>) -> Sequence {
        Sequence { states: is_recurrent.then_some([0; N_STATES]), ring, ..Sequence::default() }
    }

    /// A sequence whose first `n_cached` tokens are in shared pages with this RoPE table row.
    pub fn begun(
        is_recurrent: bool,
        (ids, images): (Vec<u32>, &[Arc<ImageRows>]),
        n_cached: usize,
        rope_offset: u32,
    ) -> Sequence {
        let mut placed = PlacedImages::default();
        placed.add(0, &ids, images);
        let mut sequence = Sequence { ids, images: placed, rope_offset, ..Sequence::new(is_recurrent, None) };
        sequence.submitted(n_cached, n_cached);
        sequence
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Consumes the sequence and returns the kept tokens.
    pub fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    /// Number of leading tokens in the cache.
    pub fn n_cached(&self) -> usize {
        self.n_cached
    }

    /// The kept tokens that are not in the cache.
    pub fn uncached(&self) -> &[u32] {
        &self.ids[self.n_cached..]
    }

    /// Tokens that submitted passes choose and that are not kept yet; `None` if a prefill pass must come next.
    pub fn n_ahead(&self) -> Option<usize> {
        self.n_ahead
    }

    /// Position of the next pass: the cache positions used by submitted passes.
    pub fn next_position(&self) -> usize {
        // The first token chosen ahead gets its keys with the next pass.
        self.n_cached + self.n_ahead.map_or(0, |n| n.saturating_sub(1))
    }

    /// Appends tokens.
    pub fn append(&mut self, ids: &[u32]) {
        self.append_with(ids, &[]);
    }

    /// Appends tokens and rows of images.
    pub fn append_with(&mut self, ids: &[u32], images: &[Arc<ImageRows>]) {
        self.go_back(self.n_cached);
        self.images.add(self.ids.len(), ids, images);
        self.ids.extend_from_slice(ids);
    }

    /// The uncached tokens that the next pass may take.
    pub fn next_run(&self) -> Run {
        self.images.run_at(self.n_cached, self.ids.len() - self.n_cached)
    }

    /// The images.
    pub fn images(&self) -> &PlacedImages {
        &self.images
    }

    /// Time, row and column of these rows of the image that comes next.
    pub fn image_positions(&self, image: &ImageRows, rows: Range<usize>) -> Vec<[u32; 3]> {
        self.images.positions(image, self.n_cached.saturating_sub(rows.start), rows)
    }

    /// Keeps the first `n` tokens, and no part of an image.
    pub fn truncate(&mut self, n: usize) {
        let n = self.images.truncate(n);
        self.ids.truncate(n);
        self.go_back(n);
    }

    /// Goes back to the last position up to `n` from which passes can continue; later results are discarded.
    fn go_back(&mut self, n: usize) {
        self.n_ahead = None;
        self.n_verified = 0;
        self.n_cached = self.n_cached.min(n);
        if let Some(states) = &mut self.states {
            let known = states.iter().copied().filter(|&position| position <= self.n_cached);
            self.n_cached = known.max().unwrap_or(0);
            states.iter_mut().filter(|position| **position > self.n_cached).for_each(|position| *position = 0);
        }
        // If the ring has overwritten keys that the next pass needs, or their inputs, recompute everything.
        let has_all =
            |ring: Ring| self.written <= ring.slots as usize || self.n_cached + ring.back as usize >= self.written;
        if !self.ring.is_none_or(has_all) {
            self.n_cached = 0;
        }
        if self.n_cached == 0 {
            self.written = 0;
        }
    }

    /// Records that a pass left the state after this position.
    fn record_state(&mut self, position: usize) {
        if let Some(states) = &mut self.states {
            states[position % N_STATES] = position;
        }
    }

    /// Positions that passes can use before they overwrite a state that may still be needed.
    pub fn n_free_states(&self) -> usize {
        match self.states {
            Some(_) => N_STATES.saturating_sub(1 + self.n_ahead.unwrap_or(0)),
            None => usize::MAX,
        }
    }

    /// See [`slide`]. All positions change, so the cache is discarded.
    pub fn slide(&mut self, context_length: usize) {
        slide(&mut self.ids, context_length);
        let images = std::mem::take(&mut self.images).images();
        self.images.add(0, &self.ids, &images);
        self.forget_cache();
    }

    /// Discards the cache, after a switch to another one or a failed pass.
    pub fn forget_cache(&mut self) {
        self.go_back(0);
    }

    /// Switches to another, empty cache.
    pub fn move_to(&mut self, ring: Option<Ring>) {
        self.ring = ring;
        self.forget_cache();
    }

    /// RoPE table row of position 0 in the cached keys.
    pub fn rope_offset(&self) -> u32 {
        self.rope_offset
    }

    /// RoPE table row of a token at this position, less the position, modulo 2^32.
    pub fn rope_offset_at(&self, position: usize) -> u32 {
        self.rope_offset.wrapping_add(self.images.rope_shift(position))
    }

    /// Switches to another RoPE table row, which discards the cache. Returns whether it changed.
    pub fn set_rope_offset(&mut self, rope_offset: u32) -> bool {
        let others = rope_offset != self.rope_offset;
        if others {
            self.forget_cache();
            self.rope_offset = rope_offset;
        }
        others
    }

    /// Uncaches the last `n` tokens, so that passes compute them again: the next token can only be chosen after a
    /// pass over the last one.
    pub fn uncache_last(&mut self, n: usize) {
        self.go_back(self.ids.len().saturating_sub(n));
    }

    /// Records a submitted pass of `size` rows over the next `n` uncached tokens.
    pub fn submitted(&mut self, n: usize, size: usize) {
        self.n_ahead = None;
        self.written = self.written.max(self.n_cached + size);
        self.n_cached = (self.n_cached + n).min(self.ids.len());
        self.record_state(self.n_cached);
    }

    /// Records that the last submitted pass chooses the next token.
    pub fn chooses_next(&mut self) {
        self.n_ahead = (self.n_cached == self.ids.len()).then_some(1);
    }

    /// Records `n` passes submitted ahead, each over the token that the previous one chooses.
    pub fn submitted_ahead(&mut self, n: usize) {
        let next = self.next_position();
        self.written = self.written.max(next + n);
        (next + 1..=next + n).for_each(|position| self.record_state(position));
        self.n_ahead = self.n_ahead.map(|ahead| ahead + n);
        if self.n_ahead.is_some_and(|ahead| ahead > 0) {
            self.n_cached = self.ids.len();
        }
    }

    /// How many of `n` draft tokens a pass may verify. A wrong draft needs the state before the pass again, so the
    /// pass must not overwrite it.
    pub fn n_drafts(&self, n: usize) -> usize {
        let overwrites = self.states.is_some() && (self.uncached().len() + n).is_multiple_of(N_STATES);
        n.saturating_sub(usize::from(overwrites))
    }

    /// Records a submitted pass of `size` rows over all uncached tokens and `n` draft tokens, whose keys are not
    /// valid yet.
    pub fn submitted_drafts(&mut self, n: usize, size: usize) {
        self.n_ahead = None;
        self.written = self.written.max(self.n_cached + size);
        self.n_cached = self.ids.len();
        self.record_state(self.n_cached + n);
    }

    /// Accepts the first `n_accepted` of `n` draft tokens. A recurrent state that includes rejected ones is useless:
    /// the accepted ones are then recomputed.
    pub fn verified(&mut self, n_accepted: usize, n: usize) {
        if self.states.is_some() && n_accepted < n {
            self.go_back(self.n_cached);
        } else {
            self.n_verified = n_accepted;
        }
    }

    /// Keeps the next token: the first of those chosen ahead or verified, or one chosen after them.
    pub fn keep(&mut self, id: u32) {
        self.ids.push(id);
        if let Some(n_left) = self.n_verified.checked_sub(1) {
            self.n_verified = n_left;
            self.n_cached = self.ids.len();
        }
        // A token that no pass chose counts as appended.
        self.n_ahead = self.n_ahead.and_then(|ahead| ahead.checked_sub(1));
        if self.n_ahead.is_some_and(|ahead| ahead > 0) {
            self.n_cached = self.ids.len();
        }
    }

    /// Cache contents for a sequence without passes in flight.
    pub fn cached(&self) -> CachedTokens {
        let &Sequence { n_cached: n, rope_offset, states, written, .. } = self;
        CachedTokens { n, rope_offset, states, written }
    }

    /// Replaces the sequence by one with these cache contents.
    pub fn restore(&mut self, ids: Vec<u32>, cached: CachedTokens) {
        let CachedTokens { n, rope_offset, states, written } = cached;
        *self = Sequence { ids, n_cached: n, rope_offset, states, ring: self.ring, written, ..Sequence::default() };
        // A cache without a ring would let passes start where they see keys it never received.
        if self.ring.is_none() && written > n {
            self.forget_cache();
        }
    }

    /// The sequence for a copy of the cache, without the passes in flight.
    pub fn at_rest(&self) -> Sequence {
        let mut sequence = self.clone();
        sequence.go_back(self.n_cached);
        sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: usize = 24;
    const WINDOW: usize = 4;

    /// A device whose cache holds, for each position, the token whose keys are there, with a queue of chosen tokens.
    /// A pass checks that all earlier positions hold the keys of the sequence; with a ring, those within [`WINDOW`].
    struct Simulated {
        sequence: Sequence,
        cache: Vec<Option<u32>>,
        /// The ring's slots: positions and the tokens whose keys are there.
        slots: Vec<Option<(usize, u32)>>,
        chosen: std::collections::VecDeque<u32>,
        /// The tokens that each slot's recurrent state has seen.
        states: Option<[Vec<u32>; N_STATES]>,
        /// Position and token of the next pass that runs ahead.
        state: (usize, u32),
        next_id: u32,
    }

    impl Simulated {
        fn new(is_recurrent: bool, ring: Option<Ring>) -> Self {
            let (sequence, cache) = (Sequence::new(is_recurrent, ring), vec![None; CAPACITY]);
            let slots = vec![None; ring.map_or(0, |ring| ring.slots as usize)];
            let states = is_recurrent.then(Default::default);
            Simulated { sequence, cache, slots, chosen: Default::default(), states, state: (0, 0), next_id: 1000 }
        }

        /// A pass writes the keys of its tokens, and garbage at its padding positions.
        fn write(&mut self, pos: usize, ids: &[u32], size: usize) {
            if let Some(states) = &mut self.states {
                let before: Vec<u32> = self.cache[..pos].iter().flatten().copied().collect();
                let seen = if pos == 0 { Vec::new() } else { states[pos % N_STATES].clone() };
                assert_eq!(seen, before, "{:?}", self.sequence);
                states[(pos + ids.len()) % N_STATES] = [before, ids.to_vec()].concat();
            }
            for (i, pos) in (pos..(pos + size).min(CAPACITY)).enumerate() {
                let id = ids.get(i).copied().unwrap_or(u32::MAX);
                self.cache[pos] = Some(id);
                if !self.slots.is_empty() {
                    let n = self.slots.len();
                    self.slots[pos % n] = Some((pos, id));
                }
            }
            // Positions that the first token of the pass sees.
            for seen in (pos + 1).saturating_sub(WINDOW)..pos {
                let slot = self.slots.get(seen % self.slots.len().max(1));
                assert!(slot.is_none_or(|slot| *slot == self.cache[seen].map(|id| (seen, id))), "{:?}", self.sequence);
            }
        }

        fn fresh_id(&mut self) -> u32 {
            self.next_id += 1;
            self.next_id
        }

        fn choose(&mut self, pos: usize) {
            let id = self.fresh_id();
            self.chosen.push_back(id);
            self.state = (pos, id);
        }

        /// Prefills the uncached tokens in passes of up to `size` tokens.
        fn feed(&mut self, size: usize) {
            self.chosen.clear();
            self.sequence.uncache_last(1);
            while !self.sequence.uncached().is_empty() {
                let pos = self.sequence.n_cached();
                let n = self.sequence.uncached().len().min(size);
                let ids = self.sequence.ids()[pos..pos + n].to_vec();
                self.write(pos, &ids, size);
                self.sequence.submitted(n, size);
                self.check();
            }
            self.choose(self.sequence.ids().len());
            self.sequence.chooses_next();
        }

        fn run_ahead(&mut self, n: usize) {
            for _ in 0..n {
                let (pos, id) = self.state;
                self.write(pos, &[id], 1);
                self.choose(pos + 1);
            }
            self.sequence.submitted_ahead(n);
        }

        fn keep(&mut self) {
            let id = self.chosen.pop_front().unwrap();
            self.sequence.keep(id);
        }

        /// A pass over the uncached tokens and draft tokens, the first `n_accepted` of them right. Returns how many
        /// drafts were used: none if they exceed the pass's rows.
        fn draft(&mut self, n: usize, n_accepted: usize, size: usize) -> usize {
            self.chosen.clear();
            self.sequence.uncache_last(1);
            let n = self.sequence.n_drafts(n);
            let drafts: Vec<u32> = (0..n).map(|_| self.fresh_id()).collect();
            let (begin, n_uncached) = (self.sequence.n_cached(), self.sequence.uncached().len());
            let ids = [self.sequence.uncached(), &drafts].concat();
            if ids.len() > size || n == 0 {
                return 0;
            }
            let n_accepted = n_accepted.min(n);
            self.write(begin, &ids, size);
            self.sequence.submitted_drafts(n, size);
            self.sequence.verified(n_accepted, n);
            self.check();
            for id in drafts.into_iter().take(n_accepted) {
                self.sequence.keep(id);
                self.check();
            }
            let is_state_of_others = self.states.is_some() && n_accepted < n;
            let n_anew = if is_state_of_others { n_uncached + n_accepted } else { 0 };
            assert_eq!(self.sequence.uncached().len(), n_anew, "{:?}", self.sequence);
            let id = self.fresh_id();
            self.sequence.keep(id);
            assert_eq!(self.sequence.uncached().len(), n_anew + 1, "{:?}", self.sequence);
            assert!(!is_state_of_others || self.sequence.n_cached() == begin, "{:?}", self.sequence);
            n_accepted
        }

        /// Checks that the sequence agrees with the device.
        fn check(&self) {
            let Sequence { ids, n_cached, n_ahead, .. } = &self.sequence;
            assert!(n_cached <= &ids.len());
            let cached: Vec<Option<u32>> = ids[..*n_cached].iter().map(|&id| Some(id)).collect();
            assert_eq!(self.cache[..*n_cached], cached, "{:?}", self.sequence);
            if let Some(n_ahead) = n_ahead {
                assert_eq!(*n_ahead, self.chosen.len());
                assert_eq!(self.state.0, self.sequence.next_position(), "{:?}", self.sequence);
                // The next pass sees the kept tokens, then those chosen ahead.
                let mut want: Vec<u32> = ids.clone();
                want.extend(&self.chosen);
                assert_eq!(want.pop(), Some(self.state.1));
                let want: Vec<Option<u32>> = want.into_iter().map(Some).collect();
                assert_eq!(self.cache[..self.state.0], want, "{:?}", self.sequence);
            }
        }
    }

    #[test]
    fn cached_tokens_always_match_kept_tokens() {
        let mut seed = 7u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((seed >> 33) as usize) % n
        };
        let (mut n_kept, mut n_given_up, mut n_slid, mut n_guessed) = (0, 0, 0, 0);
        for round in 0..600 {
            // Passes of up to five rows.
            let ring = Ring { slots: WINDOW as u32 - 1 + 5, back: 5 };
            let mut device = Simulated::new(round % 3 == 2, (round % 2 == 1).then_some(ring));
            for _ in 0..60 {
                let len = device.sequence.ids().len();
                match below(9) {
                    0 => {
                        let n = below(6).min(CAPACITY - 1 - len.min(CAPACITY - 1));
                        let ids: Vec<u32> = (0..n).map(|_| device.fresh_id()).collect();
                        n_given_up += device.sequence.n_ahead().unwrap_or(0);
                        device.sequence.append(&ids);
                    }
                    1 => device.sequence.truncate(below(len + 1)),
                    2 if below(4) == 0 => device.sequence.forget_cache(),
                    3 if len > CAPACITY / 2 => {
                        device.sequence.slide(CAPACITY);
                        n_slid += 1;
                    }
                    4 if len > 0 && len < CAPACITY => device.feed(1 + below(5)),
                    5 if device.sequence.n_ahead().is_some() => {
                        let room = CAPACITY - device.sequence.next_position();
                        let room = room.min(device.sequence.n_free_states());
                        device.run_ahead((1 + below(4)).min(room));
                    }
                    6 | 7 if device.sequence.n_ahead().unwrap_or(0) > 0 && len < CAPACITY => {
                        device.keep();
                        n_kept += 1;
                    }
                    8 if len > 0 && len < CAPACITY - 5 => {
                        let n = 1 + below(4);
                        n_guessed += device.draft(n, below(n + 1), 5);
                    }
                    _ => {}
                }
                device.check();
            }
        }
        let counts = [n_kept, n_given_up, n_slid, n_guessed];
        assert!(counts.iter().zip([500, 100, 20, 500]).all(|(&n, fewest)| n > fewest), "{counts:?}");
    }

    #[test]
    fn appended_tokens_never_see_keys_of_discarded_tokens() {
        let mut sequence = Sequence::default();
        sequence.append(&[1, 2, 3]);
        sequence.uncache_last(1);
        sequence.submitted(3, 3);
        sequence.chooses_next();
        sequence.submitted_ahead(4);
        sequence.keep(4);
        assert_eq!((sequence.n_cached(), sequence.next_position(), sequence.n_ahead()), (4, 7, Some(4)));
        sequence.append(&[5, 6]);
        assert_eq!((sequence.uncached(), sequence.n_ahead()), (&[5, 6][..], None));
    }

    #[test]
    fn last_token_is_uncached_until_the_next_pass() {
        let mut sequence = Sequence::default();
        sequence.append(&[1, 2]);
        sequence.submitted(2, 2);
        sequence.chooses_next();
        sequence.keep(3);
        assert_eq!((sequence.n_cached(), sequence.next_position(), sequence.n_ahead()), (2, 2, Some(0)));
        sequence.submitted_ahead(1);
        assert_eq!((sequence.n_cached(), sequence.next_position(), sequence.n_ahead()), (3, 3, Some(1)));
        assert_eq!(sequence.at_rest().n_cached(), 3);
    }

    #[test]
    fn sliding_keeps_the_first_and_the_latest_tokens() {
        for (n, want) in [(8, &[0, 7, 8, 9][..]), (2, &[0]), (0, &[0]), (20, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9])] {
            let mut sequence = Sequence::default();
            sequence.append(&(0..10).collect::<Vec<_>>());
            sequence.submitted(10, 10);
            sequence.slide(n);
            assert_eq!((sequence.ids(), sequence.n_cached()), (want, 0));
        }
    }

    #[test]
    fn sequence_moved_to_another_cache_uses_its_ring() {
        for (ring, n_cached) in [(None, 50), (Some(Ring { slots: 40, back: 16 }), 0)] {
            let mut sequence = Sequence::new(false, None);
            sequence.append(&(0..100).collect::<Vec<_>>());
            sequence.submitted(100, 128);
            sequence.move_to(ring);
            assert_eq!(sequence.n_cached(), 0);
            sequence.submitted(100, 100);
            sequence.truncate(90);
            assert_eq!(sequence.n_cached(), 90);
            sequence.truncate(50);
            assert_eq!(sequence.n_cached(), n_cached);
        }
    }

    #[test]
    fn calls_in_an_impossible_order_are_harmless() {
        // Chosen tokens without a submitted pass are tokens without keys.
        let mut sequence = Sequence::default();
        sequence.uncache_last(1);
        sequence.chooses_next();
        sequence.append(&[1, 2]);
        sequence.chooses_next();
        sequence.submitted_ahead(3);
        sequence.keep(3);
        assert_eq!((sequence.n_cached(), sequence.n_ahead()), (0, None));
        sequence.submitted(99, 99);
        assert_eq!(sequence.n_cached(), 3);
    }
}
