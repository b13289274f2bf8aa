//! The forward passes of a session: recorded once for a few numbers of tokens, with the tensors that they share.

use std::collections::HashMap;

use crate::device::Device;
use crate::error::Error;
use crate::kernels::KvType;
use crate::model::{Ending, KvCache, PassTensors, Transformer};
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::target::Target;
use crate::tuning::self_test;

/// Tokens that one pass can take. A session records those up to [`Model::max_pass`](super::Model::max_pass).
pub const PASS_SIZES: [u32; 5] = [1, 8, 32, 128, 512];

/// From this size on a pass takes about as long as its rows say, so that idle ones are worth avoiding.
const LONG_PASS: u32 = 128;

/// What a session has room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Positions of its cache.
    pub context_length: u32,
    /// Tokens that one pass takes at most.
    pub max_pass: u32,
    /// What keys and values are cached as.
    pub kv_type: KvType,
}

/// Records one pass with an ending, of a model whose weights may be nowhere.
///
/// # Errors
/// [`Error::Operand`] or [`Error::Shape`] if the target's limits are too small for it.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn record_pass(
    target: &Target,
    transformer: &Transformer,
    context_length: u32,
    n_tokens: u32,
    ending: Ending,
) -> Result<Recording, Error> {
    let config = &transformer.config;
    let cache = KvCache::declare(config, KvType::default(), context_length, n_tokens)?;
    let io = PassTensors::declare(config, context_length, n_tokens)?;
    let mut rec = Recorder::new(target.clone());
    transformer.record_pass(&mut rec, &cache, &io, n_tokens, ending)?;
    Ok(rec.finish(&mut Workspace::default()))
}

/// A session's tensors and the passes that are recorded over them.
pub(super) struct RecordedPasses {
    pub cache: KvCache,
    pub io: PassTensors,
    workspace: Workspace,
    /// Those of [`PASS_SIZES`] that are recorded.
    sizes: &'static [u32],
    /// By what comes after the layers, and by size.
    recordings: HashMap<(Ending, u32), Recording>,
}

impl RecordedPasses {
    /// Declares tensors and records the passes of a greedy generation; nothing is allocated.
    pub fn declare(target: &Target, transformer: &Transformer, room: Room) -> Result<RecordedPasses, Error> {
        let Room { context_length, max_pass, kv_type } = room;
        let config = &transformer.config;
        // A pass for more tokens than the context has positions would never be full.
        let [largest, enough] = [
            PASS_SIZES.iter().rposition(|&size| size <= max_pass),
            PASS_SIZES.iter().position(|&size| size >= context_length),
        ];
        let last = largest.unwrap_or(0).min(enough.unwrap_or(PASS_SIZES.len() - 1));
        let sizes = &PASS_SIZES[..=last];
        let cache = KvCache::declare(config, kv_type, context_length, PASS_SIZES[last])?;
        let io = PassTensors::declare(config, context_length, PASS_SIZES[last])?;
        let (workspace, recordings) = (Workspace::default(), HashMap::new());
        let mut passes = RecordedPasses { cache, io, workspace, sizes, recordings };
        passes.record_greedy(target, transformer)?;
        Ok(passes)
    }

    fn record_greedy(&mut self, target: &Target, transformer: &Transformer) -> Result<(), Error> {
        self.record(target, transformer, Ending::Cache)?;
        self.record(target, transformer, Ending::Greedy { penalize: false })
    }

    /// Records the passes of an ending unless that was done before.
    pub fn record(&mut self, target: &Target, transformer: &Transformer, ending: Ending) -> Result<(), Error> {
        let largest = self.largest();
        for &size in self.sizes.iter().rev() {
            // In the middle of a prompt only full passes run, and short ones never do.
            let never_runs = ending == Ending::Cache && size < LONG_PASS.min(largest);
            if never_runs || self.recordings.contains_key(&(ending, size)) {
                continue;
            }
            let mut rec = Recorder::new(target.clone());
            transformer.record_pass(&mut rec, &self.cache, &self.io, size, ending)?;
            self.recordings.insert((ending, size), rec.finish(&mut self.workspace));
        }
        Ok(())
    }

    /// Sees to it that the self-test has nothing against a pass.
    ///
    /// # Errors
    /// Those of the self-test and of [`RecordedPasses::record`].
    pub async fn test(
        &mut self,
        device: &Device,
        transformer: &Transformer,
        size: u32,
        ending: Ending,
    ) -> Result<(), Error> {
        loop {
            self.record(&device.target(), transformer, ending)?;
            if self_test(device, self.get(size, ending)?).await? {
                return Ok(());
            }
            self.recordings.clear();
            self.record_greedy(&device.target(), transformer)?;
        }
    }

    /// The same for all passes that are recorded.
    ///
    /// # Errors
    /// As [`RecordedPasses::test`].
    pub async fn test_all(&mut self, device: &Device, transformer: &Transformer) -> Result<(), Error> {
        let all: Vec<(Ending, u32)> = self.recordings.keys().copied().collect();
        for (ending, size) in all {
            self.test(device, transformer, size, ending).await?;
        }
        Ok(())
    }

    fn largest(&self) -> u32 {
        self.sizes[self.sizes.len() - 1]
    }

    /// Positions of the cache.
    pub fn capacity(&self) -> usize {
        self.cache.capacity() as usize
    }

    /// Memory of these passes and the weights. The recordings use all of it but the sampling settings, which a greedy
    /// pass does not read.
    pub fn plan(&self) -> MemoryPlan {
        MemoryPlan::of(self.recordings.values(), [&self.io.sampling])
    }

    /// The size of the next pass where `n_tokens` tokens are left: the smallest that takes them all or else the largest,
    /// but a shorter one rather than a long one that would be at most half full.
    pub fn size(&self, n_tokens: u32) -> u32 {
        let at = self.sizes.iter().position(|&size| size >= n_tokens).unwrap_or(self.sizes.len() - 1);
        match self.sizes[..at].last() {
            Some(&shorter) if shorter >= LONG_PASS && n_tokens <= self.sizes[at] / 2 => shorter,
            _ => self.sizes[at],
        }
    }

    /// The recorded pass of a size, with what comes after its layers.
    pub fn get(&self, size: u32, ending: Ending) -> Result<&Recording, Error> {
        self.recordings.get(&(ending, size)).ok_or_else(|| Error::Operand {
            kernel: "session",
            operand: "pass",
            expected: "one that was recorded".into(),
            found: format!("{ending:?} of {size}"),
        })
    }
}
