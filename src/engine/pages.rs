//! Bookkeeping of KV cache pages: the free, held and evictable ones, and the prefix cache over them.
//!
//! A page filled by prefill is listed under its predecessor and its tokens. A sequence with the same prefix follows
//! this list and holds the same pages instead of computing them. A listed page without holders stays until its
//! memory is needed: least recently used first, and never before the pages that follow it.
//!
//! Pages with generated tokens are not listed: decode passes sum in another order than prefill, so their keys differ
//! in some bits, and a completion would depend on earlier requests.
//!
//! With CPU offload, evicted pages move to host memory and are evicted from there in the same order. A sequence with
//! the same prefix restores them.
//!
//! Recurrent layers cannot resume at any page: some pages have a copy of the states after them, and a sequence
//! resumes from its last such page. Nor can layers with a window, whose pages ([`WindowPages`]) are evicted earlier.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::windows::{WindowPages, WindowSizes};
use crate::kernels::PAGE;

/// A page number. Page 0 is padding: unused rows write there.
pub(super) type PageId = u32;

/// Identifies a listed page's content on the device or host; never reused.
pub(super) type ContentId = u64;

/// A page's predecessor and its tokens.
type PageKey = (After, Box<[u32]>);

#[derive(Clone, PartialEq, Eq, Hash)]
enum After {
    Beginning(PrefixKey),
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

/// What sequences must share, besides tokens, to share pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct PrefixKey {
    /// RoPE table row of position 0.
    pub rope_offset: u32,
    /// [`Request::cache_salt`](super::Request::cache_salt).
    pub salt: Option<Arc<str>>,
    /// [`Request::adapter`](super::Request::adapter).
    pub adapter: Option<Arc<str>>,
}

/// A page on the device.
#[derive(Default)]
struct Page {
    /// Number of sequences that hold the page.
    n_holders: u32,
    /// Its content, if listed.
    content: Option<ContentId>,
    /// Its copy of the states after it.
    copy: Option<u32>,
    /// Its page of layers with a window.
    window: Option<PageId>,
}

/// A listed page.
struct ListedPage {
    key: PageKey,
    place: PageLocation,
    /// Listed successors on the device and in host memory.
    following: [HashSet<ContentId>; 2],
    used_at: u64,
    /// Its entry in [`Pages::evictable`].
    ranked: Option<(usize, u64)>,
}

enum PageLocation {
    Device(PageId),
    Host(HostPage),
}

/// A page's contents in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPage {
    /// Keys and values of all layers.
    pub keys: Arc<[u32]>,
    /// The states after it, if there was a copy.
    pub states: Option<Arc<[u32]>>,
}

impl HostPage {
    fn size_bytes(&self) -> u64 {
        size_of_val(&*self.keys) as u64 + self.states.as_ref().map_or(0, |states| size_of_val(&**states) as u64)
    }
}

/// Indices into [`ListedPage::following`] and [`Pages::evictable`].
const ON_DEVICE: usize = 0;
const ON_HOST: usize = 1;

pub(super) struct Pages {
    pages: Vec<Page>,
    free: Vec<PageId>,
    listed: HashMap<PageKey, ContentId>,
    contents: HashMap<ContentId, ListedPage>,
    /// Evictable content by time of use: on the device without holders or successors there, in host memory without
    /// any successors.
    evictable: [BTreeSet<(u64, ContentId)>; 2],
    /// Pages reserved but not yet taken.
    n_reserved: usize,
    /// Listed pages without holders.
    n_kept: usize,
    /// Incremented by each use and each new content.
    clock: u64,
    keeps: bool,
    /// Maximum bytes of host memory for evicted pages.
    host_limit: u64,
    /// Bytes of host memory in use by `n_on_host` pages.
    host_bytes: u64,
    n_on_host: usize,
    /// The page that owns each copy of recurrent states, for recurrent models.
    copies: Option<Vec<Option<PageId>>>,
    /// Pages of layers with a window, if these have their own.
    windows: Option<WindowPages>,
}

/// A sequence's cached prefix.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CachedPrefix {
    /// Pages on the device, held for the sequence.
    pub pages: Vec<PageId>,
    /// For each, its window page, if the sequence holds it; else page 0. Empty if there are none.
    pub windows: Vec<PageId>,
    /// The copy of the states after them, for recurrent models without pages to restore.
    pub copy: Option<u32>,
    /// The contents that follow, to be restored from host memory.
    pub on_host: Vec<ContentId>,
}

impl Pages {
    /// `n` pages, including the padding page 0. With `keeps` false, no page is listed. `n_copies`: copies of
    /// recurrent states, if any. `host_limit`: bytes of host memory for evicted pages. `windows`: pages of layers with
    /// a window, if these have their own: enough for all sequences at once. Excludes a `host_limit`.
    pub fn new(n: u32, keeps: bool, n_copies: Option<u32>, host_limit: u64, windows: Option<WindowSizes>) -> Pages {
        Pages {
            pages: (0..n).map(|_| Page::default()).collect(),
            free: (1..n).rev().collect(),
            listed: HashMap::new(),
            contents: HashMap::new(),
            evictable: Default::default(),
            n_reserved: 0,
            n_kept: 0,
            clock: 0,
            keeps,
            host_limit,
            host_bytes: 0,
            n_on_host: 0,
            copies: n_copies.map(|n| vec![None; n as usize]),
            windows: windows.map(WindowPages::new),
        }
    }

    /// Number of pages without the padding page.
    pub fn len(&self) -> usize {
        self.pages.len() - 1
    }

    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Number of evictable pages.
    pub fn n_kept(&self) -> usize {
        self.n_kept
    }

    /// Number of pages in host memory, and their bytes.
    pub fn on_host(&self) -> (usize, u64) {
        (self.n_on_host, self.host_bytes)
    }

    /// Finds the cached prefix of a sequence, in whole pages, and holds its device pages. [`Pages::on_host_of`]
    /// returns the pages in host memory.
    pub fn acquire_prefix(&mut self, beginning: &PrefixKey, ids: &[u32]) -> CachedPrefix {
        let mut contents: Vec<ContentId> = Vec::new();
        let mut after = After::Beginning(beginning.clone());
        for ids in ids.chunks_exact(PAGE as usize) {
            let Some(&content) = self.listed.get(&(after, ids.into())) else { break };
            contents.push(content);
            after = After::Page(content);
        }
        let place = |content: &ContentId| self.contents.get(content).map(|content| &content.place);
        let copy_of = |place: &PageLocation| match place {
            PageLocation::Device(id) => self.pages[*id as usize].copy,
            PageLocation::Host(_) => None,
        };
        let has_states = |place: &PageLocation| match place {
            PageLocation::Device(_) => copy_of(place).is_some(),
            PageLocation::Host(page) => page.states.is_some(),
        };
        let has_window = |place: &PageLocation| match place {
            PageLocation::Device(id) => self.pages[*id as usize].window.is_some(),
            PageLocation::Host(_) => false,
        };
        let n_before = self.windows.as_ref().map_or(0, |windows| windows.sizes.n_before());
        // Where a sequence can resume: the length so far, the pages of the window before it.
        let (mut n, mut n_windows) = (0, 0);
        for (i, place) in contents.iter().map(place).enumerate() {
            n_windows = if place.is_some_and(has_window) { n_windows + 1 } else { 0 };
            if n_windows >= n_before.min(i + 1) && (self.copies.is_none() || place.is_some_and(has_states)) {
                n = i + 1;
            }
        }
        contents.truncate(n);
        let copy = contents.last().and_then(place).and_then(copy_of);
        let mut common = CachedPrefix { copy, ..CachedPrefix::default() };
        for (i, content) in contents.into_iter().enumerate() {
            match self.contents.get(&content).map(|content| &content.place) {
                Some(&PageLocation::Device(id)) => {
                    self.hold(id);
                    common.pages.push(id);
                    if let Some(windows) = &mut self.windows {
                        let held = self.pages[id as usize].window.filter(|_| i + n_before >= n);
                        held.into_iter().for_each(|id| windows.hold(id, true));
                        common.windows.push(held.unwrap_or(0));
                    }
                }
                _ => {
                    self.touch(content);
                    common.on_host.push(content);
                }
            }
        }
        common
    }

    /// A page in host memory, unless it was evicted meanwhile.
    pub fn on_host_of(&self, content: ContentId) -> Option<HostPage> {
        match &self.contents.get(&content)?.place {
            PageLocation::Host(page) => Some(page.clone()),
            PageLocation::Device(_) => None,
        }
    }

    /// Marks a content as restored to a page.
    pub fn restored(&mut self, content: ContentId, id: PageId) {
        if self.move_to(content, PageLocation::Device(id)) {
            self.pages[id as usize].content = Some(content);
        }
    }

    /// With CPU offload: the next page to evict, and the copy of the states after it, while fewer than `n` pages are
    /// free.
    pub fn next_victim(&self, n: usize) -> Option<(PageId, Option<u32>)> {
        let wants = self.host_limit > 0 && self.free.len() < n;
        let (_, id) = wants.then(|| self.oldest_kept())??;
        Some((id, self.pages[id as usize].copy))
    }

    /// Frees an evicted page and puts its contents in host memory, where the least recently used pages make room.
    pub fn spill(&mut self, id: PageId, page: HostPage) {
        let Some(content) = self.pages[id as usize].content.take() else { return };
        self.free_parts_of(id);
        self.n_kept -= 1;
        self.free.push(id);
        self.move_to(content, PageLocation::Host(page));
        while self.host_bytes > self.host_limit {
            let Some(&(_, oldest)) = self.evictable[ON_HOST].first() else { break };
            self.unlist(oldest);
        }
    }

    /// Moves a content. False if it is no longer listed.
    fn move_to(&mut self, content: ContentId, to: PageLocation) -> bool {
        self.leave(content);
        let Some(moved) = self.contents.get_mut(&content) else { return false };
        moved.place = to;
        self.enter(content);
        true
    }

    /// Adds a content to the counts of its place.
    fn enter(&mut self, content: ContentId) {
        let Some(ListedPage { key, place, .. }) = self.contents.get(&content) else { return };
        let before = key.0.page();
        let at = match place {
            PageLocation::Device(_) => ON_DEVICE,
            PageLocation::Host(page) => {
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

    /// Removes a content from the counts of its place.
    fn leave(&mut self, content: ContentId) {
        self.unrank(content);
        let Some(ListedPage { key, place, .. }) = self.contents.get(&content) else { return };
        let before = key.0.page();
        let at = match place {
            PageLocation::Device(_) => ON_DEVICE,
            PageLocation::Host(page) => {
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

    /// Updates a content's entry in `evictable`.
    fn rank(&mut self, id: ContentId) {
        self.unrank(id);
        let Some(content) = self.contents.get_mut(&id) else { return };
        let [on_device, on_host] = [ON_DEVICE, ON_HOST].map(|at| !content.following[at].is_empty());
        let at = match content.place {
            PageLocation::Device(page) if self.pages[page as usize].n_holders == 0 && !on_device => ON_DEVICE,
            PageLocation::Host(_) if !on_device && !on_host => ON_HOST,
            _ => return,
        };
        content.ranked = Some((at, content.used_at));
        self.evictable[at].insert((content.used_at, id));
    }

    fn unrank(&mut self, id: ContentId) {
        if let Some((at, used_at)) = self.contents.get_mut(&id).and_then(|content| content.ranked.take()) {
            self.evictable[at].remove(&(used_at, id));
        }
    }

    /// Assigns a copy of states to a listed page: a free one, or that of the least recently used page. `None`
    /// without copies, or if the page is not listed or has one.
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
        // Free copies first.
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

    /// Reserves `n` pages besides those reserved before. False, with none reserved, if too few are free or
    /// evictable.
    pub fn reserve(&mut self, n: usize) -> bool {
        let has_room = self.n_reserved + n <= self.free.len() + self.n_kept;
        if has_room {
            self.n_reserved += n;
        }
        has_room
    }

    /// Cancels a reservation of `n` pages.
    pub fn release_reservation(&mut self, n: usize) {
        self.n_reserved = self.n_reserved.saturating_sub(n);
    }

    /// Takes a reserved page, with one holder.
    pub fn take(&mut self) -> Option<PageId> {
        let id = self.free.pop().or_else(|| self.evict())?;
        self.release_reservation(1);
        self.hold(id);
        Some(id)
    }

    /// The least recently used evictable page.
    fn oldest_kept(&self) -> Option<(ContentId, PageId)> {
        let &(_, content) = self.evictable[ON_DEVICE].first()?;
        match self.contents.get(&content)?.place {
            PageLocation::Device(id) => Some((content, id)),
            PageLocation::Host(_) => None,
        }
    }

    /// Evicts the least recently used page and its successors in host memory.
    fn evict(&mut self) -> Option<PageId> {
        let (content, id) = self.oldest_kept()?;
        self.pages[id as usize].content = None;
        self.free_parts_of(id);
        self.n_kept -= 1;
        self.unlist(content);
        Some(id)
    }

    /// Removes a content and its successors in host memory, which no lookup could reach.
    fn unlist(&mut self, content: ContentId) {
        let mut all = vec![content];
        while let Some(content) = all.pop() {
            self.leave(content);
            let Some(ListedPage { key, following: [_, on_host], .. }) = self.contents.remove(&content) else {
                continue;
            };
            self.listed.remove(&key);
            all.extend(on_host);
        }
    }

    /// Frees the copy of states and the window page of a page that is no longer listed.
    fn free_parts_of(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        let copy = page.copy.take();
        if let Some(owner) = self.copies.as_mut().zip(copy).and_then(|(copies, copy)| copies.get_mut(copy as usize)) {
            *owner = None;
        }
        if let Some((windows, window)) = self.windows.as_mut().zip(page.window)
            && windows.free(window)
        {
            page.window = None;
        }
    }

    /// The sizes of window pages, if there are any.
    pub fn windows(&self) -> Option<WindowSizes> {
        self.windows.as_ref().map(|windows| windows.sizes)
    }

    /// The window page of a page; page 0 without one.
    pub fn window_of(&self, id: PageId) -> PageId {
        self.pages[id as usize].window.unwrap_or(0)
    }

    /// Takes a window page for a page, with one holder.
    pub fn take_window(&mut self, owner: PageId) -> Option<PageId> {
        let (id, before) = self.windows.as_mut()?.take(owner)?;
        if let Some(before) = before {
            self.pages[before as usize].window = None;
        }
        self.pages[owner as usize].window = Some(id);
        Some(id)
    }

    /// Drops a sequence's hold of a window page, page 0 being none. `is_end`: its prompt ends after it.
    pub fn release_window(&mut self, id: PageId, is_end: bool) {
        self.clock += 1;
        let is_listed = |owner: PageId| self.pages[owner as usize].content.is_some();
        let windows = self.windows.as_mut().filter(|_| id != 0);
        if let Some(owner) = windows.and_then(|windows| windows.release(id, self.clock, is_end, is_listed)) {
            self.pages[owner as usize].window = None;
        }
    }

    /// Lists a page that a sequence holds after the listed page `before`, in place of a copy in host memory. If another
    /// page is listed for these tokens, the sequence holds that one from now on. Returns the listed page; `None` if the
    /// sequence's pages cannot be listed.
    pub fn list(&mut self, before: Option<PageId>, beginning: &PrefixKey, ids: &[u32], id: PageId) -> Option<PageId> {
        let after = match before.map(|before| self.pages[before as usize].content) {
            None => After::Beginning(beginning.clone()),
            // No lookup reaches a page after an unlisted one.
            Some(content) => After::Page(content?),
        };
        if !self.keeps {
            return None;
        }
        let key: PageKey = (after, ids.into());
        if let Some(&content) = self.listed.get(&key) {
            return Some(match self.contents.get(&content)?.place {
                PageLocation::Device(other) => self.exchange(id, other),
                PageLocation::Host(_) => {
                    self.restored(content, id);
                    id
                }
            });
        }
        self.clock += 1;
        let content = self.clock;
        self.pages[id as usize].content = Some(content);
        self.listed.insert(key.clone(), content);
        let (place, following) = (PageLocation::Device(id), Default::default());
        self.contents.insert(content, ListedPage { key, place, following, used_at: self.clock, ranked: None });
        self.enter(content);
        Some(id)
    }

    /// Holds a listed page in place of a sequence's own one with the same content, whose window page it gets if it has
    /// none.
    fn exchange(&mut self, own: PageId, listed: PageId) -> PageId {
        self.hold(listed);
        if let Some((windows, window)) = self.windows.as_mut().zip(self.pages[own as usize].window) {
            match self.pages[listed as usize].window {
                None => {
                    windows.give(window, listed);
                    self.pages[listed as usize].window = Some(window);
                    self.pages[own as usize].window = None;
                }
                Some(other) => {
                    windows.hold(other, false);
                    self.release_window(window, false);
                }
            }
        }
        self.release(own);
        listed
    }

    /// Drops a sequence's hold of a page.
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

    /// Unlists all pages.
    pub fn forget(&mut self) {
        self.n_kept = 0;
        self.n_on_host = 0;
        self.host_bytes = 0;
        self.listed.clear();
        self.evictable = Default::default();
        for (_, content) in std::mem::take(&mut self.contents) {
            let PageLocation::Device(id) = content.place else { continue };
            self.pages[id as usize].content = None;
            self.free_parts_of(id);
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

    fn plain() -> PrefixKey {
        PrefixKey::default()
    }

    fn tokens(n: usize, seed: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i * 7 + seed).collect()
    }

    /// Holds and lists a sequence's pages; also returns how many were computed.
    fn run(pages: &mut Pages, ids: &[u32]) -> (Vec<PageId>, usize) {
        let mut held = pages.acquire_prefix(&plain(), ids).pages;
        let n_found = held.len();
        assert!(pages.reserve(ids.len().div_ceil(P) - n_found), "pages are left");
        for ids in ids.chunks(P).skip(n_found) {
            let (before, id) = (held.last().copied(), pages.take().expect("it was promised"));
            held.push(id);
            if ids.len() == P {
                assert_eq!(pages.list(before, &plain(), ids, id), Some(id));
            }
        }
        let n_computed = held.len() - n_found;
        (held, n_computed)
    }

    /// Two sequences of two pages each, no longer held; the first was used longer ago.
    fn two_kept(pages: &mut Pages) -> [Vec<u32>; 2] {
        [1, 2].map(|seed| {
            let ids = tokens(2 * P, seed);
            let (held, _) = run(pages, &ids);
            held.into_iter().for_each(|id| pages.release(id));
            ids
        })
    }

    #[test]
    fn common_prefix_pages_are_held_twice_and_computed_once() {
        let mut pages = Pages::new(11, true, None, 0, None);
        let (first, second) = (tokens(3 * P + 5, 1), [tokens(2 * P, 1), tokens(P, 9)].concat());
        let (a, n) = run(&mut pages, &first);
        assert_eq!((a.len(), n), (4, 4));
        let (b, n) = run(&mut pages, &second);
        assert_eq!((&b[..2], n), (&a[..2], 1));
        a.iter().for_each(|&id| pages.release(id));
        // Held by the other sequence, evictable, and free.
        assert_eq!((pages.n_free(), pages.n_kept(), pages.len()), (6, 1, 10));
        b.iter().for_each(|&id| pages.release(id));
        assert_eq!((pages.n_free(), pages.n_kept()), (6, 4));
        let (_, n) = run(&mut pages, &first);
        assert_eq!(n, 1, "all whole pages are there");
    }

    #[test]
    fn prefix_with_other_rope_angles_is_not_shared() {
        let mut pages = Pages::new(4, true, None, 0, None);
        let ids = tokens(P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.acquire_prefix(&PrefixKey { rope_offset: 7, ..plain() }, &ids), CachedPrefix::default());
        assert_eq!(pages.acquire_prefix(&plain(), &ids).pages, held);
    }

    #[test]
    fn prefix_with_another_salt_is_not_shared() {
        let mut pages = Pages::new(9, true, None, 0, None);
        let ids = tokens(2 * P, 1);
        let salted = |salt: &str| PrefixKey { salt: Some(salt.into()), ..plain() };
        assert!(pages.reserve(2));
        let [first, second] = [pages.take().expect("promised"), pages.take().expect("promised")];
        assert_eq!(pages.list(None, &salted("a"), &ids[..P], first), Some(first));
        assert_eq!(pages.list(Some(first), &salted("a"), &ids[P..], second), Some(second));
        for other in [plain(), salted("b"), salted("")] {
            assert_eq!(pages.acquire_prefix(&other, &ids), CachedPrefix::default(), "{other:?}");
        }
        assert_eq!(pages.acquire_prefix(&salted("a"), &ids).pages, [first, second]);
        // Pages without a salt are separate.
        let (_, n) = run(&mut pages, &ids);
        assert_eq!(n, 2);
    }

    #[test]
    fn least_recently_used_page_is_evicted_after_its_successors() {
        let mut pages = Pages::new(5, true, None, 0, None);
        let [old, new] = two_kept(&mut pages);
        assert_eq!((pages.n_free(), pages.n_kept()), (0, 4));
        // One more page evicts the second page of the older sequence.
        let (held, _) = run(&mut pages, &tokens(P, 3));
        let common = pages.acquire_prefix(&plain(), &old).pages;
        assert_eq!(common.len(), 1);
        assert_eq!(pages.acquire_prefix(&plain(), &new).pages.len(), 2);
        // All pages are held now.
        assert!(!pages.reserve(1));
        common.into_iter().chain(held).for_each(|id| pages.release(id));
        assert!(pages.reserve(2) && !pages.reserve(1));
    }

    #[test]
    fn reserved_pages_are_available_and_unlisted_ones_are_freed() {
        let mut pages = Pages::new(4, false, None, 0, None);
        assert!(pages.reserve(2) && !pages.reserve(2) && pages.reserve(1));
        let held: Vec<PageId> = (0..3).filter_map(|_| pages.take()).collect();
        assert_eq!((held.len(), pages.take()), (3, None));
        assert_eq!(pages.list(None, &plain(), &tokens(P, 1), held[0]), None);
        held.into_iter().for_each(|id| pages.release(id));
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
    }

    #[test]
    fn page_computed_twice_at_once_is_held_twice() {
        let mut pages = Pages::new(5, true, None, 0, None);
        let ids = tokens(P, 1);
        assert!(pages.reserve(2));
        let [a, b] = [pages.take().expect("promised"), pages.take().expect("promised")];
        assert_eq!([a, b].map(|id| pages.list(None, &plain(), &ids, id)), [Some(a); 2]);
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
        pages.release(a);
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
        pages.release(a);
        assert_eq!((pages.n_free(), pages.n_kept(), pages.acquire_prefix(&plain(), &ids).pages), (3, 1, vec![a]));
    }

    #[test]
    fn recurrent_sequence_resumes_at_a_page_with_a_state_copy() {
        let mut pages = Pages::new(9, true, Some(2), 0, None);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        assert_eq!(pages.acquire_prefix(&plain(), &ids), CachedPrefix::default(), "no states after any page");
        let copy = pages.take_copy(held[1]);
        assert!(copy.is_some() && pages.take_copy(held[1]).is_none(), "one is enough");
        assert_eq!(
            pages.acquire_prefix(&plain(), &ids),
            CachedPrefix { pages: held[..2].to_vec(), copy, ..CachedPrefix::default() }
        );
        // Takes over the copy of the least recently used page.
        let (others, _) = run(&mut pages, &tokens(2 * P, 9));
        let second = pages.take_copy(others[0]);
        assert_eq!(pages.take_copy(others[1]), copy);
        assert_ne!(second, copy);
        assert_eq!(pages.acquire_prefix(&plain(), &ids), CachedPrefix::default());
        assert_eq!(pages.acquire_prefix(&plain(), &tokens(2 * P, 9)).copy, copy);
    }

    /// Moves all but `n` pages to host memory; each holds its number.
    fn spill(pages: &mut Pages, n: usize) -> Vec<PageId> {
        let mut gone = Vec::new();
        while let Some((id, _)) = pages.next_victim(n) {
            pages.spill(id, HostPage { keys: Arc::from([id]), states: None });
            gone.push(id);
        }
        gone
    }

    #[test]
    fn page_spilled_to_the_host_is_found_and_restored() {
        let mut pages = Pages::new(4, true, None, 100, None);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        held.iter().for_each(|&id| pages.release(id));
        // Successors first.
        assert_eq!(spill(&mut pages, 2), [held[2], held[1]]);
        assert_eq!((pages.n_free(), pages.n_kept(), pages.on_host()), (2, 1, (2, 8)));
        let CachedPrefix { pages: on_device, on_host, .. } = pages.acquire_prefix(&plain(), &ids);
        assert_eq!((on_device, on_host.len()), (held[..1].to_vec(), 2));
        assert!(pages.reserve(2));
        for (content, old) in on_host.into_iter().zip(&held[1..]) {
            assert_eq!(pages.on_host_of(content).map(|page| page.keys[0]), Some(*old));
            let id = pages.take().expect("it was promised");
            pages.restored(content, id);
            assert_eq!(pages.on_host_of(content), None);
        }
        assert_eq!((pages.n_free(), pages.n_kept(), pages.on_host()), (0, 0, (0, 0)));
        assert_eq!(pages.acquire_prefix(&plain(), &ids).pages.len(), 3);
        assert!(pages.next_victim(1).is_none(), "all are held");
    }

    #[test]
    fn least_recently_used_host_page_is_evicted_first() {
        let mut pages = Pages::new(5, true, None, 12, None);
        let [old, new] = two_kept(&mut pages);
        spill(&mut pages, 4);
        assert_eq!((pages.n_free(), pages.on_host()), (4, (3, 12)));
        let n_on_host = |pages: &mut Pages, ids| pages.acquire_prefix(&plain(), ids).on_host.len();
        assert_eq!((n_on_host(&mut pages, &old), n_on_host(&mut pages, &new)), (1, 2));
        // A recomputed page needs no restoring, and its successors are still found.
        let id = pages.reserve(1).then(|| pages.take()).flatten().expect("pages are free");
        assert_eq!(pages.list(None, &plain(), &new[..P], id), Some(id));
        assert_eq!(pages.on_host(), (2, 8));
        let common = pages.acquire_prefix(&plain(), &new);
        assert_eq!((common.pages, common.on_host.len()), (vec![id], 1));
        pages.forget();
        assert_eq!(pages.on_host(), (0, 0));
        assert_eq!(pages.acquire_prefix(&plain(), &old), CachedPrefix::default());
    }

    #[test]
    fn forgotten_device_pages_are_not_found_again() {
        let mut pages = Pages::new(6, true, None, 0, None);
        let ids = tokens(3 * P, 1);
        let (held, _) = run(&mut pages, &ids);
        pages.release(held[2]);
        pages.forget();
        assert_eq!((pages.n_free(), pages.n_kept()), (3, 0));
        assert_eq!(pages.acquire_prefix(&plain(), &ids), CachedPrefix::default());
        pages.release(held[0]);
        pages.release(held[1]);
        assert_eq!(pages.n_free(), 5);
    }

    /// The next content to evict, by a search of everything listed.
    fn oldest_of_all(pages: &Pages, at: usize) -> Option<ContentId> {
        let follows = |id: ContentId, at: usize| {
            pages.contents.values().any(|other| {
                other.key.0 == After::Page(id) && usize::from(matches!(other.place, PageLocation::Host(_))) == at
            })
        };
        let evictable = pages.contents.iter().filter(|&(&id, content)| match content.place {
            PageLocation::Device(page) => {
                at == ON_DEVICE && pages.pages[page as usize].n_holders == 0 && !follows(id, ON_DEVICE)
            }
            PageLocation::Host(_) => at == ON_HOST && !follows(id, ON_DEVICE) && !follows(id, ON_HOST),
        });
        evictable.min_by_key(|(_, content)| content.used_at).map(|(&id, _)| id)
    }

    /// Sequences with common prefixes start and end in random order, and pages move to the host and back.
    #[test]
    fn eviction_choice_matches_a_scan_of_all_pages() {
        let mut seed = 3u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((seed >> 33) as usize) % n
        };
        let (mut pages, mut running) = (Pages::new(24, true, Some(3), 60, None), Vec::<Vec<PageId>>::new());
        let mut n_compared = 0;
        for _ in 0..4000 {
            if running.len() > 2 || (below(3) == 0 && !running.is_empty()) {
                let ended = running.swap_remove(below(running.len()));
                ended.into_iter().for_each(|id| pages.release(id));
            } else {
                let ids: Vec<u32> = (0..1 + below(5)).flat_map(|_| tokens(P, below(2) as u32)).collect();
                let CachedPrefix { pages: mut held, on_host, .. } = pages.acquire_prefix(&plain(), &ids);
                if !pages.reserve(ids.len() / P - held.len()) {
                    held.into_iter().for_each(|id| pages.release(id));
                    continue;
                }
                for content in on_host {
                    if pages.on_host_of(content).is_some() {
                        let id = pages.take().expect("it was promised");
                        pages.restored(content, id);
                        held.push(id);
                    }
                }
                for ids in ids.chunks(P).skip(held.len()) {
                    let (before, id) = (held.last().copied(), pages.take().expect("it was promised"));
                    let id = pages.list(before, &plain(), ids, id).unwrap_or(id);
                    pages.take_copy(id);
                    held.push(id);
                }
                running.push(held);
            }
            if below(4) == 0 {
                spill(&mut pages, 1 + below(20));
            }
            for at in [ON_DEVICE, ON_HOST] {
                let next = pages.evictable[at].first().map(|&(_, id)| id);
                assert_eq!(next, oldest_of_all(&pages, at));
                n_compared += usize::from(next.is_some());
            }
        }
        assert!(n_compared > 3000, "{n_compared}");
        running.into_iter().flatten().for_each(|id| pages.release(id));
        assert_eq!(pages.n_free() + pages.n_kept(), pages.len());
    }

    const WINDOWS: WindowSizes = WindowSizes { window: 2 * PAGE + 1, n_pages: 9 };

    /// A sequence that computes all its pages and keeps the window pages of the last two.
    fn run_windows(pages: &mut Pages, ids: &[u32]) -> (Vec<PageId>, Vec<PageId>) {
        let CachedPrefix { pages: mut held, mut windows, .. } = pages.acquire_prefix(&plain(), ids);
        assert!(pages.reserve(ids.len() / P - held.len()));
        for ids in ids.chunks_exact(P).skip(held.len()) {
            let (before, id) = (held.last().copied(), pages.take().expect("it was promised"));
            windows.push(pages.take_window(id).expect("enough for all"));
            let listed = pages.list(before, &plain(), ids, id).unwrap_or(id);
            held.push(listed);
            let n = held.len();
            windows[n - 1] = pages.window_of(listed);
            if n > 2 {
                pages.release_window(std::mem::take(&mut windows[n - 3]), false);
            }
        }
        (held, windows)
    }

    fn end(pages: &mut Pages, (held, windows): (Vec<PageId>, Vec<PageId>)) {
        windows.into_iter().for_each(|id| pages.release_window(id, true));
        held.into_iter().for_each(|id| pages.release(id));
    }

    fn free_windows(pages: &Pages) -> [usize; 2] {
        pages.windows.as_ref().map(WindowPages::n_free).unwrap_or_default()
    }

    #[test]
    fn sequence_with_windows_resumes_where_the_window_before_is_there() {
        let mut pages = Pages::new(20, true, None, 0, Some(WINDOWS));
        assert_eq!(WINDOWS.n_before(), 2);
        let ids = tokens(5 * P, 1);
        let first = run_windows(&mut pages, &ids);
        assert_eq!(first.1[..3], [0; 3]);
        end(&mut pages, first.clone());
        assert_eq!(free_windows(&pages), [3, 5]);
        // Three pages are enough to resume after the third, two of them with window pages.
        let found = pages.acquire_prefix(&plain(), &ids[..3 * P]);
        assert_eq!((&found.pages[..], found.windows[0]), (&first.0[..3], 0));
        assert!(found.windows[1] != 0 && found.windows[2] != 0);
        end(&mut pages, (found.pages, found.windows));
        // A long sequence evicts pages in the middle of prompts: none of those where one ended or resumed.
        let other = run_windows(&mut pages, &tokens(12 * P, 9));
        end(&mut pages, other);
        assert_eq!(free_windows(&pages), [0, 8]);
        assert_eq!(pages.acquire_prefix(&plain(), &ids).pages.len(), 5);
    }

    #[test]
    fn recomputed_page_gives_its_window_page_to_the_listed_one() {
        let mut pages = Pages::new(20, true, None, 0, Some(WINDOWS));
        let ids = tokens(3 * P, 1);
        let first = run_windows(&mut pages, &ids);
        let listed = first.0.clone();
        end(&mut pages, first);
        for seed in [5, 9, 11, 13] {
            let other = run_windows(&mut pages, &tokens(3 * P, seed));
            end(&mut pages, other);
        }
        assert_eq!(pages.acquire_prefix(&plain(), &ids), CachedPrefix::default(), "its window pages were evicted");
        let n_free = pages.n_free();
        let again = run_windows(&mut pages, &ids);
        assert_eq!((&again.0, pages.n_free()), (&listed, n_free));
        end(&mut pages, again);
        let found = pages.acquire_prefix(&plain(), &ids);
        assert_eq!((&found.pages, found.windows[0]), (&listed, 0));
    }

    /// As many sequences as there are window pages for, in random order, never lack one.
    #[test]
    fn window_pages_suffice_for_all_sequences() {
        let mut seed = 5u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((seed >> 33) as usize) % n
        };
        // Three sequences, each with the last two pages and the one that it computes.
        let sizes = WindowSizes { n_pages: 10, ..WINDOWS };
        let (mut pages, mut running) = (Pages::new(40, true, None, 0, Some(sizes)), Vec::new());
        let mut n_found = 0;
        for _ in 0..4000 {
            if running.len() > 2 || (below(3) == 0 && !running.is_empty()) {
                let ended = running.swap_remove(below(running.len()));
                end(&mut pages, ended);
            } else {
                let ids: Vec<u32> = (0..1 + below(6)).flat_map(|_| tokens(P, below(2) as u32)).collect();
                let found = pages.acquire_prefix(&plain(), &ids);
                n_found += found.pages.len();
                let n = found.pages.len();
                assert!(found.windows.iter().enumerate().all(|(i, &id)| (id != 0) == (i + 2 >= n)), "{found:?}");
                end(&mut pages, (found.pages, found.windows));
                running.push(run_windows(&mut pages, &ids));
            }
            for (id, page) in pages.pages.iter().enumerate() {
                let owner = page.window.map(|window| pages.windows.as_ref().map(|all| all.owner(window)));
                assert!(owner.is_none_or(|owner| owner == Some(id as PageId)));
            }
        }
        assert!(n_found > 1000, "{n_found}");
        running.into_iter().for_each(|ended| end(&mut pages, ended));
        let [free, evictable] = free_windows(&pages);
        assert_eq!(free + evictable, 9);
        pages.forget();
        assert_eq!((pages.n_free(), free_windows(&pages)), (39, [9, 0]));
    }
}
