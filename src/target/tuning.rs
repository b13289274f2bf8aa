//! Kernel choices measured to be faster on an adapter than the usual ones.

use std::collections::BTreeMap;

use crate::dtype::WeightType;
use crate::shaders::{self, Kernel, Tier};

/// Tuned choices for matrix products. Without any, the usual ones apply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    /// By measured bucket; `None` is the usual choice.
    choices: BTreeMap<Bucket, Option<Choice>>,
    /// The self-test's choice for all products of a kernel, whatever their bucket.
    forced: Option<(&'static str, Choice)>,
    /// Whether the second device was measured to be faster, by batch.
    places: BTreeMap<PlaceKey, bool>,
    /// Operations per second of the slowest prefill product measured.
    operations_rate: Option<u64>,
}

/// Text batches of one size, which run on one of two devices.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlaceKey {
    /// The encoder's shape.
    pub encoder: String,
    /// Name of the second device.
    pub second: String,
    /// Tokens and texts of a batch.
    pub n_tokens: u32,
    pub n_texts: u32,
}

/// Matrix products or mixtures of logits that share a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bucket {
    /// `matvec`, `gate_up`, `matmul`, `matmul_half` or `mol`.
    pub kernel: &'static str,
    /// Weight type of the matrix.
    pub weight: WeightType,
    /// Rows of the matrix, rounded up to a power of two.
    pub rows: u32,
    /// Blocks per row, rounded up to a power of two.
    pub blocks: u32,
    /// Tokens of a pass, or queries, rounded up to a power of two; 1 for `matvec` and `gate_up`.
    pub tokens: u32,
}

/// The variant of a kernel for a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Tier of the variant.
    pub tier: Tier,
    /// Invocations that share four rows of the matrix: a power of two up to 64, raised to the number of tokens side
    /// by side. For `matmul` and `matmul_half`, rows of a tile: 16, 32, 64, 128 or 256 (half for 8x8 matrices). For
    /// `mol`, queries side by side in an invocation: 1, 2 or 4. In the `scalar` tier 1, except for `mol`.
    pub size: u32,
    /// How tiles of `matmul_half` are computed in the tiers with cooperative matrices; plain for all other kernels.
    pub form: TileForm,
}

/// How a workgroup computes a tile by cooperative matrices. The bits are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TileForm {
    /// By four subgroups, with a barrier before and after operands are staged.
    #[default]
    Plain,
    /// Operands are staged in one half of the memory while those in the other are multiplied.
    TwoStages,
    /// By eight subgroups: tiles of 128 and 256 rows.
    EightSubgroups,
}

impl TileForm {
    /// All forms, the simplest first.
    pub const ALL: [TileForm; 3] = [TileForm::Plain, TileForm::TwoStages, TileForm::EightSubgroups];
}

impl Choice {
    /// A choice of a plain form.
    pub const fn new(tier: Tier, size: u32) -> Choice {
        Choice { tier, size, form: TileForm::Plain }
    }
}

impl Bucket {
    /// The bucket of `kernel` for `sizes`: rows, blocks per row and tokens; for mixtures of logits, pairs, blocks per
    /// component and queries.
    pub(crate) fn of(kernel: &Kernel, weight: WeightType, sizes: [u32; 3]) -> Bucket {
        let [rows, blocks, tokens] = sizes.map(|n| n.checked_next_power_of_two().unwrap_or(u32::MAX));
        let is_of_one = [shaders::MATVEC.name, shaders::GATE_UP.name].contains(&kernel.name);
        Bucket { kernel: kernel.name, weight, rows, blocks, tokens: if is_of_one { 1 } else { tokens } }
    }
}

impl Tuning {
    /// Choices that differ from the usual ones.
    pub fn choices(&self) -> impl Iterator<Item = (Bucket, Choice)> {
        self.measured().filter_map(|(bucket, choice)| Some((bucket, choice?)))
    }

    /// Measured buckets and their choices; `None` is the usual one.
    pub(crate) fn measured(&self) -> impl Iterator<Item = (Bucket, Option<Choice>)> {
        self.choices.iter().map(|(&bucket, &choice)| (bucket, choice))
    }

    /// Whether a bucket was measured, so that a load need not.
    pub(crate) fn is_measured(&self, bucket: Bucket) -> bool {
        self.choices.contains_key(&bucket)
    }

    /// Sets the choice for a bucket, which counts as measured; `None` is the usual one. Devices ignore a choice that
    /// they do not support.
    pub fn choose(&mut self, bucket: Bucket, choice: Option<Choice>) {
        self.choices.insert(bucket, choice);
    }

    /// Floating-point operations per second of the slowest prefill product measured, if any. Long dispatches are
    /// split by this rate.
    pub fn operations_rate(&self) -> Option<u64> {
        self.operations_rate
    }

    /// Sets the rate by which long dispatches are split.
    pub fn set_operations_rate(&mut self, rate: Option<u64>) {
        self.operations_rate = rate;
    }

    pub(crate) fn place(&self, key: &PlaceKey) -> Option<bool> {
        self.places.get(key).copied()
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = (&PlaceKey, bool)> {
        self.places.iter().map(|(key, &is_second)| (key, is_second))
    }

    pub(crate) fn put(&mut self, key: PlaceKey, is_second: bool) {
        self.places.insert(key, is_second);
    }

    /// Adds what another tuning has and this one lacks.
    pub(crate) fn add_missing(&mut self, other: &Tuning) {
        for (&bucket, &choice) in &other.choices {
            self.choices.entry(bucket).or_insert(choice);
        }
        for (key, &is_second) in &other.places {
            self.places.entry(key.clone()).or_insert(is_second);
        }
        self.operations_rate = self.operations_rate.or(other.operations_rate);
    }

    /// One choice for all products of a kernel.
    pub(crate) fn forcing(kernel: &Kernel, choice: Choice) -> Tuning {
        Tuning { forced: Some((kernel.name, choice)), ..Tuning::default() }
    }

    pub(crate) fn choice(&self, bucket: Bucket) -> Option<Choice> {
        let forced = self.forced.filter(|(kernel, _)| *kernel == bucket.kernel).map(|(_, choice)| choice);
        forced.or_else(|| self.choices.get(&bucket).copied().flatten())
    }
}
