//! Selects the best of many scores.

use std::cmp::Ordering;

use crate::retrieval::Hit;

/// Higher scores first, ties by lower id. Non-finite scores sort first, so that they are noticed.
fn order(a: &Hit, b: &Hit) -> Ordering {
    let finite = a.score.is_finite().cmp(&b.score.is_finite());
    finite.then(b.score.partial_cmp(&a.score).unwrap_or(Ordering::Equal)).then(a.id.cmp(&b.id))
}

/// Keeps the `k` best hits: gathers up to `2 k`, then drops the worse half.
#[derive(Clone, Debug)]
pub(super) struct TopHits {
    k: usize,
    hits: Vec<Hit>,
    /// Scores below this cannot be among the best.
    bar: f32,
}

impl TopHits {
    pub fn new(k: usize) -> TopHits {
        TopHits { k, hits: Vec::new(), bar: f32::NEG_INFINITY }
    }

    pub fn push(&mut self, id: u32, score: f32) {
        // This comparison lets a NaN pass.
        if score < self.bar {
            return;
        }
        self.hits.push(Hit { id, score });
        if self.hits.len() >= self.k.saturating_mul(2) {
            self.cut();
        }
    }

    fn cut(&mut self) {
        if self.hits.len() > self.k {
            let (_, last, _) = self.hits.select_nth_unstable_by(self.k - 1, order);
            self.bar = last.score;
            self.hits.truncate(self.k);
        }
    }

    /// Pushes scores of consecutive items.
    pub fn extend(&mut self, first: u32, scores: &[f32]) {
        (first..).zip(scores).for_each(|(id, &score)| self.push(id, score));
    }

    /// The ids, unordered.
    pub fn into_ids(mut self) -> Vec<u32> {
        self.cut();
        self.hits.into_iter().map(|hit| hit.id).collect()
    }

    /// The hits in order.
    pub fn into_hits(mut self) -> Vec<Hit> {
        self.cut();
        crate::sort::by(&mut self.hits, order);
        self.hits
    }
}
