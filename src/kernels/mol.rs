//! Mixture of logits.

use super::{grid_parts, tier_for};
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::matrix::{Matrix, file_row_bytes};
use crate::recording::Recorder;
use crate::shaders::params::MolParams;
use crate::shaders::{self, Tier};
use crate::target::{Bucket, Target};
use crate::tensor::{Role, Tensor, TensorWriter};

/// Which components of query and item form pairs, and what their gate sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Each with each; the gate sees all logits, and numbers of the query and of the item. arXiv:2407.15462.
    Cross,
    /// The first with the first and so on; the gate is a perceptron of query and item side by side, whose first layer is
    /// the sum of what it makes of each.
    Aligned,
}

/// How the gate of a mixture of crossed pairs comes from `A` of the query, `B` of the item and `C` of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combination {
    /// `A + B + C`.
    Sum,
    /// `z * sigmoid(z)` with `z = A * B + C`.
    GluSilu,
    /// `z * sigmoid(z')`, where `z'` is `z` normalised to mean 0 and variance 1 over the pairs.
    GluSiluLn,
}

/// Activation of the gate's hidden layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MolActivation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `x`.
    Identity,
}

/// The sizes and the form of a mixture of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MolForm {
    /// N: components of a query.
    pub query_components: u32,
    /// M: components of an item.
    pub item_components: u32,
    /// H: width of the gate's hidden layer; 0 if the gate does not see the logits.
    pub hidden: u32,
    /// Which components form pairs.
    pub pairing: Pairing,
    /// How the gate's parts are combined.
    pub combination: Combination,
    /// Of the hidden layer.
    pub activation: MolActivation,
}

impl MolForm {
    /// P: pairs of components.
    pub fn n_pairs(&self) -> u32 {
        match self.pairing {
            Pairing::Cross => self.query_components.saturating_mul(self.item_components),
            Pairing::Aligned => self.query_components,
        }
    }

    /// Blocks of 4 x 4 pairs that the kernel keeps in registers.
    pub(crate) fn blocks(&self) -> u32 {
        match self.pairing {
            Pairing::Cross => self.query_components.div_ceil(4).saturating_mul(self.item_components.div_ceil(4)),
            Pairing::Aligned => self.query_components.div_ceil(16),
        }
    }

    /// G: columns of the gates of queries and items.
    pub fn gate_columns(&self) -> u32 {
        match self.pairing {
            Pairing::Cross => 16 * self.blocks(),
            Pairing::Aligned => self.hidden.next_multiple_of(4),
        }
    }

    /// Where the kernel keeps pair `p`, which is component `p / M` of the query with `p % M` of the item.
    pub(crate) fn slot(&self, p: usize) -> usize {
        match self.pairing {
            Pairing::Cross => {
                let [n, m] = [p / self.item_components as usize, p % self.item_components as usize];
                let block = m / 4 * self.query_components.div_ceil(4) as usize + n / 4;
                16 * block + 4 * (n % 4) + m % 4
            }
            Pairing::Aligned => p,
        }
    }

    /// Rows of numbers, one for each pair (of aligned pairs, for each hidden unit), as [`mol`] takes them: `[rows, G]`.
    pub fn gate_rows(&self, values: &[f32]) -> Vec<f32> {
        let (from, to) = match self.pairing {
            Pairing::Cross => (self.n_pairs() as usize, self.gate_columns() as usize),
            Pairing::Aligned => (self.hidden as usize, self.gate_columns() as usize),
        };
        let mut rows = vec![0.0; values.len() / from.max(1) * to];
        for (row, values) in rows.chunks_exact_mut(to.max(1)).zip(values.chunks_exact(from.max(1))) {
            for (i, &value) in values.iter().enumerate() {
                row[if self.pairing == Pairing::Cross { self.slot(i) } else { i }] = value;
            }
        }
        rows
    }

    /// Refuses sizes that the kernel has no registers for.
    ///
    /// # Errors
    /// [`Error::Operand`] if there are no components, more than 64 pairs once both numbers are rounded up to fours, or
    /// aligned pairs of unequal numbers.
    pub fn check(&self) -> Result<(), Error> {
        let [n, m] = [self.query_components, self.item_components];
        let is_paired = self.pairing == Pairing::Cross || n == m;
        if n > 0 && m > 0 && self.blocks() <= 4 && is_paired && (self.pairing == Pairing::Cross || self.hidden > 0) {
            return Ok(());
        }
        Err(Error::Operand {
            kernel: shaders::MOL.name,
            operand: "form",
            expected: "components in fours whose product is at most 64, or up to 64 aligned ones and a hidden layer"
                .into(),
            found: format!("{n} x {m} components, {:?}, {} hidden", self.pairing, self.hidden),
        })
    }

    /// Bytes of an item: components of `dim` numbers, and its gate.
    pub fn item_bytes(&self, storage: WeightType, dim: u32) -> u64 {
        let row = file_row_bytes(storage, dim as usize) as u64;
        u64::from(self.item_components) * row + 4 * u64::from(self.gate_columns().max(4))
    }

    /// Multiplications and additions of the components' products for one score.
    pub fn dot_operations(&self, dim: u32) -> u64 {
        2 * u64::from(dim) * u64::from(self.n_pairs())
    }

    /// Multiplications and additions for one score.
    pub fn operations(&self, dim: u32) -> u64 {
        let layers = if self.pairing == Pairing::Cross { 4 } else { 2 };
        self.dot_operations(dim) + layers * u64::from(self.n_pairs()) * u64::from(self.hidden)
    }
}

/// The part of a gate that every score goes through, packed for the kernel.
#[derive(Clone, Debug)]
pub struct MolGate {
    form: MolForm,
    packed: Tensor,
}

/// Weights of [`MolGate`].
#[derive(Clone, Copy, Debug)]
pub struct MolGateWeights<'a> {
    /// `[H, P]`; empty for aligned pairs, where the first layer is in the gates of queries and items.
    pub w1: &'a [f32],
    /// `[H]`; likewise.
    pub b1: &'a [f32],
    /// `[P, H]`.
    pub w2: &'a [f32],
    /// `[P]`.
    pub b2: &'a [f32],
}

impl MolGate {
    /// Packs and uploads the weights.
    ///
    /// # Errors
    /// [`Error::Operand`] if the form is none that the kernel has, or a weight has another length; errors of
    /// [`TensorWriter::write_words`].
    pub fn new(device: &dyn TensorWriter, form: MolForm, weights: &MolGateWeights<'_>) -> Result<MolGate, Error> {
        form.check()?;
        let (hidden, pairs) = (form.hidden as usize, form.n_pairs() as usize);
        let first = if form.pairing == Pairing::Cross { hidden } else { 0 };
        for (operand, found, expected) in [
            ("w1", weights.w1.len(), first * pairs),
            ("b1", weights.b1.len(), first),
            ("w2", weights.w2.len(), pairs * hidden),
            ("b2", weights.b2.len(), pairs),
        ] {
            if found != expected {
                let (expected, found) = (format!("{expected} numbers"), format!("{found} numbers"));
                return Err(Error::Operand { kernel: shaders::MOL.name, operand, expected, found });
            }
        }
        let width = 16 * form.blocks() as usize;
        let row = 2 * width + 4;
        let mut packed = vec![0.0f32; hidden * row + 2 * width];
        let (rows, tail) = packed.split_at_mut(hidden * row);
        for (h, row) in rows.chunks_exact_mut(row).enumerate() {
            for p in 0..pairs {
                row[form.slot(p)] = weights.w1.get(h * pairs + p).copied().unwrap_or_default();
                row[width + form.slot(p)] = weights.w2[p * hidden + h];
            }
            row[2 * width] = weights.b1.get(h).copied().unwrap_or_default();
        }
        for (p, &b2) in weights.b2.iter().enumerate() {
            tail[form.slot(p)] = b2;
            tail[width + form.slot(p)] = 1.0;
        }
        let tensor = Tensor::declare("mol.gate", Role::Activations, &[packed.len() as u32], DType::F32)?;
        device.write_words(&tensor, 0, bytemuck::cast_slice(&packed))?;
        Ok(MolGate { form, packed: tensor })
    }

    /// The form that the weights are of.
    pub fn form(&self) -> &MolForm {
        &self.form
    }
}

/// What [`mol`] computes.
#[derive(Clone, Copy, Debug)]
pub enum MolScores<'a> {
    /// The score of every item for every query.
    All,
    /// The scores of some items: `[B, K]`, which items for each query. Scores of numbers that are no item's are not
    /// written.
    Of(&'a Tensor),
    /// For every item the highest logit, which no score exceeds by more than rounding.
    Bounds,
}

/// Queries and items of [`mol`].
#[derive(Clone, Copy, Debug)]
pub struct MolOperands<'a> {
    /// `[M I, D]`: the first component of all I items, then the second. F32, F16 or Q8_0, in one slab.
    pub items: &'a Matrix,
    /// `[I, G]`: B of the items, or what the first layer makes of them, as [`MolForm::gate_rows`] gives them.
    pub item_gates: &'a Tensor,
    /// `[B, N D]`, D a multiple of 4.
    pub queries: &'a Tensor,
    /// `[B, G]`: A of the queries, likewise.
    pub query_gates: &'a Tensor,
}

/// Records the scores of items for queries by a mixture of logits, in one pass over the items. Shader:
/// `shaders/mol.wgsl`. An item's score does not depend on which other items and queries are in the pass.
///
/// # Shapes
/// `scores`: `[B, I]`, or `[B, K]` of items by their ids.
/// # Errors
/// [`Error::Shape`] or [`Error::Operand`] if an operand disagrees with the gate's form or with the others.
pub fn mol(
    rec: &mut Recorder,
    gate: &MolGate,
    operands: &MolOperands<'_>,
    what: MolScores<'_>,
    scores: &Tensor,
) -> Result<(), Error> {
    let (kernel, form) = (&shaders::MOL, gate.form);
    let MolOperands { items, item_gates, queries, query_gates } = *operands;
    let [n_queries, n_scores] = scores.dims2(kernel.name, "scores")?;
    let (dim, n_items) = (items.cols(), items.rows() / form.item_components);
    if !dim.is_multiple_of(4) || n_items * form.item_components != items.rows() {
        return Err(Error::Operand {
            kernel: kernel.name,
            operand: "w",
            expected: format!("a multiple of {} rows and of 4 columns", form.item_components),
            found: format!("{} x {dim}", items.rows()),
        });
    }
    // Without a gate there is a column that is never read.
    let columns = form.gate_columns().max(4);
    item_gates.expect_shape(kernel.name, "item_gates", &[n_items, columns])?;
    queries.expect_shape(kernel.name, "queries", &[n_queries, form.query_components * dim])?;
    query_gates.expect_shape(kernel.name, "query_gates", &[n_queries, columns])?;
    let slab = items.only_slab(kernel.name)?;
    let (ids, is_gathered, is_bound) = match what {
        MolScores::All => (&slab.words, false, false),
        MolScores::Of(ids) => (ids, true, false),
        MolScores::Bounds => (&slab.words, false, true),
    };
    if is_gathered {
        ids.expect_shape(kernel.name, "ids", &[n_queries, n_scores])?;
    } else {
        scores.expect_shape(kernel.name, "scores", &[n_queries, n_items])?;
    }
    let quads = dim / 4;
    let tier = tier_for(rec.target(), kernel, Some(items.weight()), u64::from(quads) + u64::from(form.hidden) + 1);
    let is_cross = form.pairing == Pairing::Cross;
    let queries_each = if is_gathered { 1 } else { mol_tile(rec.target(), &form, items, n_queries) };
    let on = |set: bool| f64::from(u8::from(set));
    let constants = [
        ("QUERIES", f64::from(queries_each)),
        ("N4", f64::from(if is_cross { form.query_components.div_ceil(4) } else { 1 })),
        ("BLOCKS", f64::from(form.blocks())),
        ("COMBINE", f64::from(if is_cross { form.combination as u32 } else { 0 })),
        ("ACT", f64::from(form.activation as u32)),
        ("ALIGNED", on(!is_cross)),
        ("GATHERED", on(is_gathered)),
        ("BOUND", on(is_bound)),
    ];
    let wg = if tier == Tier::Scalar { 8 } else { 64 };
    let n_groups = u64::from(n_scores.div_ceil(wg)) * u64::from(n_queries.div_ceil(queries_each));
    let each = if is_bound { form.dot_operations(dim) } else { form.operations(dim) };
    let operations = u64::from(n_queries) * u64::from(n_scores) * each;
    for part in grid_parts(rec.target(), n_groups, operations) {
        let params = MolParams {
            n_queries,
            n_items,
            n_scores,
            quads,
            blocks: items.blocks(),
            w_scales: items.quants_words(slab),
            hidden: form.hidden,
            item_quads: columns / 4,
            query_components: form.query_components,
            item_components: form.item_components,
            pairs: form.n_pairs(),
            first_group: part.first,
        };
        let operands = [&slab.words, item_gates, queries, query_gates, &gate.packed, ids, scores];
        rec.dispatch_as(tier, kernel, Some(items.weight()), &constants, params, &operands, part.grid)?;
    }
    Ok(())
}

/// Numbers of queries that an invocation may take side by side.
pub(crate) const MOL_TILES: [u32; 3] = [1, 2, 4];

/// Queries that an invocation takes side by side where all items are scored, so that each weight of the gate that it loads
/// serves as many. The target's tuning comes first.
pub(crate) fn mol_tile(target: &Target, form: &MolForm, items: &Matrix, n_queries: u32) -> u32 {
    if form.pairing == Pairing::Aligned {
        return 1;
    }
    let tier = target.tier_for(&shaders::MOL, Some(items.weight()));
    let tuned =
        target.tuning().choice(Bucket::of(&shaders::MOL, items.weight(), [form.n_pairs(), items.blocks(), n_queries]));
    let tuned = tuned.filter(|choice| choice.tier == tier && MOL_TILES.contains(&choice.size));
    let usual = match (tier, form.blocks()) {
        (Tier::Scalar, _) | (_, 1) => 4,
        // More do not fit a GPU's registers: RADV spills 213 of 2 queries' 64 pairs, and what it predicts for a query is a
        // third of one query's rate (benches/record/isa).
        (_, 2) => 2,
        _ => 1,
    };
    tuned.map_or(usual, |choice| choice.size).min(n_queries.next_power_of_two())
}
