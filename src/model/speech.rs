//! Encoders of speech (Radford et al. 2022, arXiv:2212.04356): a spectrogram to rows that a decoder attends to.
//!
//! ```text
//! spectrogram [2 S, B] --convolution--> [2 S, C] --convolution, every second row--> [S, C] + positions --blocks--> [S, C]
//! ```
//! A convolution is a product: the rows that it covers lie side by side.

use super::config::{MAX_DIM, ModelConfig, config_error};
use super::encoder::{BatchSize, BatchTensors};
use super::forward::{Flow, Tap, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource, table};
use super::weights::Weights;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{Activation, Gelu, Input, Pooling, add, pool};
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor, TensorWriter};

/// Rows that each convolution covers.
const TAPS: u32 = 3;
/// Rows from one output to the next, of each convolution.
const STRIDES: [u32; 2] = [1, 2];

/// Shape of a speech model.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechConfig {
    /// B, bands of the spectrogram: `num_mel_bins`.
    pub n_bands: u32,
    /// S, rows of the encoder, half as many as frames of the spectrogram: `max_source_positions`.
    pub n_rows: u32,
    /// The encoder's blocks, of width C.
    pub encoder: ModelConfig,
    /// The decoder, whose layers attend to the encoder's rows.
    pub decoder: ModelConfig,
}

impl SpeechConfig {
    /// Frames of the spectrogram.
    pub fn n_frames(&self) -> u32 {
        2 * self.n_rows
    }

    /// The expected layers and heads of the decoder, and the first of `heads`, given as layers and heads, beyond them.
    pub(crate) fn missing_head(&self, heads: &[[u32; 2]]) -> Option<(String, [u32; 2])> {
        let blocks = &self.decoder.blocks;
        let n_heads = |layer: u32| blocks.get(layer as usize).map_or(0, |block| block.attention.n_heads);
        let found = heads.iter().find(|&&[layer, head]| head >= n_heads(layer))?;
        Some((format!("layers below {} and heads below {}", blocks.len(), n_heads(0)), *found))
    }

    /// Refuses values beyond any model or the kernels' limits, before anything is sized by them.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<(), Error> {
        for (field, size, max) in [
            ("num_mel_bins", self.n_bands, 1 << 10),
            ("max_source_positions", self.n_rows, 1 << 14),
            ("d_model", self.encoder.dim, MAX_DIM),
        ] {
            if !(1..=max).contains(&size) {
                return Err(config_error(field, format!("1 to {max}"), size));
            }
        }
        if self.encoder.dim != self.decoder.dim {
            return Err(config_error("d_model", format!("the encoder's width {}", self.encoder.dim), self.decoder.dim));
        }
        self.encoder.check_blocks()?;
        self.decoder.check()
    }
}

/// Tensors that a pass over a spectrogram shares with the host.
#[derive(Clone, Debug)]
pub struct SoundTensors {
    /// The batch, of one sequence.
    pub batch: BatchTensors,
    /// The spectrogram, `[2 S, B]`.
    pub frames: Tensor,
    /// Rows that each convolution's outputs cover, `[3 T, 2]`: first and end.
    covered: [Tensor; 2],
    /// The encoder's rows, `[S, C]`.
    pub rows: Tensor,
}

impl SoundTensors {
    /// Writes what is the same for each spectrogram.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set_rows(&self, device: &dyn TensorWriter) -> Result<(), Error> {
        let [n_frames, n_rows] = [&self.frames, &self.rows].map(|tensor| tensor.shape()[0]);
        let numbers: Vec<u32> = (0..n_rows).flat_map(|row| [0, row, 0]).collect();
        device.write_words(&self.batch.tokens, 0, &numbers)?;
        self.batch.set_lengths(device, &[[n_rows; 2]])?;
        for (covered, stride) in self.covered.iter().zip(STRIDES) {
            device.write_words(covered, 0, &covered_rows(n_frames, stride))?;
        }
        Ok(())
    }
}

/// First and end of each row that an output covers, from the one before its middle on; empty beyond the ends.
fn covered_rows(n_rows: u32, stride: u32) -> Vec<u32> {
    let middles = (0..n_rows).step_by(stride as usize);
    let rows = middles.flat_map(|middle| (0..TAPS).map(move |tap| (middle + tap).checked_sub(1)));
    rows.flat_map(|row| row.filter(|&row| row < n_rows).map_or([0, 0], |row| [row, row + 1])).collect()
}

/// An encoder of speech on a device.
#[derive(Clone, Debug)]
pub struct SpeechEncoder {
    convolutions: [Stack; 2],
    /// `[S, C]`.
    positions: Tensor,
    encoder: Transformer,
    n_bands: u32,
    n_rows: u32,
}

impl SpeechEncoder {
    /// Declares an encoder.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub fn declare(target: &Target, config: &SpeechConfig, source: &dyn WeightSource) -> Result<SpeechEncoder, Error> {
        let &SpeechConfig { n_bands, n_rows, .. } = config;
        let dim = config.encoder.dim;
        let convolution =
            |name, channels: u32| Stack::declare(target, source, "", &[(name, dim)], TAPS.saturating_mul(channels));
        let weights = Weights::declare_blocks(target, &config.encoder, source)?;
        Ok(SpeechEncoder {
            convolutions: [convolution("conv.1", n_bands)?, convolution("conv.2", dim)?],
            positions: table(source, "position_embd.weight", &[n_rows, dim])?,
            encoder: Transformer::declare(config.encoder.clone(), weights, n_rows)?,
            n_bands,
            n_rows,
        })
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let positions = TensorSlot::Values { tensor: self.positions.clone(), places: RowPlaces::from(0) };
        let convolutions = self.convolutions.iter().flat_map(Stack::tensor_slots);
        self.encoder.weights.tensor_slots().chain(convolutions).chain([(self.positions.label(), positions)])
    }

    /// All tensors that stay on the device.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.encoder.tensors().chain(self.convolutions.iter().flat_map(Stack::tensors)).chain([&self.positions])
    }

    /// Declares the tensors of passes.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if they are too large.
    pub fn declare_sound(&self, target: &Target) -> Result<SoundTensors, Error> {
        let size = BatchSize { n_tokens: self.n_rows, n_sequences: 1 };
        let tensor = |label, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        let n_frames = 2 * self.n_rows;
        let covered = |stride| tensor("covered", &[TAPS * n_frames / stride, 2], DType::U32);
        let [first, second] = STRIDES;
        Ok(SoundTensors {
            batch: BatchTensors::declare(target, &self.encoder.config, size, self.n_rows)?,
            frames: tensor("frames", &[n_frames, self.n_bands], DType::F32)?,
            covered: [covered(first)?, covered(second)?],
            rows: tensor("rows", &[self.n_rows, self.encoder.config.dim], DType::F32)?,
        })
    }

    /// Records a pass. `tap` receives the rows before the first layer and the output of each, `[S, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record(&self, rec: &mut Recorder, io: &SoundTensors, tap: Tap<'_>) -> Result<(), Error> {
        let mut h = io.frames.clone();
        for (convolution, covered) in self.convolutions.iter().zip(&io.covered) {
            let (n_covered, channels) = (covered.shape()[0], h.shape()[1]);
            let beside = rec.temporary("beside", &[n_covered, channels])?;
            pool(rec, Pooling::Cls, false, covered, &h, &beside)?; // [3 T, C]
            let beside = beside.reshape(&[n_covered / TAPS, TAPS * channels])?;
            let y = rec.temporary("h", &[n_covered / TAPS, self.encoder.config.dim])?;
            let gelu = Some(Activation::Gelu(Gelu::Exact));
            convolution.record_tiled(rec, &mut Input::new(&beside), gelu, false, &y)?; // [T, C]
            h = y;
        }
        add(rec, &self.positions, &h)?;
        let h = self.encoder.record_blocks(rec, Flow::Packed(&io.batch), None, h, tap)?; // [S, C]
        self.encoder.record_norm(rec, self.encoder.weights.output_norm.as_ref(), &h, &io.rows) // [S, C]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convolutions_cover_the_rows_around_their_middle() {
        assert_eq!(covered_rows(3, 1), [0, 0, 0, 1, 1, 2, 0, 1, 1, 2, 2, 3, 1, 2, 2, 3, 0, 0]);
        assert_eq!(covered_rows(4, 2), [0, 0, 0, 1, 1, 2, 1, 2, 2, 3, 3, 4]);
    }
}
