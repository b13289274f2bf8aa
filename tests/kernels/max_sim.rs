//! `max_sim`.

use tilewright::kernels;

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, sum_rounding};
use crate::inputs::{Inputs, Source};

/// Rows of each query, columns of each document: around 16 rows and 16 columns, empty ones, many.
const SIZES: [(&[u32], &[u32]); 5] = [
    (&[1], &[1]),
    (&[16, 3, 0], &[15, 16, 17, 0, 1]),
    (&[32], &[180, 33, 64, 7]),
    (&[5, 17], &[2, 300]),
    (&[130], &[4; 300]),
];

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in [Inputs::Normal, Inputs::Channel1e5, Inputs::Subnormal, Inputs::Zeros, Inputs::Constant] {
        for (queries, documents) in SIZES {
            cases.push(Case {
                kernel: "max_sim",
                variant: String::new(),
                sizes: format!("queries={queries:?},documents={}x{:?}", documents.len(), documents.first()),
                inputs,
                build: Box::new(move |source| max_sim(source, queries, documents)),
            });
        }
    }
}

/// Spans of these lengths with others between, and where they end.
fn spans(source: &mut Source, lengths: &[u32]) -> (Vec<[u32; 2]>, u32) {
    let mut end = 0;
    let spans = lengths.iter().map(|len| {
        let first = end + source.rng.below(3) as u32;
        end = first + len;
        [first, end]
    });
    (spans.collect(), end.max(1))
}

fn max_sim(source: &mut Source, queries: &[u32], documents: &[u32]) -> Job {
    let ((queries, n_rows), (documents, n_cols)) = (spans(source, queries), spans(source, documents));
    let x = source.rows(n_rows, n_cols);
    let (n_queries, n_documents) = (queries.len() as u32, documents.len() as u32);
    // Other documents' scores come before, and after.
    let (first, n_scores) = (3, n_documents + 5);
    let mut want = vec![Expected::new(f64::NAN, 0.0, 0.0); (n_queries * n_scores) as usize];
    for (b, &[first_row, end_row]) in queries.iter().enumerate() {
        for (i, &[first_col, end_col]) in documents.iter().enumerate() {
            let best = |row: u32| {
                let row = (first_col..end_col).map(|c| f64::from(x[(row * n_cols + c) as usize]));
                row.fold(f64::MIN, f64::max)
            };
            let of_rows: Vec<f64> = match first_col < end_col {
                true => (first_row..end_row).map(best).collect(),
                false => Vec::new(),
            };
            let magnitude: f64 = of_rows.iter().map(|best| best.abs()).sum();
            let bound = sum_rounding(of_rows.len()) * magnitude;
            want[b * n_scores as usize + first as usize + i] =
                Expected::new(of_rows.iter().sum(), bound, FLUSH * (of_rows.len() as f64 + 1.0));
        }
    }
    let flat = |spans: Vec<[u32; 2]>| spans.concat();
    let operands = vec![
        Operand::words("query_spans", &[n_queries, 2], flat(queries)),
        Operand::words("document_spans", &[n_documents, 2], flat(documents)),
        Operand::floats("x", &[n_rows, n_cols], x),
        Operand::close("scores", &[n_queries, n_scores], want, 1e-10),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        kernels::max_sim(rec, tensor(0), tensor(1), tensor(2), first, tensor(3))
    })
}
