//! Inspection of a pass: kernel times and attention weights. Recomputes the latest tokens; the sequence and later
//! results are unchanged.

use std::time::Duration;

use web_time::Instant;

use super::Session;
use crate::cpu::cached::read_row;
use crate::device::{Clock, Device};
use crate::error::Error;
use crate::kernels::{AttentionConfig, CachedKeys};
use crate::model::Ending;
use crate::recording::Recording;
use crate::tensor::Tensor;

/// One dispatch of a pass with its time.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedDispatch {
    /// Kernel.
    pub kernel: &'static str,
    /// Shader variant.
    pub variant: &'static str,
    /// The dispatch's layer; `None` before the first and after the last.
    pub layer: Option<u32>,
    /// Workgroups in x, y and z.
    pub grid: [u32; 3],
    /// Time it took.
    pub time: Duration,
}

/// A pass over the latest token, dispatch by dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The clock of the times.
    pub clock: Clock,
    /// The token's position.
    pub position: usize,
    /// In execution order.
    pub dispatches: Vec<TimedDispatch>,
}

impl Timeline {
    /// The sum of all dispatch times.
    pub fn total(&self) -> Duration {
        self.dispatches.iter().map(|dispatch| dispatch.time).sum()
    }
}

/// Attention weights of one head: of the latest tokens over all tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadWeights {
    /// `[rows, columns]`: rows are the latest tokens as queries, columns all tokens as keys. A row sums to 1, or
    /// less if the head has a sink. Masked tokens have weight 0.
    pub weights: Vec<f32>,
    /// Number of queries.
    pub rows: usize,
    /// Number of keys.
    pub columns: usize,
}

impl HeadWeights {
    /// Maximum number of weights computed at a time: 64 MiB.
    pub const MOST: usize = 1 << 24;
}

impl Session {
    /// Times each dispatch of a decode pass after the sequence and discards the chosen token.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there are no tokens, [`Error::Option`] if layers are not on the device; errors of
    /// [`Device::run`].
    pub async fn timeline(&mut self) -> Result<Timeline, Error> {
        let timeline = self.timed_pass().await;
        if timeline.is_err() {
            self.sequence.forget_cache();
        }
        timeline
    }

    async fn timed_pass(&mut self) -> Result<Timeline, Error> {
        self.check_ids(&[])?;
        self.model.expect_resident("timeline")?;
        self.cache_all_but(1).await?;
        let (position, ending) = (self.sequence.n_cached(), Ending::GREEDY);
        self.ready(1, 1, ending).await?;
        self.submitted(1, 1);
        let recording = self.passes.get(1, ending)?;
        let device = self.model.device();
        let clock = device.clock();
        let times = match clock {
            Clock::RoundTrip => round_trips(device, recording).await?,
            _ => device.run_profiled(recording).await?.into_iter().map(|(_, time)| time).collect(),
        };
        let timed = |(dispatch, time): (crate::Dispatch<'_>, Duration)| TimedDispatch {
            kernel: dispatch.kernel().name,
            variant: dispatch.label(),
            layer: dispatch.layer(),
            grid: dispatch.grid(),
            time,
        };
        Ok(Timeline { clock, position, dispatches: recording.dispatches().zip(times).map(timed).collect() })
    }

    /// Attention weights of a layer's head: of the last `n_queries` tokens, or of all if there are fewer, over the
    /// tokens up to each. The kernels keep no weights, so the tokens are recomputed and their queries compared with
    /// the cached keys.
    ///
    /// # Errors
    /// [`Error::Option`] for a missing layer or head, a recurrent layer, no queries or more than
    /// [`HeadWeights::MOST`] weights, or layers that are not on the device; [`Error::Tokenizer`] if there are no
    /// tokens; errors of [`Device::run`].
    pub async fn head_weights(&mut self, layer: usize, head: usize, n_queries: usize) -> Result<HeadWeights, Error> {
        self.check_ids(&[])?;
        self.model.expect_resident("attention")?;
        let columns = self.tokens().len();
        let most = HeadWeights::MOST / columns;
        if n_queries == 0 || n_queries.min(columns) > most {
            let expected = format!("1 to {most} queries for {columns} tokens");
            return Err(Error::Option { option: "last_queries", expected, found: n_queries.to_string() });
        }
        let of = self.head(layer, head)?;
        let weights = self.compute_weights(&of, n_queries.min(columns)).await;
        if weights.is_err() {
            self.sequence.forget_cache();
        }
        weights
    }

    fn head(&self, layer: usize, head: usize) -> Result<AttentionHead, Error> {
        let transformer = self.model.transformer();
        let blocks = &transformer.config.blocks;
        let wrong = |option, expected: String, found: &dyn ToString| Error::Option {
            option,
            expected,
            found: found.to_string(),
        };
        let block =
            blocks.get(layer).ok_or_else(|| wrong("layer", format!("a layer below {}", blocks.len()), &layer))?;
        let Some(cached) = self.cache().keys(layer).cloned() else {
            return Err(wrong("layer", "a layer with attention: this one has none".into(), &layer));
        };
        let config = block.attention.kernel(transformer.config.causal);
        if head >= config.n_heads as usize {
            return Err(wrong("head", format!("a head below {}", config.n_heads), &head));
        }
        Ok(AttentionHead { layer, head, config, sinks: transformer.weights.blocks[layer].attn_sinks.clone(), cached })
    }

    async fn compute_weights(&mut self, of: &AttentionHead, rows: usize) -> Result<HeadWeights, Error> {
        let (model, columns) = (self.model.clone(), self.tokens().len());
        let device = model.device();
        let sink = match &of.sinks {
            Some(sinks) => device.read::<f32>(sinks).await?.get(of.head).copied(),
            None => None,
        };
        let head_dim = of.config.head_dim as usize;
        let mut weights = Vec::with_capacity(rows * columns);
        self.cache_all_but(rows).await?;
        while !self.sequence.uncached().is_empty() {
            let (position, n_left) = (self.sequence.n_cached(), self.sequence.uncached().len());
            // A single row would use an attention variant that no other pass uses.
            let size = self.passes.size((n_left as u32).max(2));
            let n_tokens = n_left.min(size as usize);
            let (recording, queries) = self.passes.record_queries(device, model.transformer(), size, of.layer).await?;
            self.ready(size, n_tokens, Ending::Cache).await?;
            model.run(&recording, n_tokens).await?;
            self.submitted(n_tokens, size);
            self.follow().await?;
            let (queries, keys) = (device.read::<f32>(&queries).await?, device.read::<u32>(&of.cached.k).await?);
            let keys = of.keys(&keys);
            let queries = queries.chunks_exact(head_dim).skip(of.head).step_by(of.config.n_heads as usize);
            for (position, query) in (position..).zip(queries.take(n_tokens)) {
                let row = of.weights(keys, sink, position, query);
                weights.extend(row.into_iter().chain(std::iter::repeat(0.0)).take(columns));
            }
        }
        Ok(HeadWeights { weights, rows, columns })
    }

    /// Caches all tokens but the last `n`, which the next passes compute.
    pub(super) async fn cache_all_but(&mut self, n: usize) -> Result<(), Error> {
        self.choose_rope_offset();
        self.sequence.uncache_last(n);
        let Session { model, passes, sequence, .. } = self;
        model.device().write(&passes.io.tokens, sequence.n_cached(), sequence.uncached())?;
        loop {
            let n_left = self.sequence.uncached().len().saturating_sub(n);
            if n_left == 0 {
                return Ok(());
            }
            let size = self.passes.size(n_left as u32);
            self.fill(size, n_left.min(size as usize)).await?;
        }
    }
}

/// Runs each dispatch separately and waits for it.
async fn round_trips(device: &Device, recording: &Recording) -> Result<Vec<Duration>, Error> {
    let mut times = Vec::with_capacity(recording.n_dispatches());
    device.prepare(recording)?;
    device.drained().await?;
    for step in 0..recording.n_dispatches() {
        let start = Instant::now();
        device.run_steps(recording, step..step + 1)?;
        device.drained().await?;
        times.push(start.elapsed());
    }
    Ok(times)
}

/// One head of a layer, with the layer's cache.
struct AttentionHead {
    layer: usize,
    head: usize,
    config: AttentionConfig,
    sinks: Option<Tensor>,
    cached: CachedKeys,
}

impl AttentionHead {
    /// The keys that this head reads, out of all heads' keys.
    fn keys<'a>(&self, keys: &'a [u32]) -> &'a [u32] {
        let (n_heads, n_kv_heads) = (self.config.n_heads as usize, self.config.n_kv_heads as usize);
        let n_words = keys.len() / n_kv_heads;
        &keys[self.head * n_kv_heads / n_heads * n_words..][..n_words]
    }

    /// Softmax of a query's scores for the positions up to its own. Position s is in slot s % slots.
    fn weights(&self, keys: &[u32], sink: Option<f32>, position: usize, query: &[f32]) -> Vec<f32> {
        let AttentionConfig { window, scale, soft_cap, head_dim, .. } = self.config;
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        let row_words = self.cached.kind.row_words(head_dim) as usize;
        let n_slots = keys.len() / row_words;
        let mut key = vec![0.0; query.len()];
        let mut weights = vec![0.0; position + 1];
        for (position, score) in weights.iter_mut().enumerate().skip(first) {
            read_row(self.cached.kind, &keys[position % n_slots * row_words..][..row_words], &mut key);
            *score = scale * query.iter().zip(&key).map(|(q, k)| q * k).sum::<f32>();
            if let Some(cap) = soft_cap {
                *score = cap * (*score / cap).tanh();
            }
        }
        let seen = &mut weights[first..];
        let highest = seen.iter().copied().chain(sink).fold(f32::MIN, f32::max);
        seen.iter_mut().for_each(|score| *score = (*score - highest).exp());
        let sum = seen.iter().sum::<f32>() + sink.map_or(0.0, |sink| (sink - highest).exp());
        seen.iter_mut().for_each(|weight| *weight /= sum);
        weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GenerateOptions, Model};

    #[test]
    fn timeline_runs_each_dispatch_once_and_in_order() {
        let device = Device::cpu();
        let model = Model::builtin(&device).unwrap();
        let mut session = model.session().unwrap();
        let mut generation = session.generate("Once upon a time", &GenerateOptions::greedy(4)).unwrap();
        while let Some(piece) = pollster::block_on(generation.next()) {
            piece.unwrap();
        }
        drop(generation);
        let n_before = device.counters().dispatches;
        let timeline = pollster::block_on(session.timeline()).unwrap();
        assert_eq!(device.counters().dispatches - n_before, timeline.dispatches.len() as u64);
        let recording = session.passes.get(1, Ending::GREEDY).unwrap();
        let n_before = device.counters().dispatches;
        let times = pollster::block_on(round_trips(&device, recording)).unwrap();
        assert_eq!(times.len(), timeline.dispatches.len());
        assert_eq!(device.counters().dispatches - n_before, times.len() as u64);
    }
}
