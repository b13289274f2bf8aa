//! A sequence of tokens on a device: prompts go in, logits and generations come out.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Model;
use super::constraint::{TokenConstraint, token_constraint};
use super::generation::Generation;
use super::mtp::MtpHead;
use super::options::{ContextPolicy, GenerateOptions};
use super::pace::Pace;
use super::passes::RecordedPasses;
#[cfg(not(target_arch = "wasm32"))]
use super::pipeline::StagePasses;
use super::sequence::Sequence;
use crate::device::{Device, Pending};
use crate::error::Error;
use crate::kernels::Sampling;
use crate::model::{Ending, KvCache, VERIFIED_ROWS};
use crate::platform::pause;
use crate::recording::{MemoryPlan, Recording};
use crate::tokenizer::EncodeOptions;

/// A sequence of tokens and its cached keys and values. One generation runs at a time.
pub struct Session {
    pub(super) model: Model,
    pub(super) passes: RecordedPasses,
    pub(super) sequence: Sequence,
    pub(super) pace: Pace,
    pub(super) mtp: MtpHead,
    /// What other devices compute first.
    #[cfg(not(target_arch = "wasm32"))]
    fronts: StagePasses,
}

/// A copy of a session's cache and tokens, on the device.
pub struct Snapshot {
    /// One for each device.
    caches: Vec<KvCache>,
    sequence: Sequence,
    #[cfg(feature = "lora")]
    adapter: Option<super::Adapter>,
}

impl Session {
    pub(super) fn new(model: &Model) -> Result<Session, Error> {
        #[cfg_attr(not(feature = "lora"), expect(unused_mut))]
        let mut passes = RecordedPasses::declare(&model.device().target(), model.transformer(), model.room())?;
        #[cfg(feature = "lora")]
        passes.begin_with(model.adapter_id());
        let sequence = Sequence::new(model.config().is_recurrent(), passes.cache.ring());
        Ok(Session {
            model: model.clone(),
            passes,
            sequence,
            pace: Pace::default(),
            mtp: MtpHead::default(),
            #[cfg(not(target_arch = "wasm32"))]
            fronts: model.front_passes()?,
        })
    }

    /// What the layers keep, in order, and the devices on which they do.
    pub(super) fn caches(&self) -> impl Iterator<Item = (&KvCache, &Device)> {
        #[cfg(not(target_arch = "wasm32"))]
        let fronts = self.fronts.caches();
        #[cfg(target_arch = "wasm32")]
        let fronts = std::iter::empty();
        fronts.chain([(&self.passes.cache, self.model.device())])
    }

    pub(crate) fn cache(&self) -> &KvCache {
        &self.passes.cache
    }

    /// The model this session belongs to.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The sequence so far: prompts and generated tokens.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.ids()
    }

    /// How many of them, from the first one on, need not be computed again.
    pub fn n_cached(&self) -> usize {
        self.sequence.n_cached()
    }

    /// Memory of the weights and this session, with the adapters that it has passes for.
    pub fn plan(&self) -> MemoryPlan {
        self.passes.plan()
    }

    /// Dispatches of one decode pass of a greedy generation.
    pub fn decode_dispatches(&self) -> usize {
        self.passes.get(1, Ending::GREEDY).map_or(0, Recording::n_dispatches)
    }

    /// Rows of the passes that compute so many tokens, in order. Rows beyond the tokens are idle.
    pub fn pass_rows(&self, n_tokens: usize) -> Vec<u32> {
        let mut n_left = u32::try_from(n_tokens).unwrap_or(u32::MAX);
        let mut rows = Vec::new();
        while n_left > 0 {
            let size = self.passes.size(n_left);
            rows.push(size);
            n_left = n_left.saturating_sub(size);
        }
        rows
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.sequence.truncate(n);
        self.mtp.truncate(n);
    }

    /// Copies the session's state.
    ///
    /// # Errors
    /// Errors of [`Device::copy`](crate::Device::copy).
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        let copy = |(own, device): (&KvCache, &Device)| {
            // Before the first pass the cache has no memory to copy from.
            own.tensors().try_for_each(|tensor| device.allocate(tensor))?;
            let cache = own.declare_like()?;
            // Submitted after all passes, so that it has what they wrote.
            device.copy(&cache.copies_of(own))?;
            Ok(cache)
        };
        let caches = self.caches().map(copy).collect::<Result<_, Error>>()?;
        Ok(Snapshot {
            caches,
            sequence: self.sequence.at_rest(),
            #[cfg(feature = "lora")]
            adapter: self.adapter().cloned(),
        })
    }

    /// Goes back to a copied state, and to the adapter that it was made with.
    ///
    /// # Errors
    /// [`Error::Shape`] if the snapshot is of another shape of model or context, [`Error::Operand`] if it is of other devices or
    /// another model's adapter; errors of [`Device::copy`](crate::Device::copy).
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), Error> {
        let of_snapshot: Vec<usize> = snapshot.caches.iter().map(|cache| cache.tensors().count()).collect();
        let own: Vec<usize> = self.caches().map(|(cache, _)| cache.tensors().count()).collect();
        if own != of_snapshot {
            return Err(Error::Operand {
                kernel: "session",
                operand: "snapshot",
                expected: format!("of as many tensors on each device: {own:?}"),
                found: format!("{of_snapshot:?}"),
            });
        }
        #[cfg(feature = "lora")]
        self.set_adapter(snapshot.adapter.as_ref())?;
        let device = self.model.device();
        for ((own, device), cache) in self.caches().zip(&snapshot.caches) {
            device.copy(&own.copies_of(cache))?;
        }
        // Passes read the tokens before their own position too, to penalise those that repeat.
        device.write(&self.passes.io.tokens, 0, snapshot.sequence.ids())?;
        self.sequence = snapshot.sequence.clone();
        self.mtp.forget();
        Ok(())
    }

    /// Adds tokens to the sequence and returns the logits of the last one, `[V]`.
    ///
    /// # Errors
    /// [`Error::ContextFull`] if they do not fit, [`Error::Tokenizer`] for an unknown id, errors of
    /// [`Device::run`](crate::Device::run).
    pub async fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.append(ids, ContextPolicy::Stop)?;
        let words = self.read_logits().await;
        if words.is_err() {
            self.sequence.forget_cache();
        }
        let mut logits: Vec<f32> = bytemuck::cast_vec(words?);
        logits.truncate(self.model.config().vocab_size as usize);
        Ok(logits)
    }

    async fn read_logits(&mut self) -> Result<Vec<u32>, Error> {
        match self.feed(Ending::Logits, &AtomicBool::new(false)).await? {
            Some((_, pending)) => pending.await,
            None => Ok(Vec::new()),
        }
    }

    /// Begins a generation that continues `prompt`. An empty session gets the tokens that the model expects in front.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is no tokenizer, [`Error::Option`] for options out of range,
    /// [`Error::ContextFull`] if the prompt does not fit.
    pub fn generate(&mut self, prompt: &str, options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        let encode = EncodeOptions { add_special: self.tokens().is_empty(), parse_special: false };
        let ids = self.model.encodings()?.encode(prompt, encode)?;
        self.generate_ids(&ids, options)
    }

    /// Begins a generation that continues token ids.
    ///
    /// # Errors
    /// As [`Session::generate`]; [`Error::Tokenizer`] also for an id outside the vocabulary.
    pub fn generate_ids(&mut self, ids: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        options.check()?;
        let constraint = token_constraint(&self.model, options)?;
        self.generate_constrained(ids, options, constraint)
    }

    /// Begins a generation that continues token ids with what a constraint allows, if there is one.
    fn generate_constrained(
        &mut self,
        ids: &[u32],
        options: &GenerateOptions,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Result<Generation<'_>, Error> {
        for (option, n) in options.drafts() {
            options.check_drafts(option, n, constraint.is_some())?;
        }
        self.model.check_mtp(options.mtp_tokens)?;
        options.check_biases(self.model.config().vocab_size)?;
        self.append(ids, options.context_policy)?;
        Generation::new(self, options, constraint)
    }

    /// Makes `ids` the whole sequence and begins a generation that continues it. What the session has computed of its
    /// beginning is kept, so that a conversation that grows costs only what is new.
    ///
    /// # Errors
    /// As [`Session::generate_ids`].
    pub fn generate_from(&mut self, ids: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        let new = self.keep_common(ids);
        self.generate_ids(new, options)
    }

    /// As [`Session::generate_from`], with a constraint of the caller's.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn generate_constrained_from(
        &mut self,
        ids: &[u32],
        options: &GenerateOptions,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Result<Generation<'_>, Error> {
        options.check()?;
        let new = self.keep_common(ids);
        self.generate_constrained(new, options, constraint)
    }

    /// Keeps what the sequence has in common with `ids`, and returns what those have beyond it.
    fn keep_common<'i>(&mut self, ids: &'i [u32]) -> &'i [u32] {
        let known = self.tokens().iter().zip(ids).take_while(|(known, id)| known == id).count();
        self.truncate(known);
        ids.get(known..).unwrap_or_default()
    }

    /// Refuses ids outside the vocabulary, an empty sequence, and more tokens than fit.
    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        self.model.check_ids(self.tokens().len(), ids, self.passes.capacity())
    }

    /// Goes over to the same model on another device, where nothing is cached yet.
    pub(super) fn move_to(&mut self, model: &Model) -> Result<(), Error> {
        let same = model.config() == self.model.config() && model.context_length() == self.model.context_length();
        if !same {
            return Err(Error::Operand {
                kernel: "session",
                operand: "model",
                expected: format!("`{}` with {} positions", self.model.name(), self.model.context_length()),
                found: format!("`{}` with {}", model.name(), model.context_length()),
            });
        }
        #[cfg(feature = "lora")]
        self.check_adapter_of(model)?;
        let passes = RecordedPasses::declare(&model.device().target(), model.transformer(), model.room())?;
        #[cfg(not(target_arch = "wasm32"))]
        {
            self.fronts = model.front_passes()?;
        }
        self.passes = passes;
        #[cfg(feature = "lora")]
        self.passes.begin_with(model.adapter_id());
        self.model = model.clone();
        self.pace = Pace::default();
        self.mtp.forget();
        self.sequence.move_to(self.passes.cache.ring());
        Ok(())
    }

    /// Adds tokens to the sequence, making room if the policy says so.
    fn append(&mut self, ids: &[u32], policy: ContextPolicy) -> Result<(), Error> {
        match self.check_ids(ids) {
            Err(Error::ContextFull { .. }) if policy == ContextPolicy::Slide => {
                self.sequence.append(ids);
                self.slide();
            }
            checked => {
                checked?;
                self.sequence.append(ids);
            }
        }
        Ok(())
    }

    /// Keeps the first token and the latest half of a context.
    pub(super) fn slide(&mut self) {
        self.mtp.forget();
        self.sequence.slide(self.passes.capacity());
    }

    /// Forgets what is cached if a sequence of this length has other angles.
    pub(super) fn choose_angles(&mut self) {
        let angles = self.model.transformer().angles(self.tokens().len() as u32);
        if self.sequence.turn_by(angles) {
            self.mtp.forget();
        }
    }

    /// Positions that passes can use before the next prompt's: those of the cache, or fewer where a longer sequence has other
    /// angles.
    pub(super) fn n_positions(&self) -> usize {
        let end = self.model.transformer().angles_end(self.tokens().len() as u32);
        self.passes.capacity().min(end as usize)
    }

    /// Runs all tokens that are not cached yet and returns how many those are. The last pass has the ending, and what it
    /// gives is read after it: logits, or the state with the chosen token. `None` if it was cancelled between passes.
    ///
    /// Passes of an earlier generation whose tokens nobody kept may still be on their way. They do no harm: a queue does
    /// everything in order, so tokens and state are written after the last of them has read and moved on the old ones, and
    /// the passes that follow write all keys and values that they read beyond the cached ones.
    pub(super) async fn feed(
        &mut self,
        ending: Ending,
        cancelled: &AtomicBool,
    ) -> Result<Option<(usize, Pending)>, Error> {
        let model = self.model.clone();
        let device = model.device();
        self.choose_angles();
        self.sequence.leave_last(1);
        let n_fed = self.sequence.uncached().len();
        device.write(&self.passes.io.tokens, self.sequence.n_cached(), self.sequence.uncached())?;
        loop {
            let n_left = self.sequence.uncached().len();
            let size = self.passes.size(n_left as u32);
            let n_tokens = n_left.min(size as usize);
            if n_tokens == n_left {
                self.ready(size, n_tokens, ending).await?;
                let (pass, io) = (self.passes.get(size, ending)?, &self.passes.io);
                let result = if ending == Ending::Logits { &io.logits } else { io.state.tensor() };
                let pending = model.run_and_read(pass, n_tokens, result, 1).await?;
                self.submitted(n_tokens, size);
                return Ok(Some((n_fed, pending)));
            }
            self.fill(size, n_tokens).await?;
            if cancelled.load(Ordering::Relaxed) {
                return Ok(None);
            }
        }
    }

    /// Gets everything ready for a pass of `size` rows over the next `n_tokens` tokens that are not cached. Nothing is computed:
    /// whoever drops this future while it waits finds the sequence as it was.
    pub(super) async fn ready(&mut self, size: u32, n_tokens: usize, ending: Ending) -> Result<(), Error> {
        let model = self.model.clone();
        let ids = self.sequence.uncached()[..n_tokens].to_vec();
        self.passes.test(model.device(), model.transformer(), size, ending).await?;
        let position = self.sequence.n_cached();
        self.run_host_part(position, &ids, size).await?;
        self.passes.io.state.set_turned(model.device(), position as u32, n_tokens as u32, self.sequence.angles())
    }

    /// A pass of `size` rows over the next `n_tokens` tokens was submitted.
    pub(super) fn submitted(&mut self, n_tokens: usize, size: u32) {
        let position = self.sequence.n_cached();
        self.mtp.left(position..position + n_tokens);
        self.sequence.submitted(n_tokens, size as usize);
    }

    /// Caches the next `n_tokens` tokens by a pass of `size` rows.
    pub(super) async fn fill(&mut self, size: u32, n_tokens: usize) -> Result<(), Error> {
        self.ready(size, n_tokens, Ending::Cache).await?;
        self.model.run(self.passes.get(size, Ending::Cache)?, n_tokens).await?;
        self.submitted(n_tokens, size);
        self.follow().await?;
        pause().await;
        Ok(())
    }

    /// Does what a pass on these tokens needs of the host: fetches rows of tables that are in the file, and runs the layers that
    /// are on other devices, if some are, and hands the model's own what they leave.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) async fn run_host_part(&mut self, position: usize, ids: &[u32], size: u32) -> Result<(), Error> {
        let angles = self.sequence.angles();
        match self.fronts.compute(ids, position, size, angles, self.model.row_tables()).await? {
            Some(rows) => self.model.device().write(&self.passes.io.stream, 0, &rows),
            None => self.model.fetch_rows(self.model.device(), &self.passes.io, position, ids).await,
        }
    }

    #[cfg(target_arch = "wasm32")]
    pub(super) async fn run_host_part(&mut self, position: usize, ids: &[u32], _: u32) -> Result<(), Error> {
        self.model.fetch_rows(self.model.device(), &self.passes.io, position, ids).await
    }

    /// Runs what is not cached, up to the first choice of a token; else as [`Session::feed`].
    pub(super) async fn feed_and_choose(
        &mut self,
        options: &GenerateOptions,
        sampling: Sampling,
        ending: Ending,
        cancelled: &AtomicBool,
    ) -> Result<Option<(usize, Pending)>, Error> {
        let model = self.model.clone();
        // The pass that runs ahead, without waiting for anything.
        self.passes.test(model.device(), model.transformer(), 1, ending).await?;
        model.device().write(&self.passes.io.sampling, 0, bytemuck::cast_slice::<_, u32>(&[sampling]))?;
        if !options.logit_bias.is_empty() {
            model.device().write(&self.passes.io.biases, 0, &options.biases())?;
        }
        let fed = self.feed(ending, cancelled).await?;
        if fed.is_some() {
            self.sequence.chooses_next();
        }
        Ok(fed)
    }

    /// The logits that the last token was chosen by, after penalties and what a constraint forbids, `[V]`.
    pub(super) async fn last_logits(&self) -> Result<Vec<f32>, Error> {
        self.model.device().read(&self.passes.io.logits).await
    }

    /// Uploads which tokens may be chosen next, a bit for each.
    pub(super) fn allow(&self, allowed: &[u32]) -> Result<(), Error> {
        self.model.device().write(&self.passes.io.allowed, 0, allowed)
    }

    /// How many of `n` drafts [`Session::verify`] has room for.
    pub(super) fn room_for_drafts(&mut self, n: usize) -> usize {
        self.sequence.leave_last(1);
        let room = (VERIFIED_ROWS as usize).saturating_sub(self.sequence.uncached().len());
        self.sequence.n_drafts(n.min(room))
    }

    /// Submits a pass over what is not cached and drafted tokens after it, that chooses a token after each; drafts that it has
    /// no room for are dropped. Returns the choices to read and the row of the first one that counts, after the last kept
    /// token. `None` if no draft is left.
    pub(super) async fn verify(&mut self, drafts: &mut Vec<u32>) -> Result<Option<(Pending, usize)>, Error> {
        let model = self.model.clone();
        let device = model.device();
        drafts.truncate(self.room_for_drafts(drafts.len()));
        let ids = [self.sequence.uncached(), drafts].concat();
        let (position, size) = (self.sequence.n_cached(), self.passes.size(ids.len() as u32));
        if size != VERIFIED_ROWS || drafts.is_empty() {
            return Ok(None);
        }
        self.passes.test(device, model.transformer(), size, Ending::Verify).await?;
        let io = &self.passes.io;
        device.write(&io.tokens, position, &ids)?;
        io.state.set_turned(device, position as u32, ids.len() as u32, self.sequence.angles())?;
        self.run_host_part(position, &ids, size).await?;
        let pass = self.passes.get(size, Ending::Verify)?;
        let pending = model.run_and_read(pass, ids.len(), &self.passes.io.verified, 1).await?;
        self.mtp.left(position..position + ids.len());
        self.sequence.submitted_drafts(drafts.len(), size as usize);
        Ok(Some((pending, ids.len() - drafts.len() - 1)))
    }

    /// Submits `n` more passes, each on the token that the device chose last; that token is kept if the host has a part in a pass.
    pub(super) async fn run_ahead(&mut self, ending: Ending, n: u32) -> Result<Pending, Error> {
        let ids: Vec<u32> = self.tokens().last().copied().into_iter().collect();
        let position = self.sequence.next_position();
        self.run_host_part(position, &ids, 1).await?;
        let recording = self.passes.get(1, ending)?;
        let pending = self.model.run_and_read(recording, 1, self.passes.io.state.tensor(), n).await?;
        // The last of them leaves its row.
        let end = position + n as usize;
        self.mtp.left(end.saturating_sub(1)..end);
        self.sequence.submitted_ahead(n as usize);
        Ok(pending)
    }
}
