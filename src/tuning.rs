//! What is known of an adapter and its driver beyond features and limits: shader variants that compute wrongly on it,
//! found by the self-test before a result is given out, and choices of variants that were measured to be faster than the
//! usual ones. Natively both are kept in a file, in a browser by the page if it asks for the measurements.

// The build with kernels alone keeps nothing.
#[cfg_attr(all(target_arch = "wasm32", not(feature = "web")), expect(dead_code))]
mod file;
mod measure;
pub(crate) mod operands;
mod self_test;
mod tested;

use std::collections::BTreeMap;

use crate::dtype::{DType, WeightType};
use crate::kernels::MolForm;
use crate::matrix::Matrix;
use crate::shaders::{self, Kernel, Tier};

#[cfg(not(target_arch = "wasm32"))]
pub(crate) use file::{from_folder, write};
#[cfg(not(target_arch = "wasm32"))]
pub use measure::tune;
pub(crate) use measure::tune_products;
pub use measure::{Timed, TunedRow};
pub(crate) use self_test::{record_tested, self_test, while_testing};
pub(crate) use tested::Tested;

/// Choices for matrix products; empty, it changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    choices: BTreeMap<Bucket, Choice>,
    /// What the self-test wants of all products of a kernel, whatever their bucket.
    forced: Option<(&'static str, Choice)>,
    /// Batches that another device takes sooner (or not), where that was measured.
    places: BTreeMap<PlaceKey, bool>,
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
    /// `matvec`, `gate_up`, `matmul` or `mol`.
    pub kernel: &'static str,
    /// Weight type of the matrix.
    pub weight: WeightType,
    /// Rows of the matrix, rounded up to a power of two.
    pub rows: u32,
    /// Blocks of its rows, rounded up to a power of two.
    pub blocks: u32,
    /// Tokens of a pass, rounded up to a power of two; 1 for all kernels but `matmul`.
    pub tokens: u32,
}

/// How a kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Tier of the variant.
    pub tier: Tier,
    /// Invocations that share four rows of the matrix, a power of two up to 64; rows and columns of a tile of `matmul`, 64
    /// or 128 (half of that with matrices of 8 x 8); queries that an invocation of `mol` takes side by side, 1, 2 or 4. For
    /// other kernels 1 in the `scalar` tier.
    pub size: u32,
}

impl Bucket {
    /// The bucket of products of `kernel` with `w` for so many tokens.
    pub fn of(kernel: &Kernel, w: &Matrix, n_tokens: u32) -> Bucket {
        let n_tokens = if kernel.name == shaders::MATMUL.name { n_tokens } else { 1 };
        let [rows, blocks, tokens] =
            [w.rows(), w.blocks(), n_tokens].map(|n| n.checked_next_power_of_two().unwrap_or(u32::MAX));
        Bucket { kernel: kernel.name, weight: w.weight(), rows, blocks, tokens }
    }

    /// The bucket of mixtures of logits with so many pairs (its rows), such components (its blocks) and queries (its tokens).
    pub(crate) fn of_mixture(form: &MolForm, items: &Matrix, n_queries: u32) -> Bucket {
        let [rows, blocks, tokens] = [form.n_pairs(), items.blocks(), n_queries].map(u32::next_power_of_two);
        Bucket { kernel: shaders::MOL.name, weight: items.weight(), rows, blocks, tokens }
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

    pub(crate) fn place(&self, key: &PlaceKey) -> Option<bool> {
        self.places.get(key).copied()
    }

    pub(crate) fn put(&mut self, key: PlaceKey, is_second: bool) {
        self.places.insert(key, is_second);
    }

    /// One choice for all products of a kernel.
    fn forcing(kernel: &Kernel, choice: Choice) -> Tuning {
        Tuning { forced: Some((kernel.name, choice)), ..Tuning::default() }
    }

    pub(crate) fn choice(&self, bucket: Bucket) -> Option<Choice> {
        let forced = self.forced.filter(|(kernel, _)| *kernel == bucket.kernel).map(|(_, choice)| choice);
        forced.or_else(|| self.choices.get(&bucket).copied())
    }
}

/// Largest normalised mean squared error of results that count as the same; products that are staged in half precision
/// reach 2e-7.
const MAX_NMSE: f64 = 1e-6;

/// Says how outputs of the same kernels differ, if they do by more than a normalised mean squared error of [`MAX_NMSE`].
fn compare((dtype, got): &(DType, Vec<u32>), (_, want): &(DType, Vec<u32>)) -> Result<(), String> {
    if *dtype == DType::U32 {
        let differs = got.iter().zip(want).find(|(got, want)| got != want);
        return differs.map_or(Ok(()), |(got, want)| Err(format!("it gave {got} for {want}")));
    }
    let (mut noise, mut power) = (0.0, 0.0);
    for (&got, &want) in got.iter().zip(want) {
        let [got, want] = [got, want].map(|bits| f64::from(f32::from_bits(bits)));
        noise += (got - want).powi(2);
        power += want.powi(2);
    }
    // Written so that a NaN fails.
    if noise <= MAX_NMSE * power { Ok(()) } else { Err(format!("its error is {:.1e} of the result", noise / power)) }
}
