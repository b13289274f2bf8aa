//! Sorting of what is short or rarely sorted. The standard library's algorithms are compiled anew for each type and order, 5 KB
//! of the WASM module each; this one is there once.

use std::cmp::Ordering;

/// Sorts items by a function; equal ones stay in their order.
pub(crate) fn by<T>(items: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    let mut order = order(items.len(), &|a, b| compare(&items[a], &items[b]));
    // Goes along each cycle once: what belongs to a place is swapped there, and the place says that it is done.
    for first in 0..order.len() {
        let mut place = first;
        loop {
            let from = std::mem::replace(&mut order[place], place);
            if from == first {
                break;
            }
            items.swap(place, from);
            place = from;
        }
    }
}

/// Sorts items by a key; equal ones stay in their order.
pub(crate) fn by_key<T, K: Ord>(items: &mut [T], key: impl Fn(&T) -> K) {
    by(items, |a, b| key(a).cmp(&key(b)));
}

/// The numbers `0..n` in an order; equal ones stay as they are.
pub(crate) fn order(n: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| compare(a, b));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Next to the standard library's stable sort, with many equal keys.
    #[test]
    fn sort_by_key_matches_the_standard_library() {
        for n in (0..40).chain([1000]) {
            let mut state = n as u32;
            let mut items: Vec<(u32, usize)> = (0..n)
                .map(|i| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 29, i)
                })
                .collect();
            let mut want = items.clone();
            want.sort_by_key(|&(key, _)| key);
            by_key(&mut items, |&(key, _)| key);
            assert_eq!(items, want);
            want.sort_by_key(|&(_, i)| std::cmp::Reverse(i));
            by(&mut items, |a, b| b.1.cmp(&a.1));
            assert_eq!(items, want);
        }
    }
}
