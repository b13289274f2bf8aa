//! A model on a device.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "lora")]
use std::sync::Mutex;
use std::sync::OnceLock;

use super::Session;
#[cfg(feature = "lora")]
use super::adapter::{Adapter, AdapterInner};
use super::disk_offload::{DiskOffload, Streaming};
use super::disk_tables::DiskTables;
use super::images::{check_images, is_row};
use super::part::ModelPart;
use super::passes::{PASS_SIZES, RecordedPasses, SessionLimits};
use super::pipeline::{self, DeviceLayers, PipelineStages, StagePasses};
#[cfg(feature = "sound")]
use crate::audio::AudioEncoder;
use crate::device::{Device, Pending};
use crate::dtype::DType;
use crate::error::Error;
use crate::formats::BlockType;
#[cfg(feature = "grammar")]
use crate::grammar::Grammars;
use crate::kernels::KvType;
#[cfg(feature = "sound")]
use crate::load::AUDIO;
use crate::load::{
    ChatSource, MTP, MTP_COPIES, ModelFile, ModelHeader, Needs, Placement, PlacementOptions, TensorIndex, VISION,
    WeightFiles, WeightUploader,
};
use crate::memory::Limit;
use crate::model::{Block, KvCache, ModelConfig, PassTensors, RowAttention, Transformer, Weights};
use crate::platform::{IS_BROWSER, block_on};
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::target::Target;
use crate::tensor::{Role, Tensor};
use crate::tokenizer::{EncodeOptions, EncodingCache, Tokenizer};
use crate::tuning::{TuneOnLoad, record_tested, tuned_for_load, while_testing};
use crate::vision::{ImageRows, VisionEncoder};
use crate::xxh64::Xxh64;

/// Default context length, unless the model's own limit is lower.
const DEFAULT_CONTEXT: u32 = 4096;

/// Capacity of the encoding cache, in texts.
const ENCODING_CACHE: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// How to load a model.
#[derive(Default)]
pub struct LoadOptions<'a> {
    /// KV cache capacity in tokens: 1 up to the model's own limit. `None`: 4096, or that limit if it is lower.
    pub context_length: Option<u32>,
    /// Where memory is known, halve the context until it fits rather than refuse the model, starting from
    /// `context_length`, or from the model's own limit if that is `None`.
    pub fit_context: bool,
    /// Maximum bytes of weights, cache and activations together.
    pub memory_limit: Option<u64>,
    /// Disk offload: if the model does not fit, leave part of it in the file rather than refuse it. First embedding
    /// tables, as with `stream_rows`, then as few layers as possible, which every pass reads again. A mixture of
    /// experts keeps everything but its experts if that reads less, with an expert cache for each layer; other
    /// experts are read when a token chooses them. [`Model::streaming`] reports what is read. Passes of several
    /// sessions then take turns: await or drop one session's future before continuing another's. Requires complete
    /// files or, in a browser, files that JavaScript can read again.
    pub stream_layers: bool,
    /// Offload whole layers rather than experts, for comparison in benches.
    #[doc(hidden)]
    pub whole_layers: bool,
    /// Leave embedding tables in the file and read each pass's rows, even if the tables fit: per-layer embeddings,
    /// and the token embedding unless the device also needs it as the output head or for an MTP head. No effect
    /// without such a table. Requires complete files.
    pub stream_rows: bool,
    /// Number of layers on the GPU: the last ones, with the output head. The CPU computes the others, and its memory
    /// holds them and the embedding. `None`: all layers. Requires complete files; native only; no effect on the CPU.
    pub gpu_layers: Option<u32>,
    /// Further devices that compute layers, in order, before the model's own and after the layers that `gpu_layers`
    /// leaves to the CPU. The memory of each holds its layers. Requires complete files.
    pub layers_on: Vec<DeviceLayers>,
    /// Load the MTP head, if the files have a known one (Qwen3.5, Qwen3-Next, DeepSeek V3, GLM 4.5 to 4.7, Ling), for
    /// [`GenerateOptions::mtp_tokens`](super::GenerateOptions::mtp_tokens). It takes about as much memory as a layer
    /// and needs the embedding on its device.
    pub mtp_tokens: bool,
    /// See [`Model::max_pass`]: one of [`PASS_SIZES`]. `None`: 512 on a GPU, 128 on the CPU and on software
    /// adapters.
    pub max_pass: Option<u32>,
    /// Storage type of cached keys and values.
    pub kv_type: KvType,
    /// Never round activations. Otherwise, CPUs that multiply bytes faster than floats (x86-64 with AVX2, browsers) round
    /// those that meet quantised weights to signed bytes with one scale per 32, as llama.cpp does, except on
    /// [`Device::cpu`]. With AMX on Linux, products of many tokens round activations and weights to BF16 instead. Real
    /// GPUs with half precision use it for prefill products, summed in f32; browsers' adapters only in the tier `f16`,
    /// which is asked for by name and stays.
    pub exact: bool,
    /// Where to measure kernels for those of the model's matrix products that the device's tuning file lacks: once, for
    /// up to three seconds, before the weights are read. [`Device::take_notices`] reports the time. No effect without
    /// such a file (see [`Device::tuning_file`]), in browsers, and on the devices of `layers_on`. For a model that
    /// arrives in pieces, call [`Loader::tune`](crate::load::Loader::tune).
    pub tune: TuneOnLoad,
    /// Called with the bytes of weights read and uploaded so far, and their total.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

/// A model whose weights are on a device. Clones share them.
#[derive(Clone)]
pub struct Model {
    inner: Arc<ModelInner>,
    device: Device,
    room: SessionLimits,
    plan: MemoryPlan,
    /// Of the loaded weights, see [`Feed::digest`], and of the vocabulary.
    digest: u64,
    /// LoRA adapter of new sessions.
    #[cfg(feature = "lora")]
    adapter: Option<Adapter>,
    /// LoRA adapters that engine requests can name.
    #[cfg(feature = "lora")]
    adapters: Arc<[(String, Adapter)]>,
    /// Draft model of an engine.
    draft: Option<Arc<Model>>,
    vision: Option<VisionEncoder>,
    #[cfg(feature = "sound")]
    audio: Option<AudioEncoder>,
}

/// The weights for a request: the model's own, or with an adapter.
#[derive(Clone, Copy)]
pub(crate) struct Adapted<'a> {
    pub transformer: &'a Transformer,
    /// Adapter number; 0 is none.
    pub number: usize,
}

pub(super) struct ModelInner {
    name: String,
    transformer: Transformer,
    encodings: Result<EncodingCache, String>,
    chat: ChatSource,
    block_types: Vec<BlockType>,
    tokens_per_submit: u32,
    /// Disk offload of layers or experts.
    streamed: Option<DiskOffload>,
    /// Disk offload of embedding tables.
    tables: Option<DiskTables>,
    /// Pipeline stages on other devices, before this one.
    stages: Arc<PipelineStages>,
    /// Digest of the weights on disk, computed on first use.
    digest_in_file: OnceLock<u64>,
    /// Loaded adapters, which share the model's memory limit.
    #[cfg(feature = "lora")]
    adapters: Mutex<Vec<std::sync::Weak<AdapterInner>>>,
    /// Memory limit of the model and its sessions and adapters.
    limit: Option<Limit>,
    /// Made on first use.
    #[cfg(feature = "grammar")]
    grammars: OnceLock<Arc<Grammars>>,
}

/// Layers of a model and the device that computes them.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Placed {
    /// The device, serialised as its name.
    #[serde(serialize_with = "name_of")]
    pub device: Device,
    /// Layer numbers from 0; the first includes the embedding, the last the output head.
    pub layers: Range<u32>,
    /// Memory of their weights and one session.
    pub plan: MemoryPlan,
}

fn name_of<S: serde::Serializer>(device: &Device, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&device.info().name)
}

/// All logits and the residual stream of a pass, for inspection and tests.
#[derive(Clone, Debug)]
pub struct Trace {
    /// `[T, V]`, row by row.
    pub logits: Vec<f32>,
    /// `[T, C]` each: after the embedding, then after each layer.
    pub hidden: Vec<Vec<f32>>,
    /// MTP logits, if the model has the head: `[T - 1, V]`. Row i sees tokens i and i + 1 and predicts token i + 2.
    pub mtp: Option<Vec<f32>>,
}

impl Model {
    /// Loads a GGUF file or a Hugging Face folder, see [`ModelFile::open`].
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`Model::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: LoadOptions<'_>) -> Result<Model, Error> {
        let path = path.as_ref();
        Model::from_file(device, ModelFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Loads the model built into this crate.
    ///
    /// # Errors
    /// As [`Model::from_file`].
    #[cfg(feature = "builtin")]
    pub fn builtin(device: &Device) -> Result<Model, Error> {
        Model::from_file(device, ModelFile::builtin()?, LoadOptions::default())
    }

    /// Loads a model: declares all tensors, checks the plan against the memory limit, then uploads tensor by tensor.
    ///
    /// # Errors
    /// [`Error::Memory`] if the plan exceeds the limit, with nothing allocated; [`Error::Option`] for a context length
    /// or a size of passes out of range; [`Error::Config`] if a weight is missing; errors of [`Device::write`].
    pub fn from_file(device: &Device, file: ModelFile, options: LoadOptions<'_>) -> Result<Model, Error> {
        let ModelFile { header, files } = file;
        let files = Arc::new(files);
        // First, since the plan follows the choices.
        let device = &match header.shape.decoder() {
            Ok(config) if !IS_BROWSER && options.tune != TuneOnLoad::Never => {
                let target = device.for_model(options.exact).target();
                match Weights::declare(&target, config, &header.tensor_index) {
                    Ok(weights) => tuned_for_load(device, &weights, options.exact, options.tune)?,
                    // The model is refused below.
                    Err(_) => device.clone(),
                }
            }
            _ => device.clone(),
        };
        let (model, mut feed) = Model::declare(device, header, WeightFiles::whole(&files).as_ref(), &options)?;
        let test = RecordedPasses::test_usual(&model.device, model.transformer(), model.room);
        while_testing(test, || feed.take_all(device, &files, options.progress))?;
        let digest = feed.digest();
        if !IS_BROWSER {
            block_on(model.fill())?;
        }
        let digest = digest.wrapping_add(model.inner.stages.fill(&files, model.room)?);
        model.complete(device.clone(), digest)
    }

    /// Declares a model and checks the plan against the memory limit; allocates nothing. `files`: the model's, for
    /// disk offload.
    pub(super) fn declare(
        device: &Device,
        header: ModelHeader,
        files: Option<&WeightFiles>,
        options: &LoadOptions<'_>,
    ) -> Result<(Model, WeightUploader), Error> {
        header.note_vocabulary(device);
        let ModelHeader { name, shape, tokenizer, chat, tensor_index, mtp, mut unread } = header;
        let leaves_out = mtp.is_some() && !options.mtp_tokens;
        if leaves_out {
            unread.retain(|part| *part != MTP_COPIES);
            unread.push(MTP);
        }
        let config = with_mtp(shape.into_decoder()?, mtp, options);
        let limit = Limit::of(options.memory_limit, device.available_bytes());
        let device = device.for_model(options.exact);
        let target = device.target();
        let room = checked_room(&target, config.max_seq_len, limit.is_some(), options)?;
        let part = ModelPart::declare(target, &config, &tensor_index, room)?;
        check_read(&tensor_index, &part.weights, &config, leaves_out)?;
        let before = pipeline::before(&device, &config, options, files.is_some())?;
        let part = part.of_layers(before.iter().map(|layers| layers.n_layers).sum()..config.n_layers());
        let asked = PlacementOptions {
            context_length: room.context_length,
            fit_context: options.fit_context,
            limit,
            stream_rows: options.stream_rows && files.is_some(),
            stream_layers: options.stream_layers && files.is_some(),
            whole_layers: options.whole_layers,
        };
        let placement = Placement::choose(&asked, &part)?;
        let room = SessionLimits { context_length: placement.context_length, ..room };
        let (transformer, plan, streamed) = part.place(&placement, files)?;
        debug_assert!(limit.is_none_or(|limit| plan.total_bytes() <= limit.bytes), "{plan:?} in {limit:?}");
        unread.iter().for_each(|part| device.tested().note(unread_notice(part)));
        let feed = match &streamed {
            Some(streamed) => streamed.resident(&transformer, &tensor_index),
            None => WeightUploader::digesting(&tensor_index, transformer.tensor_slots(), |_| true),
        };
        let stages = {
            let declare = |fetches_rows| {
                let shared =
                    pipeline::StageSettings { tensor_index: &tensor_index, room, exact: options.exact, fetches_rows };
                let stages = PipelineStages::declare(&before, &transformer, shared)?;
                stages.check_plans(stages.plans(room)?.into_iter()).map(|()| stages)
            };
            match declare(options.stream_rows) {
                Err(Error::Memory { .. }) if options.stream_layers && !options.stream_rows => declare(true)?,
                declared => declared?,
            }
        };
        let tables = files.and_then(|files| {
            let first = stages.parts().next().map_or(&transformer, |(_, part)| part);
            DiskTables::of(first, &transformer, &tensor_index, files, placement.in_file.fitting_context)
        });
        let encodings = match tokenizer {
            Ok(tokenizer) => Ok(EncodingCache::new(Arc::new(tokenizer), ENCODING_CACHE)),
            Err(error) => Err(error.to_string()),
        };
        let weights_bytes = transformer.weights.tensors().map(Tensor::size_bytes).sum();
        let tokens_per_submit = tokens_per_submit(device.is_real_gpu(), weights_bytes);
        let block_types = tensor_index.block_types();
        let inner = ModelInner {
            name,
            transformer,
            encodings,
            chat,
            block_types,
            tokens_per_submit,
            streamed,
            tables,
            stages: Arc::new(stages),
            digest_in_file: OnceLock::new(),
            #[cfg(feature = "lora")]
            adapters: Mutex::default(),
            limit,
            #[cfg(feature = "grammar")]
            grammars: OnceLock::new(),
        };
        let model = Model {
            inner: Arc::new(inner),
            device,
            room,
            plan,
            digest: 0,
            #[cfg(feature = "lora")]
            adapter: None,
            #[cfg(feature = "lora")]
            adapters: Arc::default(),
            draft: None,
            vision: None,
            #[cfg(feature = "sound")]
            audio: None,
        };
        Ok((model, feed))
    }

    /// Finishes loading once the feed is complete: uploads RoPE tables and sets the digest. Sessions use this
    /// device's tuning.
    pub(super) fn complete(self, device: Device, digest: u64) -> Result<Model, Error> {
        self.transformer().upload_ropes(&device)?;
        let digest = digest.wrapping_add(self.tokenizer().map_or(0, digest_of_vocab));
        Ok(Model { device: device.for_model(!self.rounds()), digest, ..self })
    }

    /// With disk offload: reads the resident weights of offloaded layers.
    pub(super) async fn fill(&self) -> Result<(), Error> {
        match &self.inner.streamed {
            Some(streamed) => streamed.fill(&self.device).await,
            None => Ok(()),
        }
    }

    /// Memory of a file's weights and one session within [`LoadOptions::memory_limit`], and the weights that passes
    /// would read from disk, if not all fit; allocates nothing.
    ///
    /// # Errors
    /// Those of [`Model::from_file`] before it loads.
    pub fn plan_within(
        device: &Device,
        file: ModelFile,
        options: &LoadOptions<'_>,
    ) -> Result<(MemoryPlan, Option<Streaming>), Error> {
        let ModelFile { header, files } = file;
        let (model, _) = Model::declare(device, header, WeightFiles::whole(&Arc::new(files)).as_ref(), options)?;
        Ok((model.plan(), model.streaming()))
    }

    /// Memory of a file's weights and one session on a device, regardless of limits; allocates nothing.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or its shape disagrees with the configuration.
    pub fn plan_file(target: &Target, file: &ModelFile, options: &LoadOptions<'_>) -> Result<MemoryPlan, Error> {
        let ModelHeader { shape, tensor_index, mtp, .. } = &file.header;
        let leaves_out = mtp.is_some() && !options.mtp_tokens;
        let config = with_mtp(shape.decoder()?.clone(), mtp.clone(), options);
        let room = checked_room(target, config.max_seq_len, false, options)?;
        let part = ModelPart::declare(target.clone(), &config, tensor_index, room)?;
        check_read(tensor_index, &part.weights, &config, leaves_out)?;
        part.plan(room.context_length, options.stream_rows)
    }

    /// Refuses a model by its header that does not fit or is not a decoder; allocates nothing. `stream_layers`
    /// implies that its files can be read again.
    #[cfg(all(feature = "web", target_arch = "wasm32"))]
    pub(crate) fn check_header(device: &Device, header: ModelHeader, options: &LoadOptions<'_>) -> Result<(), Error> {
        let read = std::rc::Rc::new(|_, _, _| Box::pin(async { Ok(Vec::new()) }) as _);
        let files = WeightFiles::new(read, &[]);
        Model::declare(device, header, Some(&files), options).map(drop)
    }

    /// Runs a pass whose first `n_rows` rows are tokens; the others are padding.
    pub(crate) async fn run(&self, pass: &Recording, n_rows: usize) -> Result<(), Error> {
        match &self.inner.streamed {
            Some(streamed) => {
                // Boxed to keep the future small without disk offload.
                let (done, _turn) = Box::pin(streamed.run_up_to_last(&self.device, (pass, n_rows))).await?;
                self.device.run_steps(pass, done..pass.n_dispatches())
            }
            None => self.device.run(pass),
        }
    }

    /// Runs a pass as [`Model::run`], `n_runs` times, or once with disk offload, and reads a tensor after each run.
    pub(crate) async fn run_and_read(
        &self,
        pass: &Recording,
        n_rows: usize,
        tensor: &Tensor,
        n_runs: u32,
    ) -> Result<Pending, Error> {
        match &self.inner.streamed {
            Some(streamed) => {
                let (done, _turn) = Box::pin(streamed.run_up_to_last(&self.device, (pass, n_rows))).await?;
                self.device.run_steps_and_read(pass, done..pass.n_dispatches(), tensor, 1)
            }
            None => self.device.replay_and_read(pass, tensor, n_runs),
        }
    }

    /// Disk offload of layers, embedding tables or experts, with its statistics; `None` if all weights are on the
    /// device.
    pub fn streaming(&self) -> Option<Streaming> {
        let layers = self.inner.streamed.as_ref().map(DiskOffload::report);
        match &self.inner.tables {
            Some(tables) => Some(tables.report(layers.unwrap_or_else(|| Streaming::resident(&self.inner.transformer)))),
            None => layers,
        }
    }

    pub(super) fn row_tables(&self) -> Option<&DiskTables> {
        self.inner.tables.as_ref()
    }

    /// Uploads the rows of these tokens from embedding tables on disk, for a device's next pass.
    pub(crate) async fn fetch_rows(
        &self,
        device: &Device,
        io: &PassTensors,
        position: usize,
        ids: &[u32],
    ) -> Result<(), Error> {
        match self.row_tables() {
            Some(tables) => Box::pin(tables.fetch(device, io, position, ids)).await,
            None => Ok(()),
        }
    }

    /// Index of each token's row among the fetched ones.
    pub(crate) fn fetched_numbers(&self, ids: &[u32]) -> Vec<u32> {
        self.row_tables().map_or(Vec::new(), |tables| tables.numbers(ids))
    }

    /// The devices and their layers, in order; the model's own device is last.
    ///
    /// # Errors
    /// As [`Model::session`].
    pub fn placement(&self) -> Result<Vec<Placed>, Error> {
        let others = self.inner.stages.parts().zip(self.inner.stages.plans(self.room)?);
        let others =
            others.map(|((device, part), plan)| Placed { device: device.clone(), layers: part.layers(), plan });
        let own = Placed { device: self.device.clone(), layers: self.transformer().layers(), plan: self.plan };
        Ok(others.chain([own]).collect())
    }

    /// A session's passes on other devices.
    pub(super) fn stage_passes(&self) -> Result<StagePasses, Error> {
        StagePasses::declare(&self.inner.stages, self.room)
    }

    /// Refuses a plan beyond the memory limit.
    pub(crate) fn check_fits(&self, plan: &MemoryPlan, hint: &str) -> Result<(), Error> {
        match self.inner.limit {
            Some(limit) if plan.total_bytes() > limit.bytes => {
                Err(plan.refused(limit.bytes, limit.explained(hint.into())))
            }
            _ => Ok(()),
        }
    }

    /// The pipeline stages before this device, in order.
    pub(crate) fn parts_before(&self) -> impl Iterator<Item = (&Device, &Transformer)> {
        self.inner.stages.parts()
    }

    /// All devices that compute layers, in order; the model's own is last.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.parts_before().map(|(device, _)| device).chain([&self.device])
    }

    /// Refuses plans beyond the memory of the devices before this one, where known: one plan each, in order.
    pub(crate) fn check_fits_before(&self, plans: impl Iterator<Item = MemoryPlan>) -> Result<(), Error> {
        self.inner.stages.check_plans(plans)
    }

    /// Refuses an operation that needs all layers on this device.
    pub(super) fn expect_resident(&self, option: &'static str) -> Result<(), Error> {
        self.expect_layers_off_file(option)?;
        match self.transformer().layers().start {
            0 => Ok(()),
            elsewhere => Err(Error::Option {
                option,
                expected: "a model with all layers on the device".into(),
                found: format!("{elsewhere} layers on other devices"),
            }),
        }
    }

    /// Refuses an operation that does not support disk offload.
    fn expect_layers_off_file(&self, option: &'static str) -> Result<(), Error> {
        if let Some(streaming) = self.inner.streamed.as_ref().map(DiskOffload::report) {
            let expected = "a model with all layers on the device".into();
            let found = match streaming.experts {
                Some(experts) => format!("{} of {} experts on the device", experts.n_kept, experts.n_experts),
                None => {
                    format!("{} of {} layers read from disk in each pass", streaming.n_streamed, streaming.n_layers)
                }
            };
            return Err(Error::Option { option, expected, found });
        }
        Ok(())
    }

    /// Whether a pass may be submitted before the previous one is done.
    pub(crate) fn runs_ahead(&self) -> bool {
        if self.inner.streamed.is_some() || self.inner.tables.is_some() {
            return false;
        }
        if !self.inner.stages.is_empty() {
            return false;
        }
        self.device.is_gpu()
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether activations are rounded, see [`LoadOptions::exact`].
    pub fn rounds(&self) -> bool {
        self.device.rounds()
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Block types of the file's weights, most bytes first.
    pub fn block_types(&self) -> &[BlockType] {
        &self.inner.block_types
    }

    /// The chat templates of the model's files.
    pub fn chat_source(&self) -> &ChatSource {
        &self.inner.chat
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.inner.transformer.config
    }

    /// Capacity of a session's KV cache, in tokens.
    pub fn context_length(&self) -> u32 {
        self.room.context_length
    }

    /// Memory of the weights and one session.
    pub fn plan(&self) -> MemoryPlan {
        self.plan
    }

    /// Maximum number of tokens of a session's prefill chunk.
    pub fn max_pass(&self) -> u32 {
        self.room.max_pass
    }

    /// Storage type of cached keys and values.
    pub fn kv_type(&self) -> KvType {
        self.room.kv_type
    }

    /// Identifies the weights (all bytes), the configuration, such as RoPE, and the vocabulary, regardless of files
    /// and device. The first call reads the weights on disk: as much as a pass that uses all experts.
    pub(super) fn digest(&self) -> u64 {
        // An MTP head does not change keys and values.
        let mut config = self.config().clone();
        config.blocks.truncate(config.n_layers() as usize);
        config.n_mtp = 0;
        let digest = self.digest.wrapping_add(Xxh64::of(format!("{config:?}").as_bytes()));
        let digest = digest.wrapping_add(*self.inner.digest_in_file.get_or_init(|| {
            let ModelInner { streamed, tables, .. } = &*self.inner;
            let of_tables = tables.as_ref().map_or(0, DiskTables::digest);
            streamed.as_ref().map_or(0, DiskOffload::digest).wrapping_add(of_tables)
        }));
        #[cfg(feature = "lora")]
        if let Some(adapter) = &self.adapter {
            return digest.wrapping_add(adapter.digest());
        }
        digest
    }

    /// The digest in hexadecimal, as saved sessions store it.
    pub(crate) fn shown_digest(&self) -> String {
        format!("{:016x}", self.digest())
    }

    pub(super) fn room(&self) -> SessionLimits {
        self.room
    }

    /// The same model and weights, with session passes for up to `max_pass` tokens.
    ///
    /// # Errors
    /// [`Error::Option`] unless `max_pass` is one of [`PASS_SIZES`].
    pub fn with_max_pass(&self, max_pass: u32) -> Result<Model, Error> {
        let room = SessionLimits { max_pass: checked_max_pass(&self.device.target(), Some(max_pass))?, ..self.room };
        let plan = RecordedPasses::declare(&self.device.target(), self.transformer(), room)?.plan();
        Ok(Model { room, plan, ..self.clone() })
    }

    /// Default number of tokens per submission: 4 on a real GPU that computes a token faster than the host submits
    /// the next, else 1.
    pub fn tokens_per_submit(&self) -> u32 {
        self.inner.tokens_per_submit
    }

    /// The tokenizer with its encoding cache.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the file has no supported one.
    pub fn encodings(&self) -> Result<&EncodingCache, Error> {
        self.inner.encodings.as_ref().map_err(|reason| Error::Tokenizer {
            field: "the model".into(),
            expected: "a tokenizer in its file or folder".into(),
            found: format!("without one ({reason})"),
        })
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// As [`Model::encodings`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.encodings().map(EncodingCache::tokenizer)
    }

    /// The vocabulary for constraints. The first call builds it, which takes up to a second if it is large.
    ///
    /// # Errors
    /// As [`Model::encodings`]; [`Error::Tokenizer`] if the vocabulary is too large.
    #[cfg(feature = "grammar")]
    pub fn grammars(&self) -> Result<&Arc<Grammars>, Error> {
        if let Some(grammars) = self.inner.grammars.get() {
            return Ok(grammars);
        }
        let grammars = Grammars::new(self.encodings()?.shared_tokenizer(), self.config().vocab_size)?;
        // Another thread may have built it meanwhile.
        Ok(self.inner.grammars.get_or_init(|| Arc::new(grammars)))
    }

    /// Token ids of a text, with the model's special tokens around it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is no tokenizer or the text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, EncodeOptions { add_special: true, parse_special: false })
    }

    /// Token ids of a text with these options, such as parsing control tokens.
    ///
    /// # Errors
    /// As [`Model::encode`].
    pub fn encode_with(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, Error> {
        Ok(self.encodings()?.encode(text, options)?.to_vec())
    }

    /// Refuses ids outside the vocabulary and the images, an empty sequence, and more than `capacity` tokens with the
    /// `n_before` earlier ones.
    pub(super) fn check_ids(
        &self,
        (n_before, ids): (usize, &[u32]),
        images: &[Arc<ImageRows>],
        capacity: usize,
    ) -> Result<(), Error> {
        let vocab_size = self.config().vocab_size;
        let error = |found: String| Error::Tokenizer {
            field: "prompt".into(),
            expected: format!("token ids below {vocab_size}"),
            found,
        };
        if n_before == 0 && ids.is_empty() {
            return Err(error("no tokens at all".into()));
        }
        if let Some(id) = ids.iter().find(|&&id| id >= vocab_size && !is_row(id)) {
            return Err(error(format!("the id {id}")));
        }
        check_images(ids, images)?;
        let needed = n_before + ids.len();
        if needed > capacity { Err(Error::ContextFull { needed, capacity }) } else { Ok(()) }
    }

    /// The model with a vision encoder, for conversations with images.
    ///
    /// # Errors
    /// [`Error::Config`] if the encoder belongs to another model.
    pub fn with_vision(self, vision: VisionEncoder) -> Result<Model, Error> {
        self.check_row_dim("projection_dim (out_hidden_size)", vision.config().row_dim)?;
        let model = match self.config().has_bidirectional_images() {
            true => self.with_passes_for(vision.max_rows())?,
            false => self,
        };
        model.device.tested().withdraw(&unread_notice(VISION));
        Ok(Model { vision: Some(vision), ..model })
    }

    /// The vision encoder, if it was loaded.
    pub fn vision(&self) -> Option<&VisionEncoder> {
        self.vision.as_ref()
    }

    /// The model with an encoder of sounds, for conversations with sounds.
    ///
    /// # Errors
    /// [`Error::Config`] if it belongs to another model.
    #[cfg(feature = "sound")]
    pub fn with_audio(self, audio: AudioEncoder) -> Result<Model, Error> {
        self.check_row_dim("projection_dim (text_config.hidden_size)", audio.config().row_dim)?;
        self.device.tested().withdraw(&unread_notice(AUDIO));
        Ok(Model { audio: Some(audio), ..self })
    }

    /// The encoder of sounds, if it was loaded.
    #[cfg(feature = "sound")]
    pub fn audio(&self) -> Option<&AudioEncoder> {
        self.audio.as_ref()
    }

    /// Refuses an encoder whose rows have another width than the model.
    fn check_row_dim(&self, field: &str, found: u32) -> Result<(), Error> {
        match self.config().dim {
            dim if dim == found => Ok(()),
            dim => Err(Error::Config {
                field: field.into(),
                expected: format!("{dim}, the width of `{}`", self.name()),
                found: found.to_string(),
            }),
        }
    }

    /// Refuses rows of an image or a sound for another model.
    pub(crate) fn check_image(&self, image: &ImageRows) -> Result<(), Error> {
        let n_rows = image.len() as u32;
        let (expected, found) = ([n_rows, self.config().dim], [n_rows, image.dim]);
        if expected != found || image.rows.iter().any(|rows| rows.len() != image.len() * image.dim as usize) {
            let (expected, found) = (expected.into(), found.into());
            return Err(Error::Shape { kernel: "model", operand: "image", expected, found });
        }
        let unsupported = |found: &str, supported: &str| {
            let (found, supported) = (found.into(), supported.into());
            Err(Error::Unsupported { format: "model", field: "image".into(), found, supported })
        };
        if !self.inner.stages.is_empty() {
            return unsupported("layers on several devices (`gpu_layers`, `layers_on`)", "all layers on one");
        }
        if self.config().residual_scale != 1.0 {
            return unsupported("a residual scale", "models without");
        }
        // Rows that see each other are computed in one pass.
        let (n, most) = (image.len(), self.max_pass() as usize);
        match self.is_one_pass(image) && n > most {
            true => unsupported(&format!("{n} rows"), &format!("up to {most}, the largest pass (`max_pass`)")),
            false => Ok(()),
        }
    }

    /// Whether all rows of an image are computed in one pass, because they see each other.
    pub(crate) fn is_one_pass(&self, image: &ImageRows) -> bool {
        self.config().has_bidirectional_images() && image.attention != RowAttention::Causal
    }

    /// Writes what stands for rows of an image among a pass's tokens: their ids, which penalties do not count; with
    /// per-layer embeddings, the padding token, whose embeddings all rows have.
    pub(crate) async fn write_row_tokens(
        &self,
        (device, io): (&Device, &PassTensors),
        position: usize,
        (image, rows): (&ImageRows, Range<usize>),
    ) -> Result<(), Error> {
        /// Gemma's.
        const PADDING: u32 = 0;
        if self.config().per_layer.is_some() {
            let ids = vec![PADDING; rows.len()];
            device.write(&io.tokens, position, &ids)?;
            return self.fetch_rows(device, io, position, &ids).await;
        }
        let ids: Vec<u32> = image.ids.clone().skip(rows.start).take(rows.len()).collect();
        device.write(&io.tokens, position, &ids)
    }

    /// Refuses MTP drafts without an MTP head.
    pub(crate) fn check_mtp(&self, mtp_tokens: u32) -> Result<(), Error> {
        if mtp_tokens == 0 || self.config().n_mtp > 0 {
            return Ok(());
        }
        Err(Error::Option {
            option: "mtp_tokens",
            expected: "0: the model has no MTP head, or was loaded without it".into(),
            found: mtp_tokens.to_string(),
        })
    }

    /// With passes for so many tokens, or the largest possible ones.
    fn with_passes_for(self, n_tokens: u32) -> Result<Model, Error> {
        let fits = |size: &&u32| **size >= n_tokens;
        let size = PASS_SIZES.iter().find(fits).or(PASS_SIZES.last()).map_or(1, |size| *size);
        if size > self.max_pass() { self.with_max_pass(size) } else { Ok(self) }
    }

    /// Refuses a prompt that does not fit a session of this model.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary or an empty prompt, [`Error::ContextFull`] for too many
    /// tokens.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<(), Error> {
        self.check_prompt_with(ids, &[])
    }

    /// As [`Model::check_prompt`], for a prompt with rows of these images.
    ///
    /// # Errors
    /// As [`Model::check_prompt`], and as [`Session::set_images`].
    pub fn check_prompt_with(&self, ids: &[u32], images: &[Arc<ImageRows>]) -> Result<(), Error> {
        images.iter().try_for_each(|image| self.check_image(image))?;
        self.check_ids((0, ids), images, self.context_length() as usize)
    }

    /// A new, empty session.
    ///
    /// # Errors
    /// Errors of [`Device::allocate`].
    pub fn session(&self) -> Result<Session, Error> {
        Session::new(self)
    }

    pub(crate) fn transformer(&self) -> &Transformer {
        #[cfg(feature = "lora")]
        if let Some(adapter) = &self.adapter {
            return adapter.transformer();
        }
        &self.inner.transformer
    }

    /// The weights for a request, with its adapter if it names one.
    ///
    /// # Errors
    /// [`Error::Option`] for a name unknown to [`Model::with_adapters`].
    pub(crate) fn adapted_by(&self, name: Option<&str>) -> Result<Adapted<'_>, Error> {
        let Some(name) = name else { return Ok(Adapted { transformer: self.transformer(), number: 0 }) };
        #[cfg(feature = "lora")]
        if let Some(at) = self.adapters.iter().position(|(known, _)| known == name) {
            return Ok(Adapted { transformer: self.adapters[at].1.transformer(), number: at + 1 });
        }
        Err(self.unknown_adapter(name))
    }

    #[cold]
    fn unknown_adapter(&self, name: &str) -> Error {
        let expected = match self.adapter_names().map(|name| format!("`{name}`")).collect::<Vec<_>>() {
            // A browser has no named adapters.
            _ if IS_BROWSER => "none".into(),
            none if none.is_empty() => "none: the model has no adapters".into(),
            known => known.join(" or "),
        };
        Error::Option { option: "adapter", expected, found: name.into() }
    }

    /// Names for [`Request::adapter`](crate::engine::Request::adapter).
    pub fn adapter_names(&self) -> impl Iterator<Item = &str> {
        #[cfg(feature = "lora")]
        return self.adapters.iter().map(|(name, _)| name.as_str());
        #[cfg(not(feature = "lora"))]
        std::iter::empty()
    }

    /// Bytes of the named adapters.
    pub(crate) fn named_adapters_bytes(&self) -> u64 {
        #[cfg(feature = "lora")]
        return self.adapters.iter().map(|(_, adapter)| adapter.size_bytes()).sum();
        #[cfg(not(feature = "lora"))]
        0
    }

    /// The same model with a draft model for engines, which drafts [`EngineOptions::draft_tokens`] at a time. Greedy
    /// output is unchanged, and faster if the draft model is much faster and often right.
    ///
    /// # Errors
    /// [`Error::Operand`] if the vocabulary sizes differ or the draft model is recurrent, since states cannot be
    /// rolled back.
    ///
    /// [`EngineOptions::draft_tokens`]: crate::engine::EngineOptions::draft_tokens
    pub fn with_draft(&self, draft: &Model) -> Result<Model, Error> {
        let refused = |expected, found| Err(Error::Operand { kernel: "model", operand: "draft", expected, found });
        let [own, other] = [self, draft].map(|model| model.config().vocab_size);
        if own != other {
            return refused(format!("a vocabulary of {own} tokens"), other.to_string());
        }
        if draft.config().is_recurrent() {
            return refused("a model without recurrent layers".into(), "recurrent layers".into());
        }
        Ok(Model { draft: Some(Arc::new(draft.clone())), ..self.clone() })
    }

    /// The draft model for engines.
    pub fn draft(&self) -> Option<&Model> {
        self.draft.as_deref().filter(|_| !IS_BROWSER)
    }

    /// Runs `ids` in one pass and returns all logits and the residual stream after each block.
    ///
    /// # Errors
    /// [`Error::ContextFull`] if they do not fit, [`Error::Tokenizer`] for an unknown id, errors of [`Device::run`].
    pub async fn trace(&self, ids: &[u32]) -> Result<Trace, Error> {
        let device = self.device();
        if self.transformer().layers().start > 0 {
            self.expect_resident("trace")?;
        }
        let config = self.config();
        let session = Session::new(self)?;
        session.check_ids(ids)?;
        let n_tokens = ids.len() as u32;
        // Declared here: the pass may be larger than a session's.
        let cache = KvCache::declare(config, self.kv_type(), self.context_length(), n_tokens)?;
        let fetched = self.transformer().declare_fetched(&device.target(), n_tokens)?;
        let io = PassTensors { fetched, ..PassTensors::declare(config, self.context_length(), n_tokens)? };
        let io = io.with_mtp(config, self.kv_type(), self.context_length(), n_tokens)?;
        let record = || {
            let mut rec = device.recorder();
            let mut hidden = Vec::new();
            // Each tap has its own tensor, because blocks overwrite the residual stream.
            let mut tap = |rec: &mut Recorder, h: &Tensor| {
                let kept = Tensor::declare("hidden", Role::Activations, h.shape(), DType::F32)?;
                // The stream holds values divided by this scale.
                crate::kernels::scale(rec, h, &kept, config.residual_scale)?;
                hidden.push(kept);
                Ok(())
            };
            let h = self.transformer().record_layers(&mut rec, &cache, &io, n_tokens, &mut tap)?;
            let all_logits =
                || Tensor::declare("logits", Role::Activations, &[n_tokens, config.vocab_size], DType::F32);
            let logits = all_logits()?;
            self.transformer().record_head(&mut rec, &h, &logits)?;
            let mtp = io.mtp.as_ref().map(|_| all_logits()).transpose()?;
            if let Some(logits) = &mtp {
                self.transformer().record_hidden(&mut rec, &io, &h)?;
                self.transformer().record_mtp_logits(&mut rec, &io, logits)?;
            }
            Ok((rec.finish(&mut Workspace::default()), logits, mtp, hidden))
        };
        let (recording, logits, of_mtp, hidden) = record_tested(device, record, |(recording, ..)| recording).await?;
        let rope_offset = self.transformer().rope_offset(n_tokens);
        device.write(&io.tokens, 0, ids)?;
        self.fetch_rows(device, &io, 0, ids).await?;
        io.state.set_with_rope(device, 0, n_tokens, rope_offset)?;
        if let Some(mtp) = &io.mtp {
            device.write(mtp.tokens(), 0, ids.get(1..).unwrap_or_default())?;
            mtp.state().set_with_rope(device, 0, n_tokens - 1, rope_offset)?;
        }
        self.run(&recording, ids.len()).await?;
        let mut trace = Trace { logits: device.read(&logits).await?, hidden: Vec::new(), mtp: None };
        for kept in &hidden {
            trace.hidden.push(device.read(kept).await?);
        }
        if let Some(logits) = &of_mtp {
            let mut logits = device.read(logits).await?;
            logits.truncate((ids.len() - 1) * config.vocab_size as usize);
            trace.mtp = Some(logits);
        }
        Ok(trace)
    }
}

/// LoRA adapters.
#[cfg(feature = "lora")]
impl Model {
    /// The adapter of new sessions.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    pub(super) fn set_adapter(&mut self, adapter: Option<Adapter>) {
        self.adapter = adapter;
    }

    pub(super) fn set_adapters(&mut self, adapters: Arc<[(String, Adapter)]>) {
        self.adapters = adapters;
    }

    pub(super) fn planned(self, plan: MemoryPlan) -> Model {
        Model { plan, ..self }
    }

    pub(super) fn base_transformer(&self) -> &Transformer {
        &self.inner.transformer
    }

    pub(super) fn downgrade(&self) -> std::sync::Weak<ModelInner> {
        Arc::downgrade(&self.inner)
    }

    pub(super) fn loaded_adapters(&self) -> &Mutex<Vec<std::sync::Weak<AdapterInner>>> {
        &self.inner.adapters
    }

    /// Refuses an adapter of `size_bytes` that does not fit beside the model, a session and the other adapters.
    pub(super) fn check_adapter_fits(&self, size_bytes: u64) -> Result<(), Error> {
        if self.inner.limit.is_none() {
            return Ok(());
        }
        let base = Model { adapter: None, ..self.clone() };
        let mut plan = RecordedPasses::declare(&self.device.target(), base.transformer(), self.room)?.plan();
        plan.weights_bytes = plan.weights_bytes.saturating_add(self.adapters_bytes()).saturating_add(size_bytes);
        if self.inner.streamed.is_some() {
            let hint = "disk offload leaves no memory for adapters; load the model with a lower memory limit";
            return self.check_fits(&plan, hint);
        }
        self.check_fits(&plan, "drop unused adapters")
    }
}

/// Identifies a vocabulary by the bytes of its tokens.
fn digest_of_vocab(tokenizer: &Tokenizer) -> u64 {
    let mut digest = Xxh64::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        let text = tokenizer.token_bytes(id).unwrap_or_default();
        digest.add(&(text.len() as u32).to_le_bytes());
        digest.add(text);
    }
    digest.finish()
}

/// Adds the block of the MTP head to the configuration, if there is one and the options ask for it.
fn with_mtp(mut config: ModelConfig, mtp: Option<Block>, options: &LoadOptions<'_>) -> ModelConfig {
    if let Some(block) = mtp.filter(|_| options.mtp_tokens) {
        config.blocks.push(block);
        config.n_mtp = 1;
    }
    config
}

/// Refuses tensors that no pass reads, except those of an unused MTP head.
fn check_read(
    tensor_index: &TensorIndex,
    weights: &Weights,
    config: &ModelConfig,
    leaves_out: bool,
) -> Result<(), Error> {
    let unread = config.unread();
    let read = weights.tensor_slots().map(|(name, _)| name).chain(unread.iter().map(String::as_str));
    let left_out = leaves_out.then(|| tensor_index.of_layers_from(config.n_layers()));
    tensor_index.check_read(read.chain(left_out.into_iter().flatten()))
}

/// A session's limits from the options.
fn checked_room(
    target: &Target,
    limit: u32,
    knows_memory: bool,
    options: &LoadOptions<'_>,
) -> Result<SessionLimits, Error> {
    let &LoadOptions { context_length, fit_context, max_pass, kv_type, .. } = options;
    let longest = (fit_context && knows_memory).then_some(limit);
    let context_length = checked_context(limit, context_length.or(longest))?;
    Ok(SessionLimits { context_length, max_pass: checked_max_pass(target, max_pass)?, kv_type })
}

/// Memory of the weights, which need not be allocated, and one session; allocates nothing.
///
/// # Errors
/// As [`Model::plan_file`].
pub(crate) fn plan_of(
    target: &Target,
    config: ModelConfig,
    weights: Weights,
    options: &LoadOptions<'_>,
) -> Result<MemoryPlan, Error> {
    let room = checked_room(target, config.max_seq_len, false, options)?;
    let transformer = Transformer::declare(config, weights, room.context_length)?;
    Ok(RecordedPasses::declare(target, &transformer, room)?.plan())
}

/// The requested context length within the model's limit, or the default.
fn checked_context(limit: u32, asked: Option<u32>) -> Result<u32, Error> {
    let context_length = asked.unwrap_or(DEFAULT_CONTEXT.min(limit));
    if context_length == 0 || context_length > limit {
        return Err(Error::Option {
            option: "context_length",
            expected: format!("1 to the model's {limit}"),
            found: context_length.to_string(),
        });
    }
    Ok(context_length)
}

/// The requested pass size, one of [`PASS_SIZES`], or the target's default.
fn checked_max_pass(target: &Target, asked: Option<u32>) -> Result<u32, Error> {
    let max_pass = asked.unwrap_or(target.usual_max_pass());
    if !PASS_SIZES.contains(&max_pass) {
        let (expected, found) = (format!("one of {PASS_SIZES:?}"), max_pass.to_string());
        return Err(Error::Option { option: "max_pass", expected, found });
    }
    Ok(max_pass)
}

/// Tokens per submission. Submitting, waiting and mapping the result takes a host tens to hundreds of microseconds,
/// however short the passes. A token reads all weights once: 64 MiB take a GPU with 1 TB/s 60 us. With more weights
/// the GPU is the bottleneck, and single tokens reach the reader soonest. Software adapters are for tests and behave
/// as most GPUs with most models.
fn tokens_per_submit(is_real_gpu: bool, weights_bytes: u64) -> u32 {
    const SMALL_BYTES: u64 = 64 << 20;
    if is_real_gpu && weights_bytes < SMALL_BYTES { 4 } else { 1 }
}

/// The notice of weights of the files that are not loaded with the text model.
fn unread_notice(part: &str) -> String {
    format!("not loaded with the text model: weights for {part}")
}

#[cfg(test)]
mod tests {
    use super::tokens_per_submit;

    #[test]
    fn only_small_models_on_gpus_compute_several_tokens_per_submit() {
        assert_eq!([0, 1 << 20, (64 << 20) - 1].map(|bytes| tokens_per_submit(true, bytes)), [4; 3]);
        assert_eq!([64 << 20, 1 << 40].map(|bytes| tokens_per_submit(true, bytes)), [1; 2]);
        assert_eq!(tokens_per_submit(false, 1 << 20), 1);
    }
}
