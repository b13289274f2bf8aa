//! What goes on inside a pass: how long each kernel takes, and what a head looks at. Whoever asks has the latest tokens
//! computed once more; the sequence and what follows it stay as they are.

use std::time::Duration;

use web_time::Instant;

use super::Session;
use crate::cpu::cached::read_row;
use crate::device::{Clock, Device};
use crate::error::Error;
use crate::kernels::{AttentionConfig, CachedKeys};
use crate::model::{Ending, LayerCache};
use crate::recording::Recording;
use crate::tensor::Tensor;

/// One dispatch of a pass, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedDispatch {
    /// The kernel.
    pub kernel: &'static str,
    /// The variant of its shader.
    pub variant: &'static str,
    /// The layer that it belongs to; none for what comes before the first and after the last.
    pub layer: Option<u32>,
    /// Workgroups in x, y and z.
    pub grid: [u32; 3],
    /// Its time.
    pub time: Duration,
}

/// A pass over the latest token, dispatch by dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// What the times are read from.
    pub clock: Clock,
    /// The token's position.
    pub position: usize,
    /// In the order in which they run.
    pub dispatches: Vec<TimedDispatch>,
}

impl Timeline {
    /// The time of all dispatches.
    pub fn total(&self) -> Duration {
        self.dispatches.iter().map(|dispatch| dispatch.time).sum()
    }
}

/// How much each of the latest tokens takes from each token of a sequence, in one head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadWeights {
    /// `[rows, columns]`: rows are the latest tokens as queries, columns all tokens as keys. A row's sum is 1, or lower where the
    /// head has a sink, which takes the rest. What a token does not see has no weight.
    pub weights: Vec<f32>,
    /// Queries.
    pub rows: usize,
    /// Keys.
    pub columns: usize,
}

impl HeadWeights {
    /// Most weights that are computed at a time: 64 MiB.
    pub const MOST: usize = 1 << 24;
}

impl Session {
    /// Times each dispatch of the pass that follows the sequence and chooses a token, which is not kept.
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

    /// What a head of a layer looks at: the weights that each of the last `n_queries` tokens, or of all if there are fewer, gives
    /// to the tokens up to itself. The kernels keep no weights. So the tokens are computed once more, and their queries are
    /// compared with the cached keys.
    ///
    /// # Errors
    /// [`Error::Option`] for a layer or head that there is not, for a layer without keys, for no queries or more than
    /// [`HeadWeights::MOST`] weights, and if layers are not on the device; [`Error::Tokenizer`] if there are no tokens; errors of
    /// [`Device::run`].
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

    fn head(&self, layer: usize, head: usize) -> Result<Head, Error> {
        let transformer = self.model.transformer();
        let blocks = &transformer.config.blocks;
        let wrong = |option, expected: String, found: &dyn ToString| Error::Option {
            option,
            expected,
            found: found.to_string(),
        };
        let block =
            blocks.get(layer).ok_or_else(|| wrong("layer", format!("a layer below {}", blocks.len()), &layer))?;
        let LayerCache::Keys(cached) = self.cache().layer(layer).clone() else {
            return Err(wrong("layer", "a layer that keeps keys, where this one keeps a state".into(), &layer));
        };
        let config = block.attention.kernel(transformer.config.causal);
        if head >= config.n_heads as usize {
            return Err(wrong("head", format!("a head below {}", config.n_heads), &head));
        }
        Ok(Head { layer, head, config, sinks: transformer.weights.blocks[layer].attn_sinks.clone(), cached })
    }

    async fn compute_weights(&mut self, of: &Head, rows: usize) -> Result<HeadWeights, Error> {
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
            // Alone, a token would take a form of attention that no other pass takes.
            let size = self.passes.size((n_left as u32).max(2));
            let n_tokens = n_left.min(size as usize);
            let (recording, queries) = self.passes.watch(device, model.transformer(), size, of.layer).await?;
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

    /// Caches all tokens but the last `n`, which the next passes are to compute.
    async fn cache_all_but(&mut self, n: usize) -> Result<(), Error> {
        self.choose_angles();
        self.sequence.leave_last(n);
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

/// Runs each dispatch by itself and waits for it.
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

/// One head of a layer, and the cache that has the keys which it compares its queries with.
struct Head {
    layer: usize,
    head: usize,
    config: AttentionConfig,
    sinks: Option<Tensor>,
    cached: CachedKeys,
}

impl Head {
    /// The part of all heads' keys that this one reads.
    fn keys<'a>(&self, keys: &'a [u32]) -> &'a [u32] {
        let (n_heads, n_kv_heads) = (self.config.n_heads as usize, self.config.n_kv_heads as usize);
        let n_words = keys.len() / n_kv_heads;
        &keys[self.head * n_kv_heads / n_heads * n_words..][..n_words]
    }

    /// The softmax of a query's scores, for the positions up to its own. The key of position s is in slot s % slots.
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
    fn round_trips_run_each_dispatch_once_and_in_order() {
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
