//! A running sequence.

use std::ops::Range;
use std::sync::Arc;

use super::options::Request;
use super::pages::{CachedPrefix, ContentId, PageId, Pages, PrefixKey};
use super::queue::{QueuedRequest, RequestProgress};
use super::stream::ResponseSender;
use super::windows::WindowSizes;
use crate::error::Error;
use crate::generate::{Completion, ContextPolicy, Decoded, Model, Sequence, SequenceConstraint, StopReason, look_up};
use crate::kernels::{BatchRow, PAGE, Sampling};
use crate::model::{RowAttention, Sampler};
use crate::vision::ImageRows;

pub(super) struct Running {
    /// Its `ids` have moved to `sequence`.
    pub request: Request,
    pub response: ResponseSender,
    completion: Completion,
    sequence: Sequence,
    /// Tokens that prefill computes; decode passes compute the rest.
    n_prompt: usize,
    pages: Vec<PageId>,
    /// Pages of layers with a window, if these have their own; page 0 before the window.
    windows: Vec<PageId>,
    /// Leading window pages that are released.
    n_released: usize,
    /// Leading pages listed in the prefix cache; `None` once a prompt page could not be listed.
    n_listed: Option<usize>,
    /// Pages reserved but not yet taken.
    n_reserved: usize,
    /// Maximum number of pages at its end.
    most_pages: usize,
    /// Slot of its recurrent states and token history.
    pub slot: u32,
    /// What sequences must share, besides tokens, to share pages.
    beginning: PrefixKey,
    /// The state copy to restore before its first pass.
    pub copy: Option<u32>,
    /// Cached prefix pages to restore from host memory.
    pub on_host: Vec<ContentId>,
    /// Whether the device has all its tokens, for penalties.
    pub has_tokens: bool,
}

impl Running {
    /// Starts a request in a free slot, or resumes a preempted one, with the pages of its cached prefix. Returns the
    /// request if there are too few pages.
    pub fn begin(
        model: &Model,
        QueuedRequest { mut request, response, text }: QueuedRequest,
        slot: u32,
        pages: &mut Pages,
    ) -> Result<Running, Box<QueuedRequest>> {
        let n_left = match &text {
            RequestProgress::New(_) => request.options.max_tokens,
            RequestProgress::Preempted(completion) => completion.n_left(&request.options),
        };
        let rope_offset = model.transformer().rope_offset(request.ids.len() as u32);
        let [salt, adapter] = [&request.cache_salt, &request.adapter].map(|text| text.as_deref().map(Into::into));
        let beginning = PrefixKey { rope_offset, salt, adapter };
        // The last token is always computed: its logits choose the next one.
        let n_read = match request.reads_cache && request.options.prompt_logprobs.is_none() {
            true => request.ids.len() - 1,
            false => 0,
        };
        // Rows that see each other beyond a window do so in one pass from the image's start.
        let is_one_pass = |image: &&Arc<ImageRows>| {
            image.attention == RowAttention::Whole && model.config().has_window_below(image.len())
        };
        let starts = request.images.iter().filter(is_one_pass);
        let starts = starts.filter_map(|image| request.ids.iter().position(|id| *id == image.ids.start));
        let n_read = starts.fold(n_read, usize::min);
        let CachedPrefix { pages: held, windows, copy, on_host } =
            pages.acquire_prefix(&beginning, &request.ids[..n_read]);
        let most = request.ids.len().saturating_add(n_left).min(model.context_length() as usize);
        let most_pages = most.div_ceil(PAGE as usize);
        let n_reserved = most_pages.saturating_sub(held.len());
        if !pages.reserve(n_reserved) {
            windows.into_iter().for_each(|id| pages.release_window(id, false));
            held.into_iter().for_each(|id| pages.release(id));
            return Err(Box::new(QueuedRequest { request, response, text }));
        }
        let n_cached = held.len() * PAGE as usize;
        let ids = std::mem::take(&mut request.ids);
        Ok(Running {
            completion: match text {
                RequestProgress::New(constraint) => Completion::new(model, &ids, &request.options, constraint),
                RequestProgress::Preempted(completion) => *completion,
            },
            n_prompt: ids.len() - 1,
            sequence: Sequence::begun(model.config().is_recurrent(), (ids, &request.images), n_cached, rope_offset),
            n_listed: Some(held.len()),
            pages: held,
            windows,
            n_released: 0,
            n_reserved,
            most_pages,
            slot,
            beginning,
            copy,
            on_host,
            has_tokens: false,
            request,
            response,
        })
    }

    /// Preempts the sequence: releases its pages and returns it as a waiting request with its tokens.
    pub fn wait(mut self, pages: &mut Pages) -> QueuedRequest {
        self.release_pages(pages);
        let Running { mut request, response, completion, sequence, .. } = self;
        request.ids = sequence.into_ids();
        QueuedRequest { request, response, text: RequestProgress::Preempted(Box::new(completion)) }
    }

    pub fn ids(&self) -> &[u32] {
        self.sequence.ids()
    }

    pub fn n_cached(&self) -> usize {
        self.sequence.n_cached()
    }

    pub fn has_generated(&self) -> bool {
        self.completion.n_generated() > 0
    }

    /// Whether its prompt is computed, so that decode passes can continue it.
    pub fn is_ready(&self) -> bool {
        self.n_cached() >= self.n_prompt
    }

    /// Rows of its next decode pass without draft tokens.
    pub fn n_rows(&self) -> usize {
        self.sequence.uncached().len()
    }

    /// The next `n` uncached tokens.
    pub fn next_tokens(&self, n: usize) -> &[u32] {
        &self.sequence.uncached()[..n]
    }

    /// The number of most likely tokens to report with each prompt token, while they are computed for the first time.
    pub fn scores_prompt(&self) -> Option<usize> {
        let n = self.request.options.prompt_logprobs.filter(|_| !self.has_generated());
        n.map(|n| n as usize)
    }

    /// Whether it was to generate nothing and its prompt is computed.
    pub fn is_done(&self) -> bool {
        self.request.options.max_tokens == 0 && self.is_ready()
    }

    /// Reports the start to the stream, unless the sequence was preempted after its first token.
    pub fn send_begin(&self) {
        if self.completion.n_generated() == 0 {
            self.response.begin(self.ids().len(), self.n_cached());
        }
    }

    /// Pages it lacks for the next `n` tokens after those submitted.
    pub fn pages_for(&self, n: usize) -> usize {
        (self.sequence.next_position() + n).div_ceil(PAGE as usize).saturating_sub(self.pages.len())
    }

    /// Its pages, from position 0.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// The window page of its `at`-th page; page 0 without one.
    pub fn window_page(&self, at: usize) -> PageId {
        self.windows.get(at).copied().unwrap_or(0)
    }

    /// Whether a pass can run ahead of the next `n` tokens: the sequence cannot end, and the host has no logits to
    /// read, nothing to draft and no RoPE row to change.
    pub fn can_run_ahead(&self, n: usize, model: &Model) -> bool {
        let len = self.ids().len() + n;
        self.request.options.logprobs.is_none()
            && (self.request.options.prompt_lookup == 0 || !self.may_be_drafted())
            && n < self.completion.n_left(&self.request.options)
            && len <= model.context_length() as usize
            && model.transformer().rope_offset(len as u32) == self.sequence.rope_offset()
    }

    /// Whether its prompt's listed pages can be resumed after only with this window page.
    fn is_before_end(&self, at: usize, windows: WindowSizes) -> bool {
        at + windows.n_before() >= self.n_prompt / PAGE as usize
    }

    /// Releases the window pages that the window has left.
    fn leave_windows(&mut self, pages: &mut Pages) {
        let Some(windows) = pages.windows() else { return };
        let left = windows.first_page(self.n_cached()).min(self.windows.len());
        for at in self.n_released..left {
            let is_end = self.is_before_end(at, windows);
            pages.release_window(std::mem::take(&mut self.windows[at]), is_end);
        }
        self.n_released = self.n_released.max(left);
    }

    /// Takes the pages for the next `n` tokens.
    pub fn take_pages(&mut self, n: usize, pages: &mut Pages) -> Result<(), Error> {
        self.leave_windows(pages);
        for _ in 0..self.pages_for(n) {
            self.take(pages)?;
        }
        Ok(())
    }

    fn take(&mut self, pages: &mut Pages) -> Result<PageId, Error> {
        let no_page = |operand| Error::Operand {
            kernel: "engine",
            operand,
            expected: "a reserved page".into(),
            found: "none".into(),
        };
        let page = pages.take().ok_or_else(|| no_page("pages"))?;
        self.pages.push(page);
        self.n_reserved = self.n_reserved.saturating_sub(1);
        if pages.windows().is_some() {
            self.windows.push(pages.take_window(page).ok_or_else(|| no_page("window pages"))?);
        }
        Ok(page)
    }

    /// Takes a page to restore one from host memory, after its other pages.
    pub fn take_back(&mut self, content: ContentId, pages: &mut Pages) -> Result<PageId, Error> {
        let page = self.take(pages)?;
        pages.restored(content, page);
        self.sequence.submitted(PAGE as usize, PAGE as usize);
        self.n_listed = Some(self.pages.len());
        Ok(page)
    }

    /// Whether its tokens may be drafted: greedy, without penalties, biases or constraint.
    pub fn may_be_drafted(&self) -> bool {
        Sampler::of(&self.request.options.sampling(0)) == Sampler::default() && !self.is_constrained()
    }

    /// Maximum number of draft tokens: drafts must not move its end, and no pages are reserved beyond it.
    pub fn max_drafts(&self, model: &Model) -> usize {
        let n_tokens = self.ids().len();
        let end = model.transformer().rope_offset_end(n_tokens as u32).min(model.context_length());
        let n_left = self.completion.n_left(&self.request.options).saturating_sub(1);
        n_left.min((end as usize).saturating_sub(n_tokens))
    }

    /// Whether the MTP head drafts for the sequence.
    pub fn uses_mtp(&self) -> bool {
        self.request.options.mtp_tokens > 0 && self.may_be_drafted()
    }

    /// The MTP head's input after the first `n` rows of a pass from position `pos`: their positions with the next
    /// tokens.
    pub fn mtp_rows(&self, pos: usize, n: usize) -> impl Iterator<Item = BatchRow> + '_ {
        self.rows_of(pos, self.next_ids(pos, n).iter())
    }

    /// The token after each of the `n` from position `pos`.
    pub fn next_ids(&self, pos: usize, n: usize) -> &[u32] {
        &self.ids()[pos + 1..][..n]
    }

    /// Draft tokens by prompt lookup.
    pub fn look_up(&self, model: &Model) -> Vec<u32> {
        match self.request.options.prompt_lookup as usize {
            0 => Vec::new(),
            _ if !self.may_be_drafted() => Vec::new(),
            n => look_up(self.ids(), n.min(self.max_drafts(model))),
        }
    }

    /// The batch row of a pass over its next `n_tokens` tokens.
    pub fn row(&self, n_tokens: u32) -> BatchRow {
        let first = self.rows(&[]).next().unwrap_or_default();
        BatchRow { n_tokens, ..first }
    }

    /// Tokens of the next prefill chunk, at most `most`; with `copies`, chunks end at a page boundary where states
    /// can be copied; of an image whose rows see each other, at its end, whatever `most` is.
    pub fn next_len(&self, most: usize, copies: bool, model: &Model) -> usize {
        let run = self.sequence.next_run();
        if run.image.as_ref().is_some_and(|(image, _)| model.is_one_pass(image)) {
            return run.n;
        }
        let n = most.min(self.n_prompt - self.n_cached()).min(run.n);
        let beyond = (self.n_cached() + n) % PAGE as usize;
        if copies && beyond < n { n - beyond } else { n }
    }

    /// The image whose rows come next, and the first of them.
    pub fn next_image(&self) -> Option<(Arc<ImageRows>, usize)> {
        self.sequence.next_run().image
    }

    /// Time, row and column of these rows of the image that comes next.
    pub fn image_positions(&self, image: &ImageRows, rows: Range<usize>) -> Vec<[u32; 3]> {
        self.sequence.image_positions(image, rows)
    }

    /// Whether it has images, which a draft model cannot see.
    pub fn has_images(&self) -> bool {
        !self.request.images.is_empty()
    }

    /// The last page, if it is listed and the sequence ends with it.
    pub fn page_at_end(&self) -> Option<PageId> {
        let n = self.n_cached() / PAGE as usize;
        (self.n_cached().is_multiple_of(PAGE as usize) && n > 0 && self.n_listed == Some(n)).then(|| self.pages[n - 1])
    }

    /// Marks `n` prompt tokens as submitted, lists the pages that they fill and releases what the window has left.
    pub fn computed_prompt(&mut self, n: usize, pages: &mut Pages) {
        self.sequence.submitted(n, n);
        while let Some(at) = self.n_listed.filter(|at| (at + 1) * PAGE as usize <= self.sequence.n_cached()) {
            let before = at.checked_sub(1).map(|before| self.pages[before]);
            let ids = &self.sequence.ids()[at * PAGE as usize..][..PAGE as usize];
            let listed = pages.list(before, &self.beginning, ids, self.pages[at]);
            self.n_listed = listed.map(|_| at + 1);
            if let Some(listed) = listed.filter(|&listed| listed != self.pages[at]) {
                self.pages[at] = listed;
                if let Some(window) = self.windows.get_mut(at).filter(|window| **window != 0) {
                    *window = pages.window_of(listed);
                }
            }
        }
        self.leave_windows(pages);
    }

    /// Rows for the uncached tokens and these draft tokens.
    pub fn rows<'a>(&'a self, drafts: &'a [u32]) -> impl Iterator<Item = BatchRow> + 'a {
        self.rows_of(self.n_cached(), self.sequence.uncached().iter().chain(drafts))
    }

    /// Rows for these tokens from position `pos`.
    fn rows_of<'a>(
        &'a self,
        pos: usize,
        ids: impl Iterator<Item = &'a u32> + 'a,
    ) -> impl Iterator<Item = BatchRow> + 'a {
        (0..).zip(ids).map(move |(n_before, &token)| BatchRow {
            pos: pos as u32 + n_before,
            n_tokens: 1,
            token,
            rope_offset: self.sequence.rope_offset_at(pos + n_before as usize),
            slot: self.slot,
            n_before,
            pages: self.pages.clone(),
            window_pages: self.windows.clone(),
        })
    }

    /// Marks the rows of a decode pass as submitted, the last `n_drafts` of them drafts. Their pages are not listed:
    /// prefill computes other bits.
    pub fn submitted_rows(&mut self, n_drafts: usize) {
        let n_rows = self.n_rows();
        match n_drafts {
            0 => {
                self.sequence.submitted(n_rows, n_rows);
                self.sequence.chooses_next();
            }
            _ => self.sequence.submitted_drafts(n_drafts, n_rows + n_drafts),
        }
    }

    /// Marks a pass as submitted whose token the previous pass chooses.
    pub fn submitted_ahead(&mut self) {
        self.sequence.submitted_ahead(1);
    }

    /// Records that the model accepted `n_accepted` of `n` draft tokens.
    pub fn verified(&mut self, n_accepted: usize, n: usize) {
        self.sequence.verified(n_accepted, n);
    }

    /// How many of `n` draft tokens a pass has room for.
    pub fn n_drafts(&self, n: usize) -> usize {
        self.sequence.n_drafts(n)
    }

    /// Recomputes the sequence if its length needs another RoPE table row. False if too few pages are free, as
    /// [`Running::begin_anew`].
    pub fn choose_rope_offset(&mut self, model: &Model, pages: &mut Pages) -> bool {
        let rope_offset = model.transformer().rope_offset(self.ids().len() as u32);
        if !self.sequence.set_rope_offset(rope_offset) {
            return true;
        }
        self.beginning.rope_offset = rope_offset;
        self.begin_anew(pages)
    }

    /// Drops its pages and reservation, which no longer exist.
    pub fn lose_pages(&mut self) {
        self.pages.clear();
        self.windows.clear();
        (self.n_released, self.n_reserved) = (0, 0);
    }

    fn release_pages(&mut self, pages: &mut Pages) {
        for (at, id) in std::mem::take(&mut self.windows).into_iter().enumerate() {
            let is_end = pages.windows().is_some_and(|windows| self.is_before_end(at, windows));
            pages.release_window(id, is_end);
        }
        self.pages.drain(..).for_each(|id| pages.release(id));
        pages.release_reservation(std::mem::take(&mut self.n_reserved));
        self.n_released = 0;
    }

    /// Releases its pages and reserves all it needs, to recompute the sequence. False, with none reserved, if too
    /// few are free, such as when other sequences still hold the shared ones; the sequence must then wait.
    pub fn begin_anew(&mut self, pages: &mut Pages) -> bool {
        self.release_pages(pages);
        self.sequence.forget_cache();
        self.n_prompt = self.ids().len() - 1;
        self.copy = None;
        self.on_host.clear();
        self.n_listed = Some(0);
        self.has_tokens = false;
        let has_room = pages.reserve(self.most_pages);
        self.n_reserved = if has_room { self.most_pages } else { 0 };
        has_room
    }

    /// Sampling parameters of its next token; greedy rows do not sample.
    pub fn sampling(&self) -> Sampling {
        let sampling = self.completion.sampling(&self.request.options, self.ids().len());
        match self.penalizes() {
            true => sampling,
            // The device does not have its tokens.
            false => Sampling { repeat_last_n: 0, generated_from: u32::MAX, ..sampling },
        }
    }

    pub fn penalizes(&self) -> bool {
        Sampler::of(&self.request.options.sampling(0)).penalize
    }

    pub fn draws(&self) -> bool {
        self.request.options.temperature > 0.0
    }

    pub fn is_constrained(&self) -> bool {
        self.completion.is_constrained()
    }

    /// Its constraint, whose mask may be computed by a thread.
    pub fn constraint(&mut self) -> Option<&mut SequenceConstraint> {
        self.completion.constraint()
    }

    /// Bitmask of the allowed next tokens, or `None` if all are.
    ///
    /// # Errors
    /// [`Error::Constraint`] if no token is allowed.
    pub fn allowed(&mut self) -> Result<Option<&[u32]>, Error> {
        self.completion.allowed()
    }

    /// Appends a chosen token; `logits`: those it was chosen from, if requested. Returns the stop reason if the
    /// completion ends.
    ///
    /// # Errors
    /// Those of the completion.
    pub fn accept(
        &mut self,
        id: u32,
        logits: Option<&[f32]>,
        context_length: usize,
    ) -> Result<Option<StopReason>, Error> {
        self.sequence.keep(id);
        let room = [self.ids().len(), context_length];
        let Decoded { piece, stop_reason, .. } = self.completion.accept(id, &self.request.options, room, logits)?;
        self.response.piece(piece);
        Ok(stop_reason)
    }

    /// Once it exceeds the context, keeps the first token and the latest half, to be recomputed. False if too few
    /// pages are free, as [`Running::begin_anew`].
    pub fn slide(&mut self, context_length: usize, pages: &mut Pages) -> bool {
        if self.ids().len() <= context_length || self.request.options.context_policy != ContextPolicy::Slide {
            return true;
        }
        self.sequence.slide(context_length);
        self.begin_anew(pages)
    }

    /// Releases its pages and returns its response sender.
    pub fn end(mut self, pages: &mut Pages) -> ResponseSender {
        self.release_pages(pages);
        self.response
    }
}
