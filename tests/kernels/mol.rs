//! `mol`: mixtures of logits.

use tilewright::WeightType;
use tilewright::kernels::{
    self, Combination, MolActivation, MolForm, MolGate, MolGateWeights, MolOperands, MolScores, Pairing,
};

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND, sum_rounding};
use crate::inputs::{Inputs, Source, dequantise};
use crate::softmax::exp_rounding;

/// Form of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    All,
    Of,
    Bounds,
}

#[derive(Clone, Copy)]
struct Shape {
    n_queries: u32,
    n_items: u32,
    dim: u32,
}

pub fn cases(cases: &mut Vec<Case>) {
    let mut push = |inputs, weight: WeightType, form: MolForm, shape: Shape, what: What| {
        let MolForm { query_components: n, item_components: m, hidden, pairing, combination, activation } = form;
        let Shape { n_queries, n_items, dim } = shape;
        cases.push(Case {
            kernel: "mol",
            variant: format!("{weight}+{pairing:?}+{combination:?}+{activation:?}+{what:?}"),
            sizes: format!("n={n},m={m},d={dim},h={hidden},b={n_queries},i={n_items}"),
            inputs,
            build: Box::new(move |source| mol(source, weight, form, shape, what)),
        });
    };
    let cross = |n, m, hidden| MolForm {
        query_components: n,
        item_components: m,
        hidden,
        pairing: Pairing::Cross,
        combination: Combination::GluSilu,
        activation: MolActivation::Silu,
    };
    let shape = |n_queries, n_items, dim| Shape { n_queries, n_items, dim };
    let few = shape(3, 37, 32);
    // Software adapters take seconds to compile each form with many pairs, so most cases have few.
    for inputs in Inputs::ALL {
        push(inputs, WeightType::F32, cross(4, 4, 16), few, What::All);
    }
    for weight in [WeightType::F32, WeightType::F16, WeightType::Q8_0] {
        for (n, m, dim, hidden) in [(1, 1, 4, 1), (3, 5, 12, 7), (4, 1, 64, 128)] {
            push(Inputs::Normal, weight, cross(n, m, hidden), shape(5, 65, dim), What::All);
        }
    }
    push(Inputs::Normal, WeightType::F16, cross(8, 4, 128), shape(5, 65, 64), What::All);
    push(Inputs::Normal, WeightType::F16, cross(8, 4, 31), shape(5, 65, 128), What::All);
    push(Inputs::Normal, WeightType::F16, cross(8, 8, 128), shape(5, 65, 32), What::All);
    push(Inputs::Normal, WeightType::F16, cross(4, 16, 17), shape(1, 9, 32), What::All);
    for what in [What::Of, What::Bounds] {
        push(Inputs::Normal, WeightType::F16, cross(8, 8, 31), few, what);
        push(Inputs::Normal, WeightType::F32, cross(3, 5, 31), few, what);
    }
    for combination in [Combination::Sum, Combination::GluSilu, Combination::GluSiluLn] {
        for activation in [MolActivation::Silu, MolActivation::Relu, MolActivation::Identity] {
            let form = MolForm { combination, activation, ..cross(3, 3, 15) };
            push(Inputs::Normal, WeightType::F16, form, few, What::All);
        }
    }
    push(
        Inputs::Normal,
        WeightType::F16,
        MolForm { combination: Combination::GluSiluLn, ..cross(5, 3, 15) },
        few,
        What::All,
    );
    // A gate without the logits as input.
    push(Inputs::Normal, WeightType::F32, MolForm { combination: Combination::Sum, ..cross(4, 4, 0) }, few, What::All);
    for (n, hidden) in [(1, 1), (8, 16), (17, 31)] {
        for what in [What::All, What::Of] {
            let form = MolForm { pairing: Pairing::Aligned, activation: MolActivation::Relu, ..cross(n, n, hidden) };
            push(Inputs::Normal, WeightType::F16, form, few, what);
        }
    }
    // Around an invocation's number of queries, and a workgroup's number of items.
    for (n_queries, n_items) in [(1, 1), (1, 63), (2, 64), (4, 65), (6, 129), (7, 8), (33, 9)] {
        push(Inputs::Uniform, WeightType::F16, cross(4, 4, 16), shape(n_queries, n_items, 32), What::All);
        push(Inputs::Uniform, WeightType::F16, cross(4, 4, 16), shape(n_queries, n_items, 32), What::Of);
    }
}

/// A number and its f32 error bound.
#[derive(Clone, Copy, Default)]
pub struct Near(pub f64, pub f64);

impl Near {
    fn map(self, value: f64, slope: f64, rounding: f64) -> Near {
        Near(value, self.1 * slope + rounding * value.abs() + FLUSH)
    }

    /// The sum of products with exact numbers.
    pub fn dot(terms: impl Iterator<Item = (f64, Near)>) -> Near {
        let (mut sum, mut size, mut error, mut n) = (0.0, 0.0, 0.0, 0);
        for (w, Near(x, off)) in terms {
            (sum, size, error, n) = (sum + w * x, size + (w * x).abs(), error + w.abs() * off, n + 1);
        }
        Near(sum, error + size * sum_rounding(n) + FLUSH)
    }
}

/// `z * sigmoid(inner)`, with both error bounds.
pub fn gated(z: Near, inner: Near) -> Near {
    let sigmoid = 1.0 / (1.0 + (-inner.0).exp());
    let value = z.0 * sigmoid;
    let slope = sigmoid * (1.0 - sigmoid);
    let off = z.1 * sigmoid + z.0.abs() * slope * inner.1;
    Near(value, off + value.abs() * (exp_rounding(inner.0.abs().min(88.0)) + 4.0 * ROUND) + FLUSH)
}

/// Parts of a score: logits by component, the gate's layers, softmax.
struct Oracle<'a> {
    form: MolForm,
    w1: &'a [f64],
    b1: &'a [f64],
    w2: &'a [f64],
    b2: &'a [f64],
}

impl Oracle<'_> {
    fn gates(&self, l: &[Near], a: &[f64], b: &[f64]) -> Vec<Near> {
        let (hidden, pairs) = (self.form.hidden as usize, l.len());
        let is_cross = self.form.pairing == Pairing::Cross;
        let act = |z: Near| match self.form.activation {
            MolActivation::Silu => gated(z, z),
            MolActivation::Relu => z.map(z.0.max(0.0), 1.0, 0.0),
            MolActivation::Identity => z,
        };
        let layer: Vec<Near> = (0..hidden)
            .map(|h| {
                if is_cross {
                    let terms = (0..pairs).map(|p| (self.w1[h * pairs + p], l[p]));
                    act(Near::dot(terms.chain([(1.0, Near(self.b1[h], 0.0))])))
                } else {
                    act(Near::dot([(1.0, Near(a[h], 0.0)), (1.0, Near(b[h], 0.0))].into_iter()))
                }
            })
            .collect();
        let c = |p: usize| {
            let terms = (0..hidden).map(|h| (self.w2[p * hidden + h], layer[h]));
            Near::dot(terms.chain([(1.0, Near(self.b2[p], 0.0))]))
        };
        if !is_cross {
            return (0..pairs).map(c).collect();
        }
        let z: Vec<Near> = (0..pairs)
            .map(|p| match self.form.combination {
                Combination::Sum => {
                    Near::dot([(1.0, Near(a[p], 0.0)), (1.0, Near(b[p], 0.0)), (1.0, c(p))].into_iter())
                }
                _ => Near::dot([(a[p], Near(b[p], 0.0)), (1.0, c(p))].into_iter()),
            })
            .collect();
        match self.form.combination {
            Combination::Sum => z,
            Combination::GluSilu => z.iter().map(|&z| gated(z, z)).collect(),
            Combination::GluSiluLn => {
                let n = pairs as f64;
                let mean = z.iter().map(|z| z.0).sum::<f64>() / n;
                let off = z.iter().map(|z| z.1 + z.0.abs() * sum_rounding(pairs)).fold(0.0, f64::max);
                let variance = z.iter().map(|z| (z.0 - mean).powi(2)).sum::<f64>() / n;
                let factor = 1.0 / (variance + 1e-5).sqrt();
                let normed = |z: Near| {
                    let value = (z.0 - mean) * factor;
                    // Errors of z shift the mean and scale the deviation by at most their own size.
                    Near(
                        value,
                        (2.0 * off * factor) * (1.0 + value.abs()) + value.abs() * (sum_rounding(pairs) + 8.0 * ROUND),
                    )
                };
                z.iter().map(|&z| gated(z, normed(z))).collect()
            }
        }
    }

    fn score(&self, l: &[Near], a: &[f64], b: &[f64]) -> Expected {
        let gates = self.gates(l, a, b);
        let top = gates.iter().map(|g| g.0).fold(f64::MIN, f64::max);
        let e: Vec<f64> = gates.iter().map(|g| (g.0 - top).exp()).collect();
        let sum: f64 = e.iter().sum();
        let value = e.iter().zip(l).map(|(e, l)| e / sum * l.0).sum::<f64>();
        // A gate's error is its weight's relative error: it moves the mean by the logit's distance from the mean.
        let off = gates.iter().map(|g| {
            let argument = (top - g.0).min(200.0);
            (g.1 + ROUND * g.0.abs() + exp_rounding(argument) + sum_rounding(l.len())).min(50.0).exp_m1()
        });
        let spread = e.iter().zip(l).zip(off).map(|((e, l), off)| e / sum * off * (l.0 - value).abs()).sum::<f64>();
        let own = e.iter().zip(l).map(|(e, l)| e / sum * (l.1 + sum_rounding(gates.len()) * l.0.abs()));
        let power = l.iter().map(|l| l.0 * l.0).fold(0.0, f64::max);
        Expected {
            power: power.max(value * value),
            ..Expected::new(value, 2.0 * spread + own.sum::<f64>(), 2.0 * FLUSH)
        }
    }
}

fn mol(source: &mut Source, weight: WeightType, form: MolForm, shape: Shape, what: What) -> Job {
    let Shape { n_queries, n_items, dim } = shape;
    let (n, m, d) = (form.query_components as usize, form.item_components as usize, dim as usize);
    let (pairs, hidden) = (form.n_pairs() as usize, form.hidden as usize);
    let gate_len = if form.pairing == Pairing::Cross { pairs } else { hidden };
    let mut queries = source.rows(n_queries, form.query_components * dim);
    // As in a mixture: unit length, divided by the temperature.
    for component in queries.chunks_exact_mut(d) {
        let norm = component.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-6);
        component.iter_mut().for_each(|x| *x *= 20.0 / norm);
    }
    // Items of unit size for any type, so that gates neither saturate nor vanish.
    let values: Vec<f32> =
        source.normal(form.item_components * n_items * dim).iter().map(|x| x / (dim as f32).sqrt()).collect();
    let bytes = encode(weight, &values, d);
    let stored = dequantise(weight, &bytes, dim);
    let a = source.normal(n_queries * gate_len as u32);
    let b = source.normal(n_items * gate_len as u32);
    let scaled = |source: &mut Source, len: usize, by: usize| -> Vec<f32> {
        source.normal(len as u32).iter().map(|x| x / (by as f32).sqrt()).collect()
    };
    let is_cross = form.pairing == Pairing::Cross;
    let w1 = if is_cross { scaled(source, hidden * pairs, pairs) } else { Vec::new() };
    let b1 = if is_cross { source.normal(form.hidden) } else { Vec::new() };
    let w2 = scaled(source, pairs * hidden, hidden.max(1));
    let b2 = source.normal(form.n_pairs());
    let n_scores = if what == What::Of { 21 } else { n_items };
    // One in five is not a valid item.
    let ids: Vec<u32> = (0..n_queries * n_scores)
        .map(|_| if source.rng.below(5) == 0 { u32::MAX } else { source.rng.below(n_items as usize) as u32 })
        .collect();

    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
    let (w1_wide, b1_wide, w2_wide, b2_wide) = (wide(&w1), wide(&b1), wide(&w2), wide(&b2));
    let oracle = Oracle { form, w1: &w1_wide, b1: &b1_wide, w2: &w2_wide, b2: &b2_wide };
    let (a_wide, b_wide) = (wide(&a), wide(&b));
    let mut want = Vec::new();
    for query in 0..n_queries as usize {
        for column in 0..n_scores as usize {
            let id = if what == What::Of { ids[query * n_scores as usize + column] } else { column as u32 };
            let Some(item) = Some(id as usize).filter(|_| id < n_items) else {
                want.push(Expected::new(f64::NAN, 0.0, 0.0)); // not written
                continue;
            };
            let logit = |p: usize| {
                let (i, j) = if is_cross { (p / m, p % m) } else { (p, p) };
                let f = &queries[(query * n + i) * d..][..d];
                let g = &stored[(j * n_items as usize + item) * d..][..d];
                Near::dot(f.iter().zip(g).map(|(&f, &g)| (f64::from(f), Near(g, ROUND * g.abs()))))
            };
            let l: Vec<Near> = (0..pairs).map(logit).collect();
            want.push(if what == What::Bounds {
                let top = l.iter().fold(Near(f64::MIN, 0.0), |top, &l| Near(top.0.max(l.0), top.1.max(l.1)));
                Expected::new(top.0, top.1, 2.0 * FLUSH)
            } else {
                let row = |x: &'_ [f64], i: usize| x[i * gate_len..][..gate_len].to_vec();
                oracle.score(&l, &row(&a_wide, query), &row(&b_wide, item))
            });
        }
    }
    let columns = form.gate_columns().max(4);
    let rows = |values: &[f32], n: u32| {
        let rows = form.gate_rows(values);
        if rows.is_empty() { vec![0.0; (n * columns) as usize] } else { rows }
    };
    let operands = vec![
        Operand::weights(weight, &[form.item_components * n_items, dim], bytes),
        Operand::floats("item_gates", &[n_items, columns], rows(&b, n_items)),
        Operand::floats("queries", &[n_queries, form.query_components * dim], queries),
        Operand::floats("query_gates", &[n_queries, columns], rows(&a, n_queries)),
        Operand::words("ids", &[n_queries, n_scores], ids),
        Operand::close("scores", &[n_queries, n_scores], want, 1e-9),
    ];
    Job::new(operands, move |rec, bound| {
        let gate = MolGate::new(&bound.device, form, &MolGateWeights { w1: &w1, b1: &b1, w2: &w2, b2: &b2 })?;
        let operands = MolOperands {
            items: bound.matrix(0),
            item_gates: bound.tensor(1),
            queries: bound.tensor(2),
            query_gates: bound.tensor(3),
        };
        let what = match what {
            What::All => MolScores::All,
            What::Of => MolScores::Of(bound.tensor(4)),
            What::Bounds => MolScores::Bounds,
        };
        kernels::mol(rec, &gate, &operands, what, bound.tensor(5))
    })
}

/// Encodes rows of `dim` numbers in file layout.
fn encode(weight: WeightType, values: &[f32], dim: usize) -> Vec<u8> {
    match weight {
        WeightType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        WeightType::F16 => values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        _ => values
            .chunks(dim)
            .flat_map(|row| row.chunks(32))
            .flat_map(|block| {
                let mut bytes = half::f16::from_f32(1.0 / 64.0).to_le_bytes().to_vec();
                let quants = (0..32).map(|i| block.get(i).map_or(0, |x| (x * 64.0).round().clamp(-127.0, 127.0) as i8));
                bytes.extend(quants.map(|q| q as u8));
                bytes
            })
            .collect(),
    }
}
