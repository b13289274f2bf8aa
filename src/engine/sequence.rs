//! A request that is computed.

use super::options::Request;
use super::pages::{Beginning, Common, ContentId, PageId, Pages};
use super::queue::{Text, Waiting};
use super::stream::Teller;
use crate::error::Error;
use crate::generate::{Completed, ContextPolicy, Logprobs, Model, Piece, StopReason, Written, look_up, slide};
use crate::kernels::{PAGE, Sampling, StateRow};
use crate::model::Sampler;

pub(super) struct Sequence {
    /// Its tokens are in `ids`.
    pub request: Request,
    pub teller: Teller,
    written: Written,
    /// The prompt and what was generated.
    ids: Vec<u32>,
    /// Tokens that it has generated, also those that are gone since ([`Sequence::slide`]).
    n_generated: usize,
    /// Tokens, from the first one on, whose keys and values are in pages, or that a state has seen.
    n_cached: usize,
    /// Tokens after them, before the last one, that a pass over rows computes once more: a state that has seen a wrong guess after
    /// them is of no use.
    n_again: usize,
    pages: Vec<PageId>,
    /// Of them the ones that are listed, from the first one on; `None` once one of a prompt could not be.
    n_listed: Option<usize>,
    /// Pages that are promised and not taken.
    n_promised: usize,
    /// Pages that it has at its end, at most.
    most_pages: usize,
    /// Its place among states and tokens.
    pub slot: u32,
    /// What it must have in common with others, beside tokens, to share pages with them.
    beginning: Beginning,
    /// The copy of states that it goes on from, until it has them.
    pub copy: Option<u32>,
    /// What it has in common with earlier ones and the host's memory has, until that is back.
    pub on_host: Vec<ContentId>,
    /// Whether all its tokens are on the device, for penalties.
    pub has_tokens: bool,
}

impl Sequence {
    /// Begins a request at a free place, or goes on with one that had to wait again, with the pages that an earlier one has in
    /// common with it. Without enough pages it cannot begin and is given back.
    pub fn begin(
        model: &Model,
        Waiting { mut request, teller, text }: Waiting,
        slot: u32,
        pages: &mut Pages,
    ) -> Result<Sequence, Box<Waiting>> {
        let n_generated = match &text {
            Text::New(_) => 0,
            Text::Begun { n_generated, .. } => *n_generated,
        };
        let angles = model.transformer().angles(request.ids.len() as u32);
        let [salt, adapter] = [&request.cache_salt, &request.adapter].map(|text| text.as_deref().map(Into::into));
        let beginning = Beginning { angles, salt, adapter };
        // The last token is computed in any case: what comes after it is chosen there.
        let Common { pages: held, copy, on_host } =
            pages.hold_common(&beginning, &request.ids[..request.ids.len() - 1]);
        let most = request.ids.len().saturating_add(request.options.max_tokens.saturating_sub(n_generated));
        let most = most.min(model.context_length() as usize);
        let most_pages = most.div_ceil(PAGE as usize);
        let n_promised = most_pages.saturating_sub(held.len());
        if !pages.promise(n_promised) {
            held.into_iter().for_each(|id| pages.release(id));
            return Err(Box::new(Waiting { request, teller, text }));
        }
        let n_cached = held.len() * PAGE as usize;
        Ok(Sequence {
            written: match text {
                Text::New(guide) => Written::new(model, &request.ids, &request.options, guide),
                Text::Begun { written, .. } => *written,
            },
            ids: std::mem::take(&mut request.ids),
            n_generated,
            n_cached,
            n_again: 0,
            n_listed: Some(held.len()),
            pages: held,
            n_promised,
            most_pages,
            slot,
            beginning,
            copy,
            on_host,
            has_tokens: false,
            request,
            teller,
        })
    }

    /// Has it wait again, with its tokens; what it holds is given back.
    pub fn wait(self, pages: &mut Pages) -> Waiting {
        let Sequence { mut request, teller, written, ids, n_generated, pages: held, n_promised, .. } = self;
        held.into_iter().for_each(|id| pages.release(id));
        pages.renounce(n_promised);
        request.ids = ids;
        Waiting { request, teller, text: Text::Begun { written: Box::new(written), n_generated } }
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub fn n_cached(&self) -> usize {
        self.n_cached
    }

    /// Whether it has generated tokens.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn has_generated(&self) -> bool {
        self.n_generated > 0
    }

    /// Tokens that are computed before the last one.
    fn n_left(&self) -> usize {
        self.ids.len() - 1 - self.n_cached
    }

    /// Whether passes over rows go on with it.
    pub fn is_ready(&self) -> bool {
        self.n_left() == self.n_again
    }

    /// Rows of its next pass without guesses.
    pub fn n_rows(&self) -> usize {
        self.n_again + 1
    }

    /// The next `n` tokens that are not cached.
    pub fn next_tokens(&self, n: usize) -> &[u32] {
        &self.ids[self.n_cached..][..n]
    }

    /// Says that it begins, unless it did before.
    pub fn tell_begin(&self) {
        if self.n_generated == 0 {
            self.teller.begin(self.ids.len(), self.n_cached);
        }
    }

    /// Pages that it takes for the next `n` tokens.
    pub fn pages_for(&self, n: usize) -> usize {
        (self.n_cached + n).div_ceil(PAGE as usize).saturating_sub(self.pages.len())
    }

    /// Its pages, from position 0 on.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Whether it surely goes on after `n` more tokens, and the host has nothing to do before: no logits to read, nothing to guess and
    /// no other angles.
    pub fn goes_on_after(&self, n: usize, model: &Model) -> bool {
        let len = self.ids.len() + n;
        self.request.options.logprobs.is_none()
            && (self.request.options.prompt_lookup == 0 || !self.may_be_guessed())
            && self.n_generated + n < self.request.options.max_tokens
            && len <= model.context_length() as usize
            && model.transformer().angles(len as u32) == self.beginning.angles
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

    /// Whether its next tokens may be guessed: it takes the most likely ones as they are.
    pub fn may_be_guessed(&self) -> bool {
        Sampler::of(&self.request.options.sampling(0)) == Sampler::default() && !self.is_guided()
    }

    /// Tokens that can be guessed at most: it has to end where it would end without, and pages were promised for no more.
    pub fn most_guesses(&self, model: &Model) -> usize {
        let n_left = self.request.options.max_tokens.saturating_sub(self.n_generated + 1);
        let end = model.transformer().angles_end(self.ids.len() as u32).min(model.context_length());
        n_left.min((end as usize).saturating_sub(self.ids.len()))
    }

    /// Whether the head for further tokens guesses for it.
    pub fn asks_head(&self) -> bool {
        self.request.options.further_tokens > 0 && self.may_be_guessed()
    }

    /// What the head for further tokens goes on with after the first `n` rows of a pass over the sequence's rows: their positions with
    /// the tokens that came next.
    pub fn followed_rows(&self, n: usize) -> impl Iterator<Item = StateRow> + '_ {
        self.rows_of(self.came_next(n).iter())
    }

    /// The tokens after each of the next `n` that are not cached.
    pub fn came_next(&self, n: usize) -> &[u32] {
        &self.ids[self.n_cached + 1..][..n]
    }

    /// What prompt look-up guesses.
    pub fn look_up(&self, model: &Model) -> Vec<u32> {
        match self.request.options.prompt_lookup as usize {
            0 => Vec::new(),
            _ if !self.may_be_guessed() => Vec::new(),
            n => look_up(&self.ids, n.min(self.most_guesses(model))),
        }
    }

    /// What a pass over its next `n_tokens` tokens is told.
    pub fn row(&self, n_tokens: u32) -> StateRow {
        StateRow {
            pos: self.n_cached as u32,
            n_tokens,
            token: self.ids[self.n_cached],
            angles: self.beginning.angles,
            slot: self.slot,
            n_before: 0,
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

    /// A pass over the next `n` tokens of a prompt was submitted. Pages that are whole now are listed.
    pub fn computed_prompt(&mut self, n: usize, pages: &mut Pages) {
        self.n_cached += n;
        while let Some(at) = self.n_listed.filter(|at| (at + 1) * PAGE as usize <= self.n_cached) {
            let before = at.checked_sub(1).map(|before| self.pages[before]);
            let ids = &self.ids[at * PAGE as usize..][..PAGE as usize];
            self.n_listed = pages.list(before, &self.beginning, ids, self.pages[at]).then_some(at + 1);
        }
    }

    /// Rows of a pass over what is not computed and guessed tokens after it.
    pub fn rows<'a>(&'a self, guesses: &'a [u32]) -> impl Iterator<Item = StateRow> + 'a {
        self.rows_of(self.ids[self.n_cached..].iter().chain(guesses))
    }

    /// Rows at the positions after those that are cached, with these tokens.
    fn rows_of<'a>(&self, ids: impl Iterator<Item = &'a u32>) -> impl Iterator<Item = StateRow> {
        let first = self.row(1);
        (0..).zip(ids).map(move |(n_before, &token)| StateRow {
            pos: first.pos + n_before,
            token,
            n_before,
            ..first.clone()
        })
    }

    /// A pass over so many rows has computed its next tokens, and wrong guesses after the first `n_right`. Pages are not listed:
    /// prompts have other bits there.
    pub fn computed_rows(&mut self, n_right: usize, n_rows: usize, keeps_states: bool) {
        (self.n_cached, self.n_again) = match keeps_states && n_right < n_rows {
            true => (self.n_cached, n_right),
            false => (self.n_cached + n_right, 0),
        };
    }

    /// Computes all of it again where a sequence as long as it has other angles. False if there are too few pages for that, as
    /// [`Sequence::begin_anew`] says.
    pub fn choose_angles(&mut self, model: &Model, pages: &mut Pages) -> bool {
        let angles = model.transformer().angles(self.ids.len() as u32);
        if angles == self.beginning.angles {
            return true;
        }
        self.beginning.angles = angles;
        self.begin_anew(pages)
    }

    /// The pages that it holds and those that it was promised are there no more.
    pub fn lose_pages(&mut self) {
        self.pages.clear();
        self.n_promised = 0;
    }

    /// Gives its pages back and has all that it needs promised, to compute all of it again. False, with none promised, if there are too few:
    /// other sequences may still hold those that it had in common with them. It has to wait then.
    pub fn begin_anew(&mut self, pages: &mut Pages) -> bool {
        self.pages.drain(..).for_each(|id| pages.release(id));
        pages.renounce(self.n_promised);
        (self.n_cached, self.n_again) = (0, 0);
        self.copy = None;
        self.on_host.clear();
        self.n_listed = Some(0);
        self.has_tokens = false;
        let has_room = pages.promise(self.most_pages);
        self.n_promised = if has_room { self.most_pages } else { 0 };
        has_room
    }

    /// What the kernels choose its next token by; a row that is greedy is not drawn.
    pub fn sampling(&self) -> Sampling {
        let sampling = self.request.options.sampling(self.ids.len().saturating_sub(self.n_generated) as u32);
        match self.penalizes() {
            true => sampling,
            // Nothing of its tokens is on the device.
            false => Sampling { repeat_last_n: 0, generated_from: u32::MAX, ..sampling },
        }
    }

    pub fn penalizes(&self) -> bool {
        Sampler::of(&self.request.options.sampling(0)).penalize
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
        self.n_generated += 1;
        let is_last = self.n_generated >= self.request.options.max_tokens;
        let is_full = self.ids.len() > context_length && !self.slides();
        let Completed { piece, stop_reason, .. } = self.written.complete(id, is_last, is_full)?;
        let logprobs =
            logits.zip(self.request.options.logprobs).map(|(logits, n)| Logprobs::of(logits, id, n as usize));
        self.teller.piece(Piece { logprobs, ..piece });
        Ok(stop_reason)
    }

    fn slides(&self) -> bool {
        self.request.options.context_policy == ContextPolicy::Slide
    }

    /// Where it has outgrown the context, keeps the first token and the latest half of it, to be computed anew. False if there are too
    /// few pages for that, as [`Sequence::begin_anew`] says.
    pub fn slide(&mut self, context_length: usize, pages: &mut Pages) -> bool {
        if self.ids.len() <= context_length || !self.slides() {
            return true;
        }
        slide(&mut self.ids, context_length);
        self.begin_anew(pages)
    }

    /// Gives back what it holds.
    pub fn end(self, pages: &mut Pages) -> Teller {
        self.pages.into_iter().for_each(|id| pages.release(id));
        pages.renounce(self.n_promised);
        self.teller
    }
}
