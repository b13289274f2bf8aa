//! A speech model on a device: the encoder once for each window, then the decoder token by token, of several windows at once.
//! Keys and values of each window are in pages of its own, so that a pass takes tokens of any of them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use web_time::Instant;

use super::options::{MAX_BATCH, TranscriberOptions};
use crate::cpu::cached::read_row;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{AttentionConfig, BatchRow, CachedKeys, KvType, PAGE, scale};
use crate::load::{SpeechFile, WeightUploader, Widened};
use crate::memory::Limit;
use crate::model::{
    CrossTensors, Ending, KvCache, PassTensors, SoundTensors, SpeechConfig, SpeechEncoder, Tap, Transformer,
    WeightSource, Weights,
};
use crate::platform::pause;
use crate::recording::{BatchInvariance, MemoryPlan, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::record_tested;

/// A speech model on a device, without its tokenizer. Clones share the weights.
#[derive(Clone)]
pub struct SpeechModel {
    inner: Arc<SpeechInner>,
}

struct SpeechInner {
    device: Device,
    config: SpeechConfig,
    encoder: SpeechEncoder,
    decoder: Transformer,
    options: TranscriberOptions,
}

impl SpeechModel {
    /// Loads the speech model of a Hugging Face folder.
    ///
    /// # Errors
    /// Those of [`SpeechFile::open`] and [`SpeechModel::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: TranscriberOptions) -> Result<SpeechModel, Error> {
        let path = path.as_ref();
        SpeechModel::from_file(device, &SpeechFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Uploads a speech model's weights.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape, [`Error::Memory`] above
    /// [`TranscriberOptions::memory_limit`]; errors of the device.
    pub fn from_file(device: &Device, file: &SpeechFile, options: TranscriberOptions) -> Result<SpeechModel, Error> {
        let (model, mut uploader) = SpeechModel::declare(device, file, options)?;
        uploader.take_all(model.device(), &file.files, None)?;
        Ok(model)
    }

    /// The model without its weights.
    pub(super) fn declare(
        device: &Device,
        file: &SpeechFile,
        options: TranscriberOptions,
    ) -> Result<(SpeechModel, WeightUploader), Error> {
        // Rounding would move timestamps.
        let device = device.exact();
        let (target, config) = (device.target(), file.config.clone());
        let widened = Widened(&file.encoder);
        let source: &dyn WeightSource = if device.is_gpu() { &file.encoder } else { &widened };
        let encoder = SpeechEncoder::declare(&target, &config, source)?;
        let weights = Weights::declare(&target, &config.decoder, &file.decoder)?;
        let decoder = Transformer::declare(config.decoder.clone(), weights, config.decoder.max_seq_len)?;
        let of_decoder = WeightUploader::of_all(&file.decoder, decoder.tensor_slots())?;
        let uploader = WeightUploader::of_all(&file.encoder, encoder.tensor_slots())?.and(of_decoder);
        let inner = SpeechInner { device: device.clone(), config, encoder, decoder, options };
        let model = SpeechModel { inner: Arc::new(inner) };
        model.check_memory(1, 0)?;
        Ok((model, uploader))
    }

    /// Refuses the model with a session of so many windows if they do not fit. `held_bytes`: of the weights and the session that
    /// are there already.
    ///
    /// # Errors
    /// [`Error::Memory`]; as [`SpeechModel::session`].
    pub(super) fn check_memory(&self, n_windows: usize, held_bytes: u64) -> Result<(), Error> {
        let SpeechInner { device, options, .. } = &*self.inner;
        let plan = self.plan(n_windows)?;
        let available = device.available_bytes().map(|bytes| bytes.saturating_add(held_bytes));
        let Some(limit) = Limit::of(options.memory_limit, available) else { return Ok(()) };
        if plan.total_bytes() <= limit.bytes {
            return Ok(());
        }
        let hint = if n_windows > 1 { "use a smaller batch" } else { "use a smaller model" };
        Err(plan.refused(limit.bytes, limit.explained(hint.into())))
    }

    /// The model's shape.
    pub fn config(&self) -> &SpeechConfig {
        &self.inner.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// A session with tensors of its own, for so many windows side by side.
    ///
    /// # Errors
    /// [`Error::Operand`] or [`Error::Shape`] for no windows or more than [`MAX_BATCH`], or if a tensor would be too large.
    pub fn session(&self, n_windows: usize) -> Result<SpeechSession, Error> {
        let SpeechInner { device, config, encoder, options, .. } = &*self.inner;
        if !(1..=MAX_BATCH).contains(&n_windows) {
            return Err(wrong("n_windows", format!("1 to {MAX_BATCH}"), &n_windows));
        }
        let (decoder, n) = (&config.decoder, n_windows as u32);
        let context = decoder.max_seq_len;
        let (n_pages, max_pass) = (context.div_ceil(PAGE), context.next_power_of_two());
        let cross = CrossTensors::declare(decoder, options.kv_type, [n, config.n_rows])?;
        let with_cross = |io| PassTensors { cross: Some(cross.clone()), ..io };
        let pages = [n.saturating_mul(n_pages), n, context];
        Ok(SpeechSession {
            model: self.clone(),
            sound: encoder.declare_sound(&device.target())?,
            cache: KvCache::declare_shared(decoder, 0..decoder.n_layers(), options.kv_type, pages, None)?,
            several: with_cross(PassTensors::declare_prompts(decoder, n_pages, max_pass, false)?),
            each: with_cross(PassTensors::declare_rows(decoder, [n, n, n_pages], false)?),
            cross,
            workspace: Workspace::default(),
            hearing: None,
            passes: BTreeMap::new(),
            inspected: BTreeMap::new(),
            n_tokens: vec![0; n_windows],
            read_each: Vec::new(),
            last_turn: None,
        })
    }

    /// Memory of the weights, a session for so many windows and its passes. Allocates nothing.
    ///
    /// # Errors
    /// As [`SpeechModel::session`].
    pub fn plan(&self, n_windows: usize) -> Result<MemoryPlan, Error> {
        let mut session = self.session(n_windows)?;
        let mut workspace = Workspace::default();
        let hearing = session.record_hearing(&mut workspace)?;
        let size = session.several.stream.shape()[0];
        let mut pass = |pass| session.record_logits(pass, &mut workspace);
        let passes = [pass(Pass::Several(size))?, pass(Pass::Each(n_windows as u32))?];
        session.workspace = workspace;
        let inner = &self.inner;
        let kept = inner.encoder.tensors().chain(inner.decoder.tensors());
        let kept = kept.chain(session.cache.tensors()).chain(session.cross.tensors());
        Ok(MemoryPlan::of([&hearing].into_iter().chain(&passes), kept))
    }

    /// The rows before the encoder's first layer and after each, `[S, C]`, for inspection and tests.
    ///
    /// # Errors
    /// As [`SpeechSession::hear`].
    pub async fn trace(&self, frames: &[f32]) -> Result<Vec<Vec<f32>>, Error> {
        let inner = &*self.inner;
        let session = self.session(1)?;
        session.check(frames)?;
        let record = || {
            let mut layers = Vec::new();
            let mut tap = |rec: &mut Recorder, h: &Tensor| {
                let kept = Tensor::declare("hidden", Role::Activations, h.shape(), DType::F32)?;
                scale(rec, h, &kept, 1.0)?;
                layers.push(kept);
                Ok(())
            };
            let recording = session.record_encoder(&mut Workspace::default(), false, &mut tap)?;
            Ok((recording, layers))
        };
        let (recording, layers) = record_tested(&inner.device, record, |(recording, _)| recording).await?;
        session.sound.set_rows(&inner.device)?;
        inner.device.write(&session.sound.frames, 0, frames)?;
        inner.device.run(&recording)?;
        let mut values = Vec::new();
        for tensor in &layers {
            values.push(inner.device.read(tensor).await?);
        }
        Ok(values)
    }
}

/// Windows of sound, and the tokens after each.
pub struct SpeechSession {
    model: SpeechModel,
    sound: SoundTensors,
    cross: CrossTensors,
    cache: KvCache,
    /// Of a pass over several tokens of a window.
    several: PassTensors,
    /// Of a pass over a token of each of some windows.
    each: PassTensors,
    /// Passes run one at a time, so they share memory for temporaries.
    workspace: Workspace,
    /// The encoder, and the keys and values of its rows.
    hearing: Option<Recording>,
    /// Passes of the decoder.
    passes: BTreeMap<Pass, Recording>,
    /// Passes whose attention weights are read, by number of tokens.
    inspected: BTreeMap<u32, InspectedPass>,
    /// Tokens of each window.
    n_tokens: Vec<u32>,
    /// The windows of the last pass over a token of each.
    read_each: Vec<u32>,
    /// When a browser had its last turn.
    last_turn: Option<Instant>,
}

/// A pass of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    /// Over so many tokens of a window, padding included.
    Several(u32),
    /// Over a token of each of so many windows.
    Each(u32),
}

/// A pass, with the queries of the layers whose attention weights are read.
struct InspectedPass {
    recording: Recording,
    queries: BTreeMap<usize, Tensor>,
}

impl SpeechSession {
    /// Encodes a window, `[frames, bands]`. Its tokens start again.
    ///
    /// # Errors
    /// [`Error::Operand`] for another number of values, or a window that the session does not have; errors of the device.
    pub async fn hear(&mut self, window: usize, frames: &[f32]) -> Result<(), Error> {
        self.check_window(window)?;
        self.check(frames)?;
        let device = self.model.device().clone();
        if self.hearing.is_none() {
            let mut workspace = std::mem::take(&mut self.workspace);
            let record = || self.record_hearing(&mut workspace);
            let recorded = record_tested(&device, record, |recording| recording).await?;
            self.workspace = workspace;
            self.sound.set_rows(&device)?;
            self.hearing = Some(recorded);
        }
        self.rewind(window, 0);
        self.cross.write_to(&device, window as u32)?;
        device.write(&self.sound.frames, 0, frames)?;
        if let Some(recording) = &self.hearing {
            run(&device, recording, &mut self.last_turn).await?;
        }
        Ok(())
    }

    /// The encoder's rows of the window that was heard last, `[S, C]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn rows(&self) -> Result<Vec<f32>, Error> {
        self.model.device().read(&self.sound.rows).await
    }

    /// Appends tokens to a window and returns the logits of the next.
    ///
    /// # Errors
    /// [`Error::ContextFull`] if they are too many, [`Error::Operand`] for none, one outside the vocabulary, or a window that the
    /// session does not have, [`Error::NonFinite`] if a logit is no number; errors of the device.
    pub async fn logits(&mut self, window: usize, ids: &[u32]) -> Result<Vec<f32>, Error> {
        if let [id] = *ids {
            return Ok(self.logits_of_each(&[(window, id)]).await?.concat());
        }
        self.check_ids(window, ids)?;
        let device = self.model.device().clone();
        self.write_ids(&device, window, ids)?;
        let logits = self.run_pass(&device, Pass::Several((ids.len() as u32).next_power_of_two())).await?;
        self.n_tokens[window] += ids.len() as u32;
        self.finite(window, logits)
    }

    /// Appends a token to each of these windows, all in one pass, and returns the logits of the next
    /// of each.
    ///
    /// # Errors
    /// As [`SpeechSession::logits`]; [`Error::Operand`] for a window that is there twice.
    pub async fn logits_of_each(&mut self, tokens: &[(usize, u32)]) -> Result<Vec<Vec<f32>>, Error> {
        let mut seen = vec![false; self.n_windows()];
        for &(window, id) in tokens {
            self.check_ids(window, &[id])?;
            if std::mem::replace(&mut seen[window], true) {
                return Err(wrong("window", "each window once".into(), &format!("{window} twice")));
            }
        }
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let device = self.model.device().clone();
        let windows: Vec<u32> = tokens.iter().map(|&(window, _)| window as u32).collect();
        if self.read_each != windows {
            self.cross.read_each_from(&device, &windows)?;
            self.read_each.clone_from(&windows);
        }
        // The first row says how many there are.
        let n_rows = std::iter::once(tokens.len() as u32).chain(std::iter::repeat(1));
        let row = |(n_tokens, &(window, token))| BatchRow { n_tokens, token, ..self.row(window) };
        let rows: Vec<BatchRow> = n_rows.zip(tokens).map(row).collect();
        self.each.state.set_rows(&device, &rows)?;
        let logits = self.run_pass(&device, Pass::Each(tokens.len() as u32)).await?;
        tokens.iter().for_each(|&(window, _)| self.n_tokens[window] += 1);
        let each = logits.chunks_exact(logits.len() / tokens.len());
        each.zip(tokens).map(|(logits, &(window, _))| self.finite(window, logits.to_vec())).collect()
    }

    /// Runs a pass, whose tokens are written, and reads its logits.
    async fn run_pass(&mut self, device: &Device, pass: Pass) -> Result<Vec<f32>, Error> {
        if !self.passes.contains_key(&pass) {
            let mut workspace = std::mem::take(&mut self.workspace);
            let record = || self.record_logits(pass, &mut workspace);
            let recorded = record_tested(device, record, |recording| recording).await?;
            self.workspace = workspace;
            self.passes.insert(pass, recorded);
        }
        if let Some(recording) = self.passes.get(&pass) {
            run(device, recording, &mut self.last_turn).await?;
        }
        match pass {
            Pass::Several(_) => device.read(&self.several.logits).await,
            Pass::Each(n) => device.read(&self.each.logits.first_rows(n)?).await,
        }
    }

    /// Attention weights of heads, given as layers and heads, at each of these tokens, which replace a window's: over the
    /// first `n_rows` of the encoder's rows, as if there were no others. Calls `each` with those of each head,
    /// `[tokens, n_rows]`, layer by layer.
    ///
    /// # Errors
    /// As [`SpeechSession::logits`]; [`Error::Operand`] for a head that the decoder does not have, and for no rows or too many.
    pub async fn attention_weights(
        &mut self,
        window: usize,
        ids: &[u32],
        (heads, n_rows): (&[[u32; 2]], usize),
        each: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), Error> {
        self.rewind(window, 0);
        self.check_ids(window, ids)?;
        self.check_heads(heads, n_rows)?;
        let device = self.model.device().clone();
        let size = (ids.len() as u32).next_power_of_two();
        let layers: BTreeSet<usize> = heads.iter().map(|&[layer, _]| layer as usize).collect();
        if !self.inspected.get(&size).is_some_and(|pass| pass.queries.keys().eq(&layers)) {
            let pass = self.inspected_pass(&device, size, &layers).await?;
            self.inspected.insert(size, pass);
        }
        self.write_ids(&device, window, ids)?;
        let Some(pass) = self.inspected.get(&size) else { return Ok(()) };
        run(&device, &pass.recording, &mut self.last_turn).await?;
        self.n_tokens[window] += ids.len() as u32;
        let mut weights = vec![0.0; ids.len() * n_rows];
        for (&layer, queries) in &pass.queries {
            let Some((cached, first)) = self.cross.keys(layer, window as u32) else { continue };
            let queries = device.read::<f32>(queries).await?;
            let attention = self.model.config().decoder.blocks[layer].attention.kernel(false);
            for &[_, head] in heads.iter().filter(|&&[of, _]| of as usize == layer) {
                let words = words_of(cached, (&attention, head as usize), first..first + n_rows);
                let keys = by_element(cached.kind, &device.read_part(&cached.k, words).await?, &attention);
                weigh(&queries, &keys, (&attention, head as usize), &mut weights);
                if weights.iter().any(|weight| weight.is_nan()) {
                    return Err(Error::NonFinite { pos: self.n_tokens[window] - 1 });
                }
                each(&mut weights);
            }
        }
        Ok(())
    }

    async fn inspected_pass(
        &mut self,
        device: &Device,
        size: u32,
        layers: &BTreeSet<usize>,
    ) -> Result<InspectedPass, Error> {
        let blocks = &self.model.config().decoder.blocks;
        let tensor = |layer: usize| {
            let shape = [size, blocks[layer].attention.q_dim()];
            Ok((layer, Tensor::declare("queries", Role::Activations, &shape, DType::F32)?))
        };
        let queries = layers.iter().map(|&layer| tensor(layer)).collect::<Result<BTreeMap<_, _>, Error>>()?;
        let cross = Some(self.cross.with_queries(queries.clone()));
        let io = PassTensors { cross, ..self.several.clone() };
        let mut workspace = std::mem::take(&mut self.workspace);
        let record = || self.record_pass((&io, size), Ending::Cache, &mut workspace);
        let recording = record_tested(device, record, |recording| recording).await?;
        self.workspace = workspace;
        Ok(InspectedPass { recording, queries })
    }

    /// Forgets the tokens of a window after its first `n`.
    pub fn rewind(&mut self, window: usize, n: usize) {
        if let Some(n_tokens) = self.n_tokens.get_mut(window) {
            *n_tokens = u32::try_from(n).unwrap_or(u32::MAX).min(*n_tokens);
        }
    }

    /// Windows that the session has.
    pub fn n_windows(&self) -> usize {
        self.n_tokens.len()
    }

    /// Tokens of a window.
    pub fn n_tokens(&self, window: usize) -> usize {
        self.n_tokens.get(window).map_or(0, |&n| n as usize)
    }

    /// Tokens that fit after a window.
    pub fn capacity(&self) -> usize {
        self.model.config().decoder.max_seq_len as usize
    }

    /// Number of dispatches of the encoder's pass over a window, and of the decoder's over a token of each of the windows.
    ///
    /// # Errors
    /// As [`SpeechModel::session`].
    pub fn n_dispatches(&self) -> Result<[usize; 2], Error> {
        let mut workspace = Workspace::default();
        let hearing = self.record_hearing(&mut workspace)?;
        let pass = self.record_logits(Pass::Each(self.n_tokens.len() as u32), &mut workspace)?;
        Ok([hearing, pass].map(|pass| pass.n_dispatches()))
    }

    fn check_window(&self, window: usize) -> Result<(), Error> {
        match window < self.n_windows() {
            true => Ok(()),
            false => Err(wrong("window", format!("below {}", self.n_windows()), &window)),
        }
    }

    fn check_ids(&self, window: usize, ids: &[u32]) -> Result<(), Error> {
        self.check_window(window)?;
        let (vocab_size, capacity) = (self.model.config().decoder.vocab_size, self.capacity());
        let needed = self.n_tokens(window) + ids.len();
        if needed > capacity {
            return Err(Error::ContextFull { needed, capacity });
        }
        if let Some(id) = ids.iter().find(|&&id| id >= vocab_size) {
            return Err(wrong("ids", format!("below {vocab_size}"), id));
        }
        if ids.is_empty() {
            return Err(wrong("ids", "at least one".into(), &"none"));
        }
        Ok(())
    }

    fn check_heads(&self, heads: &[[u32; 2]], n_rows: usize) -> Result<(), Error> {
        let config = self.model.config();
        if let Some((expected, head)) = config.missing_head(heads) {
            return Err(wrong("heads", expected, &format!("{head:?}")));
        }
        let most = config.n_rows;
        match (1..=most as usize).contains(&n_rows) {
            true => Ok(()),
            false => Err(wrong("n_rows", format!("1 to {most}"), &n_rows)),
        }
    }

    fn finite(&self, window: usize, logits: Vec<f32>) -> Result<Vec<f32>, Error> {
        match logits.iter().all(|logit| logit.is_finite()) {
            true => Ok(logits),
            false => Err(Error::NonFinite { pos: self.n_tokens[window] - 1 }),
        }
    }

    /// Where the next tokens of a window are.
    fn row(&self, window: usize) -> BatchRow {
        let pages = BatchRow::pages_of(window as u32, self.capacity() as u32);
        BatchRow { pos: self.n_tokens[window], slot: window as u32, pages, ..BatchRow::default() }
    }

    /// Writes the tokens of the next pass over several of a window.
    fn write_ids(&self, device: &Device, window: usize, ids: &[u32]) -> Result<(), Error> {
        let row = self.row(window);
        device.write(&self.several.tokens, row.pos as usize, ids)?;
        self.cross.read_from(device, window as u32)?;
        self.several.state.set_rows(device, &[BatchRow { n_tokens: ids.len() as u32, ..row }])
    }

    fn check(&self, frames: &[f32]) -> Result<(), Error> {
        match frames.len() == self.sound.frames.len() {
            true => Ok(()),
            false => Err(wrong("frames", format!("{:?} values", self.sound.frames.shape()), &frames.len())),
        }
    }

    fn record_hearing(&self, workspace: &mut Workspace) -> Result<Recording, Error> {
        self.record_encoder(workspace, true, &mut |_, _| Ok(()))
    }

    fn record_encoder(&self, workspace: &mut Workspace, has_keys: bool, tap: Tap<'_>) -> Result<Recording, Error> {
        let inner = &self.model.inner;
        let mut rec = Recorder::new(inner.device.target());
        inner.encoder.record(&mut rec, &self.sound, tap)?;
        if has_keys {
            inner.decoder.record_cross_keys(&mut rec, &self.sound.rows, &self.cross)?;
        }
        Ok(rec.finish(workspace))
    }

    fn record_logits(&self, pass: Pass, workspace: &mut Workspace) -> Result<Recording, Error> {
        let io = match pass {
            Pass::Several(n) => (&self.several, n),
            Pass::Each(n) => (&self.each, n),
        };
        self.record_pass(io, Ending::Logits, workspace)
    }

    fn record_pass(
        &self,
        (io, n_tokens): (&PassTensors, u32),
        ending: Ending,
        workspace: &mut Workspace,
    ) -> Result<Recording, Error> {
        let inner = &self.model.inner;
        let mut rec = Recorder::new(inner.device.target());
        if io.state.is_batch() && self.n_windows() > 1 {
            // A window's text does not depend on how many others are left.
            let columns = (self.n_windows() as u32).min(8);
            rec = rec.with_batch_invariance(BatchInvariance::Few { columns });
        }
        inner.decoder.record_pass(&mut rec, &self.cache, io, n_tokens, ending)?;
        Ok(rec.finish(workspace))
    }
}

/// Runs a pass. On the CPU it is computed here, so a browser gets a turn before it, unless it just had one.
async fn run(device: &Device, recording: &Recording, last_turn: &mut Option<Instant>) -> Result<(), Error> {
    const TURN: Duration = Duration::from_millis(50);
    if !device.is_gpu() && last_turn.is_none_or(|turn| turn.elapsed() > TURN) {
        pause().await;
        *last_turn = Some(Instant::now());
    }
    device.run(recording)
}

fn wrong(operand: &'static str, expected: String, found: &dyn ToString) -> Error {
    Error::Operand { kernel: "speech", operand, expected, found: found.to_string() }
}

/// The words of the keys in these slots that a head reads.
fn words_of(cached: &CachedKeys, (config, head): (&AttentionConfig, usize), slots: Range<usize>) -> Range<usize> {
    let row_words = cached.kind.row_words(config.head_dim) as usize;
    let first = head * config.n_kv_heads as usize / config.n_heads as usize * cached.k.shape()[1] as usize;
    (first + slots.start) * row_words..(first + slots.end) * row_words
}

/// Keys of a head, `[D, rows]`.
fn by_element(kind: KvType, keys: &[u32], config: &AttentionConfig) -> Vec<f32> {
    let row_words = kind.row_words(config.head_dim) as usize;
    let n_rows = keys.len() / row_words;
    let mut key = vec![0.0; config.head_dim as usize];
    let mut found = vec![0.0; key.len() * n_rows];
    for (row, words) in keys.chunks_exact(row_words).enumerate() {
        read_row(kind, words, &mut key);
        key.iter().enumerate().for_each(|(element, x)| found[element * n_rows + row] = *x);
    }
    found
}

/// Softmax of a head's scores: of queries `[T, H D]` with keys `[D, rows]`, `[T, rows]`.
fn weigh(queries: &[f32], keys: &[f32], (config, head): (&AttentionConfig, usize), weights: &mut [f32]) {
    let head_dim = config.head_dim as usize;
    let n_rows = keys.len() / head_dim;
    let queries = queries.chunks_exact(head_dim).skip(head).step_by(config.n_heads as usize);
    for (query, weights) in queries.zip(weights.chunks_exact_mut(n_rows)) {
        weights.fill(0.0);
        for (q, keys) in query.iter().zip(keys.chunks_exact(n_rows)) {
            let q = config.scale * q;
            weights.iter_mut().zip(keys).for_each(|(score, key)| *score += q * key);
        }
        let highest = weights.iter().copied().fold(f32::MIN, f32::max);
        weights.iter_mut().for_each(|score| *score = (*score - highest).exp());
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
}
