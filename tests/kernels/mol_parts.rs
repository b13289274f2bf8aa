//! `mol_gate` and `weighted_sum`: a mixture of logits step by step.

use tilewright::kernels::Combination;
use tilewright::kernels::microbench;

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND};
use crate::inputs::{Inputs, Source};
use crate::mol::{Near, gated};

/// I, B, P: around the workgroups of 256 elements and 64 rows.
const PARTS: [[u32; 3]; 6] = [[1, 1, 1], [3, 2, 5], [1, 32, 8], [13, 5, 4], [65, 1, 64], [7, 9, 33]];

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in Inputs::ALL {
        for [n_items, n_queries, pairs] in PARTS {
            let mut push = |kernel, variant: &str, build: Box<dyn Fn(&mut Source) -> Job>| {
                let sizes = format!("i={n_items},b={n_queries},p={pairs}");
                cases.push(Case { kernel, variant: variant.into(), sizes, inputs, build });
            };
            for (name, combination) in [("sum", Combination::Sum), ("glu_silu", Combination::GluSilu)] {
                push("mol_gate", name, Box::new(move |source| gate(source, combination, n_items, n_queries, pairs)));
            }
            push("weighted_sum", "F32", Box::new(move |source| weighted_sum(source, n_items * n_queries, pairs)));
        }
    }
}

fn gate(source: &mut Source, combination: Combination, n_items: u32, n_queries: u32, pairs: u32) -> Job {
    let [a, b, c] = [n_queries, n_items, n_items * n_queries].map(|rows| source.rows(rows, pairs));
    let (p, wide) = (pairs as usize, |x: f32| f64::from(x));
    let value = |(i, &c): (usize, &f32)| {
        let (item, query) = (i / p / n_queries as usize, i / p % n_queries as usize);
        let (a, b, c) = (wide(a[query * p + i % p]), wide(b[item * p + i % p]), wide(c));
        if combination == Combination::Sum {
            return Expected::new(a + b + c, 2.0 * ROUND * (a.abs() + b.abs() + c.abs()), 4.0 * FLUSH);
        }
        let z = Near(a * b + c, 2.0 * ROUND * ((a * b).abs() + c.abs()) + FLUSH);
        let Near(value, off) = gated(z, z);
        Expected::new(value, off, FLUSH * (2.0 + z.0.abs()))
    };
    let want = c.iter().enumerate().map(value).collect();
    let operands = vec![
        Operand::floats("a", &[n_queries, pairs], a),
        Operand::floats("b", &[n_items, pairs], b),
        Operand::floats("c", &[n_items, n_queries, pairs], c),
        Operand::close("y", &[n_items, n_queries, pairs], want, 1e-9),
    ];
    Job::new(operands, move |rec, bound| {
        let parts = [bound.tensor(0), bound.tensor(1), bound.tensor(2)];
        microbench::mol_gate(rec, combination, parts, bound.tensor(3))
    })
}

fn weighted_sum(source: &mut Source, n_rows: u32, dim: u32) -> Job {
    let (weight, x) = (source.rows(n_rows, dim), source.rows(n_rows, dim));
    let rows = weight.chunks_exact(dim as usize).zip(x.chunks_exact(dim as usize));
    let want = rows.map(|(weight, x)| {
        let Near(value, off) = Near::dot(weight.iter().zip(x).map(|(&w, &x)| (f64::from(w), Near(f64::from(x), 0.0))));
        let power: f64 = weight.iter().zip(x).map(|(w, x)| (f64::from(*w) * f64::from(*x)).powi(2)).sum();
        Expected { power: power.max(value * value), ..Expected::new(value, off, FLUSH * f64::from(dim)) }
    });
    let operands = vec![
        Operand::close("y", &[n_rows], want.collect(), 1e-9),
        Operand::floats("weight", &[n_rows, dim], weight),
        Operand::floats("x", &[n_rows, dim], x),
    ];
    Job::new(operands, |rec, bound| microbench::weighted_sum(rec, bound.tensor(1), bound.tensor(2), bound.tensor(0)))
}
