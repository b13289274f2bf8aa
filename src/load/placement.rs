//! Placement of a model's weights: the layers of each device, and disk offload if memory is short. A plan of sizes
//! only, made once and then declared.

use crate::error::Error;
use crate::memory::Limit;
use crate::recording::MemoryPlan;

/// Slots that offloaded layers share: one in use, one being filled.
pub(crate) const SLOTS: usize = 2;

/// The shortest useful context.
const SHORTEST_CONTEXT: u32 = 64;

/// Placement options.
pub(crate) struct PlacementOptions {
    /// Requested positions of the KV cache.
    pub context_length: u32,
    /// Whether a shorter context is acceptable.
    pub fit_context: bool,
    /// Memory limit, if known.
    pub limit: Option<Limit>,
    /// Whether token tables always stay on disk.
    pub stream_rows: bool,
    /// Whether weights that do not fit may stay on disk.
    pub stream_layers: bool,
    /// Whether experts are offloaded with their layers, without an expert cache.
    pub whole_layers: bool,
}

/// Memory needs of a part of a model on its device.
pub(crate) trait Needs {
    /// The memory plan for this context length, with token tables on disk or on the device.
    ///
    /// # Errors
    /// Errors of declaring the part.
    fn plan(&self, context_length: u32, tables_in_file: bool) -> Result<MemoryPlan, Error>;

    /// Sizes of its layers.
    fn sizes(&self) -> Sizes;
}

/// Placement of a part of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placement {
    /// Positions of the KV cache.
    pub context_length: u32,
    /// Weights on disk.
    pub in_file: InFile,
    /// Memory plan with all layers on the device.
    pub plan: MemoryPlan,
}

/// Weights that passes read from disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct InFile {
    /// Token tables, row by row.
    pub tables: bool,
    /// Offloaded layers or experts.
    pub share: Option<Share>,
    /// If memory is the reason, a shorter context length at which everything would fit, if any.
    pub fitting_context: Option<u32>,
}

/// Offloaded weights of layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Share {
    /// All matrices of these layers, counted from the device's first.
    Layers(Vec<usize>),
    /// Experts of all layers, beyond an expert cache.
    Experts {
        /// Cache slots per layer.
        n_slots: u32,
    },
}

impl Placement {
    /// Chooses a placement: all on the device if it fits; else a shorter context if allowed; else token tables on
    /// disk, then as few layers or experts as needed.
    ///
    /// # Errors
    /// [`Error::Memory`] if nothing fits; those of [`Needs::plan`].
    pub fn choose(asked: &PlacementOptions, needs: &dyn Needs) -> Result<Placement, Error> {
        let &PlacementOptions { context_length, fit_context, limit, stream_rows, .. } = asked;
        let on_device = |context_length| -> Result<Placement, Error> {
            Ok(Placement {
                context_length,
                in_file: InFile { tables: stream_rows, ..InFile::default() },
                plan: needs.plan(context_length, stream_rows)?,
            })
        };
        let fits = |placement: &Placement| limit.is_none_or(|limit| placement.plan.total_bytes() <= limit.bytes);
        let all = match on_device(context_length) {
            Ok(all) if fits(&all) => return Ok(all),
            Err(error) if !fit_context => return Err(error),
            all => all,
        };
        let halves = std::iter::successors(Some(context_length / 2), |context| Some(context / 2));
        let halves = halves.take_while(|&context| context >= SHORTEST_CONTEXT);
        let (mut shorter, mut fitting) = (Vec::new(), None);
        for placement in halves.filter_map(|context| on_device(context).ok()) {
            if fits(&placement) {
                fitting = Some(placement);
                break;
            }
            shorter.push(placement);
        }
        if let (true, Some(fitting)) = (fit_context, &fitting) {
            return Ok(fitting.clone());
        }
        let (all, fitting_context) = (all?, fitting.map(|fitting| fitting.context_length));
        let Some(limit) = limit else { return Ok(all) };
        if asked.stream_layers {
            let contexts = std::iter::once(all.clone()).chain(shorter.into_iter().filter(|_| fit_context));
            if let Some(mut placement) = Placement::leaving(contexts, limit.bytes, asked.whole_layers, needs)? {
                placement.in_file.fitting_context = fitting_context;
                return Ok(placement);
            }
        }
        Err(too_large(&all.plan, limit, fitting_context))
    }

    /// The first of these that fits with token tables on disk, since rows cost much less than layers; else the first
    /// that fits with layers or experts on disk as well.
    fn leaving(
        contexts: impl Iterator<Item = Placement>,
        limit_bytes: u64,
        whole_layers: bool,
        needs: &dyn Needs,
    ) -> Result<Option<Placement>, Error> {
        let mut least = Vec::new();
        for mut placement in contexts {
            let fetching = needs.plan(placement.context_length, true)?;
            // A table may be smaller than the row buffer of a pass.
            if fetching.total_bytes() < placement.plan.total_bytes() {
                placement.plan = fetching;
                placement.in_file.tables = true;
            }
            if placement.plan.total_bytes() <= limit_bytes {
                return Ok(Some(placement));
            }
            least.push(placement);
        }
        let sizes = needs.sizes();
        let with_share = least.into_iter().find_map(|mut placement| {
            placement.in_file.share = Some(sizes.share(placement.plan.total_bytes(), limit_bytes, whole_layers)?);
            Some(placement)
        });
        Ok(with_share)
    }
}

/// The error, with a context length that would fit.
fn too_large(plan: &MemoryPlan, limit: Limit, fitting: Option<u32>) -> Error {
    let hint = match fitting {
        Some(context) => format!("a context of {context} tokens would fit"),
        None => "no context length makes it fit; try a file with smaller weights".into(),
    };
    plan.refused(limit.bytes, limit.explained(hint))
}

/// Sizes of a device's layers.
pub(crate) struct Sizes {
    pub layers: Vec<LayerSizes>,
    /// Tokens of the largest pass.
    pub max_pass: u32,
}

/// Sizes of a layer's matrices, in bytes.
#[derive(Clone)]
pub(crate) struct LayerSizes {
    pub matrices: Vec<u64>,
    /// Expert sizes, if the layer has experts that the file separates.
    pub experts: Option<ExpertSizes>,
}

/// Sizes of a layer's experts, in bytes.
#[derive(Clone)]
pub(crate) struct ExpertSizes {
    /// Number of experts.
    pub n: u32,
    /// Experts per token.
    pub n_used: u32,
    /// The layer's expert matrices.
    pub matrices: Vec<u64>,
    /// A cache slot for one expert.
    pub slot: u64,
    /// Overhead of the slots: weights shared by all tokens, and the maximum rounding.
    pub beside: u64,
}

impl Sizes {
    /// The offload that reads the least per token and reduces the `needed` bytes to `limit`, if any does.
    fn share(&self, needed: u64, limit: u64, whole_layers: bool) -> Option<Share> {
        let experts = self.most_experts(needed, limit).filter(|_| !whole_layers);
        let shares = self.fewest_layers(needed, limit).into_iter().chain(experts);
        shares.min_by_key(|(read_bytes, _)| *read_bytes).map(|(_, share)| share)
    }

    /// The fewest offloaded layers that suffice, with the bytes read per pass.
    fn fewest_layers(&self, needed: u64, limit: u64) -> Option<(u64, Share)> {
        let n_layers = self.layers.len();
        // Up to `SLOTS` layers would save nothing.
        (SLOTS + 1..=n_layers).find_map(|n| {
            let streamed: Vec<usize> = spread(n, n_layers).collect();
            let matrices = || streamed.iter().map(|&layer| &self.layers[layer].matrices);
            let saved: u64 = matrices().flatten().sum();
            let fits = (needed + slots_bytes(matrices())).saturating_sub(saved) <= limit;
            fits.then_some((saved, Share::Layers(streamed)))
        })
    }

    /// The most cached experts per layer that fit, if more than a token needs, with the bytes read per one-token pass
    /// at uniform expert use.
    fn most_experts(&self, needed: u64, limit: u64) -> Option<(u64, Share)> {
        let layers = || self.layers.iter().filter_map(|layer| layer.experts.as_ref());
        let most_used = layers().map(|experts| experts.n_used).max()?;
        let most = layers().map(|experts| experts.n).max()?;
        let saved: u64 = layers().flat_map(|experts| &experts.matrices).sum();
        let whole = slots_bytes(layers().map(|experts| &experts.matrices));
        let n_slots = (most_used..most).rev().find(|&n_slots| {
            let kept: u64 = layers().map(|of| of.beside + u64::from(n_slots.min(of.n)) * of.slot).sum();
            // Passes of many tokens load whole layers.
            let whole = if n_slots / most_used < self.max_pass { whole } else { 0 };
            (needed + kept + whole).saturating_sub(saved) <= limit
        })?;
        let missed = |of: &ExpertSizes| {
            u64::from(of.n_used) * of.slot * u64::from(of.n - n_slots.min(of.n)) / u64::from(of.n.max(1))
        };
        Some((layers().map(missed).sum(), Share::Experts { n_slots }))
    }
}

/// `n` of `n_layers` layers, evenly spread: computing the layers between them hides the reads.
fn spread(n: usize, n_layers: usize) -> impl Iterator<Item = usize> {
    (0..n_layers).filter(move |layer| (layer + 1) * n / n_layers > layer * n / n_layers)
}

/// Bytes of one slot's tensors for these layers: the largest of each layer, the second largest of each, and so on.
pub(crate) fn slot_sizes<'a>(layers: impl Iterator<Item = &'a Vec<u64>>) -> Vec<u64> {
    let mut sizes: Vec<u64> = Vec::new();
    for layer in layers {
        let mut layer = layer.clone();
        crate::sort::by_key(&mut layer, |&size| std::cmp::Reverse(size));
        sizes.resize(sizes.len().max(layer.len()), 0);
        sizes.iter_mut().zip(layer).for_each(|(size, of_layer)| *size = (*size).max(of_layer));
    }
    sizes
}

fn slots_bytes<'a>(layers: impl Iterator<Item = &'a Vec<u64>>) -> u64 {
    SLOTS as u64 * slot_sizes(layers).iter().sum::<u64>()
}

/// Number of layers on each device before the model's own: on the CPU those beyond `gpu_layers`, then those of
/// `others` (name, count). `are_apart(l)`: whether the layers from `l` on depend on earlier ones only by their input.
///
/// # Errors
/// [`Error::Option`] if the model's own device or another one has no layer, or layers are not apart.
pub(crate) fn layers_before(
    n_layers: u32,
    gpu_layers: Option<u32>,
    others: &[(&str, u32)],
    are_apart: impl Fn(u32) -> bool,
) -> Result<Vec<u32>, Error> {
    if gpu_layers == Some(0) {
        let expected = format!("1 to {n_layers}, or the device `cpu`");
        return Err(Error::Option { option: "gpu_layers", expected, found: "0".into() });
    }
    let of_cpu = gpu_layers.and_then(|asked| n_layers.checked_sub(asked)).filter(|&n| n > 0);
    let mut before: Vec<u32> = of_cpu.into_iter().collect();
    let mut end = of_cpu.unwrap_or(0);
    for &(device, n) in others {
        let room = n_layers.saturating_sub(end + 1);
        if n == 0 || n > room {
            return Err(Error::Option {
                option: "layers_on",
                expected: match room {
                    0 => format!(
                        "fewer devices: {end} of {n_layers} layers are on others, the model's own device needs one"
                    ),
                    _ => format!("1 to {room} of the {n_layers} layers on {device}"),
                },
                found: n.to_string(),
            });
        }
        before.push(n);
        end += n;
    }
    let mut starts = before.iter().scan(0, |start, n| {
        *start += n;
        Some(*start)
    });
    if !starts.all(are_apart) {
        return Err(Error::Option {
            option: if others.is_empty() { "gpu_layers" } else { "layers_on" },
            expected: "all layers on one device, because they read parts of the embedding or each other's keys".into(),
            found: format!("{} of {n_layers} on the model's own", n_layers - end),
        });
    }
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: PlacementOptions = PlacementOptions {
        context_length: 1024,
        fit_context: false,
        limit: None,
        stream_rows: false,
        stream_layers: true,
        whole_layers: false,
    };

    /// Sizes per cached position, of tables, of their row buffer, and of the rest.
    struct Model {
        position: u64,
        table: u64,
        rows: u64,
        rest: u64,
        layers: Vec<LayerSizes>,
        max_pass: u32,
        /// Largest context that can be declared.
        most: u32,
    }

    impl Needs for Model {
        fn plan(&self, context_length: u32, tables_in_file: bool) -> Result<MemoryPlan, Error> {
            if context_length > self.most {
                return Err(Error::ContextFull { needed: context_length as usize, capacity: self.most as usize });
            }
            let layers: u64 = self.layers.iter().flat_map(|layer| &layer.matrices).sum();
            let tables = if tables_in_file { self.rows } else { self.table };
            Ok(MemoryPlan {
                weights_bytes: layers + self.rest + tables,
                cache_bytes: u64::from(context_length) * self.position,
                activations_bytes: 0,
            })
        }

        fn sizes(&self) -> Sizes {
            Sizes { layers: self.layers.clone(), max_pass: self.max_pass }
        }
    }

    impl Model {
        /// Memory in use with this placement.
        fn takes(&self, placement: &Placement) -> u64 {
            let sizes = self.sizes();
            let all = self.plan(placement.context_length, placement.in_file.tables).unwrap();
            assert_eq!(placement.plan, all);
            let (saved, slots) = match &placement.in_file.share {
                None => (0, 0),
                Some(Share::Layers(numbers)) => {
                    let layers = || numbers.iter().map(|&layer| &sizes.layers[layer].matrices);
                    (layers().flatten().sum::<u64>(), slots_bytes(layers()))
                }
                Some(Share::Experts { n_slots }) => {
                    let experts: Vec<&ExpertSizes> =
                        sizes.layers.iter().filter_map(|layer| layer.experts.as_ref()).collect();
                    let slots: u64 =
                        experts.iter().map(|of| of.beside + u64::from(*n_slots.min(&of.n)) * of.slot).sum();
                    let most_used = experts.iter().map(|of| of.n_used).max().unwrap();
                    let of_layers = slots_bytes(experts.iter().map(|of| &of.matrices));
                    let whole = if n_slots / most_used < self.max_pass { of_layers } else { 0 };
                    (experts.iter().flat_map(|of| &of.matrices).sum::<u64>(), slots + whole)
                }
            };
            all.total_bytes() - saved + slots
        }

        fn place(&self, limit: u64, fit_context: bool, stream_layers: bool) -> Result<Placement, Error> {
            let limit = Limit::of(Some(limit), None);
            Placement::choose(&PlacementOptions { limit, fit_context, stream_layers, ..ASKED }, self)
        }
    }

    /// Ten layers of 1000 bytes, a table of 500, a cache of 1024 for 1024 positions.
    fn dense() -> Model {
        let layer = LayerSizes { matrices: vec![400, 600], experts: None };
        Model { position: 1, table: 500, rows: 20, rest: 100, layers: vec![layer; 10], max_pass: 8, most: u32::MAX }
    }

    /// Ten layers of 200 bytes plus eight experts of 100, two per token.
    fn mixture() -> Model {
        let experts = ExpertSizes { n: 8, n_used: 2, matrices: vec![500, 300], slot: 100, beside: 0 };
        let layer = LayerSizes { matrices: vec![200, 500, 300], experts: Some(experts) };
        Model { table: 20, layers: vec![layer; 10], max_pass: 1, ..dense() }
    }

    #[test]
    fn model_within_the_limit_is_placed_on_the_device() {
        let all = 10_000 + 500 + 100 + 1024;
        let placement = dense().place(all, false, true).unwrap();
        assert_eq!((placement.context_length, placement.in_file), (1024, InFile::default()));
        let unlimited = PlacementOptions { fit_context: true, stream_rows: true, ..ASKED };
        let placement = Placement::choose(&unlimited, &dense()).unwrap();
        assert_eq!(placement.in_file, InFile { tables: true, ..InFile::default() });
        assert_eq!(placement.plan.total_bytes(), all - 480);
    }

    #[test]
    fn context_is_halved_before_anything_is_offloaded() {
        let without_context = 10_000 + 500 + 100;
        for (limit, context) in [(1023, 512), (512, 512), (511, 256), (64, 64)] {
            let placement = dense().place(without_context + limit, true, true).unwrap();
            assert_eq!((placement.context_length, placement.in_file), (context, InFile::default()), "{limit}");
        }
        // With a fixed context, disk offload comes next, and the report has the context that would fit.
        let placement = dense().place(without_context + 600, false, true).unwrap();
        let in_file = InFile { tables: true, share: None, fitting_context: Some(512) };
        assert_eq!((placement.context_length, placement.in_file), (1024, in_file));
        // Contexts that cannot be declared are skipped if a shorter one is acceptable.
        let short = Model { most: 300, ..dense() };
        assert_eq!(short.place(1 << 40, true, false).unwrap().context_length, 256);
        assert!(matches!(short.place(1 << 40, false, false), Err(Error::ContextFull { .. })));
    }

    #[test]
    fn embedding_tables_are_offloaded_before_layers() {
        let with_rows = 10_000 + 20 + 100 + 1024;
        let placement = dense().place(with_rows, false, true).unwrap();
        assert!(placement.in_file.tables && placement.in_file.share.is_none());
        let placement = dense().place(with_rows - 1, false, true).unwrap();
        assert!(placement.in_file.tables && placement.in_file.share.is_some());
        // The row buffer would exceed a small table.
        let placement = Model { table: 10, ..dense() }.place(with_rows - 11, false, true).unwrap();
        assert!(!placement.in_file.tables && placement.in_file.share.is_some());
        // The longest context that fits with tables on disk.
        let placement = dense().place(with_rows - 1024 + 64, true, true).unwrap();
        assert_eq!((placement.context_length, placement.in_file.share), (64, None));
    }

    #[test]
    fn only_as_many_layers_as_needed_are_offloaded() {
        let all = 10_000 + 20 + 100 + 1024;
        // Three layers sharing two slots save one.
        for (limit, n) in [(all - 1, 3), (all - 1000, 3), (all - 1001, 4), (all - 8000, 10)] {
            let placement = dense().place(limit, false, true).unwrap();
            let Some(Share::Layers(layers)) = &placement.in_file.share else { panic!("{placement:?}") };
            assert_eq!(layers.len(), n, "{limit}: {layers:?}");
            assert!(layers.windows(2).all(|pair| pair[0] < pair[1]) && layers[n - 1] < 10, "{layers:?}");
            assert!(dense().takes(&placement) <= limit, "{limit}");
        }
        let error = dense().place(all - 8001, false, true).unwrap_err().to_string();
        assert!(error.contains("no context length"), "{error}");
        // A shorter context leaves room for the slots.
        assert_eq!(dense().place(all - 8001, true, true).unwrap().context_length, 512);
    }

    #[test]
    fn layer_slots_hold_the_largest_layer() {
        assert_eq!(slot_sizes([vec![1, 9, 3], vec![4, 5], vec![2]].iter()), [9, 4, 1]);
        assert_eq!(spread(3, 10).collect::<Vec<_>>(), [3, 6, 9]);
        assert_eq!(spread(10, 10).count(), 10);
    }

    #[test]
    fn placement_with_the_fewest_bytes_to_read_is_chosen() {
        let all = mixture().plan(1024, false).unwrap().total_bytes();
        let share = |model: &Model, limit| model.place(limit, false, true).unwrap().in_file.share.unwrap();
        // Seven of eight experts: a token reads a quarter of an expert in each layer.
        assert_eq!(share(&mixture(), all - 1000), Share::Experts { n_slots: 7 });
        assert_eq!(share(&mixture(), all - 1001), Share::Experts { n_slots: 6 });
        assert_eq!(share(&mixture(), all - 6000), Share::Experts { n_slots: 2 });
        // Fewer experts than a token needs are useless.
        assert_eq!(share(&mixture(), all - 6001), Share::Layers((1..10).collect()));
        // Passes of several tokens need room for two layers' experts, which reduces the cache.
        let wide = Model { max_pass: 8, ..mixture() };
        assert_eq!(share(&wide, all - 1000), Share::Experts { n_slots: 5 });
        // Experts that the file does not separate, or with `whole_layers`.
        let mut whole = mixture();
        whole.layers.iter_mut().for_each(|layer| layer.experts = None);
        assert_eq!(share(&whole, all - 1000), Share::Layers(vec![3, 6, 9]));
        let asked = PlacementOptions { limit: Limit::of(Some(all - 1000), None), whole_layers: true, ..ASKED };
        let placement = Placement::choose(&asked, &mixture()).unwrap();
        assert_eq!(placement.in_file.share, Some(Share::Layers(vec![3, 6, 9])));
    }

    #[test]
    fn placement_never_exceeds_the_memory_limit() {
        let mut uneven = mixture();
        for (i, layer) in uneven.layers.iter_mut().enumerate() {
            layer.matrices[0] += 37 * i as u64;
            if let Some(experts) = layer.experts.as_mut().filter(|_| i % 3 > 0) {
                *experts = ExpertSizes { n: 5, n_used: 1, slot: 155 + i as u64, beside: 48, ..experts.clone() };
            }
        }
        let models = [dense(), mixture(), Model { max_pass: 3, ..mixture() }, Model { max_pass: 2, ..uneven }];
        let mut kinds = [0; 4];
        for model in &models {
            for limit in (0..13_000).step_by(97) {
                for fit_context in [false, true] {
                    let Ok(placement) = model.place(limit, fit_context, true) else {
                        kinds[0] += 1;
                        continue;
                    };
                    assert!(model.takes(&placement) <= limit, "{placement:?} in {limit}");
                    kinds[match placement.in_file.share {
                        None => 1,
                        Some(Share::Layers(_)) => 2,
                        Some(Share::Experts { .. }) => 3,
                    }] += 1;
                }
            }
        }
        assert!(kinds.iter().all(|&n| n > 20), "{kinds:?}");
    }

    #[test]
    fn memory_refusal_names_a_context_that_fits() {
        let refused = |limit| match dense().place(limit, false, false) {
            Err(Error::Memory { needed_bytes, limit_bytes, hint, .. }) => {
                assert_eq!((needed_bytes, limit_bytes), (11_624, limit));
                hint
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(10_856), "a context of 256 tokens would fit");
        assert_eq!(refused(10_600), "no context length makes it fit; try a file with smaller weights");
    }

    #[test]
    fn layers_are_split_over_devices_as_requested() {
        let split = |gpu_layers, others: &[(&str, u32)]| layers_before(8, gpu_layers, others, |start| start != 5);
        assert!(split(None, &[]).unwrap().is_empty());
        assert!(split(Some(8), &[]).unwrap().is_empty());
        assert_eq!(split(Some(100), &[("a", 7)]).unwrap(), [7]);
        assert_eq!(split(Some(6), &[("a", 2), ("b", 3)]).unwrap(), [2, 2, 3]);
        for (gpu_layers, others, words) in [
            (Some(0), &[][..], ["gpu_layers", "1 to 8"]),
            (Some(3), &[], ["gpu_layers", "3 of 8"]),
            (None, &[("a", 0)], ["layers_on", "1 to 7 of the 8 layers on a"]),
            (None, &[("a", 1), ("b", u32::MAX)], ["layers_on", "1 to 6 of the 8 layers on b"]),
            (Some(1), &[("a", 1)], ["layers_on", "fewer devices: 7 of 8"]),
            (None, &[("a", 1), ("b", 4)], ["layers_on", "3 of 8"]),
        ] {
            let error = split(gpu_layers, others).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
