//! Pages of layers with a sliding window, which need the latest positions only.
//!
//! A page of the other layers, its owner, has at most one of them. A sequence holds those that its window reaches into.
//! After that, the page of a listed owner stays until its memory is needed: a later sequence can resume only where the
//! pages before it still exist. Pages in the middle of a prompt are evicted first, least recently used ones before
//! others, and then those where a prompt ended or a sequence resumed.

use std::collections::BTreeSet;

use super::options::EngineOptions;
use super::pages::PageId;
use crate::generate::{GenerateOptions, Model, Pace};
use crate::kernels::{N_STATES, PAGE};
use crate::model::Attention;

/// Positions that passes may go back from the last computed one, and those that they may run ahead of it.
const SLACK: u32 = 16;

const _: () = assert!(SLACK > GenerateOptions::MAX_DRAFT_TOKENS && SLACK > Pace::MOST as u32 && SLACK > N_STATES);

/// One of so many pages is kept for the prefix cache, or more if there are many sequences.
const KEPT: u32 = 8;

/// Sizes of [`WindowPages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowSizes {
    /// The largest window, in tokens.
    pub window: u32,
    /// Pages, including the padding page 0.
    pub n_pages: u32,
}

/// How many pages a cache may have.
pub(super) struct PageLimits {
    /// Pages whose keys fit one binding in each layer.
    pub most: u32,
    /// `None` if layers with a window have no pages of their own.
    windows: Option<WindowLimits>,
}

struct WindowLimits {
    window: u32,
    /// Pages that running sequences may hold.
    n_held: u32,
    /// Further pages for the prefix cache, at least.
    n_spare: u32,
    /// Pages that fit one binding.
    most: u32,
}

impl PageLimits {
    /// Layers with a window have pages of their own if the context is longer and evicted pages do not move to host
    /// memory.
    pub fn of(model: &Model, options: &EngineOptions) -> PageLimits {
        let blocks = || model.config().blocks.iter().filter(|block| block.attends()).map(|block| &block.attention);
        let bindings = model.devices().map(|device| device.target().limits().max_binding_bytes);
        let binding = bindings.min().unwrap_or(0);
        let page_bytes = |attention: &Attention| {
            let row_words = u64::from(model.kv_type().row_words(attention.head_dim));
            u64::from(attention.n_kv_heads) * row_words * 4 * u64::from(PAGE)
        };
        let most_of = |has_pages: &dyn Fn(&Attention) -> bool| {
            let widest = blocks().filter(|layer| has_pages(layer)).map(page_bytes).max().unwrap_or(1).max(1);
            u32::try_from(binding / widest).unwrap_or(u32::MAX).saturating_sub(1)
        };
        let windows = || {
            let window = blocks().filter_map(|attention| attention.window).max()?;
            // From the page of the first key that a pass may read to that of its last row.
            let n_rows = options.rows().max(SLACK);
            let n_each = window.saturating_add(SLACK + n_rows).div_ceil(PAGE) + 1;
            // One sequence at a time has a prefill chunk.
            let n_held = options.max_sequences.saturating_mul(n_each).saturating_add(model.max_pass().div_ceil(PAGE));
            let n_spare = if options.prefix_cache { options.max_sequences.saturating_mul(n_before(window)) } else { 0 };
            let most = most_of(&|layer| layer.window.is_some());
            let saves = n_each < model.context_length().div_ceil(PAGE) && options.host_cache_bytes == 0;
            (saves && n_held <= most).then_some(WindowLimits { window, n_held, n_spare, most })
        };
        match windows() {
            Some(windows) => PageLimits { most: most_of(&|layer| layer.window.is_none()), windows: Some(windows) },
            None => PageLimits { most: most_of(&|_| true), windows: None },
        }
    }

    /// The window pages for a cache of `n_pages` pages.
    pub fn windows(&self, n_pages: u32) -> Option<WindowSizes> {
        let &WindowLimits { window, n_held, n_spare, most } = self.windows.as_ref()?;
        let n_spare = if n_spare > 0 { n_spare.max(n_pages / KEPT) } else { 0 };
        Some(WindowSizes { window, n_pages: n_held.saturating_add(n_spare).min(most).min(n_pages) + 1 })
    }
}

/// Pages before a page boundary that are needed to resume there.
fn n_before(window: u32) -> u32 {
    (window - 1).div_ceil(PAGE)
}

impl WindowSizes {
    /// The first page that a pass from `position` on may read.
    pub fn first_page(self, position: usize) -> usize {
        position.saturating_sub(self.window.saturating_add(SLACK) as usize) / PAGE as usize
    }

    /// Pages before a page boundary that are needed to resume there.
    pub fn n_before(self) -> usize {
        n_before(self.window) as usize
    }
}

#[derive(Clone, Copy, Default)]
struct WindowPage {
    owner: PageId,
    /// Number of sequences that hold the page.
    n_holders: u32,
    /// Whether a prompt ended or a sequence resumed after it.
    is_end: bool,
    used_at: u64,
}

impl WindowPage {
    /// Its entry in [`WindowPages::evictable`].
    fn rank(self, id: PageId) -> (u64, u64) {
        (self.used_at | u64::from(self.is_end) << 63, u64::from(id))
    }
}

/// Which window pages are free, held and evictable.
pub(super) struct WindowPages {
    pub sizes: WindowSizes,
    pages: Vec<WindowPage>,
    free: Vec<PageId>,
    /// Pages of listed owners without holders, by time of use, ends of prompts last; the first is evicted next.
    evictable: BTreeSet<(u64, u64)>,
}

impl WindowPages {
    pub fn new(sizes: WindowSizes) -> WindowPages {
        WindowPages {
            sizes,
            pages: vec![WindowPage::default(); sizes.n_pages as usize],
            free: (1..sizes.n_pages).rev().collect(),
            evictable: BTreeSet::new(),
        }
    }

    /// Takes a page for an owner, with one holder; also returns the owner that lost it.
    pub fn take(&mut self, owner: PageId) -> Option<(PageId, Option<PageId>)> {
        let (id, before) = match self.free.pop() {
            Some(id) => (id, None),
            None => {
                let &next = self.evictable.first()?;
                self.evictable.remove(&next);
                (next.1 as PageId, Some(self.pages[next.1 as usize].owner))
            }
        };
        self.pages[id as usize] = WindowPage { owner, n_holders: 1, ..WindowPage::default() };
        Some((id, before))
    }

    /// Holds a page; `is_end`: a sequence resumes after it.
    pub fn hold(&mut self, id: PageId, is_end: bool) {
        let page = &mut self.pages[id as usize];
        self.evictable.remove(&page.rank(id));
        page.n_holders += 1;
        page.is_end |= is_end;
    }

    /// Drops a hold at time `now`; `is_end`: of a prompt that ends after it. Returns the owner if the page is free now, since
    /// the owner is not listed.
    pub fn release(
        &mut self,
        id: PageId,
        now: u64,
        is_end: bool,
        is_listed: impl Fn(PageId) -> bool,
    ) -> Option<PageId> {
        let page = &mut self.pages[id as usize];
        page.n_holders -= 1;
        page.is_end |= is_end;
        if page.n_holders > 0 {
            return None;
        }
        page.used_at = now;
        let (owner, rank) = (page.owner, page.rank(id));
        if is_listed(owner) {
            self.evictable.insert(rank);
            return None;
        }
        self.free.push(id);
        Some(owner)
    }

    /// Gives a page to another owner.
    pub fn give(&mut self, id: PageId, owner: PageId) {
        self.pages[id as usize].owner = owner;
    }

    /// Frees a page whose owner is no longer listed, unless a sequence holds it.
    pub fn free(&mut self, id: PageId) -> bool {
        let page = self.pages[id as usize];
        let is_free = page.n_holders == 0;
        if is_free && self.evictable.remove(&page.rank(id)) {
            self.free.push(id);
        }
        is_free
    }

    #[cfg(test)]
    pub fn owner(&self, id: PageId) -> PageId {
        self.pages[id as usize].owner
    }

    /// Number of free and of evictable pages.
    #[cfg(test)]
    pub fn n_free(&self) -> [usize; 2] {
        [self.free.len(), self.evictable.len()]
    }
}
