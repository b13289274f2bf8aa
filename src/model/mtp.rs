//! MTP head, which predicts the token after the next one: multi-token prediction (DeepSeek-AI 2024,
//! arXiv:2412.19437, section 2.2), as in DeepSeek V3, GLM 4.5 to 4.7, Qwen3.5, Qwen3-Next and Ling.
//!
//! Its input at position i is the model's last hidden row and the embedding of the next token:
//!
//! ```text
//! x[i] = proj [norm(embedding of token i + 1), norm(hidden[i])]
//! y[i] = norm(block(x)[i])            a block with keys and values of its own
//! output y[i]                         logits of token i + 2
//! ```
//!
//! To draft another token, `y` replaces `hidden`. The block is the last of [`ModelConfig::blocks`].

use super::config::ModelConfig;
use super::decoder::{Ending, PassTensors};
use super::forward::{Flow, Transformer};
use super::kv_cache::KvCache;
use super::stack::{RowPlaces, TensorSlot, WeightSource, describe};
use super::weights::NormWeights;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{KvType, Linear, StepState, advance, argmax, embed, last_row};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// Weights of the MTP head without its block.
#[derive(Clone, Debug)]
pub struct MtpWeights {
    /// Norm of the embedding: `nextn.enorm`.
    embd_norm: NormWeights,
    /// Norm of the hidden row: `nextn.hnorm`.
    hidden_norm: NormWeights,
    /// Columns of `nextn.eh_proj` for the embedding and for the hidden row, `[C, C]` each.
    projs: [Matrix; 2],
    /// Norm of the block's output, unless it is the model's own: `nextn.shared_head_norm`.
    norm: Option<NormWeights>,
    /// Source name of `nextn.eh_proj`.
    proj_name: String,
}

impl MtpWeights {
    /// Declares the tensors of the head whose block has this number.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        config: &ModelConfig,
        layer: usize,
    ) -> Result<MtpWeights, Error> {
        let norm = |name: &str| NormWeights::declare(source, &format!("blk.{layer}.nextn.{name}"), config);
        let (dim, proj_name) = (config.dim, format!("blk.{layer}.nextn.eh_proj.weight"));
        let weight = describe(source, &proj_name, &[dim, 2 * dim])?.weight;
        let half = || Matrix::declare(target, &proj_name, weight, dim, dim);
        let own_norm = source.describe(&format!("blk.{layer}.nextn.shared_head_norm.weight"));
        Ok(MtpWeights {
            embd_norm: norm("enorm")?,
            hidden_norm: norm("hnorm")?,
            projs: [half()?, half()?],
            norm: own_norm.map(|_| norm("shared_head_norm")).transpose()?,
            proj_name,
        })
    }

    /// F32 vectors.
    pub(super) fn tables(&self) -> impl Iterator<Item = &Tensor> {
        [&self.embd_norm, &self.hidden_norm].into_iter().chain(&self.norm).flat_map(NormWeights::tensors)
    }

    pub(super) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.projs.iter()
    }

    /// Destination of `nextn.eh_proj`, whose rows are cut in two.
    pub(super) fn destination(&self) -> (&str, TensorSlot) {
        let [of_embd, of_hidden] = &self.projs;
        let places = RowPlaces::slices(0, of_embd.rows(), of_embd.cols());
        (&self.proj_name, TensorSlot::Rows { matrix: of_embd.above(of_hidden), places })
    }
}

/// The MTP head's state on the device, for a session or for sequences with a shared cache.
#[derive(Clone, Debug)]
pub struct MtpTensors {
    /// Normalised hidden rows of the model's last pass, `[max_pass, C]`.
    hidden: Tensor,
    /// The head's own last row, `[1, C]`; in decode batches, all its rows.
    last: Tensor,
    /// KV cache of its block. A session may only cache the end of the sequence.
    cache: KvCache,
    /// The model's, except for `state`, at the head's position, and `tokens`, the next token at each position.
    io: Box<PassTensors>,
}

impl MtpTensors {
    /// The head's position, number of tokens and last draft token.
    pub fn state(&self) -> &StepState {
        &self.io.state
    }

    /// The next token at each position, `[S]`.
    pub fn tokens(&self) -> &Tensor {
        &self.io.tokens
    }
}

impl PassTensors {
    /// Adds tensors for the MTP head, if the model has one.
    ///
    /// # Errors
    /// [`Error::Operand`] if a tensor would be too large.
    pub fn with_mtp(
        self,
        config: &ModelConfig,
        kind: KvType,
        context_length: u32,
        max_pass: u32,
    ) -> Result<PassTensors, Error> {
        if config.n_mtp == 0 {
            return Ok(self);
        }
        let layer = config.n_layers();
        let cache = KvCache::declare_part(config, layer..layer + 1, kind, context_length, max_pass)?;
        self.with_mtp_over(config, &cache, max_pass)
    }

    /// As [`PassTensors::with_mtp`], with this cache for the head's block and passes of up to `max_pass` rows.
    ///
    /// # Errors
    /// As [`PassTensors::with_mtp`].
    pub(crate) fn with_mtp_over(
        self,
        config: &ModelConfig,
        cache: &KvCache,
        max_pass: u32,
    ) -> Result<PassTensors, Error> {
        let rows = |label: &str, n| Tensor::declare(label, Role::Activations, &[n, config.dim], DType::F32);
        let tokens = Tensor::declare("mtp.tokens", Role::Activations, self.tokens.shape(), DType::U32)?;
        let mtp = MtpTensors {
            hidden: rows("mtp.hidden", max_pass)?,
            last: rows("mtp.last", if self.state.is_batch() { max_pass } else { 1 })?,
            cache: cache.clone(),
            io: Box::new(PassTensors { state: self.state.declare_like()?.with_runs(), tokens, ..self.clone() }),
        };
        Ok(PassTensors { mtp: Some(mtp), ..self })
    }
}

impl Transformer {
    /// Records a pass of the head over `n_tokens` rows at its own position: those of the model's last pass, or its
    /// own last one ([`Ending::MtpDraftNext`]).
    ///
    /// # Errors
    /// [`Error::Operand`] without an MTP head; [`Error::Shape`] if the tensors do not fit the configuration.
    pub(super) fn record_mtp(
        &self,
        rec: &mut Recorder,
        io: &PassTensors,
        n_tokens: u32,
        ending: Ending,
    ) -> Result<(), Error> {
        let (mtp, weights) = self.mtp(io)?;
        let hidden = match ending {
            Ending::MtpDraftNext => mtp.last.first_rows(n_tokens)?,
            _ => mtp.hidden.first_rows(n_tokens)?,
        }; // [T, C]
        let h = self.record_mtp_block(rec, mtp, weights, &hidden)?; // [T, C]
        if ending == Ending::MtpFollow {
            return Ok(());
        }
        let MtpTensors { last, io, .. } = mtp;
        if io.state.is_batch() {
            // A draft token after each row; the host knows which rows count.
            let (last, logits) = (last.first_rows(n_tokens)?, io.logits.first_rows(n_tokens)?);
            self.record_norm(rec, self.mtp_norm(weights), &h, &last)?; // [T, C]
            self.record_logits(rec, None, &last, &logits)?; // [T, V]
            return argmax(rec, &logits, &io.chosen.first_rows(n_tokens)?); // [T]
        }
        let h = self.record_last(rec, &io.state, h)?; // [1, C]
        self.record_norm(rec, self.mtp_norm(weights), &h, last)?; // [1, C]
        self.record_logits(rec, None, last, &io.logits)?; // [1, V]
        argmax(rec, &io.logits, &io.chosen)?; // [1]
        advance(rec, &io.state, &io.chosen, &io.tokens)
    }

    /// Records a pass of the head over the rows of the model's last pass, with the logits of each.
    ///
    /// # Shapes
    /// `logits`: `[T, V]`.
    /// # Errors
    /// [`Error::Operand`] without an MTP head; [`Error::Shape`] if the tensors do not fit the configuration.
    pub(crate) fn record_mtp_logits(&self, rec: &mut Recorder, io: &PassTensors, logits: &Tensor) -> Result<(), Error> {
        let (mtp, weights) = self.mtp(io)?;
        let hidden = mtp.hidden.first_rows(logits.shape()[0])?;
        let h = self.record_mtp_block(rec, mtp, weights, &hidden)?; // [T, C]
        let y = rec.temporary("normed", h.shape())?;
        self.record_norm(rec, self.mtp_norm(weights), &h, &y)?; // [T, C]
        self.record_logits(rec, None, &y, logits) // [T, V]
    }

    /// Records the head's input, the normalised rows of `h`, if the model has an MTP head.
    ///
    /// # Errors
    /// [`Error::Operand`] if the tensors are too small for the rows.
    pub(crate) fn record_hidden(&self, rec: &mut Recorder, io: &PassTensors, h: &Tensor) -> Result<(), Error> {
        let Some(mtp) = &io.mtp else { return Ok(()) };
        let hidden = mtp.hidden.first_rows(h.shape()[0])?;
        self.record_norm(rec, self.weights.output_norm.as_ref(), h, &hidden) // [T, C]
    }

    /// Records the head up to its block's output, `[T, C]`, which it returns. `hidden`: `[T, C]`.
    fn record_mtp_block(
        &self,
        rec: &mut Recorder,
        MtpTensors { cache, io, .. }: &MtpTensors,
        weights: &MtpWeights,
        hidden: &Tensor,
    ) -> Result<Tensor, Error> {
        let shape = hidden.shape();
        let (embedded, x) = (rec.temporary("embedded", shape)?, rec.temporary("h", shape)?);
        embed(rec, &io.state, &io.tokens, &self.embedding(), &embedded)?; // [T, C]
        let [of_embd, of_hidden] = &weights.projs;
        let (embedded, norm) = self.before(rec, Some(&weights.embd_norm), &embedded)?;
        Linear { norm, ..Linear::new(of_embd) }.record(rec, &embedded, &x)?; // [T, C]
        let (hidden, norm) = self.before(rec, Some(&weights.hidden_norm), hidden)?;
        Linear { norm, accumulate: true, ..Linear::new(of_hidden) }.record(rec, &hidden, &x)?; // [T, C]
        self.record_block(rec, Flow::Cached(io, cache), self.config.n_layers() as usize, x) // [T, C]
    }

    fn mtp_norm<'a>(&'a self, weights: &'a MtpWeights) -> Option<&'a NormWeights> {
        weights.norm.as_ref().or(self.weights.output_norm.as_ref())
    }

    /// The MTP head's tensors and weights.
    fn mtp<'a>(&'a self, io: &'a PassTensors) -> Result<(&'a MtpTensors, &'a MtpWeights), Error> {
        io.mtp.as_ref().zip(self.weights.mtp.as_ref()).ok_or_else(|| Error::Operand {
            kernel: "model",
            operand: "mtp",
            expected: "an MTP head".into(),
            found: "none".into(),
        })
    }

    /// Records the last token's row of a pass.
    pub(super) fn record_last(&self, rec: &mut Recorder, state: &StepState, h: Tensor) -> Result<Tensor, Error> {
        if h.shape()[0] == 1 {
            return Ok(h);
        }
        let last = rec.temporary("last", &[1, self.config.dim])?;
        last_row(rec, state, &h, &last)?; // [1, C]
        Ok(last)
    }
}
