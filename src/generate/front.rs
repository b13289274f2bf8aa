//! Models that several devices share: each computes some of the layers, the model's own device the last ones and the head.

use std::ops::Range;
use std::sync::Arc;

use super::model::LoadOptions;
use super::passes::{RecordedPasses, Room};
use super::rows::{self, RowTables};
use crate::device::Device;
use crate::error::Error;
use crate::load::{Catalog, Feed, FileBytes};
use crate::memory::Limit;
use crate::model::{Ending, KvCache, ModelConfig, Transformer, Weights};
use crate::recording::MemoryPlan;
use crate::tuning::while_testing;

/// So many layers on a device.
#[derive(Clone, Debug)]
pub struct DeviceLayers {
    /// The device that computes them, with its own memory.
    pub device: Device,
    /// How many: 1 at least.
    pub n_layers: u32,
}

/// Which layers other devices than the model's own compute, from the first layer on.
///
/// # Errors
/// [`Error::Option`] if the model's own device is left without a layer, a device is asked to compute none, or later layers read
/// more of earlier ones than what stands between two layers.
pub(super) fn before(
    device: &Device,
    config: &ModelConfig,
    options: &LoadOptions<'_>,
) -> Result<Vec<DeviceLayers>, Error> {
    let n_layers = config.n_layers();
    let mut all = Vec::new();
    if let Some(asked) = options.gpu_layers.filter(|_| device.is_gpu()) {
        if asked == 0 {
            let expected = format!("1 to {n_layers}, or the device `cpu`");
            return Err(Error::Option { option: "gpu_layers", expected, found: "0".into() });
        }
        if asked < n_layers {
            let device = Device::on_cpu("the first layers of a model".into());
            all.push(DeviceLayers { device, n_layers: n_layers - asked });
        }
    }
    let mut end: u32 = all.iter().map(|layers| layers.n_layers).sum();
    for layers in &options.layers_on {
        let room = n_layers.saturating_sub(end + 1);
        if layers.n_layers == 0 || layers.n_layers > room {
            return Err(Error::Option {
                option: "layers_on",
                expected: match room {
                    0 => format!(
                        "fewer devices: {end} of {n_layers} layers are on others, and the last is on the model's own"
                    ),
                    _ => format!("1 to {room} of the {n_layers} layers on {}", layers.device.info().name),
                },
                found: layers.n_layers.to_string(),
            });
        }
        end += layers.n_layers;
        all.push(layers.clone());
    }
    let starts = all.iter().scan(0, |start, layers| {
        *start += layers.n_layers;
        Some(*start as usize)
    });
    let reads_keys = |start: usize| {
        let later = config.blocks.iter().skip(start);
        later.filter_map(|block| block.attention.keys_of).any(|of| of < start)
    };
    if !all.is_empty() && (config.per_layer.is_some() || starts.into_iter().any(reads_keys)) {
        return Err(Error::Option {
            option: if options.layers_on.is_empty() { "gpu_layers" } else { "layers_on" },
            expected:
                "all layers of a model whose layers read parts of the embedding, or each other's keys, on one device"
                    .into(),
            found: format!("{} of {n_layers} on the model's own", n_layers - end),
        });
    }
    Ok(all)
}

/// The same of a model whose file arrives piece by piece: all layers are on its own device.
///
/// # Errors
/// [`Error::Option`] if others are asked for by name.
pub(super) fn none(options: &LoadOptions<'_>) -> Result<Vec<DeviceLayers>, Error> {
    match options.layers_on.len() {
        0 => Ok(Vec::new()),
        n => Err(Error::Option {
            option: "layers_on",
            expected: "no other devices for a model whose file arrives piece by piece".into(),
            found: n.to_string(),
        }),
    }
}

/// What other devices than the model's own compute before it.
pub(super) struct Fronts(Vec<Front>);

/// Layers on one of them; with the first ones the embedding.
struct Front {
    device: Device,
    transformer: Transformer,
    /// Tells of what no device after it reads as well.
    feed: Feed,
    /// What its device had before anything of the model was there, as far as that is known.
    limit: Option<Limit>,
}

/// Of all devices that share a model.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub catalog: &'a Catalog,
    pub context_length: u32,
    pub exact: bool,
    /// Whether tables of tokens stay in the file.
    pub fetches_rows: bool,
}

impl Fronts {
    /// Declares layers on other devices, before `last`, which is the rest of the model.
    ///
    /// # Errors
    /// Errors of [`Weights::declare`].
    pub fn declare(all: &[DeviceLayers], last: &Transformer, shared: Shared<'_>) -> Result<Fronts, Error> {
        let mut fronts: Vec<Front> = Vec::with_capacity(all.len());
        let mut end = last.layers().start;
        // Each knows what those after it read.
        for DeviceLayers { device, n_layers } in all.iter().rev() {
            let start = end - n_layers;
            let later = fronts.iter().map(|front| &front.transformer).chain([last]);
            let front = Front::declare(device, start..end, later, (&last.config, shared))?;
            fronts.push(front);
            end = start;
        }
        fronts.reverse();
        Ok(Fronts(fronts))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The devices, in the order in which they compute, and their parts of the model.
    pub fn parts(&self) -> impl Iterator<Item = (&Device, &Transformer)> {
        self.0.iter().map(|front| (&front.device, &front.transformer))
    }

    /// Fills them, and returns what the digest of a model's tensors has of those that the model's own device does not read.
    ///
    /// # Errors
    /// Those of [`Feed::take_all`].
    pub fn fill(&self, files: &[FileBytes], room: Room) -> Result<u64, Error> {
        self.0.iter().try_fold(0, |digest: u64, front| Ok(digest.wrapping_add(front.fill(files, room)?)))
    }

    /// Refuses what takes more memory than the devices have, as far as that is known: a plan for each, in order.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn check_plans(&self, plans: impl Iterator<Item = MemoryPlan>) -> Result<(), Error> {
        self.0.iter().zip(plans).try_for_each(|(front, plan)| match front.limit {
            Some(limit) if plan.total_bytes() > limit.bytes => {
                let hint = format!("fewer layers on {} leave it more room", front.device.info().name);
                Err(plan.refused(limit.bytes, limit.explained(hint)))
            }
            _ => Ok(()),
        })
    }

    /// Memory of the weights and one session on each.
    ///
    /// # Errors
    /// Errors of [`RecordedPasses::declare`].
    pub fn plans(&self, room: Room) -> Result<Vec<MemoryPlan>, Error> {
        let plan =
            |front: &Front| Ok(RecordedPasses::declare(&front.device.target(), &front.transformer, room)?.plan());
        self.0.iter().map(plan).collect()
    }
}

impl Front {
    fn declare<'a>(
        device: &Device,
        layers: Range<u32>,
        later: impl Iterator<Item = &'a Transformer> + Clone,
        (config, shared): (&ModelConfig, Shared<'_>),
    ) -> Result<Front, Error> {
        let Shared { catalog, context_length, exact, fetches_rows } = shared;
        let limit = Limit::of(None, device.available_bytes());
        let device = device.for_model(exact);
        let weights = Weights::declare(&device.target(), config, catalog)?;
        let transformer = Transformer::declare(config.clone(), weights, context_length)?.part(layers);
        let transformer = if fetches_rows { rows::in_file(transformer, catalog) } else { transformer };
        let is_of_others = |name: &str| later.clone().any(|part| part.destinations().any(|(known, _)| known == name));
        let feed = Feed::digesting(catalog, transformer.destinations(), |name| !is_of_others(name));
        Ok(Front { device, transformer, feed, limit })
    }

    fn fill(&self, files: &[FileBytes], room: Room) -> Result<u64, Error> {
        let mut feed = self.feed.clone();
        let test = RecordedPasses::test_usual(&self.device, &self.transformer, room);
        while_testing(test, || feed.take_all(&self.device, files, None))?;
        self.transformer.upload_ropes(&self.device)?;
        Ok(feed.digest())
    }
}

/// A session's passes on the devices before the model's own.
pub(super) struct FrontPasses {
    fronts: Arc<Fronts>,
    passes: Vec<RecordedPasses>,
}

impl FrontPasses {
    pub fn declare(fronts: &Arc<Fronts>, room: Room) -> Result<FrontPasses, Error> {
        let passes = |(device, transformer): (&Device, &Transformer)| {
            RecordedPasses::declare(&device.target(), transformer, room)
        };
        let passes = fronts.parts().map(passes).collect::<Result<_, Error>>()?;
        Ok(FrontPasses { fronts: fronts.clone(), passes })
    }

    /// What the layers keep on each device.
    pub fn caches(&self) -> impl Iterator<Item = (&KvCache, &Device)> {
        self.passes.iter().zip(self.fronts.parts()).map(|(passes, (device, _))| (&passes.cache, device))
    }

    /// Computes its layers for these tokens, in a pass of `size` rows, and returns the rows that they leave, `[size, C]`; none
    /// if the model's own device has all layers. `tables`: those that are in the file.
    ///
    /// # Errors
    /// Errors of the self-test, [`RowTables::fetch`] and [`Device::run`].
    pub async fn compute(
        &mut self,
        ids: &[u32],
        position: usize,
        size: u32,
        angles: u32,
        tables: Option<&RowTables>,
    ) -> Result<Option<Vec<u32>>, Error> {
        let mut left: Option<Vec<u32>> = None;
        for (passes, (device, transformer)) in self.passes.iter_mut().zip(self.fronts.parts()) {
            passes.test(device, transformer, size, Ending::Cache).await?;
            let (pass, io) = (passes.get(size, Ending::Cache)?, &passes.io);
            match &left {
                Some(rows) => device.write(&io.stream, 0, rows)?,
                None => {
                    device.write(&io.tokens, position, ids)?;
                    tables.map_or(Ok(()), |tables| tables.fetch(device, io, position, ids))?;
                }
            }
            io.state.set_turned(device, position as u32, ids.len() as u32, angles)?;
            left = Some(device.run_and_read(pass, &io.stream.first_rows(size)?)?.await?);
        }
        Ok(left)
    }
}
