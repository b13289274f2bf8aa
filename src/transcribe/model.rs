//! A speech model on a device: the encoder once for each window, then the decoder token by token.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use web_time::Instant;

use super::options::TranscriberOptions;
use crate::cpu::cached::read_row;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{AttentionConfig, KvType, scale};
use crate::load::{SpeechFile, WeightUploader, Widened};
use crate::memory::Limit;
use crate::model::{
    CrossTensors, Ending, KvCache, PassTensors, SoundTensors, SpeechConfig, SpeechEncoder, Tap, Transformer,
    WeightSource, Weights,
};
use crate::platform::pause;
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
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
        if let Some(limit) = Limit::of(options.memory_limit, device.available_bytes()) {
            let plan = model.plan()?;
            if plan.total_bytes() > limit.bytes {
                let hint = "use a smaller model".into();
                return Err(plan.refused(limit.bytes, limit.explained(hint)));
            }
        }
        Ok((model, uploader))
    }

    /// The model's shape.
    pub fn config(&self) -> &SpeechConfig {
        &self.inner.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// A session with tensors of its own.
    ///
    /// # Errors
    /// [`Error::Operand`] or [`Error::Shape`] if a tensor would be too large.
    pub fn session(&self) -> Result<SpeechSession, Error> {
        let SpeechInner { device, config, encoder, options, .. } = &*self.inner;
        let context = config.decoder.max_seq_len;
        let max_pass = context.next_power_of_two();
        let cross = CrossTensors::declare(&config.decoder, options.kv_type, config.n_rows)?;
        let io = PassTensors::declare(&config.decoder, context, max_pass)?;
        Ok(SpeechSession {
            model: self.clone(),
            sound: encoder.declare_sound(&device.target())?,
            cache: KvCache::declare(&config.decoder, options.kv_type, context, max_pass)?,
            io: PassTensors { cross: Some(cross.clone()), ..io },
            cross,
            workspace: Workspace::default(),
            hearing: None,
            passes: BTreeMap::new(),
            inspected: BTreeMap::new(),
            n_tokens: 0,
            last_turn: None,
        })
    }

    /// Memory of the weights, a session and its passes. Allocates nothing.
    ///
    /// # Errors
    /// As [`SpeechModel::session`].
    pub fn plan(&self) -> Result<MemoryPlan, Error> {
        let mut session = self.session()?;
        let mut workspace = Workspace::default();
        let hearing = session.record_hearing(&mut workspace)?;
        let size = session.io.stream.shape()[0];
        let mut pass = |size| session.record_pass(size, (&session.io, Ending::Logits), &mut workspace);
        let passes = [pass(size)?, pass(1)?];
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
        let session = self.session()?;
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

/// A window of sound, and the tokens after it.
pub struct SpeechSession {
    model: SpeechModel,
    sound: SoundTensors,
    cross: CrossTensors,
    cache: KvCache,
    io: PassTensors,
    /// Passes run one at a time, so they share memory for temporaries.
    workspace: Workspace,
    /// The encoder, and the keys and values of its rows.
    hearing: Option<Recording>,
    /// Passes of the decoder by number of tokens.
    passes: BTreeMap<u32, Recording>,
    /// Passes whose attention weights are read, in the same way.
    inspected: BTreeMap<u32, InspectedPass>,
    n_tokens: u32,
    /// When a browser had its last turn.
    last_turn: Option<Instant>,
}

/// A pass, with the queries of the layers whose attention weights are read.
struct InspectedPass {
    recording: Recording,
    queries: BTreeMap<usize, Tensor>,
}

impl SpeechSession {
    /// Encodes a window, `[frames, bands]`. Tokens start again.
    ///
    /// # Errors
    /// [`Error::Operand`] for another number of values; errors of the device.
    pub async fn hear(&mut self, frames: &[f32]) -> Result<(), Error> {
        self.check(frames)?;
        let device = self.model.device().clone();
        if self.hearing.is_none() {
            let mut workspace = std::mem::take(&mut self.workspace);
            let record = || self.record_hearing(&mut workspace);
            let recorded = record_tested(&device, record, |recording| recording).await?;
            self.workspace = workspace;
            self.sound.set_rows(&device)?;
            self.cross.set_rows(&device)?;
            self.hearing = Some(recorded);
        }
        self.n_tokens = 0;
        device.write(&self.sound.frames, 0, frames)?;
        if let Some(recording) = &self.hearing {
            run(&device, recording, &mut self.last_turn).await?;
        }
        Ok(())
    }

    /// The encoder's rows of the window, `[S, C]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn rows(&self) -> Result<Vec<f32>, Error> {
        self.model.device().read(&self.sound.rows).await
    }

    /// Appends tokens and returns the logits of the next.
    ///
    /// # Errors
    /// [`Error::ContextFull`] if they are too many, [`Error::Operand`] for none or one outside the vocabulary,
    /// [`Error::NonFinite`] if a logit is no number; errors of the device.
    pub async fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.check_ids(ids)?;
        let device = self.model.device().clone();
        let size = (ids.len() as u32).next_power_of_two();
        if !self.passes.contains_key(&size) {
            let mut workspace = std::mem::take(&mut self.workspace);
            let record = || self.record_pass(size, (&self.io, Ending::Logits), &mut workspace);
            let recorded = record_tested(&device, record, |recording| recording).await?;
            self.workspace = workspace;
            self.passes.insert(size, recorded);
        }
        self.write_ids(&device, ids)?;
        if let Some(pass) = self.passes.get(&size) {
            run(&device, pass, &mut self.last_turn).await?;
        }
        self.n_tokens += ids.len() as u32;
        let logits: Vec<f32> = device.read(&self.io.logits).await?;
        match logits.iter().all(|logit| logit.is_finite()) {
            true => Ok(logits),
            false => Err(Error::NonFinite { pos: self.n_tokens - 1 }),
        }
    }

    /// Attention weights of heads, given as layers and heads, at each of these tokens, which replace the session's: over the
    /// first `n_rows` of the encoder's rows, as if there were no others. Calls `each` with those of each head,
    /// `[tokens, n_rows]`, layer by layer.
    ///
    /// # Errors
    /// As [`SpeechSession::logits`]; [`Error::Operand`] for a head that the decoder does not have, and for no rows or too many.
    pub async fn attention_weights(
        &mut self,
        ids: &[u32],
        (heads, n_rows): (&[[u32; 2]], usize),
        each: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), Error> {
        self.rewind(0);
        self.check_ids(ids)?;
        self.check_heads(heads, n_rows)?;
        let device = self.model.device().clone();
        let size = (ids.len() as u32).next_power_of_two();
        let layers: BTreeSet<usize> = heads.iter().map(|&[layer, _]| layer as usize).collect();
        if !self.inspected.get(&size).is_some_and(|pass| pass.queries.keys().eq(&layers)) {
            let pass = self.inspected_pass(&device, size, &layers).await?;
            self.inspected.insert(size, pass);
        }
        self.write_ids(&device, ids)?;
        let Some(pass) = self.inspected.get(&size) else { return Ok(()) };
        run(&device, &pass.recording, &mut self.last_turn).await?;
        self.n_tokens += ids.len() as u32;
        let mut weights = vec![0.0; ids.len() * n_rows];
        for (&layer, queries) in &pass.queries {
            let Some(cached) = self.cross.keys(layer) else { continue };
            let (queries, keys) = (device.read::<f32>(queries).await?, device.read::<u32>(&cached.k).await?);
            let attention = self.model.config().decoder.blocks[layer].attention.kernel(false);
            for &[_, head] in heads.iter().filter(|&&[of, _]| of as usize == layer) {
                let keys = by_element(cached.kind, &keys, (&attention, head as usize), n_rows);
                weigh(&queries, &keys, (&attention, head as usize), &mut weights);
                if weights.iter().any(|weight| weight.is_nan()) {
                    return Err(Error::NonFinite { pos: self.n_tokens - 1 });
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
        let io = PassTensors { cross, ..self.io.clone() };
        let mut workspace = std::mem::take(&mut self.workspace);
        let record = || self.record_pass(size, (&io, Ending::Cache), &mut workspace);
        let recording = record_tested(device, record, |recording| recording).await?;
        self.workspace = workspace;
        Ok(InspectedPass { recording, queries })
    }

    /// Forgets the tokens after the first `n`.
    pub fn rewind(&mut self, n: usize) {
        self.n_tokens = self.n_tokens.min(u32::try_from(n).unwrap_or(u32::MAX));
    }

    /// Tokens of the session.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens as usize
    }

    /// Tokens that fit after a window.
    pub fn capacity(&self) -> usize {
        self.model.config().decoder.max_seq_len as usize
    }

    /// Number of dispatches of the encoder's pass, and of one over a token.
    ///
    /// # Errors
    /// As [`SpeechModel::session`].
    pub fn n_dispatches(&self) -> Result<[usize; 2], Error> {
        let mut workspace = Workspace::default();
        let hearing = self.record_hearing(&mut workspace)?;
        let pass = self.record_pass(1, (&self.io, Ending::Logits), &mut workspace)?;
        Ok([hearing, pass].map(|pass| pass.n_dispatches()))
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        let (vocab_size, capacity) = (self.model.config().decoder.vocab_size, self.capacity());
        let needed = self.n_tokens as usize + ids.len();
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

    /// Writes the tokens of the next pass.
    fn write_ids(&self, device: &Device, ids: &[u32]) -> Result<(), Error> {
        device.write(&self.io.tokens, self.n_tokens as usize, ids)?;
        self.io.state.set(device, self.n_tokens, ids.len() as u32)
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

    fn record_pass(
        &self,
        n_tokens: u32,
        (io, ending): (&PassTensors, Ending),
        workspace: &mut Workspace,
    ) -> Result<Recording, Error> {
        let inner = &self.model.inner;
        let mut rec = Recorder::new(inner.device.target());
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

/// The first `n_rows` keys that a head reads, out of those of all heads: `[D, n_rows]`.
fn by_element(kind: KvType, keys: &[u32], (config, head): (&AttentionConfig, usize), n_rows: usize) -> Vec<f32> {
    let (n_heads, n_kv_heads) = (config.n_heads as usize, config.n_kv_heads as usize);
    let (n_words, row_words) = (keys.len() / n_kv_heads, kind.row_words(config.head_dim) as usize);
    let own = &keys[head * n_kv_heads / n_heads * n_words..][..n_words];
    let mut key = vec![0.0; config.head_dim as usize];
    let mut found = vec![0.0; key.len() * n_rows];
    for (row, words) in own.chunks_exact(row_words).take(n_rows).enumerate() {
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
