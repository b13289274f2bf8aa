//! Forward pass of transformer blocks, shared by decoders and encoders.

use std::ops::Range;

use super::block::{Between, Latent, NormPlace, OutputGates, Recurrence};
use super::config::{ModelConfig, NormKind};
use super::decoder::{FetchedRows, PassTensors};
use super::encoder::BatchTensors;
use super::kv_cache::KvCache;
use super::per_layer::PerLayerWeights;
use super::stack::{Stack, TensorSlot, layer_of};
use super::weights::{HalfNorms, LatentWeights, NormWeights, RecurrenceWeights, TOKEN_EMBD, Weights};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{
    Activation, Gate, Gates, HeadColumns, HeadMatrices, Heads, Input, LatentKey, Linear, Norm, RopeConfig, RopeScaling,
    ShortConv, add_rms_norm, attention, attention_next, attention_packed, fold_norm, fuses_norm, gate_up, gelu,
    grid_conv, layer_norm, linear_norm, mrope_rows, relu, rms_norm, rms_norm_columns, rms_norm_groups, rope_kv,
    rope_packed, rope_table, scale, sigmoid_gate, suits_few, up_gated,
};
use crate::matrix::Matrix;
use crate::recording::{BatchInvariance, Recorder};
use crate::target::Target;
use crate::tensor::{Role, Tensor, TensorWriter};

/// A model, or a pipeline stage of it, on a device.
#[derive(Clone, Debug)]
pub struct Transformer {
    /// Configuration.
    pub config: ModelConfig,
    /// Weights.
    pub weights: Weights,
    /// RoPE tables, one for each of [`ModelConfig::ropes`], `[rows, rot_dims / 2, 2]`.
    ropes: Vec<Tensor>,
    /// S.
    n_pos: u32,
    /// Its layers: all, unless devices share the model.
    layers: Range<u32>,
    /// Embedding tables on disk, whose rows the host fetches for each pass.
    fetched: Vec<&'static str>,
}

/// How a pass lays out its tokens and what they see.
#[derive(Clone, Copy)]
pub(super) enum Flow<'a> {
    /// The next tokens of a sequence, which see its KV cache.
    Cached(&'a PassTensors, &'a KvCache),
    /// Whole packed sequences, each of which sees only itself. A row's result does not depend on other rows.
    Packed(&'a BatchTensors),
}

/// The end of a block's half: a product added to the residual stream.
pub(super) struct HalfEnd<'a> {
    pub product: &'a Stack,
    /// Position of the half's norms, and their weights.
    pub place: NormPlace,
    pub norms: &'a HalfNorms,
    /// Scale of the sum, where the output is normalised.
    pub factor: Option<&'a Tensor>,
}

/// The input of a feed-forward's second product.
pub(super) enum Activated {
    /// `[T, F]`.
    Rows(Tensor),
    /// Gates and ups, `[T, 2 F]`; the product's kernel decides how to multiply them.
    Halves(Tensor, Gate),
}

impl Activated {
    pub(super) fn input(&self) -> Input<'_> {
        match self {
            Activated::Rows(x) => Input::new(x),
            Activated::Halves(up, gate) => Input::gated(up, *gate),
        }
    }
}

/// Rows at a RoPE table's end for an image's rows of one pass, padding included.
fn n_image_rows(config: &ModelConfig, n_pos: u32) -> u32 {
    /// The largest pass.
    const MOST: u32 = 512;
    match config.mrope {
        Some(_) => n_pos.next_multiple_of(64).min(MOST),
        None => 0,
    }
}

/// Receives the residual stream after the embedding and after each block.
pub type Tap<'a> = &'a mut dyn FnMut(&mut Recorder, &Tensor) -> Result<(), Error>;

impl Transformer {
    /// A transformer with RoPE tables declared for `n_pos` positions.
    ///
    /// # Errors
    /// [`Error::Shape`] for a table that would be too large for a tensor.
    pub fn declare(config: ModelConfig, weights: Weights, n_pos: u32) -> Result<Transformer, Error> {
        let n_image_rows = n_image_rows(&config, n_pos);
        let table = |rope: &RopeConfig| {
            let n_rows = rope.n_rows(n_pos) + n_image_rows;
            Tensor::declare("rope", Role::Cache, &[n_rows, rope.rot_dims / 2, 2], DType::F32)
        };
        let ropes = config.ropes.iter().map(table).collect::<Result<_, _>>()?;
        let layers = 0..config.n_layers();
        Ok(Transformer { config, weights, ropes, n_pos, layers, fetched: Vec::new() })
    }

    /// The pipeline stage with these consecutive layers.
    pub fn part(self, layers: Range<u32>) -> Transformer {
        Transformer { layers, ..self }
    }

    /// The layers it computes.
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }

    /// Whether it starts with the token embedding rather than another stage's output.
    pub(super) fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether it ends with the output head.
    pub(crate) fn is_last(&self) -> bool {
        self.layers.end == self.config.n_layers()
    }

    /// Destinations of the source tensors that its passes read, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        self.weights.tensor_slots().filter(|(name, _)| self.reads(name))
    }

    /// Embedding tables that can stay on disk: the per-layer embeddings, and the token embedding unless this part
    /// also uses it as the output head or for an MTP head.
    pub(crate) fn row_tables(&self) -> impl Iterator<Item = (&'static str, &Matrix)> {
        let stays = self.is_last() && (!self.weights.has_output() || self.weights.mtp.is_some());
        let embd = (!stays).then_some((TOKEN_EMBD, &self.weights.token_embd));
        let per_layer = self.weights.per_layer.iter().filter_map(|weights| weights.token_embd.as_ref());
        let per_layer = per_layer.map(|table| (PerLayerWeights::TABLE, table));
        embd.into_iter().chain(per_layer).filter(|_| self.is_first())
    }

    /// Leaves [`Transformer::row_tables`] on disk; the host fetches their rows.
    pub(crate) fn fetching_rows(self) -> Transformer {
        let fetched = self.row_tables().map(|(name, _)| name).collect();
        Transformer { fetched, ..self }
    }

    /// The embedding tables on disk.
    pub(crate) fn fetched_tables(&self) -> impl Iterator<Item = (&'static str, &Matrix)> {
        self.row_tables().filter(|(name, _)| self.fetched.contains(name))
    }

    /// Declares tensors for fetched rows of passes of up to `max_pass` tokens.
    ///
    /// # Errors
    /// [`Error::Operand`] if a tensor would be too large.
    pub(crate) fn declare_fetched(&self, target: &Target, max_pass: u32) -> Result<Vec<FetchedRows>, Error> {
        let fetched = |(table, matrix): (&'static str, &Matrix)| {
            let rows = matrix.declare_rows(target, &format!("rows of {table}"), max_pass)?;
            let numbers = Tensor::declare("numbers", Role::Activations, &[self.n_pos], DType::U32)?;
            Ok(FetchedRows { table, rows, numbers })
        };
        self.fetched_tables().map(fetched).collect()
    }

    fn reads(&self, name: &str) -> bool {
        if self.fetched.contains(&name) {
            return false;
        }
        match layer_of(name) {
            // The MTP head's block belongs to the last stage.
            Some(layer) => self.layers.contains(&layer) || (layer >= self.config.n_layers() && self.is_last()),
            // A tied output head and an MTP head also use the embedding.
            None if name == TOKEN_EMBD => {
                let is_used_again = !self.weights.has_output() || self.weights.mtp.is_some();
                self.is_first() || (self.is_last() && is_used_again)
            }
            None if name.starts_with("output") => self.is_last(),
            None => self.is_first(),
        }
    }

    /// The same model with other weights, such as an adapter's.
    #[cfg(feature = "lora")]
    pub(crate) fn with_weights(&self, weights: Weights) -> Transformer {
        Transformer {
            weights,
            config: self.config.clone(),
            ropes: self.ropes.clone(),
            n_pos: self.n_pos,
            layers: self.layers(),
            fetched: self.fetched.clone(),
        }
    }

    /// The RoPE table of this number, `[rows, rot_dims / 2, 2]`.
    pub(super) fn rope_table(&self, rope: usize) -> Option<&Tensor> {
        self.ropes.get(rope)
    }

    /// Fills the RoPE tables.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn upload_ropes(&self, device: &dyn TensorWriter) -> Result<(), Error> {
        let mut tables = self.config.ropes.iter().zip(&self.ropes);
        tables.try_for_each(|(rope, table)| {
            device.write_words(table, 0, bytemuck::cast_slice(&rope_table(rope, self.n_pos)))
        })
    }

    /// Writes the rotations of an image's rows at these times, rows and columns, for the next pass. Returns the RoPE table
    /// row of the first; `None` where an image's rows have positions like tokens.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub(crate) fn write_image_ropes(
        &self,
        device: &dyn TensorWriter,
        positions: &[[u32; 3]],
    ) -> Result<Option<u32>, Error> {
        let Some(sections) = self.config.mrope else { return Ok(None) };
        let mut first_row = None;
        for (rope, table) in self.config.ropes.iter().zip(&self.ropes) {
            let first = table.shape()[0] - n_image_rows(&self.config, self.n_pos);
            let rows = mrope_rows(rope, sections, positions);
            device.write_words(table, (first * rope.rot_dims) as usize, bytemuck::cast_slice(&rows))?;
            first_row = Some(first);
        }
        Ok(first_row)
    }

    /// The RoPE table row of position 0 in a sequence of `n_tokens` tokens; see [`RopeConfig::first_row`].
    pub fn rope_offset(&self, n_tokens: u32) -> u32 {
        self.config.ropes.iter().map(|rope| rope.first_row(n_tokens, self.n_pos)).max().unwrap_or(0)
    }

    /// The length up to which a sequence of `n_tokens` keeps its RoPE table row.
    pub fn rope_offset_end(&self, n_tokens: u32) -> u32 {
        let ends = self.config.ropes.iter().filter_map(|rope| match rope.scaling {
            RopeScaling::Long { original_max_seq_len, .. } => Some(original_max_seq_len),
            _ => None,
        });
        ends.filter(|&end| n_tokens <= end).min().unwrap_or(u32::MAX)
    }

    /// All tensors that stay on the device.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.weights.tensors().chain(&self.ropes)
    }

    /// Records all blocks: `[T, C]` to `[T, C]`. `parts`: per-layer embeddings, if any.
    pub(super) fn record_blocks(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        parts: Option<&Tensor>,
        mut h: Tensor,
        tap: Tap<'_>,
    ) -> Result<Tensor, Error> {
        tap(rec, &h)?;
        for layer in self.layers() {
            rec.begin_layer(Some(layer));
            let l = layer as usize;
            h = self.record_block(rec, flow, l, h)?; // [T, C]
            if let (Some(half), Some(parts)) = (&self.weights.blocks[l].per_layer, parts) {
                self.record_per_layer(rec, flow, l, half, parts, &h)?; // [T, C]
            }
            tap(rec, &h)?;
        }
        rec.begin_layer(None);
        Ok(h)
    }

    /// Records a block: `[T, C]` to `[T, C]`.
    pub(super) fn record_block(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let (block, weights) = (&self.config.blocks[l], &self.weights.blocks[l]);
        // All that reads the stream, before anything is added to it.
        let attended = if block.attends() { Some(self.record_attention(rec, flow, l, &h)?) } else { None }; // [T, H D]
        let recurred = match &weights.recurrence {
            Some(recurrence) => Some((recurrence, self.record_recurrence(rec, flow, l, recurrence, &h)?)), // [T, K]
            None => None,
        };
        let beside = if block.parallel { Some(self.record_activated(rec, flow, l, &h)?) } else { None }; // of [T, F]
        let (place, norms) = (block.attn_norm, &weights.attn_norms);
        let mut h = h;
        if let Some(mixed) = attended {
            let end = HalfEnd { product: &weights.attn_output, place, norms, factor: None };
            h = self.record_end(rec, flow, &end, &mut Input::new(&mixed), h)?; // [T, C]
        }
        if let Some((recurrence, mixed)) = recurred {
            // Norms of groups are taken already.
            let scanned = recurrence.norm.as_ref().filter(|_| recurrence.n_norm_groups == 1);
            let scanned = scanned.map(|weight| Norm { weight, eps: self.config.norm_eps });
            let end = HalfEnd { product: &recurrence.output, place, norms, factor: None };
            h = self.record_end(rec, flow, &end, &mut Input::normed(&mixed, scanned), h)?; // [T, C]
        }
        if let Some(cross) = &weights.cross {
            h = self.record_cross(rec, flow, l, cross, h)?; // [T, C]
        }
        if !block.feeds_forward() {
            return Ok(h);
        }
        if let Some(experts) = &weights.experts {
            return self.record_experts(rec, flow, l, experts, h); // [T, C]
        }
        let activated = match beside {
            Some(activated) => activated,
            None => self.record_activated(rec, flow, l, &h)?, // of [T, F]
        };
        let (product, norms, factor) = (&weights.ffn_down, &weights.ffn_norms, self.output_scale(l));
        let end = HalfEnd { product, place: block.ffn_norm, norms, factor };
        self.record_end(rec, flow, &end, &mut activated.input(), h) // [T, C]
    }

    /// A layer's output scale, which the feed-forward's end applies unless a third half follows.
    pub(super) fn output_scale(&self, l: usize) -> Option<&Tensor> {
        let weights = &self.weights.blocks[l];
        weights.output_scale.as_ref().filter(|_| weights.per_layer.is_none())
    }

    /// Records attention without the output projection, and returns `[T, H D]`.
    fn record_attention(&self, rec: &mut Recorder, flow: Flow<'_>, l: usize, h: &Tensor) -> Result<Tensor, Error> {
        let (attention_config, weights) = (&self.config.blocks[l].attention, &self.weights.blocks[l]);
        let n_tokens = h.shape()[0];
        let kernel = match flow {
            Flow::Cached(PassTensors { image: Some(image), .. }, _) if n_tokens > 1 => {
                attention_config.image_kernel(image.attention)
            }
            _ => attention_config.kernel(self.config.causal),
        };
        let mixed = rec.temporary("mixed", &[n_tokens, attention_config.n_heads * kernel.value_dim()])?;
        let qkv_shape = [n_tokens, attention_config.qkv_dim()];
        match flow {
            Flow::Cached(io, cache) => {
                let Some(cached) = cache.keys(l) else { return Err(wrong_cache(l)) };
                let qkv = rec.temporary("qkv", &qkv_shape)?;
                let latent = attention_config.latent.as_ref().zip(weights.latent.as_ref());
                let projected = match latent {
                    Some(latent) => self.record_latent_heads(rec, flow, l, latent, h, &qkv)?, // [T, (H + 1) D]
                    None => {
                        let norm = weights.attn_norms.before.as_ref();
                        self.record_product(rec, flow, &weights.attn_qkv, norm, h, &qkv)?;
                        qkv.clone()
                    }
                };
                let (heads, sinks) = (self.heads(l), weights.attn_sinks.as_ref());
                let state = if cache.is_in_window_pages(l) { io.state.of_window() } else { io.state.clone() };
                let asked = io.queries.as_ref().filter(|(layer, _)| *layer == l);
                if state.is_batch()
                    || (n_tokens == 1 && asked.is_none() && rec.batch_invariance() != BatchInvariance::Many)
                {
                    attention_next(rec, &state, &kernel, &heads, sinks, &qkv, cached, &mixed)?; // [T, H D]
                } else {
                    let q = match asked {
                        Some((_, q)) => q.clone(),
                        None => rec.temporary("q", &[n_tokens, attention_config.q_dim()])?,
                    };
                    rope_kv(rec, &state, &heads, &qkv, &q, cached)?;
                    attention(rec, &state, &kernel, sinks, &q, cached, &mixed)?; // [T, H D]
                }
                let (mixed, start, head_dim) = match latent {
                    None => (mixed, 0, attention_config.head_dim),
                    Some(latent) => {
                        let values = self.record_latent_values(rec, l, latent, &mixed)?; // [T, H V]
                        (values, attention_config.latent_dims(latent.0)[1], latent.0.value_dim)
                    }
                };
                if let Some(gates) = attention_config.gates {
                    let size = if gates == OutputGates::Heads { head_dim } else { 1 };
                    sigmoid_gate(rec, Gates { columns: &projected, start, size }, &mixed)?; // [T, H D]
                }
                Ok(mixed)
            }
            Flow::Packed(io) => {
                let qkv = rec.temporary("qkv", &qkv_shape)?;
                self.record_product(rec, flow, &weights.attn_qkv, weights.attn_norms.before.as_ref(), h, &qkv)?;
                let heads = self.heads(l);
                if heads.rope.is_some() || heads.norm.is_some() {
                    rope_packed(rec, &heads, &io.tokens, &qkv)?;
                }
                let biases = self.weights.position_biases.as_ref();
                attention_packed(rec, io.tiles(attention_config)?, &kernel, biases, &qkv, &mixed)?; // [T, H D]
                Ok(mixed)
            }
        }
    }

    /// Records the queries and the key of latent attention, `[T, (H + 1) D]`, and returns the products of the layer's
    /// input.
    fn record_latent_heads(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        (latent, weights): (&Latent, &LatentWeights),
        h: &Tensor,
        heads: &Tensor,
    ) -> Result<Tensor, Error> {
        let (attention, of_block) = (&self.config.blocks[l].attention, &self.weights.blocks[l]);
        let (n_tokens, [query_dim, dim]) = (h.shape()[0], attention.latent_dims(latent));
        let turned = attention.head_dim - latent.kv_rank;
        let norm = |weight| Norm { weight, eps: latent.eps };
        let down = rec.temporary("latents", &[n_tokens, dim + attention.gate_dim()])?;
        self.record_product(rec, flow, &of_block.attn_qkv, of_block.attn_norms.before.as_ref(), h, &down)?;
        let queries = match &weights.queries {
            None => down.clone(),
            Some((weight, product)) => {
                let queries = rec.temporary("queries", &[n_tokens, query_dim])?;
                let rank = dim - attention.head_dim;
                if n_tokens == 1 {
                    product.record(rec, Some(norm(weight)), &down.prefix(&[1, rank])?, &queries, false)?;
                } else {
                    let normed = rec.temporary("normed", &[n_tokens, rank])?;
                    rms_norm_columns(rec, &down, weight, &normed, latent.eps)?; // [T, Rq]
                    product.record(rec, None, &normed, &queries, false)?;
                }
                queries
            }
        };
        let x = HeadColumns { columns: &queries, start: 0, stride: latent.nope_dim + turned };
        let start = dim - attention.head_dim;
        let key = LatentKey { columns: &down, start, n_turned: turned, norm: norm(&weights.kv_norm) };
        let matrices = |w, rows: [u32; 2], transposed| {
            let [n_out, dim] = rows;
            HeadMatrices { w, n_heads: attention.n_heads, start: 0, n_out, dim, transposed }
        };
        let w = weights.keys.as_one().ok_or_else(|| wrong_latent(l))?;
        matrices(w, [latent.kv_rank, latent.nope_dim], weights.values.is_none()).record(rec, x, Some(key), heads)?;
        Ok(down)
    }

    /// Records the values of latent attention, `[T, H V]`, from sums of latents, `[T, H L]`.
    fn record_latent_values(
        &self,
        rec: &mut Recorder,
        l: usize,
        (latent, weights): (&Latent, &LatentWeights),
        mixed: &Tensor,
    ) -> Result<Tensor, Error> {
        let n_heads = self.config.blocks[l].attention.n_heads;
        let values = rec.temporary("values", &[mixed.shape()[0], n_heads * latent.value_dim])?;
        let (stack, start) = match &weights.values {
            Some(values) => (values, 0),
            None => (&weights.keys, latent.nope_dim),
        };
        let w = stack.as_one().ok_or_else(|| wrong_latent(l))?;
        let (n_out, dim) = (latent.value_dim, latent.kv_rank);
        let x = HeadColumns { columns: mixed, start: 0, stride: latent.kv_rank };
        HeadMatrices { w, n_heads, start, n_out, dim, transposed: false }.record(rec, x, None, &values)?;
        Ok(values)
    }

    /// Records a layer's token mixing other than attention and returns `[T, K]`.
    fn record_recurrence(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        weights: &RecurrenceWeights,
        h: &Tensor,
    ) -> Result<Tensor, Error> {
        let (dim, n_tokens) = (self.config.dim, h.shape()[0]);
        let Some(recurrence) = &self.config.blocks[l].recurrence else { return Err(wrong_cache(l)) };
        let norm = self.weights.blocks[l].attn_norms.before.as_ref();
        let inputs = rec.temporary("inputs", &[n_tokens, recurrence.inputs(dim)])?;
        self.record_product(rec, flow, &weights.input, norm, h, &inputs)?;
        let mixed = rec.temporary("mixed", &[n_tokens, recurrence.outputs(dim)])?;
        let (io, cache) = match flow {
            Flow::Cached(io, cache) => (io, cache),
            Flow::Packed(io) => {
                let neighbours = io.neighbours.as_ref().ok_or_else(|| wrong_cache(l))?;
                grid_conv(rec, neighbours, &inputs, weights.conv(), &mixed)?; // [T, C]
                return Ok(mixed);
            }
        };
        let Some((past, matrices)) = cache.states_of(l) else { return Err(wrong_cache(l)) };
        match recurrence {
            Recurrence::GridConv { .. } => return Err(wrong_cache(l)),
            Recurrence::ShortConv { .. } => {
                let conv = ShortConv {
                    weight: weights.conv(),
                    bias: weights.conv_bias.as_ref(),
                    gated: true,
                    first_column: 0,
                };
                conv.record(rec, &io.state, &inputs, past, &mixed)?; // [T, C]
            }
            Recurrence::DeltaNet { rule, eps, .. } => {
                let (Some(matrices), Some(heads)) = (matrices, weights.heads()) else { return Err(wrong_cache(l)) };
                let qkv = rec.temporary("qkv", &[n_tokens, rule.channels()])?;
                let conv = ShortConv {
                    weight: weights.conv(),
                    bias: weights.conv_bias.as_ref(),
                    gated: false,
                    first_column: 0,
                };
                conv.record(rec, &io.state, &inputs, past, &qkv)?; // [T, channels]
                rule.record(rec, &io.state, [&qkv, &inputs, heads], *eps, matrices, &mixed)?; // [T, H Dv]
            }
            Recurrence::Mamba2 { scan, .. } => {
                let (Some(matrices), Some(heads)) = (matrices, weights.heads()) else { return Err(wrong_cache(l)) };
                let vbc = rec.temporary("vbc", &[n_tokens, scan.channels()])?;
                let (weight, bias) = (weights.conv(), weights.conv_bias.as_ref());
                let conv = ShortConv { weight, bias, gated: false, first_column: scan.inner_dim() };
                conv.record(rec, &io.state, &inputs, past, &vbc)?; // [T, channels]
                scan.record(rec, &io.state, [&vbc, &inputs, heads], matrices, &mixed)?; // [T, H P]
                if let Some(weight) = weights.norm.as_ref().filter(|_| weights.n_norm_groups > 1) {
                    let normed = rec.temporary("normed", mixed.shape())?;
                    rms_norm_groups(rec, &mixed, weight, weights.n_norm_groups, &normed, self.config.norm_eps)?;
                    return Ok(normed); // [T, H P]
                }
            }
        }
        Ok(mixed)
    }

    /// How a block's projected heads are normalised and rotated.
    fn heads(&self, l: usize) -> Heads<'_> {
        let attention = &self.config.blocks[l].attention;
        let norm = attention.qk_norm.zip(self.weights.blocks[l].qk_norm());
        Heads {
            n_heads: attention.n_heads,
            n_kv_heads: attention.own_kv_heads(),
            head_dim: attention.head_dim,
            keys_hold_values: attention.latent.is_some(),
            first_column: attention.first_query(),
            rope: attention.rope.and_then(|rope| Some((self.config.ropes.get(rope)?, self.ropes.get(rope)?))),
            norm: norm.map(|(norm, weight)| (norm, weight, self.config.norm_eps)),
        }
    }

    /// Records a feed-forward up to the input of its second product, `[T, F]`, which it returns.
    pub(super) fn record_activated(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        h: &Tensor,
    ) -> Result<Activated, Error> {
        let (ffn, weights) = (&self.config.blocks[l].feed_forward, &self.weights.blocks[l]);
        let norm = weights.ffn_norms.before.as_ref();
        let n_tokens = h.shape()[0];
        let activated = rec.temporary("activated", &[n_tokens, ffn.dense_dim().unwrap_or(ffn.dim)])?;
        let up = |rec: &mut Recorder| rec.temporary("up", &[n_tokens, ffn.up_dim()]);
        let for_few = weights.ffn_up.as_gate_up().filter(|_| suits_few(rec, h));
        match (ffn.between, flow, for_few) {
            (Between::Gate(gate), Flow::Cached(..), Some((gates, w))) => {
                let (x, norm) = self.before(rec, norm, h)?;
                let (x, norm) = fold_norm(rec, &x, norm, false)?; // [T, C]
                #[cfg(feature = "lora")]
                if let Some(delta) = &weights.ffn_up.delta {
                    delta.record_gate_up(rec, (gates, w), norm, gate, &x, &activated)?; // [T, F]
                    return Ok(Activated::Rows(activated));
                }
                match gates {
                    None => gate_up(rec, w, norm, gate, &x, &activated)?, // [T, F]
                    Some(gates) => {
                        Linear { norm, ..Linear::new(gates) }.record(rec, &x, &activated)?; // [T, F]
                        up_gated(rec, w, norm, gate, &x, &activated)?; // [T, F]
                    }
                }
            }
            (Between::Gate(gate), ..) => {
                let up = up(rec)?;
                self.record_product(rec, flow, &weights.ffn_up, norm, h, &up)?; // [T, 2 F]
                return Ok(Activated::Halves(up, gate));
            }
            (between @ (Between::Relu | Between::SquaredRelu), ..) => {
                let up = up(rec)?;
                self.record_product(rec, flow, &weights.ffn_up, norm, h, &up)?; // [T, F]
                relu(rec, &up, &activated, between == Between::SquaredRelu)?;
            }
            (Between::Gelu(form), Flow::Packed(_), _) => {
                let x = self.normed(rec, norm, h)?;
                weights.ffn_up.record_tiled(
                    rec,
                    &mut Input::new(&x),
                    Some(Activation::Gelu(form)),
                    false,
                    &activated,
                )?;
            }
            (Between::Gelu(form), Flow::Cached(..), _) => {
                let up = up(rec)?;
                self.record_product(rec, flow, &weights.ffn_up, norm, h, &up)?; // [T, F]
                gelu(rec, &up, &activated, form)?;
            }
        }
        Ok(Activated::Rows(activated))
    }

    /// Records the end of a block's half. `x`: `[T, K]`; `h`: `[T, C]`.
    pub(super) fn record_end(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        end: &HalfEnd<'_>,
        x: &mut Input<'_>,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let &HalfEnd { product, place, norms, factor } = end;
        let after = norms.after.as_ref();
        if let Some(after) = after.filter(|_| place.is_on_result()) {
            let result = rec.temporary("result", h.shape())?;
            match flow {
                Flow::Cached(..) => product.record_input(rec, x, &result, false)?,
                Flow::Packed(_) => product.record_tiled(rec, x, None, false, &result)?,
            }
            self.add_normed(rec, after, factor, &result, &h)?;
            return Ok(h);
        }
        match flow {
            Flow::Cached(..) => product.record_input(rec, x, &h, true)?,
            Flow::Packed(_) => {
                let is_layer_norm = matches!(self.config.norm, NormKind::Layer { .. });
                if let (Some(norm), Some(linear), true) = (after, product.as_tiled(), is_layer_norm) {
                    let linear = Linear { accumulate: true, ..linear };
                    if fuses_norm(rec, &linear) {
                        let x = x.rows(rec)?;
                        linear_norm(rec, &linear, &norm.layer(self.eps()), &x, &h)?;
                        return Ok(h);
                    }
                }
                product.record_tiled(rec, x, None, true, &h)?;
            }
        }
        self.normed(rec, after, &h)
    }

    /// Records a product with an optional norm of its input.
    pub(super) fn record_product(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        product: &Stack,
        norm: Option<&NormWeights>,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        match flow {
            Flow::Cached(..) => {
                let (x, norm) = self.before(rec, norm, x)?;
                product.record(rec, norm, &x, y, false)
            }
            Flow::Packed(_) => {
                let x = self.normed(rec, norm, x)?;
                product.record_tiled(rec, &mut Input::new(&x), None, false, y)
            }
        }
    }

    /// `x` with the norm for a product to fold in, or normalised where the product cannot.
    pub(super) fn before<'a>(
        &self,
        rec: &mut Recorder,
        norm: Option<&'a NormWeights>,
        x: &Tensor,
    ) -> Result<(Tensor, Option<Norm<'a>>), Error> {
        match self.config.norm {
            NormKind::Rms => Ok((x.clone(), norm.map(|norm| norm.rms(self.eps())))),
            NormKind::Layer { .. } => Ok((self.normed(rec, norm, x)?, None)),
        }
    }

    /// Records a norm, if there is one, and returns the result.
    pub(super) fn normed(&self, rec: &mut Recorder, norm: Option<&NormWeights>, x: &Tensor) -> Result<Tensor, Error> {
        let Some(_) = norm else { return Ok(x.clone()) };
        let normed = rec.temporary("normed", x.shape())?;
        self.record_norm(rec, norm, x, &normed)?;
        Ok(normed)
    }

    /// Records `y = norm(x)`, or `y = x` without a norm.
    pub(super) fn record_norm(
        &self,
        rec: &mut Recorder,
        norm: Option<&NormWeights>,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        match (norm, self.config.norm) {
            (Some(norm), NormKind::Layer { .. }) => layer_norm(rec, x, &norm.layer(self.eps()), y),
            (Some(norm), NormKind::Rms) => {
                let Norm { weight, eps } = norm.rms(self.eps());
                rms_norm(rec, x, weight, y, eps)
            }
            (None, _) => scale(rec, x, y, 1.0),
        }
    }

    /// Records `h = (h + norm(x)) (* factor)`.
    pub(super) fn add_normed(
        &self,
        rec: &mut Recorder,
        norm: &NormWeights,
        factor: Option<&Tensor>,
        x: &Tensor,
        h: &Tensor,
    ) -> Result<(), Error> {
        match self.config.norm {
            NormKind::Rms => {
                let Norm { weight, eps } = norm.rms(self.eps());
                add_rms_norm(rec, x, weight, factor, h, eps)
            }
            NormKind::Layer { .. } => {
                let normed = self.normed(rec, Some(norm), x)?;
                crate::kernels::add(rec, &normed, h)
            }
        }
    }

    /// Epsilon for the residual stream, which holds values divided by [`ModelConfig::residual_scale`].
    pub(super) fn eps(&self) -> f32 {
        self.config.norm_eps / (self.config.residual_scale * self.config.residual_scale)
    }
}

/// A layer's matrices by head cannot be bound as one.
fn wrong_latent(l: usize) -> Error {
    Error::Unsupported {
        format: "model",
        field: format!("blk.{l}.attn_k_b, attn_v_b"),
        found: "biases, or more bytes than a binding holds".into(),
        supported: "plain matrices within a binding".into(),
    }
}

/// The cache has no matching entry for a layer.
pub(super) fn wrong_cache(l: usize) -> Error {
    Error::Operand {
        kernel: "model",
        operand: "cache",
        expected: format!("a cache of this model, with layer {l}"),
        found: "another model's".into(),
    }
}
