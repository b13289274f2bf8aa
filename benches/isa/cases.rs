//! The compiled cases: shader variants with values of their overrides.

use tilewright::bench::shapes::{SHAPES, ShapePass};
use tilewright::shaders::{self, Kernel, Variant};
use tilewright::{Error, Target, TargetKind, TargetLimits, Tier, WeightType};

/// One shader as a device would compile it.
#[derive(Clone, Debug)]
pub struct Case {
    /// Title of the case's table: the kernel, or the pass of a model.
    pub group: String,
    /// Label of the variant with its constants.
    pub label: String,
    /// The kernel, and so the entry point.
    pub kernel: &'static str,
    pub weight: Option<WeightType>,
    pub tier: Tier,
    pub source: String,
    pub constants: Vec<(String, f64)>,
}

/// What the constants of pipelines depend on.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Invocations of the smallest and the largest subgroup.
    pub subgroup: [u32; 2],
    pub has_matrices: bool,
    /// Whether bytes become numbers by bits, see `TargetLimits::converts_slowly`.
    pub converts_slowly: bool,
}

/// Weight types in the default sample, one for each kind of block; the code of others differs little.
const SAMPLED: [WeightType; 6] =
    [WeightType::F32, WeightType::F16, WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_K, WeightType::Q6_K];

/// Every variant that a GPU may run, with the constants of models of 1 to 8 billion weights.
pub fn variants(machine: &Machine) -> Vec<Case> {
    let mut cases = Vec::new();
    for kernel in shaders::ALL {
        // Only software adapters use the scalar tier, and only Apple's GPUs have 8 x 8 matrices.
        for variant in kernel.variants.iter().filter(|v| !matches!(v.tier, Tier::Scalar | Tier::Matrix8)) {
            let mut constants = constants(kernel.name, variant.tier, machine.subgroup[1]);
            constants.iter_mut().for_each(|constants| constants.extend(parts(kernel.name, variant, constants)));
            cases.extend(constants.iter().map(|constants| Case::new(kernel.name, kernel, variant, constants)));
        }
    }
    cases.retain(|case| machine.has_matrices || !case.has_matrices());
    if machine.converts_slowly { cases.into_iter().map(Case::by_bits).collect() } else { cases }
}

/// The pipelines of some models' prefill and decode passes, as on a discrete GPU. Each is in the first tier that has
/// it.
pub fn passes(machine: &Machine) -> Result<Vec<Case>, Error> {
    // Limits that drivers of discrete GPUs report, as `AdapterReport::target` reads them.
    let limits = TargetLimits {
        max_workgroups: 65_535,
        max_binding_bytes: (1 << 31) - 256,
        max_dispatch_operations: 1 << 38,
        min_subgroup: machine.subgroup[0],
        max_subgroup: machine.subgroup[1],
        converts_slowly: machine.converts_slowly,
        max_workgroup_bytes: 48 << 10,
        max_splits: 8,
        params_stride: 256,
    };
    let mut cases: Vec<Case> = Vec::new();
    // The default tier, and those that a user may choose.
    let tiers = [Tier::Subgroups, Tier::F16, Tier::Matrix16];
    for tier in tiers.into_iter().filter(|tier| machine.has_matrices || tier.matrix_size().is_none()) {
        let target = Target::new(TargetKind::Gpu, tier, limits);
        for shape in SHAPES {
            for n_tokens in [1, 512] {
                let pass = ShapePass { n_tokens, context_length: 4096 };
                let recording = shape.record(&target, WeightType::Q4_K, pass)?;
                let tokens = if n_tokens == 1 { "token" } else { "tokens" };
                let name = format!("{}, {n_tokens} {tokens}, ", shape.name);
                let group = format!("{name}tier {}", tier.name());
                for dispatch in recording.dispatches() {
                    let case = Case::new(&group, dispatch.kernel(), dispatch.variant(), dispatch.constants());
                    let is_known = |known: &Case| known.group.starts_with(&name) && known.label == case.label;
                    if !cases.iter().any(is_known) {
                        cases.push(case);
                    }
                }
            }
        }
    }
    Ok(cases)
}

/// The loads of a block that neighbours share in a product with one vector, as `MatvecPlan` has them.
fn parts(kernel: &str, variant: &Variant, constants: &[(&str, f64)]) -> Option<(&'static str, f64)> {
    let shares =
        ["matvec", "gate_up", "expert_gate_up", "expert_down", "matvec_lora", "gate_up_lora"].contains(&kernel);
    let is_of_one = shares && constants.iter().all(|(name, _)| *name != "COLUMNS");
    let parts = match variant.weight?.layout() {
        WeightType::F32 => 8.0,
        WeightType::F16 | WeightType::BF16 => 4.0,
        _ => return None,
    };
    is_of_one.then_some(("PARTS", parts))
}

/// The constants of a kernel's pipelines in a tier, one list per pipeline.
fn constants(kernel: &str, tier: Tier, subgroup: u32) -> Vec<Vec<(&'static str, f64)>> {
    let sizes = |small: f64, more: &[(&'static str, f64)]| {
        [small, 2.0 * small].map(|size| [&[("TILE", size), ("GUARDED", 0.0)], more].concat()).to_vec()
    };
    // For a product with one vector.
    let of_one = [("LANES", 64.0), ("WG", 128.0)];
    match (kernel, tier) {
        // Norms may be fused into a block's input products, never into its output products.
        ("expert_gate_up", _) => vec![of_one.to_vec(), [&of_one[..], &[("NORM", 1.0)]].concat()],
        ("matvec" | "gate_up", _) => {
            // Sums of two or four tokens use fewer registers than those of eight, so test them separately.
            let few: &[f64] = if kernel == "matvec" && tier == Tier::Subgroups { &[2.0, 4.0] } else { &[] };
            let columns = |&n: &f64| vec![("LANES", 64.0), ("COLUMNS", n)];
            let of_one = of_one.to_vec();
            let with_norm = |mut constants: Vec<_>| {
                constants.push(("NORM", 1.0));
                constants
            };
            let all = [of_one.clone(), with_norm(of_one), columns(&8.0), with_norm(columns(&8.0))];
            all.into_iter().chain(few.iter().map(columns)).collect()
        }
        ("expert_down" | "matvec_lora" | "gate_up_lora", _) => vec![of_one.to_vec()],
        ("matmul_half", _) => {
            // Rows and columns of tiles, subgroups side by side, and stages.
            let tiles = [[16, 256, 4, 1], [32, 128, 4, 1], [64, 64, 2, 1], [128, 128, 2, 1], [128, 128, 2, 2]];
            let has_matrices = tier.matrix_size().is_some();
            let constants = |[rows, cols, across, stages]: [u32; 4]| {
                let mut constants = vec![("ROWS", rows), ("COLS", cols), ("GUARDED", 0)];
                if has_matrices {
                    constants.extend([("SUBGROUP", subgroup), ("ACROSS", across)]);
                }
                if stages > 1 {
                    constants.push(("STAGES", stages));
                }
                constants.into_iter().map(|(name, value)| (name, f64::from(value))).collect()
            };
            tiles.into_iter().filter(|[.., stages]| has_matrices || *stages == 1).map(constants).collect()
        }
        ("half_rows", _) => vec![vec![("NORM", 1.0)], vec![("GATED", 1.0)]],
        ("matmul" | "matmul_plain", _) => sizes(64.0, &[]),
        // Heads of 64 and 128 elements, and norms of heads.
        ("attention_prefill", _) => vec![vec![("PARTS", 1.0)], vec![("PARTS", 2.0)]],
        ("attention_half", _) => {
            [64.0, 128.0].map(|dim| vec![("HEAD_DIM", dim), ("SUBGROUP", f64::from(subgroup))]).to_vec()
        }
        ("attention_decode", _) => vec![vec![("ROWS", 4.0)], vec![("ROWS", 2.0), ("NORM", 1.0)]],
        ("rope_kv", _) => vec![vec![], vec![("NORM", 1.0)]],
        // 4 x 4, 4 x 8 and 8 x 8 components, each with the host's number of queries per batch.
        ("mol", _) => [[4.0, 1.0, 1.0], [2.0, 1.0, 2.0], [1.0, 2.0, 4.0]]
            .map(|[queries, n4, blocks]| vec![("QUERIES", queries), ("N4", n4), ("BLOCKS", blocks)])
            .to_vec(),
        _ => vec![vec![]],
    }
}

impl Case {
    fn new(group: &str, kernel: &'static Kernel, variant: &Variant, constants: &[(&str, f64)]) -> Case {
        let named = constants.iter().map(|(name, value)| format!(" {name}={value}"));
        Case {
            group: group.to_string(),
            label: format!("{}{}", variant.label, named.collect::<String>()),
            kernel: kernel.name,
            weight: variant.weight,
            tier: variant.tier,
            source: variant.source(),
            constants: constants.iter().map(|&(name, value)| (name.to_string(), value)).collect(),
        }
    }

    /// Whether the case is in the default sample: all variants are eight times as many.
    pub fn is_sampled(&self) -> bool {
        self.weight.is_none_or(|weight| SAMPLED.contains(&weight))
    }

    pub fn has_matrices(&self) -> bool {
        self.tier.matrix_size().is_some()
    }

    /// Products per invocation in one round of the hot loop of a packed matrix with vectors: of a block of four rows
    /// or a part of it, or of two quads of them with each column.
    pub fn products_per_round(&self) -> Option<u32> {
        let of_vectors = ["matvec", "gate_up", "expert_gate_up", "expert_down"].contains(&self.kernel);
        let parts = self.constant("PARTS").map_or(1, |parts| parts as u32);
        of_vectors.then(|| if self.columns() > 1 { 4 * 8 * self.columns() } else { 4 * 32 / parts })
    }

    /// Weights of a round.
    pub fn weights_per_round(&self) -> Option<u32> {
        Some(self.products_per_round()? / self.columns())
    }

    /// Tokens that an invocation multiplies side by side.
    pub fn columns(&self) -> u32 {
        self.constant("COLUMNS").map_or(1, |columns| columns as u32)
    }

    /// Whether it unpacks bytes, and so has two ways to do that.
    pub fn has_bytes(&self) -> bool {
        self.source.contains("\noverride BY_BITS")
    }

    /// The case as on GPUs that convert slowly.
    pub fn by_bits(mut self) -> Case {
        if self.has_bytes() && self.constant("BY_BITS").is_none() {
            self.label.push_str(" BY_BITS=1");
            self.constants.push(("BY_BITS".into(), 1.0));
        }
        self
    }

    /// Value of a pipeline constant, if given.
    pub fn constant(&self, name: &str) -> Option<f64> {
        self.constants.iter().find(|(known, _)| known == name).map(|&(_, value)| value)
    }
}
