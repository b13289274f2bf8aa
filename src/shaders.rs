//! The table of kernels that `build.rs` links from `shaders/`, the structs of their params and their constants.

use std::marker::PhantomData;
use std::ops::Deref;

use bytemuck::Pod;

use crate::dtype::{DType, WeightType};
use crate::platform::IS_BROWSER;

/// What a shader variant asks of the adapter. Every kernel has a baseline variant, but for those in half precision, in whose
/// place `matmul` and `attention_prefill` stand; the others replace it where the device's tier says so and they exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// T0: what every WebGPU adapter has.
    Baseline,
    /// T1: `shader-f16`, products of many rows in half precision.
    F16,
    /// T2: subgroup operations, for subgroups of any size.
    Subgroups,
    /// No workgroup memory and no barriers in matrix products, for software adapters.
    Scalar,
    /// T3: matrix products and attention from cooperative matrices of 8 x 8 in half precision; never in a browser.
    Matrix8,
    /// T3, of 16 x 16.
    Matrix16,
}

impl Tier {
    /// All tiers.
    pub const ALL: [Tier; 6] =
        [Tier::Baseline, Tier::F16, Tier::Subgroups, Tier::Scalar, Tier::Matrix8, Tier::Matrix16];

    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Baseline => "baseline",
            Tier::F16 => "f16",
            Tier::Subgroups => "subgroups",
            Tier::Scalar => "scalar",
            Tier::Matrix8 => "matrix8",
            Tier::Matrix16 => "matrix16",
        }
    }

    /// Tiers whose variants a device of this tier takes, best first.
    pub fn order(self) -> &'static [Tier] {
        match self {
            Tier::Baseline => &[Tier::Baseline],
            // Of subgroups only where a target has them, see `Target::tier_for`.
            Tier::F16 => &[Tier::F16, Tier::Subgroups, Tier::Baseline],
            Tier::Subgroups => &[Tier::Subgroups, Tier::Baseline],
            Tier::Scalar => &[Tier::Scalar, Tier::Baseline],
            // Cooperative matrices are operations of a subgroup.
            Tier::Matrix8 => &[Tier::Matrix8, Tier::F16, Tier::Subgroups, Tier::Baseline],
            Tier::Matrix16 => &[Tier::Matrix16, Tier::F16, Tier::Subgroups, Tier::Baseline],
        }
    }

    /// Rows and columns of the tier's cooperative matrices, if it has them. No browser has such tiers.
    pub fn matrix_size(self) -> Option<u32> {
        match self {
            Tier::Matrix8 => Some(8),
            Tier::Matrix16 => Some(16),
            _ => None,
        }
    }

    /// Whether matrix products round their operands to half precision, which changes results.
    pub fn rounds_to_half(self) -> bool {
        self == Tier::F16 || self.matrix_size().is_some()
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

/// A field of a kernel's uniform struct `params`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamField {
    /// Name in the shader.
    pub name: &'static str,
    /// Type in WGSL, such as `u32` or `array<vec4<u32>, 2>`.
    pub wgsl_type: &'static str,
    /// Byte offset in the struct.
    pub offset_bytes: u32,
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
    /// Which of `PARTS` its source consists of.
    parts: &'static [u16],
}

impl Variant {
    /// The linked WGSL.
    pub fn source(&self) -> String {
        self.parts.iter().map(|&part| PARTS[usize::from(part)]).collect()
    }

    /// Whether the source declares this override.
    pub(crate) fn has_override(&self, name: &str) -> bool {
        let declares = |line: &str| line.strip_prefix("override ").is_some_and(|rest| rest.starts_with(name));
        self.parts.iter().any(|&part| PARTS[usize::from(part)].lines().any(declares))
    }

    /// The source as browsers want it: they require a directive for subgroups, which naga refuses.
    pub fn browser_source(&self) -> String {
        match self.tier {
            Tier::Subgroups => format!("enable subgroups;\n{}", self.source()),
            _ => self.source(),
        }
    }

    /// The source with an entry point that returns at once: a variant that computes wrongly, for tests.
    pub(crate) fn idle_source(&self, kernel: &Kernel) -> String {
        let source = self.source();
        let entry = source.find(&format!("fn {}(", kernel.name)).unwrap_or_default();
        let body = source[entry..].find('{').map_or(0, |at| entry + at + 1);
        format!("{} if (true) {{ return; }}{}", &source[..body], &source[body..])
    }

    /// The source for the platform that this is compiled for.
    pub(crate) fn target_source(&self) -> String {
        if IS_BROWSER { self.browser_source() } else { self.source() }
    }
}

/// A kernel: its interface and its variants.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) id: Id,
    /// Name of the shader file, the entry point, the Rust module and the CPU reference kernel.
    pub name: &'static str,
    /// Size of the params struct in bytes.
    pub params_size: u32,
    /// Its fields, without those that only fill it up. None in a browser, where nothing reads them.
    pub params: &'static [ParamField],
    /// Storage bindings in order.
    pub bindings: &'static [Binding],
    /// All variants.
    pub variants: &'static [Variant],
}

impl Kernel {
    /// The variant for a weight type and a tier: the first in the tier's order.
    pub fn variant(&self, weight: Option<WeightType>, tier: Tier) -> Option<&'static Variant> {
        self.variants_for(weight, tier).next()
    }

    /// All variants for a weight type's layout that a tier may take, in its order.
    pub fn variants_for(&self, weight: Option<WeightType>, tier: Tier) -> impl Iterator<Item = &'static Variant> {
        let weight = weight.map(WeightType::layout);
        let of = move |tier: &Tier| self.variants.iter().find(|v| v.weight == weight && v.tier == *tier);
        tier.order().iter().filter_map(of)
    }
}

/// A kernel with some functions of its shader replaced, to measure what they cost.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Debug)]
pub(crate) struct Ablation {
    /// The kernel as it is.
    pub kernel: &'static Kernel,
    /// Its variants for some weight types, with functions replaced.
    pub variants: &'static [Variant],
}

/// A kernel whose params are a `P`.
#[derive(Debug)]
pub struct KernelOf<P> {
    pub(crate) kernel: Kernel,
    params: PhantomData<fn(P)>,
}

impl<P> KernelOf<P> {
    const fn new(kernel: Kernel) -> KernelOf<P> {
        KernelOf { kernel, params: PhantomData }
    }
}

/// The params of a kernel from what its shader reads.
pub(crate) fn read_params<P: Pod>(bytes: &[u8]) -> P {
    bytemuck::pod_read_unaligned(&bytes[..size_of::<P>()])
}

impl<P: Pod> KernelOf<P> {
    /// The params as the shader reads them: whatever fills its struct up is zero.
    pub(crate) fn params_bytes(&self, params: &P) -> Vec<u8> {
        let mut bytes = vec![0; self.params_size as usize];
        bytes[..size_of::<P>()].copy_from_slice(bytemuck::bytes_of(params));
        bytes
    }
}

impl<P> Deref for KernelOf<P> {
    type Target = Kernel;

    fn deref(&self) -> &Kernel {
        &self.kernel
    }
}

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));
