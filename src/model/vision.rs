//! Vision encoders (Dosovitskiy et al. 2021, arXiv:2010.11929): patches of pictures to rows for a text model.
//!
//! ```text
//! patches [T, P] --product--> [T, C] --blocks--> [T, C] --projector--> rows [T / N, D]
//! ```
//! Patches arrive in the order in which a projector joins them, so its input is a view of the blocks' output.

use super::config::{ModelConfig, config_error};
use super::encoder::{BatchSize, BatchTensors};
use super::forward::{Flow, Tap, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource};
use super::weights::{NormWeights, Weights};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{Activation, Input, add};
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// Shape of a vision encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Its blocks: width C, without tokens. Learned positions are added to the patches by the host.
    pub encoder: ModelConfig,
    /// P, elements of a patch.
    pub patch_dim: u32,
    /// Whether learned positions are added to the embedded patches.
    pub has_positions: bool,
    /// Makes rows of the last layer's output.
    pub projector: Projector,
    /// Layers whose output has a projector of its own, in order. The text model adds their rows after its first layers:
    /// `is_deepstack_layers`; `deepstack_visual_indexes`.
    pub deepstack: Vec<u32>,
    /// Whether rows have positions by row and column in the text model: M-RoPE.
    pub has_grid: bool,
    /// D, width of the text model: `projection_dim`; `out_hidden_size`.
    pub row_dim: u32,
}

/// Joins neighbouring patches, side by side, to a row of the text model: one product or two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Projector {
    /// N, patches of a row: the square of `spatial_merge_size`, `scale_factor`, `downsample_factor`.
    pub n_patches: u32,
    /// Whether joined patches are normalised.
    pub normed: bool,
    /// Width between two products, and the activation there.
    pub hidden: Option<(u32, Activation)>,
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
        self.encoder.check_blocks()
    }
}

/// A projector's weights.
#[derive(Clone, Debug)]
struct ProjectorWeights {
    config: Projector,
    /// Norm of the joined patches, `[N C]`.
    norm: Option<NormWeights>,
    /// `[hidden, N C]`, or `[D, N C]`.
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
        let dim = config.n_patches * vision.encoder.dim;
        let stack = |name, rows, cols| Stack::declare(target, source, prefix, &[(name, rows)], cols);
        let joined = ModelConfig { dim, ..vision.encoder.clone() };
        Ok(ProjectorWeights {
            config,
            norm: match config.normed {
                true => Some(NormWeights::declare(source, &format!("{prefix}norm"), &joined)?),
                false => None,
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
    fn record(&self, rec: &mut Recorder, encoder: &Transformer, h: &Tensor, rows: &Tensor) -> Result<(), Error> {
        let n_rows = rows.shape()[0];
        let joined = h.reshape(&[n_rows, self.config.n_patches * encoder.config.dim])?;
        let joined = encoder.normed(rec, self.norm.as_ref(), &joined)?; // [T / N, N C]
        let (Some((hidden_dim, activation)), Some(second)) = (self.config.hidden, &self.second) else {
            return self.first.record_tiled(rec, &mut Input::new(&joined), None, false, rows); // [T / N, D]
        };
        let hidden = rec.temporary("hidden", &[n_rows, hidden_dim])?;
        self.first.record_tiled(rec, &mut Input::new(&joined), Some(activation), false, &hidden)?;
        second.record_tiled(rec, &mut Input::new(&hidden), None, false, rows) // [T / N, D]
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
        let names = ["patch_embd", "patch_embd.1"].into_iter().enumerate();
        let names = names.filter(|(i, name)| *i == 0 || source.describe(&format!("{name}.weight")).is_some());
        let embed = |(_, name)| Stack::declare(target, source, "", &[(name, config.encoder.dim)], config.patch_dim);
        let patch_embd = names.map(embed).collect::<Result<_, _>>()?;
        let weights = Weights::declare_blocks(target, &config.encoder, source)?;
        let projector = ProjectorWeights::declare(target, &config, source, ("mm.", config.projector))?;
        let of_layer = |layer: &u32| {
            let further = Projector { normed: true, ..config.projector };
            ProjectorWeights::declare(target, &config, source, (format!("deepstack.{layer}.").as_str(), further))
        };
        let deepstack = config.deepstack.iter().map(of_layer).collect::<Result<_, _>>()?;
        let encoder = Transformer::declare(config.encoder.clone(), weights, max_patches)?;
        Ok(VisionTransformer { config, patch_embd, encoder, projector, deepstack })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let projectors = self.deepstack.iter().chain([&self.projector]);
        self.patch_embd.iter().chain(projectors.flat_map(ProjectorWeights::stacks))
    }

    fn norms(&self) -> impl Iterator<Item = &Tensor> {
        let projectors = self.deepstack.iter().chain([&self.projector]);
        projectors.filter_map(|projector| projector.norm.as_ref()).flat_map(NormWeights::tensors)
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let values = |tensor: &Tensor| TensorSlot::Values { tensor: tensor.clone(), places: RowPlaces::from(0) };
        let norms = self.norms().map(move |tensor| (tensor.label(), values(tensor)));
        self.encoder.weights.tensor_slots().chain(norms).chain(self.stacks().flat_map(Stack::tensor_slots))
    }

    /// All tensors that stay on the device.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.encoder.tensors().chain(self.norms()).chain(self.stacks().flat_map(Stack::tensors))
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
        let rows = || tensor("rows", &[n_patches / projector.n_patches, *row_dim]);
        Ok(PatchTensors {
            batch: BatchTensors::declare(target, encoder, size, n_patches)?,
            patches: tensor("patches", &[n_patches, *patch_dim])?,
            positions: match self.config.has_positions {
                true => Some(tensor("positions", &[n_patches, encoder.dim])?),
                false => None,
            },
            rows: (0..=self.deepstack.len()).map(|_| rows()).collect::<Result<_, _>>()?,
        })
    }

    /// Records a pass. `tap` receives the embedded patches and the output of each layer, `[T, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record(&self, rec: &mut Recorder, io: &PatchTensors, tap: Tap<'_>) -> Result<(), Error> {
        let PatchTensors { batch, patches, positions, rows } = io;
        let h = rec.temporary("h", &[patches.shape()[0], self.config.encoder.dim])?;
        for (i, stack) in self.patch_embd.iter().enumerate() {
            stack.record_tiled(rec, &mut Input::new(patches), None, i > 0, &h)?; // [T, C]
        }
        if let Some(positions) = positions {
            add(rec, positions, &h)?;
        }
        let mut n_layers = 0;
        let mut on_layer = |rec: &mut Recorder, h: &Tensor| {
            let layer: Option<u32> = u32::checked_sub(n_layers, 1);
            n_layers += 1;
            let at = self.config.deepstack.iter().position(|&deep| Some(deep) == layer);
            if let Some((projector, rows)) = at.and_then(|i| Some((self.deepstack.get(i)?, rows.get(1 + i)?))) {
                projector.record(rec, &self.encoder, h, rows)?;
            }
            tap(rec, h)
        };
        let h = self.encoder.record_blocks(rec, Flow::Packed(batch), None, h, &mut on_layer)?; // [T, C]
        let h = self.encoder.normed(rec, self.encoder.weights.output_norm.as_ref(), &h)?; // [T, C]
        match rows.first() {
            Some(rows) => self.projector.record(rec, &self.encoder, &h, rows),
            None => Ok(()),
        }
    }
}
