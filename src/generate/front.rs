//! Models that two devices share: the CPU computes the first layers, the GPU the last ones and the head.

use std::sync::Arc;

use super::passes::{RecordedPasses, Room};
use super::rows::{self, RowTables};
use crate::device::Device;
use crate::error::Error;
use crate::load::{Catalog, Feed, FileBytes};
use crate::memory::Limit;
use crate::model::{Ending, Transformer, Weights};
use crate::recording::MemoryPlan;

/// The first layers of a model and its embedding, on the CPU.
pub(super) struct Front {
    device: Device,
    transformer: Transformer,
    feed: Feed,
    /// Of what the other device reads as well.
    of_both: Feed,
    /// What the CPU had before anything of the model was there, as far as that is known.
    limit: Option<Limit>,
}

impl Front {
    /// Declares the layers before those of `other`, with tables of tokens in the file if that is asked for.
    ///
    /// # Errors
    /// [`Error::Option`] for a model whose later layers read more of the earlier ones than what stands between two layers;
    /// errors of [`Weights::declare`].
    pub fn declare(
        other: &Transformer,
        catalog: &Catalog,
        context_length: u32,
        exact: bool,
        fetches_rows: bool,
    ) -> Result<Front, Error> {
        let (config, n_layers) = (&other.config, other.layers().start);
        let later = config.blocks.iter().skip(n_layers as usize);
        let reads_keys = later.filter_map(|block| block.attention.keys_of).any(|of| of < n_layers as usize);
        if config.per_layer.is_some() || reads_keys {
            return Err(Error::Option {
                option: "gpu_layers",
                expected: "all layers of a model whose layers read parts of the embedding, or each other's keys".into(),
                found: (config.n_layers() - n_layers).to_string(),
            });
        }
        let device = Device::on_cpu("the first layers of a model".into()).for_model(exact);
        let weights = Weights::declare(&device.target(), config, catalog)?;
        let transformer = Transformer::declare(config.clone(), weights, context_length)?.part(0..n_layers);
        let transformer = if fetches_rows { rows::in_file(transformer, catalog) } else { transformer };
        let feed = Feed::new(catalog, transformer.destinations());
        let is_of_both = |name: &str| other.destinations().any(|(known, _)| known == name);
        let of_both = Feed::new(catalog, transformer.destinations().filter(|(name, _)| is_of_both(name)));
        let limit = Limit::of(None, device.available_bytes());
        Ok(Front { device, transformer, feed, of_both, limit })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn transformer(&self) -> &Transformer {
        &self.transformer
    }

    /// Fills it, and returns what the digest of a model's tensors has of those that the other device does not read.
    ///
    /// # Errors
    /// Those of [`Feed::take_all`].
    pub fn fill(&self, files: &[FileBytes]) -> Result<u64, Error> {
        let mut feed = self.feed.clone();
        feed.take_all(&self.device, files, None)?;
        self.transformer.upload_ropes(&self.device)?;
        Ok(feed.digest().wrapping_sub(self.of_both.digest_ahead(files)?))
    }

    /// Refuses it if it takes more memory than the CPU has, as far as that is known.
    ///
    /// # Errors
    /// [`Error::Memory`]; errors of [`RecordedPasses::declare`].
    pub fn check_fits(&self, room: Room) -> Result<(), Error> {
        self.check_plan(&self.plan(room)?)
    }

    /// The same for what else shall be there with its weights.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn check_plan(&self, plan: &MemoryPlan) -> Result<(), Error> {
        match self.limit {
            Some(limit) if plan.total_bytes() > limit.bytes => {
                Err(plan.refused(limit.bytes, limit.explained("more layers on the GPU leave less for the CPU".into())))
            }
            _ => Ok(()),
        }
    }

    /// Memory of its weights and one session.
    ///
    /// # Errors
    /// Errors of [`RecordedPasses::declare`].
    pub fn plan(&self, room: Room) -> Result<MemoryPlan, Error> {
        Ok(RecordedPasses::declare(&self.device.target(), &self.transformer, room)?.plan())
    }
}

/// A session's passes on the CPU.
pub(super) struct FrontPasses {
    front: Arc<Front>,
    pub passes: RecordedPasses,
}

impl FrontPasses {
    pub fn declare(front: &Arc<Front>, room: Room) -> Result<FrontPasses, Error> {
        let passes = RecordedPasses::declare(&front.device.target(), &front.transformer, room)?;
        Ok(FrontPasses { front: front.clone(), passes })
    }

    pub fn device(&self) -> &Device {
        &self.front.device
    }

    /// Computes its layers for these tokens, in a pass of `size` rows, and returns the rows that they leave, `[size, C]`.
    /// `tables`: those that are in the file.
    ///
    /// # Errors
    /// Errors of [`RowTables::fetch`] and [`Device::run`].
    pub async fn compute(
        &mut self,
        ids: &[u32],
        position: usize,
        size: u32,
        angles: u32,
        tables: Option<&RowTables>,
    ) -> Result<Vec<u32>, Error> {
        let Front { device, transformer, .. } = &*self.front;
        self.passes.record(&device.target(), transformer, size, Ending::Cache)?;
        let (pass, io) = (self.passes.get(size, Ending::Cache)?, &self.passes.io);
        device.write(&io.tokens, position, ids)?;
        if let Some(tables) = tables {
            tables.fetch(device, io, position, ids)?;
        }
        io.state.set_turned(device, position as u32, ids.len() as u32, angles)?;
        device.run_and_read(pass, &io.stream.first_rows(size)?)?.await
    }
}
