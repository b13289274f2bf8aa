//! The name that someone probably meant.

/// The candidate with the fewest edits from `word`, if they are few for its length.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = (word.len() / 4).max(1);
    let near = candidates.into_iter().map(|candidate| (edits(word, candidate), candidate));
    near.filter(|(n, _)| *n <= most).min_by_key(|(n, _)| *n).map(|(_, candidate)| candidate)
}

/// [Levenshtein distance](https://en.wikipedia.org/wiki/Levenshtein_distance) in bytes.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_has_few_edits() {
        for (a, b, n) in [("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)] {
            assert_eq!((edits(a, b), edits(b, a)), (n, n), "{a}, {b}");
        }
        let names = ["TILEWRIGHT_CTX", "TILEWRIGHT_CORS", "TILEWRIGHT_PARALLEL"];
        assert_eq!(nearest("TILEWRIGHT_PARALEL", names), Some("TILEWRIGHT_PARALLEL"));
        assert_eq!(nearest("TILEWRIGHT_CONTEXT", names), Some("TILEWRIGHT_CTX"));
        assert_eq!(nearest("SOMETHING_ELSE", names), None);
    }
}
