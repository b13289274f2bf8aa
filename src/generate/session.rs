//! A sequence in progress: cached keys and values, recorded passes, and the loop that generates.

use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use web_time::Instant;

use super::Model;
use super::options::{ContextPolicy, GenerateOptions};
use super::stop::StopFilter;
use crate::device::{Device, Pending, pause};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{NON_FINITE, StepState};
use crate::model::{Ending, KvCache, Llama, PassTensors};
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tokenizer::{EncodeOptions, StreamDecoder};

/// Tokens that one pass can take. A session records those up to [`Model::max_pass`].
pub const PASS_SIZES: [u32; 5] = [1, 8, 32, 128, 512];

/// From this size on a pass takes about as long as its rows say, so that idle ones are worth avoiding.
const LONG_PASS: u32 = 128;

/// Submissions ahead, the one that is being read included, so that a GPU does not wait for the host.
const IN_FLIGHT: usize = 3;

/// A session's tensors and its recorded passes.
pub(super) struct Passes {
    cache: KvCache,
    io: PassTensors,
    workspace: Workspace,
    /// Those of [`PASS_SIZES`] that are recorded.
    sizes: &'static [u32],
    /// By what comes behind the layers, and by size.
    recordings: HashMap<(Ending, u32), Recording>,
}

impl Passes {
    /// Declares tensors and records the passes of a greedy generation, for up to `max_pass` tokens; nothing is allocated.
    /// The context is as long as the model's rotation table.
    pub fn declare(device: &Device, llama: &Llama, rope: &Tensor, max_pass: u32) -> Result<Passes, Error> {
        let config = &llama.config;
        let context_length = rope.shape()[0];
        // A pass for more tokens than the context has positions would never be full.
        let [largest, enough] = [
            PASS_SIZES.iter().rposition(|&size| size <= max_pass),
            PASS_SIZES.iter().position(|&size| size >= context_length),
        ];
        let last = largest.unwrap_or(0).min(enough.unwrap_or(PASS_SIZES.len() - 1));
        let sizes = &PASS_SIZES[..=last];
        let word = |label: &str, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        let cache = KvCache::declare(config, context_length)?;
        let io = PassTensors {
            state: StepState::declare()?,
            // The last pass of a prompt may be padded beyond the context.
            tokens: word("tokens", &[context_length.saturating_add(PASS_SIZES[last])], DType::U32)?,
            rope: rope.clone(),
            logits: word("logits", &[1, config.vocab_size], DType::F32)?,
            sampling: word("sampling", &[8], DType::U32)?,
            chosen: word("chosen", &[1], DType::U32)?,
        };
        let (workspace, recordings) = (Workspace::default(), HashMap::new());
        let mut passes = Passes { cache, io, workspace, sizes, recordings };
        passes.record(device, llama, Ending::Cache)?;
        passes.record(device, llama, Ending::Greedy { penalize: false })?;
        Ok(passes)
    }

    /// Records the passes of an ending unless that was done before.
    fn record(&mut self, device: &Device, llama: &Llama, ending: Ending) -> Result<(), Error> {
        let largest = self.largest();
        for &size in self.sizes.iter().rev() {
            // In the middle of a prompt only full passes run, and short ones never do.
            let never_runs = ending == Ending::Cache && size < LONG_PASS.min(largest);
            if never_runs || self.recordings.contains_key(&(ending, size)) {
                continue;
            }
            let mut rec = Recorder::new(device);
            llama.record_pass(&mut rec, &self.cache, &self.io, size, ending)?;
            self.recordings.insert((ending, size), rec.finish(&mut self.workspace));
        }
        Ok(())
    }

    fn largest(&self) -> u32 {
        self.sizes[self.sizes.len() - 1]
    }

    /// Memory of these passes and the weights. The recordings use all of it but the sampling settings, which a greedy
    /// pass does not read.
    pub fn plan(&self) -> MemoryPlan {
        MemoryPlan::of(self.recordings.values(), [&self.io.sampling])
    }

    /// The size of the next pass where `n_tokens` tokens are left: the smallest that takes them all or else the largest,
    /// but a shorter one rather than a long one that would be at most half full.
    fn size(&self, n_tokens: u32) -> u32 {
        let at = self.sizes.iter().position(|&size| size >= n_tokens).unwrap_or(self.sizes.len() - 1);
        match self.sizes[..at].last() {
            Some(&shorter) if shorter >= LONG_PASS && n_tokens <= self.sizes[at] / 2 => shorter,
            _ => self.sizes[at],
        }
    }

    /// The recorded pass of a size, with what comes behind its layers.
    fn pass(&self, size: u32, ending: Ending) -> Result<&Recording, Error> {
        self.recordings.get(&(ending, size)).ok_or_else(|| Error::Operand {
            kernel: "session",
            operand: "pass",
            expected: "one that was recorded".into(),
            found: format!("{ending:?} of {size}"),
        })
    }
}

/// A sequence of tokens and its cached keys and values. One generation runs at a time.
pub struct Session {
    model: Model,
    passes: Passes,
    /// The sequence so far.
    tokens: Vec<u32>,
    /// Positions that submitted passes have filled.
    cached: usize,
}

/// A copy of a session's cache and tokens, on the device.
pub struct Snapshot {
    cache: KvCache,
    tokens: Vec<u32>,
    cached: usize,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model ended the text.
    Eos,
    /// A stop text came up.
    StopText,
    /// As many tokens as asked for.
    MaxTokens,
    /// No position is left in the context.
    ContextFull,
    /// [`Generation::cancel`] was called.
    Cancelled,
}

/// Tokens and time of a part of a generation.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Stats {
    /// Tokens computed.
    pub tokens: usize,
    /// Time they took.
    pub seconds: f64,
}

impl Stats {
    fn add(&mut self, tokens: usize, time: Duration) {
        self.tokens += tokens;
        self.seconds += time.as_secs_f64();
    }

    /// Tokens per second; 0 if there were none.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 }
    }
}

/// A generated token and the text that it completes, which may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Token id.
    pub id: u32,
    /// Whole characters that are certain now.
    pub text: String,
}

impl Session {
    pub(super) fn new(model: &Model) -> Result<Session, Error> {
        let passes = Passes::declare(model.device(), model.llama(), model.rope(), model.max_pass())?;
        Ok(Session { model: model.clone(), passes, tokens: Vec::new(), cached: 0 })
    }

    pub(crate) fn cache(&self) -> &KvCache {
        &self.passes.cache
    }

    pub(super) fn io(&self) -> &PassTensors {
        &self.passes.io
    }

    /// The model this session belongs to.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The sequence so far: prompts and generated tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Memory of the weights and this session.
    pub fn plan(&self) -> MemoryPlan {
        self.passes.plan()
    }

    /// Dispatches of one decode pass of a greedy generation.
    pub fn decode_dispatches(&self) -> usize {
        self.passes.pass(1, Ending::Greedy { penalize: false }).map_or(0, Recording::n_dispatches)
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.tokens.truncate(n);
        self.cached = self.n_cached();
    }

    /// Copies the session's state.
    ///
    /// # Errors
    /// Errors of [`Device::copy`].
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        // Before the first pass the cache has no memory to copy from.
        self.passes.cache.tensors().try_for_each(|tensor| self.model.device().allocate(tensor))?;
        let cache = KvCache::declare(self.model.config(), self.passes.cache.capacity())?;
        cache.copy_from(self.model.device(), &self.passes.cache)?;
        Ok(Snapshot { cache, tokens: self.tokens.clone(), cached: self.n_cached() })
    }

    /// Goes back to a copied state.
    ///
    /// # Errors
    /// [`Error::Shape`] if the snapshot is of another shape of model or context; errors of [`Device::copy`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), Error> {
        self.passes.cache.copy_from(self.model.device(), &snapshot.cache)?;
        self.tokens = snapshot.tokens.clone();
        self.cached = snapshot.cached;
        Ok(())
    }

    /// Adds tokens to the sequence and returns the logits behind the last one, `[V]`.
    ///
    /// # Errors
    /// [`Error::ContextFull`] if they do not fit, [`Error::Tokenizer`] for an unknown id, errors of [`Device::run`].
    pub async fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.append(ids, ContextPolicy::Stop)?;
        let never = AtomicBool::new(false);
        let words = match self.feed(Ending::Logits, &never).await? {
            Some((_, pending)) => pending.await?,
            None => Vec::new(),
        };
        let mut logits: Vec<f32> = bytemuck::cast_vec(words);
        logits.truncate(self.model.config().vocab_size as usize);
        Ok(logits)
    }

    /// Begins a generation behind `prompt`. An empty session gets the tokens that the model expects in front.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is no tokenizer, [`Error::Option`] for options out of range,
    /// [`Error::ContextFull`] if the prompt does not fit.
    pub fn generate(&mut self, prompt: &str, options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        let encode = EncodeOptions { add_special: self.tokens.is_empty(), parse_special: false };
        let ids = self.model.encodings()?.encode(prompt, encode)?;
        self.generate_ids(&ids, options)
    }

    /// Begins a generation behind token ids.
    ///
    /// # Errors
    /// As [`Session::generate`]; [`Error::Tokenizer`] also for an id outside the vocabulary.
    pub fn generate_ids(&mut self, ids: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        options.check()?;
        self.append(ids, options.context_policy)?;
        Generation::new(self, options)
    }

    /// Makes `ids` the whole sequence and begins a generation behind it. What the session has computed of its beginning
    /// is kept, so that a conversation that grows costs only what is new.
    ///
    /// # Errors
    /// As [`Session::generate_ids`].
    pub fn generate_from(&mut self, ids: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, Error> {
        let known = self.tokens.iter().zip(ids).take_while(|(known, id)| known == id).count();
        self.truncate(known);
        self.generate_ids(ids.get(known..).unwrap_or_default(), options)
    }

    /// Refuses ids outside the vocabulary, and an empty sequence.
    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        let vocab_size = self.model.config().vocab_size;
        let error = |found: String| Error::Tokenizer {
            field: "prompt".into(),
            expected: format!("token ids below {vocab_size}"),
            found,
        };
        if self.tokens.is_empty() && ids.is_empty() {
            return Err(error("no tokens at all".into()));
        }
        if let Some(id) = ids.iter().find(|&&id| id >= vocab_size) {
            return Err(error(format!("the id {id}")));
        }
        let (needed, capacity) = (self.tokens.len() + ids.len(), self.capacity());
        if needed > capacity { Err(Error::ContextFull { needed, capacity }) } else { Ok(()) }
    }

    /// Tokens whose keys and values are cached. Passes that were submitted and whose token was never read leave more in
    /// the cache than the sequence has tokens.
    fn n_cached(&self) -> usize {
        self.cached.min(self.tokens.len())
    }

    /// Goes over to the same model on another device, where nothing is cached yet.
    fn move_to(&mut self, model: &Model) -> Result<(), Error> {
        let same = model.config() == self.model.config() && model.context_length() == self.model.context_length();
        if !same {
            return Err(Error::Operand {
                kernel: "session",
                operand: "model",
                expected: format!("`{}` with {} positions", self.model.name(), self.model.context_length()),
                found: format!("`{}` with {}", model.name(), model.context_length()),
            });
        }
        self.passes = Passes::declare(model.device(), model.llama(), model.rope(), model.max_pass())?;
        self.model = model.clone();
        self.cached = 0;
        Ok(())
    }

    fn capacity(&self) -> usize {
        self.passes.cache.capacity() as usize
    }

    /// Adds tokens to the sequence, making room if the policy says so.
    fn append(&mut self, ids: &[u32], policy: ContextPolicy) -> Result<(), Error> {
        match self.check_ids(ids) {
            Err(Error::ContextFull { .. }) if policy == ContextPolicy::Slide => {
                self.tokens.extend_from_slice(ids);
                self.slide();
                Ok(())
            }
            Err(error) => Err(error),
            Ok(()) => {
                self.tokens.extend_from_slice(ids);
                Ok(())
            }
        }
    }

    /// Keeps the first token and the latest half of a context; positions change, so all of it is computed anew.
    fn slide(&mut self) {
        let keep = (self.capacity() / 2).max(1);
        if self.tokens.len() > keep {
            let from = self.tokens.len() - (keep - 1);
            self.tokens.drain(1..from);
        }
        self.cached = 0;
    }

    /// Runs all tokens that are not cached yet and returns how many those are. The last pass has the ending, and what it
    /// gives is read behind it: logits, or the state with the chosen token. `None` if it was cancelled between passes.
    async fn feed(&mut self, ending: Ending, cancelled: &AtomicBool) -> Result<Option<(usize, Pending)>, Error> {
        let device = self.model.device().clone();
        self.passes.record(&device, self.model.llama(), ending)?;
        // If everything is cached, the choice behind the last token is wanted again: compute that token once more.
        self.cached = self.n_cached().min(self.tokens.len() - 1);
        let n_fed = self.tokens.len() - self.cached;
        let io = &self.passes.io;
        device.write(&io.tokens, self.cached, &self.tokens[self.cached..])?;
        loop {
            let n_left = (self.tokens.len() - self.cached) as u32;
            let size = self.passes.size(n_left);
            let n_tokens = n_left.min(size);
            io.state.set(&device, self.cached as u32, n_tokens)?;
            self.cached += n_tokens as usize;
            if self.cached >= self.tokens.len() {
                let result = if ending == Ending::Logits { &io.logits } else { io.state.tensor() };
                let pending = device.run_and_read(self.passes.pass(size, ending)?, result)?;
                return Ok(Some((n_fed, pending)));
            }
            device.run(self.passes.pass(size, Ending::Cache)?)?;
            pause().await;
            if cancelled.load(Ordering::Relaxed) {
                return Ok(None);
            }
        }
    }

    fn write_sampling(&self, options: &GenerateOptions) -> Result<(), Error> {
        let sampling = options.sampling();
        self.model.device().write(&self.passes.io.sampling, 0, bytemuck::cast_slice::<_, u32>(&[sampling]))
    }

    /// Submits `n` more passes, each on the token that the device chose last.
    fn steps(&mut self, ending: Ending, n: u32) -> Result<Pending, Error> {
        let recording = self.passes.pass(1, ending)?;
        let pending = self.model.device().replay_and_read(recording, self.passes.io.state.tensor(), n)?;
        self.cached += n as usize;
        Ok(pending)
    }
}

/// Ends a generation from elsewhere; the token in progress is the last.
#[derive(Clone, Debug, Default)]
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Ends the generation: [`Generation::next`] gives `None` soon.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A generation in progress: call [`Generation::next`] until it gives `None`. Dropping it keeps in the session what was
/// generated so far.
pub struct Generation<'s> {
    session: &'s mut Session,
    options: GenerateOptions,
    ending: Ending,
    decoder: Option<StreamDecoder>,
    stop_filter: StopFilter,
    eos_ids: Vec<u32>,
    /// Submissions that have not been read, in order, and how many tokens each gives.
    pending: VecDeque<(Pending, usize)>,
    /// Tokens that were read and have not been given out.
    chosen: VecDeque<u32>,
    /// Whether the device's state is that of the session, so that the next pass can simply follow.
    running: bool,
    n_generated: usize,
    stop_reason: Option<StopReason>,
    /// Whether an error was the end.
    failed: bool,
    cancelled: CancelHandle,
    prefill: Stats,
    decode: Stats,
    profile: Option<HashMap<&'static str, (u64, Duration)>>,
}

impl<'s> Generation<'s> {
    fn new(session: &'s mut Session, options: &GenerateOptions) -> Result<Self, Error> {
        let tokenizer = session.model.tokenizer().ok();
        let decoder = tokenizer.map(|tokenizer| {
            let begins_text = session.tokens.iter().all(|&id| tokenizer.is_control(id));
            if begins_text { tokenizer.decoder() } else { tokenizer.decoder().continuing() }
        });
        let eos_ids = match options.ignore_eos {
            true => Vec::new(),
            false => tokenizer.iter().flat_map(|t| t.eos_ids()).chain(&options.stop_ids).copied().collect(),
        };
        Ok(Generation {
            ending: Ending::of(&options.sampling()),
            decoder,
            stop_filter: StopFilter::new(&options.stop),
            eos_ids,
            pending: VecDeque::new(),
            chosen: VecDeque::new(),
            running: false,
            n_generated: 0,
            stop_reason: None,
            failed: false,
            cancelled: CancelHandle::default(),
            prefill: Stats::default(),
            decode: Stats::default(),
            profile: None,
            options: options.clone(),
            session,
        })
    }

    /// Times every kernel of the decode passes; they then run one at a time. See [`Generation::profile`].
    pub fn enable_profile(&mut self) {
        self.profile = Some(HashMap::new());
    }

    /// Calls and total time of each kernel since [`Generation::enable_profile`], the slowest first.
    pub fn profile(&self) -> Vec<(&'static str, u64, Duration)> {
        let rows = self.profile.iter().flatten().map(|(&label, &(calls, time))| (label, calls, time));
        let mut rows: Vec<_> = rows.collect();
        rows.sort_by_key(|&(label, _, time)| (std::cmp::Reverse(time), label));
        rows
    }

    /// The session that generates.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Why the generation ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Tokens and time of the prompt.
    pub fn prefill(&self) -> Stats {
        self.prefill
    }

    /// Tokens and time of the generated tokens after the first, whose time is the prompt's.
    pub fn decode(&self) -> Stats {
        self.decode
    }

    /// Ends the generation: [`Generation::next`] gives `None` from now on.
    pub fn cancel(&mut self) {
        self.stop_reason.get_or_insert(StopReason::Cancelled);
    }

    /// Ends the generation from elsewhere, for instance while [`Generation::next`] computes a long prompt.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancelled.clone()
    }

    /// Goes on after [`Error::DeviceLost`] with the same tokens, on the same model loaded anew on another device.
    /// Everything is computed again there, and no token is given out twice. A generation that ended otherwise stays ended.
    ///
    /// # Errors
    /// [`Error::Operand`] if it is not the same model with the same context length.
    pub fn resume(&mut self, model: &Model) -> Result<(), Error> {
        if self.failed {
            self.session.move_to(model)?;
            self.running = false;
            self.failed = false;
            self.stop_reason = None;
        }
        Ok(())
    }

    /// The next token, or `None` at the end. The last piece also has the text that was held back because it might have
    /// begun a stop text or been half a character.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if no token could be chosen, errors of [`Device::run`]. The generation is over then.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        if self.stop_reason.is_some() {
            return None;
        }
        match self.advance().await {
            Ok(piece) => piece.map(Ok),
            Err(error) => {
                self.stop_reason = Some(StopReason::Cancelled);
                self.failed = true;
                self.pending.clear();
                self.chosen.clear();
                Some(Err(error))
            }
        }
    }

    /// Passes every piece to `on_piece` as it is produced, until the generation ends or `on_piece` breaks it off.
    ///
    /// # Errors
    /// As [`Generation::next`].
    pub async fn for_each(&mut self, mut on_piece: impl FnMut(Piece) -> ControlFlow<()>) -> Result<StopReason, Error> {
        while let Some(piece) = self.next().await {
            if on_piece(piece?).is_break() {
                self.cancel();
            }
        }
        Ok(self.stop_reason.unwrap_or(StopReason::Cancelled))
    }

    async fn advance(&mut self) -> Result<Option<Piece>, Error> {
        if self.n_generated >= self.options.max_tokens {
            self.stop_reason = Some(StopReason::MaxTokens);
            return Ok(None);
        }
        let start = Instant::now();
        let n_fed = if self.running { Some(0) } else { self.feed().await? };
        let Some(n_fed) = n_fed.filter(|_| !self.cancelled.0.load(Ordering::Relaxed)) else {
            self.stop_reason = Some(StopReason::Cancelled);
            return Ok(None);
        };
        if self.chosen.is_empty() {
            self.run_ahead()?;
            let words = match self.pending.pop_front() {
                Some((pending, _)) => pending.await?,
                None => self.step_profiled().await?,
            };
            self.chosen.extend(StepState::tokens(&words));
        }
        let id = self.chosen.pop_front();
        let pos = self.session.tokens.len() as u32;
        let id = id.filter(|&id| id != NON_FINITE).ok_or(Error::NonFinite { pos })?;
        if n_fed > 0 {
            self.prefill.add(n_fed, start.elapsed());
        } else {
            self.decode.add(1, start.elapsed());
        }
        self.session.tokens.push(id);
        self.n_generated += 1;
        self.piece(id).map(Some)
    }

    /// Runs what is not cached, up to the first choice of a token. Returns how many tokens that were, or `None` if the
    /// generation was cancelled meanwhile.
    async fn feed(&mut self) -> Result<Option<usize>, Error> {
        self.session.write_sampling(&self.options)?;
        let Some((n_fed, pending)) = self.session.feed(self.ending, &self.cancelled.0).await? else { return Ok(None) };
        self.pending.push_back((pending, 1));
        self.running = true;
        Ok(Some(n_fed))
    }

    /// Submits passes behind those that are read next, as far as they can be needed. All tokens that were read have been
    /// given out.
    fn run_ahead(&mut self) -> Result<(), Error> {
        // The CPU runs a pass when it is submitted, so there is nothing to gain; a profile runs them one at a time.
        let model = &self.session.model;
        let (depth, n_each) = match (model.device().is_gpu(), &self.profile) {
            (true, None) => (IN_FLIGHT, self.options.tokens_per_submit.unwrap_or(model.tokens_per_submit())),
            (false, None) => (1, 1),
            (_, Some(_)) => (0, 0),
        };
        let mut wanted = self.options.max_tokens - self.n_generated;
        wanted -= self.pending.iter().map(|(_, n)| n).sum::<usize>();
        while self.pending.len() < depth {
            let n = wanted.min(self.session.capacity() - self.session.cached).min(n_each as usize);
            if n == 0 {
                break;
            }
            self.pending.push_back((self.session.steps(self.ending, n as u32)?, n));
            wanted -= n;
        }
        Ok(())
    }

    /// Runs one pass with a clock around each kernel and gives the state behind it.
    async fn step_profiled(&mut self) -> Result<Vec<u32>, Error> {
        let session = &mut *self.session;
        let device = session.model.device();
        let times = device.run_profiled(session.passes.pass(1, self.ending)?).await?;
        session.cached += 1;
        for (label, time) in times {
            let (calls, total) = self.profile.get_or_insert_default().entry(label).or_default();
            *calls += 1;
            *total += time;
        }
        device.read(session.passes.io.state.tensor()).await
    }

    /// The text that a token completes, and whether the generation ends with it.
    fn piece(&mut self, id: u32) -> Result<Piece, Error> {
        let is_full = self.session.tokens.len() > self.session.capacity();
        if self.eos_ids.contains(&id) {
            self.stop_reason = Some(StopReason::Eos);
        }
        let mut text = match &mut self.decoder {
            Some(decoder) => decoder.push(id)?,
            None => String::new(),
        };
        let stopped;
        (text, stopped) = self.stop_filter.push(&text);
        if stopped {
            self.stop_reason = Some(StopReason::StopText);
            return Ok(Piece { id, text });
        }
        if self.stop_reason.is_none() && self.n_generated >= self.options.max_tokens {
            self.stop_reason = Some(StopReason::MaxTokens);
        } else if self.stop_reason.is_none() && is_full {
            match self.options.context_policy {
                ContextPolicy::Stop => self.stop_reason = Some(StopReason::ContextFull),
                // All passes have been read: none is submitted when the cache is full.
                ContextPolicy::Slide => {
                    self.session.slide();
                    self.running = false;
                }
            }
        }
        if self.stop_reason.is_some() {
            let rest = self.decoder.as_mut().map(StreamDecoder::finish).unwrap_or_default();
            let (rest, stopped) = self.stop_filter.push(&rest);
            text += &rest;
            if !stopped {
                text += &self.stop_filter.finish();
            }
        }
        Ok(Piece { id, text })
    }
}
