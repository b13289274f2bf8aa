//! A model on a device.

use std::num::NonZeroUsize;
#[cfg(not(target_arch = "wasm32"))]
use std::ops::Range;
#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "lora")]
use std::sync::Mutex;
#[cfg(any(feature = "grammar", not(target_arch = "wasm32")))]
use std::sync::OnceLock;

use super::Session;
#[cfg(feature = "lora")]
use super::adapter::{Adapter, AdapterInner};
use super::disk_offload::{DiskOffload, Streaming};
use super::disk_tables::DiskTables;
use super::part::Part;
use super::passes::{PASS_SIZES, RecordedPasses, SessionLimits};
#[cfg(not(target_arch = "wasm32"))]
use super::pipeline::{self, DeviceLayers, PipelineStages, StagePasses};
use crate::device::{Device, Pending};
use crate::dtype::DType;
use crate::error::Error;
use crate::formats::BlockType;
#[cfg(feature = "grammar")]
use crate::grammar::Grammars;
use crate::kernels::KvType;
use crate::load::{Asked, Catalog, ChatSource, Feed, MTP, ModelFile, ModelHeader, Needs, Placement, WeightFiles};
use crate::memory::Limit;
use crate::model::{Block, KvCache, ModelConfig, PassTensors, Transformer, Weights};
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::target::Target;
use crate::tensor::{Role, Tensor};
use crate::tokenizer::{EncodeOptions, EncodingCache, Tokenizer};
use crate::tuning::{record_tested, while_testing};
use crate::xxh64::Xxh64;

/// Context length where neither the caller nor a shorter model says otherwise.
const DEFAULT_CONTEXT: u32 = 4096;

/// Texts whose encodings are remembered.
const ENCODING_CACHE: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// How to load a model.
#[derive(Default)]
pub struct LoadOptions<'a> {
    /// Positions of the key/value cache: 1 up to the model's own limit. The smaller of 4096 and that limit if `None`.
    pub context_length: Option<u32>,
    /// Take the longest context that fits the memory, where that can be known, in place of refusing the model: up to
    /// `context_length`, or to the model's own limit if that is `None`. Where memory is not known this changes nothing.
    pub fit_context: bool,
    /// Bytes that weights, cache and activations may take together.
    pub memory_limit: Option<u64>,
    /// Where the memory does not hold the model, leave a part of it in the file in place of refusing the model:
    /// tables of which a pass reads a few rows, as with `stream_rows`, and if that is not enough as many layers as
    /// must be, which are read again in each pass. Of a mixture of experts everything else stays if that leaves less
    /// to be read, with the experts of each layer that are used most, and others are read when a token chooses them.
    /// [`Model::streaming`] tells. Passes of several sessions then take turns: a future that waits in one is to be
    /// awaited or dropped before another's goes on. For files that are there as a whole, or in a browser those that
    /// JavaScript can read again.
    pub stream_layers: bool,
    /// Reads whole layers also where some experts of each could be kept, so that a bench can tell the difference.
    #[doc(hidden)]
    pub whole_layers: bool,
    /// Leave tables of which a pass reads the rows of its tokens in the file, and read these rows for each pass, even where the
    /// memory holds the tables: per-layer embeddings, and the embedding unless the device has it as the head or embeds with it
    /// what an MTP head drafts. Without such a table this changes nothing. For files that are there as a whole.
    pub stream_rows: bool,
    /// Layers that are computed on a GPU: the last ones, and the head. The CPU computes the others, and its memory holds them
    /// and the embedding. All of them if `None`. For files that are there as a whole, natively; on the CPU this changes
    /// nothing.
    pub gpu_layers: Option<u32>,
    /// Further devices that compute layers, in order, before the model's own: the first of them goes on after the layers that
    /// `gpu_layers` leaves to the CPU. The memory of each holds its layers. For files that are there as a whole.
    #[cfg(not(target_arch = "wasm32"))]
    pub layers_on: Vec<DeviceLayers>,
    /// Load the head that drafts the token after the next one, if the files have one that is known (Qwen3.5):
    /// [`GenerateOptions::mtp_tokens`](super::GenerateOptions::mtp_tokens) uses it. It takes about as much memory as a
    /// layer, and needs the embedding on its device.
    pub mtp_tokens: bool,
    /// See [`Model::max_pass`]: one of [`PASS_SIZES`]. 512 on a GPU, 128 on the CPU and on software adapters if `None`.
    pub max_pass: Option<u32>,
    /// What keys and values are cached as.
    pub kv_type: KvType,
    /// Never round activations. On the CPU, a device that [`Device::open`] opened rounds those that meet quantised weights: to
    /// signed bytes, 32 of them with one scale, as llama.cpp does, if the processor multiplies bytes faster than floats
    /// (x86-64 with AVX2). [`Device::cpu`] never does. On a real GPU, a prompt's
    /// products are in half precision where the adapter has it, summed in f32; browsers' adapters round nothing.
    pub exact: bool,
    /// Told bytes of weights that were read and uploaded, and their sum.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

/// A model whose weights are on a device. Cloning shares them.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
    device: Device,
    room: SessionLimits,
    plan: MemoryPlan,
    /// Of the weights that were loaded, see [`Feed::digest`], and of the vocabulary.
    digest: u64,
    /// What sessions begin with.
    #[cfg(feature = "lora")]
    adapter: Option<Adapter>,
    /// What requests of an engine name.
    #[cfg(feature = "lora")]
    adapters: Arc<[(String, Adapter)]>,
    /// What drafts tokens in an engine.
    #[cfg(not(target_arch = "wasm32"))]
    draft: Option<Arc<Model>>,
}

/// The weights that a request is computed with: the model's own, or those with an adapter.
#[derive(Clone, Copy)]
pub(crate) struct Adapted<'a> {
    pub transformer: &'a Transformer,
    /// Tells the adapter from others of the model; 0 is none.
    pub number: usize,
}

pub(super) struct Inner {
    name: String,
    transformer: Transformer,
    encodings: Result<EncodingCache, String>,
    chat: ChatSource,
    block_types: Vec<BlockType>,
    tokens_per_submit: u32,
    /// Reads what the device has no room for.
    streamed: Option<DiskOffload>,
    /// Fetches rows of tables that are in the file.
    tables: Option<DiskTables>,
    /// What other devices compute first.
    #[cfg(not(target_arch = "wasm32"))]
    fronts: Arc<PipelineStages>,
    /// Of what stays in the file; computed when it is needed first.
    #[cfg(not(target_arch = "wasm32"))]
    digest_in_file: OnceLock<u64>,
    /// Adapters that were loaded, and the memory that they share with the model.
    #[cfg(feature = "lora")]
    adapters: Mutex<Vec<std::sync::Weak<AdapterInner>>>,
    /// The most memory that it may take with all that belongs to it.
    limit: Option<Limit>,
    /// Made when they are needed first.
    #[cfg(feature = "grammar")]
    grammars: OnceLock<Arc<Grammars>>,
}

/// Layers of a model on the device that computes them.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Clone, Debug, serde::Serialize)]
pub struct Placed {
    /// The device; written as its name.
    #[serde(serialize_with = "name_of")]
    pub device: Device,
    /// The layers, counted from 0; with the first comes the embedding, with the last the head.
    pub layers: Range<u32>,
    /// Memory of their weights and one session.
    pub plan: MemoryPlan,
}

#[cfg(not(target_arch = "wasm32"))]
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
    /// What the MTP head makes of each token but the last and of the one after it, if the model has one: logits of
    /// the token after both, `[T - 1, V]`.
    pub mtp: Option<Vec<f32>>,
}

impl Model {
    /// Loads a GGUF file or a Hugging Face folder, see [`ModelFile::open`].
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`Model::from_file`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn load(device: &Device, path: impl AsRef<Path>, options: LoadOptions<'_>) -> Result<Model, Error> {
        let path = path.as_ref();
        Model::from_file(device, ModelFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Loads the model that is part of this crate.
    ///
    /// # Errors
    /// As [`Model::from_file`].
    #[cfg(feature = "builtin")]
    pub fn builtin(device: &Device) -> Result<Model, Error> {
        Model::from_file(device, ModelFile::builtin()?, LoadOptions::default())
    }

    /// Puts a model on a device: declares everything, compares the plan with the limit, then uploads tensor by tensor.
    ///
    /// # Errors
    /// [`Error::Memory`] if the plan exceeds the limit, with nothing allocated; [`Error::Option`] for a context length
    /// or a size of passes out of range; [`Error::Config`] if a weight is missing; errors of [`Device::write`].
    pub fn from_file(device: &Device, file: ModelFile, options: LoadOptions<'_>) -> Result<Model, Error> {
        let ModelFile { header, files } = file;
        let files = Arc::new(files);
        #[cfg(not(target_arch = "wasm32"))]
        let (model, mut feed) = Model::declare(device, header, Some(&files), &options)?;
        #[cfg(target_arch = "wasm32")]
        let (model, mut feed) = Model::declare(device, header, None, &options)?;
        let test = RecordedPasses::test_usual(&model.device, model.transformer(), model.room);
        while_testing(test, || feed.take_all(device, &files, options.progress))?;
        let digest = feed.digest();
        #[cfg(not(target_arch = "wasm32"))]
        model.inner.streamed.as_ref().map_or(Ok(()), |streamed| streamed.fill(device))?;
        #[cfg(not(target_arch = "wasm32"))]
        let digest = digest.wrapping_add(model.inner.fronts.fill(&files, model.room)?);
        model.complete(device.clone(), digest)
    }

    /// Declares a model whose weights the feed is still to take, and compares the plan with the limit; nothing is
    /// allocated. `files`: the model's, where layers may be read from them again.
    pub(super) fn declare(
        device: &Device,
        header: ModelHeader,
        files: Option<&WeightFiles>,
        options: &LoadOptions<'_>,
    ) -> Result<(Model, Feed), Error> {
        header.note_vocabulary(device);
        let ModelHeader { name, shape, tokenizer, chat, catalog, mtp, mut unread } = header;
        let leaves_out = mtp.is_some() && !options.mtp_tokens;
        if leaves_out {
            unread.push(MTP);
        }
        let config = with_mtp(shape.into_decoder()?, mtp, options);
        let limit = Limit::of(options.memory_limit, device.available_bytes());
        let device = device.for_model(options.exact);
        let target = device.target();
        let room = checked_room(&target, config.max_seq_len, limit.is_some(), options)?;
        let part = Part::declare(target, &config, &catalog, room)?;
        check_read(&catalog, &part.weights, &config, leaves_out)?;
        #[cfg(not(target_arch = "wasm32"))]
        let before = pipeline::before(&device, &config, options, files.is_some())?;
        #[cfg(not(target_arch = "wasm32"))]
        let part = part.of_layers(before.iter().map(|layers| layers.n_layers).sum()..config.n_layers());
        let asked = Asked {
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
        if !unread.is_empty() {
            device
                .tested()
                .note(format!("of the model text alone is read: its parts for {} are left out", unread.join(", ")));
        }
        let feed = match &streamed {
            Some(streamed) => streamed.resident(&transformer, &catalog),
            None => Feed::digesting(&catalog, transformer.destinations(), |_| true),
        };
        #[cfg(not(target_arch = "wasm32"))]
        let fronts = {
            let declare = |fetches_rows| {
                let shared = pipeline::Shared { catalog: &catalog, room, exact: options.exact, fetches_rows };
                let fronts = PipelineStages::declare(&before, &transformer, shared)?;
                fronts.check_plans(fronts.plans(room)?.into_iter()).map(|()| fronts)
            };
            match declare(options.stream_rows) {
                Err(Error::Memory { .. }) if options.stream_layers && !options.stream_rows => declare(true)?,
                declared => declared?,
            }
        };
        let tables = files.and_then(|files| {
            #[cfg(not(target_arch = "wasm32"))]
            let first = fronts.parts().next().map_or(&transformer, |(_, part)| part);
            #[cfg(target_arch = "wasm32")]
            let first = &transformer;
            DiskTables::of(first, &transformer, &catalog, files, placement.in_file.fitting_context)
        });
        let encodings = match tokenizer {
            Ok(tokenizer) => Ok(EncodingCache::new(Arc::new(tokenizer), ENCODING_CACHE)),
            Err(error) => Err(error.to_string()),
        };
        let weights_bytes = transformer.weights.tensors().map(Tensor::size_bytes).sum();
        let tokens_per_submit = tokens_per_submit(device.is_real_gpu(), weights_bytes);
        let block_types = catalog.block_types();
        let inner = Inner {
            name,
            transformer,
            encodings,
            chat,
            block_types,
            tokens_per_submit,
            streamed,
            tables,
            #[cfg(not(target_arch = "wasm32"))]
            fronts: Arc::new(fronts),
            #[cfg(not(target_arch = "wasm32"))]
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
            #[cfg(not(target_arch = "wasm32"))]
            draft: None,
        };
        Ok((model, feed))
    }

    /// Adds what is not in the files, once the feed wants nothing more, and its digest. Sessions follow this device's tuning.
    pub(super) fn complete(self, device: Device, digest: u64) -> Result<Model, Error> {
        self.transformer().upload_ropes(&device)?;
        let digest = digest.wrapping_add(self.tokenizer().map_or(0, digest_of_vocab));
        Ok(Model { device: device.for_model(!self.rounds()), digest, ..self })
    }

    /// Reads what stays on the device of layers that passes read again.
    #[cfg(target_arch = "wasm32")]
    pub(super) async fn fill(&self) -> Result<(), Error> {
        match &self.inner.streamed {
            Some(streamed) => streamed.fill(&self.device).await,
            None => Ok(()),
        }
    }

    /// Memory that a file's weights and one session would take on a device, whatever the limit; nothing is allocated.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape than the configuration says.
    pub fn plan_file(target: &Target, file: &ModelFile, options: &LoadOptions<'_>) -> Result<MemoryPlan, Error> {
        let ModelHeader { shape, catalog, mtp, .. } = &file.header;
        let leaves_out = mtp.is_some() && !options.mtp_tokens;
        let config = with_mtp(shape.decoder()?.clone(), mtp.clone(), options);
        let room = checked_room(target, config.max_seq_len, false, options)?;
        let part = Part::declare(target.clone(), &config, catalog, room)?;
        check_read(catalog, &part.weights, &config, leaves_out)?;
        part.plan(room.context_length, options.stream_rows)
    }

    /// Refuses what loading it would refuse by its header: what does not fit, or is of another kind; nothing is allocated. With
    /// `stream_layers` its files can be read again.
    #[cfg(all(feature = "web", target_arch = "wasm32"))]
    pub(crate) fn check_header(device: &Device, header: ModelHeader, options: &LoadOptions<'_>) -> Result<(), Error> {
        let read = std::rc::Rc::new(|_, _, _| Box::pin(async { Ok(Vec::new()) }) as _);
        let files = WeightFiles::new(read, &[]);
        Model::declare(device, header, Some(&files), options).map(drop)
    }

    /// Runs a pass, of whose rows the first `n_rows` are those of tokens.
    pub(crate) async fn run(&self, pass: &Recording, n_rows: usize) -> Result<(), Error> {
        match &self.inner.streamed {
            Some(streamed) => {
                // Boxed, so that what waits for a pass is no larger where nothing is streamed.
                let (done, _turn) = Box::pin(streamed.run_up_to_last(&self.device, (pass, n_rows))).await?;
                self.device.run_steps(pass, done..pass.n_dispatches())
            }
            None => self.device.run(pass),
        }
    }

    /// Runs a pass as [`Model::run`], `n_runs` times, or once where layers are streamed, and reads a tensor after each run.
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

    /// Which layers, and rows of which tables, each pass reads from the file, or which experts tokens do, and what came of it,
    /// if not all is on the device.
    pub fn streaming(&self) -> Option<Streaming> {
        let layers = self.inner.streamed.as_ref().map(DiskOffload::report);
        match &self.inner.tables {
            Some(tables) => Some(tables.report(layers.unwrap_or_else(|| Streaming::resident(&self.inner.transformer)))),
            None => layers,
        }
    }

    /// The tables that are in the file.
    pub(super) fn row_tables(&self) -> Option<&DiskTables> {
        self.inner.tables.as_ref()
    }

    /// Hands a device these tokens' rows of the tables that are in the file, for its next pass.
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

    /// The number of each token's row among those that are fetched.
    pub(crate) fn fetched_numbers(&self, ids: &[u32]) -> Vec<u32> {
        self.row_tables().map_or(Vec::new(), |tables| tables.numbers(ids))
    }

    /// Which device computes which layers, in order; the model's own is the last.
    ///
    /// # Errors
    /// As [`Model::session`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn placement(&self) -> Result<Vec<Placed>, Error> {
        let others = self.inner.fronts.parts().zip(self.inner.fronts.plans(self.room)?);
        let others =
            others.map(|((device, part), plan)| Placed { device: device.clone(), layers: part.layers(), plan });
        let own = Placed { device: self.device.clone(), layers: self.transformer().layers(), plan: self.plan };
        Ok(others.chain([own]).collect())
    }

    /// A session's passes on other devices.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn front_passes(&self) -> Result<StagePasses, Error> {
        StagePasses::declare(&self.inner.fronts, self.room)
    }

    /// Refuses what takes more than the limit.
    pub(crate) fn check_fits(&self, plan: &MemoryPlan, hint: &str) -> Result<(), Error> {
        match self.inner.limit {
            Some(limit) if plan.total_bytes() > limit.bytes => {
                Err(plan.refused(limit.bytes, limit.explained(hint.into())))
            }
            _ => Ok(()),
        }
    }

    /// Other devices that compute layers before this one does, in order, and their parts.
    pub(crate) fn parts_before(&self) -> impl Iterator<Item = (&Device, &Transformer)> {
        #[cfg(not(target_arch = "wasm32"))]
        return self.inner.fronts.parts();
        #[cfg(target_arch = "wasm32")]
        std::iter::empty()
    }

    /// All devices that compute layers, in order; the model's own is the last.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.parts_before().map(|(device, _)| device).chain([&self.device])
    }

    /// Refuses what takes more than these other devices have, as far as that is known: a plan for each, in order.
    #[cfg_attr(target_arch = "wasm32", expect(unused_variables))]
    pub(crate) fn check_fits_before(&self, plans: impl Iterator<Item = MemoryPlan>) -> Result<(), Error> {
        #[cfg(not(target_arch = "wasm32"))]
        self.inner.fronts.check_plans(plans)?;
        Ok(())
    }

    /// Refuses what needs all layers on the device at once.
    pub(super) fn expect_resident(&self, option: &'static str) -> Result<(), Error> {
        self.expect_layers_off_file(option)?;
        match self.transformer().layers().start {
            0 => Ok(()),
            elsewhere => Err(Error::Option {
                option,
                expected: "a model all of whose layers are on the device".into(),
                found: format!("{elsewhere} that others compute"),
            }),
        }
    }

    /// Refuses what cannot wait for layers that are read from the file.
    fn expect_layers_off_file(&self, option: &'static str) -> Result<(), Error> {
        if let Some(streaming) = self.inner.streamed.as_ref().map(DiskOffload::report) {
            let expected = "a model all of whose layers are on the device".into();
            let found = match streaming.experts {
                Some(experts) => format!("{} of {} experts there", experts.n_kept, experts.n_experts),
                None => format!(
                    "{} of {} that are read from the file in each pass",
                    streaming.n_streamed, streaming.n_layers
                ),
            };
            return Err(Error::Option { option, expected, found });
        }
        Ok(())
    }

    /// Whether a pass may be submitted before the one before it is done.
    pub(crate) fn runs_ahead(&self) -> bool {
        if self.inner.streamed.is_some() || self.inner.tables.is_some() {
            return false;
        }
        #[cfg(not(target_arch = "wasm32"))]
        if !self.inner.fronts.is_empty() {
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

    /// Block types of the weights in the file, the one with most bytes first.
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

    /// Positions of a session's cache.
    pub fn context_length(&self) -> u32 {
        self.room.context_length
    }

    /// Memory of the weights and one session.
    pub fn plan(&self) -> MemoryPlan {
        self.plan
    }

    /// Tokens of a prompt that one pass of a session takes at most.
    pub fn max_pass(&self) -> u32 {
        self.room.max_pass
    }

    /// What keys and values are cached as.
    pub fn kv_type(&self) -> KvType {
        self.room.kv_type
    }

    /// Tells the weights from others', all bytes of them, what is computed with them, such as angles, and the texts of tokens:
    /// whatever files and device they are in. What stays in the file is read for it, once: as much as a pass reads, or as
    /// passes would read that take all experts.
    pub(super) fn digest(&self) -> u64 {
        // With an MTP head or without, keys and values are the same.
        let mut config = self.config().clone();
        config.blocks.truncate(config.n_layers() as usize);
        config.n_mtp = 0;
        let digest = self.digest.wrapping_add(Xxh64::of(format!("{config:?}").as_bytes()));
        #[cfg(not(target_arch = "wasm32"))]
        let digest = digest.wrapping_add(*self.inner.digest_in_file.get_or_init(|| {
            let Inner { streamed, tables, .. } = &*self.inner;
            let of_tables = tables.as_ref().map_or(0, DiskTables::digest);
            streamed.as_ref().map_or(0, DiskOffload::digest).wrapping_add(of_tables)
        }));
        #[cfg(feature = "lora")]
        if let Some(adapter) = &self.adapter {
            return digest.wrapping_add(adapter.digest());
        }
        digest
    }

    /// The digest, as files have it.
    pub(crate) fn shown_digest(&self) -> String {
        format!("{:016x}", self.digest())
    }

    pub(super) fn room(&self) -> SessionLimits {
        self.room
    }

    /// The same model, whose sessions have passes for up to `max_pass` tokens; the weights are shared.
    ///
    /// # Errors
    /// [`Error::Option`] if that is none of [`PASS_SIZES`].
    pub fn with_max_pass(&self, max_pass: u32) -> Result<Model, Error> {
        let room = SessionLimits { max_pass: checked_max_pass(&self.device.target(), Some(max_pass))?, ..self.room };
        let plan = RecordedPasses::declare(&self.device.target(), self.transformer(), room)?.plan();
        Ok(Model { room, plan, ..self.clone() })
    }

    /// Tokens that one submission computes unless a generation asks for another number: 4 on a GPU, not software, that is
    /// done with a token before the next could be submitted, else 1.
    pub fn tokens_per_submit(&self) -> u32 {
        self.inner.tokens_per_submit
    }

    /// The tokenizer, which remembers what it encoded.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the file has none that can be used.
    pub fn encodings(&self) -> Result<&EncodingCache, Error> {
        self.inner.encodings.as_ref().map_err(|reason| Error::Tokenizer {
            field: "model".into(),
            expected: "a tokenizer".into(),
            found: format!("none: {reason}"),
        })
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// As [`Model::encodings`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.encodings().map(EncodingCache::tokenizer)
    }

    /// The vocabulary as constraints need it. The first call makes it, which takes up to a second if it is large.
    ///
    /// # Errors
    /// As [`Model::encodings`]; [`Error::Tokenizer`] if the vocabulary is too large.
    #[cfg(feature = "grammar")]
    pub fn grammars(&self) -> Result<&Arc<Grammars>, Error> {
        if let Some(grammars) = self.inner.grammars.get() {
            return Ok(grammars);
        }
        let grammars = Grammars::new(self.encodings()?.shared_tokenizer(), self.config().vocab_size)?;
        // Another thread may have been first.
        Ok(self.inner.grammars.get_or_init(|| Arc::new(grammars)))
    }

    /// Token ids of a text, with the tokens that the model expects around it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is no tokenizer or the text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, EncodeOptions { add_special: true, parse_special: false })
    }

    /// Token ids of a text, such as one with control tokens by their names.
    ///
    /// # Errors
    /// As [`Model::encode`].
    pub fn encode_with(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, Error> {
        Ok(self.encodings()?.encode(text, options)?.to_vec())
    }

    /// Refuses ids outside the vocabulary, no tokens at all, and more than `capacity` together with the `n_before` before them.
    pub(super) fn check_ids(&self, n_before: usize, ids: &[u32], capacity: usize) -> Result<(), Error> {
        let vocab_size = self.config().vocab_size;
        let error = |found: String| Error::Tokenizer {
            field: "prompt".into(),
            expected: format!("token ids below {vocab_size}"),
            found,
        };
        if n_before == 0 && ids.is_empty() {
            return Err(error("no tokens at all".into()));
        }
        if let Some(id) = ids.iter().find(|&&id| id >= vocab_size) {
            return Err(error(format!("the id {id}")));
        }
        let needed = n_before + ids.len();
        if needed > capacity { Err(Error::ContextFull { needed, capacity }) } else { Ok(()) }
    }

    /// Refuses to have a head draft that there is not.
    pub(crate) fn check_mtp(&self, mtp_tokens: u32) -> Result<(), Error> {
        if mtp_tokens == 0 || self.config().n_mtp > 0 {
            return Ok(());
        }
        Err(Error::Option {
            option: "mtp_tokens",
            expected: "0 for a model without an MTP head, or loaded without it".into(),
            found: mtp_tokens.to_string(),
        })
    }

    /// Refuses a prompt that no session of this model could take.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary or no tokens at all, [`Error::ContextFull`] for too many.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<(), Error> {
        self.check_ids(0, ids, self.context_length() as usize)
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

    /// The weights of a request that names an adapter, or none.
    ///
    /// # Errors
    /// [`Error::Option`] for a name that [`Model::with_adapters`] was not given.
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
        // Nobody in a browser gives adapters names.
        #[cfg(target_arch = "wasm32")]
        let expected = "none".into();
        #[cfg(not(target_arch = "wasm32"))]
        let expected = match self.adapter_names().map(|name| format!("`{name}`")).collect::<Vec<_>>() {
            none if none.is_empty() => "none: the model has no adapters".into(),
            known => known.join(" or "),
        };
        Error::Option { option: "adapter", expected, found: name.into() }
    }

    /// The adapters that requests of an engine can name, see [`Request::adapter`](crate::engine::Request::adapter).
    pub fn adapter_names(&self) -> impl Iterator<Item = &str> {
        #[cfg(feature = "lora")]
        return self.adapters.iter().map(|(name, _)| name.as_str());
        #[cfg(not(feature = "lora"))]
        std::iter::empty()
    }

    /// Bytes of these adapters.
    pub(crate) fn named_adapters_bytes(&self) -> u64 {
        #[cfg(feature = "lora")]
        return self.adapters.iter().map(|(_, adapter)| adapter.size_bytes()).sum();
        #[cfg(not(feature = "lora"))]
        0
    }

    /// The same model with a smaller one that drafts tokens in an engine, [`EngineOptions::draft_tokens`] at a time: the texts
    /// of greedy requests are the same, and there sooner where the smaller one is much faster and often right.
    ///
    /// # Errors
    /// [`Error::Operand`] if it has another number of tokens in its vocabulary, or layers that keep a state, which cannot go back to
    /// before a wrong draft.
    ///
    /// [`EngineOptions::draft_tokens`]: crate::engine::EngineOptions::draft_tokens
    #[cfg(not(target_arch = "wasm32"))]
    pub fn with_draft(&self, draft: &Model) -> Result<Model, Error> {
        let refused = |expected, found| Err(Error::Operand { kernel: "model", operand: "draft", expected, found });
        let [own, other] = [self, draft].map(|model| model.config().vocab_size);
        if own != other {
            return refused(format!("a vocabulary of {own} tokens"), other.to_string());
        }
        if draft.config().is_recurrent() {
            return refused("a model that keeps keys of all positions".into(), "layers that keep a state".into());
        }
        Ok(Model { draft: Some(Arc::new(draft.clone())), ..self.clone() })
    }

    /// The model that drafts tokens in an engine.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn draft(&self) -> Option<&Model> {
        self.draft.as_deref()
    }

    /// Runs all of `ids` in one pass and returns all logits and the residual stream after each block.
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
        // Of their own: a pass of that many tokens may take more room than those of a session.
        let cache = KvCache::declare(config, self.kv_type(), self.context_length(), n_tokens)?;
        let fetched = self.transformer().declare_fetched(&device.target(), n_tokens)?;
        let io = PassTensors { fetched, ..PassTensors::declare(config, self.context_length(), n_tokens)? };
        let io = io.with_mtp(config, self.kv_type(), self.context_length(), n_tokens)?;
        let record = || {
            let mut rec = device.recorder();
            let mut hidden = Vec::new();
            // Each tap gets a tensor of its own: the residual stream itself is overwritten.
            let mut tap = |rec: &mut Recorder, h: &Tensor| {
                let kept = Tensor::declare("hidden", Role::Activations, h.shape(), DType::F32)?;
                // The stream is kept divided.
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
        let angles = self.transformer().angles(n_tokens);
        device.write(&io.tokens, 0, ids)?;
        #[cfg(not(target_arch = "wasm32"))]
        self.fetch_rows(device, &io, 0, ids).await?;
        io.state.set_turned(device, 0, n_tokens, angles)?;
        if let Some(mtp) = &io.mtp {
            device.write(mtp.tokens(), 0, ids.get(1..).unwrap_or_default())?;
            mtp.state().set_turned(device, 0, n_tokens - 1, angles)?;
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

/// What adapters need of a model.
#[cfg(feature = "lora")]
impl Model {
    /// The adapter that sessions begin with.
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

    pub(super) fn downgrade(&self) -> std::sync::Weak<Inner> {
        Arc::downgrade(&self.inner)
    }

    pub(super) fn loaded_adapters(&self) -> &Mutex<Vec<std::sync::Weak<AdapterInner>>> {
        &self.inner.adapters
    }

    /// Refuses an adapter of so many bytes that does not fit beside the model, a session and the adapters that are there.
    pub(super) fn check_adapter_fits(&self, size_bytes: u64) -> Result<(), Error> {
        if self.inner.limit.is_none() {
            return Ok(());
        }
        let base = Model { adapter: None, ..self.clone() };
        let mut plan = RecordedPasses::declare(&self.device.target(), base.transformer(), self.room)?.plan();
        plan.weights_bytes = plan.weights_bytes.saturating_add(self.adapters_bytes()).saturating_add(size_bytes);
        #[cfg(not(target_arch = "wasm32"))]
        if self.inner.streamed.is_some() {
            let hint = "layers in the file leave no room for an adapter; a smaller limit for the model may";
            return self.check_fits(&plan, hint);
        }
        self.check_fits(&plan, "adapters that nobody uses can be let go")
    }
}

/// Tells the texts of tokens from those of another vocabulary.
fn digest_of_vocab(tokenizer: &Tokenizer) -> u64 {
    let mut digest = Xxh64::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        let text = tokenizer.token_bytes(id).unwrap_or_default();
        digest.add(&(text.len() as u32).to_le_bytes());
        digest.add(text);
    }
    digest.finish()
}

/// A model's configuration, with the block of its MTP head if there is one and it is wanted.
fn with_mtp(mut config: ModelConfig, mtp: Option<Block>, options: &LoadOptions<'_>) -> ModelConfig {
    if let Some(block) = mtp.filter(|_| options.mtp_tokens) {
        config.blocks.push(block);
        config.n_mtp = 1;
    }
    config
}

/// Refuses tensors that no pass would read, but for those of an MTP head that is left out.
fn check_read(catalog: &Catalog, weights: &Weights, config: &ModelConfig, leaves_out: bool) -> Result<(), Error> {
    let unread = config.unread();
    let read = weights.destinations().map(|(name, _)| name).chain(unread.iter().map(String::as_str));
    let left_out = leaves_out.then(|| catalog.of_layers_from(config.n_layers()));
    catalog.check_read(read.chain(left_out.into_iter().flatten()))
}

/// What a session has room for, as the options say.
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

/// Memory that weights, which may be nowhere, and one session would take; nothing is allocated.
///
/// # Errors
/// As [`Model::plan_file`].
#[cfg(not(target_arch = "wasm32"))]
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

/// The context length asked for, within what the model was trained on, or the default.
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

/// The largest pass that was asked for, one of [`PASS_SIZES`], or the target's usual one.
fn checked_max_pass(target: &Target, asked: Option<u32>) -> Result<u32, Error> {
    let max_pass = asked.unwrap_or(target.usual_max_pass());
    if !PASS_SIZES.contains(&max_pass) {
        let (expected, found) = (format!("one of {PASS_SIZES:?}"), max_pass.to_string());
        return Err(Error::Option { option: "max_pass", expected, found });
    }
    Ok(max_pass)
}

/// Tokens for one submission. To hand one over, to wait for it and to map what it wrote takes a host tens to hundreds of
/// microseconds, however short the passes are. A token reads all weights once, which takes a GPU with 1 TB/s 60 us for
/// 64 MiB. With more weights the GPU is the slower of the two, and one token at a time reaches the reader soonest. A
/// software adapter is there for tests and does what most GPUs do with most models.
fn tokens_per_submit(is_real_gpu: bool, weights_bytes: u64) -> u32 {
    const SMALL_BYTES: u64 = 64 << 20;
    if is_real_gpu && weights_bytes < SMALL_BYTES { 4 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::tokens_per_submit;

    #[test]
    fn only_small_models_on_real_gpus_compute_several_tokens_at_a_time() {
        assert_eq!([0, 1 << 20, (64 << 20) - 1].map(|bytes| tokens_per_submit(true, bytes)), [4; 3]);
        assert_eq!([64 << 20, 1 << 40].map(|bytes| tokens_per_submit(true, bytes)), [1; 2]);
        assert_eq!(tokens_per_submit(false, 1 << 20), 1);
    }
}
