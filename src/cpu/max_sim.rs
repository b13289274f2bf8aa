//! `max_sim`: a document's columns of all rows of a query.

use super::{Call, threads};
use crate::shaders::params::MaxSimParams;

pub(crate) fn max_sim(mut call: Call<'_>) {
    let params: MaxSimParams = call.params();
    let [n_rows, n_cols] = [params.n_rows, params.n_cols].map(|n| n as usize);
    let [queries, documents, x, scores] = call.operands();
    let x = &x.get::<f32>()[..n_rows * n_cols];
    let documents = &documents.get::<[u32; 2]>()[..params.n_documents as usize];
    let (n_scores, first) = (params.n_scores as usize, params.first as usize);
    let rows = scores.get_mut::<f32>()[..params.n_queries as usize * n_scores].chunks_exact_mut(n_scores);
    for (&query, row) in queries.get::<[u32; 2]>().iter().zip(rows) {
        let within = |[first, end]: [u32; 2], n: usize| (first as usize).min(n)..(end as usize).min(n);
        let query = within(query, n_rows);
        let ops = query.len() * n_cols;
        threads::for_each_chunk(&mut row[first..][..documents.len()], 1, ops, |i, score| {
            let columns = within(documents[i], n_cols);
            let best = |row: usize| {
                let row = x[row * n_cols..].get(columns.clone()).unwrap_or_default();
                row.iter().fold(f32::MIN, |best, &x| if x > best { x } else { best })
            };
            score[0] = if columns.is_empty() { 0.0 } else { query.clone().map(best).sum() };
        });
    }
}
