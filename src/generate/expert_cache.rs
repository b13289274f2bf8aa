//! Expert cache for a mixture of experts larger than memory: the device holds all other weights and some experts of
//! each layer.
//!
//! A pass over a few tokens stops at each layer's routing, which the host reads back. It reads missing experts from
//! disk in place of the least used ones, and the pass continues with expert slots. A pass over so many tokens that
//! they might need more experts than there are slots uses whole layers in turn, as in [`super::disk_offload`]:
//! cached experts are copied, the others are read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use web_time::Instant;

use crate::device::Device;
use crate::error::Error;
use crate::load::{TensorIndex, WeightFiles, WeightUploader};
use crate::model::{CachedExperts, Transformer};
use crate::recording::Recording;
use crate::tensor::Tensor;

/// Statistics of an expert cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct ExpertCacheStats {
    /// Routed experts in all layers.
    pub n_experts: usize,
    /// Expert slots on the device.
    pub n_kept: usize,
    /// Expert choices so far, in passes over a few tokens.
    pub n_chosen: u64,
    /// Cache hits among those choices.
    pub n_found: u64,
    /// Experts read from disk for those passes.
    pub n_read: u64,
    /// Bytes read from disk for them.
    pub read_bytes: u64,
}

impl ExpertCacheStats {
    /// Fraction of choices that hit: 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.n_found as f64 / self.n_chosen.max(1) as f64
    }
}

/// A layer's cached experts, and how often each expert is used.
struct Slots {
    /// By slot.
    experts: Vec<Option<u32>>,
    /// By expert.
    slots: Vec<Option<u32>>,
    uses: Vec<Uses>,
    n_passes: u32,
}

/// Exponentially decayed count of an expert's uses, see [`Uses::HALF_LIFE`].
#[derive(Clone, Copy, Default)]
struct Uses {
    sum: f64,
    /// Pass of the last use.
    at: u32,
}

impl Uses {
    /// In passes. Some hundred tokens share a subject, so its experts outlive those of single words. Other values
    /// were not compared: random weights use all experts alike.
    const HALF_LIFE: f64 = 128.0;

    fn count(self, pass: u32) -> f64 {
        self.sum * (-f64::from(pass.wrapping_sub(self.at)) / Uses::HALF_LIFE).exp2()
    }
}

impl Slots {
    fn new(n_experts: u32, n_slots: u32) -> Slots {
        let n_experts = n_experts as usize;
        let (experts, slots) = (vec![None; n_slots as usize], vec![None; n_experts]);
        Slots { experts, slots, uses: vec![Uses::default(); n_experts], n_passes: 0 }
    }

    fn slot_of(&self, expert: u32) -> Option<u32> {
        self.slots.get(expert as usize).copied().flatten()
    }

    /// Counts a pass's choices, each below E, and assigns slots to the missing experts: returns those to read and
    /// their slots. Evicts no expert that the pass needs. `None` if there are too few slots.
    fn assign_slots(&mut self, chosen: &[u32]) -> Option<Vec<(u32, u32)>> {
        self.n_passes = self.n_passes.wrapping_add(1);
        let now = self.n_passes;
        for &expert in chosen {
            let uses = &mut self.uses[expert as usize];
            *uses = Uses { sum: uses.count(now) + 1.0, at: now };
        }
        let mut missing: Vec<u32> = chosen.iter().copied().filter(|&expert| self.slot_of(expert).is_none()).collect();
        missing.sort_unstable();
        missing.dedup();
        // Empty slots first, then those of the least used experts.
        let of_slot = |slot: usize| self.experts[slot].map_or(-1.0, |expert| self.uses[expert as usize].count(now));
        let is_free = |slot: &usize| self.experts[*slot].is_none_or(|expert| !chosen.contains(&expert));
        let mut free: Vec<(f64, usize)> =
            (0..self.experts.len()).filter(is_free).map(|slot| (of_slot(slot), slot)).collect();
        crate::sort::by(&mut free, |(a, _), (b, _)| a.total_cmp(b));
        if free.len() < missing.len() {
            return None;
        }
        let room: Vec<(u32, u32)> =
            missing.into_iter().zip(free).map(|(expert, (_, slot))| (expert, slot as u32)).collect();
        for &(_, slot) in &room {
            if let Some(given_up) = self.experts[slot as usize].take() {
                self.slots[given_up as usize] = None;
            }
        }
        Some(room)
    }

    /// Marks an expert as cached in a slot.
    fn put(&mut self, expert: u32, slot: u32) {
        self.experts[slot as usize] = Some(expert);
        self.slots[expert as usize] = Some(slot);
    }
}

/// Reads experts into their slots.
pub(super) struct ExpertCache {
    tensor_index: TensorIndex,
    layers: Vec<CachedLayer>,
    n_chosen: AtomicU64,
    n_found: AtomicU64,
    n_read: AtomicU64,
    read_bytes: AtomicU64,
    reading_ns: AtomicU64,
}

struct CachedLayer {
    number: u32,
    experts: CachedExperts,
    /// Contents of the slots; a slot is empty while an expert is read into it.
    slots: Mutex<Slots>,
}

impl CachedLayer {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExpertCache {
    /// The expert cache of weights with expert slots.
    pub fn new(transformer: &Transformer, tensor_index: &TensorIndex) -> ExpertCache {
        let blocks =
            transformer.layers().zip(transformer.weights.blocks.iter().skip(transformer.layers().start as usize));
        let layers = blocks.filter_map(|(number, block)| {
            let experts = block.experts.as_ref()?.kept()?.clone();
            let slots = Mutex::new(Slots::new(experts.n_experts(), experts.n_slots()));
            Some(CachedLayer { number, experts, slots })
        });
        ExpertCache {
            tensor_index: tensor_index.clone(),
            layers: layers.collect(),
            n_chosen: AtomicU64::new(0),
            n_found: AtomicU64::new(0),
            n_read: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            reading_ns: AtomicU64::new(0),
        }
    }

    fn layer(&self, number: u32) -> Result<&CachedLayer, Error> {
        self.layers.iter().find(|layer| layer.number == number).ok_or_else(|| Error::Operand {
            kernel: "model",
            operand: "experts",
            expected: "a layer with an expert cache".into(),
            found: format!("layer {number}"),
        })
    }

    /// Reads the shared experts.
    ///
    /// # Errors
    /// Those of reading.
    pub async fn fill(&self, device: &Device, files: &WeightFiles) -> Result<(), Error> {
        for CachedLayer { experts, .. } in &self.layers {
            files.feed_all(WeightUploader::new(&self.tensor_index, experts.shared()), device).await?;
        }
        Ok(())
    }

    /// The cache's statistics.
    pub fn report(&self) -> ExpertCacheStats {
        let sum = |of: fn(&CachedExperts) -> u32| self.layers.iter().map(|layer| of(&layer.experts) as usize).sum();
        let [n_chosen, n_found, n_read, read_bytes] =
            [&self.n_chosen, &self.n_found, &self.n_read, &self.read_bytes].map(|n| n.load(Ordering::Relaxed));
        let (n_experts, n_kept) = (sum(CachedExperts::n_experts), sum(CachedExperts::n_slots));
        ExpertCacheStats { n_experts, n_kept, n_chosen, n_found, n_read, read_bytes }
    }

    /// Time spent reading experts.
    pub fn reading(&self) -> Duration {
        Duration::from_nanos(self.reading_ns.load(Ordering::Relaxed))
    }

    /// Runs all steps up to the last routing and returns the next step. The first `n_rows` rows are tokens, the
    /// others padding.
    ///
    /// # Errors
    /// Those of reading and of [`Device::run`].
    pub async fn run_up_to_last(
        &self,
        (device, files): (&Device, &WeightFiles),
        (recording, n_rows): (&Recording, usize),
    ) -> Result<usize, Error> {
        let mut done = 0;
        for choice in recording.choices() {
            let mut routes = device.run_steps_and_read(recording, done..choice.step, &choice.routes, 1)?.await?;
            routes.truncate(choice.routes.len());
            let n_words = choice.routes.shape().first().map_or(0, |&rows| routes.len() / rows as usize);
            let n_chosen = (n_rows * n_words).min(routes.len());
            self.ensure_cached(self.layer(choice.layer)?, (device, files), (&choice.routes, routes, n_chosen)).await?;
            done = choice.step;
        }
        Ok(done)
    }

    /// Reads a layer's missing experts and replaces the routes' expert numbers by slots. Routes beyond the first
    /// `n_chosen` words belong to padding rows and get arbitrary slots.
    async fn ensure_cached(
        &self,
        layer: &CachedLayer,
        (device, files): (&Device, &WeightFiles),
        (tensor, mut routes, n_chosen): (&Tensor, Vec<u32>, usize),
    ) -> Result<(), Error> {
        let experts = &layer.experts;
        let (n_experts, n_slots) = (experts.n_experts(), experts.n_slots());
        // Larger numbers are shared experts.
        let of_tokens = routes[..n_chosen].iter().step_by(2).copied();
        let chosen: Vec<u32> = of_tokens.filter(|&expert| expert < n_experts).collect();
        let too_many = || Error::Operand {
            kernel: "route",
            operand: "routes",
            expected: format!("at most {n_slots} experts per pass"),
            found: format!("{chosen:?}"),
        };
        let start = Instant::now();
        let (n_found, room) = {
            let mut slots = layer.slots();
            let n_found = chosen.iter().filter(|&&expert| slots.slot_of(expert).is_some()).count();
            (n_found, slots.assign_slots(&chosen).ok_or_else(too_many)?)
        };
        let feed =
            |&(expert, slot): &(u32, u32)| WeightUploader::of_expert(&self.tensor_index, experts.parts(expert, slot));
        let feeds = room.iter().map(feed).collect::<Result<Vec<WeightUploader>, Error>>()?;
        feeds.iter().for_each(|feed| files.announce(feed));
        for (&(expert, slot), feed) in room.iter().zip(feeds) {
            // Passes submitted with the slot's previous expert run before this write.
            let read_bytes = feed.read_again(device, files).await?;
            self.read_bytes.fetch_add(read_bytes, Ordering::Relaxed);
            layer.slots().put(expert, slot);
        }
        self.reading_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.n_chosen.fetch_add(chosen.len() as u64, Ordering::Relaxed);
        self.n_found.fetch_add(n_found as u64, Ordering::Relaxed);
        self.n_read.fetch_add(room.len() as u64, Ordering::Relaxed);
        let slots = layer.slots();
        let any = chosen.first().and_then(|&expert| slots.slot_of(expert)).unwrap_or_default();
        for expert in routes.iter_mut().step_by(2) {
            *expert = match slots.slot_of(*expert) {
                Some(slot) => slot,
                None if *expert < n_experts => any,
                None => n_slots + expert.saturating_sub(n_experts),
            };
        }
        device.write(tensor, 0, &routes)
    }

    /// Fills a whole layer for passes over many tokens: copies cached experts and reads the others. Returns the
    /// bytes read from disk.
    ///
    /// # Errors
    /// Those of reading and of [`Device::copy_words`].
    pub async fn read_layer(&self, number: u32, device: &Device, files: &WeightFiles) -> Result<u64, Error> {
        let layer = self.layer(number)?;
        let experts = 0..layer.experts.n_experts();
        let missing: Vec<u32> = {
            // The copies see the slots as they are now; later passes may change them.
            let slots = layer.slots();
            let there = experts.clone().filter_map(|expert| Some((expert, slots.slot_of(expert)?)));
            device.copy_words(&layer.experts.copies(there))?;
            experts.filter(|&expert| slots.slot_of(expert).is_none()).collect()
        };
        let mut read_bytes = 0;
        for expert in missing {
            let feed = WeightUploader::of_expert(&self.tensor_index, layer.experts.parts_of_all(expert))?;
            read_bytes += feed.read_again(device, files).await?;
        }
        Ok(read_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Assigns slots and fills them at once.
    fn choose(slots: &mut Slots, chosen: &[u32]) -> Option<Vec<u32>> {
        let room = slots.assign_slots(chosen)?;
        room.iter().for_each(|&(expert, slot)| slots.put(expert, slot));
        Some(room.into_iter().map(|(expert, _)| expert).collect())
    }

    #[test]
    fn least_used_expert_is_evicted() {
        let mut slots = Slots::new(8, 3);
        assert_eq!(choose(&mut slots, &[5, 1, 5]), Some(vec![1, 5]));
        assert_eq!(choose(&mut slots, &[5, 2]), Some(vec![2]));
        assert_eq!(choose(&mut slots, &[2, 5]), Some(vec![]));
        // Expert 1 was used once, longest ago.
        assert_eq!(choose(&mut slots, &[7]), Some(vec![7]));
        assert_eq!(slots.slot_of(1), None);
        // Also used once, but more recently.
        assert_eq!(choose(&mut slots, &[1]), Some(vec![1]));
        assert_eq!([5, 2, 1].map(|expert| slots.slot_of(expert).is_some()), [true; 3]);
    }

    #[test]
    fn older_uses_of_an_expert_weigh_less() {
        let mut slots = Slots::new(4, 2);
        (0..20).for_each(|_| drop(choose(&mut slots, &[0])));
        (0..2000).for_each(|_| drop(choose(&mut slots, &[1])));
        assert_eq!(choose(&mut slots, &[2]), Some(vec![2]));
        assert_eq!([0, 1, 2].map(|expert| slots.slot_of(expert).is_some()), [false, true, true]);
    }

    #[test]
    fn experts_needed_by_a_pass_are_never_evicted() {
        let mut slots = Slots::new(32, 6);
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 27
        };
        for _ in 0..2000 {
            let chosen: Vec<u32> = (0..6).map(|_| random()).collect();
            let before: Vec<_> = chosen.iter().map(|&expert| slots.slot_of(expert)).collect();
            choose(&mut slots, &chosen).unwrap();
            for (&expert, before) in chosen.iter().zip(before) {
                let slot = slots.slot_of(expert).unwrap();
                assert_eq!(slots.experts[slot as usize], Some(expert));
                assert!(before.is_none_or(|before| before == slot), "{expert} moved");
            }
            let there = slots.experts.iter().flatten().count();
            assert_eq!(there, slots.slots.iter().flatten().count());
        }
        assert_eq!(choose(&mut slots, &[0, 1, 2, 3, 4, 5, 6]), None);
    }
}
