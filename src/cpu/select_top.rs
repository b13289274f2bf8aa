//! `select_top` and `merge_top`: the best items of score rows that come strip by strip.

use super::argmax::order_key;
use super::{Call, threads};
use crate::shaders::constants::select_top::{BEGINS, FILTERED};
use crate::shaders::params::{MergeTopParams, SelectTopParams};

/// A pair as one number, larger for better: the order key of the score above the complement of the id. No item is 0.
fn rank(score: f32, id: u32) -> u64 {
    let key = match score {
        _ if !score.is_finite() => u32::MAX,
        _ if score == 0.0 => order_key(0.0), // of either sign
        _ => order_key(score),
    };
    u64::from(key) << 32 | u64::from(!id)
}

fn load([bits, id]: [u32; 2]) -> u64 {
    u64::from(order_key(f32::from_bits(bits))) << 32 | u64::from(!id)
}

fn store(rank: u64) -> [u32; 2] {
    let key = (rank >> 32) as u32;
    [if key >> 31 == 1 { key & 0x7fff_ffff } else { !key }, !(rank as u32)]
}

/// The best of a stream of ranks.
struct Top {
    k: usize,
    /// What a rank must exceed.
    bar: u64,
    ranks: Vec<u64>,
}

impl Top {
    fn new(k: usize, ranks: impl Iterator<Item = u64>) -> Top {
        let mut top = Top { k, bar: 0, ranks: ranks.filter(|&rank| rank > 0).collect() };
        top.cut();
        top
    }

    /// The score of the last that is kept; lower ones need not come.
    fn score(&self) -> f32 {
        f32::from_bits(store(self.bar)[0])
    }

    /// Keeps the best; others wait until there are as many again.
    fn push(&mut self, rank: u64) {
        self.ranks.push(rank);
        if self.ranks.len() >= 2 * self.k + 64 {
            self.cut();
        }
    }

    fn cut(&mut self) {
        if self.ranks.len() >= self.k {
            let (_, &mut bar, _) = self.ranks.select_nth_unstable_by(self.k - 1, |a, b| b.cmp(a));
            self.bar = bar;
            self.ranks.truncate(self.k);
        }
    }

    fn finish(mut self, list: &mut [[u32; 2]]) {
        self.cut();
        self.ranks.sort_unstable_by(|a, b| b.cmp(a));
        self.ranks.resize(self.k, 0);
        list.iter_mut().zip(self.ranks).for_each(|(place, rank)| *place = store(rank));
    }
}

/// Scores that are compared together.
const RUN: usize = 32;

pub(crate) fn select_top(mut call: Call<'_>) {
    let params: SelectTopParams = call.params();
    let [n_splits, n_rows] = [params.n_splits, params.n_rows].map(|n| n as usize);
    let [scores, allowed, lists] = call.operands();
    let (n_cols, k) = (params.n_cols as usize, params.k as usize);
    let (scores, allowed) = (&scores.get::<f32>()[..n_rows * n_cols], allowed.get::<u32>());
    let is_filtered = params.flags & FILTERED != 0;
    let is_allowed = |id: u32| !is_filtered || allowed[id as usize / 32] >> (id % 32) & 1 == 1;
    let part = n_cols.div_ceil(n_splits);
    let lists = &mut lists.get_mut::<[u32; 2]>()[..n_rows * n_splits * k];
    threads::for_each_chunk(lists, k, scores.len(), |i, list| {
        let begin = (i % n_splits * part).min(n_cols);
        let row = &scores[i / n_splits * n_cols..][begin..(begin + part).min(n_cols)];
        let before = list.iter().copied().map(load).filter(|_| params.flags & BEGINS == 0);
        let mut top = Top::new(k, before);
        for (run, first_id) in row.chunks(RUN).zip((params.first_id + begin as u32..).step_by(RUN)) {
            // Nearly every run has nothing. What is not finite is below no score or not above the lowest.
            let bar = top.score();
            if run.iter().fold(true, |is_low, &score| is_low & (score < bar) & (score >= f32::MIN)) {
                continue;
            }
            for (&score, id) in run.iter().zip(first_id..) {
                let rank = rank(score, id);
                if rank > top.bar && is_allowed(id) {
                    top.push(rank);
                }
            }
        }
        top.finish(list);
    });
}

pub(crate) fn merge_top(mut call: Call<'_>) {
    let params: MergeTopParams = call.params();
    let [lists, best] = call.operands();
    let (n_splits, k) = (params.n_splits as usize, params.k as usize);
    let rows = lists.get::<[u32; 2]>().chunks_exact(n_splits * k).zip(best.get_mut::<[u32; 2]>().chunks_exact_mut(k));
    rows.for_each(|(lists, best)| Top::new(k, lists.iter().copied().map(load)).finish(best));
}
