//! Image encoders of models that embed texts and pictures in one space: CLIP (Radford et al. 2021, arXiv:2103.00020)
//! and SigLIP (Zhai et al. 2023, arXiv:2303.15343).
//!
//! ```text
//! patches [T, P] --product--> [T, C] + positions --blocks--> [T, C] --head--> vectors [B, D]
//! ```
//! A batch packs pictures without padding. CLIP puts a class token before the patches of each: a patch of zeros, whose
//! product is zero, with a position that holds the token's embedding, too.

use super::config::{MAX_DIM, ModelConfig, config_error};
use super::encoder::{BatchSize, BatchTensors};
use super::forward::{Flow, Tap, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource, describe};
use super::weights::{NormWeights, Weights};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{
    Activation, AttentionConfig, Gelu, Input, PackedTiles, Pooling, add, cross_attention, embed_sum, pool,
};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor, TensorWriter};

/// Name of the learned query.
const PROBE: &str = "head.probe.weight";

/// Shape of an image encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageEncoderConfig {
    /// Its blocks: width C, without tokens. The norm of embeddings is CLIP's `pre_layrnorm`.
    pub encoder: ModelConfig,
    /// P, elements of a patch.
    pub patch_dim: u32,
    /// Makes a vector of a picture's rows.
    pub head: ImageHead,
}

/// What makes a vector of a picture's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageHead {
    /// The row of a class token, normalised, and a product: CLIP.
    ClassToken {
        /// D: `projection_dim`.
        dims: u32,
    },
    /// Attention of a learned query to all rows, normalised before, and a feed-forward: SigLIP.
    Probe {
        /// F, the feed-forward's width: `intermediate_size`.
        ffn_dim: u32,
        /// Its activation.
        gelu: Gelu,
    },
}

impl ImageEncoderConfig {
    /// Rows of a picture before its patches.
    pub fn n_class_rows(&self) -> u32 {
        u32::from(matches!(self.head, ImageHead::ClassToken { .. }))
    }

    /// D, elements in a vector.
    pub fn dims(&self) -> u32 {
        match self.head {
            ImageHead::ClassToken { dims } => dims,
            ImageHead::Probe { .. } => self.encoder.dim,
        }
    }

    /// Refuses values beyond any model or the kernels' limits, before anything is sized by them.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<(), Error> {
        let sizes =
            [("hidden_size", self.encoder.dim), ("patch_size", self.patch_dim), ("projection_dim", self.dims())];
        for (field, size) in sizes {
            if !(1..=MAX_DIM).contains(&size) {
                return Err(config_error(field, format!("1 to {MAX_DIM}"), size));
            }
        }
        self.encoder.check_blocks()
    }

    /// Attention of the learned query, with the blocks' heads.
    fn probe_attention(&self) -> Option<AttentionConfig> {
        self.encoder.blocks.first().map(|block| block.attention.kernel(false))
    }
}

/// The head's weights.
#[derive(Clone, Debug)]
enum HeadWeights {
    /// `[D, C]`.
    ClassToken(Stack),
    Probe(Box<ProbeWeights>),
}

/// Weights of a learned query.
#[derive(Clone, Debug)]
struct ProbeWeights {
    attention: AttentionConfig,
    activation: Activation,
    /// The query, `[1, C]`.
    probe: Matrix,
    /// `[C, C]`.
    query: Stack,
    /// Keys and values, `[2 C, C]`.
    kv: Stack,
    /// `[C, C]`.
    output: Stack,
    norm: NormWeights,
    /// `[F, C]`.
    up: Stack,
    /// `[C, F]`.
    down: Stack,
    ffn_dim: u32,
}

impl ProbeWeights {
    fn declare(
        target: &Target,
        config: &ImageEncoderConfig,
        source: &dyn WeightSource,
        (ffn_dim, gelu): (u32, Gelu),
    ) -> Result<ProbeWeights, Error> {
        let dim = config.encoder.dim;
        let stack = |names: &[(&str, u32)], cols| Stack::declare(target, source, "head.", names, cols);
        let weight = describe(source, PROBE, &[1, dim])?.weight;
        let attention = config.probe_attention();
        Ok(ProbeWeights {
            attention: attention.ok_or_else(|| config_error("num_hidden_layers", "1 or more".into(), 0))?,
            activation: Activation::Gelu(gelu),
            probe: Matrix::declare(target, PROBE, weight, 1, dim)?,
            query: stack(&[("attn_q", dim)], dim)?,
            kv: stack(&[("attn_k", dim), ("attn_v", dim)], dim)?,
            output: stack(&[("attn_output", dim)], dim)?,
            norm: NormWeights::declare(source, "head.ffn_norm", &config.encoder)?,
            up: stack(&[("ffn_up", ffn_dim)], dim)?,
            down: stack(&[("ffn_down", dim)], ffn_dim)?,
            ffn_dim,
        })
    }

    /// Records the head over rows, `[T, C]`: `[B, C]`. `tokens`: zeros, `[B, 3]`.
    fn record(
        &self,
        rec: &mut Recorder,
        encoder: &Transformer,
        (tokens, tiles): (&Tensor, &PackedTiles),
        rows: &Tensor,
    ) -> Result<Tensor, Error> {
        let (n_rows, n_pictures, dim) = (rows.shape()[0], tokens.shape()[0], encoder.config.dim);
        let product = |rec: &mut Recorder, stack: &Stack, x: &Tensor, shape: [u32; 2], activation| {
            let y = rec.temporary("head", &shape)?;
            stack.record_tiled(rec, &mut Input::new(x), activation, false, &y)?;
            Ok::<Tensor, Error>(y)
        };
        let probes = rec.temporary("probes", &[n_pictures, dim])?;
        embed_sum(rec, tokens, &self.probe, None, None, &probes)?; // [B, C]
        let q = product(rec, &self.query, &probes, [n_pictures, dim], None)?; // [B, H D]
        let kv = product(rec, &self.kv, rows, [n_rows, 2 * dim], None)?; // [T, 2 H D]
        let mixed = rec.temporary("mixed", &[n_pictures, dim])?;
        cross_attention(rec, tiles, &self.attention, &q, &kv, &mixed)?; // [B, H D]
        let h = product(rec, &self.output, &mixed, [n_pictures, dim], None)?; // [B, C]
        let x = encoder.normed(rec, Some(&self.norm), &h)?; // [B, C]
        let activated = product(rec, &self.up, &x, [n_pictures, self.ffn_dim], Some(self.activation))?; // [B, F]
        self.down.record_tiled(rec, &mut Input::new(&activated), None, true, &h)?; // [B, C]
        Ok(h)
    }
}

/// Tensors that a batch of pictures shares with the host.
#[derive(Clone, Debug)]
pub struct ImageBatchTensors {
    /// The batch, of one sequence for each picture.
    pub batch: BatchTensors,
    /// `[T, P]`; zeros for a class token.
    pub patches: Tensor,
    /// Learned positions, `[T, C]`; of a class token with its embedding.
    pub positions: Tensor,
    /// Each picture's vector as a sequence, `[B, 2]`.
    row_spans: Tensor,
    /// Tiles of the learned query, if the head has one.
    queries: Option<PackedTiles>,
    /// `[B, D]`.
    pub vectors: Tensor,
}

impl ImageBatchTensors {
    /// Writes what says which rows belong to which picture.
    ///
    /// # Errors
    /// As [`BatchTensors::set_lengths`].
    pub fn set_lengths(&self, device: &dyn TensorWriter, lengths: &[u32]) -> Result<(), Error> {
        device.write_words(&self.batch.tokens, 0, &vec![0; self.batch.tokens.len()])?;
        let all: Vec<[u32; 2]> = lengths.iter().map(|&len| [len; 2]).collect();
        self.batch.set_lengths(device, &all)?;
        let spans: Vec<u32> = (0..self.row_spans.shape()[0]).flat_map(|row| [row, row + 1]).collect();
        device.write_words(&self.row_spans, 0, &spans)?;
        match &self.queries {
            Some(tiles) => device.write_words(tiles.tensor(), 0, &tiles.of_one_query(lengths)?),
            None => Ok(()),
        }
    }
}

/// An image encoder on a device.
#[derive(Clone, Debug)]
pub struct ImageEncoder {
    /// Shape.
    pub config: ImageEncoderConfig,
    /// `[C, P]`.
    patch_embd: Stack,
    encoder: Transformer,
    head: HeadWeights,
    /// Whether vectors are L2-normalised.
    normalize: bool,
    /// Rows of a picture at most.
    max_rows: u32,
}

impl ImageEncoder {
    /// Declares an encoder for pictures of up to `max_rows` rows.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub fn declare(
        target: &Target,
        config: ImageEncoderConfig,
        source: &dyn WeightSource,
        (max_rows, normalize): (u32, bool),
    ) -> Result<ImageEncoder, Error> {
        let dim = config.encoder.dim;
        let head = match config.head {
            ImageHead::ClassToken { dims } => {
                HeadWeights::ClassToken(Stack::declare(target, source, "", &[("head", dims)], dim)?)
            }
            ImageHead::Probe { ffn_dim, gelu } => {
                HeadWeights::Probe(Box::new(ProbeWeights::declare(target, &config, source, (ffn_dim, gelu))?))
            }
        };
        let patch_embd = Stack::declare(target, source, "", &[("patch_embd", dim)], config.patch_dim)?;
        let weights = Weights::declare_blocks(target, &config.encoder, source)?;
        let encoder = Transformer::declare(config.encoder.clone(), weights, max_rows)?;
        Ok(ImageEncoder { config, patch_embd, encoder, head, normalize, max_rows })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let product = match &self.head {
            HeadWeights::ClassToken(product) => Some(product),
            HeadWeights::Probe(_) => None,
        };
        let probe = self.probe().into_iter();
        let probe = probe.flat_map(|probe| [&probe.query, &probe.kv, &probe.output, &probe.up, &probe.down]);
        [&self.patch_embd].into_iter().chain(product).chain(probe)
    }

    fn probe(&self) -> Option<&ProbeWeights> {
        match &self.head {
            HeadWeights::ClassToken(_) => None,
            HeadWeights::Probe(probe) => Some(probe),
        }
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let places = RowPlaces::from(0);
        let norms = self.probe().into_iter().flat_map(|probe| probe.norm.tensors());
        let norms = norms.map(move |tensor| (tensor.label(), TensorSlot::Values { tensor: tensor.clone(), places }));
        let rows = |probe: &ProbeWeights| (PROBE, TensorSlot::Rows { matrix: probe.probe.clone(), places });
        let stacks = self.stacks().flat_map(Stack::tensor_slots);
        self.encoder.weights.tensor_slots().chain(norms).chain(self.probe().map(rows)).chain(stacks)
    }

    /// All tensors that stay on the device.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let probe = self.probe().into_iter().flat_map(|probe| probe.norm.tensors().chain(probe.probe.tensors()));
        self.encoder.tensors().chain(probe).chain(self.stacks().flat_map(Stack::tensors))
    }

    /// Declares the tensors of passes over `size.n_sequences` pictures of `size.n_tokens` rows in all.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if they are too large.
    pub fn declare_batch(&self, target: &Target, size: BatchSize) -> Result<ImageBatchTensors, Error> {
        let BatchSize { n_tokens: n_rows, n_sequences: n_pictures } = size;
        let ImageEncoderConfig { encoder, patch_dim, .. } = &self.config;
        let tensor = |label, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        Ok(ImageBatchTensors {
            batch: BatchTensors::declare(target, encoder, size, self.max_rows)?,
            patches: tensor("patches", &[n_rows, *patch_dim], DType::F32)?,
            positions: tensor("positions", &[n_rows, encoder.dim], DType::F32)?,
            row_spans: tensor("row spans", &[n_pictures, 2], DType::U32)?,
            queries: match self.probe() {
                Some(probe) => {
                    let sizes = [n_pictures, n_pictures, self.max_rows];
                    Some(PackedTiles::declare(target, &probe.attention, sizes)?)
                }
                None => None,
            },
            vectors: tensor("vectors", &[n_pictures, self.config.dims()], DType::F32)?,
        })
    }

    /// Records a pass. `tap` receives the rows that the head takes, `[T, C]`: those of the last layer, which a learned query
    /// sees normalised.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record(&self, rec: &mut Recorder, io: &ImageBatchTensors, tap: Tap<'_>) -> Result<(), Error> {
        let ImageBatchTensors { batch, patches, positions, row_spans, queries, vectors } = io;
        let (n_pictures, dim) = (vectors.shape()[0], self.config.encoder.dim);
        let weights = &self.encoder.weights;
        let h = rec.temporary("h", positions.shape())?;
        self.patch_embd.record_tiled(rec, &mut Input::new(patches), None, false, &h)?; // [T, C]
        add(rec, positions, &h)?;
        let h = self.encoder.normed(rec, weights.embd_norm.as_ref(), &h)?; // [T, C]
        let h = self.encoder.record_blocks(rec, Flow::Packed(batch), None, h, &mut |_, _| Ok(()))?; // [T, C]
        let whole = match (&self.head, queries) {
            (HeadWeights::ClassToken(product), _) => {
                tap(rec, &h)?;
                let class = rec.temporary("class", &[n_pictures, dim])?;
                pool(rec, Pooling::Cls, false, &batch.spans, &h, &class)?; // [B, C]
                let class = self.encoder.normed(rec, weights.output_norm.as_ref(), &class)?; // [B, C]
                let projected = rec.temporary("projected", vectors.shape())?;
                product.record_tiled(rec, &mut Input::new(&class), None, false, &projected)?; // [B, D]
                projected
            }
            (HeadWeights::Probe(probe), Some(tiles)) => {
                let h = self.encoder.normed(rec, weights.output_norm.as_ref(), &h)?; // [T, C]
                tap(rec, &h)?;
                let tokens = batch.tokens.prefix(&[n_pictures, 3])?;
                probe.record(rec, &self.encoder, (&tokens, tiles), &h)? // [B, C]
            }
            (HeadWeights::Probe(_), None) => return Err(config_error("head", "tiles of queries".into(), "none")),
        };
        pool(rec, Pooling::Cls, self.normalize, row_spans, &whole, vectors) // [B, D]
    }
}
