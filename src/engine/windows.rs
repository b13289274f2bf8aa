//! Pages of layers with a sliding window, which need the latest positions only.
//!
//! A page of the other layers, its owner, has at most one of them. A sequence holds those that its window reaches into.
//! After that, the page of a listed owner stays until its memory is needed, least recently used first: a later
//! sequence can resume only where the pages before it are there.

use std::collections::BTreeSet;

use super::pages::PageId;
use crate::generate::Model;
use crate::kernels::PAGE;
use crate::model::Attention;

/// Positions that passes may go back from the last computed one, and those that they may run ahead of it.
const SLACK: u32 = 32;

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
    /// Where window pages save memory.
    windows: Option<WindowLimits>,
}

struct WindowLimits {
    window: u32,
    /// Pages that running sequences may hold.
    n_held: u32,
    /// Pages that fit one binding.
    most: u32,
}

impl PageLimits {
    /// For decode passes of up to `n_rows` rows.
    pub fn of(model: &Model, n_sequences: u32, n_rows: u32) -> PageLimits {
        let pages_each = model.context_length().div_ceil(PAGE);
        let blocks = || model.config().blocks.iter().filter(|block| block.attends()).map(|block| &block.attention);
        let window = blocks().filter_map(|attention| attention.window).max();
        // From the page of the first key that a pass may read to that of its last row.
        let n_each = window.map(|window| window.saturating_add(SLACK + n_rows.max(SLACK)).div_ceil(PAGE) + 1);
        let n_each = n_each.filter(|n| *n < pages_each);
        let bindings = model.devices().map(|device| device.target().limits().max_binding_bytes);
        let binding = bindings.min().unwrap_or(0);
        let most_of = |in_window_pages: bool| {
            let page_bytes = |attention: &Attention| {
                let row_words = u64::from(model.kv_type().row_words(attention.head_dim));
                u64::from(attention.n_kv_heads) * row_words * 4 * u64::from(PAGE)
            };
            let layers = blocks().filter(|layer| (n_each.is_some() && layer.window.is_some()) == in_window_pages);
            let widest = layers.map(page_bytes).max().unwrap_or(1).max(1);
            u32::try_from(binding / widest).unwrap_or(u32::MAX).saturating_sub(1)
        };
        let (most, most_windows) = (most_of(false), most_of(true));
        // One sequence at a time has a prefill chunk.
        let chunk = model.max_pass().div_ceil(PAGE);
        let n_held = |n: u32| n_sequences.saturating_mul(n).saturating_add(chunk);
        let windows = window.zip(n_each);
        let windows = windows.map(|(window, n)| WindowLimits { window, n_held: n_held(n), most: most_windows });
        // If there are not enough for all sequences, each page has one.
        let lacks = windows.as_ref().is_some_and(|limits| limits.n_held > limits.most);
        PageLimits { most: if lacks { most.min(most_windows) } else { most }, windows }
    }

    /// The window pages beside `n_pages` pages: those of running sequences, and as many to be kept.
    pub fn windows(&self, n_pages: u32) -> Option<WindowSizes> {
        let &WindowLimits { window, n_held, most } = self.windows.as_ref()?;
        Some(WindowSizes { window, n_pages: n_held.saturating_mul(2).min(most).min(n_pages) + 1 })
    }
}

impl WindowSizes {
    /// The first page that a pass from `position` on may read.
    pub fn first_page(self, position: usize) -> usize {
        position.saturating_sub(self.window.saturating_add(SLACK) as usize) / PAGE as usize
    }

    /// Pages before a page boundary that are needed to resume there.
    pub fn n_behind(self) -> usize {
        (self.window - 1).div_ceil(PAGE) as usize
    }
}

#[derive(Clone, Copy, Default)]
struct WindowPage {
    owner: PageId,
    /// Number of sequences that hold the page.
    n_holders: u32,
    used_at: u64,
}

/// Which window pages are free, held and evictable.
pub(super) struct WindowPages {
    pub sizes: WindowSizes,
    pages: Vec<WindowPage>,
    free: Vec<PageId>,
    /// Pages of listed owners without holders, by time of use.
    evictable: BTreeSet<(u64, PageId)>,
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
                let (_, id) = self.evictable.pop_first()?;
                (id, Some(self.pages[id as usize].owner))
            }
        };
        self.pages[id as usize] = WindowPage { owner, n_holders: 1, used_at: 0 };
        Some((id, before))
    }

    pub fn hold(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        page.n_holders += 1;
        self.evictable.remove(&(page.used_at, id));
    }

    /// Drops a hold at time `now`. Returns the owner if the page is free now, since the owner is not listed.
    pub fn release(&mut self, id: PageId, now: u64, is_listed: impl Fn(PageId) -> bool) -> Option<PageId> {
        let page = &mut self.pages[id as usize];
        page.n_holders -= 1;
        if page.n_holders > 0 {
            return None;
        }
        page.used_at = now;
        let owner = page.owner;
        if is_listed(owner) {
            self.evictable.insert((now, id));
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
        if is_free && self.evictable.remove(&(page.used_at, id)) {
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
