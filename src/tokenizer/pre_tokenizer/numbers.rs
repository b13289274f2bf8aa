//! Numbers in groups of three digits, counted from the end. Processes each number as a whole, because an expression
//! with lookahead from each digit takes quadratic time.

use super::words::{first, run, tail};

/// Emits the groups of each number that `may_end` allows by the character after it, and the text between them.
pub(super) fn isolate_groups<'t>(
    text: &'t str,
    is_digit: fn(char) -> bool,
    may_end: impl Fn(Option<char>) -> bool,
    emit: &mut dyn FnMut(&'t str),
) {
    let mut put =
        |from: usize, to: usize| text.get(from..to).filter(|part| !part.is_empty()).into_iter().for_each(&mut *emit);
    let mut done = 0;
    for (start, end) in numbers(text, is_digit) {
        if !may_end(first(tail(text, end))) {
            continue;
        }
        put(done, start);
        let mut begin = start;
        for at in group_starts(text, start, end).chain([end]) {
            put(begin, at);
            begin = at;
        }
        done = end;
    }
    put(done, text.len());
}

/// Splits `text` before each group of a number; not after the last group.
pub(super) fn cut_before_groups<'t>(text: &'t str, is_digit: fn(char) -> bool, emit: &mut dyn FnMut(&'t str)) {
    let mut put =
        |from: usize, to: usize| text.get(from..to).filter(|part| !part.is_empty()).into_iter().for_each(&mut *emit);
    let mut done = 0;
    for (start, end) in numbers(text, is_digit) {
        for at in group_starts(text, start, end) {
            put(done, at);
            done = at;
        }
    }
    put(done, text.len());
}

/// Start and end of each number.
fn numbers(text: &str, is_digit: fn(char) -> bool) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + tail(text, at).find(is_digit)?;
        at = start + run(tail(text, start), is_digit);
        Some((start, at))
    })
}

/// Offsets in a number after which a multiple of three digits remains.
fn group_starts(text: &str, start: usize, end: usize) -> impl Iterator<Item = usize> {
    let number = text.get(start..end).unwrap_or("");
    let n_digits = number.chars().count();
    let places = number.char_indices().enumerate();
    places.filter(move |(n, _)| (n_digits - n).is_multiple_of(3)).map(move |(_, (at, _))| start + at)
}
