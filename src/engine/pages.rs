//! Pages of a cache that sequences share: which are free, which are held, and which hold a beginning that may come again.
//!
//! A page that is full and whose tokens are known is listed under the page before it and its tokens. A sequence that begins alike
//! walks this list and holds the same pages, so that what they hold is computed once. When nobody holds a listed page any more it
//! is kept until its place is needed: those that were used longest ago go first, and none before the pages that follow it.
//!
//! Layers with a state of fixed size cannot be taken up at any page: of some pages a copy of the states after them is kept, and a
//! sequence that begins alike goes on from the last one that has such a copy.

use std::collections::HashMap;

use crate::kernels::PAGE;

/// A page's number. Page 0 is nobody's: rows that count for nothing write there.
pub(super) type PageId = u32;

/// What makes a page the same as another: the page before it, the row of angles of position 0, its tokens.
type Key = (Option<PageId>, u32, Box<[u32]>);

#[derive(Default)]
struct Page {
    /// Sequences that hold it.
    n_holders: u32,
    /// Listed pages that follow it.
    n_following: u32,
    /// Under what it is listed.
    key: Option<Key>,
    /// The copy of the states after it.
    copy: Option<u32>,
    used_at: u64,
}

pub(super) struct Pages {
    pages: Vec<Page>,
    free: Vec<PageId>,
    listed: HashMap<Key, PageId>,
    /// Pages that sequences have asked for and not taken yet.
    n_promised: usize,
    /// Listed pages that nobody holds.
    n_kept: usize,
    /// Grows with each use.
    clock: u64,
    keeps: bool,
    /// Copies of states that no page has, where the model has states.
    free_copies: Option<Vec<u32>>,
}

/// What a sequence has in common with earlier ones.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Common {
    /// Pages that it holds from now on.
    pub pages: Vec<PageId>,
    /// The copy of the states after them, where the model has states.
    pub copy: Option<u32>,
}

impl Pages {
    /// `n` pages, the first of which is nobody's. If it does not keep any, no page is listed. `n_copies`: room for copies of
    /// states, where the model has states.
    pub fn new(n: u32, keeps: bool, n_copies: Option<u32>) -> Pages {
        Pages {
            pages: (0..n).map(|_| Page::default()).collect(),
            free: (1..n).rev().collect(),
            listed: HashMap::new(),
            n_promised: 0,
            n_kept: 0,
            clock: 0,
            keeps,
            free_copies: n_copies.map(|n| (0..n).rev().collect()),
        }
    }

    /// Pages without the one that is nobody's.
    pub fn len(&self) -> usize {
        self.pages.len() - 1
    }

    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Pages that nobody holds and that are kept.
    pub fn n_kept(&self) -> usize {
        self.n_kept
    }

    /// The listed pages that a sequence of these tokens begins with, whole ones alone. It holds them from now on.
    pub fn hold_common(&mut self, angles: u32, ids: &[u32]) -> Common {
        let mut pages: Vec<PageId> = Vec::new();
        for ids in ids.chunks_exact(PAGE as usize) {
            let Some(&id) = self.listed.get(&(pages.last().copied(), angles, ids.into())) else { break };
            pages.push(id);
        }
        let copy_of = |id: &PageId| self.pages[*id as usize].copy;
        if self.free_copies.is_some() {
            pages.truncate(pages.iter().rposition(|id| copy_of(id).is_some()).map_or(0, |last| last + 1));
        }
        let copy = pages.last().and_then(copy_of);
        pages.iter().for_each(|&id| self.hold(id));
        Common { pages, copy }
    }

    /// A place for a copy of the states after a listed page, which has it from now on: one that is free, or that of the page that
    /// was used longest ago. `None` where there are no states, or it has one.
    pub fn take_copy(&mut self, id: PageId) -> Option<u32> {
        let page = &self.pages[id as usize];
        if page.key.is_none() || page.copy.is_some() {
            return None;
        }
        let copy = match self.free_copies.as_mut()?.pop() {
            Some(copy) => copy,
            None => {
                let with_copy = self.pages.iter_mut().filter(|page| page.copy.is_some());
                with_copy.min_by_key(|page| page.used_at)?.copy.take()?
            }
        };
        self.pages[id as usize].copy = Some(copy);
        Some(copy)
    }

    fn hold(&mut self, id: PageId) {
        self.clock += 1;
        let page = &mut self.pages[id as usize];
        self.n_kept -= usize::from(page.n_holders == 0 && page.key.is_some());
        page.n_holders += 1;
        page.used_at = self.clock;
    }

    /// Sees to it that `n` pages will be there when they are taken, beside those that were promised before. False, and nothing is
    /// promised, if there are too few.
    pub fn promise(&mut self, n: usize) -> bool {
        let has_room = self.n_promised + n <= self.free.len() + self.n_kept;
        if has_room {
            self.n_promised += n;
        }
        has_room
    }

    /// Gives up a promise of `n` pages.
    pub fn renounce(&mut self, n: usize) {
        self.n_promised = self.n_promised.saturating_sub(n);
    }

    /// A promised page that holds nothing, held once.
    pub fn take(&mut self) -> Option<PageId> {
        let id = self.free.pop().or_else(|| self.evict())?;
        self.renounce(1);
        self.hold(id);
        Some(id)
    }

    /// The kept page that was used longest ago, of those that none follows.
    fn evict(&mut self) -> Option<PageId> {
        let is_last = |page: &Page| page.n_holders == 0 && page.key.is_some() && page.n_following == 0;
        let kept = (0..).zip(&self.pages).filter(|(_, page)| is_last(page));
        let (id, _) = kept.min_by_key(|(_, page)| page.used_at)?;
        self.unlist(id);
        self.n_kept -= 1;
        Some(id)
    }

    fn unlist(&mut self, id: PageId) {
        if let Some(key) = self.pages[id as usize].key.take() {
            if let Some(before) = key.0 {
                self.pages[before as usize].n_following -= 1;
            }
            self.listed.remove(&key);
        }
        let copy = self.pages[id as usize].copy.take();
        self.free_copies.iter_mut().for_each(|free| free.extend(copy));
    }

    /// Lists a page that a sequence holds, as it holds the listed one `before` it. False if it is not listed, because another page
    /// is there already; pages after it cannot be listed then.
    pub fn list(&mut self, before: Option<PageId>, angles: u32, ids: &[u32], id: PageId) -> bool {
        let key: Key = (before, angles, ids.into());
        if !self.keeps || self.listed.contains_key(&key) {
            return false;
        }
        if let Some(before) = before {
            self.pages[before as usize].n_following += 1;
        }
        self.pages[id as usize].key = Some(key.clone());
        self.listed.insert(key, id);
        true
    }

    /// A sequence holds this page no more.
    pub fn release(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        page.n_holders -= 1;
        match (page.n_holders, &page.key) {
            (0, None) => self.free.push(id),
            (0, Some(_)) => self.n_kept += 1,
            _ => {}
        }
    }

    /// Forgets what kept pages hold.
    pub fn forget(&mut self) {
        self.n_kept = 0;
        let listed: Vec<PageId> = self.listed.drain().map(|(_, id)| id).collect();
        for id in listed {
            let page = &mut self.pages[id as usize];
            page.key = None;
            page.n_following = 0;
            let copy = page.copy.take();
            self.free_copies.iter_mut().for_each(|free| free.extend(copy));
            if page.n_holders == 0 {
                self.free.push(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: usize = PAGE as usize;

    fn tokens(n: usize, seed: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i * 7 + seed).collect()
    }

    /// Holds and lists the pages of a sequence; how many were computed.
    fn run(pages: &mut Pages, ids: &[u32]) -> (Vec<PageId>, usize) {
        let mut held = pages.hold_common(0, ids).pages;
        let n_found = held.len();
        assert!(pages.promise(ids.len().div_ceil(P) - n_found), "pages are left");
        for ids in ids.chunks(P).skip(n_found) {
            let (before, id) = (held.last().copied(), pages.take().expect("it was promised"));
            held.push(id);
            assert_eq!(ids.len() == P, ids.len() == P && pages.list(before, 0, ids, id));
        }
        let n_computed = held.len() - n_found;
        (held, n_computed)
    }

    #[test]
    fn what_begins_alike_is_held_twice_and_computed_once() {
        let mut pages = Pages::new(11, true, None);
        let (first, second) = (tokens(3 * P + 5, 1), [tokens(2 * P, 1), tokens(P, 9)].concat());
        let (a, n) = run(&mut pages, &first);
        assert_eq!((a.len(), n), (4, 4));
        let (b, n) = run(&mut pages, &second);
        assert_eq!((&b[..2], n), (&a[..2], 1));
        a.iter().for_each(|&id| pages.release(id));
        // Held by the other, kept, and free.
        assert_eq!((pages.n_free(), pages.n_kept(), pages.len()), (6, 1, 10));
        b.iter().for_each(|&id| pages.release(id));
        assert_eq!((pages.n_free(), pages.n_kept()), (6, 4));
        let (_, n) = run(&mut pages, &first);
        assert_eq!(n, 1, "all whole pages are there");
    }

    #[test]
    fn other_angles_are_another_beginning() {
        let mut pages = Pages::new(4, true, None);
        let ids = tokens(P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.hold_common(7, &ids), Common::default());
        assert_eq!(pages.hold_common(0, &ids).pages, held);
    }

    #[test]
    fn the_page_that_was_used_longest_ago_goes_first_and_none_before_those_after_it() {
        let mut pages = Pages::new(5, true, None);
        let (old, new) = (tokens(2 * P, 1), tokens(2 * P, 2));
        for ids in [&old, &new] {
            let (held, _) = run(&mut pages, ids);
            held.into_iter().for_each(|id| pages.release(id));
        }
        assert_eq!((pages.n_free(), pages.n_kept()), (0, 4));
        // One page more: the second one of the older goes.
        let (held, _) = run(&mut pages, &tokens(P, 3));
        let common = pages.hold_common(0, &old).pages;
        assert_eq!(common.len(), 1);
        assert_eq!(pages.hold_common(0, &new).pages.len(), 2);
        // All are held now.
        assert!(!pages.promise(1));
        common.into_iter().chain(held).for_each(|id| pages.release(id));
        assert!(pages.promise(2) && !pages.promise(1));
    }

    #[test]
    fn promises_are_kept_and_nothing_is_kept_where_nothing_is_listed() {
        let mut pages = Pages::new(4, false, None);
        assert!(pages.promise(2) && !pages.promise(2) && pages.promise(1));
        let held: Vec<PageId> = (0..3).filter_map(|_| pages.take()).collect();
        assert_eq!((held.len(), pages.take()), (3, None));
        assert!(!pages.list(None, 0, &tokens(P, 1), held[0]));
        held.into_iter().for_each(|id| pages.release(id));
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
    }

    #[test]
    fn of_two_that_are_computed_at_once_the_first_is_listed() {
        let mut pages = Pages::new(5, true, None);
        let ids = tokens(P, 1);
        assert!(pages.promise(2));
        let [a, b] = [pages.take().expect("promised"), pages.take().expect("promised")];
        assert!(pages.list(None, 0, &ids, a) && !pages.list(None, 0, &ids, b));
        pages.release(b);
        pages.release(a);
        assert_eq!((pages.n_free(), pages.n_kept(), pages.hold_common(0, &ids).pages), (3, 1, vec![a]));
    }

    #[test]
    fn sequences_with_states_go_on_from_a_page_that_has_a_copy_of_them() {
        let mut pages = Pages::new(9, true, Some(2));
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.hold_common(0, &ids), Common::default(), "no states after any page");
        let copy = pages.take_copy(held[1]);
        assert!(copy.is_some() && pages.take_copy(held[1]).is_none(), "one is enough");
        assert_eq!(pages.hold_common(0, &ids), Common { pages: held[..2].to_vec(), copy });
        // The place of the page that was used longest ago.
        let (others, _) = run(&mut pages, &tokens(2 * P, 9));
        let second = pages.take_copy(others[0]);
        assert_eq!(pages.take_copy(others[1]), copy);
        assert_ne!(second, copy);
        assert_eq!(pages.hold_common(0, &ids), Common::default());
        assert_eq!(pages.hold_common(0, &tokens(2 * P, 9)).copy, copy);
    }

    #[test]
    fn pages_of_another_device_are_forgotten() {
        let mut pages = Pages::new(6, true, None);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        pages.release(held[2]);
        pages.forget();
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
        assert_eq!(pages.hold_common(0, &ids), Common::default());
        pages.release(held[0]);
        pages.release(held[1]);
        assert_eq!(pages.n_free(), 5);
    }
}
