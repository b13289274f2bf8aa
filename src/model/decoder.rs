//! The forward pass of decoders: everything before and after the blocks.

use std::ops::Range;

use super::block::RowAttention;
use super::config::ModelConfig;
use super::cross::CrossTensors;
use super::forward::{Flow, Tap, Transformer};
use super::kv_cache::KvCache;
use super::mtp::MtpTensors;
use super::weights::TOKEN_EMBD;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{
    Embedding, Norm, PAGE, Sampling, StepState, add, advance, argmax, embed, mask_logits, mask_words, penalize, sample,
    scale, soft_cap,
};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::tensor::{Role, Tensor, TensorWriter};

/// Rows of a pass that verifies draft tokens: the second of the usual sizes, which reads weights once.
pub const VERIFIED_ROWS: u32 = 8;

/// Rows of an embedding table on disk, which the host uploads before each pass.
#[derive(Clone, Debug)]
pub struct FetchedRows {
    /// Name of the table.
    pub table: &'static str,
    /// `[max_pass, C]`, packed as the table is.
    pub rows: Matrix,
    /// Row index of the token at each position, `[S]`.
    pub numbers: Tensor,
}

/// Rows of an image or a sound, which the host uploads before each pass over some of them.
#[derive(Clone, Debug)]
pub struct ImageTensors {
    /// In place of token embeddings, `[max_pass, C]`; zeros after the last one.
    pub rows: Tensor,
    /// Added after each of the first layers, `[max_pass, C]`.
    pub deepstack: Vec<Tensor>,
    /// Which rows see each other.
    pub attention: RowAttention,
}

impl ImageTensors {
    /// Declares tensors for passes of up to `max_pass` rows of images with rows for so many further layers.
    ///
    /// # Errors
    /// [`Error::Operand`] if a tensor would be too large.
    pub fn declare(
        config: &ModelConfig,
        max_pass: u32,
        (n_deepstack, attention): (usize, RowAttention),
    ) -> Result<ImageTensors, Error> {
        let rows = || Tensor::declare("image rows", Role::Activations, &[max_pass, config.dim], DType::F32);
        let deepstack = (0..n_deepstack).map(|_| rows()).collect::<Result<_, _>>()?;
        Ok(ImageTensors { rows: rows()?, deepstack, attention })
    }

    /// Whether passes over images of this kind can be recorded with them.
    pub(crate) fn is_of(&self, (n_deepstack, attention): (usize, RowAttention)) -> bool {
        self.deepstack.len() == n_deepstack && self.attention == attention
    }
}

/// Tensors that passes share with the host.
#[derive(Clone, Debug)]
pub struct PassTensors {
    /// Position and number of tokens.
    pub state: StepState,
    /// Token ids by position, `[S]`.
    pub tokens: Tensor,
    /// Rows of embedding tables on disk.
    pub fetched: Vec<FetchedRows>,
    /// For passes over rows of an image rather than tokens.
    pub image: Option<ImageTensors>,
    /// Keys and values of an encoder's output, for layers that attend to it.
    pub cross: Option<CrossTensors>,
    /// For decode batches: the state, with the index of the fetched row in place of each token id.
    pub fetched_state: Option<StepState>,
    /// Activations between pipeline stages, one row per token, `[max_pass, C]`: a pass reads the previous stage's
    /// output and writes its own in place.
    pub stream: Tensor,
    /// Logits of the last token, `[1, V]`.
    pub logits: Tensor,
    /// Sampling parameters, as words of [`Sampling`].
    pub sampling: Tensor,
    /// Token ids and biases, alternating, `[1, 2 * MAX_BIASES]`; the sampling parameters hold their number.
    pub biases: Tensor,
    /// Bitmask of allowed tokens for passes with a mask, `[1, ceil(V / 32)]`.
    pub allowed: Tensor,
    /// The chosen token, `[1]`.
    pub chosen: Tensor,
    /// Most likely token after each row of a verifying pass, `[VERIFIED_ROWS]`.
    pub verified: Tensor,
    /// Tensors of the MTP head.
    pub mtp: Option<MtpTensors>,
    /// A layer, and the tensor that receives its queries, as compared with keys, `[T, H D]`, for inspection of
    /// attention weights.
    pub queries: Option<(usize, Tensor)>,
}

impl PassTensors {
    /// Declares tensors for a session, for this context length and passes of up to `max_pass` tokens.
    ///
    /// # Errors
    /// [`Error::Operand`] if a tensor would be too large.
    pub fn declare(config: &ModelConfig, context_length: u32, max_pass: u32) -> Result<PassTensors, Error> {
        let tensor = |label: &str, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        Ok(PassTensors {
            state: StepState::declare()?,
            // A prompt's last pass may be padded beyond the context.
            tokens: tensor("tokens", &[context_length.saturating_add(max_pass)], DType::U32)?,
            fetched: Vec::new(),
            image: None,
            cross: None,
            fetched_state: None,
            stream: tensor("stream", &[max_pass, config.dim], DType::F32)?,
            logits: tensor("logits", &[1, config.vocab_size], DType::F32)?,
            sampling: tensor("sampling", &[1, Sampling::WORDS], DType::U32)?,
            biases: tensor("biases", &[1, 2 * Sampling::MAX_BIASES], DType::U32)?,
            allowed: tensor("allowed", &[1, mask_words(config.vocab_size)], DType::U32)?,
            chosen: tensor("chosen", &[1], DType::U32)?,
            verified: tensor("verified", &[VERIFIED_ROWS], DType::U32)?,
            mtp: None,
            queries: None,
        })
    }

    /// Declares tensors for decode batches of up to `n_rows` sequences, out of `n_slots` in a shared cache with up
    /// to `n_pages` pages each. `has_windows`: layers with a window have pages of their own.
    ///
    /// # Errors
    /// As [`PassTensors::declare`].
    pub fn declare_rows(
        config: &ModelConfig,
        [n_rows, n_slots, n_pages]: [u32; 3],
        has_windows: bool,
    ) -> Result<PassTensors, Error> {
        let tensor = |label: &str, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        Ok(PassTensors {
            state: StepState::declare_shared(Some(n_rows), n_pages, has_windows)?,
            tokens: tensor("tokens", &[n_slots, n_pages.saturating_mul(PAGE)], DType::U32)?,
            stream: tensor("stream", &[n_rows, config.dim], DType::F32)?,
            logits: tensor("logits", &[n_rows, config.vocab_size], DType::F32)?,
            sampling: tensor("sampling", &[n_rows, Sampling::WORDS], DType::U32)?,
            biases: tensor("biases", &[n_rows, 2 * Sampling::MAX_BIASES], DType::U32)?,
            allowed: tensor("allowed", &[n_rows, mask_words(config.vocab_size)], DType::U32)?,
            chosen: tensor("chosen", &[n_rows], DType::U32)?,
            ..PassTensors::declare(config, 1, 1)?
        })
    }

    /// The same tensors with room for the logits of `n_rows` tokens.
    ///
    /// # Errors
    /// As [`PassTensors::declare`].
    pub(crate) fn with_logits(&self, config: &ModelConfig, n_rows: u32) -> Result<PassTensors, Error> {
        let shape = [n_rows, config.vocab_size];
        let logits = Tensor::declare("logits", Role::Activations, &shape, DType::F32)?;
        Ok(PassTensors { logits, ..self.clone() })
    }

    /// Declares tensors for prefill chunks of up to `max_pass` tokens of a sequence with up to `n_pages` pages, as
    /// [`PassTensors::declare_rows`].
    ///
    /// # Errors
    /// As [`PassTensors::declare`].
    pub fn declare_prompts(
        config: &ModelConfig,
        n_pages: u32,
        max_pass: u32,
        has_windows: bool,
    ) -> Result<PassTensors, Error> {
        Ok(PassTensors {
            state: StepState::declare_shared(None, n_pages, has_windows)?,
            ..PassTensors::declare(config, n_pages.saturating_mul(PAGE), max_pass)?
        })
    }

    /// Writes rows of an image for a pass of `size` rows. `values`: `[n, C]` each, those in place of token embeddings, then
    /// those of [`ImageTensors::deepstack`].
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub(crate) fn write_image(
        &self,
        device: &dyn TensorWriter,
        dim: u32,
        values: &[Vec<f32>],
        (rows, size): (Range<usize>, u32),
    ) -> Result<(), Error> {
        let Some(ImageTensors { rows: first, deepstack, .. }) = &self.image else { return Ok(()) };
        let dim = dim as usize;
        for (tensor, values) in [first].into_iter().chain(deepstack).zip(values) {
            let mut padded = values.get(rows.start * dim..rows.end * dim).unwrap_or_default().to_vec();
            padded.resize(size as usize * dim, 0.0);
            device.write_words(tensor, 0, bytemuck::cast_slice(&padded))?;
        }
        Ok(())
    }

    /// Maximum number of tokens of a sequence.
    pub(crate) fn capacity(&self) -> usize {
        self.tokens.shape().last().copied().unwrap_or(0) as usize
    }

    /// Records the embedding of the tokens, from the table or from rows fetched from disk.
    ///
    /// # Errors
    /// As [`embed`].
    pub(super) fn record_embedding(
        &self,
        rec: &mut Recorder,
        table: &str,
        embedding: &Embedding<'_>,
        y: &Tensor,
    ) -> Result<(), Error> {
        match self.fetched.iter().find(|fetched| fetched.table == table) {
            Some(FetchedRows { rows, numbers, .. }) => {
                let state = self.fetched_state.as_ref().unwrap_or(&self.state);
                embed(rec, state, numbers, &Embedding { w: rows, ..*embedding }, y)
            }
            None => embed(rec, &self.state, &self.tokens, embedding, y),
        }
    }
}

/// What a pass computes after its last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// Nothing: the pass only fills the cache.
    Cache,
    /// Logits of the last token.
    Logits,
    /// Logits of every token; [`PassTensors::logits`] has as many rows as the pass.
    AllLogits,
    /// The most likely token after each row of a pass of [`VERIFIED_ROWS`]; the state is unchanged.
    Verify,
    /// A token after each sequence's last row, which becomes the next pass's input.
    Sample(Sampler),
    /// No layers: the MTP head processes the rows of the last pass to fill its cache.
    MtpFollow,
    /// As `MtpFollow`, and drafts the token after the next one.
    MtpDraft,
    /// The MTP head drafts another token after its own last draft.
    MtpDraftNext,
}

/// How a pass samples tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sampler {
    /// Whether some sequences have penalties or biases.
    pub penalize: bool,
    /// Whether some sequences have a token bitmask.
    pub mask: bool,
    /// Which sequences sample; the others are greedy.
    pub draw: Drawing,
}

/// Which sequences sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Drawing {
    /// None of them.
    #[default]
    None,
    /// Those whose temperature is not 0.
    Some,
    /// All of them.
    All,
}

impl Ending {
    /// Greedy, without penalties or bitmask.
    pub const GREEDY: Ending = Ending::Sample(Sampler { penalize: false, mask: false, draw: Drawing::None });
}

impl Sampler {
    /// The sampler for one sequence with these parameters; temperature 0 is greedy.
    pub fn of(sampling: &Sampling) -> Sampler {
        let repeats = sampling.repeat_penalty != 1.0 && sampling.repeat_last_n > 0;
        let penalties = [sampling.presence_penalty, sampling.frequency_penalty];
        let penalize = repeats || penalties != [0.0; 2] || sampling.n_biases > 0;
        let draw = if sampling.temperature > 0.0 { Drawing::All } else { Drawing::None };
        Sampler { penalize, mask: false, draw }
    }
}

impl Transformer {
    /// Records a pass over `n_tokens` tokens from the state's position, up to the residual stream, `[T, C]`, which
    /// it returns.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record_layers(
        &self,
        rec: &mut Recorder,
        cache: &KvCache,
        io: &PassTensors,
        n_tokens: u32,
        tap: Tap<'_>,
    ) -> Result<Tensor, Error> {
        if !self.is_first() {
            let h = io.stream.first_rows(n_tokens)?; // [T, C]
            return self.record_blocks(rec, Flow::Cached(io, cache), None, h, tap);
        }
        let h = rec.temporary("h", &[n_tokens, self.config.dim])?;
        if let Some(image) = &io.image {
            return self.record_image_layers(rec, cache, (io, image), h, tap);
        }
        io.record_embedding(rec, TOKEN_EMBD, &self.embedding(), &h)?; // [T, C]
        let parts = self.record_parts(rec, io, &h)?; // [T, L P]
        self.record_blocks(rec, Flow::Cached(io, cache), parts.as_ref(), h, tap)
    }

    /// As [`Transformer::record_layers`], over the rows of an image. `h`: `[T, C]`.
    fn record_image_layers(
        &self,
        rec: &mut Recorder,
        cache: &KvCache,
        (io, image): (&PassTensors, &ImageTensors),
        h: Tensor,
        tap: Tap<'_>,
    ) -> Result<Tensor, Error> {
        let n_rows = h.shape()[0];
        scale(rec, &image.rows.first_rows(n_rows)?, &h, 1.0)?; // [T, C]
        let parts = self.record_parts(rec, io, &h)?; // [T, L P]
        // The first call is before the first layer.
        let mut deepstack = [None].into_iter().chain(image.deepstack.iter().map(Some));
        let mut added = |rec: &mut Recorder, h: &Tensor| {
            if let Some(rows) = deepstack.next().flatten() {
                add(rec, &rows.first_rows(n_rows)?, h)?;
            }
            tap(rec, h)
        };
        self.record_blocks(rec, Flow::Cached(io, cache), parts.as_ref(), h, &mut added)
    }

    /// The token embedding with its additions.
    pub(super) fn embedding(&self) -> Embedding<'_> {
        Embedding {
            w: &self.weights.token_embd,
            factor: self.config.embd_scale / self.config.residual_scale,
            positions: self.weights.positions.as_ref(),
        }
    }

    /// Records the final norm and the head: the logits of each row of `h`.
    ///
    /// # Shapes
    /// `h`: `[T, C]`; `logits`: `[T, V]`.
    /// # Errors
    /// [`Error::Shape`] if `h` or `logits` disagrees with the configuration.
    pub fn record_head(&self, rec: &mut Recorder, h: &Tensor, logits: &Tensor) -> Result<(), Error> {
        let (x, norm) = self.before(rec, self.weights.output_norm.as_ref(), h)?; // [T, C]
        self.record_logits(rec, norm, &x, logits)
    }

    /// Records the output head: the logits of each row of `x`, after the norm if there is one.
    pub(super) fn record_logits(
        &self,
        rec: &mut Recorder,
        norm: Option<Norm<'_>>,
        x: &Tensor,
        logits: &Tensor,
    ) -> Result<(), Error> {
        let (factor, cap) = (self.config.logit_scale, self.config.logit_soft_cap);
        if factor == 1.0 && cap.is_none() {
            return self.weights.record_output(rec, norm, x, logits); // [T, V]
        }
        let plain = rec.temporary("plain", logits.shape())?;
        self.weights.record_output(rec, norm, x, &plain)?; // [T, V]
        match cap {
            Some(cap) => soft_cap(rec, &plain, logits, factor, cap),
            None => scale(rec, &plain, logits, factor),
        }
    }

    /// Records a pass over `n_tokens` tokens with its ending: of one sequence from the state's position, or one
    /// token per sequence of a batch ([`StepState::is_batch`]). The state advances to the chosen tokens, so that the
    /// next pass needs no host input. A stage without the last layers leaves its activations for the next stage.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record_pass(
        &self,
        rec: &mut Recorder,
        cache: &KvCache,
        io: &PassTensors,
        n_tokens: u32,
        ending: Ending,
    ) -> Result<(), Error> {
        if let Ending::MtpFollow | Ending::MtpDraft | Ending::MtpDraftNext = ending {
            return self.record_mtp(rec, io, n_tokens, ending);
        }
        let h = self.record_layers(rec, cache, io, n_tokens, &mut |_, _| Ok(()))?; // [T, C]
        if !self.is_last() {
            return leave(rec, &h, io);
        }
        // The head below has its own norm, so that logits have the same bits without an MTP head.
        self.record_hidden(rec, io, &h)?;
        if ending == Ending::Cache {
            return Ok(());
        }
        if ending == Ending::Verify {
            let logits = rec.temporary("logits", &[n_tokens, self.config.vocab_size])?;
            self.record_head(rec, &h, &logits)?; // [T, V]
            return argmax(rec, &logits, &io.verified); // [T]
        }
        if ending == Ending::AllLogits {
            return self.record_head(rec, &h, &io.logits.first_rows(n_tokens)?); // [T, V]
        }
        // [R, C]: each row of a batch is the last one of its sequence.
        let last = if io.state.is_batch() { h } else { self.record_last(rec, &io.state, h)? };
        let n_rows = last.shape()[0];
        let logits = io.logits.first_rows(n_rows)?;
        self.record_head(rec, &last, &logits)?; // [R, V]
        let Ending::Sample(Sampler { penalize: penalizes, mask, draw }) = ending else { return Ok(()) };
        let (sampling, chosen) = (io.sampling.first_rows(n_rows)?, io.chosen.first_rows(n_rows)?);
        if penalizes {
            penalize(rec, &sampling, &io.state, &io.tokens, &io.biases.first_rows(n_rows)?, &logits)?;
        }
        if mask {
            mask_logits(rec, &io.allowed.first_rows(n_rows)?, &logits)?;
        }
        if draw != Drawing::All {
            argmax(rec, &logits, &chosen)?; // [R]
        }
        if draw != Drawing::None {
            sample(rec, &sampling, &io.state, &logits, &chosen)?; // [R]
        }
        advance(rec, &io.state, &chosen, &io.tokens)
    }
}

/// Records the copy of the residual stream, `[T, C]`, for the next stage.
fn leave(rec: &mut Recorder, h: &Tensor, io: &PassTensors) -> Result<(), Error> {
    // The layers may have updated the stream tensor in place.
    match h.is_in_place_of(&io.stream) {
        true => Ok(()),
        false => scale(rec, h, &io.stream.first_rows(h.shape()[0])?, 1.0),
    }
}
