//! Vision encoders (Dosovitskiy et al. 2021, arXiv:2010.11929): patches of pictures to rows for a text model.
//!
//! ```text
//! patches [T, P] --product--> [T, C] --blocks--> [T, C] --projector--> rows [T / N, D]
//! ```
//! Patches arrive in the order in which a projector joins them, so its input is a view of the blocks' output, or the
//! mean of neighbouring rows. Without blocks, patches go through norms straight to the projector: Gemma 4 "unified".
//! Its sounds go there in frames of samples, without the first product.

use super::block::RowAttention;
use super::config::{ModelConfig, NormKind, config_error};
use super::encoder::{BatchSize, BatchTensors};
use super::forward::{Flow, Tap, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource};
use super::weights::{NormWeights, Weights};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{Activation, Gates, Input, Pooling, add, layer_norm, multiply, pool, rms_norm, scale};
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// Shape of an encoder of pictures or sounds.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Its blocks: width C, without tokens. Learned positions are added to the patches by the host.
    pub encoder: ModelConfig,
    /// P, elements of a patch.
    pub patch_dim: u32,
    /// Whether a product makes columns of patches; without one, C is P.
    pub has_embedding: bool,
    /// Whether patches are normalised before and after their product.
    pub patch_norms: [bool; 2],
    /// Whether learned positions are added to the embedded patches.
    pub has_positions: bool,
    /// Makes rows of the last layer's output.
    pub projector: Projector,
    /// Layers whose output has a projector of its own, in order. The text model adds their rows after its first layers:
    /// `is_deepstack_layers`; `deepstack_visual_indexes`.
    pub deepstack: Vec<u32>,
    /// Whether rows have positions by row and column in the text model: M-RoPE.
    pub has_grid: bool,
    /// Which rows of an image see each other in the text model.
    pub attention: RowAttention,
    /// D, width of the text model: `projection_dim`; `out_hidden_size`.
    pub row_dim: u32,
}

/// Joins neighbouring patches to a row of the text model: one product or two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Projector {
    /// N, patches of a row: the square of `spatial_merge_size`, `scale_factor`, `downsample_factor`,
    /// `pooling_kernel_size`.
    pub n_patches: u32,
    /// How they are joined.
    pub join: Join,
    /// Norm of joined patches.
    pub norm: RowNorm,
    /// Width between two products, and the activation there.
    pub hidden: Option<(u32, Activation)>,
}

/// How patches become a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Join {
    /// Side by side.
    Concatenated,
    /// By their mean.
    Averaged {
        /// Factor of the mean.
        factor: f32,
        /// Whether the scaled mean is standardised: a deviation and a bias for each column.
        standardised: bool,
    },
}

/// Norm of joined patches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowNorm {
    /// None.
    None,
    /// As in the blocks.
    OfBlocks,
    /// Layer norm of each patch, before they are joined.
    OfPatches {
        /// Epsilon.
        eps: f32,
    },
    /// RMS norm.
    Rms {
        /// Epsilon.
        eps: f32,
        /// Whether it has weights.
        weighted: bool,
    },
}

impl VisionConfig {
    /// Refuses values beyond any model or the kernels' limits, before anything is sized by them.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<(), Error> {
        /// Far above every published model.
        const MAX_DIM: u32 = 1 << 16;
        let Projector { n_patches, hidden, .. } = self.projector;
        for (field, size, max) in [
            ("embedding_length (hidden_size)", self.encoder.dim, MAX_DIM),
            ("patch_size", self.patch_dim, MAX_DIM),
            ("spatial_merge_size", n_patches, 1 << 10),
            ("projection_dim (out_hidden_size)", self.row_dim, MAX_DIM),
            ("mm.0.weight", hidden.map_or(1, |(dim, _)| dim), 1 << 20),
        ] {
            if !(1..=max).contains(&size) {
                return Err(config_error(field, format!("1 to {max}"), size));
            }
        }
        let n_layers = self.encoder.n_layers();
        if let Some(layer) = self.deepstack.iter().find(|&&layer| layer >= n_layers) {
            return Err(config_error("deepstack_visual_indexes", format!("below {n_layers}"), layer));
        }
        if n_layers == 0 { Ok(()) } else { self.encoder.check_blocks() }
    }
}

/// A projector's weights.
#[derive(Clone, Debug)]
struct ProjectorWeights {
    config: Projector,
    /// Norm of the joined patches, `[K]`.
    norm: Option<NormWeights>,
    /// Ones in place of weights, `[K]`.
    ones: Option<Tensor>,
    /// `[hidden, K]`, or `[D, K]`, where K is N C or C.
    first: Stack,
    /// `[D, hidden]`.
    second: Option<Stack>,
}

impl ProjectorWeights {
    fn declare(
        target: &Target,
        vision: &VisionConfig,
        source: &dyn WeightSource,
        (prefix, config): (&str, Projector),
    ) -> Result<ProjectorWeights, Error> {
        let dim = config.row_dim(vision.encoder.dim);
        let stack = |name, rows, cols| Stack::declare(target, source, prefix, &[(name, rows)], cols);
        let norm = |dim: u32, kind: NormKind| {
            let joined = ModelConfig { dim, norm: kind, ..vision.encoder.clone() };
            NormWeights::declare(source, &format!("{prefix}norm"), &joined).map(Some)
        };
        Ok(ProjectorWeights {
            config,
            norm: match config.norm {
                RowNorm::OfBlocks => norm(dim, vision.encoder.norm)?,
                RowNorm::OfPatches { .. } => norm(vision.encoder.dim, NormKind::Layer { bias: true })?,
                RowNorm::Rms { weighted: true, .. } => norm(dim, NormKind::Rms)?,
                RowNorm::None | RowNorm::Rms { weighted: false, .. } => None,
            },
            ones: match config.norm {
                RowNorm::Rms { weighted: false, .. } => {
                    Some(Tensor::declare("ones", Role::Weights, &[dim], DType::F32)?)
                }
                _ => None,
            },
            first: stack("0", config.hidden.map_or(vision.row_dim, |(hidden_dim, _)| hidden_dim), dim)?,
            second: match config.hidden {
                Some((hidden_dim, _)) => Some(stack("2", vision.row_dim, hidden_dim)?),
                None => None,
            },
        })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        [&self.first].into_iter().chain(&self.second)
    }

    /// Records the rows of `h`, `[T, C]`: `[T / N, D]`.
    fn record(
        &self,
        rec: &mut Recorder,
        encoder: &Transformer,
        (io, h): (&PatchTensors, &Tensor),
        rows: &Tensor,
    ) -> Result<(), Error> {
        let n_rows = rows.shape()[0];
        let mut h = h.clone();
        if let (RowNorm::OfPatches { eps }, Some(norm)) = (self.config.norm, &self.norm) {
            let normed = rec.temporary("normed", h.shape())?;
            layer_norm(rec, &h, &norm.layer(eps), &normed)?; // [T, C]
            h = normed;
        }
        let joined = match (self.config.join, &io.means) {
            (Join::Averaged { factor, .. }, Some(means)) => means.record(rec, factor, &h)?, // [T / N, C]
            _ => h.reshape(&[n_rows, self.config.row_dim(encoder.config.dim)])?,            // [T / N, K]
        };
        let weight = self.norm.as_ref().and_then(|norm| norm.tensors().next()).or(self.ones.as_ref());
        let joined = match (self.config.norm, weight) {
            (RowNorm::Rms { eps, .. }, Some(weight)) => {
                let normed = rec.temporary("normed", joined.shape())?;
                rms_norm(rec, &joined, weight, &normed, eps)?;
                normed
            }
            (RowNorm::OfBlocks, _) => encoder.normed(rec, self.norm.as_ref(), &joined)?, // [T / N, K]
            _ => joined,
        };
        let (Some((hidden_dim, activation)), Some(second)) = (self.config.hidden, &self.second) else {
            return self.first.record_tiled(rec, &mut Input::new(&joined), None, false, rows); // [T / N, D]
        };
        let hidden = rec.temporary("hidden", &[n_rows, hidden_dim])?;
        self.first.record_tiled(rec, &mut Input::new(&joined), Some(activation), false, &hidden)?;
        second.record_tiled(rec, &mut Input::new(&hidden), None, false, rows) // [T / N, D]
    }
}

impl Projector {
    /// K, width of joined patches of this width.
    fn row_dim(&self, dim: u32) -> u32 {
        match self.join {
            Join::Concatenated => self.n_patches * dim,
            Join::Averaged { .. } => dim,
        }
    }
}

/// What the host writes for means of patches.
#[derive(Clone, Debug)]
pub struct MeanTensors {
    /// First patch of each row, and the one after its last, `[T / N, 2]`.
    pub spans: Tensor,
    /// Negated biases of the means, and inverse deviations, the same for each row, `[T / N, C]`.
    pub standard: Option<[Tensor; 2]>,
}

impl MeanTensors {
    /// Records `(factor * mean - bias) / deviation` of each row's patches, `[T / N, C]`.
    fn record(&self, rec: &mut Recorder, factor: f32, h: &Tensor) -> Result<Tensor, Error> {
        let shape = [self.spans.shape()[0], h.shape()[1]];
        let mut means = rec.temporary("means", &shape)?;
        pool(rec, Pooling::Mean, false, &self.spans, h, &means)?;
        if factor != 1.0 {
            let scaled = rec.temporary("scaled", &shape)?;
            scale(rec, &means, &scaled, factor)?;
            means = scaled;
        }
        if let Some([bias, inverse]) = &self.standard {
            add(rec, bias, &means)?;
            multiply(rec, Gates { columns: inverse, start: 0, size: 1 }, &means)?;
        }
        Ok(means)
    }
}

/// Tensors that a pass over a picture shares with the host.
#[derive(Clone, Debug)]
pub struct PatchTensors {
    /// The batch, of one sequence; a patch's position is its number.
    pub batch: BatchTensors,
    /// `[T, P]`.
    pub patches: Tensor,
    /// Learned positions of the patches, `[T, C]`, if the encoder has any.
    pub positions: Option<Tensor>,
    /// For means of patches, if the projector takes any.
    pub means: Option<MeanTensors>,
    /// Rows for the text model, `[T / N, D]`: those of the last layer, then those of each deepstack layer.
    pub rows: Vec<Tensor>,
}

/// A vision encoder on a device.
#[derive(Clone, Debug)]
pub struct VisionTransformer {
    /// Shape.
    pub config: VisionConfig,
    /// `[C, P]`, and a further matrix for the same patches, where a file has one for each of two frames.
    patch_embd: Vec<Stack>,
    /// Norms of patches, `[P]`, and of embedded patches, `[C]`.
    patch_norms: [Option<NormWeights>; 2],
    encoder: Transformer,
    projector: ProjectorWeights,
    deepstack: Vec<ProjectorWeights>,
}

impl VisionTransformer {
    /// Declares an encoder for pictures of up to `max_patches` patches.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub fn declare(
        target: &Target,
        config: VisionConfig,
        source: &dyn WeightSource,
        max_patches: u32,
    ) -> Result<VisionTransformer, Error> {
        let names = ["patch_embd", "patch_embd.1"].into_iter().enumerate().filter(|_| config.has_embedding);
        let names = names.filter(|(i, name)| *i == 0 || source.describe(&format!("{name}.weight")).is_some());
        let embed = |(_, name)| Stack::declare(target, source, "", &[(name, config.encoder.dim)], config.patch_dim);
        let patch_embd = names.map(embed).collect::<Result<_, _>>()?;
        let norm = |name: &str, dim, is_there| match is_there {
            true => NormWeights::declare(source, name, &ModelConfig { dim, ..config.encoder.clone() }).map(Some),
            false => Ok(None),
        };
        let [before, after] = config.patch_norms;
        let patch_norms =
            [norm("patch_norm.1", config.patch_dim, before)?, norm("patch_norm.2", config.encoder.dim, after)?];
        let weights = Weights::declare_blocks(target, &config.encoder, source)?;
        let projector = ProjectorWeights::declare(target, &config, source, ("mm.", config.projector))?;
        let of_layer = |layer: &u32| {
            let further = Projector { norm: RowNorm::OfBlocks, ..config.projector };
            ProjectorWeights::declare(target, &config, source, (format!("deepstack.{layer}.").as_str(), further))
        };
        let deepstack = config.deepstack.iter().map(of_layer).collect::<Result<_, _>>()?;
        let encoder = Transformer::declare(config.encoder.clone(), weights, max_patches)?;
        Ok(VisionTransformer { config, patch_embd, patch_norms, encoder, projector, deepstack })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let projectors = self.deepstack.iter().chain([&self.projector]);
        self.patch_embd.iter().chain(projectors.flat_map(ProjectorWeights::stacks))
    }

    fn norms(&self) -> impl Iterator<Item = &Tensor> {
        let projectors = self.deepstack.iter().chain([&self.projector]);
        let of_rows = projectors.filter_map(|projector| projector.norm.as_ref());
        of_rows.chain(self.patch_norms.iter().flatten()).flat_map(NormWeights::tensors)
    }

    /// Tensors of ones, which no file has.
    pub(crate) fn ones(&self) -> impl Iterator<Item = &Tensor> {
        self.deepstack.iter().chain([&self.projector]).filter_map(|projector| projector.ones.as_ref())
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let values = |tensor: &Tensor| TensorSlot::Values { tensor: tensor.clone(), places: RowPlaces::from(0) };
        let norms = self.norms().map(move |tensor| (tensor.label(), values(tensor)));
        self.encoder.weights.tensor_slots().chain(norms).chain(self.stacks().flat_map(Stack::tensor_slots))
    }

    /// All tensors that stay on the device.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let stacks = self.stacks().flat_map(Stack::tensors);
        self.encoder.tensors().chain(self.norms()).chain(self.ones()).chain(stacks)
    }

    /// The table of a patch's rotation by its number, `[patches, rot_dims / 2, 2]`, if patches are rotated. The host
    /// writes it for each picture.
    pub fn angles(&self) -> Option<&Tensor> {
        self.encoder.rope_table(0)
    }

    /// Declares the tensors of passes over the `n_patches` patches of one picture.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if they are too large.
    pub fn declare_patches(&self, target: &Target, n_patches: u32) -> Result<PatchTensors, Error> {
        let VisionConfig { encoder, patch_dim, projector, row_dim, .. } = &self.config;
        let size = BatchSize { n_tokens: n_patches, n_sequences: 1 };
        let tensor = |label, shape: &[u32]| Tensor::declare(label, Role::Activations, shape, DType::F32);
        let n_rows = n_patches / projector.n_patches;
        let rows = || tensor("rows", &[n_rows, *row_dim]);
        let means = |standardised| {
            let column = |label| tensor(label, &[n_rows, encoder.dim]);
            Ok::<_, Error>(MeanTensors {
                spans: Tensor::declare("spans", Role::Activations, &[n_rows, 2], DType::U32)?,
                standard: match standardised {
                    true => Some([column("bias")?, column("inverse")?]),
                    false => None,
                },
            })
        };
        Ok(PatchTensors {
            batch: BatchTensors::declare(target, encoder, size, n_patches)?,
            patches: tensor("patches", &[n_patches, *patch_dim])?,
            positions: match self.config.has_positions {
                true => Some(tensor("positions", &[n_patches, encoder.dim])?),
                false => None,
            },
            means: match projector.join {
                Join::Averaged { standardised, .. } => Some(means(standardised)?),
                Join::Concatenated => None,
            },
            rows: (0..=self.deepstack.len()).map(|_| rows()).collect::<Result<_, _>>()?,
        })
    }

    /// Records a pass. `tap` receives the embedded patches and the output of each layer, `[T, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record(&self, rec: &mut Recorder, io: &PatchTensors, tap: Tap<'_>) -> Result<(), Error> {
        let PatchTensors { batch, patches, positions, rows, .. } = io;
        let [before, after] = self.patch_norms.each_ref().map(Option::as_ref);
        let patches = self.encoder.normed(rec, before, patches)?; // [T, P]
        let h = match self.patch_embd.is_empty() {
            true => patches.clone(),
            false => rec.temporary("h", &[patches.shape()[0], self.config.encoder.dim])?,
        };
        for (i, stack) in self.patch_embd.iter().enumerate() {
            stack.record_tiled(rec, &mut Input::new(&patches), None, i > 0, &h)?; // [T, C]
        }
        let h = self.encoder.normed(rec, after, &h)?; // [T, C]
        if let Some(positions) = positions {
            add(rec, positions, &h)?;
        }
        let mut n_layers = 0;
        let mut on_layer = |rec: &mut Recorder, h: &Tensor| {
            let layer: Option<u32> = u32::checked_sub(n_layers, 1);
            n_layers += 1;
            let at = self.config.deepstack.iter().position(|&deep| Some(deep) == layer);
            if let Some((projector, rows)) = at.and_then(|i| Some((self.deepstack.get(i)?, rows.get(1 + i)?))) {
                projector.record(rec, &self.encoder, (io, h), rows)?;
            }
            tap(rec, h)
        };
        let h = self.encoder.record_blocks(rec, Flow::Packed(batch), None, h, &mut on_layer)?; // [T, C]
        let h = self.encoder.normed(rec, self.encoder.weights.output_norm.as_ref(), &h)?; // [T, C]
        match rows.first() {
            Some(rows) => self.projector.record(rec, &self.encoder, (io, &h), rows),
            None => Ok(()),
        }
    }
}
