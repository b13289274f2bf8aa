//! Pages of a cache that sequences share: which are free, which are held, and which hold a beginning that may come again.
//!
//! A page that is full and whose tokens are known is listed under the page before it and its tokens. A sequence that begins alike
//! walks this list and holds the same pages, so that what they hold is computed once. When nobody holds a listed page any more it
//! is kept until its place is needed: those that were used longest ago go first, and none before the pages that follow it.
//!
//! Where the engine keeps pages in the host's memory too, what goes from the device goes there, and from there for good when that
//! is full, in the same order. A sequence that begins alike takes it back.
//!
//! Layers with a state of fixed size cannot be taken up at any page: of some pages a copy of the states after them is kept, and a
//! sequence that begins alike goes on from the last one that has such a copy.

use std::collections::HashMap;
use std::sync::Arc;

use crate::kernels::PAGE;

/// A page's number. Page 0 is nobody's: rows that count for nothing write there.
pub(super) type PageId = u32;

/// What the content of a listed page is known by, wherever it lies; no other content is ever given the same.
pub(super) type ContentId = u64;

/// What makes a page the same as another: the one before it, the row of angles of position 0, its tokens.
type Key = (Option<ContentId>, u32, Box<[u32]>);

/// A page of the device.
#[derive(Default)]
struct Page {
    /// Sequences that hold it.
    n_holders: u32,
    /// What it is listed as.
    content: Option<ContentId>,
    /// The copy of the states after it.
    copy: Option<u32>,
}

/// What is listed.
struct Content {
    key: Key,
    place: Place,
    /// Listed pages that follow it, on the device and in the host's memory.
    n_following: [u32; 2],
    used_at: u64,
}

enum Place {
    Device(PageId),
    Host(HostPage),
}

/// What a page held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPage {
    /// Keys and values of all layers.
    pub keys: Arc<[u32]>,
    /// The states after it, if there was a copy of them.
    pub states: Option<Arc<[u32]>>,
}

impl HostPage {
    fn size_bytes(&self) -> u64 {
        size_of_val(&*self.keys) as u64 + self.states.as_ref().map_or(0, |states| size_of_val(&**states) as u64)
    }
}

/// [`Content::n_following`].
const ON_DEVICE: usize = 0;
const ON_HOST: usize = 1;

pub(super) struct Pages {
    pages: Vec<Page>,
    free: Vec<PageId>,
    listed: HashMap<Key, ContentId>,
    contents: HashMap<ContentId, Content>,
    /// Pages that sequences have asked for and not taken yet.
    n_promised: usize,
    /// Listed pages that nobody holds.
    n_kept: usize,
    /// Grows with each use, and with each content.
    clock: u64,
    keeps: bool,
    /// Bytes of the host's memory for pages that go from the device.
    host_limit: u64,
    /// Those that are taken, by so many pages.
    host_bytes: u64,
    n_on_host: usize,
    /// Copies of states that no page has, where the model has states.
    free_copies: Option<Vec<u32>>,
}

/// What a sequence has in common with earlier ones.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Common {
    /// Pages that it holds from now on.
    pub pages: Vec<PageId>,
    /// The copy of the states after them, where the model has states and none of the pages has to come back.
    pub copy: Option<u32>,
    /// What comes after these and has to come back from the host's memory.
    pub on_host: Vec<ContentId>,
}

impl Pages {
    /// `n` pages, the first of which is nobody's. If it does not keep any, no page is listed. `n_copies`: room for copies of
    /// states, where the model has states. `host_limit`: bytes of the host's memory for pages that go from the device.
    pub fn new(n: u32, keeps: bool, n_copies: Option<u32>, host_limit: u64) -> Pages {
        Pages {
            pages: (0..n).map(|_| Page::default()).collect(),
            free: (1..n).rev().collect(),
            listed: HashMap::new(),
            contents: HashMap::new(),
            n_promised: 0,
            n_kept: 0,
            clock: 0,
            keeps,
            host_limit,
            host_bytes: 0,
            n_on_host: 0,
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

    /// Pages that the host's memory has, and their bytes.
    pub fn on_host(&self) -> (usize, u64) {
        (self.n_on_host, self.host_bytes)
    }

    /// The listed pages that a sequence of these tokens begins with, whole ones alone. It holds them from now on, and asks for
    /// those that the host's memory has by [`Pages::on_host_of`].
    pub fn hold_common(&mut self, angles: u32, ids: &[u32]) -> Common {
        let mut contents: Vec<ContentId> = Vec::new();
        for ids in ids.chunks_exact(PAGE as usize) {
            let Some(&content) = self.listed.get(&(contents.last().copied(), angles, ids.into())) else { break };
            contents.push(content);
        }
        let place = |content: &ContentId| self.contents.get(content).map(|content| &content.place);
        let copy_of = |place: &Place| match place {
            Place::Device(id) => self.pages[*id as usize].copy,
            Place::Host(_) => None,
        };
        if self.free_copies.is_some() {
            let has_states = |place: &Place| match place {
                Place::Device(_) => copy_of(place).is_some(),
                Place::Host(page) => page.states.is_some(),
            };
            let last = contents.iter().rposition(|content| place(content).is_some_and(has_states));
            contents.truncate(last.map_or(0, |last| last + 1));
        }
        let copy = contents.last().and_then(place).and_then(copy_of);
        let mut common = Common { copy, ..Common::default() };
        for content in contents {
            match self.contents.get(&content).map(|content| &content.place) {
                Some(&Place::Device(id)) => {
                    self.hold(id);
                    common.pages.push(id);
                }
                _ => {
                    self.touch(content);
                    common.on_host.push(content);
                }
            }
        }
        common
    }

    /// What the host's memory has of a content, unless that had to go meanwhile.
    pub fn on_host_of(&self, content: ContentId) -> Option<HostPage> {
        match &self.contents.get(&content)?.place {
            Place::Host(page) => Some(page.clone()),
            Place::Device(_) => None,
        }
    }

    /// A page that a sequence holds has got a content back.
    pub fn came_back(&mut self, content: ContentId, id: PageId) {
        if self.move_to(content, Place::Device(id)) {
            self.pages[id as usize].content = Some(content);
        }
    }

    /// The kept page that is to go first for there to be `n` free ones, with the copy of the states after it; none if there are
    /// as many, or nothing goes to the host's memory.
    pub fn next_to_go(&self, n: usize) -> Option<(PageId, Option<u32>)> {
        let wants = self.host_limit > 0 && self.free.len() < n;
        let (_, id) = wants.then(|| self.oldest_kept())??;
        Some((id, self.pages[id as usize].copy))
    }

    /// Such a page goes: it is free, and the host's memory has what it held, if there is room beside what was used later.
    pub fn goes(&mut self, id: PageId, page: HostPage) {
        let Some(content) = self.pages[id as usize].content.take() else { return };
        self.free_copy_of(id);
        self.n_kept -= 1;
        self.free.push(id);
        self.move_to(content, Place::Host(page));
        while self.host_bytes > self.host_limit {
            let is_last = |content: &Content| matches!(content.place, Place::Host(_)) && content.n_following == [0; 2];
            let last = self.contents.iter().filter(|(_, content)| is_last(content));
            let Some((&oldest, _)) = last.min_by_key(|(_, content)| content.used_at) else { break };
            self.unlist(oldest);
        }
    }

    /// False if it is not listed any more.
    fn move_to(&mut self, content: ContentId, to: Place) -> bool {
        let Some(before) = self.contents.get(&content).map(|content| content.key.0) else { return false };
        self.enter(before, &to);
        if let Some(content) = self.contents.get_mut(&content) {
            let from = std::mem::replace(&mut content.place, to);
            self.leave(before, &from);
        }
        true
    }

    /// Counts what comes to a place and follows another content.
    fn enter(&mut self, before: Option<ContentId>, place: &Place) {
        let at = match place {
            Place::Device(_) => ON_DEVICE,
            Place::Host(page) => {
                self.host_bytes += page.size_bytes();
                self.n_on_host += 1;
                ON_HOST
            }
        };
        if let Some(before) = before.and_then(|before| self.contents.get_mut(&before)) {
            before.n_following[at] += 1;
        }
    }

    /// Counts it there no more.
    fn leave(&mut self, before: Option<ContentId>, place: &Place) {
        let at = match place {
            Place::Device(_) => ON_DEVICE,
            Place::Host(page) => {
                self.host_bytes -= page.size_bytes();
                self.n_on_host -= 1;
                ON_HOST
            }
        };
        if let Some(before) = before.and_then(|before| self.contents.get_mut(&before)) {
            before.n_following[at] -= 1;
        }
    }

    /// A place for a copy of the states after a listed page, which has it from now on: one that is free, or that of the page that
    /// was used longest ago. `None` where there are no states, or it has one.
    pub fn take_copy(&mut self, id: PageId) -> Option<u32> {
        let page = &self.pages[id as usize];
        if page.content.is_none() || page.copy.is_some() {
            return None;
        }
        let copy = match self.free_copies.as_mut()?.pop() {
            Some(copy) => copy,
            None => {
                let contents = &self.contents;
                let used_at = |page: &Page| page.content.and_then(|content| Some(contents.get(&content)?.used_at));
                let with_copy = self.pages.iter_mut().filter(|page| page.copy.is_some());
                with_copy.min_by_key(|page| used_at(page))?.copy.take()?
            }
        };
        self.pages[id as usize].copy = Some(copy);
        Some(copy)
    }

    fn hold(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        self.n_kept -= usize::from(page.n_holders == 0 && page.content.is_some());
        page.n_holders += 1;
        if let Some(content) = page.content {
            self.touch(content);
        }
    }

    fn touch(&mut self, content: ContentId) {
        self.clock += 1;
        if let Some(content) = self.contents.get_mut(&content) {
            content.used_at = self.clock;
        }
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

    /// The kept page that was used longest ago, of those that none on the device follows.
    fn oldest_kept(&self) -> Option<(ContentId, PageId)> {
        let kept = self.contents.iter().filter_map(|(&listed, content)| match content.place {
            Place::Device(id) if self.pages[id as usize].n_holders == 0 && content.n_following[ON_DEVICE] == 0 => {
                Some((content.used_at, listed, id))
            }
            _ => None,
        });
        kept.min().map(|(_, listed, id)| (listed, id))
    }

    /// Gives up what such a page holds, and what follows it.
    fn evict(&mut self) -> Option<PageId> {
        let (content, id) = self.oldest_kept()?;
        self.pages[id as usize].content = None;
        self.free_copy_of(id);
        self.n_kept -= 1;
        self.unlist(content);
        Some(id)
    }

    /// Forgets a content, and what follows it in the host's memory: nothing would find that again.
    fn unlist(&mut self, content: ContentId) {
        let mut all = vec![content];
        while let Some(content) = all.pop() {
            let Some(Content { key, place, n_following, .. }) = self.contents.remove(&content) else { continue };
            self.listed.remove(&key);
            self.leave(key.0, &place);
            if n_following[ON_HOST] > 0 {
                all.extend(
                    self.contents.iter().filter(|(_, after)| after.key.0 == Some(content)).map(|(&after, _)| after),
                );
            }
        }
    }

    fn free_copy_of(&mut self, id: PageId) {
        let copy = self.pages[id as usize].copy.take();
        self.free_copies.iter_mut().for_each(|free| free.extend(copy));
    }

    /// Lists a page that a sequence holds, as it holds the listed one `before` it; what the host's memory has of it is not needed
    /// any more. False if it is not listed, because another page is there already; pages after it cannot be listed then.
    pub fn list(&mut self, before: Option<PageId>, angles: u32, ids: &[u32], id: PageId) -> bool {
        let before = before.map(|before| self.pages[before as usize].content);
        // Nothing is found after a page that is not listed.
        if !self.keeps || before == Some(None) {
            return false;
        }
        let before = before.flatten();
        let key: Key = (before, angles, ids.into());
        if let Some(&content) = self.listed.get(&key) {
            let is_on_host = self.on_host_of(content).is_some();
            if is_on_host {
                self.came_back(content, id);
            }
            return is_on_host;
        }
        let place = Place::Device(id);
        self.enter(before, &place);
        self.clock += 1;
        let content = self.clock;
        self.pages[id as usize].content = Some(content);
        self.listed.insert(key.clone(), content);
        let listed = Content { key, place, n_following: [0; 2], used_at: self.clock };
        self.contents.insert(content, listed);
        true
    }

    /// A sequence holds this page no more.
    pub fn release(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        page.n_holders -= 1;
        match (page.n_holders, page.content) {
            (0, None) => self.free.push(id),
            (0, Some(_)) => self.n_kept += 1,
            _ => {}
        }
    }

    /// Forgets what all pages hold.
    pub fn forget(&mut self) {
        self.n_kept = 0;
        self.n_on_host = 0;
        self.host_bytes = 0;
        self.listed.clear();
        for (_, content) in std::mem::take(&mut self.contents) {
            let Place::Device(id) = content.place else { continue };
            self.pages[id as usize].content = None;
            self.free_copy_of(id);
            if self.pages[id as usize].n_holders == 0 {
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

    /// Two sequences of two pages each, which are kept after them; the first one was used longer ago.
    fn two_kept(pages: &mut Pages) -> [Vec<u32>; 2] {
        [1, 2].map(|seed| {
            let ids = tokens(2 * P, seed);
            let (held, _) = run(pages, &ids);
            held.into_iter().for_each(|id| pages.release(id));
            ids
        })
    }

    #[test]
    fn what_begins_alike_is_held_twice_and_computed_once() {
        let mut pages = Pages::new(11, true, None, 0);
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
        let mut pages = Pages::new(4, true, None, 0);
        let ids = tokens(P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.hold_common(7, &ids), Common::default());
        assert_eq!(pages.hold_common(0, &ids).pages, held);
    }

    #[test]
    fn the_page_that_was_used_longest_ago_goes_first_and_none_before_those_after_it() {
        let mut pages = Pages::new(5, true, None, 0);
        let [old, new] = two_kept(&mut pages);
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
        let mut pages = Pages::new(4, false, None, 0);
        assert!(pages.promise(2) && !pages.promise(2) && pages.promise(1));
        let held: Vec<PageId> = (0..3).filter_map(|_| pages.take()).collect();
        assert_eq!((held.len(), pages.take()), (3, None));
        assert!(!pages.list(None, 0, &tokens(P, 1), held[0]));
        held.into_iter().for_each(|id| pages.release(id));
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
    }

    #[test]
    fn of_two_that_are_computed_at_once_the_first_is_listed() {
        let mut pages = Pages::new(5, true, None, 0);
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
        let mut pages = Pages::new(9, true, Some(2), 0);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.hold_common(0, &ids), Common::default(), "no states after any page");
        let copy = pages.take_copy(held[1]);
        assert!(copy.is_some() && pages.take_copy(held[1]).is_none(), "one is enough");
        assert_eq!(pages.hold_common(0, &ids), Common { pages: held[..2].to_vec(), copy, on_host: vec![] });
        // The place of the page that was used longest ago.
        let (others, _) = run(&mut pages, &tokens(2 * P, 9));
        let second = pages.take_copy(others[0]);
        assert_eq!(pages.take_copy(others[1]), copy);
        assert_ne!(second, copy);
        assert_eq!(pages.hold_common(0, &ids), Common::default());
        assert_eq!(pages.hold_common(0, &tokens(2 * P, 9)).copy, copy);
    }

    /// All pages but `n` go to the host's memory, each of which holds its number.
    fn spill(pages: &mut Pages, n: usize) -> Vec<PageId> {
        let mut gone = Vec::new();
        while let Some((id, _)) = pages.next_to_go(n) {
            pages.goes(id, HostPage { keys: Arc::from([id]), states: None });
            gone.push(id);
        }
        gone
    }

    #[test]
    fn what_goes_to_the_host_is_found_there_and_comes_back() {
        let mut pages = Pages::new(4, true, None, 100);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        held.iter().for_each(|&id| pages.release(id));
        // Those after others first.
        assert_eq!(spill(&mut pages, 2), [held[2], held[1]]);
        assert_eq!((pages.n_free(), pages.n_kept(), pages.on_host()), (2, 1, (2, 8)));
        let Common { pages: on_device, on_host, .. } = pages.hold_common(0, &ids);
        assert_eq!((on_device, on_host.len()), (held[..1].to_vec(), 2));
        assert!(pages.promise(2));
        for (content, old) in on_host.into_iter().zip(&held[1..]) {
            assert_eq!(pages.on_host_of(content).map(|page| page.keys[0]), Some(*old));
            let id = pages.take().expect("it was promised");
            pages.came_back(content, id);
            assert_eq!(pages.on_host_of(content), None);
        }
        assert_eq!((pages.n_free(), pages.n_kept(), pages.on_host()), (0, 0, (0, 0)));
        assert_eq!(pages.hold_common(0, &ids).pages.len(), 3);
        assert!(pages.next_to_go(1).is_none(), "all are held");
    }

    #[test]
    fn on_the_host_too_what_was_used_longest_ago_goes_first_and_none_before_those_after_it() {
        let mut pages = Pages::new(5, true, None, 12);
        let [old, new] = two_kept(&mut pages);
        spill(&mut pages, 4);
        assert_eq!((pages.n_free(), pages.on_host()), (4, (3, 12)));
        let n_on_host = |pages: &mut Pages, ids| pages.hold_common(0, ids).on_host.len();
        assert_eq!((n_on_host(&mut pages, &old), n_on_host(&mut pages, &new)), (1, 2));
        // What is computed again need not come back, and what follows it is found after it.
        let id = pages.promise(1).then(|| pages.take()).flatten().expect("pages are free");
        assert!(pages.list(None, 0, &new[..P], id));
        assert_eq!(pages.on_host(), (2, 8));
        let common = pages.hold_common(0, &new);
        assert_eq!((common.pages, common.on_host.len()), (vec![id], 1));
        pages.forget();
        assert_eq!(pages.on_host(), (0, 0));
        assert_eq!(pages.hold_common(0, &old), Common::default());
    }

    #[test]
    fn pages_of_another_device_are_forgotten() {
        let mut pages = Pages::new(6, true, None, 0);
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
