//! `candidates`, `sample`, `penalize`, `mask_logits` and `advance`: the end of a pass.

use super::argmax::order_key;
use super::simd::{self, Function, Instructions, Map, Numbers, exp};
use super::softmax::ExpBelow;
use super::{Call, threads};
use crate::kernels::{NON_FINITE, Sampling};
use crate::shaders::constants::candidates::PART;
use crate::shaders::params::{AdvanceParams, MaskLogitsParams, PenalizeParams, SampleParams};

pub(crate) fn advance(mut call: Call<'_>) {
    let params: AdvanceParams = call.params();
    let [ids, state, tokens] = call.operands();
    let (ids, state, tokens) = (ids.get::<u32>(), state.get_mut::<u32>(), tokens.get_mut::<u32>());
    let capacity = params.capacity as usize;
    let mut keep = |slot: u32, pos: u32, id: u32| {
        if (pos as usize) < capacity {
            tokens[slot as usize * capacity + pos as usize] = if id == NON_FINITE { 0 } else { id };
        }
    };
    if params.row_words == 0 {
        let pos = state[0].wrapping_add(state[1]);
        (state[0], state[1], state[2]) = (pos, 1, ids[0]);
        return keep(0, pos, ids[0]);
    }
    // Of the first row: how many rows count.
    let n_rows = params.n_rows.min(state[1]) as usize;
    for (row, &id) in state.chunks_mut(params.row_words as usize).zip(ids).take(n_rows) {
        let pos = row[0].wrapping_add(1);
        (row[0], row[2]) = (pos, id);
        keep(row[4], pos, id);
    }
}

pub(crate) fn penalize(mut call: Call<'_>) {
    let params: PenalizeParams = call.params();
    let [sampling, state, tokens, biases, logits] = call.operands();
    let (state, tokens, biases) = (state.get::<u32>(), tokens.get::<u32>(), biases.get::<u32>());
    let logits = logits.get_mut::<f32>().chunks_exact_mut(params.n_vocab as usize);
    for (r, (logits, sampling)) in logits.zip(sampling.get::<Sampling>()).enumerate() {
        let capacity = params.capacity as usize;
        let row = &state[r * params.row_words as usize..];
        // A single sequence's tokens of the pass, or the one of each.
        let (slot, n) = if params.row_words > 0 { (row[4] as usize, 1) } else { (0, row[1] as usize) };
        let end = (row[0] as usize + n).min(capacity);
        let biases = &biases[r * params.biases_stride as usize..][..params.biases_stride as usize];
        penalize_row(sampling, &tokens[slot * capacity..][..end], biases, logits);
    }
}

/// Of one row of logits, after these tokens.
fn penalize_row(sampling: &Sampling, tokens: &[u32], biases: &[u32], logits: &mut [f32]) {
    let end = tokens.len();
    let mut recent = tokens[end.saturating_sub(sampling.repeat_last_n as usize)..end].to_vec();
    recent.sort_unstable();
    recent.dedup();
    for id in recent {
        if let Some(logit) = logits.get_mut(id as usize) {
            let penalty = sampling.repeat_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
    let mut generated = tokens[(sampling.generated_from as usize).min(end)..end].to_vec();
    generated.sort_unstable();
    for same in generated.chunk_by(|a, b| a == b) {
        if let Some(logit) = logits.get_mut(same[0] as usize) {
            *logit -= sampling.presence_penalty;
            *logit -= sampling.frequency_penalty * same.len() as f32;
        }
    }
    let (biases, _) = biases.as_chunks::<2>();
    for &[id, bias] in biases.iter().take(sampling.n_biases as usize) {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += f32::from_bits(bias);
        }
    }
}

pub(crate) fn mask_logits(mut call: Call<'_>) {
    let params: MaskLogitsParams = call.params();
    let [allowed, logits] = call.operands();
    let allowed = allowed.get::<u32>();
    let n_vocab = params.n_vocab as usize;
    let rows = logits.get_mut::<f32>().chunks_exact_mut(n_vocab);
    for (logits, allowed) in rows.zip(allowed.chunks_exact(n_vocab.div_ceil(32))) {
        for (id, logit) in logits.iter_mut().enumerate() {
            if allowed[id / 32] >> (id % 32) & 1 == 0 && logit.is_finite() {
                *logit = f32::MIN;
            }
        }
    }
}

/// PCG hash, Jarzynski & Olano 2020.
fn pcg(input: u32) -> u32 {
    let mixed = input.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let word = ((mixed >> ((mixed >> 28) + 4)) ^ mixed).wrapping_mul(277_803_737);
    (word >> 22) ^ word
}

/// `e^((x - highest) / temperature)`.
struct Tempered {
    highest: f32,
    temperature: f32,
}

impl Function for Tempered {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        exp::<I, X>((x - X::splat(self.highest)) / X::splat(self.temperature))
    }
}

/// Tokens still in question, in the order of ids.
struct Candidates {
    ids: Vec<u32>,
    logits: Vec<f32>,
}

impl Candidates {
    /// All tokens whose order key is at least `cut`.
    fn all(logits: &[f32], cut: u32) -> Candidates {
        let kept = (0..).zip(logits).filter(|&(_, &logit)| order_key(logit) >= cut);
        let (ids, logits) = kept.unzip();
        Candidates { ids, logits }
    }

    /// Those of pairs of an order key and an id.
    fn listed(pairs: impl Iterator<Item = [u32; 2]>) -> Candidates {
        let (ids, logits) = pairs.map(|[key, id]| (id, logit_of(key))).unzip();
        Candidates { ids, logits }
    }

    /// Those whose order key is at least `cut`.
    fn from(&self, cut: u32) -> Candidates {
        let kept = self.ids.iter().zip(&self.logits).filter(|&(_, &logit)| order_key(logit) >= cut);
        let (ids, logits) = kept.map(|(&id, &logit)| (id, logit)).unzip();
        Candidates { ids, logits }
    }

    /// The largest key such that the weights of all candidates at or above it reach `target`.
    ///
    /// A radix selection as in the shader: four passes over histograms of eight bits of the keys.
    fn select_key(&self, target: u32, weight: impl Fn(usize) -> u32) -> u32 {
        let mut prefix = 0u64;
        let mut need = target;
        for shift in [24, 16, 8, 0] {
            let mut histogram = [0u32; 256];
            for (i, &logit) in self.logits.iter().enumerate() {
                let key = u64::from(order_key(logit));
                if key >> (shift + 8) == prefix >> (shift + 8) {
                    let bin = &mut histogram[(key >> shift & 255) as usize];
                    *bin = bin.wrapping_add(weight(i));
                }
            }
            // From the highest bin down to the one that reaches the target; rounding may leave none, then the lowest.
            let mut bin = 255;
            while bin > 0 && histogram[bin] < need {
                need -= histogram[bin];
                bin -= 1;
            }
            prefix |= (bin as u64) << shift;
        }
        prefix as u32
    }
}

/// The number of an order key.
fn logit_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & 0x7fff_ffff } else { !key })
}

pub(crate) fn candidates(mut call: Call<'_>) {
    let params: SampleParams = call.params();
    let [sampling, logits, found] = call.operands();
    let logits = logits.get::<f32>().chunks_exact(params.n_vocab as usize);
    let found = found.get_mut::<[u32; 2]>().chunks_exact_mut(params.found_stride as usize);
    for ((sampling, logits), found) in sampling.get::<Sampling>().iter().zip(logits).zip(found) {
        candidates_of(&params, sampling, logits, found);
    }
}

/// Of one row of logits.
fn candidates_of(params: &SampleParams, sampling: &Sampling, logits: &[f32], found: &mut [[u32; 2]]) {
    let k = if sampling.has_lists(params.n_vocab) { sampling.top_k as usize } else { 0 };
    let (heads, lists) = found.split_at_mut(params.n_parts as usize);
    let part = |p: usize| {
        let first = p * PART as usize;
        let end = logits.len().min(first + PART as usize);
        (first..end).map(|id| [order_key(logits[id]), id as u32])
    };
    if k > 0 {
        threads::for_each_chunk(&mut lists[..k * params.n_parts as usize], k, logits.len(), |p, list| {
            let mut pairs: Vec<[u32; 2]> = part(p).collect();
            if pairs.len() > k {
                pairs.select_nth_unstable_by_key(k - 1, |&[key, _]| !key);
            }
            pairs.resize(k.max(pairs.len()), [0; 2]);
            list.copy_from_slice(&pairs[..k]);
        });
    }
    threads::for_each_chunk(heads, 1, logits.len(), |p, head| {
        let list = &lists[p * k..][..k];
        let cut = list.iter().map(|&[key, _]| key).min().unwrap_or(0);
        let n_tied = |pairs: &mut dyn Iterator<Item = [u32; 2]>| pairs.filter(|&[key, _]| key == cut).count();
        let leaves_out = cut > 0 && n_tied(&mut part(p)) > n_tied(&mut list.iter().copied());
        let is_finite = part(p).all(|[key, _]| logit_of(key).is_finite());
        let highest = part(p).map(|[key, _]| key).max().filter(|_| is_finite);
        head[0] = [highest.unwrap_or(NON_FINITE), if leaves_out { cut } else { 0 }];
    });
}

pub(crate) fn sample(mut call: Call<'_>) {
    let params: SampleParams = call.params();
    let [sampling, state, logits, found, ids] = call.operands();
    let (state, found) = (state.get::<u32>(), found.get::<[u32; 2]>());
    let rows = logits.get::<f32>().chunks_exact(params.n_vocab as usize).zip(sampling.get::<Sampling>());
    for (r, ((logits, sampling), drawn)) in rows.zip(ids.get_mut::<u32>()).enumerate() {
        let row = &state[r * params.row_words as usize..];
        let n = if params.row_words > 0 { 1 } else { row[1] };
        let found = &found[r * params.found_stride as usize..][..params.found_stride as usize];
        // A row that is not drawn keeps what is there.
        if sampling.temperature <= 0.0 {
            continue;
        }
        *drawn = draw(&params, sampling, row[0].wrapping_add(n), logits, found, *drawn);
    }
}

/// The token at a position by one row of logits; `before` where rounding leaves none.
fn draw(params: &SampleParams, sampling: &Sampling, pos: u32, logits: &[f32], found: &[[u32; 2]], before: u32) -> u32 {
    /// Stands for probability 1.
    const FIXED: f32 = (1 << 30) as f32;
    /// Runs of ids in which the draw is looked up, as many as the shader has invocations.
    const RUNS: u32 = 256;

    let mut drawn = before;
    let (heads, lists) = found.split_at(params.n_parts as usize);
    let highest = heads.iter().map(|&[highest, _]| highest).max().unwrap_or(NON_FINITE);
    if highest == NON_FINITE {
        return NON_FINITE;
    }
    let highest = logit_of(highest);

    // Of tokens that a mask forbids none is left, unless nothing else is.
    let lowest = if highest > f32::MIN { order_key(f32::MIN) + 1 } else { 0 };
    let mut left;
    if sampling.has_lists(params.n_vocab) {
        let mut listed = lists[..heads.len() * sampling.top_k as usize].to_vec();
        let cut = Candidates::listed(listed.iter().copied()).select_key(sampling.top_k, |_| 1).max(lowest);
        listed.retain(|&[key, _]| key >= cut);
        crate::sort::by_key(&mut listed, |&[_, id]| id);
        left = Candidates::listed(listed.into_iter());
        // A part left ties with the k-th out.
        if heads.iter().any(|&[_, left_out]| left_out == cut) {
            left = Candidates::all(logits, cut);
        }
    } else {
        left = Candidates::all(logits, lowest);
        if sampling.top_k > 0 && sampling.top_k < params.n_vocab {
            left = left.from(left.select_key(sampling.top_k, |_| 1));
        }
    }
    if sampling.top_p < 1.0 {
        let mut probs = vec![0.0; left.logits.len()];
        simd::run_wide(Map { function: ExpBelow { highest }, x: &left.logits, y: &mut probs });
        let total = probs.iter().map(|&p| f64::from(p)).sum::<f64>() as f32;
        let target = ((sampling.top_p * FIXED) as u32).max(1);
        left = left.from(left.select_key(target, |i| (probs[i] / total * FIXED) as u32));
    }
    if sampling.min_p > 0.0 {
        // Not above the highest itself: -0 + 0 is +0, whose key is larger.
        left = left.from(order_key(highest + sampling.min_p.ln()).min(order_key(highest)));
    }

    // Sums in f32 and in the shader's order, run by run, so that both draw the same token wherever rounding allows it.
    let mut weights = vec![0.0; left.logits.len()];
    let tempered = Tempered { highest, temperature: sampling.temperature };
    simd::run_wide(Map { function: tempered, x: &left.logits, y: &mut weights });
    let run_len = params.n_vocab.div_ceil(RUNS);
    let mut sums = [0.0f32; RUNS as usize];
    for (id, weight) in left.ids.iter().zip(&weights) {
        sums[(id / run_len) as usize] += weight;
    }
    let total = sums.iter().fold(0.0, |total, sum| total + sum);
    let bits = pcg(sampling.seed[0] ^ pcg(sampling.seed[1] ^ pcg(pos)));
    let threshold = (bits >> 8) as f32 / (1 << 24) as f32 * total;
    let mut before = 0.0;
    for (run, sum) in sums.into_iter().enumerate() {
        if sum > 0.0 && before <= threshold && threshold < before + sum {
            // Rounding may leave the walk short of the threshold; then the run's last candidate is the one.
            let mut mark = before;
            for (&id, weight) in left.ids.iter().zip(&weights).filter(|&(id, _)| (id / run_len) as usize == run) {
                drawn = id;
                mark += weight;
                if mark > threshold {
                    break;
                }
            }
        }
        before += sum;
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Operand, argmax};
    use crate::shaders::params::{ArgmaxMergeParams, ArgmaxParams};

    const OFF: Sampling = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: [0; 2],
        repeat_penalty: 1.0,
        repeat_last_n: 0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        generated_from: 0,
        n_biases: 0,
    };

    /// The token drawn for position `pos`.
    fn drawn(sampling: Sampling, logits: &[f32], pos: u32) -> u32 {
        let n_vocab = logits.len() as u32;
        let params = SampleParams {
            n_vocab,
            n_parts: n_vocab.div_ceil(PART),
            row_words: 0,
            found_stride: n_vocab.div_ceil(PART) * (n_vocab + 1),
        };
        let (mut found, mut ids) = (vec![0; 2 * params.found_stride as usize], [7u32; 4]);
        candidates(Call {
            params: bytemuck::bytes_of(&params),
            constants: &[],
            weight: None,
            rounds: false,
            batch_invariance: Default::default(),
            panels: None,
            operands: vec![
                Operand::Read(bytemuck::cast_slice(&[sampling])),
                Operand::Read(bytemuck::cast_slice(logits)),
                Operand::Write(&mut found),
            ],
        });
        sample(Call {
            params: bytemuck::bytes_of(&params),
            constants: &[],
            weight: None,
            rounds: false,
            batch_invariance: Default::default(),
            panels: None,
            operands: vec![
                Operand::Read(bytemuck::cast_slice(&[sampling])),
                Operand::Read(&[pos - 1, 1, 0, 0]),
                Operand::Read(bytemuck::cast_slice(logits)),
                Operand::Read(&found),
                Operand::Write(&mut ids),
            ],
        });
        ids[0]
    }

    fn argmax_of(logits: &[f32]) -> u32 {
        let dim = logits.len() as u32;
        let (mut best, mut ids) = (vec![0; 2 * dim.div_ceil(64) as usize], [0; 4]);
        let params = ArgmaxParams { dim, chunk: 64, n_chunks: dim.div_ceil(64), n_rows: 1 };
        argmax::argmax(Call {
            params: bytemuck::bytes_of(&params),
            constants: &[],
            weight: None,
            rounds: false,
            batch_invariance: Default::default(),
            panels: None,
            operands: vec![Operand::Read(bytemuck::cast_slice(logits)), Operand::Write(&mut best)],
        });
        argmax::argmax_merge(Call {
            params: bytemuck::bytes_of(&ArgmaxMergeParams { n_chunks: params.n_chunks, n_rows: 1 }),
            constants: &[],
            weight: None,
            rounds: false,
            batch_invariance: Default::default(),
            panels: None,
            operands: vec![Operand::Read(&best), Operand::Write(&mut ids)],
        });
        ids[0]
    }

    #[test]
    fn sampling_with_one_candidate_left_draws_the_argmax() {
        for n in [1usize, 5, 256, 1000] {
            // All different, the largest one in turn anywhere.
            let mut logits: Vec<f32> = (0..n).map(|i| ((i * 7919 + 11) % 1009) as f32 / 100.0 - 5.0).collect();
            let want = argmax_of(&logits);
            assert!(logits.iter().all(|&logit| logit <= logits[want as usize]));
            for pos in 1..20 {
                assert_eq!(drawn(Sampling { top_k: 1, ..OFF }, &logits, pos), want);
                assert_eq!(drawn(Sampling { top_p: 1e-9, ..OFF }, &logits, pos), want);
                assert_eq!(drawn(Sampling { min_p: 1.0, ..OFF }, &logits, pos), want);
                assert_eq!(drawn(Sampling { temperature: 1e-6, ..OFF }, &logits, pos), want);
            }
            logits[n / 2] = f32::NAN;
            assert_eq!([drawn(OFF, &logits, 1), argmax_of(&logits)], [NON_FINITE; 2]);
        }
    }

    /// Each setting leaves tokens 2, 4 and 3 of six, and what is left is drawn in proportion.
    #[test]
    fn sampling_frequencies_match_probabilities() {
        let probs = [0.03f32, 0.02, 0.4, 0.2, 0.3, 0.05];
        let logits = probs.map(|p| p.ln() + 3.0);
        for sampling in [Sampling { top_k: 3, ..OFF }, Sampling { top_p: 0.85, ..OFF }, Sampling { min_p: 0.3, ..OFF }]
        {
            const DRAWS: u32 = 20_000;
            let mut counts = [0u32; 6];
            (1..=DRAWS).for_each(|pos| counts[drawn(sampling, &logits, pos) as usize] += 1);
            for (id, &count) in counts.iter().enumerate() {
                let want = if (2..5).contains(&id) { probs[id] / 0.9 } else { 0.0 };
                let found = count as f32 / DRAWS as f32;
                // Three standard deviations.
                assert!((found - want).abs() <= 3.0 * (want / DRAWS as f32).sqrt(), "{id}: {found}, expected {want}");
            }
        }
    }
}
