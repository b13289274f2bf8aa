//! Groups texts into batches and records the pass of each batch size.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use crate::device::{Device, Pending};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::Pooling;
use crate::model::{BatchSize, BatchTensors, DenseLayer, ScoreHead, TensorSlot, Transformer};
use crate::recording::{BatchInvariance, MemoryPlan, Recorder, Recording, Workspace};
use crate::sort;
use crate::target::Target;
use crate::tensor::{Role, Tensor};
use crate::tuning::self_test;

/// Recorded passes to cache: those for small batches and for four powers of two.
const KEPT_PASSES: NonZeroUsize = NonZeroUsize::new(48).unwrap();

/// Rounds a batch size up: tokens to a multiple of 4 up to 64, then to eighths of the power of two below, so that at
/// most an eighth of a larger pass is idle; sequences to a power of two, which costs next to nothing.
pub(super) fn size_for(n_tokens: u32, n_sequences: u32) -> BatchSize {
    let step = (n_tokens.max(1).next_power_of_two() / 16).max(4);
    BatchSize { n_tokens: n_tokens.max(1).next_multiple_of(step), n_sequences: n_sequences.next_power_of_two() }
}

/// The size of a batch of these texts.
pub(super) fn size_of(texts: &[&Tokens]) -> BatchSize {
    size_for(texts.iter().map(|text| text.ids.len() as u32).sum(), texts.len() as u32)
}

/// Cuts texts of these lengths into batches of similar length with at most `max_tokens`, and returns each batch's
/// text indices. A longer text is a batch of its own.
pub(super) fn batches(lengths: &[usize], max_tokens: usize) -> Vec<Vec<usize>> {
    let order = sort::order(lengths.len(), &|a, b| lengths[a].cmp(&lengths[b]));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut n_tokens = 0;
    for i in order {
        n_tokens += lengths[i];
        match batches.last_mut() {
            Some(batch) if n_tokens <= max_tokens => batch.push(i),
            _ => {
                n_tokens = lengths[i];
                batches.push(vec![i]);
            }
        }
    }
    batches
}

/// Output layer after the encoder: one row per text, or per token.
#[derive(Clone, Debug)]
pub(crate) enum OutputHead {
    /// A vector.
    Vector {
        pooling: Pooling,
        normalize: bool,
        /// Dense layers between the two.
        layers: Vec<DenseLayer>,
    },
    /// A vector for each token.
    Tokens {
        normalize: bool,
        /// Dense layers before the norm.
        layers: Vec<DenseLayer>,
    },
    /// The logits of a score.
    Score(Box<ScoreHead>),
}

impl OutputHead {
    /// Rows of a text of so many tokens.
    pub fn n_rows(&self, n_tokens: usize) -> usize {
        if matches!(self, OutputHead::Tokens { .. }) { n_tokens } else { 1 }
    }

    /// Elements in a row.
    fn width(&self, encoder: &Transformer) -> u32 {
        match self {
            OutputHead::Vector { layers, .. } | OutputHead::Tokens { layers, .. } => {
                layers.last().map_or(encoder.config.dim, |layer| layer.config.outputs)
            }
            OutputHead::Score(head) => head.n_logits(),
        }
    }

    /// Its dense layers.
    pub fn layers(&self) -> &[DenseLayer] {
        match self {
            OutputHead::Vector { layers, .. } | OutputHead::Tokens { layers, .. } => layers,
            OutputHead::Score(_) => &[],
        }
    }

    /// The head of a score.
    fn score(&self) -> Option<&ScoreHead> {
        match self {
            OutputHead::Vector { .. } | OutputHead::Tokens { .. } => None,
            OutputHead::Score(head) => Some(head),
        }
    }

    /// Destinations of its source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let layers = self.layers().iter().flat_map(|layer| layer.tensor_slots());
        layers.chain(self.score().into_iter().flat_map(|head| head.tensor_slots()))
    }

    /// All its tensors.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let layers = self.layers().iter().flat_map(|layer| layer.tensors());
        layers.chain(self.score().into_iter().flat_map(|head| head.tensors()))
    }
}

/// One recorded pass per batch size.
pub(super) struct EncoderPasses {
    device: Device,
    encoder: Transformer,
    head: OutputHead,
    max_len: u32,
    state: Mutex<EncoderState>,
}

struct EncoderState {
    passes: LruCache<BatchSize, Arc<RecordedBatch>>,
    /// Passes run one at a time, so they share memory for temporaries.
    workspace: Workspace,
}

struct RecordedBatch {
    io: BatchTensors,
    /// One row per text, `[B, width]`, or per token, `[T, width]`.
    rows: Tensor,
    /// Each of them as a span of its own, `[B, 2]` or `[T, 2]`, where a norm is taken of rows.
    row_spans: Option<Tensor>,
    recording: Recording,
}

impl EncoderPasses {
    pub fn new(device: &Device, encoder: Transformer, head: OutputHead, max_len: u32) -> EncoderPasses {
        let state = EncoderState { passes: LruCache::new(KEPT_PASSES), workspace: Workspace::default() };
        EncoderPasses { device: device.clone(), encoder, head, max_len, state: Mutex::new(state) }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn encoder(&self) -> &Transformer {
        &self.encoder
    }

    /// Tokens of the longest text.
    pub fn max_len(&self) -> u32 {
        self.max_len
    }

    pub fn head(&self) -> &OutputHead {
        &self.head
    }

    /// Elements in a row.
    pub fn width(&self) -> u32 {
        self.head.width(&self.encoder)
    }

    /// Runs the self-test of the pass that these texts need.
    ///
    /// # Errors
    /// Those of the self-test.
    pub async fn test(&self, texts: &[&Tokens]) -> Result<(), Error> {
        self.test_size(size_of(texts)).await
    }

    /// Runs the self-test of the pass for this size.
    pub async fn test_size(&self, size: BatchSize) -> Result<(), Error> {
        loop {
            let pass = self.pass(&mut self.state(), size)?;
            if self_test(&self.device, &pass.recording).await? {
                return Ok(());
            }
            self.state().passes.pop(&size);
        }
    }

    /// Runs a batch. The result holds the texts' rows in order.
    pub fn run(&self, texts: &[&Tokens]) -> Result<Pending, Error> {
        let lengths: Vec<[u32; 2]> = texts.iter().map(|text| [text.ids.len() as u32, text.seen_len]).collect();
        let size = size_of(texts);
        // Held until the batch is submitted, so that another thread cannot overwrite the tokens.
        let mut state = self.state();
        let pass = self.pass(&mut state, size)?;
        let first_position = self.encoder.config.first_position();
        let mut tokens = Vec::with_capacity(pass.io.tokens.len());
        for text in texts {
            for (i, &id) in (0..).zip(&text.ids) {
                tokens.extend([id, first_position + i, u32::from(i >= text.first_len)]);
            }
        }
        tokens.resize(pass.io.tokens.len(), 0);
        self.device.write(&pass.io.tokens, 0, &tokens)?;
        pass.io.set_lengths(&self.device, &lengths)?;
        if let Some(row_spans) = &pass.row_spans {
            let spans: Vec<u32> = (0..row_spans.shape()[0]).flat_map(|row| [row, row + 1]).collect();
            self.device.write(row_spans, 0, &spans)?;
        }
        self.device.run_and_read(&pass.recording, &pass.rows)
    }

    /// Dispatches of a pass of this size.
    pub fn n_dispatches(&self, size: BatchSize) -> Result<usize, Error> {
        Ok(self.pass(&mut self.state(), size)?.recording.n_dispatches())
    }

    /// Memory of the weights and one pass of this size. Allocates nothing.
    pub fn plan(&self, size: BatchSize) -> Result<MemoryPlan, Error> {
        let pass = self.record(size, &mut Workspace::default())?;
        let others: Vec<&Tensor> = self.encoder.weights.tensors().chain(self.head.tensors()).collect();
        Ok(MemoryPlan::of([&pass.recording], others))
    }

    fn state(&self) -> MutexGuard<'_, EncoderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, state: &mut EncoderState, size: BatchSize) -> Result<Arc<RecordedBatch>, Error> {
        if let Some(pass) = state.passes.get(&size) {
            return Ok(pass.clone());
        }
        let pass = Arc::new(self.record(size, &mut state.workspace)?);
        state.passes.put(size, pass.clone());
        Ok(pass)
    }

    fn record(&self, size: BatchSize, workspace: &mut Workspace) -> Result<RecordedBatch, Error> {
        RecordedBatch::record(&self.device.target(), (&self.encoder, &self.head), size, self.max_len, workspace)
    }
}

impl RecordedBatch {
    fn record(
        target: &Target,
        (encoder, head): (&Transformer, &OutputHead),
        size: BatchSize,
        max_len: u32,
        workspace: &mut Workspace,
    ) -> Result<RecordedBatch, Error> {
        let io = BatchTensors::declare(target, &encoder.config, size, max_len)?;
        let n_rows = if matches!(head, OutputHead::Tokens { .. }) { size.n_tokens } else { size.n_sequences };
        let rows = Tensor::declare("rows", Role::Activations, &[n_rows, head.width(encoder)], DType::F32)?;
        // Experts have kernels for few rows and for many.
        let mut rec = Recorder::new(target.clone()).with_batch_invariance(BatchInvariance::Many);
        let h = encoder.record_batch(&mut rec, &io)?;
        let row_spans = match head {
            OutputHead::Score(_) => None,
            OutputHead::Vector { layers, .. } if layers.is_empty() => None,
            _ => Some(Tensor::declare("row spans", Role::Activations, &[n_rows, 2], DType::U32)?),
        };
        match (head, &row_spans) {
            (OutputHead::Vector { pooling, normalize, layers }, Some(row_spans)) => {
                let how = (*pooling, *normalize);
                encoder.record_dense_pooling(&mut rec, &io, &h, how, (layers, row_spans), &rows)?;
            }
            (OutputHead::Tokens { normalize, layers }, Some(row_spans)) => {
                encoder.record_dense(&mut rec, &h, *normalize, (layers, row_spans), &rows)?;
            }
            (OutputHead::Tokens { .. }, None) => {}
            (OutputHead::Vector { pooling, normalize, .. }, None) => {
                encoder.record_pooling(&mut rec, &io, &h, (*pooling, *normalize), &rows)?;
            }
            (OutputHead::Score(head), _) => encoder.record_scores(&mut rec, &io, &h, head, &rows)?,
        }
        Ok(RecordedBatch { io, rows, row_spans, recording: rec.finish(workspace) })
    }
}

/// Records the pass of one batch. The encoder's weights need not be allocated.
///
/// # Errors
/// [`Error::Operand`] or [`Error::Shape`] if the target's limits are too small for the batch.
pub(crate) fn record_texts(
    target: &Target,
    encoder: &Transformer,
    head: &OutputHead,
    size: BatchSize,
    max_len: u32,
) -> Result<Recording, Error> {
    let batch = RecordedBatch::record(target, (encoder, head), size, max_len, &mut Workspace::default())?;
    Ok(batch.recording)
}

/// Tokens of a text or a pair of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids, including the special tokens.
    pub ids: Vec<u32>,
    /// Tokens of the first text; later tokens belong to the second text and have token type 1.
    pub first_len: u32,
    /// Tokens that all tokens see. Later ones, which expand a query, are seen by none.
    pub seen_len: u32,
}

impl From<Vec<u32>> for Tokens {
    /// A single text.
    fn from(ids: Vec<u32>) -> Tokens {
        let len = ids.len() as u32;
        Tokens { ids, first_len: len, seen_len: len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_size_classes_waste_at_most_an_eighth() {
        for n in 1..5000 {
            let size = size_for(n, 1).n_tokens;
            assert!(size >= n && size.is_multiple_of(4), "{n}: {size}");
            assert!(size - n < 4 || (size - n) * 8 <= size, "{n}: {size}");
        }
        let distinct: std::collections::BTreeSet<u32> = (1..=4096).map(|n| size_for(n, 1).n_tokens).collect();
        assert!(distinct.len() == 64, "{distinct:?}");
    }

    #[test]
    fn batches_hold_each_text_once_within_the_token_limit() {
        let lengths = [5, 1, 9, 30, 2, 2, 8, 7, 100];
        let batches = batches(&lengths, 20);
        let mut all: Vec<usize> = batches.concat();
        all.sort_unstable();
        assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
        for batch in &batches {
            assert!(batch.len() == 1 || batch.iter().map(|&i| lengths[i]).sum::<usize>() <= 20, "{batch:?}");
        }
        assert_eq!(batches.len(), 4, "{batches:?}");
    }
}
