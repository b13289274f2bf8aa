//! Targets of recordings. A target is plain data, from an adapter's report or written by hand for a GPU that is not
//! present: its recordings can be compiled and their costs counted, but not run.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::dtype::WeightType;
use crate::shaders::{Kernel, Tier};

mod tuning;

pub(crate) use tuning::PlaceKey;
pub use tuning::{Bucket, Choice, TileForm, Tuning};

/// The kind of device that runs a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// A GPU.
    Gpu,
    /// A software GPU adapter, which runs on the CPU's cores.
    SoftwareGpu,
    /// The CPU executor.
    Cpu,
}

/// Limits on recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetLimits {
    /// Workgroups per grid dimension.
    pub max_workgroups: u32,
    /// Bytes of a tensor bound to a kernel.
    pub max_binding_bytes: u64,
    /// Floating-point operations of a product or of attention per dispatch if nothing was measured, see
    /// [`Target::max_dispatch_operations`].
    pub max_dispatch_operations: u64,
    /// Invocations in the smallest subgroup; 0 without subgroups.
    pub min_subgroup: u32,
    /// Invocations in the largest subgroup; 0 without subgroups.
    pub max_subgroup: u32,
    /// Whether conversions of integers to floats are so much slower than sums that shaders do without.
    pub converts_slowly: bool,
    /// Bytes of workgroup memory.
    pub max_workgroup_bytes: u32,
    /// Default maximum of splits along K that occupy the device with one product; 1 for few cores.
    pub max_splits: u32,
    /// Bytes between the params of consecutive dispatches; 0 if params use no device memory.
    pub params_stride: u32,
}

/// A target of recordings: kind of device, shader tier, limits and tuning. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Target {
    kind: TargetKind,
    tier: Tier,
    limits: TargetLimits,
    tuning: Arc<Tuning>,
    /// Labels of banned shader variants.
    banned: Arc<BTreeSet<&'static str>>,
}

impl Target {
    /// A target of this kind, tier and limits.
    pub fn new(kind: TargetKind, tier: Tier, limits: TargetLimits) -> Target {
        Target { kind, tier, limits, tuning: Arc::default(), banned: Arc::default() }
    }

    /// The CPU executor: no limits, and CPU reference kernels instead of shaders.
    pub fn cpu() -> Target {
        let limits = TargetLimits {
            max_workgroups: u32::MAX,
            max_binding_bytes: u64::MAX,
            max_dispatch_operations: u64::MAX,
            min_subgroup: 0,
            max_subgroup: 0,
            converts_slowly: false,
            max_workgroup_bytes: u32::MAX,
            max_splits: 1,
            params_stride: 0,
        };
        Target::new(TargetKind::Cpu, Tier::Baseline, limits)
    }

    /// The same target in another tier.
    pub(crate) fn in_tier(self, tier: Tier) -> Target {
        Target { tier, ..self }
    }

    /// The same target with this tuning.
    pub fn with_tuning(self, tuning: Tuning) -> Target {
        Target { tuning: Arc::new(tuning), ..self }
    }

    /// The same target with other limits.
    pub fn with_limits(self, limits: TargetLimits) -> Target {
        Target { limits, ..self }
    }

    /// The same target with these shader variants banned.
    pub(crate) fn without(self, banned: BTreeSet<&'static str>) -> Target {
        Target { banned: Arc::new(banned), ..self }
    }

    /// The kind of device that runs recordings.
    pub fn kind(&self) -> TargetKind {
        self.kind
    }

    /// Whether kernels run as shaders.
    pub fn is_gpu(&self) -> bool {
        self.kind != TargetKind::Cpu
    }

    /// Tier of the shader variants.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Whether products of sixteen rows and more are faster by the kernels for many rows, which unpack each weight once
    /// for a whole tile. GPUs need the tiles in half precision for that.
    pub(crate) fn suits_many(&self) -> bool {
        self.kind == TargetKind::Cpu || self.tier.rounds_to_half()
    }

    /// Limits of recordings.
    pub fn limits(&self) -> TargetLimits {
        self.limits
    }

    /// Floating-point operations of a product or of attention per dispatch; larger ones are split. A long dispatch
    /// makes a page stutter, and after some seconds drivers reset the device. If products were measured, the limit
    /// is a quarter of a second of the slowest.
    pub fn max_dispatch_operations(&self) -> u64 {
        /// Enough to hide a dispatch's overhead, however slow the device was when measured.
        const LEAST: u64 = 1 << 27;
        match self.tuning.operations_rate() {
            Some(rate) => (rate / 4).max(LEAST),
            None => self.limits.max_dispatch_operations,
        }
    }

    /// The tuned parameters for recordings.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Whether the shader variant with this label is banned.
    pub(crate) fn is_banned(&self, label: &str) -> bool {
        self.banned.contains(label)
    }

    /// The tier for recording a kernel: the target's first that has a variant which is not banned.
    pub(crate) fn tier_for(&self, kernel: &Kernel, weight: Option<WeightType>) -> Tier {
        let mut variants = kernel.variants_for(weight, self.tier);
        let has = |tier| tier != Tier::Subgroups || self.limits.max_subgroup > 0;
        let found = variants.find(|variant| has(variant.tier) && !self.is_banned(variant.label));
        found.map_or(Tier::Baseline, |variant| variant.tier)
    }

    /// Default maximum of tokens per pass, see [`Model::max_pass`](crate::Model::max_pass). 128 rows do not occupy a
    /// large GPU: with 2048 columns they are 64 tiles, fewer than it has cores. They do occupy a CPU or a software
    /// adapter, where larger passes only use more memory.
    pub(crate) fn usual_max_pass(&self) -> u32 {
        if self.kind == TargetKind::Gpu { 512 } else { 128 }
    }

    /// Bytes of the params of `n` dispatches.
    pub(crate) fn params_bytes(&self, n: usize) -> u64 {
        n as u64 * u64::from(self.limits.params_stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatch_size_limit_follows_the_measured_rate() {
        let limits = TargetLimits {
            max_workgroups: 65_535,
            max_binding_bytes: 1 << 30,
            max_dispatch_operations: 1 << 34,
            min_subgroup: 0,
            max_subgroup: 0,
            converts_slowly: false,
            max_workgroup_bytes: 16 << 10,
            max_splits: 8,
            params_stride: 256,
        };
        let target = Target::new(TargetKind::Gpu, Tier::Baseline, limits);
        assert_eq!(target.max_dispatch_operations(), 1 << 34);
        let measured = |rate| {
            let mut tuning = Tuning::default();
            tuning.set_operations_rate(Some(rate));
            target.clone().with_tuning(tuning).max_dispatch_operations()
        };
        // A phone, a large GPU, and a meaningless rate.
        assert_eq!(measured(20_000_000_000), 5_000_000_000);
        assert_eq!(measured(40_000_000_000_000), 10_000_000_000_000);
        assert_eq!(measured(0), 1 << 27);
    }
}
