//! Disk offload for models larger than memory: some layers' matrices stay in the file, and each pass reads them
//! again.
//!
//! All tensors are declared as usual, but offloaded layers share a few slots in turn: while the device computes a
//! layer, a thread reads the next one into the free slot. In a browser, where a GPU runs asynchronously, the pass
//! reads the layer itself. Every pass visits the layers in the same order, so the resident ones never change: an LRU
//! cache would always miss.
//!
//! A mixture of experts may offload its experts' matrices only, see [`super::expert_cache`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use web_time::Instant;

use super::expert_cache::{ExpertCache, ExpertCacheStats};
use super::mailbox::Mailbox;
use crate::device::Device;
use crate::error::Error;
use crate::load::{ExpertSizes, LayerSizes, SLOTS, Share, TensorIndex, WeightFiles, WeightUploader, slot_sizes};
use crate::matrix::Matrix;
use crate::model::{ExpertWeights, Experts, ModelConfig, TensorSlot, Transformer, Weights, layer_of};
use crate::platform::{IS_BROWSER, Native, block_on, native, spawn};
use crate::recording::Recording;
use crate::tensor::{MemoryBlock, Role, Tensor};

/// Disk offload of layers and embedding tables, with statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Streaming {
    /// Layers of the device.
    pub n_layers: usize,
    /// Layers that each pass reads.
    pub n_streamed: usize,
    /// Bytes of all layers' matrices.
    pub layers_bytes: u64,
    /// Bytes that each pass reads; with an expert cache, the maximum of a pass over many tokens.
    pub streamed_bytes: u64,
    /// A shorter context length at which the whole model fits, if any.
    pub fitting_context: Option<u32>,
    /// Layers read so far.
    pub n_read: u64,
    /// Time spent reading layers.
    pub reading: Duration,
    /// Time the device waited for layers.
    pub waiting: Duration,
    /// Bytes of the embedding tables on disk, of which each pass reads its tokens' rows.
    pub tables_bytes: u64,
    /// Table rows read so far.
    pub n_rows_read: u64,
    /// Time spent reading and uploading rows.
    pub reading_rows: Duration,
    /// Bytes read from disk so far.
    pub read_bytes: u64,
    /// Statistics of the expert cache, if only experts are offloaded. `n_streamed` and `n_read` then count passes
    /// over many tokens only.
    pub experts: Option<ExpertCacheStats>,
}

impl Streaming {
    /// For a model without disk offload.
    pub(super) fn resident(transformer: &Transformer) -> Streaming {
        let matrices = matrices(&transformer.weights);
        Streaming {
            n_layers: transformer.layers().len(),
            layers_bytes: transformer.layers().map(|layer| bytes(&matrices[layer as usize])).sum(),
            ..Streaming::default()
        }
    }

    /// Fraction of a pass's bytes, or of the chosen experts, already on the device: 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        if let Some(experts) = &self.experts {
            return experts.hit_rate();
        }
        1.0 - self.streamed_bytes as f64 / (self.layers_bytes as f64).max(1.0)
    }

    /// Fraction of the reading time during which the device computed: 0 to 1.
    pub fn overlap(&self) -> f64 {
        let share = self.waiting.as_secs_f64() / self.reading.as_secs_f64().max(1e-9);
        1.0 - share.min(1.0)
    }
}

/// Matrices of each layer.
fn matrices(weights: &Weights) -> Vec<Vec<Tensor>> {
    let mut layers: Vec<Vec<Tensor>> = vec![Vec::new(); weights.blocks.len()];
    for (name, place) in weights.tensor_slots() {
        let (Some(layer), TensorSlot::Rows { matrix, .. }) = (layer_of(name), place) else { continue };
        let Some(known) = layers.get_mut(layer as usize) else { continue };
        for slab in matrix.slabs() {
            if !known.iter().any(|tensor| tensor.is_same(&slab.words)) {
                known.push(slab.words.clone());
            }
        }
    }
    layers
}

/// Matrices of a layer's experts.
fn of_experts(experts: &ExpertWeights) -> Vec<Tensor> {
    let [up, down] = experts.matrices();
    up.chain(down).flat_map(Matrix::tensors).cloned().collect()
}

fn sizes(tensors: &[Tensor]) -> Vec<u64> {
    tensors.iter().map(Tensor::size_bytes).collect()
}

fn bytes(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(Tensor::size_bytes).sum()
}

/// Layer sizes for the placement.
pub(super) fn layer_sizes(weights: &Weights, config: &ModelConfig, layers: Range<u32>) -> Vec<LayerSizes> {
    let matrices = matrices(weights);
    let layer = |l: usize| {
        let experts = config.blocks[l].feed_forward.experts.zip(weights.blocks[l].experts.as_ref());
        let experts = experts.map(|(Experts { n, n_used, .. }, experts)| {
            let [slot, beside] = experts.slot_bytes(n);
            ExpertSizes { n, n_used, matrices: sizes(&of_experts(experts)), slot, beside }
        });
        LayerSizes { matrices: sizes(&matrices[l]), experts }
    };
    layers.map(|l| layer(l as usize)).collect()
}

/// Offloaded layers and their shared slots.
pub(super) struct DiskOffload {
    reader: Arc<LayerReader>,
    /// Tensors read for each layer.
    tensors: Vec<Vec<Tensor>>,
    /// Held by a pass to its end: one pass at a time uses the slots.
    read_ahead: Mailbox<Option<Native<ReadAhead>>>,
    plan: Streaming,
    waiting_ns: AtomicU64,
}

struct LayerReader {
    /// Layer numbers and feeds, in order.
    layers: Vec<(usize, WeightUploader)>,
    files: WeightFiles,
    /// Reads single experts for passes over a few tokens.
    kept: Option<ExpertCache>,
    n_read: AtomicU64,
    read_bytes: AtomicU64,
    reading_ns: AtomicU64,
}

impl LayerReader {
    /// Reads the `i`-th offloaded layer into its slot.
    ///
    /// # Errors
    /// Those of reading.
    async fn read(&self, i: usize, device: &Device) -> Result<(), Error> {
        let (start, (layer, feed)) = (Instant::now(), &self.layers[i]);
        let read = match &self.kept {
            Some(kept) => kept.read_layer(*layer as u32, device, &self.files).await,
            None => feed.clone().read_again(device, &self.files).await,
        };
        self.reading_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.n_read.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(*read.as_ref().unwrap_or(&0), Ordering::Relaxed);
        read.map(drop)
    }
}

/// A read-ahead thread. In a browser there is none.
struct ReadAhead {
    /// Sends the slots that may be overwritten. Dropping it ends the thread.
    free: Option<Sender<usize>>,
    /// Layers read into their slots.
    ready: Arc<Mailbox<Result<usize, Error>>>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
    /// Starts a thread that reads the layers in a cycle as slots become free.
    fn start(reader: &Arc<LayerReader>, device: &Device) -> Result<ReadAhead, Error> {
        let (free, frees) = channel();
        let ready = Arc::new(Mailbox::new([]));
        let sender = LayerSender(ready.clone());
        let (reader, device) = (reader.clone(), device.clone());
        let read_all = move || {
            let mut is_free = [true; SLOTS];
            for i in (0..reader.layers.len()).cycle() {
                while !is_free[i % SLOTS] {
                    match frees.recv() {
                        Ok(slot) => is_free[slot] = true,
                        Err(_) => return,
                    }
                }
                is_free[i % SLOTS] = false;
                let read = block_on(reader.read(i, &device));
                let failed = read.is_err();
                sender.0.put(read.map(|()| i));
                if failed {
                    return;
                }
            }
        };
        let thread = spawn("tilewright layers", read_all).map_err(of_thread)?;
        Ok(ReadAhead { free: Some(free), ready, thread: Some(thread) })
    }

    async fn wait_for(&self, i: usize) -> Result<(), Error> {
        let ready = self.ready.take().await?;
        // Passes visit all layers in order, and a failed one ends the thread.
        debug_assert_eq!(ready, i);
        Ok(())
    }

    /// Frees a computed layer's slot.
    fn release(&self, i: usize) {
        // If the thread has ended, the next `wait_for` returns its error.
        let _ = self.free.as_ref().map(|free| free.send(i % SLOTS));
    }
}

impl Drop for ReadAhead {
    /// Joins the thread, so that two never write to the same slots.
    fn drop(&mut self) {
        self.free = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A pass's exclusive use of the slots.
pub(super) struct SlotGuard<'a> {
    return_to: &'a Mailbox<Option<Native<ReadAhead>>>,
    /// Left to the next pass; `None` makes that one start a new lane.
    read_ahead: Option<Native<ReadAhead>>,
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        self.return_to.put(self.read_ahead.take());
    }
}

/// Sends layers to the pass, and an error when the thread ends.
struct LayerSender(Arc<Mailbox<Result<usize, Error>>>);

impl Drop for LayerSender {
    fn drop(&mut self) {
        self.0.put(Err(of_thread(std::io::ErrorKind::Other.into())));
    }
}

fn of_thread(source: std::io::Error) -> Error {
    Error::Io { path: "the thread that reads layers".into(), source }
}

impl DiskOffload {
    /// Assigns slots to the offloaded matrices of newly declared weights. `fitting_context`: for the report.
    pub fn new(
        transformer: &Transformer,
        tensor_index: &TensorIndex,
        files: WeightFiles,
        share: &Share,
        fitting_context: Option<u32>,
    ) -> DiskOffload {
        let Range { start, end } = transformer.layers();
        let (streamed, kept): (Vec<(usize, Vec<Tensor>)>, _) = match share {
            Share::Layers(numbers) => {
                let mut all = matrices(&transformer.weights);
                let numbers = numbers.iter().map(|number| start as usize + number);
                (numbers.map(|layer| (layer, std::mem::take(&mut all[layer]))).collect(), None)
            }
            Share::Experts { .. } => {
                let blocks = transformer.weights.blocks.iter().enumerate().take(end as usize).skip(start as usize);
                let experts = blocks.filter_map(|(l, block)| Some((l, of_experts(block.experts.as_ref()?))));
                (experts.collect(), Some(ExpertCache::new(transformer, tensor_index)))
            }
        };
        let of_layers: Vec<Vec<u64>> = streamed.iter().map(|(_, tensors)| sizes(tensors)).collect();
        let of_slot = slot_sizes(of_layers.iter());
        let slot = || of_slot.iter().map(|&size| MemoryBlock::new(size, Role::Weights)).collect::<Vec<_>>();
        let slots: Vec<Vec<Arc<MemoryBlock>>> = std::iter::repeat_with(slot).take(SLOTS).collect();
        for ((_, tensors), slot) in streamed.iter().zip(slots.iter().cycle()) {
            let mut by_size: Vec<&Tensor> = tensors.iter().collect();
            crate::sort::by_key(&mut by_size, |tensor| std::cmp::Reverse(tensor.size_bytes()));
            by_size.iter().zip(slot).for_each(|(tensor, block)| tensor.storage.place(block));
        }
        let feed = |tensors: &[Tensor]| {
            let of_layer = transformer.tensor_slots().filter(|(_, place)| fills(place, tensors));
            WeightUploader::new(tensor_index, of_layer)
        };
        let plan = Streaming {
            n_streamed: streamed.len(),
            streamed_bytes: streamed.iter().map(|(_, tensors)| bytes(tensors)).sum(),
            fitting_context,
            ..Streaming::resident(transformer)
        };
        let reader = LayerReader {
            layers: streamed.iter().map(|(layer, tensors)| (*layer, feed(tensors))).collect(),
            files,
            kept,
            n_read: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            reading_ns: AtomicU64::new(0),
        };
        DiskOffload {
            reader: Arc::new(reader),
            tensors: streamed.into_iter().map(|(_, tensors)| tensors).collect(),
            read_ahead: Mailbox::new([None]),
            plan,
            waiting_ns: AtomicU64::new(0),
        }
    }

    /// A feed of the resident weights.
    pub fn resident(&self, transformer: &Transformer, tensor_index: &TensorIndex) -> WeightUploader {
        let is_streamed = |place: &TensorSlot| self.tensors.iter().any(|tensors| fills(place, tensors));
        let resident = transformer.tensor_slots().filter(|(_, place)| !is_streamed(place));
        WeightUploader::digesting(tensor_index, resident, |_| true)
    }

    /// Reads the resident weights of offloaded layers.
    ///
    /// # Errors
    /// As [`ExpertCache::fill`].
    pub async fn fill(&self, device: &Device) -> Result<(), Error> {
        match &self.reader.kept {
            Some(kept) => kept.fill(device, &self.reader.files).await,
            None => Ok(()),
        }
    }

    /// The offloaded tensors' share of the model digest. Reads them completely.
    pub fn digest(&self) -> u64 {
        let digests = self.reader.layers.iter().map(|(_, feed)| self.reader.files.digest(feed));
        digests.fold(0, u64::wrapping_add)
    }

    /// Disk offload with its statistics.
    pub fn report(&self) -> Streaming {
        let duration = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        let LayerReader { kept, n_read, read_bytes, reading_ns, .. } = &*self.reader;
        let experts = kept.as_ref().map(|kept| kept.report());
        // Reading single experts always stalls the device.
        let waited = kept.as_ref().map_or(Duration::ZERO, |kept| kept.reading());
        Streaming {
            n_read: n_read.load(Ordering::Relaxed),
            reading: duration(reading_ns) + waited,
            waiting: duration(&self.waiting_ns) + waited,
            read_bytes: read_bytes.load(Ordering::Relaxed) + experts.map_or(0, |experts| experts.read_bytes),
            experts,
            ..self.plan
        }
    }

    /// Runs a recording, whose first `n_rows` rows are tokens, up to the last step that waits for the disk. Returns
    /// the next step and the turn, which the caller must hold until the remaining steps are submitted. Dropping the
    /// future leaves the pass partly computed.
    ///
    /// # Errors
    /// Those of reading and of [`Device::run`].
    pub async fn run_up_to_last(
        &self,
        device: &Device,
        (recording, n_rows): (&Recording, usize),
    ) -> Result<(usize, SlotGuard<'_>), Error> {
        let mut turn = SlotGuard { read_ahead: self.read_ahead.take().await, return_to: &self.read_ahead };
        let LayerReader { kept, layers, files, .. } = &*self.reader;
        if let (Some(kept), false) = (kept, recording.choices().is_empty()) {
            return Ok((kept.run_up_to_last((device, files), (recording, n_rows)).await?, turn));
        }
        let position = |layer: u32| layers.iter().position(|(streamed, _)| *streamed == layer as usize);
        if recording.layers().all(|(layer, _)| position(layer).is_none()) {
            return Ok((0, turn));
        }
        device.prepare(recording)?;
        // A failed or dropped pass leaves no lane.
        let read_ahead = match turn.read_ahead.take() {
            None if !IS_BROWSER => Some(native(ReadAhead::start(&self.reader, device)?)),
            known => known,
        };
        let ahead = read_ahead.as_ref();
        let mut done = 0;
        for (layer, steps) in recording.layers() {
            let Some(i) = position(layer) else { continue };
            if steps.start > done {
                device.run_steps(recording, done..steps.start)?;
            }
            let start = Instant::now();
            match ahead {
                Some(ahead) => ahead.wait_for(i).await?,
                None => self.reader.read(i, device).await?,
            }
            self.waiting_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            device.run_steps(recording, steps.clone())?;
            // Later writes to the slot are queued after these steps.
            if let Some(ahead) = ahead {
                ahead.release(i);
            }
            done = steps.end;
        }
        turn.read_ahead = read_ahead;
        Ok((done, turn))
    }
}

/// Whether a destination is one of these tensors.
fn fills(place: &TensorSlot, tensors: &[Tensor]) -> bool {
    let TensorSlot::Rows { matrix, .. } = place else { return false };
    matrix.slabs().iter().any(|slab| tensors.iter().any(|tensor| tensor.is_same(&slab.words)))
}
