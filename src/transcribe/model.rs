//! A speech model on a device: the encoder once for each window, then the decoder token by token.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::options::TranscriberOptions;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::scale;
use crate::load::{SpeechFile, WeightUploader, Widened};
use crate::memory::Limit;
use crate::model::{
    CrossTensors, Ending, KvCache, PassTensors, SoundTensors, SpeechConfig, SpeechEncoder, Tap, Transformer,
    WeightSource, Weights,
};
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
        // Rounding would move timestamps.
        let device = device.exact();
        let (target, config) = (device.target(), file.config.clone());
        let widened = Widened(&file.encoder);
        let source: &dyn WeightSource = if device.is_gpu() { &file.encoder } else { &widened };
        let encoder = SpeechEncoder::declare(&target, &config, source)?;
        let weights = Weights::declare(&target, &config.decoder, &file.decoder)?;
        let decoder = Transformer::declare(config.decoder.clone(), weights, config.decoder.max_seq_len)?;
        file.encoder.check_read(encoder.tensor_slots().map(|(name, _)| name))?;
        file.decoder.check_read(decoder.tensor_slots().map(|(name, _)| name))?;
        let inner = SpeechInner { device: device.clone(), config, encoder, decoder, options };
        let model = SpeechModel { inner: Arc::new(inner) };
        if let Some(limit) = Limit::of(options.memory_limit, device.available_bytes()) {
            let plan = model.plan()?;
            if plan.total_bytes() > limit.bytes {
                let hint = "use a smaller model".into();
                return Err(plan.refused(limit.bytes, limit.explained(hint)));
            }
        }
        let SpeechInner { encoder, decoder, .. } = &*model.inner;
        WeightUploader::new(&file.encoder, encoder.tensor_slots()).take_all(&device, &file.files, None)?;
        WeightUploader::new(&file.decoder, decoder.tensor_slots()).take_all(&device, &file.files, None)?;
        Ok(model)
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
            n_tokens: 0,
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
        let passes = [session.record_pass(size, &mut workspace)?, session.record_pass(1, &mut workspace)?];
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
    n_tokens: u32,
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
        self.hearing.as_ref().map_or(Ok(()), |recording| device.run(recording))
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
        let (vocab_size, capacity) = (self.model.config().decoder.vocab_size, self.capacity());
        let needed = self.n_tokens as usize + ids.len();
        if needed > capacity {
            return Err(Error::ContextFull { needed, capacity });
        }
        if let Some(id) = ids.iter().find(|&&id| id >= vocab_size) {
            let (expected, found) = (format!("below {vocab_size}"), id.to_string());
            return Err(Error::Operand { kernel: "speech", operand: "ids", expected, found });
        }
        if ids.is_empty() {
            let (expected, found) = ("at least one".into(), "none".into());
            return Err(Error::Operand { kernel: "speech", operand: "ids", expected, found });
        }
        let device = self.model.device().clone();
        let size = (ids.len() as u32).next_power_of_two();
        if !self.passes.contains_key(&size) {
            let mut workspace = std::mem::take(&mut self.workspace);
            let record = || self.record_pass(size, &mut workspace);
            let recorded = record_tested(&device, record, |recording| recording).await?;
            self.workspace = workspace;
            self.passes.insert(size, recorded);
        }
        device.write(&self.io.tokens, self.n_tokens as usize, ids)?;
        self.io.state.set(&device, self.n_tokens, ids.len() as u32)?;
        if let Some(pass) = self.passes.get(&size) {
            device.run(pass)?;
        }
        self.n_tokens += ids.len() as u32;
        let logits: Vec<f32> = device.read(&self.io.logits).await?;
        match logits.iter().all(|logit| logit.is_finite()) {
            true => Ok(logits),
            false => Err(Error::NonFinite { pos: self.n_tokens - 1 }),
        }
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
        Ok([self.record_hearing(&mut workspace)?, self.record_pass(1, &mut workspace)?].map(|pass| pass.n_dispatches()))
    }

    fn check(&self, frames: &[f32]) -> Result<(), Error> {
        match frames.len() == self.sound.frames.len() {
            true => Ok(()),
            false => Err(Error::Operand {
                kernel: "speech",
                operand: "frames",
                expected: format!("{:?} values", self.sound.frames.shape()),
                found: frames.len().to_string(),
            }),
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

    fn record_pass(&self, n_tokens: u32, workspace: &mut Workspace) -> Result<Recording, Error> {
        let inner = &self.model.inner;
        let mut rec = Recorder::new(inner.device.target());
        inner.decoder.record_pass(&mut rec, &self.cache, &self.io, n_tokens, Ending::Logits)?;
        Ok(rec.finish(workspace))
    }
}
