//! Which tokens a session keeps, and which of them have keys and values in the cache.

use crate::kernels;
use crate::model::Ring;

/// States that the device has room for.
pub(super) const N_STATES: usize = kernels::N_STATES as usize;

/// Keeps the first token and the latest ones, half of a context in all.
pub(crate) fn slide(ids: &mut Vec<u32>, context_length: usize) {
    let n = (context_length / 2).max(1);
    if ids.len() > n {
        ids.drain(1..ids.len() - (n - 1));
    }
}

/// A session's tokens, next to what its device was told to compute.
///
/// A GPU runs ahead of its reader: it chooses a token, computes that token's keys and values and chooses the next one
/// before the host has read the first. Only the host decides which of these tokens are kept: a stop text, a cancelled
/// generation or an end token leaves passes whose choice nobody keeps. So the two are counted apart:
///
/// ```text
/// position       0   1   2   3   4   5   6
/// ids            a   b   c   d                kept
/// in the cache   a   b   c   d   e   f        the first `n_cached` are kept tokens; what comes after them counts for nothing
/// n_ahead                        e   f   g    chosen on the device in this order, and not kept so far
/// ```
///
/// [`Sequence::keep`] takes the oldest token that was chosen ahead. Every other change gives up all of them; whatever
/// their passes wrote to the cache comes after the kept tokens, where the next passes overwrite it before they read it.
///
/// Always: `n_cached <= ids.len()`. While the device follows the sequence (`n_ahead` is there), it has the keys of all
/// kept tokens, except those of the last one if nothing was submitted after that token's choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    ids: Vec<u32>,
    n_cached: usize,
    /// Tokens that submitted passes choose and that are not kept so far. `None` where the device's position and token are
    /// not those of the sequence's end, so that the next pass cannot simply follow.
    n_ahead: Option<usize>,
    /// Guessed tokens that a pass has verified and that are not kept so far: keys of the next tokens to be kept are there.
    n_verified: usize,
    /// The row of angles that position 0 has in the cached keys.
    angles: u32,
    /// Positions after which the device has the states of layers that keep one of fixed size, in the order of their slots.
    /// `None` for a model without such layers: keys of every position are there.
    states: Option<[usize; N_STATES]>,
    /// What layers with a window keep, if they do not keep all positions.
    ring: Option<Ring>,
    /// The position after the last one that passes wrote since they began at the first one, padding included.
    written: usize,
}

/// What a cache has of a sequence at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    /// Tokens, from the first one on, whose keys and values or states are there.
    pub n: usize,
    /// The row of angles that position 0 has.
    pub angles: u32,
    /// Positions after which there are states, for a model that keeps some.
    pub states: Option<[usize; N_STATES]>,
    /// The position after the last one that passes wrote.
    pub written: usize,
}

impl Sequence {
    /// An empty one, for a model that keeps states of fixed size or for one that does not, and that keeps keys of all
    /// positions or in some layers of the latest ones.
    pub fn new(is_recurrent: bool, ring: Option<Ring>) -> Sequence {
        Sequence { states: is_recurrent.then_some([0; N_STATES]), ring, ..Sequence::default() }
    }

    /// One with these tokens, of which the first `n_cached` are in pages that others have filled, turned by angles from this row on.
    pub fn begun(is_recurrent: bool, ids: Vec<u32>, n_cached: usize, angles: u32) -> Sequence {
        let mut sequence = Sequence { ids, angles, ..Sequence::new(is_recurrent, None) };
        sequence.submitted(n_cached, n_cached);
        sequence
    }

    /// The kept tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The kept tokens, of a sequence that is over.
    pub fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    /// How many tokens, from the first one on, have their keys and values in the cache.
    pub fn n_cached(&self) -> usize {
        self.n_cached
    }

    /// The kept tokens whose keys and values are not in the cache.
    pub fn uncached(&self) -> &[u32] {
        &self.ids[self.n_cached..]
    }

    /// Tokens that submitted passes choose and that are not kept so far; `None` where the device does not follow the
    /// sequence, so that a prompt's pass has to come next.
    pub fn n_ahead(&self) -> Option<usize> {
        self.n_ahead
    }

    /// The position of the next pass: how many positions of the cache submitted passes have used.
    pub fn next_position(&self) -> usize {
        // The first token that is chosen ahead has its keys once the next pass is submitted.
        self.n_cached + self.n_ahead.map_or(0, |n| n.saturating_sub(1))
    }

    /// Adds tokens at the end.
    pub fn append(&mut self, ids: &[u32]) {
        self.go_back(self.n_cached);
        self.ids.extend_from_slice(ids);
    }

    /// Keeps the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.ids.truncate(n);
        self.go_back(n);
    }

    /// Goes back to a position of at most `n` from which passes can go on: what was computed beyond it counts for nothing.
    fn go_back(&mut self, n: usize) {
        self.n_ahead = None;
        self.n_verified = 0;
        self.n_cached = self.n_cached.min(n);
        if let Some(states) = &mut self.states {
            let known = states.iter().copied().filter(|&position| position <= self.n_cached);
            self.n_cached = known.max().unwrap_or(0);
            states.iter_mut().filter(|position| **position > self.n_cached).for_each(|position| *position = 0);
        }
        // Keys that the next pass would see are overwritten. What they were computed from is, too: all is computed again.
        let has_all =
            |ring: Ring| self.written <= ring.slots as usize || self.n_cached + ring.back as usize >= self.written;
        if !self.ring.is_none_or(has_all) {
            self.n_cached = 0;
        }
        if self.n_cached == 0 {
            self.written = 0;
        }
    }

    /// A pass left the state after this position.
    fn has_state(&mut self, position: usize) {
        if let Some(states) = &mut self.states {
            states[position % N_STATES] = position;
        }
    }

    /// Positions from the next pass's on that passes can use before a state that may still be wanted is overwritten.
    pub fn n_free_states(&self) -> usize {
        match self.states {
            Some(_) => N_STATES.saturating_sub(1 + self.n_ahead.unwrap_or(0)),
            None => usize::MAX,
        }
    }

    /// See [`slide`]. Positions change, so nothing that is cached is of use.
    pub fn slide(&mut self, context_length: usize) {
        slide(&mut self.ids, context_length);
        self.forget_cache();
    }

    /// The cache has none of the tokens: it is another one, or nobody knows which passes filled it.
    pub fn forget_cache(&mut self) {
        self.go_back(0);
    }

    /// The sequence goes on with another cache, which has none of the tokens.
    pub fn move_to(&mut self, ring: Option<Ring>) {
        self.ring = ring;
        self.forget_cache();
    }

    /// The row of angles that position 0 has in the cached keys.
    pub fn angles(&self) -> u32 {
        self.angles
    }

    /// Keys are to be turned by angles from this row on; those that were turned otherwise are of no use. Returns whether they
    /// were.
    pub fn turn_by(&mut self, angles: u32) -> bool {
        let others = angles != self.angles;
        if others {
            self.forget_cache();
            self.angles = angles;
        }
        others
    }

    /// Makes sure that passes over the last `n` tokens can be submitted, which are computed once more if their keys are cached.
    /// Without the last one there is nothing to choose the next token from.
    pub fn leave_last(&mut self, n: usize) {
        self.go_back(self.ids.len().saturating_sub(n));
    }

    /// A pass of `size` rows over the next `n` tokens that are not cached was submitted.
    pub fn submitted(&mut self, n: usize, size: usize) {
        self.n_ahead = None;
        self.written = self.written.max(self.n_cached + size);
        self.n_cached = (self.n_cached + n).min(self.ids.len());
        self.has_state(self.n_cached);
    }

    /// The last pass that was submitted chooses the token that comes after all of them.
    pub fn chooses_next(&mut self) {
        self.n_ahead = (self.n_cached == self.ids.len()).then_some(1);
    }

    /// `n` further passes were submitted, each over the token that the one before it chooses.
    pub fn submitted_ahead(&mut self, n: usize) {
        let next = self.next_position();
        self.written = self.written.max(next + n);
        (next + 1..=next + n).for_each(|position| self.has_state(position));
        self.n_ahead = self.n_ahead.map(|ahead| ahead + n);
        if self.n_ahead.is_some_and(|ahead| ahead > 0) {
            self.n_cached = self.ids.len();
        }
    }

    /// How many of `n` drafts a pass may verify after the tokens that are not cached. The state that it begins with is wanted
    /// again where a draft is wrong, so the pass must not leave another one in its place.
    pub fn n_drafts(&self, n: usize) -> usize {
        let overwrites = self.states.is_some() && (self.uncached().len() + n).is_multiple_of(N_STATES);
        n.saturating_sub(usize::from(overwrites))
    }

    /// A pass of `size` rows was submitted over all tokens that are not cached and `n` drafted ones after them, whose keys
    /// count for nothing so far.
    pub fn submitted_drafts(&mut self, n: usize, size: usize) {
        self.n_ahead = None;
        self.written = self.written.max(self.n_cached + size);
        self.n_cached = self.ids.len();
        self.has_state(self.n_cached + n);
    }

    /// The first `n_right` of `n` drafted tokens are the ones to be kept next. A state that knows others as well is of no use:
    /// those that are right are computed once more.
    pub fn verified(&mut self, n_right: usize, n: usize) {
        if self.states.is_some() && n_right < n {
            self.go_back(self.n_cached);
        } else {
            self.n_verified = n_right;
        }
    }

    /// Keeps the first of the tokens that were chosen ahead or verified, or one that was chosen after them.
    pub fn keep(&mut self, id: u32) {
        self.ids.push(id);
        if let Some(n_left) = self.n_verified.checked_sub(1) {
            self.n_verified = n_left;
            self.n_cached = self.ids.len();
        }
        // A token that no pass chose is like one that was appended.
        self.n_ahead = self.n_ahead.and_then(|ahead| ahead.checked_sub(1));
        if self.n_ahead.is_some_and(|ahead| ahead > 0) {
            self.n_cached = self.ids.len();
        }
    }

    /// What the cache has of a sequence at rest.
    pub fn cached(&self) -> Cached {
        let &Sequence { n_cached: n, angles, states, written, .. } = self;
        Cached { n, angles, states, written }
    }

    /// Another sequence, of which the cache has this much.
    pub fn restore(&mut self, ids: Vec<u32>, cached: Cached) {
        let Cached { n, angles, states, written } = cached;
        *self = Sequence { ids, n_cached: n, angles, states, ring: self.ring, written, ..Sequence::default() };
        // A cache of all positions would let passes begin where they see keys that it never got.
        if self.ring.is_none() && written > n {
            self.forget_cache();
        }
    }

    /// The sequence as another session with a copy of the cache takes it over: nothing runs ahead of that one.
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

    /// A device with a cache that holds, for each position, the token whose keys are there, and a queue of the tokens that
    /// its passes chose. A pass checks that each position before its own has the keys of the sequence; with a ring, those
    /// that a window of [`WINDOW`] shows it.
    struct Simulated {
        sequence: Sequence,
        cache: Vec<Option<u32>>,
        /// Positions of a window's ring and the tokens whose keys are there.
        slots: Vec<Option<(usize, u32)>>,
        chosen: std::collections::VecDeque<u32>,
        /// The tokens that each slot's state has seen, where there are states.
        states: Option<[Vec<u32>; N_STATES]>,
        /// Position and token of the next pass that follows by itself.
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

        /// A pass writes the keys of its tokens, and something at the positions of its padding.
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
            // What the first token of the pass sees.
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

        /// Feeds what is not cached, in passes of up to `size` tokens.
        fn feed(&mut self, size: usize) {
            self.chosen.clear();
            self.sequence.leave_last(1);
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

        /// A pass over what is not cached and drafts after it, of which the first `n_right` are right. Returns how many of
        /// them were kept: none if there are more tokens than the pass has rows.
        fn draft(&mut self, n: usize, n_right: usize, size: usize) -> usize {
            self.chosen.clear();
            self.sequence.leave_last(1);
            let n = self.sequence.n_drafts(n);
            let drafts: Vec<u32> = (0..n).map(|_| self.fresh_id()).collect();
            let (begin, n_uncached) = (self.sequence.n_cached(), self.sequence.uncached().len());
            let ids = [self.sequence.uncached(), &drafts].concat();
            if ids.len() > size || n == 0 {
                return 0;
            }
            let n_right = n_right.min(n);
            self.write(begin, &ids, size);
            self.sequence.submitted_drafts(n, size);
            self.sequence.verified(n_right, n);
            self.check();
            for id in drafts.into_iter().take(n_right) {
                self.sequence.keep(id);
                self.check();
            }
            let is_state_of_others = self.states.is_some() && n_right < n;
            let n_anew = if is_state_of_others { n_uncached + n_right } else { 0 };
            assert_eq!(self.sequence.uncached().len(), n_anew, "{:?}", self.sequence);
            let id = self.fresh_id();
            self.sequence.keep(id);
            assert_eq!(self.sequence.uncached().len(), n_anew + 1, "{:?}", self.sequence);
            assert!(!is_state_of_others || self.sequence.n_cached() == begin, "{:?}", self.sequence);
            n_right
        }

        /// What is said to be cached is cached, and what the device stands at is where the sequence says.
        fn check(&self) {
            let Sequence { ids, n_cached, n_ahead, .. } = &self.sequence;
            assert!(n_cached <= &ids.len());
            let cached: Vec<Option<u32>> = ids[..*n_cached].iter().map(|&id| Some(id)).collect();
            assert_eq!(self.cache[..*n_cached], cached, "{:?}", self.sequence);
            if let Some(n_ahead) = n_ahead {
                assert_eq!(*n_ahead, self.chosen.len());
                assert_eq!(self.state.0, self.sequence.next_position(), "{:?}", self.sequence);
                // The next pass sees the kept tokens and then those chosen ahead.
                let mut want: Vec<u32> = ids.clone();
                want.extend(&self.chosen);
                assert_eq!(want.pop(), Some(self.state.1));
                let want: Vec<Option<u32>> = want.into_iter().map(Some).collect();
                assert_eq!(self.cache[..self.state.0], want, "{:?}", self.sequence);
            }
        }
    }

    #[test]
    fn what_is_cached_is_always_what_is_kept() {
        let mut seed = 7u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((seed >> 33) as usize) % n
        };
        let (mut n_kept, mut n_given_up, mut n_slid, mut n_guessed) = (0, 0, 0, 0);
        for round in 0..600 {
            // Passes have up to five rows.
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
    fn new_tokens_never_meet_the_keys_of_tokens_that_nobody_kept() {
        let mut sequence = Sequence::default();
        sequence.append(&[1, 2, 3]);
        sequence.leave_last(1);
        sequence.submitted(3, 3);
        sequence.chooses_next();
        sequence.submitted_ahead(4);
        sequence.keep(4);
        assert_eq!((sequence.n_cached(), sequence.next_position(), sequence.n_ahead()), (4, 7, Some(4)));
        sequence.append(&[5, 6]);
        assert_eq!((sequence.uncached(), sequence.n_ahead()), (&[5, 6][..], None));
    }

    #[test]
    fn the_last_token_has_no_keys_until_a_pass_follows_its_choice() {
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
    fn another_cache_has_a_ring_of_its_own() {
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
    fn what_never_happens_does_no_harm() {
        // Choices that nothing was submitted for are tokens without keys.
        let mut sequence = Sequence::default();
        sequence.leave_last(1);
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
