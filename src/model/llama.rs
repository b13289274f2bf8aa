//! The forward pass of the Llama family (Touvron et al. 2023, arXiv:2302.13971), recorded.

use super::{KvCache, LayerWeights, ModelConfig, Weights};
use crate::error::Error;
use crate::kernels::{
    AttentionConfig, Norm, Qkv, Sampling, StepState, advance, argmax, attention, embed, fold_norm, gate_up, last_row,
    penalize, rope_kv, sample, suits_few, swiglu,
};
use crate::recording::Recorder;
use crate::tensor::Tensor;

/// Tensors that passes share with the host.
#[derive(Clone, Debug)]
pub struct PassTensors {
    /// Position and number of tokens.
    pub state: StepState,
    /// Token ids by position, `[S]`.
    pub tokens: Tensor,
    /// Rotation table, `[S, rot_dims / 2, 2]`.
    pub rope: Tensor,
    /// Logits of the last token, `[1, V]`.
    pub logits: Tensor,
    /// Sampling settings, [`Sampling`]'s eight words.
    pub sampling: Tensor,
    /// The chosen token, `[1]`.
    pub chosen: Tensor,
}

/// What a pass does behind its last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// Nothing: only the cache is wanted.
    Cache,
    /// Logits of the last token.
    Logits,
    /// The most likely token, which then is the next pass's input.
    Greedy {
        /// Whether recent tokens are penalised.
        penalize: bool,
    },
    /// A token drawn by the sampling settings, which then is the next pass's input.
    Sample {
        /// Whether recent tokens are penalised.
        penalize: bool,
    },
}

impl Ending {
    /// The ending that follows from sampling settings: a temperature of 0 is greedy.
    pub fn of(sampling: &Sampling) -> Ending {
        let penalize = sampling.repeat_penalty != 1.0 && sampling.repeat_last_n > 0;
        if sampling.temperature > 0.0 { Ending::Sample { penalize } } else { Ending::Greedy { penalize } }
    }
}

/// A Llama-family model.
#[derive(Clone, Debug)]
pub struct Llama {
    /// Its shape.
    pub config: ModelConfig,
    /// Its weights.
    pub weights: Weights,
}

/// Receives the residual stream after the embedding and after each block.
pub type Tap<'a> = &'a mut dyn FnMut(&mut Recorder, &Tensor) -> Result<(), Error>;

impl Llama {
    /// Records a pass over `n_tokens` tokens at the state's position, up to the residual stream of all tokens,
    /// `[T, C]`, which it returns.
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
        let config = &self.config;
        let attention_config = AttentionConfig {
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            window: config.window,
            scale: (config.head_dim as f32).powf(-0.5),
            soft_cap: None,
            causal: true,
        };
        let h = rec.temporary("h", &[n_tokens, config.dim])?;
        embed(rec, &io.state, &io.tokens, &self.weights.token_embd, &h)?; // [T, C]
        tap(rec, &h)?;
        for (layer_idx, layer) in self.weights.layers.iter().enumerate() {
            let (k, v) = cache.layer(layer_idx);
            let q = self.record_qkv(rec, layer, io, &h, k, v)?; // [T, H D]
            let mixed = rec.temporary("mixed", &[n_tokens, config.q_dim()])?;
            attention(rec, &io.state, &attention_config, &q, k, v, &mixed)?; // [T, H D]
            layer.attn_output.record(rec, None, &mixed, &h, true)?; // [T, C]
            let gated = self.record_gated(rec, layer, &h)?; // [T, F]
            layer.ffn_down.record(rec, None, &gated, &h, true)?; // [T, C]
            tap(rec, &h)?;
        }
        Ok(h)
    }

    /// Records a layer's queries, `[T, H D]`, which it returns, and its keys and values, which go to the cache.
    fn record_qkv(
        &self,
        rec: &mut Recorder,
        layer: &LayerWeights,
        io: &PassTensors,
        h: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Tensor, Error> {
        let config = &self.config;
        let stack = &layer.attn_qkv;
        let norm = Some(Norm { weight: &layer.attn_norm, eps: config.norm_eps });
        let n_tokens = h.shape()[0];
        let q = rec.temporary("q", &[n_tokens, config.q_dim()])?;
        if suits_few(h) && stack.matrices().all(|(w, _)| w.n_slabs() == 1) {
            let (x, norm) = fold_norm(rec, h, norm, stack.bias().is_some())?; // [T, C]
            for (w, first_row) in stack.matrices() {
                let first_head = first_row / config.head_dim;
                let qkv = Qkv { w, bias: stack.bias(), norm, first_head, rope: &config.rope, table: &io.rope };
                qkv.record(rec, &io.state, &x, &q, k, v)?;
            }
        } else {
            let qkv = rec.temporary("qkv", &[n_tokens, config.qkv_dim()])?;
            stack.record(rec, norm, h, &qkv, false)?; // [T, (H + 2 Hkv) D]
            rope_kv(rec, &io.state, &config.rope, &io.rope, &qkv, &q, k, v)?;
        }
        Ok(q)
    }

    /// Records the first half of a layer's feed-forward, `[T, F]`, which it returns.
    fn record_gated(&self, rec: &mut Recorder, layer: &LayerWeights, h: &Tensor) -> Result<Tensor, Error> {
        let config = &self.config;
        let norm = Some(Norm { weight: &layer.ffn_norm, eps: config.norm_eps });
        let n_tokens = h.shape()[0];
        let gated = rec.temporary("gated", &[n_tokens, config.ffn_dim])?;
        if let Some(w) = layer.ffn_gate_up.as_one().filter(|_| suits_few(h)) {
            let (x, norm) = fold_norm(rec, h, norm, false)?; // [T, C]
            gate_up(rec, w, norm, &x, &gated)?;
        } else {
            let both = rec.temporary("gate_up", &[n_tokens, 2 * config.ffn_dim])?;
            layer.ffn_gate_up.record(rec, norm, h, &both, false)?; // [T, 2 F]
            swiglu(rec, &both, &gated)?;
        }
        Ok(gated)
    }

    /// Records the final norm and the head: the logits of each row of `h`.
    ///
    /// # Shapes
    /// `h`: `[T, C]`; `logits`: `[T, V]`.
    /// # Errors
    /// [`Error::Shape`] if `h` or `logits` disagrees with the configuration.
    pub fn record_head(&self, rec: &mut Recorder, h: &Tensor, logits: &Tensor) -> Result<(), Error> {
        self.weights.record_head(rec, h, self.config.norm_eps, logits) // [T, V]
    }

    /// Records a pass over `n_tokens` tokens at the state's position with its ending.
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
        let h = self.record_layers(rec, cache, io, n_tokens, &mut |_, _| Ok(()))?; // [T, C]
        if ending == Ending::Cache {
            return Ok(());
        }
        let last = if n_tokens == 1 {
            h
        } else {
            let last = rec.temporary("last", &[1, self.config.dim])?;
            last_row(rec, &io.state, &h, &last)?; // [1, C]
            last
        };
        self.record_head(rec, &last, &io.logits)?; // [1, V]
        if let Ending::Greedy { penalize: true } | Ending::Sample { penalize: true } = ending {
            penalize(rec, &io.sampling, &io.state, &io.tokens, &io.logits)?;
        }
        match ending {
            Ending::Cache | Ending::Logits => return Ok(()),
            Ending::Greedy { .. } => argmax(rec, &io.logits, &io.chosen)?, // [1]
            Ending::Sample { .. } => sample(rec, &io.sampling, &io.state, &io.logits, &io.chosen)?, // [1]
        }
        advance(rec, &io.state, &io.chosen, &io.tokens)
    }
}
