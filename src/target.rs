//! What recordings are made for. A target is plain data: it is made from an adapter's report, or by hand for a GPU that is
//! not here, whose recordings can be compiled and their costs counted, but not run.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::dtype::WeightType;
use crate::shaders::{Kernel, Tier};

mod tuning;

pub(crate) use tuning::PlaceKey;
pub use tuning::{Bucket, Choice, Tuning};

/// What runs a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// A GPU.
    Gpu,
    /// A GPU adapter that is software on the CPU's cores.
    SoftwareGpu,
    /// The CPU executor.
    Cpu,
}

/// Limits that recordings keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetLimits {
    /// Workgroups in each dimension of a grid.
    pub max_workgroups: u32,
    /// Bytes of a tensor that a kernel reads or writes.
    pub max_binding_bytes: u64,
    /// Floating-point operations of a product or of attention that go into one dispatch where nothing was measured, see
    /// [`Target::max_dispatch_operations`].
    pub max_dispatch_operations: u64,
    /// Invocations of the largest subgroup; 0 without subgroups.
    pub max_subgroup: u32,
    /// Bytes of memory that the invocations of a workgroup share.
    pub max_workgroup_bytes: u32,
    /// Splits of K into which a product is cut, if nobody asks for more, to occupy the device; 1 where a few cores do all.
    pub max_splits: u32,
    /// Bytes from the params of one dispatch to those of the next; 0 where they take no memory of the device.
    pub params_stride: u32,
}

/// What recordings are made for: what runs them, the tier of its shaders, its limits, and what was measured of it. Clones
/// are cheap.
#[derive(Clone, Debug)]
pub struct Target {
    kind: TargetKind,
    tier: Tier,
    limits: TargetLimits,
    tuning: Arc<Tuning>,
    /// Labels of shader variants that are not to be recorded.
    banned: Arc<BTreeSet<&'static str>>,
}

impl Target {
    /// A target of a kind, in a tier, with these limits.
    pub fn new(kind: TargetKind, tier: Tier, limits: TargetLimits) -> Target {
        Target { kind, tier, limits, tuning: Arc::default(), banned: Arc::default() }
    }

    /// The CPU executor: no limits, and kernels' twins instead of shaders.
    pub fn cpu() -> Target {
        let limits = TargetLimits {
            max_workgroups: u32::MAX,
            max_binding_bytes: u64::MAX,
            max_dispatch_operations: u64::MAX,
            max_subgroup: 0,
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

    /// The same target with these choices.
    pub fn with_tuning(self, tuning: Tuning) -> Target {
        Target { tuning: Arc::new(tuning), ..self }
    }

    /// The same target with other limits.
    pub fn with_limits(self, limits: TargetLimits) -> Target {
        Target { limits, ..self }
    }

    /// The same target without these shader variants.
    pub(crate) fn without(self, banned: BTreeSet<&'static str>) -> Target {
        Target { banned: Arc::new(banned), ..self }
    }

    /// What runs recordings.
    pub fn kind(&self) -> TargetKind {
        self.kind
    }

    /// Whether kernels run as shaders.
    pub fn is_gpu(&self) -> bool {
        self.kind != TargetKind::Cpu
    }

    /// Tier whose shader variants are recorded.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Limits of recordings.
    pub fn limits(&self) -> TargetLimits {
        self.limits
    }

    /// Floating-point operations of a product or of attention that go into one dispatch. More are cut into several: a long
    /// dispatch makes a page stutter, and after some seconds drivers take the device away. Where products were measured it
    /// is a quarter of a second of the slowest.
    pub fn max_dispatch_operations(&self) -> u64 {
        /// Of what a dispatch's own time is little, however slow a device was when it was measured.
        const LEAST: u64 = 1 << 27;
        match self.tuning.operations_rate() {
            Some(rate) => (rate / 4).max(LEAST),
            None => self.limits.max_dispatch_operations,
        }
    }

    /// Choices that recordings follow.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Whether a shader variant, by its label, is not to be recorded.
    pub(crate) fn is_banned(&self, label: &str) -> bool {
        self.banned.contains(label)
    }

    /// Tier in which a kernel is recorded: the first in the order of the target's that has a variant which is not banned.
    pub(crate) fn tier_for(&self, kernel: &Kernel, weight: Option<WeightType>) -> Tier {
        let mut variants = kernel.variants_for(weight, self.tier);
        let has = |tier| tier != Tier::Subgroups || self.limits.max_subgroup > 0;
        let found = variants.find(|variant| has(variant.tier) && !self.is_banned(variant.label));
        found.map_or(Tier::Baseline, |variant| variant.tier)
    }

    /// Tokens that a pass takes at most unless something else is asked for, see
    /// [`Model::max_pass`](crate::Model::max_pass). A large GPU is not busy with 128 rows: 2048 columns of them are 64
    /// tiles, fewer than it has cores. A CPU is, and so is a software adapter, which runs on the same cores: larger passes
    /// only take more memory there.
    pub(crate) fn usual_max_pass(&self) -> u32 {
        if self.kind == TargetKind::Gpu { 512 } else { 128 }
    }

    /// Bytes that the params of `n` dispatches take.
    pub(crate) fn params_bytes(&self, n: usize) -> u64 {
        n as u64 * u64::from(self.limits.params_stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatches_are_cut_by_what_was_measured() {
        let limits = TargetLimits {
            max_workgroups: 65_535,
            max_binding_bytes: 1 << 30,
            max_dispatch_operations: 1 << 34,
            max_subgroup: 0,
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
        // A phone, a large GPU, and a rate that says nothing.
        assert_eq!(measured(20_000_000_000), 5_000_000_000);
        assert_eq!(measured(40_000_000_000_000), 10_000_000_000_000);
        assert_eq!(measured(0), 1 << 27);
    }
}
