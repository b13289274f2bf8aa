//! The name that someone probably meant.

use strsim::levenshtein;

/// The candidate with the fewest edits from `word`, if they are few for its length.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = (word.len() / 4).max(1);
    let near = candidates.into_iter().map(|candidate| (levenshtein(word, candidate), candidate));
    near.filter(|(n, _)| *n <= most).min_by_key(|(n, _)| *n).map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_has_few_edits() {
        for (a, b, n) in [("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)] {
            assert_eq!((levenshtein(a, b), levenshtein(b, a)), (n, n), "{a}, {b}");
        }
        let names = ["TILEWRIGHT_CTX", "TILEWRIGHT_CORS", "TILEWRIGHT_PARALLEL"];
        assert_eq!(nearest("TILEWRIGHT_PARALEL", names), Some("TILEWRIGHT_PARALLEL"));
        assert_eq!(nearest("TILEWRIGHT_CONTEXT", names), Some("TILEWRIGHT_CTX"));
        assert_eq!(nearest("SOMETHING_ELSE", names), None);
    }
}
