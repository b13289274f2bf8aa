//! Choices that were measured to be faster on an adapter than the usual ones.

use std::collections::BTreeMap;

use crate::dtype::WeightType;
use crate::shaders::{self, Kernel, Tier};

/// Choices for matrix products; empty, it changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    choices: BTreeMap<Bucket, Choice>,
    /// What the self-test wants of all products of a kernel, whatever their bucket.
    forced: Option<(&'static str, Choice)>,
    /// Batches that another device takes sooner (or not), where that was measured.
    places: BTreeMap<PlaceKey, bool>,
    /// Operations per second of the slowest product of a prompt that was measured.
    operations_rate: Option<u64>,
}

/// Batches of texts that go to one of two devices.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlaceKey {
    /// The encoder's shape.
    pub encoder: String,
    /// Name of the other device.
    pub second: String,
    /// Tokens of a batch, and texts.
    pub n_tokens: u32,
    pub n_texts: u32,
}

/// Matrix products, or mixtures of logits, for which one choice is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bucket {
    /// `matvec`, `gate_up`, `matmul`, `matmul_half` or `mol`.
    pub kernel: &'static str,
    /// Weight type of the matrix.
    pub weight: WeightType,
    /// Rows of the matrix, rounded up to a power of two.
    pub rows: u32,
    /// Blocks of its rows, rounded up to a power of two.
    pub blocks: u32,
    /// Tokens of a pass, or queries, rounded up to a power of two; 1 for `matvec` and `gate_up`.
    pub tokens: u32,
}

/// How a kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Tier of the variant.
    pub tier: Tier,
    /// Invocations that share four rows of the matrix, a power of two up to 64 (more where there are more tokens side by side);
    /// rows of a tile of `matmul` and `matmul_half`, 16, 32, 64 or 128 (half of that with matrices of 8 x 8); queries that an
    /// invocation of `mol` takes side by side, 1, 2 or 4. For other kernels 1 in the `scalar` tier.
    pub size: u32,
}

impl Bucket {
    /// The bucket of products of `kernel` with a matrix of so many rows and blocks for so many tokens; of mixtures of logits
    /// with so many pairs, blocks of a component, and queries.
    pub(crate) fn of(kernel: &Kernel, weight: WeightType, sizes: [u32; 3]) -> Bucket {
        let [rows, blocks, tokens] = sizes.map(|n| n.checked_next_power_of_two().unwrap_or(u32::MAX));
        let is_of_one = [shaders::MATVEC.name, shaders::GATE_UP.name].contains(&kernel.name);
        Bucket { kernel: kernel.name, weight, rows, blocks, tokens: if is_of_one { 1 } else { tokens } }
    }
}

impl Tuning {
    /// Choices that differ from the usual ones.
    pub fn choices(&self) -> impl Iterator<Item = (Bucket, Choice)> {
        self.choices.iter().map(|(&bucket, &choice)| (bucket, choice))
    }

    /// Makes a choice for a bucket; `None` is the usual one. One that a device cannot follow is not followed.
    pub fn choose(&mut self, bucket: Bucket, choice: Option<Choice>) {
        match choice {
            Some(choice) => self.choices.insert(bucket, choice),
            None => self.choices.remove(&bucket),
        };
    }

    /// Floating-point operations per second of the slowest of a prompt's products that were measured, if any were. Dispatches
    /// are cut by it.
    pub fn operations_rate(&self) -> Option<u64> {
        self.operations_rate
    }

    /// Sets the rate by which dispatches are cut.
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

    /// One choice for all products of a kernel.
    pub(crate) fn forcing(kernel: &Kernel, choice: Choice) -> Tuning {
        Tuning { forced: Some((kernel.name, choice)), ..Tuning::default() }
    }

    pub(crate) fn choice(&self, bucket: Bucket) -> Option<Choice> {
        let forced = self.forced.filter(|(kernel, _)| *kernel == bucket.kernel).map(|(_, choice)| choice);
        forced.or_else(|| self.choices.get(&bucket).copied())
    }
}
