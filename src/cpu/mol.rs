//! `mol`: scores of items by a mixture of logits.
//!
//! Sixteen items are taken side by side, a panel: all three products are then of a small matrix with a panel, whose sums
//! stay in registers. Each item's sums have one order, whichever items are next to it.

use super::block::{Format, Packed, Unpack, with_format};
use super::simd::{self, Vector, Work, exp};
use super::{Call, threads};
use crate::dtype::BLOCK;
use crate::kernels::{ACTIVATION_SHIFT, ALIGNED, BOUND, GATHERED, MolParams};

/// Items side by side.
const LANES: usize = 16;

/// One number of each item.
type Row = [[f32; 8]; 2];

pub(crate) fn mol(mut call: Call<'_>) {
    let params: MolParams = call.params();
    let weight = call.weight;
    let [w, item_gates, queries, query_gates, gate, ids, scores] = call.operands();
    let mol = Mol {
        params,
        item_gates: item_gates.get(),
        queries: queries.get(),
        query_gates: query_gates.get(),
        gate: Gate::new(&params, gate.get()),
    };
    with_format!(weight, run(&mol, w.get(), ids.get(), scores.get_mut()));
}

/// The gate's weights by slots of pairs, padding included.
struct Gate {
    width: usize,
    /// `[H, width]`.
    w1: Vec<f32>,
    /// `[H]`.
    b1: Vec<f32>,
    /// `[width, H]`.
    w2: Vec<f32>,
    /// `[width]`.
    b2: Vec<f32>,
    /// Slots of pairs.
    slots: Vec<usize>,
}

impl Gate {
    fn new(params: &MolParams, packed: &[f32]) -> Gate {
        let hidden = params.hidden as usize;
        // Rows of twice the width and four numbers, and two more widths.
        let fours = |n: u32| n.div_ceil(4) as usize;
        let blocks = if params.flags & ALIGNED == 0 {
            fours(params.query_components) * fours(params.item_components)
        } else {
            fours(params.pairs.div_ceil(4))
        };
        let width = 16 * blocks;
        let (rows, tail) = packed.split_at(hidden * (2 * width + 4));
        let mut gate = Gate {
            width,
            w1: Vec::with_capacity(hidden * width),
            b1: Vec::with_capacity(hidden),
            w2: vec![0.0; width * hidden],
            b2: tail[..width].to_vec(),
            slots: (0..width).filter(|&slot| tail[width + slot] > 0.0).collect(),
        };
        for (h, row) in rows.chunks_exact(2 * width + 4).enumerate() {
            gate.w1.extend(&row[..width]);
            row[width..2 * width].iter().enumerate().for_each(|(slot, &w2)| gate.w2[slot * hidden + h] = w2);
            gate.b1.push(row[2 * width]);
        }
        gate
    }
}

struct Mol<'a> {
    params: MolParams,
    item_gates: &'a [f32],
    queries: &'a [f32],
    query_gates: &'a [f32],
    gate: Gate,
}

/// Unpacks the blocks of components from one of them on.
type UnpackAt<'a> = &'a (dyn Fn(usize, &mut [[f32; BLOCK]]) + Sync);

/// All that depends on the format. The rest is the same code for all of them, because it is much and unpacking is little of
/// the work.
fn run<F: Format>(mol: &Mol<'_>, w: &[u32], ids: &[u32], scores: &mut [f32]) {
    let w = Packed::<F>::new(w, mol.params.w_scales);
    let unpack = |first: usize, weights: &mut [[f32; BLOCK]]| {
        let packed = w.run(first, weights.len());
        simd::run(Unpack { packed, weights });
    };
    score(mol, &unpack, ids, scores);
}

fn score(mol: &Mol<'_>, unpack: UnpackAt<'_>, ids: &[u32], scores: &mut [f32]) {
    let params = &mol.params;
    let (n_queries, n_scores) = (params.n_queries as usize, params.n_scores as usize);
    let ops = (params.pairs * (params.quads * 4 + 2 * params.hidden)) as usize;
    let scores = &mut scores[..n_queries * n_scores];
    if params.flags & GATHERED != 0 {
        threads::for_each_chunk(scores, n_scores, n_queries * n_scores * ops, |query, scores| {
            let mut panel = Panel::new(params);
            for (scores, ids) in scores.chunks_mut(LANES).zip(ids[query * n_scores..].chunks(LANES)) {
                let ids = &ids[..scores.len()];
                // A number that is no item's stands for the first item, and its score is dropped.
                let item = |lane: usize| ids.get(lane).map_or(0, |&id| id as usize % params.n_items as usize);
                panel.load(mol, unpack, item);
                let found = panel.scores(mol, query);
                let lanes = scores.iter_mut().zip(ids).zip(found.as_flattened());
                lanes.filter(|((_, id), _)| **id < params.n_items).for_each(|((score, _), &found)| *score = found);
            }
        });
        return;
    }
    // Item by item first, so that threads share items out and not queries.
    let mut by_item = vec![0.0; n_queries * n_scores];
    threads::for_each_chunk(&mut by_item, LANES * n_queries, n_queries * n_scores * ops, |i, by_item| {
        let mut panel = Panel::new(params);
        panel.load(mol, unpack, |lane| (i * LANES + lane).min(n_scores - 1));
        for query in 0..n_queries {
            let found = panel.scores(mol, query);
            let lanes = by_item.chunks_exact_mut(n_queries).zip(found.as_flattened());
            lanes.for_each(|(scores, &found)| scores[query] = found);
        }
    });
    for (query, scores) in scores.chunks_exact_mut(n_scores).enumerate() {
        scores.iter_mut().zip(by_item[query..].iter().step_by(n_queries)).for_each(|(score, &found)| *score = found);
    }
}

/// Sixteen items, and what one query's scores of them are made of.
struct Panel {
    items: [usize; LANES],
    /// `[M, D]`.
    components: Vec<Row>,
    /// `[G]`.
    gates: Vec<Row>,
    /// `[N M]`, by components.
    products: Vec<Row>,
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
            items: [0; LANES],
            components: vec![Row::default(); (params.item_components * params.quads * 4) as usize],
            gates: vec![Row::default(); params.item_quads as usize * 4],
            products: vec![Row::default(); (params.query_components * params.item_components) as usize],
            logits: Vec::new(),
            hidden: vec![Row::default(); params.hidden as usize],
            gate: Vec::new(),
        }
    }

    /// Unpacks sixteen items and turns them on their side.
    fn load(&mut self, mol: &Mol<'_>, unpack: UnpackAt<'_>, item: impl Fn(usize) -> usize) {
        let params = &mol.params;
        let (n_items, n_blocks, dim) = (params.n_items as usize, params.blocks as usize, params.quads as usize * 4);
        let columns = params.item_quads as usize * 4;
        self.items = std::array::from_fn(item);
        let mut row = vec![[0.0; BLOCK]; n_blocks];
        for (lane, &item) in self.items.iter().enumerate() {
            for (m, component) in self.components.chunks_exact_mut(dim).enumerate() {
                unpack((m * n_items + item) * n_blocks, &mut row);
                component.iter_mut().zip(row.as_flattened()).for_each(|(to, &x)| to[lane / 8][lane % 8] = x);
            }
            let gates = &mol.item_gates[item * columns..][..columns];
            self.gates.iter_mut().zip(gates).for_each(|(to, &x)| to[lane / 8][lane % 8] = x);
        }
    }

    fn scores(&mut self, mol: &Mol<'_>, query: usize) -> Row {
        simd::run(Scores { panel: self, mol, query })
    }
}

/// The scores of a panel's items for one query.
struct Scores<'a, 'b> {
    panel: &'a mut Panel,
    mol: &'a Mol<'b>,
    query: usize,
}

impl Work for Scores<'_, '_> {
    type Output = Row;

    #[inline(always)]
    fn run<V: Vector>(self) -> Row {
        let Scores { panel, mol: Mol { params, queries, query_gates, gate, .. }, query } = self;
        let (n, m) = (params.query_components as usize, params.item_components as usize);
        let (dim, columns) = (params.quads as usize * 4, params.item_quads as usize * 4);
        let is_aligned = params.flags & ALIGNED != 0;
        let query_gates = &query_gates[query * columns..][..columns];
        let queries = &queries[query * n * dim..][..n * dim];
        panel.logits.clear();
        panel.logits.resize(gate.width, Row::default());
        if is_aligned {
            let components = queries.chunks_exact(dim).zip(panel.components.chunks_exact(dim));
            for ((f, g), l) in components.zip(&mut panel.logits) {
                product::<V, 1>(f, g, &[0.0], std::slice::from_mut(l));
            }
        } else {
            let zeros = [0.0; 64];
            for (g, l) in panel.components.chunks_exact(dim).zip(panel.products.chunks_exact_mut(n)) {
                product::<V, 4>(queries, g, &zeros[..n], l);
            }
            // Slots come in the order of pairs (n, m) within fours of n within fours of m.
            for (i, products) in panel.products.chunks_exact(n).enumerate() {
                for (j, &l) in products.iter().enumerate() {
                    panel.logits[16 * (i / 4 * n.div_ceil(4) + j / 4) + 4 * (j % 4) + i % 4] = l;
                }
            }
        }
        debug_assert_eq!(panel.components.len(), m * dim);
        if params.flags & BOUND != 0 {
            return gate.slots.iter().fold([[f32::MIN; 8]; 2], |top, &slot| zip(top, panel.logits[slot], f32::max));
        }

        if is_aligned {
            for ((h, &a), &b) in panel.hidden.iter_mut().zip(query_gates).zip(&panel.gates) {
                *h = b.map(|b| b.map(|b| a + b));
            }
        } else {
            product::<V, 6>(&gate.w1, &panel.logits, &gate.b1, &mut panel.hidden);
        }
        match params.flags >> ACTIVATION_SHIFT & 3 {
            0 => each(&mut panel.hidden, |z| z / (1.0 + exp::<V>(-z))),
            1 => each(&mut panel.hidden, |z| if z < 0.0 { 0.0 } else { z }),
            _ => {}
        }
        panel.gate.clear();
        panel.gate.resize(gate.width, Row::default());
        product::<V, 6>(&gate.w2, &panel.hidden, &gate.b2, &mut panel.gate);

        let combination = params.flags & 3;
        if !is_aligned {
            for ((z, &a), &b) in panel.gate.iter_mut().zip(query_gates).zip(&panel.gates) {
                *z = zip(*z, b, |c, b| if combination == 0 { a + b + c } else { a * b + c });
            }
        }
        if combination != 0 && !is_aligned {
            let (mut mean, mut factor) = (Row::default(), [[1.0; 8]; 2]);
            if combination == 2 {
                let n = gate.slots.len() as f32;
                let add = |sum: Row, z: Row| zip(sum, z, |sum, z| sum + z);
                let sum = gate.slots.iter().fold(Row::default(), |sum, &slot| add(sum, panel.gate[slot]));
                mean = sum.map(|sum| sum.map(|sum| sum / n));
                let square = |slot: usize| zip(panel.gate[slot], mean, |z, mean| (z - mean) * (z - mean));
                let squares = gate.slots.iter().fold(Row::default(), |sum, &slot| add(sum, square(slot)));
                factor = squares.map(|sum| sum.map(|sum| 1.0 / (sum / n + 1e-5).sqrt()));
            }
            for z in &mut panel.gate {
                let inner = zip(zip(*z, mean, |z, mean| mean - z), factor, |z, factor| z * factor);
                *z = zip(*z, inner, |z, inner| z / (1.0 + exp::<V>(inner)));
            }
        }
        let top = gate.slots.iter().fold([[f32::MIN; 8]; 2], |top, &slot| zip(top, panel.gate[slot], f32::max));
        let (mut sum, mut weights) = (Row::default(), Row::default());
        for &slot in &gate.slots {
            let e = zip(panel.gate[slot], top, |z, top| exp::<V>(z - top));
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
        for lane in 0..8 {
            y[lane] = f(a[lane], b[lane]);
        }
    }
    y
}

#[inline(always)]
fn each(rows: &mut [Row], f: impl Fn(f32) -> f32) {
    for eight in rows.as_flattened_mut() {
        for x in eight {
            *x = f(*x);
        }
    }
}

/// `y[m] = bias[m] + sum over k of a[m, k] x[k]`; so many rows of `a` share each load of `x`: the more, the fewer loads there
/// are for a multiplication, and six are what registers hold.
#[inline(always)]
fn product<V: Vector, const ROWS: usize>(a: &[f32], x: &[Row], bias: &[f32], y: &mut [Row]) {
    let k = x.len();
    for (i, (y, bias)) in y.chunks_mut(ROWS).zip(bias.chunks(ROWS)).enumerate() {
        // Rows past the end repeat the last one.
        let rows: [&[f32]; ROWS] = std::array::from_fn(|j| &a[(i * ROWS + j.min(y.len() - 1)) * k..][..k]);
        let mut sums = [[V::splat(0.0); 2]; ROWS];
        for (at, x) in x.iter().enumerate() {
            let x = [V::load(&x[0]), V::load(&x[1])];
            for (sums, row) in sums.iter_mut().zip(rows) {
                let a = V::splat(row[at]);
                *sums = [a.fma(x[0], sums[0]), a.fma(x[1], sums[1])];
            }
        }
        for ((y, sums), &bias) in y.iter_mut().zip(sums).zip(bias) {
            *y = sums.map(|sum| sum.lanes().map(|sum| sum + bias));
        }
    }
}
