//! Benchmarks of a text encoder: its roofline, the fastest batch within limits, and the gain from its pipeline.

use std::ops::Range;
use std::time::Instant;

use super::{KeyCosts, Limits, Percentiles, Probes, Spread, products};
use crate::embed::{EmbedOptions, Embedder, Tokens};
use crate::error::Error;
use crate::model::{Block, ModelConfig, Transformer};
use crate::tensor::Tensor;
use crate::tuning::operands::words;

/// Maximum texts per batch.
pub const MAX_BATCH: usize = 1 << 16;
/// Rounds over all texts for a median rate, after a warm-up round.
const ROUNDS: usize = 5;

/// Minimum work for an encoder's batches. Weights count by their size on the device, once per batch. A layer reads
/// and writes each input and output of its products, of attention and of the residual stream once. Norms, rotations
/// and pooling are ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderRoofline {
    /// Bytes of weights read in every batch: all but tables, of which a token reads one row.
    pub weights_bytes: u64,
    /// Bytes per token: its row of the token table, and the layers' reads and writes.
    pub token_bytes: u64,
    /// Bytes of a text's vector.
    pub text_bytes: u64,
    /// Operations with the weights, per token.
    pub token_flop: u64,
    /// Costs of keys and values in each layer; `token_bytes` includes their bytes.
    pub layers: Vec<KeyCosts>,
    /// Whether a token only sees earlier ones.
    pub causal: bool,
}

impl EncoderRoofline {
    /// The roofline of an encoder, which need not be allocated.
    pub fn new(encoder: &Transformer) -> EncoderRoofline {
        let Transformer { config, weights, .. } = encoder;
        let bytes = |tensor: &Tensor| tensor.size_bytes();
        let token_table: u64 = weights.token_embd.tensors().map(bytes).sum();
        let tables = weights.positions.iter().chain(&weights.token_types);
        let tables_bytes = token_table + tables.map(bytes).sum::<u64>();
        let ModelConfig { dim, vocab_size, causal, ref blocks, .. } = *config;
        // Two products read the residual stream, and two read and write it by adding to it.
        let activations = |block: &Block| {
            let Block { attention, feed_forward, .. } = block;
            u64::from(6 * dim + 2 * attention.qkv_dim() + 2 * attention.q_dim() + 2 * feed_forward.dim)
        };
        EncoderRoofline {
            weights_bytes: weights.tensors().map(bytes).sum::<u64>() - tables_bytes,
            token_bytes: token_table / u64::from(vocab_size) + 4 * blocks.iter().map(activations).sum::<u64>(),
            text_bytes: 4 * u64::from(dim),
            token_flop: 2 * blocks.iter().map(|block| products(config, block)).sum::<u64>(),
            layers: blocks.iter().map(|block| KeyCosts::of(&block.attention, 0)).collect(),
            causal,
        }
    }

    /// Bytes of a batch of texts with these numbers of tokens.
    pub fn bytes(&self, lengths: &[usize]) -> u64 {
        let n_tokens: usize = lengths.iter().sum();
        self.weights_bytes + self.token_bytes * n_tokens as u64 + self.text_bytes * lengths.len() as u64
    }

    /// Operations of such a batch: a multiplication and an addition per weight, and per element of each key and
    /// value that is read.
    pub fn flop(&self, lengths: &[usize]) -> u64 {
        let of_text = |&len: &usize| {
            let len = len as u64;
            let keys = self.layers.iter().map(|layer| layer.key_flop * self.seen(len, layer.window)).sum::<u64>();
            self.token_flop * len + keys
        };
        lengths.iter().map(of_text).sum()
    }

    /// Total keys seen by the tokens of a text in a layer with this window.
    fn seen(&self, len: u64, window: u64) -> u64 {
        let before: u64 = (1..window.min(len)).map(|distance| len - distance).sum();
        if self.causal { len + before } else { len + 2 * before }
    }
}

/// The bottleneck by the probes' rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Bytes.
    Bandwidth,
    /// Operations.
    Operations,
}

/// A measurement of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedCase {
    /// Texts per batch.
    pub n_texts: usize,
    /// Number of batches.
    pub repetitions: usize,
}

impl EmbedCase {
    /// Refuses an invalid case for `n_texts` texts: as tokens are cached, a batch must not repeat a text.
    ///
    /// # Errors
    /// [`Error::Option`] with the number out of range.
    pub fn check(&self, n_texts: usize) -> Result<(), Error> {
        let most = n_texts.min(MAX_BATCH);
        if !(1..=most).contains(&self.n_texts) {
            let expected = format!("1 to {most}, with {n_texts} texts in total");
            return Err(Error::Option { option: "batch", expected, found: self.n_texts.to_string() });
        }
        if self.repetitions == 0 {
            return Err(Error::Option { option: "repetitions", expected: "at least 1".into(), found: "0".into() });
        }
        Ok(())
    }
}

/// Results of batches of one size. Counts, bytes and operations are averages per batch.
#[derive(Clone, Debug, serde::Serialize)]
pub struct EmbedRow {
    /// Texts per batch.
    pub n_texts: usize,
    /// Tokens per batch.
    pub n_tokens: f64,
    /// Over the rounds.
    pub texts_per_second: Spread,
    /// Over the rounds.
    pub tokens_per_second: Spread,
    /// Per batch, from the call to its vectors.
    pub latency_seconds: Percentiles,
    /// Per batch, from the median rate.
    pub seconds: f64,
    /// Kernels run.
    pub dispatches: f64,
    /// Command buffers submitted.
    pub submits: f64,
    /// Reads by the host.
    pub reads: f64,
    /// Bytes read by the host.
    pub bytes_read: f64,
    /// Planned bytes of weights and the largest batch.
    pub memory_bytes: u64,
    /// Minimum operations by the [`EncoderRoofline`].
    pub flop: f64,
    /// Minimum bytes by the [`EncoderRoofline`].
    pub bytes: f64,
    /// Operations per byte.
    pub intensity: f64,
    /// Rate of operations relative to the multiply probe.
    pub flop_share: f64,
    /// The bottleneck by the probes' rates.
    pub bound: Bound,
    /// Minimum seconds by the probes' rates: the longer of bytes and operations.
    pub least_seconds: f64,
    /// Predicted by [`predict`].
    pub predicted_seconds: Option<f64>,
}

impl EmbedRow {
    /// The minimum time divided by the measured one.
    pub fn share(&self) -> f64 {
        self.least_seconds / self.seconds
    }

    /// Whether the row is within the limits.
    pub fn fits(&self, limits: &Limits) -> bool {
        limits.seconds.is_none_or(|limit| self.latency_seconds.p95 <= limit)
            && limits.bytes.is_none_or(|limit| self.memory_bytes <= limit)
    }
}

/// Measures batches of one size. If `texts` has more batches than repetitions, those measured are spread over all.
/// Each runs once before it is timed. Caches of tokens and vectors are cleared.
///
/// # Errors
/// Errors of [`EmbedCase::check`] and of [`Embedder::embed`].
pub async fn measure(
    embedder: &Embedder,
    texts: &[String],
    case: EmbedCase,
    probes: &Probes,
) -> Result<EmbedRow, Error> {
    case.check(texts.len())?;
    let EmbedCase { n_texts, repetitions } = case;
    let mut batches = Vec::new();
    let mut lengths: Vec<Vec<usize>> = Vec::new();
    for i in spread(texts.len() / n_texts, repetitions) {
        let range = i * n_texts..(i + 1) * n_texts;
        lengths.push(encode(embedder, texts, range.clone())?.iter().map(|tokens| tokens.ids.len()).collect());
        batches.push(&texts[range]);
    }
    for &batch in &batches {
        embedder.embed(batch).await?;
    }
    let device = embedder.device();
    let before = device.counters();
    let mut times = Vec::new();
    for &batch in batches.iter().cycle().take(repetitions) {
        times.push(seconds(embedder, batch).await?);
    }
    let counters = device.counters() - before;

    let n_tokens: Vec<usize> = lengths.iter().map(|lengths| lengths.iter().sum()).collect();
    let mean = |sum: f64| sum / batches.len() as f64;
    let n_tokens_mean = mean(n_tokens.iter().sum::<usize>() as f64);
    let roofline = EncoderRoofline::new(embedder.encoder());
    let bytes = mean(lengths.iter().map(|lengths| roofline.bytes(lengths) as f64).sum());
    let flop = mean(lengths.iter().map(|lengths| roofline.flop(lengths) as f64).sum());
    // A larger batch is split.
    let most = n_tokens.into_iter().max().unwrap_or(1) as u32;
    let most = most.min(embedder.max_batch_tokens().max(embedder.max_tokens()));

    let rounds = times.chunks_exact(batches.len()).map(|round| mean(round.iter().sum()));
    let batch_rates: Vec<f64> = rounds.map(|seconds| 1.0 / seconds).collect();
    let rate = |n: f64| Spread::of(batch_rates.iter().map(|rate| n * rate).collect());
    let texts_per_second = rate(n_texts as f64);
    let seconds = n_texts as f64 / texts_per_second.median;
    let per_batch = |count: u64| count as f64 / repetitions as f64;
    Ok(EmbedRow {
        n_texts,
        n_tokens: n_tokens_mean,
        texts_per_second,
        tokens_per_second: rate(n_tokens_mean),
        latency_seconds: Percentiles::of(times),
        seconds,
        dispatches: per_batch(counters.dispatches),
        submits: per_batch(counters.submits),
        reads: per_batch(counters.reads),
        bytes_read: per_batch(counters.bytes_read),
        memory_bytes: embedder.batch_plan(most, n_texts as u32)?.total_bytes(),
        flop,
        bytes,
        intensity: flop / bytes,
        flop_share: flop / seconds / probes.flop_per_second,
        bound: match probes.is_compute_bound(bytes, flop) {
            true => Bound::Operations,
            false => Bound::Bandwidth,
        },
        least_seconds: probes.least_seconds(bytes, flop),
        predicted_seconds: None,
    })
}

/// Predicts the seconds of all rows by the line through the two with the fewest tokens: a fixed cost plus a cost per
/// token. No prediction if more tokens took no longer.
pub fn predict(rows: &mut [EmbedRow]) {
    let mut points: Vec<(f64, f64)> = rows.iter().map(|row| (row.n_tokens, row.seconds)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.dedup_by(|a, b| a.0 == b.0);
    let &[(tokens, seconds), (more_tokens, more_seconds), ..] = points.as_slice() else { return };
    let of_token = (more_seconds - seconds) / (more_tokens - tokens);
    if of_token > 0.0 {
        rows.iter_mut().for_each(|row| row.predicted_seconds = Some(seconds + of_token * (row.n_tokens - tokens)));
    }
}

/// The row with the highest texts per second within the limits.
pub fn best<'a>(rows: &'a [EmbedRow], limits: &Limits) -> Option<&'a EmbedRow> {
    let rate = |row: &EmbedRow| row.texts_per_second.median;
    rows.iter().filter(|row| row.fits(limits)).max_by(|a, b| rate(a).total_cmp(&rate(b)))
}

/// Breakdown of the time for embedding many texts in one call. Medians of interleaved rounds.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct EmbedParts {
    /// Texts in the call.
    pub n_texts: usize,
    /// Tokens in the call.
    pub n_tokens: usize,
    /// Tokenizing only.
    pub tokenize_seconds: f64,
    /// Computing vectors from tokens only.
    pub vectors_seconds: f64,
    /// The whole call: less than the sum of both if the host encodes while the device computes.
    pub seconds: f64,
}

impl EmbedParts {
    /// Measures a call with all of `texts`.
    ///
    /// # Errors
    /// Errors of [`Embedder::embed`].
    pub async fn measure(embedder: &Embedder, texts: &[String]) -> Result<EmbedParts, Error> {
        let tokens = encode(embedder, texts, 0..texts.len())?;
        let mut times = [const { Vec::new() }; 3];
        for round in 0..=ROUNDS {
            forget(embedder)?;
            let start = Instant::now();
            encode(embedder, texts, 0..texts.len())?;
            let tokenize = start.elapsed().as_secs_f64();
            let start = Instant::now();
            embedder.embed_tokens(&tokens).await?;
            let vectors = start.elapsed().as_secs_f64();
            let all = seconds(embedder, texts).await?;
            if round > 0 {
                times.iter_mut().zip([tokenize, vectors, all]).for_each(|(times, time)| times.push(time));
            }
        }
        let [tokenize_seconds, vectors_seconds, seconds] = times.map(|times| Spread::of(times).median);
        let n_tokens = tokens.iter().map(|tokens| tokens.ids.len()).sum();
        Ok(EmbedParts { n_texts: texts.len(), n_tokens, tokenize_seconds, vectors_seconds, seconds })
    }
}

/// Many small batches with a number of submissions in flight.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct FlightRow {
    /// [`EmbedOptions::in_flight`].
    pub in_flight: usize,
    /// Over the rounds.
    pub texts_per_second: Spread,
    /// The median relative to the first row's.
    pub ratio: f64,
}

/// Tokens per batch in [`measure_in_flight`].
pub const FLIGHT_TOKENS: u32 = 256;

/// Measures one call with `texts`, in batches of [`FLIGHT_TOKENS`], for each number of submissions in flight. `load`
/// loads the encoder.
///
/// # Errors
/// Errors of `load` and of [`Embedder::embed`].
pub async fn measure_in_flight(
    load: impl Fn(EmbedOptions<'static>) -> Result<Embedder, Error>,
    texts: &[String],
    numbers: &[usize],
) -> Result<Vec<FlightRow>, Error> {
    let mut rows: Vec<FlightRow> = Vec::new();
    for &in_flight in numbers {
        let max_batch_tokens = Some(FLIGHT_TOKENS);
        let embedder = load(EmbedOptions { in_flight: Some(in_flight), max_batch_tokens, ..EmbedOptions::default() })?;
        let mut rates = Vec::new();
        for round in 0..=ROUNDS {
            let seconds = seconds(&embedder, texts).await?;
            if round > 0 {
                rates.push(texts.len() as f64 / seconds);
            }
        }
        let texts_per_second = Spread::of(rates);
        let first = rows.first().map_or(texts_per_second, |row| row.texts_per_second);
        rows.push(FlightRow { in_flight, texts_per_second, ratio: texts_per_second.median / first.median });
    }
    Ok(rows)
}

/// A naive baseline: one text at a time, with the encoder loaded for each.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Naive {
    /// Texts measured.
    pub n_texts: usize,
    /// Including loading.
    pub texts_per_second: f64,
    /// Speed-up of loading the encoder once and embedding all texts in one call.
    pub gain: f64,
}

impl Naive {
    /// Measures the first of `texts`; `parts` has the time of all in one call. `load` loads the encoder.
    ///
    /// # Errors
    /// Errors of `load` and of [`Embedder::embed`].
    pub async fn measure(
        load: impl Fn(EmbedOptions<'static>) -> Result<Embedder, Error>,
        texts: &[String],
        parts: &EmbedParts,
    ) -> Result<Naive, Error> {
        const TEXTS: usize = 4;
        let few = &texts[..texts.len().min(TEXTS)];
        let start = Instant::now();
        for text in few {
            load(EmbedOptions::default())?.embed(&[text]).await?;
        }
        let texts_per_second = few.len() as f64 / start.elapsed().as_secs_f64();
        let at_once = parts.n_texts as f64 / parts.seconds;
        Ok(Naive { n_texts: few.len(), texts_per_second, gain: at_once / texts_per_second })
    }
}

/// `n` deterministic made-up texts of 3 to 60 words, like questions, titles and paragraphs. Any 58 consecutive ones
/// have all lengths.
pub fn made_up_texts(n: usize) -> Vec<String> {
    const WORDS: [&str; 64] = [
        "a", "about", "after", "all", "an", "and", "before", "behind", "blue", "bridge", "by", "carries", "city",
        "cold", "copper", "counts", "deep", "door", "each", "engine", "every", "field", "finds", "from", "garden",
        "glass", "harbour", "has", "her", "holds", "if", "in", "is", "keeps", "lamp", "late", "letter", "measures",
        "morning", "never", "north", "of", "old", "paper", "quiet", "rain", "repairs", "river", "salt", "sends",
        "seven", "slow", "some", "spring", "stone", "that", "the", "through", "to", "under", "warm", "wheel", "when",
        "winter",
    ];
    const LENGTHS: usize = 58;
    // 23 and 58 are coprime.
    let n_words = |i: usize| 3 + i * 23 % LENGTHS;
    let mut numbers = words((0..n).map(n_words).sum());
    let mut text = |i: usize| {
        let some: Vec<&str> = numbers.by_ref().take(n_words(i)).map(|number| WORDS[number as usize % 64]).collect();
        some.join(" ") + "."
    };
    (0..n).map(&mut text).collect()
}

/// The batches to measure: all, or `repetitions` of them spread evenly.
fn spread(n_batches: usize, repetitions: usize) -> Vec<usize> {
    let n = n_batches.min(repetitions);
    (0..n).map(|i| i * n_batches / n).collect()
}

fn encode(embedder: &Embedder, texts: &[String], range: Range<usize>) -> Result<Vec<Tokens>, Error> {
    range.map(|i| embedder.encode(&texts[i]).map_err(|e| e.in_record(i))).collect()
}

/// Seconds of one call with these texts, with cleared caches.
async fn seconds(embedder: &Embedder, texts: &[String]) -> Result<f64, Error> {
    forget(embedder)?;
    let start = Instant::now();
    embedder.embed(texts).await?;
    Ok(start.elapsed().as_secs_f64())
}

/// Clears an encoder's caches.
fn forget(embedder: &Embedder) -> Result<(), Error> {
    embedder.encodings()?.clear();
    if let Some(vectors) = embedder.cached_vectors() {
        vectors.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::dtype::WeightType;
    use crate::kernels::{Gate, Gelu};
    use crate::model::{
        Attention, Between, FeedForward, NormKind, NormPlace, PositionTable, SourceTensor, WeightSource, Weights,
    };

    /// Weights of an encoder with matrices of this type; products have biases unless gated.
    struct Source(WeightType, ModelConfig);

    impl WeightSource for Source {
        fn describe(&self, name: &str) -> Option<SourceTensor> {
            let Source(matrices, config) = self;
            let (dim, Block { attention, feed_forward, .. }) = (config.dim, &config.blocks[0]);
            let ffn_dim = feed_forward.dim;
            let is_gated = feed_forward.up_dim() > ffn_dim;
            let (stem, kind) = name.rsplit_once('.')?;
            let vector = |len: u32| Some(SourceTensor { weight: WeightType::F32, shape: vec![len.into()] });
            let table = |weight, rows: u32| Some(SourceTensor { weight, shape: vec![rows.into(), dim.into()] });
            let [rows, cols] = match stem.rsplit('.').next()? {
                norm if norm.ends_with("_norm") => return vector(dim),
                "token_embd" => return table(*matrices, config.vocab_size),
                "position_embd" => return table(WeightType::F32, config.max_seq_len),
                "token_types" => return table(WeightType::F32, config.n_token_types),
                "attn_q" => [attention.q_dim(), dim],
                "attn_k" | "attn_v" => [attention.kv_dim(), dim],
                "attn_output" => [dim, attention.q_dim()],
                "ffn_gate" if is_gated => [ffn_dim, dim],
                "ffn_up" => [ffn_dim, dim],
                "ffn_down" => [dim, ffn_dim],
                _ => return None,
            };
            match kind {
                "bias" if is_gated => None,
                "bias" => vector(rows),
                "weight" => Some(SourceTensor { weight: *matrices, shape: vec![rows.into(), cols.into()] }),
                _ => None,
            }
        }
    }

    fn roofline(config: &ModelConfig, matrices: WeightType) -> EncoderRoofline {
        let source = Source(matrices, config.clone());
        let weights = Weights::declare(&Device::cpu().target(), config, &source).expect("all tensors are there");
        EncoderRoofline::new(&Transformer::declare(config.clone(), weights, 512).expect("tables fit"))
    }

    /// MiniLM-L6.
    fn minilm() -> ModelConfig {
        let feed_forward = FeedForward { dim: 1536, between: Between::Gelu(Gelu::Exact), experts: None };
        let (attn_norm, ffn_norm) = (NormPlace::Sum, NormPlace::Sum);
        let block = Block { attn_norm, ffn_norm, ..Block::plain(Attention::plain(12, 32), feed_forward) };
        ModelConfig {
            architecture: "bert".into(),
            dim: 384,
            vocab_size: 30_522,
            max_seq_len: 512,
            blocks: vec![block; 6],
            n_mtp: 0,
            norm: NormKind::Layer { bias: true },
            norm_eps: 1e-12,
            ropes: Vec::new(),
            mrope: None,
            positions: Some(PositionTable { first: 0 }),
            position_biases: None,
            n_token_types: 2,
            per_layer: None,
            embd_norm: true,
            output_norm: false,
            embd_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap: None,
            causal: false,
            has_head: false,
            row_factors: Vec::new(),
        }
    }

    #[test]
    fn roofline_of_minilm_matches_hand_count() {
        // 384 x 1152 for queries, keys and values, 384 x 384 after attention, twice 384 x 1536.
        let matrices = 6 * 1_769_472;
        // Biases of the products, two norms per layer, and the embeddings' norm.
        let vectors = 6 * (1152 + 384 + 1536 + 384 + 4 * 384) + 2 * 384;
        // Read 384, write 1152; read 1152, write 384; read 384 and 384, write 384; read 384, write 1536; read 1536 and
        // 384, write 384.
        let activations = 6 * (1536 + 1536 + 1152 + 1920 + 2304);
        for (weight, bytes_of_32) in [(WeightType::F32, 128), (WeightType::Q8_0, 34)] {
            let found = roofline(&minilm(), weight);
            assert_eq!(found.weights_bytes, matrices / 32 * bytes_of_32 + 4 * vectors, "{weight}");
            assert_eq!(found.token_bytes, 384 / 32 * bytes_of_32 + 4 * activations, "{weight}");
            assert_eq!(found.bytes(&[3, 7]), found.weights_bytes + 10 * found.token_bytes + 2 * 384 * 4);
            // A token sees the whole text.
            assert_eq!(found.flop(&[3, 7]), 10 * 2 * matrices + 4 * 384 * 6 * (9 + 49));
        }
    }

    #[test]
    fn roofline_counts_sliding_windows_and_grouped_heads() {
        let block = |l: usize| {
            let mut block = minilm().blocks[0].clone();
            block.attention.n_kv_heads = 4;
            block.attention.window = (!l.is_multiple_of(3)).then_some(3);
            block.feed_forward.between = Between::Gate(Gate::Silu);
            block
        };
        let blocks = (0..7).map(block).collect();
        let config = ModelConfig { blocks, positions: None, n_token_types: 0, ..minilm() };
        let found = roofline(&config, WeightType::F32);
        // 4 key/value heads of 32; gate and up.
        let matrices = 7 * (384 * (384 + 2 * 128) + 384 * 384 + 3 * 384 * 1536);
        assert_eq!(found.weights_bytes, 4 * (matrices + 7 * 4 * 384 + 2 * 384));
        assert_eq!(found.token_bytes, 4 * (384 + 7 * (6 * 384 + 2 * 640 + 2 * 384 + 2 * 1536)));
        // Layers 0, 3 and 6 see 5 x 5 keys; the others see 3, 4, 5, 4, 3.
        assert_eq!(found.flop(&[5]), 5 * 2 * matrices + 4 * 384 * (3 * 25 + 4 * 19));
        // As a decoder: 1 to 5 keys, and 1, 2, 3, 3, 3.
        let causal = roofline(&ModelConfig { causal: true, ..config }, WeightType::F32);
        assert_eq!(causal.flop(&[5]), 5 * 2 * matrices + 4 * 384 * (3 * 15 + 4 * 12));
    }

    fn row(n_texts: usize, seconds: f64, p95: f64, memory_bytes: u64) -> EmbedRow {
        let rate = n_texts as f64 / seconds;
        let texts_per_second = Spread::of(vec![rate]);
        EmbedRow {
            n_texts,
            n_tokens: 10.0 * n_texts as f64,
            texts_per_second,
            tokens_per_second: Spread::of(vec![10.0 * rate]),
            latency_seconds: Percentiles { p50: seconds, p95, p99: p95 },
            seconds,
            dispatches: 0.0,
            submits: 0.0,
            reads: 0.0,
            bytes_read: 0.0,
            memory_bytes,
            flop: 0.0,
            bytes: 0.0,
            intensity: 0.0,
            flop_share: 0.0,
            bound: Bound::Bandwidth,
            least_seconds: 0.25 * seconds,
            predicted_seconds: None,
        }
    }

    #[test]
    fn the_fastest_batch_within_limits_is_chosen() {
        let rows = [row(32, 0.5, 0.6, 3 << 20), row(1, 0.25, 0.3, 1 << 20), row(8, 0.4, 0.5, 2 << 20)];
        let best = |seconds, bytes| best(&rows, &Limits { seconds, bytes }).map(|row| row.n_texts);
        assert_eq!(best(None, None), Some(32));
        assert_eq!(best(Some(0.6), Some(3 << 20)), Some(32));
        // By the 95th percentile, not the typical time.
        assert_eq!(best(Some(0.55), None), Some(8));
        assert_eq!(best(None, Some((3 << 20) - 1)), Some(8));
        assert_eq!(best(Some(0.55), Some(1 << 20)), Some(1));
        assert_eq!(best(Some(0.2), None), None);
        assert_eq!(rows[0].share(), 0.25);
    }

    #[test]
    fn batch_time_is_predicted_from_the_two_smallest() {
        // 0.05 s per batch and 0.01 s per token.
        let mut rows = [row(8, 0.85, 1.0, 0), row(32, 4.0, 4.0, 0), row(1, 0.15, 0.2, 0)];
        predict(&mut rows);
        for (row, seconds) in rows.iter().zip([0.85, 3.25, 0.15]) {
            let found = row.predicted_seconds.expect("there are two batches");
            assert!((found - seconds).abs() < 1e-12, "{} texts: {found}", row.n_texts);
        }
        let mut alone = [row(8, 0.85, 1.0, 0), row(8, 0.9, 1.0, 0)];
        predict(&mut alone);
        assert!(alone.iter().all(|row| row.predicted_seconds.is_none()));
        let mut falling = [row(8, 0.85, 1.0, 0), row(32, 0.8, 1.0, 0)];
        predict(&mut falling);
        assert!(falling.iter().all(|row| row.predicted_seconds.is_none()));
    }

    #[test]
    fn generated_texts_are_distinct_and_cover_all_lengths() {
        let texts = made_up_texts(1000);
        assert_eq!(made_up_texts(10), texts[..10]);
        let distinct: std::collections::HashSet<&String> = texts.iter().collect();
        assert_eq!(distinct.len(), 1000);
        for window in texts.windows(58) {
            let mut lengths: Vec<usize> = window.iter().map(|text| text.split(' ').count()).collect();
            lengths.sort_unstable();
            assert_eq!(lengths, (3..=60).collect::<Vec<_>>());
        }
    }

    #[test]
    fn measured_batches_are_spread_evenly_over_texts() {
        assert_eq!(spread(10, 4), [0, 2, 5, 7]);
        assert_eq!(spread(3, 50), [0, 1, 2]);
        let refused = |n_texts, repetitions| match (EmbedCase { n_texts, repetitions }).check(10) {
            Err(Error::Option { option, .. }) => option,
            other => panic!("{other:?}"),
        };
        assert_eq!([refused(0, 1), refused(11, 1), refused(10, 0)], ["batch", "batch", "repetitions"]);
        assert!(EmbedCase { n_texts: 10, repetitions: 1 }.check(10).is_ok());
    }
}
