//! Pipeline stages: several devices share a model, each computing some layers; the model's own device computes the
//! last ones and the output head.

use std::ops::Range;
use std::sync::Arc;

use super::disk_tables::DiskTables;
use super::model::LoadOptions;
use super::part::ModelPart;
use super::passes::{RecordedPasses, SessionLimits};
use crate::device::Device;
use crate::error::Error;
use crate::load::{FileBytes, TensorIndex, WeightUploader, layers_before};
use crate::memory::Limit;
use crate::model::{Ending, KvCache, ModelConfig, Transformer};
use crate::platform::{IS_BROWSER, Native, native};
use crate::recording::MemoryPlan;
use crate::tuning::while_testing;

/// A number of layers on a device.
#[derive(Clone, Debug)]
pub struct DeviceLayers {
    /// The device; its memory holds the layers.
    pub device: Device,
    /// Number of layers, at least 1.
    pub n_layers: u32,
}

/// Splits the layers before the model's own device among other devices. A model loaded in pieces has all layers on
/// its own device.
///
/// # Errors
/// [`Error::Option`] as in [`layers_before`], or for other devices with a model loaded in pieces.
pub(super) fn before(
    device: &Device,
    config: &ModelConfig,
    options: &LoadOptions<'_>,
    is_whole_file: bool,
) -> Result<Vec<DeviceLayers>, Error> {
    if IS_BROWSER {
        return Ok(Vec::new());
    }
    let LoadOptions { gpu_layers, layers_on, .. } = options;
    match (is_whole_file, layers_on.len()) {
        (true, _) => {}
        (false, 0) => return Ok(Vec::new()),
        (false, n) => {
            return Err(Error::Option {
                option: "layers_on",
                expected: "no other devices for a model that is loaded in pieces".into(),
                found: n.to_string(),
            });
        }
    }
    let are_apart = |start: u32| {
        let mut later = config.blocks.iter().skip(start as usize).filter_map(|block| block.attention.keys_of);
        config.per_layer.is_none() && later.all(|of| of >= start as usize)
    };
    let others: Vec<(&str, u32)> =
        layers_on.iter().map(|layers| (layers.device.info().name.as_str(), layers.n_layers)).collect();
    let n = layers_before(config.n_layers(), gpu_layers.filter(|_| device.is_gpu()), &others, are_apart)?;
    let cpu = (n.len() > others.len()).then(|| Device::on_cpu("the first layers of a model".into()));
    let devices = cpu.into_iter().chain(layers_on.iter().map(|layers| layers.device.clone()));
    Ok(devices.zip(n).map(|(device, n_layers)| DeviceLayers { device, n_layers }).collect())
}

/// The pipeline stages before the model's own device.
pub(super) struct PipelineStages(Vec<Native<PipelineStage>>);

/// A stage's layers; the first stage includes the embedding.
struct PipelineStage {
    device: Device,
    transformer: Transformer,
    /// Tensors that no later stage reads as well.
    feed: WeightUploader,
    /// Free memory of the device before loading, if known.
    limit: Option<Limit>,
}

/// Settings common to all stages.
#[derive(Clone, Copy)]
pub(super) struct StageSettings<'a> {
    pub tensor_index: &'a TensorIndex,
    pub room: SessionLimits,
    pub exact: bool,
    /// Whether embedding tables stay on disk.
    pub fetches_rows: bool,
}

impl PipelineStages {
    /// Declares stages before `last`, the model's own device.
    ///
    /// # Errors
    /// Errors of [`ModelPart::declare`].
    pub fn declare(
        all: &[DeviceLayers],
        last: &Transformer,
        shared: StageSettings<'_>,
    ) -> Result<PipelineStages, Error> {
        if IS_BROWSER {
            return Ok(PipelineStages(Vec::new()));
        }
        let mut stages: Vec<Native<PipelineStage>> = Vec::with_capacity(all.len());
        let mut end = last.layers().start;
        // Each stage knows what later ones read.
        for DeviceLayers { device, n_layers } in all.iter().rev() {
            let start = end - n_layers;
            let later = stages.iter().map(|front| &front.transformer).chain([last]);
            let front = PipelineStage::declare(device, start..end, later, (&last.config, shared))?;
            stages.push(native(front));
            end = start;
        }
        stages.reverse();
        Ok(PipelineStages(stages))
    }

    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Browsers have none.
    fn all(&self) -> &[Native<PipelineStage>] {
        if IS_BROWSER { &[] } else { &self.0 }
    }

    /// Devices and their parts of the model, in order.
    pub fn parts(&self) -> impl Iterator<Item = (&Device, &Transformer)> {
        self.all().iter().map(|front| (&front.device, &front.transformer))
    }

    /// Loads the stages and returns the digest of the tensors that the model's own device does not read.
    ///
    /// # Errors
    /// Those of [`Feed::take_all`].
    pub fn fill(&self, files: &[FileBytes], room: SessionLimits) -> Result<u64, Error> {
        self.all().iter().try_fold(0, |digest: u64, front| Ok(digest.wrapping_add(front.fill(files, room)?)))
    }

    /// Refuses plans beyond the devices' memory, where known: one plan each, in order.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn check_plans(&self, plans: impl Iterator<Item = MemoryPlan>) -> Result<(), Error> {
        self.all().iter().zip(plans).try_for_each(|(front, plan)| match front.limit {
            Some(limit) if plan.total_bytes() > limit.bytes => {
                let hint = format!("put fewer layers on {}", front.device.info().name);
                Err(plan.refused(limit.bytes, limit.explained(hint)))
            }
            _ => Ok(()),
        })
    }

    /// Memory of the weights and one session, per device.
    ///
    /// # Errors
    /// Errors of [`RecordedPasses::declare`].
    pub fn plans(&self, room: SessionLimits) -> Result<Vec<MemoryPlan>, Error> {
        let plan = |front: &Native<PipelineStage>| {
            Ok(RecordedPasses::declare(&front.device.target(), &front.transformer, room)?.plan())
        };
        self.all().iter().map(plan).collect()
    }
}

impl PipelineStage {
    fn declare<'a>(
        device: &Device,
        layers: Range<u32>,
        later: impl Iterator<Item = &'a Transformer> + Clone,
        (config, shared): (&ModelConfig, StageSettings<'_>),
    ) -> Result<PipelineStage, Error> {
        let StageSettings { tensor_index, room, exact, fetches_rows } = shared;
        let limit = Limit::of(None, device.available_bytes());
        let device = device.for_model(exact);
        let part = ModelPart::declare(device.target(), config, tensor_index, room)?.of_layers(layers);
        let transformer = part.transformer(room.context_length, fetches_rows)?;
        let is_of_others = |name: &str| later.clone().any(|part| part.tensor_slots().any(|(known, _)| known == name));
        let feed = WeightUploader::digesting(tensor_index, transformer.tensor_slots(), |name| !is_of_others(name));
        Ok(PipelineStage { device, transformer, feed, limit })
    }

    fn fill(&self, files: &[FileBytes], room: SessionLimits) -> Result<u64, Error> {
        let mut feed = self.feed.clone();
        let test = RecordedPasses::test_usual(&self.device, &self.transformer, room);
        while_testing(test, || feed.take_all(&self.device, files, None))?;
        self.transformer.upload_ropes(&self.device)?;
        Ok(feed.digest())
    }
}

/// A session's passes on the devices before the model's own.
pub(super) struct StagePasses {
    stages: Arc<PipelineStages>,
    passes: Vec<Native<RecordedPasses>>,
}

impl StagePasses {
    pub fn declare(stages: &Arc<PipelineStages>, room: SessionLimits) -> Result<StagePasses, Error> {
        let passes = |(device, transformer): (&Device, &Transformer)| {
            RecordedPasses::declare(&device.target(), transformer, room).map(native)
        };
        let passes = stages.parts().map(passes).collect::<Result<_, Error>>()?;
        Ok(StagePasses { stages: stages.clone(), passes })
    }

    /// Each device's KV cache.
    pub fn caches(&self) -> impl Iterator<Item = (&KvCache, &Device)> {
        self.passes.iter().zip(self.stages.parts()).map(|(passes, (device, _))| (&passes.cache, device))
    }

    /// Computes these tokens on all stages, in a pass of `size` rows, and returns the activations `[size, C]` for
    /// the model's own device; none if that has all layers. `tables`: embedding tables on disk.
    ///
    /// # Errors
    /// Errors of the self-test, [`DiskTables::fetch`] and [`Device::run`].
    pub async fn compute(
        &mut self,
        ids: &[u32],
        position: usize,
        size: u32,
        rope_offset: u32,
        tables: Option<&DiskTables>,
    ) -> Result<Option<Vec<u32>>, Error> {
        let mut left: Option<Vec<u32>> = None;
        for (passes, (device, transformer)) in self.passes.iter_mut().zip(self.stages.parts()) {
            passes.test(device, transformer, size, Ending::Cache).await?;
            let (pass, io) = (passes.get(size, Ending::Cache)?, &passes.io);
            match &left {
                Some(rows) => device.write(&io.stream, 0, rows)?,
                None => {
                    device.write(&io.tokens, position, ids)?;
                    if let Some(tables) = tables {
                        tables.fetch(device, io, position, ids).await?;
                    }
                }
            }
            io.state.set_with_rope(device, position as u32, ids.len() as u32, rope_offset)?;
            left = Some(device.run_and_read(pass, &io.stream.first_rows(size)?)?.await?);
        }
        Ok(left)
    }
}
