//! Prompt lookup: drafts the tokens that followed an earlier occurrence of the latest ones.

use super::images::is_row;

/// Minimum match length: one token alone predicts nothing.
const FEWEST: usize = 2;
/// Maximum match length compared.
const ENOUGH: usize = 8;
/// Maximum number of tokens searched, which bounds the delay of other sequences.
const MAX_SEARCHED: usize = 1 << 14;

/// Up to `n` draft tokens: the continuation of the longest earlier match of the latest tokens, the latest of equally
/// long ones. Repeats itself if the sequence does. Empty if the last two tokens have no earlier occurrence. Searches
/// the latest 16,384 tokens. Rows of images are no drafts.
///
/// Yang et al. 2023, arXiv:2304.04487, copy from reference texts in this way; Saxena 2023, from the prompt.
pub(crate) fn look_up(ids: &[u32], n: usize) -> Vec<u32> {
    if n == 0 {
        return Vec::new();
    }
    let ids = &ids[ids.len().saturating_sub(MAX_SEARCHED)..];
    let mut found = None;
    let mut longest = FEWEST - 1;
    // `end`: end of an earlier occurrence.
    for end in (FEWEST..ids.len()).rev() {
        let matching = ids[..end].iter().rev().zip(ids.iter().rev());
        let length = matching.take(ENOUGH).take_while(|(before, last)| before == last).count();
        if length > longest {
            (found, longest) = (Some(end), length);
            if length == ENOUGH {
                break;
            }
        }
    }
    let Some(end) = found else { return Vec::new() };
    ids[end..].iter().copied().cycle().take(n).take_while(|&id| !is_row(id)).collect()
}

/// How many draft tokens the model accepts, and its choice after those. `choices`: its choice before each draft
/// token and after the last.
pub(crate) fn verify_drafts(drafts: &[u32], choices: &[u32]) -> (usize, Option<u32>) {
    let n_accepted = drafts.iter().zip(choices).take_while(|(draft, choice)| draft == choice).count();
    (n_accepted, choices.get(n_accepted).copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`look_up`] by its definition: compares all places and takes the best.
    fn by_definition(ids: &[u32], n: usize) -> Vec<u32> {
        let places = (1..ids.len()).map(|end| {
            let length = (1..=end.min(8)).take_while(|&k| ids[end - k..end] == ids[ids.len() - k..]).count();
            (length, end)
        });
        match places.max() {
            Some((length, end)) if length >= 2 => (0..n).map(|i| ids[end + i % (ids.len() - end)]).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn drafts_follow_the_longest_and_latest_match() {
        assert_eq!(look_up(&[1, 2, 3, 4, 9, 1, 2], 3), [3, 4, 9]);
        // The longer match wins over the later one; of equal ones, the later wins.
        assert_eq!(look_up(&[1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 1), [7]);
        assert_eq!(look_up(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4]);
        // A repetitive sequence keeps repeating.
        assert_eq!(look_up(&[5, 6, 5, 6, 5, 6], 5), [5, 6, 5, 6, 5]);
        assert_eq!(look_up(&[7, 7, 7], 4), [7; 4]);
        for nothing in [&[][..], &[1], &[1, 1], &[1, 2, 3], &[1, 2, 1]] {
            assert!(look_up(nothing, 4).is_empty(), "{nothing:?}");
        }
    }

    #[test]
    fn only_the_latest_tokens_are_searched() {
        let filler = || 10..10 + MAX_SEARCHED as u32;
        let ids: Vec<u32> = [1, 2, 3].into_iter().chain(filler().skip(5)).chain([1, 2]).collect();
        assert_eq!(look_up(&ids, 1), [3]);
        let ids: Vec<u32> = [1, 2, 3].into_iter().chain(filler()).chain([1, 2]).collect();
        assert!(look_up(&ids, 1).is_empty());
    }

    #[test]
    fn drafts_equal_those_of_a_brute_force_search() {
        let mut seed = 3u64;
        let mut n_found = 0;
        for round in 0..2000 {
            let ids: Vec<u32> = (0..round % 40)
                .map(|_| {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (seed >> 33) as u32 % 4
                })
                .collect();
            let n = 1 + round % 7;
            let draft = look_up(&ids, n);
            assert_eq!(draft, by_definition(&ids, n), "{ids:?}");
            assert!(draft.len() == n || draft.is_empty());
            n_found += usize::from(!draft.is_empty());
        }
        assert!(n_found > 500, "{n_found}");
    }
}
