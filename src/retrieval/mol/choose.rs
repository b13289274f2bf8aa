//! Finds the fastest search for a corpus: tries growing numbers of candidates until the recall is reached.

use web_time::Instant;

use super::{Mol, MolHits, MolSearch};
use crate::error::Error;

/// A measured search.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct MolTrial {
    /// The search.
    pub how: MolSearch,
    /// Predicted seconds, from its operations relative to brute force, then from trials with fewer candidates.
    /// `None` for brute force.
    pub predicted_seconds: Option<f64>,
    /// Seconds for all queries.
    pub seconds: f64,
    /// Share of the `k` best items that it found.
    pub recall: f64,
    /// Items scored by the mixture per query.
    pub scored: f64,
}

/// Trials and the fastest one that reaches the recall.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MolChoice {
    /// All trials, brute force first.
    pub trials: Vec<MolTrial>,
    /// Index of the fastest trial with sufficient recall.
    pub best: usize,
}

impl Mol {
    /// Measures searches for sample queries, `[n, query_dim]`, and finds the fastest with at least `recall` of the
    /// `k` best items. Skips searches that are predicted to be slower than the best so far.
    ///
    /// # Errors
    /// [`Error::Option`] if `recall` is not 0 to 1; errors of [`Mol::search`].
    pub async fn choose(&self, queries: &[f32], users: &[u32], k: usize, recall: f64) -> Result<MolChoice, Error> {
        if !(0.0..=1.0).contains(&recall) {
            return Err(Error::Option { option: "recall", expected: "0 to 1".into(), found: recall.to_string() });
        }
        let (seconds, exact) = self.timed(queries, users, k, MolSearch::BruteForce).await?;
        let scored = mean(&exact.scored);
        let brute = MolTrial { how: MolSearch::BruteForce, predicted_seconds: None, seconds, recall: 1.0, scored };
        let mut choice = MolChoice { trials: vec![brute], best: 0 };

        let form = &self.config.form;
        let all = form.operations(self.config.dim) as f64;
        let dots = form.dot_operations(self.config.dim) as f64;
        let average = 2.0 * f64::from(self.config.dim);
        type Family = fn(usize) -> MolSearch;
        let families: [(Family, f64); 4] = [
            (|candidates| MolSearch::Avg { candidates }, average),
            (|candidates| MolSearch::HIndexer { candidates, sample: 4096 }, average),
            (|candidates| MolSearch::Highest { candidates }, dots),
            (|candidates| MolSearch::TwoPass { candidates }, dots + average),
        ];
        let each = seconds / self.n_items.max(1) as f64;
        for (family, scan) in families {
            let mut known: Vec<(f64, f64)> = Vec::new();
            let mut candidates = (2 * k).next_power_of_two().max(64);
            while candidates < self.n_items {
                let how = family(candidates);
                let n = candidates as f64;
                let predicted = match known[..] {
                    [] => seconds * scan / all + each * n,
                    [(fewer, took)] => took + each * (n - fewer),
                    [.., (fewest, first), (fewer, second)] => {
                        second + (n - fewer) * ((second - first) / (fewer - fewest)).max(0.0)
                    }
                };
                if predicted > choice.trials[choice.best].seconds {
                    break;
                }
                let (seconds, found) = self.timed(queries, users, k, how).await?;
                let (recall_found, scored) = (share_found(&found, &exact), mean(&found.scored));
                let trial = MolTrial { how, predicted_seconds: Some(predicted), seconds, recall: recall_found, scored };
                choice.trials.push(trial);
                if recall_found >= recall {
                    if seconds < choice.trials[choice.best].seconds {
                        choice.best = choice.trials.len() - 1;
                    }
                    break;
                }
                known.push((n, seconds));
                candidates *= 2;
            }
        }
        Ok(choice)
    }

    /// A search's hits and its time after a warm-up run.
    async fn timed(&self, queries: &[f32], users: &[u32], k: usize, how: MolSearch) -> Result<(f64, MolHits), Error> {
        self.search(queries, users, k, how).await?;
        let start = Instant::now();
        let found = self.search(queries, users, k, how).await?;
        Ok((start.elapsed().as_secs_f64(), found))
    }
}

/// The share of the hits of `exact` that `found` contains.
fn share_found(found: &MolHits, exact: &MolHits) -> f64 {
    let lists = found.hits.iter().zip(&exact.hits);
    let kept =
        lists.map(|(found, exact)| exact.iter().filter(|hit| found.iter().any(|other| other.id == hit.id)).count());
    let n_exact: usize = exact.hits.iter().map(Vec::len).sum();
    kept.sum::<usize>() as f64 / n_exact.max(1) as f64
}

fn mean(numbers: &[usize]) -> f64 {
    numbers.iter().sum::<usize>() as f64 / numbers.len().max(1) as f64
}
