//! Forward pass of text encoders: BERT (Devlin et al. 2018, arXiv:1810.04805) and relatives, and decoders used as
//! encoders. A batch packs sequences without padding.

use super::block::{Attention, Block, Recurrence};
use super::config::{ModelConfig, config_error};
use super::forward::{Flow, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource};
use super::weights::NormWeights;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{Activation, Input, PackedTiles, Pooling, embed_sum, pool, scale};
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor, TensorWriter};

/// Scoring head: pooled row, dense product with activation, optional norm, and a row of weights, or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreConfig {
    /// Pooling: `classifier.pooling_type`; `classifier_pooling`.
    pub pooling: Pooling,
    /// Activation after the dense product: `classifier_activation`. `None`: no dense product.
    pub dense: Option<Activation>,
    /// Whether a norm follows the activation, as in ModernBERT.
    pub norm: bool,
    /// Whether the model answers `no` or `yes`: a score is the difference of two logits, as in Qwen3-Reranker.
    pub answers: bool,
}

/// A dense layer after pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseConfig {
    /// Its tensors' name without the suffix.
    pub name: &'static str,
    /// Width of its input: `in_features`; `dense_2_feat_in`.
    pub inputs: u32,
    /// Width of its output: `out_features`; `dense_2_feat_out`.
    pub outputs: u32,
    /// Whether it has a bias.
    pub bias: bool,
    /// `activation_function`. `None`: none.
    pub activation: Option<Activation>,
}

/// A dense layer after pooling, on a device.
#[derive(Clone, Debug)]
pub struct DenseLayer {
    /// Configuration.
    pub config: DenseConfig,
    /// `[outputs, inputs]`.
    pub product: Stack,
}

impl DenseLayer {
    /// Declares the layer's tensors and checks their shapes.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing, surplus or has the wrong shape.
    pub fn declare(target: &Target, config: DenseConfig, source: &dyn WeightSource) -> Result<DenseLayer, Error> {
        let DenseConfig { name, inputs, outputs, bias, .. } = config;
        let product = Stack::declare(target, source, "", &[(name, outputs)], inputs)?;
        match product.bias().is_some() == bias {
            true => Ok(DenseLayer { config, product }),
            false => {
                let said = |is_there| String::from(if is_there { "a tensor" } else { "no such tensor" });
                Err(config_error(&format!("{name}.bias"), said(bias), said(!bias)))
            }
        }
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        self.product.tensor_slots()
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.product.tensors()
    }
}

/// Maximum size of a packed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchSize {
    /// T, total number of tokens.
    pub n_tokens: u32,
    /// B, number of sequences.
    pub n_sequences: u32,
}

/// Tensors that a batch shares with the host.
#[derive(Clone, Debug)]
pub struct BatchTensors {
    /// Token id, position and token type of each token, `[T, 3]`, zero-padded.
    pub tokens: Tensor,
    /// Attention tiles for each shape of heads: H, Hkv and D.
    pub tiles: Vec<([u32; 3], PackedTiles)>,
    /// Rows of the neighbours of each patch, `[T, taps]`, where layers convolve a picture's patches.
    pub neighbours: Option<Tensor>,
    /// First and end row of each sequence, `[B, 2]`, zero-padded.
    pub spans: Tensor,
}

impl BatchTensors {
    /// Declares tensors for batches of `size` with sequences of up to `max_len` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if they are too large.
    pub fn declare(
        target: &Target,
        config: &ModelConfig,
        size: BatchSize,
        max_len: u32,
    ) -> Result<BatchTensors, Error> {
        let BatchSize { n_tokens, n_sequences } = size;
        // Layers with heads of one shape share a table.
        let mut tiles: Vec<([u32; 3], PackedTiles)> = Vec::new();
        for Block { attention, .. } in &config.blocks {
            if !tiles.iter().any(|(heads, _)| *heads == attention.heads()) {
                let kernel = attention.kernel(config.causal);
                let table = PackedTiles::declare(target, &kernel, [n_tokens, n_sequences, max_len])?;
                tiles.push((attention.heads(), table));
            }
        }
        let tensor = |label, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        let taps = config.blocks.iter().find_map(|block| match block.recurs() {
            Some(mixing @ Recurrence::GridConv { .. }) => Some(mixing.taps()),
            _ => None,
        });
        Ok(BatchTensors {
            neighbours: match taps {
                Some(taps) => Some(tensor("neighbours", &[n_tokens, taps], DType::U32)?),
                None => None,
            },
            tokens: tensor("tokens", &[n_tokens, 3], DType::U32)?,
            tiles,
            spans: tensor("spans", &[n_sequences, 2], DType::U32)?,
        })
    }

    /// Writes the spans and tiles of packed sequences. `lengths`: of each, and how many of its tokens are seen.
    ///
    /// # Errors
    /// [`Error::Operand`] if they are more or longer than declared; errors of [`TensorWriter::write_words`].
    pub fn set_lengths(&self, device: &dyn TensorWriter, lengths: &[[u32; 2]]) -> Result<(), Error> {
        let mut spans = Vec::with_capacity(self.spans.len());
        let mut first = 0;
        for [len, _] in lengths {
            spans.extend([first, first + len]);
            first += len;
        }
        spans.resize(self.spans.len().max(spans.len()), 0);
        device.write_words(&self.spans, 0, &spans)?;
        self.tiles.iter().try_for_each(|(_, tiles)| device.write_words(tiles.tensor(), 0, &tiles.of_seen(lengths)?))
    }

    /// The tiles of a layer with these heads.
    pub(super) fn tiles(&self, attention: &Attention) -> Result<&PackedTiles, Error> {
        let found = self.tiles.iter().find(|(heads, _)| *heads == attention.heads());
        found.map(|(_, tiles)| tiles).ok_or_else(|| {
            let heads: Vec<_> = self.tiles.iter().map(|(heads, _)| heads).collect();
            config_error("attention.head_count", format!("one of {heads:?}"), format!("{:?}", attention.heads()))
        })
    }
}

/// The head of a cross-encoder.
#[derive(Clone, Debug)]
pub struct ScoreHead {
    /// Configuration.
    pub config: ScoreConfig,
    /// `[C, C]`.
    pub dense: Option<Stack>,
    /// `[C]`.
    pub norm: Option<NormWeights>,
    /// `[1, C]`, or `[2, C]`: the logits of `no` and `yes`.
    pub output: Stack,
}

impl ScoreHead {
    /// Declares the head's tensors and checks their shapes.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub fn declare(
        target: &Target,
        encoder: &ModelConfig,
        config: ScoreConfig,
        source: &dyn WeightSource,
    ) -> Result<ScoreHead, Error> {
        let stack = |rows: &[(&str, u32)]| Stack::declare(target, source, "", rows, encoder.dim);
        let norm = if config.norm { Some(NormWeights::declare(source, "cls.norm", encoder)?) } else { None };
        let dense = if config.dense.is_some() { Some(stack(&[("cls", encoder.dim)])?) } else { None };
        let output = match config.answers {
            true => stack(&[("cls.output.no", 1), ("cls.output.yes", 1)])?,
            false => stack(&[("cls.output", 1)])?,
        };
        Ok(ScoreHead { config, dense, norm, output })
    }

    /// Logits of a sequence, 1 or 2.
    pub fn n_logits(&self) -> u32 {
        if self.config.answers { 2 } else { 1 }
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.dense.iter().chain([&self.output])
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let norm = self.norm.iter().flat_map(NormWeights::tensors);
        let norm = norm
            .map(|tensor| (tensor.label(), TensorSlot::Values { tensor: tensor.clone(), places: RowPlaces::from(0) }));
        norm.chain(self.stacks().flat_map(Stack::tensor_slots))
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norm = self.norm.iter().flat_map(NormWeights::tensors);
        norm.chain(self.stacks().flat_map(Stack::tensors))
    }
}

impl Transformer {
    /// Records a pass over a batch and returns the last layer's output, `[T, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record_batch(&self, rec: &mut Recorder, io: &BatchTensors) -> Result<Tensor, Error> {
        let weights = &self.weights;
        let [n_tokens, _] = io.tokens.dims2("embed_sum", "tokens")?;
        let sum = rec.temporary("sum", &[n_tokens, self.config.dim])?;
        let tables = [&weights.positions, &weights.token_types].map(Option::as_ref);
        embed_sum(rec, &io.tokens, &weights.token_embd, tables[0], tables[1], &sum)?; // [T, C]
        let sum = match self.config.embd_scale {
            1.0 => sum,
            factor => {
                let scaled = rec.temporary("scaled", sum.shape())?;
                scale(rec, &sum, &scaled, factor)?; // [T, C]
                scaled
            }
        };
        let h = self.normed(rec, weights.embd_norm.as_ref(), &sum)?; // [T, C]
        let parts = self.record_packed_parts(rec, &h)?; // [T, L P]
        let h = self.record_blocks(rec, Flow::Packed(io), parts.as_ref(), h, &mut |_, _| Ok(()))?; // [T, C]
        self.normed(rec, weights.output_norm.as_ref(), &h) // [T, C]
    }

    /// Records the pooling of the last layer's output to a row per sequence, `[B, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `h` is not `[T, C]` or `vectors` not `[B, C]`.
    pub fn record_pooling(
        &self,
        rec: &mut Recorder,
        io: &BatchTensors,
        h: &Tensor,
        (pooling, normalize): (Pooling, bool),
        vectors: &Tensor,
    ) -> Result<(), Error> {
        pool(rec, pooling, normalize, &io.spans, h, vectors) // [B, C]
    }

    /// As [`Transformer::record_pooling`], followed by dense layers. `rows`: each row of `vectors` as a sequence,
    /// `[B, 2]`.
    ///
    /// # Errors
    /// As [`Transformer::record_pooling`].
    pub fn record_dense_pooling(
        &self,
        rec: &mut Recorder,
        io: &BatchTensors,
        h: &Tensor,
        (pooling, normalize): (Pooling, bool),
        (layers, rows): (&[DenseLayer], &Tensor),
        vectors: &Tensor,
    ) -> Result<(), Error> {
        let n_sequences = io.spans.shape()[0];
        let pooled = rec.temporary("pooled", &[n_sequences, self.config.dim])?;
        self.record_pooling(rec, io, h, (pooling, false), &pooled)?; // [B, C]
        self.record_dense(rec, &pooled, normalize, (layers, rows), vectors) // [B, outputs]
    }

    /// Records dense layers of each row of `x`, `[N, C]`, which are then normalised if `normalize`. `rows`: each row
    /// as a sequence, `[N, 2]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record_dense(
        &self,
        rec: &mut Recorder,
        x: &Tensor,
        normalize: bool,
        (layers, rows): (&[DenseLayer], &Tensor),
        vectors: &Tensor,
    ) -> Result<(), Error> {
        let mut x = x.clone();
        for DenseLayer { config, product } in layers {
            let y = rec.temporary("dense", &[x.shape()[0], config.outputs])?;
            product.record_tiled(rec, &mut Input::new(&x), config.activation, false, &y)?; // [N, outputs]
            x = y;
        }
        pool(rec, Pooling::Cls, normalize, rows, &x, vectors) // [N, outputs]
    }

    /// Records the logits of all sequences, `[B, 1]` or `[B, 2]`, from the last layer's output.
    ///
    /// # Errors
    /// As [`Transformer::record_pooling`].
    pub fn record_scores(
        &self,
        rec: &mut Recorder,
        io: &BatchTensors,
        h: &Tensor,
        head: &ScoreHead,
        scores: &Tensor,
    ) -> Result<(), Error> {
        let shape = [io.spans.shape()[0], self.config.dim];
        let pooled = rec.temporary("pooled", &shape)?;
        self.record_pooling(rec, io, h, (head.config.pooling, false), &pooled)?; // [B, C]
        let activated = match &head.dense {
            Some(stack) => {
                let dense = rec.temporary("dense", &shape)?;
                stack.record_tiled(rec, &mut Input::new(&pooled), head.config.dense, false, &dense)?; // [B, C]
                dense
            }
            None => pooled,
        };
        let normed = self.normed(rec, head.norm.as_ref(), &activated)?; // [B, C]
        head.output.record_tiled(rec, &mut Input::new(&normed), None, false, scores) // [B, 1 or 2]
    }
}
