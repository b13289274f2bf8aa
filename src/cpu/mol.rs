//! `mol`: scores of items by a mixture of logits.
//!
//! Sixteen items are taken side by side, a panel: all three products are then of a small matrix, packed four rows at a time,
//! with a panel, and their sums stay in registers. Each item's sums have one order, whichever items are next to it.

use super::activation::Silu;
use super::block::{Block, Packed};
use super::simd::{self, Exp, Function, Instructions, Lanes, Numbers, WideWork};
use super::{Call, threads};
use crate::dtype::BLOCK;
use crate::shaders::overrides;
use crate::shaders::params::MolParams;

/// Items side by side.
const LANES: usize = 16;
/// Items that a thread scores at a time.
const TILE: usize = 8 * LANES;

/// One number of each item.
type Row = [f32; LANES];

pub(crate) fn mol(mut call: Call<'_>) {
    let params: MolParams = call.params();
    let (weight, plan) = (call.weight, ScorePlan::of(&call));
    let [w, item_gates, queries, query_gates, gate, ids, scores] = call.operands();
    let (n, dim) = (params.query_components as usize, params.quads as usize * 4);
    let queries = &queries.get::<f32>()[..params.n_queries as usize * n * dim];
    let mol = Mol {
        params,
        plan,
        item_gates: item_gates.get(),
        queries: match plan.is_aligned {
            true => queries.to_vec(),
            false => queries.chunks_exact(n * dim).flat_map(|rows| fours(rows, dim)).collect(),
        },
        query_gates: query_gates.get(),
        gate: Gate::new(&params, plan.is_aligned, gate.get()),
    };
    let w = Packed::new(weight, w.get(), params.w_scales);
    let unpack = |first: &[usize], weights: &mut [Block]| {
        // Chosen items lie anywhere in memory. Copied right after each other they are all waited for at once.
        let (units, tails) = w.gather(first, params.blocks as usize);
        w.of(&units, &tails).unpack(weights);
    };
    score(&mol, &unpack, ids.get(), scores.get_mut());
}

/// What the overrides of `shaders/mol.wgsl` say.
#[derive(Clone, Copy)]
struct ScorePlan {
    combination: u32,
    activation: u32,
    is_aligned: bool,
    is_gathered: bool,
    is_bound: bool,
}

impl ScorePlan {
    fn of(call: &Call<'_>) -> ScorePlan {
        ScorePlan {
            combination: call.constant(overrides::COMBINE),
            activation: call.constant(overrides::ACT),
            is_aligned: call.is(overrides::ALIGNED),
            is_gathered: call.is(overrides::GATHERED),
            is_bound: call.is(overrides::BOUND),
        }
    }
}

/// The gate's weights by slots of pairs, padding included.
struct Gate {
    width: usize,
    /// `[H, width]`, in fours.
    w1: Vec<f32>,
    /// `[H]`.
    b1: Vec<f32>,
    /// `[width, H]`, in fours.
    w2: Vec<f32>,
    /// `[width]`.
    b2: Vec<f32>,
    /// Slots of pairs.
    slots: Vec<usize>,
}

impl Gate {
    fn new(params: &MolParams, is_aligned: bool, packed: &[f32]) -> Gate {
        let hidden = params.hidden as usize;
        // Rows of twice the width and four numbers, and two more widths.
        let blocks = match is_aligned {
            true => params.pairs.div_ceil(16),
            false => params.query_components.div_ceil(4) * params.item_components.div_ceil(4),
        };
        let width = 16 * blocks as usize;
        let (rows, tail) = packed.split_at(hidden * (2 * width + 4));
        let (mut w1, mut w2) = (Vec::with_capacity(hidden * width), vec![0.0; width * hidden]);
        let mut b1 = Vec::with_capacity(hidden);
        for (h, row) in rows.chunks_exact(2 * width + 4).enumerate() {
            w1.extend(&row[..width]);
            row[width..2 * width].iter().enumerate().for_each(|(slot, &w)| w2[slot * hidden + h] = w);
            b1.push(row[2 * width]);
        }
        Gate {
            width,
            w1: fours(&w1, width),
            b1,
            w2: fours(&w2, hidden),
            b2: tail[..width].to_vec(),
            slots: (0..width).filter(|&slot| tail[width + slot] > 0.0).collect(),
        }
    }
}

/// A matrix with rows of `k` in fours of rows, `[rows / 4, k, 4]`, with zeros behind the last row: what four sums need next
/// lies side by side.
fn fours(rows: &[f32], k: usize) -> Vec<f32> {
    let n_rows = rows.len() / k.max(1);
    let mut packed = vec![0.0; n_rows.next_multiple_of(4) * k];
    for (i, row) in rows.chunks_exact(k.max(1)).enumerate() {
        row.iter().enumerate().for_each(|(at, &x)| packed[(i / 4 * k + at) * 4 + i % 4] = x);
    }
    packed
}

struct Mol<'a> {
    params: MolParams,
    plan: ScorePlan,
    item_gates: &'a [f32],
    /// `[queries, N, D]`; the components of each in fours unless they are aligned.
    queries: Vec<f32>,
    query_gates: &'a [f32],
    gate: Gate,
}

/// Unpacks components, each from its first block on.
type UnpackEach<'a> = &'a (dyn Fn(&[usize], &mut [Block]) + Sync);

fn score(mol: &Mol<'_>, unpack: UnpackEach<'_>, ids: &[u32], scores: &mut [f32]) {
    let params = &mol.params;
    let (n_queries, n_scores) = (params.n_queries as usize, params.n_scores as usize);
    let ops = n_queries * n_scores * (params.pairs * (params.quads * 4 + 2 * params.hidden)) as usize;
    let scores = &mut scores[..n_queries * n_scores];
    if mol.plan.is_gathered {
        threads::for_each_tile(scores, n_scores, 0..n_scores, [1, TILE], ops, |panel: &mut Option<Panel>, mut tile| {
            let panel = panel.get_or_insert_with(|| Panel::new(params));
            let (query, columns) = (tile.rows.start, tile.columns.clone());
            let ids = &ids[query * n_scores..][columns];
            for scores in tile.rows_mut() {
                for (scores, ids) in scores.chunks_mut(LANES).zip(ids.chunks(LANES)) {
                    // A number that is no item's stands for the first item, and its score is dropped.
                    let item = |lane: usize| ids.get(lane).map_or(0, |&id| id as usize % params.n_items as usize);
                    panel.load(mol, unpack, item);
                    let lanes = scores.iter_mut().zip(ids).zip(panel.scores(mol, query));
                    lanes.filter(|((_, id), _)| **id < params.n_items).for_each(|((score, _), found)| *score = found);
                }
            }
        });
        return;
    }
    let shape = [n_queries, LANES];
    threads::for_each_tile(scores, n_scores, 0..n_scores, shape, ops, |panel: &mut Option<Panel>, mut tile| {
        let panel = panel.get_or_insert_with(|| Panel::new(params));
        let columns = tile.columns.clone();
        panel.load(mol, unpack, |lane| columns.start + lane.min(columns.len() - 1));
        for (query, scores) in tile.rows_mut().enumerate() {
            scores.copy_from_slice(&panel.scores(mol, query)[..scores.len()]);
        }
    });
}

/// Sixteen items, and what one query's scores of them are made of.
struct Panel {
    /// The first block of each component of each item.
    first: Vec<usize>,
    /// The components, unpacked: `[M, LANES, blocks]`.
    rows: Vec<Block>,
    /// `[M, D]`.
    components: Vec<Row>,
    /// `[G]`.
    gates: Vec<Row>,
    /// `[width]`: l.
    logits: Vec<Row>,
    /// `[H]`.
    hidden: Vec<Row>,
    /// `[width]`: c, then the gate.
    gate: Vec<Row>,
}

impl Panel {
    fn new(params: &MolParams) -> Panel {
        Panel {
            first: Vec::new(),
            rows: vec![[0.0; BLOCK]; (params.item_components * params.blocks) as usize * LANES],
            components: vec![Row::default(); (params.item_components * params.quads * 4) as usize],
            gates: vec![Row::default(); params.item_quads as usize * 4],
            logits: Vec::new(),
            hidden: vec![Row::default(); params.hidden as usize],
            gate: Vec::new(),
        }
    }

    /// Unpacks sixteen items and turns them on their side.
    fn load(&mut self, mol: &Mol<'_>, unpack: UnpackEach<'_>, item: impl Fn(usize) -> usize) {
        let params = &mol.params;
        let (n_items, n_blocks, dim) = (params.n_items as usize, params.blocks as usize, params.quads as usize * 4);
        let columns = params.item_quads as usize * 4;
        let items: [usize; LANES] = std::array::from_fn(item);
        let row = |m: usize, item: usize| (m * n_items + item) * n_blocks;
        self.first.clear();
        self.first.extend((0..params.item_components as usize).flat_map(|m| items.map(|item| row(m, item))));
        unpack(&self.first, &mut self.rows);
        for (component, rows) in self.components.chunks_exact_mut(dim).zip(self.rows.chunks_exact(LANES * n_blocks)) {
            for (lane, row) in rows.chunks_exact(n_blocks).enumerate() {
                component.iter_mut().zip(row.as_flattened()).for_each(|(to, &x)| to[lane] = x);
            }
        }
        for (lane, item) in items.into_iter().enumerate() {
            let gates = &mol.item_gates[item * columns..][..columns];
            self.gates.iter_mut().zip(gates).for_each(|(to, &x)| to[lane] = x);
        }
    }

    fn scores(&mut self, mol: &Mol<'_>, query: usize) -> Row {
        let mut found = Row::default();
        simd::run_wide(Scores { panel: self, mol, query, found: &mut found });
        found
    }
}

/// The scores of a panel's items for one query.
struct Scores<'a, 'b> {
    panel: &'a mut Panel,
    mol: &'a Mol<'b>,
    query: usize,
    found: &'a mut Row,
}

impl WideWork for Scores<'_, '_> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(mut self) {
        // As many sums as there are registers for them.
        *self.found = match LEN {
            LANES => self.score::<LEN, L, 1, 4, 4>(),
            _ => self.score::<LEN, L, 2, 1, 1>(),
        };
    }
}

impl Scores<'_, '_> {
    /// `V` vectors make a row. At a time, a product takes `FOURS` times four rows of the gate's weights, or four of the query's
    /// components and `SETS` of the items'.
    #[inline(always)]
    fn score<const LEN: usize, L: Lanes<LEN>, const V: usize, const FOURS: usize, const SETS: usize>(&mut self) -> Row {
        let Scores { panel, mol: Mol { params, plan, queries, query_gates, gate, .. }, query, .. } = self;
        let &ScorePlan { combination, activation, is_aligned, is_bound, .. } = plan;
        let (n, m) = (params.query_components as usize, params.item_components as usize);
        let (dim, columns) = (params.quads as usize * 4, params.item_quads as usize * 4);
        let query_gates = &query_gates[*query * columns..][..columns];
        let len = queries.len() / params.n_queries as usize;
        let queries = &queries[*query * len..][..len];
        panel.logits.clear();
        panel.logits.resize(gate.width, Row::default());
        if is_aligned {
            let components = queries.chunks_exact(dim).zip(panel.components.chunks_exact(dim));
            for ((f, g), l) in components.zip(&mut panel.logits) {
                *l = dot::<LEN, L, V>(f, g);
            }
        } else {
            // Slots come in the order of pairs (n, m) within fours of n within fours of m.
            for (i, g) in panel.components.chunks(4 * dim).enumerate() {
                let n_sets = g.len() / dim;
                for (j, f) in queries.chunks_exact(4 * dim).enumerate() {
                    let logits = &mut panel.logits[16 * (i * n.div_ceil(4) + j)..][..16];
                    for first in (0..n_sets).step_by(SETS) {
                        // Sets past the end repeat the last one.
                        let sets: [&[Row]; SETS] =
                            std::array::from_fn(|s| &g[(first + s).min(n_sets - 1) * dim..][..dim]);
                        let sums = multiply::<LEN, L, V, 1, SETS>([f], sets, [[0.0; 4]]);
                        for (s, [sums]) in sums.into_iter().enumerate().take(n_sets - first) {
                            for (r, sums) in sums.into_iter().enumerate() {
                                store(sums, &mut logits[4 * r + first + s]);
                            }
                        }
                    }
                }
            }
        }
        debug_assert_eq!(panel.components.len(), m * dim);
        if is_bound {
            return gate.slots.iter().fold([f32::MIN; LANES], |top, &slot| zip(top, panel.logits[slot], f32::max));
        }

        if is_aligned {
            for ((h, &a), &b) in panel.hidden.iter_mut().zip(query_gates).zip(&panel.gates) {
                *h = b.map(|b| a + b);
            }
        } else {
            product::<LEN, L, V, FOURS>(&gate.w1, &panel.logits, &gate.b1, &mut panel.hidden);
        }
        match activation {
            0 => simd::each::<L>(panel.hidden.as_flattened_mut(), &Silu),
            1 => simd::each::<L>(panel.hidden.as_flattened_mut(), &Relu),
            _ => {}
        }
        panel.gate.resize(gate.width, Row::default());
        product::<LEN, L, V, FOURS>(&gate.w2, &panel.hidden, &gate.b2, &mut panel.gate);

        if !is_aligned {
            for ((z, &a), &b) in panel.gate.iter_mut().zip(query_gates).zip(&panel.gates) {
                *z = zip(*z, b, |c, b| if combination == 0 { a + b + c } else { a * b + c });
            }
        }
        if combination != 0 && !is_aligned {
            let (mut mean, mut factor) = (Row::default(), [1.0; LANES]);
            if combination == 2 {
                let n = gate.slots.len() as f32;
                let add = |sum: Row, z: Row| zip(sum, z, |sum, z| sum + z);
                let sum = gate.slots.iter().fold(Row::default(), |sum, &slot| add(sum, panel.gate[slot]));
                mean = sum.map(|sum| sum / n);
                let square = |slot: usize| zip(panel.gate[slot], mean, |z, mean| (z - mean) * (z - mean));
                let squares = gate.slots.iter().fold(Row::default(), |sum, &slot| add(sum, square(slot)));
                factor = squares.map(|sum| 1.0 / (sum / n + 1e-5).sqrt());
            }
            for z in &mut panel.gate {
                let mut inner = zip(zip(*z, mean, |z, mean| mean - z), factor, |z, factor| z * factor);
                simd::each::<L>(&mut inner, &Exp);
                *z = zip(*z, inner, |z, exp| z / (1.0 + exp));
            }
        }
        let top = gate.slots.iter().fold([f32::MIN; LANES], |top, &slot| zip(top, panel.gate[slot], f32::max));
        let (mut sum, mut weights) = (Row::default(), Row::default());
        for &slot in &gate.slots {
            let mut e = zip(panel.gate[slot], top, |z, top| z - top);
            simd::each::<L>(&mut e, &Exp);
            sum = zip(sum, zip(e, panel.logits[slot], |e, l| e * l), |a, b| a + b);
            weights = zip(weights, e, |a, b| a + b);
        }
        zip(sum, weights, |a, b| a / b)
    }
}

// Loops and not `array::map`: what that calls is not always inlined, and then compiled without the vector's instructions.
#[inline(always)]
fn zip(a: Row, b: Row, f: impl Fn(f32, f32) -> f32) -> Row {
    let mut y = Row::default();
    for (y, (a, b)) in y.iter_mut().zip(a.iter().zip(&b)) {
        *y = f(*a, *b);
    }
    y
}

/// Zero below zero.
struct Relu;

impl Function for Relu {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        x.at_least(0.0)
    }
}

/// The vectors of a row.
#[inline(always)]
fn load<const LEN: usize, L: Lanes<LEN>, const V: usize>(x: &Row) -> [L; V] {
    let mut vectors = [L::splat(0.0); V];
    for (vector, x) in vectors.iter_mut().zip(x.as_chunks().0) {
        *vector = L::load(x);
    }
    vectors
}

#[inline(always)]
fn store<const LEN: usize, L: Lanes<LEN>, const V: usize>(vectors: [L; V], y: &mut Row) {
    for (vector, y) in vectors.into_iter().zip(y.as_chunks_mut().0) {
        vector.store(y);
    }
}

/// One row times `x`.
#[inline(always)]
fn dot<const LEN: usize, L: Lanes<LEN>, const V: usize>(a: &[f32], x: &[Row]) -> Row {
    let mut sums = [L::splat(0.0); V];
    for (&a, x) in a.iter().zip(x) {
        for (sum, x) in sums.iter_mut().zip(load::<LEN, L, V>(x)) {
            *sum = L::splat(a).fma(x, *sum);
        }
    }
    let mut y = Row::default();
    store(sums, &mut y);
    y
}

/// Four rows of sums of each set and each four.
type Sums<L, const V: usize, const FOURS: usize, const SETS: usize> = [[[[L; V]; 4]; FOURS]; SETS];

/// `first + a x`, where each `x` is a set of `K` rows and each `a` is `[K, 4]`, four rows of a matrix.
#[inline(always)]
fn multiply<const LEN: usize, L: Lanes<LEN>, const V: usize, const FOURS: usize, const SETS: usize>(
    a: [&[f32]; FOURS],
    x: [&[Row]; SETS],
    first: [[f32; 4]; FOURS],
) -> Sums<L, V, FOURS, SETS> {
    let n = x[0].len();
    let a = a.map(|a| &a.as_chunks::<4>().0[..n]);
    let x = x.map(|x| &x[..n]);
    let mut sums = [[[[L::splat(0.0); V]; 4]; FOURS]; SETS];
    for sums in &mut sums {
        for (sums, first) in sums.iter_mut().zip(first) {
            for (sums, first) in sums.iter_mut().zip(first) {
                *sums = [L::splat(first); V];
            }
        }
    }
    for k in 0..n {
        let mut vectors = [[L::splat(0.0); V]; SETS];
        for (vectors, x) in vectors.iter_mut().zip(x) {
            *vectors = load(&x[k]);
        }
        for (i, a) in a.iter().enumerate() {
            for (j, &a) in a[k].iter().enumerate() {
                let a = L::splat(a);
                for (sums, x) in sums.iter_mut().zip(vectors) {
                    for (sum, x) in sums[i][j].iter_mut().zip(x) {
                        *sum = a.fma(x, *sum);
                    }
                }
            }
        }
    }
    sums
}

/// `y[m] = bias[m] + sum over k of a[m, k] x[k]`, the rows of `a` in fours; `FOURS` of them share each load of `x`.
#[inline(always)]
fn product<const LEN: usize, L: Lanes<LEN>, const V: usize, const FOURS: usize>(
    a: &[f32],
    x: &[Row],
    bias: &[f32],
    y: &mut [Row],
) {
    let n_fours = y.len().div_ceil(4);
    for (i, (y, bias)) in y.chunks_mut(4 * FOURS).zip(bias.chunks(4 * FOURS)).enumerate() {
        // Fours past the end repeat the last one.
        let a: [&[f32]; FOURS] =
            std::array::from_fn(|f| &a[(FOURS * i + f).min(n_fours - 1) * 4 * x.len()..][..4 * x.len()]);
        let mut first = [[0.0; 4]; FOURS];
        first.as_flattened_mut()[..bias.len()].copy_from_slice(bias);
        let [sums] = multiply::<LEN, L, V, FOURS, 1>(a, [x], first);
        for (y, sums) in y.iter_mut().zip(sums.as_flattened()) {
            store(*sums, y);
        }
    }
}
