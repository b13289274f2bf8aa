//! The table of kernels that `build.rs` links from `shaders/`.

use std::borrow::Cow;

use crate::dtype::{DType, WeightType};

/// What a shader variant asks of the adapter. Every kernel has a baseline variant; the others replace it where the
/// device's tier says so and they exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// T0: what every WebGPU adapter has.
    Baseline,
    /// T1: `shader-f16`, matrix tiles staged in half precision.
    F16,
    /// T2: subgroup operations, for subgroups of any size.
    Subgroups,
    /// T3: activations of `matmul` rounded to 8 bits where weights are Q8_0 or Q4_0, for products of packed bytes. It
    /// changes results, so it is used only where it is asked for.
    Int8,
    /// No workgroup memory and no barriers in matrix products, for software adapters.
    Scalar,
}

impl Tier {
    /// All tiers.
    pub const ALL: [Tier; 5] = [Tier::Baseline, Tier::F16, Tier::Subgroups, Tier::Int8, Tier::Scalar];

    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Baseline => "baseline",
            Tier::F16 => "f16",
            Tier::Subgroups => "subgroups",
            Tier::Int8 => "int8",
            Tier::Scalar => "scalar",
        }
    }
}

/// One storage binding; `params` is always binding 0 and a uniform, the others follow from 1.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    /// Name in the shader.
    pub name: &'static str,
    /// Whether the kernel writes it.
    pub writes: bool,
    /// What its elements are made of.
    pub dtype: DType,
}

/// One linked shader.
#[derive(Debug)]
pub struct Variant {
    /// Kernel, weight type and tier, joined with dots.
    pub label: &'static str,
    /// What it needs.
    pub tier: Tier,
    /// Weight type it unpacks, if the kernel has packed weights.
    pub weight: Option<WeightType>,
    /// Workgroup memory in bytes.
    pub workgroup_bytes: u32,
    /// The linked WGSL.
    pub source: &'static str,
}

impl Variant {
    /// The source as browsers want it: they require a directive for subgroups, which naga refuses.
    pub fn browser_source(&self) -> Cow<'static, str> {
        match self.tier {
            Tier::Subgroups => format!("enable subgroups;\n{}", self.source).into(),
            _ => self.source.into(),
        }
    }

    /// The source with an entry point that returns at once: a variant that computes wrongly, for tests.
    pub(crate) fn idle_source(&self, kernel: &Kernel) -> String {
        let entry = self.source.find(&format!("fn {}(", kernel.name)).unwrap_or_default();
        let body = self.source[entry..].find('{').map_or(0, |at| entry + at + 1);
        format!("{} if (true) {{ return; }}{}", &self.source[..body], &self.source[body..])
    }

    /// The source for the platform that this is compiled for.
    pub(crate) fn target_source(&self) -> Cow<'static, str> {
        if cfg!(target_arch = "wasm32") { self.browser_source() } else { self.source.into() }
    }
}

/// A kernel: its interface and its variants.
#[derive(Debug)]
pub struct Kernel {
    /// Name of the shader file, the entry point, the Rust module and the CPU twin.
    pub name: &'static str,
    /// Size of the params struct in bytes.
    pub params_size: u32,
    /// Storage bindings in order.
    pub bindings: &'static [Binding],
    /// All variants.
    pub variants: &'static [Variant],
}

impl Kernel {
    /// The variant for a weight type and a tier: the tier's own if it exists, else the baseline.
    pub fn variant(&self, weight: Option<WeightType>, tier: Tier) -> Option<&'static Variant> {
        let of = |tier| self.variants.iter().find(|v| v.weight == weight && v.tier == tier);
        of(tier).or_else(|| of(Tier::Baseline))
    }
}

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));
