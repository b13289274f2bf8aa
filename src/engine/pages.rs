//! Pages of a cache that sequences share: which are free, which are held, and which hold a beginning that may come again.
//!
//! A page that passes over a prompt have filled is listed under the page before it and its tokens. A sequence that begins alike
//! walks this list and holds the same pages, so that what they hold is computed once. When nobody holds a listed page any more it
//! is kept until its place is needed: those that were used longest ago go first, and none before the pages that follow it.
//!
//! A page with a token that was generated is not listed. Passes over rows add up in another order than those over prompts, so
//! that its keys are not to the bit what the same tokens have in a prompt, and a text would depend on what was asked before.
//!
//! Where the engine keeps pages in the host's memory too, what goes from the device goes there, and from there for good when that
//! is full, in the same order. A sequence that begins alike takes it back.
//!
//! Layers with a state of fixed size cannot be taken up at any page: of some pages a copy of the states after them is kept, and a
//! sequence that begins alike goes on from the last one that has such a copy.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::kernels::PAGE;

/// A page's number. Page 0 is nobody's: rows that count for nothing write there.
pub(super) type PageId = u32;

/// What the content of a listed page is known by, wherever it lies; no other content is ever given the same.
pub(super) type ContentId = u64;

/// What makes a page the same as another: what it comes after, and its tokens.
type Key = (After, Box<[u32]>);

#[derive(Clone, PartialEq, Eq, Hash)]
enum After {
    Beginning(Beginning),
    Page(ContentId),
}

impl After {
    fn page(&self) -> Option<ContentId> {
        match self {
            After::Beginning(_) => None,
            After::Page(content) => Some(*content),
        }
    }
}

/// What sequences must have in common, beside tokens, to share pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Beginning {
    /// The row of angles of position 0.
    pub angles: u32,
    /// [`Request::cache_salt`](super::Request::cache_salt).
    pub salt: Option<Arc<str>>,
    /// [`Request::adapter`](super::Request::adapter).
    pub adapter: Option<Arc<str>>,
}

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
    following: [HashSet<ContentId>; 2],
    used_at: u64,
    /// Where it is among [`Pages::may_go`], if it is.
    ranked: Option<(usize, u64)>,
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

/// [`Content::following`] and [`Pages::may_go`].
const ON_DEVICE: usize = 0;
const ON_HOST: usize = 1;

pub(super) struct Pages {
    pages: Vec<Page>,
    free: Vec<PageId>,
    listed: HashMap<Key, ContentId>,
    contents: HashMap<ContentId, Content>,
    /// What may go, with when it was used: from the device what nobody holds and nothing there follows, from the host's memory
    /// what nothing follows.
    may_go: [BTreeSet<(u64, ContentId)>; 2],
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
    /// The page that has each copy of states, where the model has states: a few for each sequence.
    copies: Option<Vec<Option<PageId>>>,
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
            may_go: Default::default(),
            n_promised: 0,
            n_kept: 0,
            clock: 0,
            keeps,
            host_limit,
            host_bytes: 0,
            n_on_host: 0,
            copies: n_copies.map(|n| vec![None; n as usize]),
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
    pub fn hold_common(&mut self, beginning: &Beginning, ids: &[u32]) -> Common {
        let mut contents: Vec<ContentId> = Vec::new();
        let mut after = After::Beginning(beginning.clone());
        for ids in ids.chunks_exact(PAGE as usize) {
            let Some(&content) = self.listed.get(&(after, ids.into())) else { break };
            contents.push(content);
            after = After::Page(content);
        }
        let place = |content: &ContentId| self.contents.get(content).map(|content| &content.place);
        let copy_of = |place: &Place| match place {
            Place::Device(id) => self.pages[*id as usize].copy,
            Place::Host(_) => None,
        };
        if self.copies.is_some() {
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
            let Some(&(_, oldest)) = self.may_go[ON_HOST].first() else { break };
            self.unlist(oldest);
        }
    }

    /// False if it is not listed any more.
    fn move_to(&mut self, content: ContentId, to: Place) -> bool {
        self.leave(content);
        let Some(moved) = self.contents.get_mut(&content) else { return false };
        moved.place = to;
        self.enter(content);
        true
    }

    /// Counts what is at its place from now on.
    fn enter(&mut self, content: ContentId) {
        let Some(Content { key, place, .. }) = self.contents.get(&content) else { return };
        let before = key.0.page();
        let at = match place {
            Place::Device(_) => ON_DEVICE,
            Place::Host(page) => {
                self.host_bytes += page.size_bytes();
                self.n_on_host += 1;
                ON_HOST
            }
        };
        self.rank(content);
        if let Some((id, before)) = before.and_then(|id| Some((id, self.contents.get_mut(&id)?))) {
            before.following[at].insert(content);
            self.rank(id);
        }
    }

    /// Counts it there no more.
    fn leave(&mut self, content: ContentId) {
        self.unrank(content);
        let Some(Content { key, place, .. }) = self.contents.get(&content) else { return };
        let before = key.0.page();
        let at = match place {
            Place::Device(_) => ON_DEVICE,
            Place::Host(page) => {
                self.host_bytes -= page.size_bytes();
                self.n_on_host -= 1;
                ON_HOST
            }
        };
        if let Some((id, before)) = before.and_then(|id| Some((id, self.contents.get_mut(&id)?))) {
            before.following[at].remove(&content);
            self.rank(id);
        }
    }

    /// Puts it where it belongs among those that may go, after anything that decides that has changed.
    fn rank(&mut self, id: ContentId) {
        self.unrank(id);
        let Some(content) = self.contents.get_mut(&id) else { return };
        let [on_device, on_host] = [ON_DEVICE, ON_HOST].map(|at| !content.following[at].is_empty());
        let at = match content.place {
            Place::Device(page) if self.pages[page as usize].n_holders == 0 && !on_device => ON_DEVICE,
            Place::Host(_) if !on_device && !on_host => ON_HOST,
            _ => return,
        };
        content.ranked = Some((at, content.used_at));
        self.may_go[at].insert((content.used_at, id));
    }

    fn unrank(&mut self, id: ContentId) {
        if let Some((at, used_at)) = self.contents.get_mut(&id).and_then(|content| content.ranked.take()) {
            self.may_go[at].remove(&(used_at, id));
        }
    }

    /// A place for a copy of the states after a listed page, which has it from now on: one that is free, or that of the page that
    /// was used longest ago. `None` where there are no states, or it has one.
    pub fn take_copy(&mut self, id: PageId) -> Option<u32> {
        let page = &self.pages[id as usize];
        if page.content.is_none() || page.copy.is_some() {
            return None;
        }
        let copies = self.copies.as_mut()?;
        let used_at = |owner: &PageId| {
            let content = self.pages[*owner as usize].content;
            content.and_then(|content| Some(self.contents.get(&content)?.used_at))
        };
        // Those without an owner first.
        let (copy, owner) = copies.iter_mut().enumerate().min_by_key(|(_, owner)| owner.as_ref().map(used_at))?;
        if let Some(owner) = owner.replace(id) {
            self.pages[owner as usize].copy = None;
        }
        self.pages[id as usize].copy = Some(copy as u32);
        Some(copy as u32)
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
        if let Some(used) = self.contents.get_mut(&content) {
            used.used_at = self.clock;
            self.rank(content);
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
        let &(_, content) = self.may_go[ON_DEVICE].first()?;
        match self.contents.get(&content)?.place {
            Place::Device(id) => Some((content, id)),
            Place::Host(_) => None,
        }
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
            self.leave(content);
            let Some(Content { key, following: [_, on_host], .. }) = self.contents.remove(&content) else { continue };
            self.listed.remove(&key);
            all.extend(on_host);
        }
    }

    fn free_copy_of(&mut self, id: PageId) {
        let copy = self.pages[id as usize].copy.take();
        if let Some(owner) = self.copies.as_mut().zip(copy).and_then(|(copies, copy)| copies.get_mut(copy as usize)) {
            *owner = None;
        }
    }

    /// Lists a page that a sequence holds, as it holds the listed one `before` it; what the host's memory has of it is not needed
    /// any more. False if it is not listed, because another page is there already; pages after it cannot be listed then.
    pub fn list(&mut self, before: Option<PageId>, beginning: &Beginning, ids: &[u32], id: PageId) -> bool {
        let after = match before.map(|before| self.pages[before as usize].content) {
            None => After::Beginning(beginning.clone()),
            Some(Some(content)) => After::Page(content),
            // Nothing is found after a page that is not listed.
            Some(None) => return false,
        };
        if !self.keeps {
            return false;
        }
        let key: Key = (after, ids.into());
        if let Some(&content) = self.listed.get(&key) {
            let is_on_host = self.on_host_of(content).is_some();
            if is_on_host {
                self.came_back(content, id);
            }
            return is_on_host;
        }
        self.clock += 1;
        let content = self.clock;
        self.pages[id as usize].content = Some(content);
        self.listed.insert(key.clone(), content);
        let (place, following) = (Place::Device(id), Default::default());
        self.contents.insert(content, Content { key, place, following, used_at: self.clock, ranked: None });
        self.enter(content);
        true
    }

    /// A sequence holds this page no more.
    pub fn release(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        page.n_holders -= 1;
        match (page.n_holders, page.content) {
            (0, None) => self.free.push(id),
            (0, Some(content)) => {
                self.n_kept += 1;
                self.rank(content);
            }
            _ => {}
        }
    }

    /// Forgets what all pages hold.
    pub fn forget(&mut self) {
        self.n_kept = 0;
        self.n_on_host = 0;
        self.host_bytes = 0;
        self.listed.clear();
        self.may_go = Default::default();
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

    fn plain() -> Beginning {
        Beginning::default()
    }

    fn tokens(n: usize, seed: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i * 7 + seed).collect()
    }

    /// Holds and lists the pages of a sequence; how many were computed.
    fn run(pages: &mut Pages, ids: &[u32]) -> (Vec<PageId>, usize) {
        let mut held = pages.hold_common(&plain(), ids).pages;
        let n_found = held.len();
        assert!(pages.promise(ids.len().div_ceil(P) - n_found), "pages are left");
        for ids in ids.chunks(P).skip(n_found) {
            let (before, id) = (held.last().copied(), pages.take().expect("it was promised"));
            held.push(id);
            assert_eq!(ids.len() == P, ids.len() == P && pages.list(before, &plain(), ids, id));
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
        // PendingText by the other, kept, and free.
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
        assert_eq!(pages.hold_common(&Beginning { angles: 7, ..plain() }, &ids), Common::default());
        assert_eq!(pages.hold_common(&plain(), &ids).pages, held);
    }

    #[test]
    fn another_salt_is_another_beginning() {
        let mut pages = Pages::new(9, true, None, 0);
        let ids = tokens(2 * P, 1);
        let salted = |salt: &str| Beginning { salt: Some(salt.into()), ..plain() };
        assert!(pages.promise(2));
        let [first, second] = [pages.take().expect("promised"), pages.take().expect("promised")];
        assert!(pages.list(None, &salted("a"), &ids[..P], first));
        assert!(pages.list(Some(first), &salted("a"), &ids[P..], second));
        for other in [plain(), salted("b"), salted("")] {
            assert_eq!(pages.hold_common(&other, &ids), Common::default(), "{other:?}");
        }
        assert_eq!(pages.hold_common(&salted("a"), &ids).pages, [first, second]);
        // Without one pages are what they were.
        let (_, n) = run(&mut pages, &ids);
        assert_eq!(n, 2);
    }

    #[test]
    fn the_page_that_was_used_longest_ago_goes_first_and_none_before_those_after_it() {
        let mut pages = Pages::new(5, true, None, 0);
        let [old, new] = two_kept(&mut pages);
        assert_eq!((pages.n_free(), pages.n_kept()), (0, 4));
        // One page more: the second one of the older goes.
        let (held, _) = run(&mut pages, &tokens(P, 3));
        let common = pages.hold_common(&plain(), &old).pages;
        assert_eq!(common.len(), 1);
        assert_eq!(pages.hold_common(&plain(), &new).pages.len(), 2);
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
        assert!(!pages.list(None, &plain(), &tokens(P, 1), held[0]));
        held.into_iter().for_each(|id| pages.release(id));
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
    }

    #[test]
    fn of_two_that_are_computed_at_once_the_first_is_listed() {
        let mut pages = Pages::new(5, true, None, 0);
        let ids = tokens(P, 1);
        assert!(pages.promise(2));
        let [a, b] = [pages.take().expect("promised"), pages.take().expect("promised")];
        assert!(pages.list(None, &plain(), &ids, a) && !pages.list(None, &plain(), &ids, b));
        pages.release(b);
        pages.release(a);
        assert_eq!((pages.n_free(), pages.n_kept(), pages.hold_common(&plain(), &ids).pages), (3, 1, vec![a]));
    }

    #[test]
    fn sequences_with_states_go_on_from_a_page_that_has_a_copy_of_them() {
        let mut pages = Pages::new(9, true, Some(2), 0);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.hold_common(&plain(), &ids), Common::default(), "no states after any page");
        let copy = pages.take_copy(held[1]);
        assert!(copy.is_some() && pages.take_copy(held[1]).is_none(), "one is enough");
        assert_eq!(pages.hold_common(&plain(), &ids), Common { pages: held[..2].to_vec(), copy, on_host: vec![] });
        // The place of the page that was used longest ago.
        let (others, _) = run(&mut pages, &tokens(2 * P, 9));
        let second = pages.take_copy(others[0]);
        assert_eq!(pages.take_copy(others[1]), copy);
        assert_ne!(second, copy);
        assert_eq!(pages.hold_common(&plain(), &ids), Common::default());
        assert_eq!(pages.hold_common(&plain(), &tokens(2 * P, 9)).copy, copy);
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
        let Common { pages: on_device, on_host, .. } = pages.hold_common(&plain(), &ids);
        assert_eq!((on_device, on_host.len()), (held[..1].to_vec(), 2));
        assert!(pages.promise(2));
        for (content, old) in on_host.into_iter().zip(&held[1..]) {
            assert_eq!(pages.on_host_of(content).map(|page| page.keys[0]), Some(*old));
            let id = pages.take().expect("it was promised");
            pages.came_back(content, id);
            assert_eq!(pages.on_host_of(content), None);
        }
        assert_eq!((pages.n_free(), pages.n_kept(), pages.on_host()), (0, 0, (0, 0)));
        assert_eq!(pages.hold_common(&plain(), &ids).pages.len(), 3);
        assert!(pages.next_to_go(1).is_none(), "all are held");
    }

    #[test]
    fn on_the_host_too_what_was_used_longest_ago_goes_first_and_none_before_those_after_it() {
        let mut pages = Pages::new(5, true, None, 12);
        let [old, new] = two_kept(&mut pages);
        spill(&mut pages, 4);
        assert_eq!((pages.n_free(), pages.on_host()), (4, (3, 12)));
        let n_on_host = |pages: &mut Pages, ids| pages.hold_common(&plain(), ids).on_host.len();
        assert_eq!((n_on_host(&mut pages, &old), n_on_host(&mut pages, &new)), (1, 2));
        // What is computed again need not come back, and what follows it is found after it.
        let id = pages.promise(1).then(|| pages.take()).flatten().expect("pages are free");
        assert!(pages.list(None, &plain(), &new[..P], id));
        assert_eq!(pages.on_host(), (2, 8));
        let common = pages.hold_common(&plain(), &new);
        assert_eq!((common.pages, common.on_host.len()), (vec![id], 1));
        pages.forget();
        assert_eq!(pages.on_host(), (0, 0));
        assert_eq!(pages.hold_common(&plain(), &old), Common::default());
    }

    #[test]
    fn pages_of_another_device_are_forgotten() {
        let mut pages = Pages::new(6, true, None, 0);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        pages.release(held[2]);
        pages.forget();
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
        assert_eq!(pages.hold_common(&plain(), &ids), Common::default());
        pages.release(held[0]);
        pages.release(held[1]);
        assert_eq!(pages.n_free(), 5);
    }

    /// What goes next, by looking at all that is listed.
    fn oldest_of_all(pages: &Pages, at: usize) -> Option<ContentId> {
        let follows = |id: ContentId, at: usize| {
            pages
                .contents
                .values()
                .any(|other| other.key.0 == After::Page(id) && usize::from(matches!(other.place, Place::Host(_))) == at)
        };
        let may_go = pages.contents.iter().filter(|&(&id, content)| match content.place {
            Place::Device(page) => {
                at == ON_DEVICE && pages.pages[page as usize].n_holders == 0 && !follows(id, ON_DEVICE)
            }
            Place::Host(_) => at == ON_HOST && !follows(id, ON_DEVICE) && !follows(id, ON_HOST),
        });
        may_go.min_by_key(|(_, content)| content.used_at).map(|(&id, _)| id)
    }

    /// Sequences with a few beginnings in common begin and end in any order, and pages go to the host and come back.
    #[test]
    fn what_goes_next_is_known_without_looking_at_all() {
        let mut seed = 3u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((seed >> 33) as usize) % n
        };
        let (mut pages, mut running) = (Pages::new(24, true, Some(3), 60), Vec::<Vec<PageId>>::new());
        let mut n_compared = 0;
        for _ in 0..4000 {
            if running.len() > 2 || (below(3) == 0 && !running.is_empty()) {
                let ended = running.swap_remove(below(running.len()));
                ended.into_iter().for_each(|id| pages.release(id));
            } else {
                let ids: Vec<u32> = (0..1 + below(5)).flat_map(|_| tokens(P, below(2) as u32)).collect();
                let Common { pages: mut held, on_host, .. } = pages.hold_common(&plain(), &ids);
                if !pages.promise(ids.len() / P - held.len()) {
                    held.into_iter().for_each(|id| pages.release(id));
                    continue;
                }
                for content in on_host {
                    if pages.on_host_of(content).is_some() {
                        let id = pages.take().expect("it was promised");
                        pages.came_back(content, id);
                        held.push(id);
                    }
                }
                for ids in ids.chunks(P).skip(held.len()) {
                    let (before, id) = (held.last().copied(), pages.take().expect("it was promised"));
                    pages.list(before, &plain(), ids, id);
                    pages.take_copy(id);
                    held.push(id);
                }
                running.push(held);
            }
            if below(4) == 0 {
                spill(&mut pages, 1 + below(20));
            }
            for at in [ON_DEVICE, ON_HOST] {
                let next = pages.may_go[at].first().map(|&(_, id)| id);
                assert_eq!(next, oldest_of_all(&pages, at));
                n_compared += usize::from(next.is_some());
            }
        }
        assert!(n_compared > 3000, "{n_compared}");
        running.into_iter().flatten().for_each(|id| pages.release(id));
        assert_eq!(pages.n_free() + pages.n_kept(), pages.len());
    }
}
