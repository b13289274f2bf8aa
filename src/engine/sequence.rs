//! A request that is computed.

use super::options::Request;
use super::pages::{Common, ContentId, PageId, Pages};
use super::queue::Waiting;
use super::stream::Teller;
use crate::error::Error;
use crate::generate::{Completed, Logprobs, Model, Piece, StopReason, Written};
use crate::kernels::{PAGE, Sampling, StateRow};
use crate::model::Ending;

pub(super) struct Sequence {
    /// Its tokens are in `ids`.
    pub request: Request,
    pub teller: Teller,
    written: Written,
    /// The prompt and what was generated.
    ids: Vec<u32>,
    n_prompt: usize,
    /// Tokens, from the first one on, whose keys and values are in pages, or that a state has seen.
    n_cached: usize,
    pages: Vec<PageId>,
    /// Of them the ones that are listed, from the first one on; `None` once one could not be.
    n_listed: Option<usize>,
    /// Pages that are promised and not taken.
    n_promised: usize,
    /// Its place among states and tokens.
    pub slot: u32,
    /// The row of angles of position 0.
    angles: u32,
    /// The copy of states that it goes on from, until it has them.
    pub copy: Option<u32>,
    /// What it has in common with earlier ones and the host's memory has, until that is back.
    pub on_host: Vec<ContentId>,
    /// Whether all its tokens are on the device, for penalties.
    pub has_tokens: bool,
}

impl Sequence {
    /// Begins a request at a free place, with the pages that an earlier one has in common with it. Without enough pages it
    /// cannot begin and is given back.
    pub fn begin(
        model: &Model,
        Waiting { mut request, teller, guide }: Waiting,
        slot: u32,
        pages: &mut Pages,
    ) -> Result<Sequence, Box<Waiting>> {
        let n_prompt = request.ids.len();
        let angles = model.transformer().angles(n_prompt as u32);
        // The last token is computed in any case: what comes after it is chosen there.
        let Common { pages: held, copy, on_host } = pages.hold_common(angles, &request.ids[..n_prompt - 1]);
        let most = n_prompt.saturating_add(request.options.max_tokens).min(model.context_length() as usize);
        let n_promised = most.div_ceil(PAGE as usize) - held.len();
        if !pages.promise(n_promised) {
            held.into_iter().for_each(|id| pages.release(id));
            return Err(Box::new(Waiting { request, teller, guide }));
        }
        let n_cached = held.len() * PAGE as usize;
        Ok(Sequence {
            written: Written::new(model, &request.ids, &request.options, guide),
            ids: std::mem::take(&mut request.ids),
            n_prompt,
            n_cached,
            n_listed: Some(held.len()),
            pages: held,
            n_promised,
            slot,
            angles,
            copy,
            on_host,
            has_tokens: false,
            request,
            teller,
        })
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub fn n_cached(&self) -> usize {
        self.n_cached
    }

    /// Tokens that are computed before the last one.
    pub fn n_left(&self) -> usize {
        self.ids.len() - 1 - self.n_cached
    }

    /// The next `n` tokens that are not cached.
    pub fn next_tokens(&self, n: usize) -> &[u32] {
        &self.ids[self.n_cached..][..n]
    }

    /// Says that it begins.
    pub fn tell_begin(&self) {
        self.teller.begin(self.n_prompt, self.n_cached);
    }

    /// Pages that it takes for the next `n` tokens.
    pub fn pages_for(&self, n: usize) -> usize {
        (self.n_cached + n).div_ceil(PAGE as usize).saturating_sub(self.pages.len())
    }

    /// Its pages, from position 0 on.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Whether it surely goes on after `n` more tokens, and the host has nothing to do before: no logits to read, no other
    /// angles, and, where states are copied at the ends of pages, no such end.
    pub fn goes_on_after(&self, n: usize, model: &Model, copies: bool) -> bool {
        let len = self.ids.len() + n;
        self.request.options.logprobs.is_none()
            && len - self.n_prompt < self.request.options.max_tokens
            && len <= model.context_length() as usize
            && model.transformer().angles(len as u32) == self.angles
            && !(copies && (self.n_cached + n).is_multiple_of(PAGE as usize))
    }

    /// Takes the pages for the next `n` tokens.
    pub fn make_room(&mut self, n: usize, pages: &mut Pages) -> Result<(), Error> {
        for _ in 0..self.pages_for(n) {
            self.take(pages)?;
        }
        Ok(())
    }

    fn take(&mut self, pages: &mut Pages) -> Result<PageId, Error> {
        let page = pages.take().ok_or_else(|| Error::Operand {
            kernel: "engine",
            operand: "pages",
            expected: "as many as were promised".into(),
            found: "fewer".into(),
        })?;
        self.pages.push(page);
        self.n_promised = self.n_promised.saturating_sub(1);
        Ok(page)
    }

    /// Takes a page for what comes back from the host's memory, after all that it has.
    pub fn take_back(&mut self, content: ContentId, pages: &mut Pages) -> Result<PageId, Error> {
        let page = self.take(pages)?;
        pages.came_back(content, page);
        self.n_cached += PAGE as usize;
        self.n_listed = Some(self.pages.len());
        Ok(page)
    }

    /// What a pass over its next `n_tokens` tokens is told.
    pub fn row(&self, n_tokens: u32) -> StateRow {
        StateRow {
            pos: self.n_cached as u32,
            n_tokens,
            token: self.ids[self.n_cached],
            angles: self.angles,
            slot: self.slot,
            pages: self.pages.clone(),
        }
    }

    /// Tokens of the next pass, at most `most`: up to the end of a page where states are to be copied there.
    pub fn next_len(&self, most: usize, copies: bool) -> usize {
        let n = most.min(self.n_left());
        let beyond = (self.n_cached + n) % PAGE as usize;
        if copies && beyond < n { n - beyond } else { n }
    }

    /// The last whole page, if it is listed and ends where the sequence does.
    pub fn page_at_end(&self) -> Option<PageId> {
        let n = self.n_cached / PAGE as usize;
        (self.n_cached.is_multiple_of(PAGE as usize) && n > 0 && self.n_listed == Some(n)).then(|| self.pages[n - 1])
    }

    /// A pass over its next `n` tokens was submitted. Pages that are whole now are listed.
    pub fn computed(&mut self, n: usize, pages: &mut Pages) {
        self.n_cached += n;
        while let Some(at) = self.n_listed.filter(|at| (at + 1) * PAGE as usize <= self.n_cached) {
            let before = at.checked_sub(1).map(|before| self.pages[before]);
            let ids = &self.ids[at * PAGE as usize..][..PAGE as usize];
            self.n_listed = pages.list(before, self.angles, ids, self.pages[at]).then_some(at + 1);
        }
    }

    /// Computes all of it again where a sequence as long as it has other angles.
    pub fn choose_angles(&mut self, model: &Model, pages: &mut Pages) {
        let angles = model.transformer().angles(self.ids.len() as u32);
        if angles != self.angles {
            self.angles = angles;
            self.forget(pages);
        }
    }

    /// Gives its pages back and has as many promised.
    pub fn forget(&mut self, pages: &mut Pages) {
        let n = self.pages.len();
        self.pages.drain(..).for_each(|id| pages.release(id));
        // They are free or kept now, so that this holds.
        if pages.promise(n) {
            self.n_promised += n;
        }
        self.n_cached = 0;
        self.copy = None;
        self.on_host.clear();
        self.n_listed = Some(0);
        self.has_tokens = false;
    }

    /// Has as many of other pages promised as it can need, in place of those that it had. False if there are not so many: then it
    /// has none.
    pub fn move_to(&mut self, model: &Model, pages: &mut Pages) -> bool {
        self.pages.clear();
        self.forget(pages);
        let most = self.n_prompt.saturating_add(self.request.options.max_tokens).min(model.context_length() as usize);
        let n = most.div_ceil(PAGE as usize);
        let fits = pages.promise(n);
        self.n_promised = if fits { n } else { 0 };
        fits
    }

    /// What the kernels choose its next token by; a row that is greedy is not drawn.
    pub fn sampling(&self) -> Sampling {
        let sampling = self.request.options.sampling(self.n_prompt as u32);
        match self.penalizes() {
            true => sampling,
            // Nothing of its tokens is on the device.
            false => Sampling { repeat_last_n: 0, generated_from: u32::MAX, ..sampling },
        }
    }

    pub fn penalizes(&self) -> bool {
        let ending = Ending::of(&self.request.options.sampling(0));
        matches!(ending, Ending::Greedy { penalize: true, .. } | Ending::Sample { penalize: true, .. })
    }

    pub fn draws(&self) -> bool {
        self.request.options.temperature > 0.0
    }

    pub fn is_guided(&self) -> bool {
        self.written.is_guided()
    }

    /// The tokens that may come next, if not all may.
    ///
    /// # Errors
    /// [`Error::Constraint`] if there is none.
    pub fn allowed(&mut self) -> Result<Option<&[u32]>, Error> {
        self.written.allowed()
    }

    /// Goes on with a token that was chosen; `logits`: those that it was chosen by, where they are asked for. Returns why the text
    /// ends, if it does.
    ///
    /// # Errors
    /// Those of the text.
    pub fn accept(
        &mut self,
        id: u32,
        logits: Option<&[f32]>,
        context_length: usize,
    ) -> Result<Option<StopReason>, Error> {
        self.ids.push(id);
        let is_last = self.ids.len() - self.n_prompt >= self.request.options.max_tokens;
        let Completed { piece, stop_reason, .. } =
            self.written.complete(id, is_last, self.ids.len() > context_length)?;
        let logprobs =
            logits.zip(self.request.options.logprobs).map(|(logits, n)| Logprobs::of(logits, id, n as usize));
        self.teller.piece(Piece { logprobs, ..piece });
        Ok(stop_reason)
    }

    /// Gives back what it holds.
    pub fn end(self, pages: &mut Pages) -> Teller {
        self.pages.into_iter().for_each(|id| pages.release(id));
        pages.renounce(self.n_promised);
        self.teller
    }
}
