//! A request that is computed.

use super::options::Request;
use super::pages::{Beginning, Common, ContentId, PageId, Pages};
use super::queue::{Text, Waiting};
use super::stream::ResponseSender;
use crate::error::Error;
use crate::generate::{Completion, ContextPolicy, Decoded, Model, Sequence, StopReason, look_up};
use crate::kernels::{PAGE, Sampling, StateRow};
use crate::model::Sampler;

pub(super) struct Running {
    /// Its tokens are in `sequence`.
    pub request: Request,
    pub response: ResponseSender,
    completion: Completion,
    sequence: Sequence,
    /// Tokens that passes over a prompt compute; passes over rows compute those after them.
    n_prompt: usize,
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

impl Running {
    /// Begins a request at a free place, or goes on with one that had to wait again, with the pages that an earlier one has in
    /// common with it. Without enough pages it cannot begin and is given back.
    pub fn begin(
        model: &Model,
        Waiting { mut request, response, text }: Waiting,
        slot: u32,
        pages: &mut Pages,
    ) -> Result<Running, Box<Waiting>> {
        let n_left = match &text {
            Text::New(_) => request.options.max_tokens,
            Text::Begun(completion) => completion.n_left(&request.options),
        };
        let angles = model.transformer().angles(request.ids.len() as u32);
        let [salt, adapter] = [&request.cache_salt, &request.adapter].map(|text| text.as_deref().map(Into::into));
        let beginning = Beginning { angles, salt, adapter };
        // The last token is computed in any case: what comes after it is chosen there.
        let Common { pages: held, copy, on_host } =
            pages.hold_common(&beginning, &request.ids[..request.ids.len() - 1]);
        let most = request.ids.len().saturating_add(n_left).min(model.context_length() as usize);
        let most_pages = most.div_ceil(PAGE as usize);
        let n_promised = most_pages.saturating_sub(held.len());
        if !pages.promise(n_promised) {
            held.into_iter().for_each(|id| pages.release(id));
            return Err(Box::new(Waiting { request, response, text }));
        }
        let n_cached = held.len() * PAGE as usize;
        let ids = std::mem::take(&mut request.ids);
        Ok(Running {
            completion: match text {
                Text::New(constraint) => Completion::new(model, &ids, &request.options, constraint),
                Text::Begun(completion) => *completion,
            },
            n_prompt: ids.len() - 1,
            sequence: Sequence::begun(model.config().is_recurrent(), ids, n_cached, angles),
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
            response,
        })
    }

    /// Has it wait again, with its tokens; what it holds is given back.
    pub fn wait(self, pages: &mut Pages) -> Waiting {
        let Running { mut request, response, completion, sequence, pages: held, n_promised, .. } = self;
        held.into_iter().for_each(|id| pages.release(id));
        pages.renounce(n_promised);
        request.ids = sequence.into_ids();
        Waiting { request, response, text: Text::Begun(Box::new(completion)) }
    }

    pub fn ids(&self) -> &[u32] {
        self.sequence.ids()
    }

    pub fn n_cached(&self) -> usize {
        self.sequence.n_cached()
    }

    /// Whether it has generated tokens.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn has_generated(&self) -> bool {
        self.completion.n_generated() > 0
    }

    /// Whether passes over rows go on with it.
    pub fn is_ready(&self) -> bool {
        self.n_cached() >= self.n_prompt
    }

    /// Rows of its next pass without drafts.
    pub fn n_rows(&self) -> usize {
        self.sequence.uncached().len()
    }

    /// The next `n` tokens that are not cached.
    pub fn next_tokens(&self, n: usize) -> &[u32] {
        &self.sequence.uncached()[..n]
    }

    /// Says that it begins, unless it did before.
    pub fn send_begin(&self) {
        if self.completion.n_generated() == 0 {
            self.response.begin(self.ids().len(), self.n_cached());
        }
    }

    /// Pages that it takes for the next `n` tokens after those that were submitted.
    pub fn pages_for(&self, n: usize) -> usize {
        (self.sequence.next_position() + n).div_ceil(PAGE as usize).saturating_sub(self.pages.len())
    }

    /// Its pages, from position 0 on.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Whether it surely goes on after `n` more tokens, and the host has nothing to do before: no logits to read, nothing to guess and
    /// no other angles.
    pub fn goes_on_after(&self, n: usize, model: &Model) -> bool {
        let len = self.ids().len() + n;
        self.request.options.logprobs.is_none()
            && (self.request.options.prompt_lookup == 0 || !self.may_be_drafted())
            && n < self.completion.n_left(&self.request.options)
            && len <= model.context_length() as usize
            && model.transformer().angles(len as u32) == self.sequence.angles()
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
        self.sequence.submitted(PAGE as usize, PAGE as usize);
        self.n_listed = Some(self.pages.len());
        Ok(page)
    }

    /// Whether its next tokens may be drafted: it takes the most likely ones as they are.
    pub fn may_be_drafted(&self) -> bool {
        Sampler::of(&self.request.options.sampling(0)) == Sampler::default() && !self.is_constrained()
    }

    /// Tokens that can be drafted at most: it has to end where it would end without, and pages were promised for no more.
    pub fn max_drafts(&self, model: &Model) -> usize {
        let n_tokens = self.ids().len();
        let end = model.transformer().angles_end(n_tokens as u32).min(model.context_length());
        let n_left = self.completion.n_left(&self.request.options).saturating_sub(1);
        n_left.min((end as usize).saturating_sub(n_tokens))
    }

    /// Whether the MTP head drafts for it.
    pub fn uses_mtp(&self) -> bool {
        self.request.options.mtp_tokens > 0 && self.may_be_drafted()
    }

    /// What the MTP head goes on with after the first `n` rows of a pass from position `pos` on: their positions with
    /// the tokens that came next.
    pub fn mtp_rows(&self, pos: usize, n: usize) -> impl Iterator<Item = StateRow> + '_ {
        self.rows_of(pos, self.next_ids(pos, n).iter())
    }

    /// The tokens after each of `n` from position `pos` on.
    pub fn next_ids(&self, pos: usize, n: usize) -> &[u32] {
        &self.ids()[pos + 1..][..n]
    }

    /// What prompt look-up drafts.
    pub fn look_up(&self, model: &Model) -> Vec<u32> {
        match self.request.options.prompt_lookup as usize {
            0 => Vec::new(),
            _ if !self.may_be_drafted() => Vec::new(),
            n => look_up(self.ids(), n.min(self.max_drafts(model))),
        }
    }

    /// What a pass over its next `n_tokens` tokens is unread.
    pub fn row(&self, n_tokens: u32) -> StateRow {
        let first = self.rows(&[]).next().unwrap_or_default();
        StateRow { n_tokens, ..first }
    }

    /// Tokens of the next pass, at most `most`: up to the end of a page where states are to be copied there.
    pub fn next_len(&self, most: usize, copies: bool) -> usize {
        let n = most.min(self.n_prompt - self.n_cached());
        let beyond = (self.n_cached() + n) % PAGE as usize;
        if copies && beyond < n { n - beyond } else { n }
    }

    /// The last whole page, if it is listed and ends where the sequence does.
    pub fn page_at_end(&self) -> Option<PageId> {
        let n = self.n_cached() / PAGE as usize;
        (self.n_cached().is_multiple_of(PAGE as usize) && n > 0 && self.n_listed == Some(n)).then(|| self.pages[n - 1])
    }

    /// A pass over the next `n` tokens of a prompt was submitted. Pages that are whole now are listed.
    pub fn computed_prompt(&mut self, n: usize, pages: &mut Pages) {
        self.sequence.submitted(n, n);
        while let Some(at) = self.n_listed.filter(|at| (at + 1) * PAGE as usize <= self.sequence.n_cached()) {
            let before = at.checked_sub(1).map(|before| self.pages[before]);
            let ids = &self.sequence.ids()[at * PAGE as usize..][..PAGE as usize];
            self.n_listed = pages.list(before, &self.beginning, ids, self.pages[at]).then_some(at + 1);
        }
    }

    /// Rows of a pass over what is not computed and drafted tokens after it.
    pub fn rows<'a>(&'a self, drafts: &'a [u32]) -> impl Iterator<Item = StateRow> + 'a {
        self.rows_of(self.n_cached(), self.sequence.uncached().iter().chain(drafts))
    }

    /// Rows from position `pos` on, with these tokens.
    fn rows_of<'a>(&self, pos: usize, ids: impl Iterator<Item = &'a u32>) -> impl Iterator<Item = StateRow> {
        let (angles, slot, pages) = (self.sequence.angles(), self.slot, self.pages.clone());
        (0..).zip(ids).map(move |(n_before, &token)| StateRow {
            pos: pos as u32 + n_before,
            n_tokens: 1,
            token,
            angles,
            slot,
            n_before,
            pages: pages.clone(),
        })
    }

    /// A pass over its rows was submitted, of which the last `n_drafts` are of drafts. Pages are not listed: prompts have other bits
    /// there.
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

    /// A pass over the token that the one before it chooses was submitted.
    pub fn submitted_ahead(&mut self) {
        self.sequence.submitted_ahead(1);
    }

    /// Of `n` drafts so many are those of the model.
    pub fn verified(&mut self, n_right: usize, n: usize) {
        self.sequence.verified(n_right, n);
    }

    /// How many of `n` drafts a pass has room for.
    pub fn n_drafts(&self, n: usize) -> usize {
        self.sequence.n_drafts(n)
    }

    /// Computes all of it again where a sequence as long as it has other angles. False if there are too few pages for that, as
    /// [`Running::begin_anew`] says.
    pub fn choose_angles(&mut self, model: &Model, pages: &mut Pages) -> bool {
        let angles = model.transformer().angles(self.ids().len() as u32);
        if !self.sequence.turn_by(angles) {
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
        self.sequence.forget_cache();
        self.n_prompt = self.ids().len() - 1;
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
        let sampling = self.completion.sampling(&self.request.options, self.ids().len());
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

    pub fn is_constrained(&self) -> bool {
        self.completion.is_constrained()
    }

    /// The tokens that may come next, if not all may.
    ///
    /// # Errors
    /// [`Error::Constraint`] if there is none.
    pub fn allowed(&mut self) -> Result<Option<&[u32]>, Error> {
        self.completion.allowed()
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
        self.sequence.keep(id);
        let room = [self.ids().len(), context_length];
        let Decoded { piece, stop_reason, .. } = self.completion.accept(id, &self.request.options, room, logits)?;
        self.response.piece(piece);
        Ok(stop_reason)
    }

    /// Where it has outgrown the context, keeps the first token and the latest half of it, to be computed anew. False if there are too
    /// few pages for that, as [`Running::begin_anew`] says.
    pub fn slide(&mut self, context_length: usize, pages: &mut Pages) -> bool {
        if self.ids().len() <= context_length || self.request.options.context_policy != ContextPolicy::Slide {
            return true;
        }
        self.sequence.slide(context_length);
        self.begin_anew(pages)
    }

    /// Gives back what it holds.
    pub fn end(self, pages: &mut Pages) -> ResponseSender {
        self.pages.into_iter().for_each(|id| pages.release(id));
        pages.renounce(self.n_promised);
        self.response
    }
}
