//! Log probabilities of tokens.

/// Natural logarithms of token probabilities, from the logits after penalties, biases and constraint, before
/// temperature and top-k, top-p and min-p.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Logprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most likely tokens, best first, the lower id first among equals; none that the constraint forbids.
    pub top: Vec<(u32, f32)>,
}

/// The log probability of a prompt token, given the tokens before it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct PromptLogprobs {
    /// Token id.
    pub id: u32,
    /// Its log probability, and the most likely tokens.
    pub logprobs: Logprobs,
    /// Its rank among all tokens: 1 for the most likely one.
    pub rank: usize,
}

impl PromptLogprobs {
    pub(crate) fn of(logits: &[f32], id: u32, n: usize) -> PromptLogprobs {
        let own = logits.get(id as usize).copied().unwrap_or(f32::MIN);
        let rank = 1 + logits.iter().filter(|&&logit| logit > own).count();
        PromptLogprobs { id, logprobs: Logprobs::of(logits, id, n), rank }
    }
}

impl Logprobs {
    pub(crate) fn of(logits: &[f32], id: u32, n: usize) -> Logprobs {
        let normalizer = log_sum_exp(logits);
        let logprob = |logit: f32| (f64::from(logit) - normalizer) as f32;
        // Forbidden tokens have the lowest logit.
        let top = likeliest(logits, n).into_iter().filter(|&(_, logit)| logit > f32::MIN);
        let top = top.map(|(id, logit)| (id, logprob(logit))).collect();
        Logprobs { logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&logit| logprob(logit)), top }
    }
}

/// `ln sum e^x`; minus infinity without any `x` above it.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let highest = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(highest)).exp()).sum();
    f64::from(highest) + sum.ln()
}

/// The `n` highest logits and their tokens, best first, the lower id first among equals.
pub(super) fn likeliest(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = Vec::new();
    for (id, &logit) in (0..).zip(logits) {
        let is_no_lower = |&(_, other): &(u32, f32)| other.total_cmp(&logit).is_ge();
        if all.len() == n && all.last().is_none_or(is_no_lower) {
            continue;
        }
        all.truncate(n - 1);
        all.insert(all.partition_point(is_no_lower), (id, logit));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::likeliest;

    /// Compared with a full sort, with many equal values.
    #[test]
    fn top_logprobs_match_a_full_sort() {
        let logits: Vec<f32> = (0..500u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 26) as f32 - 31.0).collect();
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
        for n in [0, 1, 2, 19, 499, 500, 501] {
            assert_eq!(likeliest(&logits, n), sorted[..n.min(500)]);
        }
        assert!(likeliest(&[], 3).is_empty());
    }
}
