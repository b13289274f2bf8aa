//! What `Embedder` and `Reranker` share: an encoder with its head, its tokenizer and the batches in flight.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;

use super::batch::{EncoderPasses, OutputHead, Tokens, batches, size_for};
use super::place::Second;
use super::prompt::PairPrompt;
use crate::device::{Device, Pending};
use crate::error::Error;
use crate::formats::BlockType;
use crate::load::{ModelHeader, RerankPrompt, TextTower, WeightUploader, Widened};
use crate::memory::Limit;
use crate::model::{ModelConfig, Transformer, Weights};
use crate::platform::pause;
use crate::recording::MemoryPlan;
use crate::tokenizer::{EncodeOptions, EncodingCache, PairTemplate, Tokenizer};

/// Texts whose token ids are cached.
const ENCODING_CACHE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// The caller's limits; `None` uses the model's or the device's default.
pub(super) struct EncoderLimits {
    pub max_tokens: Option<u32>,
    pub max_batch_tokens: Option<u32>,
    pub in_flight: Option<usize>,
    pub memory_limit: Option<u64>,
}

/// How a text that is too long is truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncation {
    /// Maximum tokens, including special tokens; `None`: the encoder's.
    pub max_tokens: Option<u32>,
    /// The side that is dropped.
    pub side: TruncationSide,
}

/// The side of a text that truncation drops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TruncationSide {
    /// The beginning.
    Left,
    /// The end.
    #[default]
    Right,
}

/// An encoder on a device that computes one row of numbers per text.
pub(super) struct Batcher {
    pub device: Device,
    pub name: String,
    pub passes: Arc<EncoderPasses>,
    /// A second device with the same encoder.
    pub second: Option<Second>,
    reader: Result<TextEncoder, String>,
    pub block_types: Vec<BlockType>,
    pub max_tokens: u32,
    pub max_batch_tokens: u32,
    in_flight: usize,
    /// How texts are read beside an image encoder.
    tower: Option<TextTower>,
}

/// Encodes texts to tokens.
struct TextEncoder {
    encodings: EncodingCache,
    /// Special tokens around a single text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// What surrounds a pair, or why the tokenizer has no pair template.
    pair: Result<PairFormat, String>,
}

/// What surrounds a pair of texts.
enum PairFormat {
    /// Special tokens.
    Template(PairTemplate),
    /// A prompt for a language model.
    Prompt(Box<PairPrompt>),
}

impl PairFormat {
    /// Number of tokens around the texts.
    fn len(&self) -> usize {
        match self {
            PairFormat::Template(template) => template.len(),
            PairFormat::Prompt(prompt) => prompt.len(),
        }
    }
}

/// A text's row if cached, else its tokens.
pub(super) enum Item {
    Known(Arc<[f32]>),
    Tokens(Tokens),
}

impl Batcher {
    /// Declares an encoder whose weights the feed will upload. Allocates nothing. `head` declares its output layer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is not an encoder; [`Error::Memory`] if it exceeds the limit;
    /// [`Error::Option`] for an option out of range; [`Error::Config`] if a weight is missing.
    pub fn declare(
        device: &Device,
        header: ModelHeader,
        limits: &EncoderLimits,
        head: impl FnOnce(&ModelHeader) -> Result<OutputHead, Error>,
    ) -> Result<(Batcher, WeightUploader), Error> {
        let head = head(&header)?;
        header.note_vocabulary(device);
        let ModelHeader { name, shape, tokenizer, tensor_index, .. } = header;
        let shape = shape.encoder()?;
        let config = shape.config.clone();
        let limit = config.max_seq_len;
        let max_tokens = checked("max_tokens", limits.max_tokens.unwrap_or(shape.max_tokens), 1..=limit)?;
        let usual_batch = if device.is_real_gpu() { 8192 } else { 1024 };
        let max_batch_tokens =
            checked("max_batch_tokens", limits.max_batch_tokens.unwrap_or(usual_batch), 16..=1 << 20)?;
        let in_flight = checked("in_flight", limits.in_flight.unwrap_or(2) as u32, 1..=8)? as usize;
        let prompt = shape.scoring.as_ref().and_then(|scoring| scoring.prompt.clone());
        let reader = tokenizer.and_then(|tokenizer| TextEncoder::new(tokenizer, prompt));
        let reader = reader.map_err(|error| error.to_string());
        if let Ok(reader) = &reader {
            let around = match head {
                OutputHead::Vector { .. } | OutputHead::Tokens { .. } => reader.prefix.len() + reader.suffix.len(),
                OutputHead::Score(_) => reader.pair()?.len(),
            };
            checked("max_tokens", max_tokens, around as u32..=limit)?;
        }

        let weights = match device.is_gpu() {
            true => Weights::declare(&device.target(), &config, &tensor_index)?,
            false => Weights::declare(&device.target(), &config, &Widened(&tensor_index))?,
        };
        let feed = WeightUploader::of_all(&tensor_index, weights.tensor_slots().chain(head.tensor_slots()))?;
        let encoder = Transformer::declare(config, weights, limit)?;
        // Texts may be padded to more.
        let padding = shape.tower.and_then(|tower| tower.padding);
        let longest = padding.map_or(max_tokens, |padding| padding.len.max(max_tokens));
        let passes = Arc::new(EncoderPasses::new(device, encoder, head, longest));
        let batcher = Batcher {
            device: device.clone(),
            name,
            passes,
            second: None,
            reader,
            block_types: tensor_index.block_types(),
            max_tokens,
            max_batch_tokens,
            in_flight,
            tower: shape.tower,
        };
        if let Some(limit) = Limit::of(limits.memory_limit, device.available_bytes()) {
            let plan = batcher.plan()?;
            if plan.total_bytes() > limit.bytes {
                let hint = "reduce max_batch_tokens".into();
                return Err(plan.refused(limit.bytes, limit.explained(hint)));
            }
        }
        Ok((batcher, feed))
    }

    /// Runs the self-test of the longest text's pass.
    pub async fn test(&self) -> Result<(), Error> {
        self.passes.test_size(size_for(self.passes.max_len(), 1)).await
    }

    /// Uploads the RoPE tables, which no file contains, after all weights.
    pub fn complete(&self) -> Result<(), Error> {
        self.passes.encoder().upload_ropes(&self.device)
    }

    pub fn config(&self) -> &ModelConfig {
        &self.passes.encoder().config
    }

    /// The tokenizer with its cache.
    pub fn encodings(&self) -> Result<&EncodingCache, Error> {
        Ok(&self.reader()?.encodings)
    }

    fn reader(&self) -> Result<&TextEncoder, Error> {
        self.reader.as_ref().map_err(|reason| Error::Tokenizer {
            field: "model".into(),
            expected: "a tokenizer".into(),
            found: format!("none: {reason}"),
        })
    }

    /// Memory of the weights and a full batch.
    pub fn plan(&self) -> Result<MemoryPlan, Error> {
        let n_tokens = self.max_batch_tokens.max(self.passes.max_len());
        self.batch_plan(n_tokens, n_tokens / 8)
    }

    /// Memory of the weights and a batch of `n_texts` texts with `n_tokens` tokens in total.
    pub fn batch_plan(&self, n_tokens: u32, n_texts: u32) -> Result<MemoryPlan, Error> {
        self.passes.plan(size_for(n_tokens, n_texts))
    }

    /// Dispatches of a batch of `n_texts` texts with `n_tokens` tokens in total.
    pub fn n_dispatches(&self, n_tokens: u32, n_texts: u32) -> Result<usize, Error> {
        self.passes.n_dispatches(size_for(n_tokens, n_texts))
    }

    /// Encodes a text with its special tokens, truncated to `max_tokens`.
    pub fn encode(&self, text: &str) -> Result<Tokens, Error> {
        Ok(self.encode_truncated(text, Truncation::default())?.0)
    }

    /// Encodes a text with its special tokens. Also returns their number before truncation.
    pub fn encode_truncated(&self, text: &str, truncation: Truncation) -> Result<(Tokens, usize), Error> {
        let TextEncoder { encodings, prefix, suffix, .. } = self.reader()?;
        let n_special = prefix.len() + suffix.len();
        let least = n_special.max(1) as u32;
        let most = checked("max_tokens", truncation.max_tokens.unwrap_or(self.max_tokens), least..=self.max_tokens)?;
        let text = self.tower.map_or(Cow::Borrowed(text), |tower| tower.canonical(text));
        let inner = encodings.encode(&text, EncodeOptions::default())?;
        let n_kept = inner.len().min(most as usize - n_special);
        let kept = match truncation.side {
            TruncationSide::Right => &inner[..n_kept],
            TruncationSide::Left => &inner[inner.len() - n_kept..],
        };
        let tokens = Tokens::from([prefix, kept, suffix].concat());
        self.check(&tokens)?;
        Ok((tokens, inner.len() + n_special))
    }

    /// Number of tokens of a pair before truncation.
    pub fn pair_len(&self, [a, b]: [&str; 2], instruction: Option<&str>) -> Result<usize, Error> {
        let reader = self.reader()?;
        if let PairFormat::Prompt(prompt) = reader.pair()? {
            return Ok(prompt.encode(&reader.encodings, [a, b], instruction, 0)?.1);
        }
        let len = |text| Ok::<usize, Error>(reader.encodings.encode(text, EncodeOptions::default())?.len());
        Ok(reader.pair()?.len() + len(a)? + len(b)?)
    }

    /// Encodes a pair of texts with what surrounds it. If it exceeds `max_tokens`, the longer text is truncated
    /// first, then both; in a prompt, the end of the second text, as Qwen3-Reranker's model card does.
    pub fn encode_pair(&self, [a, b]: [&str; 2], instruction: Option<&str>) -> Result<Tokens, Error> {
        let reader = self.reader()?;
        let encodings = &reader.encodings;
        let pair = match reader.pair()? {
            PairFormat::Template(template) => template,
            PairFormat::Prompt(prompt) => {
                let (ids, _) = prompt.encode(encodings, [a, b], instruction, self.max_tokens as usize)?;
                let tokens = Tokens::from(ids);
                self.check(&tokens)?;
                return Ok(tokens);
            }
        };
        let [a, b] = [encodings.encode(a, EncodeOptions::default())?, encodings.encode(b, EncodeOptions::default())?];
        let room = self.max_tokens as usize - pair.len();
        let [len_a, len_b] = fit([a.len(), b.len()], room);
        let PairTemplate { prefix, middle, suffix, second_type } = pair;
        let ids = [prefix, &a[..len_a], middle, &b[..len_b], suffix].concat();
        let has_types = *second_type > 0 && self.config().n_token_types > 1;
        let first_len = if has_types { prefix.len() + len_a + middle.len() } else { ids.len() };
        let tokens = Tokens { first_len: first_len as u32, ..Tokens::from(ids) };
        self.check(&tokens)?;
        Ok(tokens)
    }

    /// Refuses tokens that are not a valid sequence for this model.
    pub fn check(&self, Tokens { ids, .. }: &Tokens) -> Result<(), Error> {
        let wrong = |field: &str, expected: String, found: String| {
            Err(Error::Tokenizer { field: field.into(), expected, found })
        };
        let vocab_size = self.config().vocab_size;
        if ids.is_empty() || ids.len() > self.max_tokens as usize {
            return wrong("tokens", format!("1 to {}", self.max_tokens), ids.len().to_string());
        }
        match ids.iter().find(|&&id| id >= vocab_size) {
            Some(id) => wrong("token id", format!("below {vocab_size}"), id.to_string()),
            None => Ok(()),
        }
    }

    /// A text's tokens as the encoder takes them.
    fn completed(&self, tokens: Tokens) -> Tokens {
        match &self.tower {
            Some(tower) => Tokens::from(tower.complete(tokens.ids)),
            None => tokens,
        }
    }

    /// The last layer's output for each token of a text, `[T, C]`.
    pub async fn token_rows(&self, text: &Tokens) -> Result<Vec<f32>, Error> {
        self.check(text)?;
        let text = self.completed(text.clone());
        let head = OutputHead::Tokens { normalize: false, layers: Vec::new() };
        let passes = EncoderPasses::new(&self.device, self.passes.encoder().clone(), head, self.passes.max_len());
        passes.test(&[&text]).await?;
        let mut rows: Vec<f32> = bytemuck::cast_vec(passes.run(&[&text])?.await?);
        rows.truncate(text.ids.len() * passes.width() as usize);
        Ok(rows)
    }

    /// The rows of `n` texts in order, `[n, width]`, of a head that gives one each. Calls `progress` repeatedly with
    /// the number of finished texts.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a text that fails to encode or has a non-finite row; errors of
    /// [`Device::run`].
    pub async fn rows(
        &self,
        n: usize,
        item: impl FnMut(usize) -> Result<Item, Error>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        let mut rows = vec![0.0; n * self.passes.width() as usize];
        let mut put = |i: usize, row: &[f32]| rows[i * row.len()..][..row.len()].copy_from_slice(row);
        self.each(n, item, &mut put, progress).await?;
        Ok(rows)
    }

    /// As [`Batcher::rows`], for any head: gives each text's index and rows to `put`, in any order.
    pub async fn each(
        &self,
        n: usize,
        mut item: impl FnMut(usize) -> Result<Item, Error>,
        put: &mut dyn FnMut(usize, &[f32]),
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), Error> {
        /// Batches encoded together. A larger window makes a batch's lengths more alike but delays the first batch.
        const AHEAD: usize = 8;
        let mut submission = Submission { batcher: self, put, flights: VecDeque::new(), done: 0, progress };
        let mut window = Vec::new();
        let mut n_tokens = 0;
        for i in 0..n {
            match item(i).map_err(|e| e.in_record(i))? {
                Item::Known(row) => submission.take(i, &row),
                Item::Tokens(tokens) => {
                    let tokens = self.completed(tokens);
                    n_tokens += tokens.ids.len();
                    window.push((i, tokens));
                }
            }
            if n_tokens >= AHEAD * self.max_batch_tokens as usize {
                submission.submit(std::mem::take(&mut window)).await?;
                n_tokens = 0;
            }
        }
        submission.submit(window).await?;
        submission.land_all().await
    }
}

impl TextEncoder {
    /// `prompt`: the text around pairs, instead of the tokenizer's special tokens.
    fn new(tokenizer: Tokenizer, prompt: Option<RerankPrompt>) -> Result<TextEncoder, Error> {
        // Every vocabulary has a token for this text, and no normalizer removes it.
        let (inner, whole) = (tokenizer.encode("a", false)?, tokenizer.encode("a", true)?);
        let at = whole.windows(inner.len().max(1)).position(|window| window == inner).unwrap_or(0);
        let end = (at + inner.len()).min(whole.len());
        let (prefix, suffix) = (whole[..at].to_vec(), whole[end..].to_vec());
        let pair = match prompt {
            Some(prompt) => PairPrompt::new(prompt, &tokenizer).map(|prompt| PairFormat::Prompt(Box::new(prompt))),
            None => tokenizer.pair_template().map(PairFormat::Template),
        };
        let pair = pair.map_err(|error| error.to_string());
        Ok(TextEncoder { encodings: EncodingCache::new(Arc::new(tokenizer), ENCODING_CACHE), prefix, suffix, pair })
    }

    fn pair(&self) -> Result<&PairFormat, Error> {
        self.pair.as_ref().map_err(|reason| Error::Tokenizer {
            field: "post_processor".into(),
            expected: "a template for pairs of texts".into(),
            found: reason.clone(),
        })
    }
}

/// Lengths after truncating a pair to `room` tokens: repeatedly drops a token of the longer, or else first, text.
fn fit([a, b]: [usize; 2], room: usize) -> [usize; 2] {
    if a + b <= room {
        return [a, b];
    }
    let shorter = a.min(b).min(room / 2);
    if a > b { [room - shorter, shorter] } else { [shorter, room - shorter] }
}

/// Texts being submitted and computed.
struct Submission<'a> {
    batcher: &'a Batcher,
    /// Takes a text's index and rows.
    put: &'a mut dyn FnMut(usize, &[f32]),
    /// Index and number of tokens of each text.
    flights: VecDeque<(Vec<[usize; 2]>, Pending)>,
    done: usize,
    progress: &'a mut dyn FnMut(usize),
}

impl Submission<'_> {
    /// Submits texts, given with their indices, in batches.
    async fn submit(&mut self, window: Vec<(usize, Tokens)>) -> Result<(), Error> {
        let Batcher { device, max_batch_tokens, in_flight, passes, second, .. } = self.batcher;
        let lengths: Vec<usize> = window.iter().map(|(_, text)| text.ids.len()).collect();
        let is_gpu = device.is_gpu();
        // The CPU computes a batch at submission.
        let in_flight = if is_gpu { *in_flight } else { 1 };
        for batch in batches(&lengths, *max_batch_tokens as usize) {
            if self.flights.len() >= in_flight {
                self.land().await?;
                if !is_gpu {
                    pause().await;
                }
            }
            let encoded: Vec<&Tokens> = batch.iter().map(|&i| &window[i].1).collect();
            let passes = match second {
                None => passes,
                Some(second) => match second.passes_for(passes, &encoded) {
                    Some(passes) => passes,
                    None => {
                        // Batches in flight would distort the measurement.
                        self.land_all().await?;
                        second.measure(passes, &encoded).await?
                    }
                },
            };
            passes.test(&encoded).await?;
            let pending = passes.run(&encoded)?;
            self.flights.push_back((batch.iter().map(|&i| [window[i].0, lengths[i]]).collect(), pending));
        }
        Ok(())
    }

    /// Waits for the oldest batch in flight.
    async fn land(&mut self) -> Result<(), Error> {
        let Some((numbers, pending)) = self.flights.pop_front() else { return Ok(()) };
        let words = pending.await?;
        let mut rest: &[f32] = bytemuck::cast_slice(&words);
        let passes = &self.batcher.passes;
        for [i, n_tokens] in numbers {
            let (row, others) = rest.split_at(passes.head().n_rows(n_tokens) * passes.width() as usize);
            rest = others;
            if let Some(at) = row.iter().position(|v| !v.is_finite()) {
                let kernel = match passes.head() {
                    OutputHead::Vector { .. } | OutputHead::Tokens { .. } => "pool",
                    OutputHead::Score(_) => "matmul",
                };
                let (expected, found) = ("a finite number".into(), row[at].to_string());
                let error = Error::Operand { kernel, operand: "y", expected, found };
                return Err(error.in_record(i));
            }
            self.take(i, row);
        }
        (self.progress)(self.done);
        Ok(())
    }

    async fn land_all(&mut self) -> Result<(), Error> {
        while !self.flights.is_empty() {
            self.land().await?;
        }
        Ok(())
    }

    fn take(&mut self, i: usize, row: &[f32]) {
        (self.put)(i, row);
        self.done += 1;
    }
}

/// An option's value if in range.
fn checked(option: &'static str, value: u32, range: std::ops::RangeInclusive<u32>) -> Result<u32, Error> {
    match range.contains(&value) {
        true => Ok(value),
        false => {
            let expected = format!("{} to {}", range.start(), range.end());
            Err(Error::Option { option, expected, found: value.to_string() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fit;

    #[test]
    fn pair_truncation_shortens_the_longer_text_first() {
        for (lengths, room, want) in [
            ([3, 4], 7, [3, 4]),
            ([3, 9], 8, [3, 5]),
            ([9, 3], 8, [5, 3]),
            ([9, 9], 8, [4, 4]),
            ([9, 9], 7, [3, 4]),
            ([10, 9], 7, [4, 3]),
            ([0, 9], 4, [0, 4]),
            ([5, 5], 0, [0, 0]),
        ] {
            assert_eq!(fit(lengths, room), want, "{lengths:?} in {room}");
        }
    }
}
