//! A session: a token sequence on a device, with prefill, logits and generation.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Model;
use super::constraint::{TokenConstraint, token_constraint};
use super::generation::Generation;
use super::mtp::MtpHead;
use super::options::{ContextPolicy, GenerateOptions};
use super::pace::Pace;
use super::passes::RecordedPasses;
use super::pipeline::StagePasses;
use super::sequence::Sequence;
use crate::device::{Device, Pending};
use crate::error::Error;
use crate::kernels::Sampling;
use crate::model::{Ending, KvCache, VERIFIED_ROWS};
use crate::platform::{pause, unless_browser};
use crate::recording::{MemoryPlan, Recording};
use crate::tokenizer::EncodeOptions;
use crate::vision::ImageRows;

/// A token sequence with its KV cache. One generation runs at a time.
pub struct Session {
    pub(super) model: Model,
    pub(super) passes: RecordedPasses,
    pub(super) sequence: Sequence,
    pub(super) pace: Pace,
    pub(super) mtp: MtpHead,
    /// Pipeline stages on other devices.
    stages: StagePasses,
    /// Images that ids of prompts may stand for.
    images: Vec<Arc<ImageRows>>,
}

/// A copy of a session's cache and tokens, on the device.
pub struct Snapshot {
    /// One per device.
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
            stages: model.stage_passes()?,
            images: Vec::new(),
        })
    }

    /// Sets the images and sounds whose rows' ids ([`ImageRows::ids`]) may stand among the token ids of the next
    /// prompts. Those of earlier prompts remain in the sequence.
    ///
    /// # Errors
    /// [`Error::Shape`] for rows of another width than the model's, or of an encoder with other deepstack layers.
    pub fn set_images(&mut self, images: &[Arc<ImageRows>]) -> Result<(), Error> {
        images.iter().try_for_each(|image| self.model.check_image(image))?;
        self.images = images.to_vec();
        Ok(())
    }

    /// The KV caches and their devices, in layer order.
    pub(super) fn caches(&self) -> impl Iterator<Item = (&KvCache, &Device)> {
        let stages = self.stages.caches();
        stages.chain([(&self.passes.cache, self.model.device())])
    }

    pub(crate) fn cache(&self) -> &KvCache {
        &self.passes.cache
    }

    /// The session's model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The sequence so far: prompts and generated tokens.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.ids()
    }

    /// Number of leading tokens in the cache.
    pub fn n_cached(&self) -> usize {
        self.sequence.n_cached()
    }

    /// Memory of the weights and this session, including adapters with recorded passes.
    pub fn plan(&self) -> MemoryPlan {
        self.passes.plan()
    }

    /// Dispatches of a greedy decode pass.
    pub fn decode_dispatches(&self) -> usize {
        self.passes.get(1, Ending::GREEDY).map_or(0, Recording::n_dispatches)
    }

    /// Rows of the passes over `n_tokens` tokens, in order. Rows beyond the tokens are padding.
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

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `n` tokens, without an image that does not end by there.
    pub fn truncate(&mut self, n: usize) {
        self.sequence.truncate(n);
        self.mtp.truncate(self.tokens().len());
    }

    /// Copies the session's state.
    ///
    /// # Errors
    /// Errors of [`Device::copy`](crate::Device::copy).
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        let copy = |(own, device): (&KvCache, &Device)| {
            // The cache is only allocated by the first pass.
            own.tensors().try_for_each(|tensor| device.allocate(tensor))?;
            let cache = own.declare_like()?;
            // Queued after all passes, so the copy includes their writes.
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

    /// Restores a copied state and its adapter.
    ///
    /// # Errors
    /// [`Error::Shape`] for a snapshot of another model shape or context length, [`Error::Operand`] for other
    /// devices or another model's adapter; errors of [`Device::copy`](crate::Device::copy).
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), Error> {
        let of_snapshot: Vec<usize> = snapshot.caches.iter().map(|cache| cache.tensors().count()).collect();
        let own: Vec<usize> = self.caches().map(|(cache, _)| cache.tensors().count()).collect();
        if own != of_snapshot {
            return Err(Error::Operand {
                kernel: "session",
                operand: "snapshot",
                expected: format!("one with {own:?} tensors per device"),
                found: format!("{of_snapshot:?}"),
            });
        }
        #[cfg(feature = "lora")]
        self.set_adapter(snapshot.adapter.as_ref())?;
        let device = self.model.device();
        for ((own, device), cache) in self.caches().zip(&snapshot.caches) {
            device.copy(&own.copies_of(cache))?;
        }
        // Passes also read earlier tokens, for penalties.
        device.write(&self.passes.io.tokens, 0, snapshot.sequence.ids())?;
        self.sequence = snapshot.sequence.clone();
        self.mtp.forget();
        Ok(())
    }

    /// Appends tokens and returns the logits of the last one, `[V]`.
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

    /// Starts a generation that continues `prompt`. In an empty session, the model's special tokens come first.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is no tokenizer, [`Error::Option`] for options out of range,
    /// [`Error::ContextFull`] if the prompt does not fit.
    pub fn generate(&mut self, prompt: &str, options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        let encode = EncodeOptions { add_special: self.tokens().is_empty(), parse_special: false };
        let ids = self.model.encodings()?.encode(prompt, encode)?;
        self.generate_ids(&ids, options)
    }

    /// Starts a generation that continues token ids.
    ///
    /// # Errors
    /// As [`Session::generate`]; [`Error::Tokenizer`] also for an id outside the vocabulary.
    pub fn generate_ids(&mut self, ids: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        options.check()?;
        let constraint = token_constraint(&self.model, options)?;
        self.generate_constrained(ids, options, constraint)
    }

    /// Starts a generation that continues token ids under a constraint, if any.
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

    /// Replaces the sequence by `ids` and starts a generation. The common prefix stays cached, so a growing
    /// conversation only computes what is new.
    ///
    /// # Errors
    /// As [`Session::generate_ids`].
    pub fn generate_from(&mut self, ids: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        let new = self.keep_common(ids);
        self.generate_ids(new, options)
    }

    /// As [`Session::generate_from`], with the caller's constraint.
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

    /// Truncates the sequence to its common prefix with `ids` and returns the rest of `ids`.
    fn keep_common<'i>(&mut self, ids: &'i [u32]) -> &'i [u32] {
        let known = self.tokens().iter().zip(ids).take_while(|(known, id)| known == id).count();
        self.truncate(known);
        ids.get(known..).unwrap_or_default()
    }

    /// Refuses ids outside the vocabulary, an empty sequence, and more tokens than fit.
    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        self.model.check_ids((self.tokens().len(), ids), &self.images, self.passes.capacity())
    }

    /// Moves to the same model on another device, with an empty cache.
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
        self.stages = model.stage_passes()?;
        self.passes = passes;
        #[cfg(feature = "lora")]
        self.passes.begin_with(model.adapter_id());
        self.model = model.clone();
        self.pace = Pace::default();
        self.mtp.forget();
        self.sequence.move_to(self.passes.cache.ring());
        Ok(())
    }

    /// Appends tokens, making room if the policy allows.
    fn append(&mut self, ids: &[u32], policy: ContextPolicy) -> Result<(), Error> {
        match self.check_ids(ids) {
            Err(Error::ContextFull { .. }) if policy == ContextPolicy::Slide => {
                self.sequence.append_with(ids, &self.images);
                self.slide();
            }
            checked => {
                checked?;
                self.sequence.append_with(ids, &self.images);
            }
        }
        Ok(())
    }

    /// Keeps the first token and the latest half of a context.
    pub(super) fn slide(&mut self) {
        self.mtp.forget();
        self.sequence.slide(self.passes.capacity());
    }

    /// Discards the cache if a sequence of this length needs another RoPE table row.
    pub(super) fn choose_rope_offset(&mut self) {
        let rope_offset = self.model.transformer().rope_offset(self.tokens().len() as u32);
        if self.sequence.set_rope_offset(rope_offset) {
            self.mtp.forget();
        }
    }

    /// Positions that passes can use before the next prefill: the cache's, or fewer if a longer sequence needs
    /// another RoPE table row.
    pub(super) fn n_positions(&self) -> usize {
        let end = self.model.transformer().rope_offset_end(self.tokens().len() as u32);
        self.passes.capacity().min(end as usize)
    }

    /// Prefills the uncached tokens and returns their number. The last pass has this ending, and its result is read:
    /// logits, or the state with the chosen token. `None` if cancelled between passes.
    ///
    /// Discarded passes of an earlier generation may still run. They are harmless: the queue is ordered, so tokens
    /// and state are written after the last of them has read and advanced the old ones, and later passes write all
    /// keys and values beyond the cached ones before reading them.
    pub(super) async fn feed(
        &mut self,
        ending: Ending,
        cancelled: &AtomicBool,
    ) -> Result<Option<(usize, Pending)>, Error> {
        let model = self.model.clone();
        let device = model.device();
        self.choose_rope_offset();
        self.sequence.uncache_last(1);
        let n_fed = self.sequence.uncached().len();
        device.write(&self.passes.io.tokens, self.sequence.n_cached(), self.sequence.uncached())?;
        loop {
            let n_left = self.sequence.uncached().len();
            let run = self.sequence.next_run();
            let size = self.passes.size(run.n as u32);
            let n_tokens = run.n.min(size as usize);
            if n_tokens == n_left {
                self.ready(size, n_tokens, ending).await?;
                let (pass, io) = (self.passes.get(size, ending)?, &self.passes.io);
                let result = if ending == Ending::Logits { &io.logits } else { io.state.tensor() };
                let pending = model.run_and_read(pass, n_tokens, result, 1).await?;
                self.submitted(n_tokens, size);
                return Ok(Some((n_fed, pending)));
            }
            match run.image {
                Some((image, first)) => self.fill_image(size, &image, first..first + n_tokens).await?,
                None => self.fill(size, n_tokens).await?,
            }
            if cancelled.load(Ordering::Relaxed) {
                return Ok(None);
            }
        }
    }

    /// Prepares a pass of `size` rows over the next `n_tokens` uncached tokens. Dropping the future leaves the
    /// sequence unchanged.
    pub(super) async fn ready(&mut self, size: u32, n_tokens: usize, ending: Ending) -> Result<(), Error> {
        let model = self.model.clone();
        let ids = self.sequence.uncached()[..n_tokens].to_vec();
        self.passes.test(model.device(), model.transformer(), size, ending).await?;
        let position = self.sequence.n_cached();
        self.run_host_part(position, &ids, size).await?;
        self.passes.io.state.set_with_rope(
            model.device(),
            position as u32,
            n_tokens as u32,
            self.sequence.rope_offset_at(position),
        )
    }

    /// Caches the next rows, of an image, with a pass of `size` rows.
    async fn fill_image(&mut self, size: u32, image: &ImageRows, rows: Range<usize>) -> Result<(), Error> {
        let model = self.model.clone();
        let (device, transformer) = (model.device(), model.transformer());
        let (position, n_rows) = (self.sequence.n_cached(), rows.len());
        self.passes.test_image(device, transformer, size, image.kind()).await?;
        let positions = self.sequence.image_positions(image, rows.clone());
        let rope_offset = match transformer.write_image_ropes(device, &positions)? {
            Some(row) => row.wrapping_sub(position as u32),
            None => self.sequence.rope_offset_at(position),
        };
        model.write_row_tokens((device, &self.passes.io), position, (image, rows.clone())).await?;
        let (pass, io) = self.passes.image(size)?;
        io.write_image(device, image.dim, &image.rows, (rows, size))?;
        io.state.set_with_rope(device, position as u32, n_rows as u32, rope_offset)?;
        model.run(pass, n_rows).await?;
        self.submitted(n_rows, size);
        self.follow().await?;
        pause().await;
        Ok(())
    }

    /// Records a submitted pass of `size` rows over the next `n_tokens` tokens.
    pub(super) fn submitted(&mut self, n_tokens: usize, size: u32) {
        let position = self.sequence.n_cached();
        self.mtp.left(position..position + n_tokens);
        self.sequence.submitted(n_tokens, size as usize);
    }

    /// Caches the next `n_tokens` tokens with a pass of `size` rows.
    pub(super) async fn fill(&mut self, size: u32, n_tokens: usize) -> Result<(), Error> {
        self.ready(size, n_tokens, Ending::Cache).await?;
        self.model.run(self.passes.get(size, Ending::Cache)?, n_tokens).await?;
        self.submitted(n_tokens, size);
        self.follow().await?;
        pause().await;
        Ok(())
    }

    /// The host's part of a pass over these tokens: uploads rows of embedding tables on disk, and runs the pipeline
    /// stages on other devices.
    pub(super) async fn run_host_part(&mut self, position: usize, ids: &[u32], size: u32) -> Result<(), Error> {
        let rope_offset = self.sequence.rope_offset_at(position);
        let Session { stages, model, .. } = self;
        let tables = model.row_tables();
        match unless_browser(|| stages.compute(ids, position, size, rope_offset, tables), || Ok(None)).await? {
            Some(rows) => self.model.device().write(&self.passes.io.stream, 0, &rows),
            None => self.model.fetch_rows(self.model.device(), &self.passes.io, position, ids).await,
        }
    }

    /// As [`Session::feed`], up to the first choice of a token.
    pub(super) async fn feed_and_choose(
        &mut self,
        options: &GenerateOptions,
        sampling: Sampling,
        ending: Ending,
        cancelled: &AtomicBool,
    ) -> Result<Option<(usize, Pending)>, Error> {
        let model = self.model.clone();
        // Test the pass that runs ahead now, so that it never waits.
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

    /// The logits that the last token was chosen from, after penalties and constraint, `[V]`.
    pub(super) async fn last_logits(&self) -> Result<Vec<f32>, Error> {
        self.model.device().read(&self.passes.io.logits).await
    }

    /// Uploads the bitmask of allowed next tokens.
    pub(super) fn allow(&self, allowed: &[u32]) -> Result<(), Error> {
        self.model.device().write(&self.passes.io.allowed, 0, allowed)
    }

    /// How many of `n` draft tokens fit a pass of [`Session::verify`].
    pub(super) fn room_for_drafts(&mut self, n: usize) -> usize {
        self.sequence.uncache_last(1);
        let room = (VERIFIED_ROWS as usize).saturating_sub(self.sequence.uncached().len());
        self.sequence.n_drafts(n.min(room))
    }

    /// Submits a pass over the uncached tokens and draft tokens that chooses a token after each; drops drafts that
    /// do not fit. Returns the choices to read and the row after the last kept token. `None` if no draft is left.
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
        io.state.set_with_rope(device, position as u32, ids.len() as u32, self.sequence.rope_offset_at(position))?;
        self.run_host_part(position, &ids, size).await?;
        let pass = self.passes.get(size, Ending::Verify)?;
        let pending = model.run_and_read(pass, ids.len(), &self.passes.io.verified, 1).await?;
        self.mtp.left(position..position + ids.len());
        self.sequence.submitted_drafts(drafts.len(), size as usize);
        Ok(Some((pending, ids.len() - drafts.len() - 1)))
    }

    /// Submits `n` passes ahead, each over the last token chosen on the device; if the host takes part in passes,
    /// that token must be kept already.
    pub(super) async fn run_ahead(&mut self, ending: Ending, n: u32) -> Result<Pending, Error> {
        let ids: Vec<u32> = self.tokens().last().copied().into_iter().collect();
        let position = self.sequence.next_position();
        self.run_host_part(position, &ids, 1).await?;
        let recording = self.passes.get(1, ending)?;
        let pending = self.model.run_and_read(recording, 1, self.passes.io.state.tensor(), n).await?;
        // Only the last pass leaves its hidden row.
        let end = position + n as usize;
        self.mtp.left(end.saturating_sub(1)..end);
        self.sequence.submitted_ahead(n as usize);
        Ok(pending)
    }
}
