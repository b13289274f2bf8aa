//! Passes over patches of a picture, or frames of a sound: recorded once for each number of them, run one at a time.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use super::ImageRows;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::scale;
use crate::load::{FileBytes, Learned, PatchPlaces, TensorIndex, WeightUploader};
use crate::model::{MeanTensors, PatchTensors, VisionConfig, VisionTransformer};
use crate::picture::Patches;
use crate::picture::positions::{add_axes, grid_neighbours, interpolate};
use crate::picture::rope::grid_angles;
use crate::platform::IS_BROWSER;
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::{record_tested, self_test};

/// Recorded passes to cache, by number of patches.
const KEPT_PASSES: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// A vision encoder on a device: patches to rows.
pub(crate) struct PatchEncoder {
    device: Device,
    transformer: VisionTransformer,
    host: HostValues,
    max_patches: u32,
    state: Mutex<PassState>,
}

/// Values that the host adds to patches.
pub(crate) struct HostValues {
    /// Patches on a side of a block that becomes a row.
    pub merge: u32,
    pub places: PatchPlaces,
    /// Learned positions, `[N, C]`; empty without.
    pub positions: Vec<f32>,
    /// Biases of means of patches, and their inverse deviations, `[C]`; empty unless means are standardised.
    pub standard: [Vec<f32>; 2],
}

struct PassState {
    passes: LruCache<u32, Arc<RecordedPatches>>,
    /// Passes run one at a time, so they share memory for temporaries.
    workspace: Workspace,
    /// The weights that are not on the device yet.
    weights: Option<(WeightUploader, Vec<FileBytes>)>,
}

struct RecordedPatches {
    io: PatchTensors,
    recording: Recording,
}

impl PatchEncoder {
    /// The encoder of up to `max_patches` patches without its weights.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape.
    pub fn declare(
        device: &Device,
        (config, tensor_index): (VisionConfig, &TensorIndex),
        host: HostValues,
        max_patches: u32,
    ) -> Result<(PatchEncoder, WeightUploader), Error> {
        // Encoders round nothing.
        let device = device.exact();
        let transformer = VisionTransformer::declare(&device.target(), config, tensor_index, max_patches)?;
        let uploader = WeightUploader::of_all(tensor_index, transformer.tensor_slots())?;
        let passes = LruCache::new(KEPT_PASSES);
        let state = Mutex::new(PassState { passes, workspace: Workspace::default(), weights: None });
        Ok((PatchEncoder { device, transformer, host, max_patches, state }, uploader))
    }

    /// Keeps these files until the first pass, which uploads their weights.
    pub fn upload_later(&self, uploader: WeightUploader, files: Vec<FileBytes>) {
        self.state().weights = Some((uploader, files));
    }

    /// The encoder's shape.
    pub fn config(&self) -> &VisionConfig {
        &self.transformer.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Patches of a pass at most.
    pub fn max_patches(&self) -> u32 {
        self.max_patches
    }

    /// Memory of the weights and a pass over this many patches. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Operand`] or [`Error::Shape`] if the pass exceeds the device's limits.
    pub fn plan(&self, n_patches: u32) -> Result<MemoryPlan, Error> {
        let pass = self.record(n_patches, &mut Workspace::default())?;
        Ok(MemoryPlan::of([&pass.recording], self.transformer.tensors()))
    }

    /// Number of dispatches of a pass over this many patches.
    ///
    /// # Errors
    /// As [`PatchEncoder::plan`].
    pub fn n_dispatches(&self, n_patches: u32) -> Result<usize, Error> {
        Ok(self.record(n_patches, &mut Workspace::default())?.recording.n_dispatches())
    }

    /// The embedded patches and the output of each layer, `[n, C]` each, for inspection and tests.
    ///
    /// # Errors
    /// As [`PatchEncoder::encode`].
    pub async fn trace(&self, patches: &Patches) -> Result<Vec<Vec<f32>>, Error> {
        self.check(patches)?;
        self.upload_weights()?;
        let io = self.transformer.declare_patches(&self.device.target(), patches.places.len() as u32)?;
        let record = || {
            let mut layers = Vec::new();
            let mut tap = |rec: &mut Recorder, h: &Tensor| {
                let kept = Tensor::declare("hidden", Role::Activations, h.shape(), DType::F32)?;
                scale(rec, h, &kept, 1.0)?;
                layers.push(kept);
                Ok(())
            };
            let mut rec = Recorder::new(self.device.target());
            self.transformer.record(&mut rec, &io, &mut tap)?;
            Ok((rec.finish(&mut Workspace::default()), layers))
        };
        let (recording, layers) = record_tested(&self.device, record, |(recording, _)| recording).await?;
        {
            // Passes share the table of rotations.
            let _state = self.state();
            self.upload(&io, patches)?;
            self.device.run(&recording)?;
        }
        let mut values = Vec::new();
        for tensor in &layers {
            values.push(self.device.read(tensor).await?);
        }
        Ok(values)
    }

    /// The rows of a tile's patches.
    ///
    /// # Errors
    /// [`Error::Shape`] for patches of another size, [`Error::Operand`] for too many or for missing values; errors of
    /// the device.
    pub async fn encode(&self, patches: &Patches) -> Result<ImageRows, Error> {
        let n = patches.places.len() as u32;
        self.check(patches)?;
        self.upload_weights()?;
        let pass = self.tested(n).await?;
        let reads = {
            // Held until the reads are submitted, so that another picture's pass overwrites neither patches nor rows.
            let _state = self.state();
            self.upload(&pass.io, patches)?;
            self.device.run(&pass.recording)?;
            let reads = pass.io.rows.iter().map(|rows| self.device.start_read(rows));
            reads.collect::<Result<Vec<_>, Error>>()?
        };
        let mut rows = Vec::new();
        for (tensor, read) in pass.io.rows.iter().zip(reads) {
            let mut values: Vec<f32> = bytemuck::cast_vec(read.await?);
            values.truncate(tensor.len());
            if let Some(found) = values.iter().find(|value| !value.is_finite()) {
                let (expected, found) = ("finite numbers".into(), found.to_string());
                return Err(Error::Operand { kernel: "vision", operand: "rows", expected, found });
            }
            rows.push(values);
        }
        let VisionConfig { row_dim, attention, has_grid, .. } = *self.config();
        let grid = has_grid.then(|| patches.grid.map(|n| n / self.host.merge));
        ImageRows::new((row_dim, attention), rows, grid)
    }

    fn state(&self) -> MutexGuard<'_, PassState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, patches: &Patches) -> Result<(), Error> {
        let (n, patch_dim) = (patches.places.len(), self.transformer.config.patch_dim);
        let n_values = n as u64 * u64::from(patch_dim);
        let refused = |operand, expected: String, found: usize| {
            Err(Error::Operand { kernel: "vision", operand, expected, found: found.to_string() })
        };
        if n > self.max_patches as usize {
            return refused("patches", format!("at most {}", self.max_patches), n);
        }
        if patches.patch_dim != patch_dim {
            let [expected, found] = [patch_dim, patches.patch_dim].map(|dim| vec![n as u32, dim]);
            return Err(Error::Shape { kernel: "vision", operand: "patches", expected, found });
        }
        match patches.values.len() as u64 == n_values {
            true => Ok(()),
            false => refused("values", format!("{n_values} numbers"), patches.values.len()),
        }
    }

    /// Uploads the weights, once. In a browser a loader has.
    fn upload_weights(&self) -> Result<(), Error> {
        if IS_BROWSER {
            return Ok(());
        }
        let mut state = self.state();
        if let Some((uploader, files)) = &state.weights {
            uploader.clone().take_all(&self.device, files, None)?;
            state.weights = None;
        }
        Ok(())
    }

    /// The pass of a picture, after its self-test.
    async fn tested(&self, n_patches: u32) -> Result<Arc<RecordedPatches>, Error> {
        loop {
            let pass = self.pass(&mut self.state(), n_patches)?;
            if self_test(&self.device, &pass.recording).await? {
                return Ok(pass);
            }
            self.state().passes.pop(&n_patches);
        }
    }

    fn pass(&self, state: &mut PassState, n_patches: u32) -> Result<Arc<RecordedPatches>, Error> {
        if let Some(pass) = state.passes.get(&n_patches) {
            return Ok(pass.clone());
        }
        let pass = Arc::new(self.record(n_patches, &mut state.workspace)?);
        state.passes.put(n_patches, pass.clone());
        Ok(pass)
    }

    fn record(&self, n_patches: u32, workspace: &mut Workspace) -> Result<RecordedPatches, Error> {
        let target = self.device.target();
        let io = self.transformer.declare_patches(&target, n_patches)?;
        let mut rec = Recorder::new(target);
        self.transformer.record(&mut rec, &io, &mut |_, _| Ok(()))?;
        Ok(RecordedPatches { io, recording: rec.finish(workspace) })
    }

    /// Uploads patches, with their numbers, rotations and positions.
    fn upload(&self, io: &PatchTensors, patches: &Patches) -> Result<(), Error> {
        let n = patches.places.len() as u32;
        let tokens: Vec<u32> = (0..n).flat_map(|number| [0, number, 0]).collect();
        self.device.write(&io.batch.tokens, 0, &tokens)?;
        io.batch.set_lengths(&self.device, &[[n, n]])?;
        self.device.write(&io.patches, 0, &patches.values)?;
        let ones = |tensor: &Tensor| self.device.write(tensor, 0, &vec![1f32; tensor.len()]);
        self.transformer.ones().try_for_each(ones)?;
        let HostValues { merge, places, positions, standard } = &self.host;
        if let (Some(table), Some((axes, base))) = (self.transformer.angles(), places.rope) {
            let angles = grid_angles(patches.grid, *merge, 2 * table.shape()[1], base, axes)?;
            self.device.write(table, 0, angles.as_flattened())?;
        }
        if let (Some(tensor), Some(learned)) = (&io.positions, places.learned) {
            let dim = self.transformer.config.encoder.dim as usize;
            let rows = match learned {
                Learned::Square(how) => interpolate(positions, dim, patches.grid, *merge, how)?,
                Learned::Axes => {
                    let (columns, rows) = positions.split_at(positions.len() / 2);
                    add_axes(columns, rows, dim, &patches.places)?
                }
            };
            self.device.write(tensor, 0, &rows)?;
        }
        if let Some(neighbours) = &io.batch.neighbours {
            let side = neighbours.shape()[1].isqrt();
            self.device.write(neighbours, 0, &grid_neighbours(patches.grid, &patches.places, side))?;
        }
        if let Some(MeanTensors { spans, standard: tensors }) = &io.means {
            let n_joined = self.transformer.config.projector.n_patches;
            let ends: Vec<u32> = (0..n / n_joined).flat_map(|row| [row * n_joined, (row + 1) * n_joined]).collect();
            self.device.write(spans, 0, &ends)?;
            if let Some([bias, inverse]) = tensors {
                let n_rows = (n / n_joined) as usize;
                let [biases, scales] = standard;
                let negated: Vec<f32> = biases.iter().map(|bias| -bias).collect();
                self.device.write(bias, 0, &negated.repeat(n_rows))?;
                self.device.write(inverse, 0, &scales.repeat(n_rows))?;
            }
        }
        Ok(())
    }
}
