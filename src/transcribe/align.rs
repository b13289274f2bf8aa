//! Times of words, as OpenAI's `whisper` finds them: of each token, which of the encoder's rows some heads of the decoder
//! attend to; then the cheapest path through tokens and rows, by dynamic time warping (Sakoe and Chiba 1978,
//! doi:10.1109/TASSP.1978.1163055).
//!
//! ```text
//! weights [heads, tokens, rows] --normalise, filter, mean--> [tokens, rows] --path--> first row of each token --> words
//! ```

use std::ops::Range;

use super::Word;
use super::segments::Part;
use crate::error::Error;
use crate::tokenizer::Tokenizer;

/// Rows of the encoder in a second.
const ROWS_PER_SECOND: f64 = 50.0;
/// Rows on each side that the median filter sees.
const REACH: usize = 3;
/// Languages written without spaces, whose words are single characters.
const WITHOUT_SPACES: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];
/// ASCII punctuation in the order of its codes: a token that is a part of it is a word until it is joined to another.
const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
/// Marks that belong to the word after them, if they follow a space.
const BEFORE_WORDS: &str = "\"'“¿([{-";
/// Marks that belong to the word before them.
const AFTER_WORDS: &str = "\"'.。,，!！?？:：”)]}、";
/// Marks that end a sentence, where a pause is heard as a part of a word.
const ENDS: &str = ".。!！?？";
/// The median of words' durations counts as this at most, in seconds.
const MAX_MEDIAN: f64 = 0.7;
/// A segment's own time is kept where a word's differs from it by more, in seconds.
const MAX_MOVED: f64 = 0.5;

/// Collects what heads attend to.
pub(super) struct Attended {
    /// Sum over the heads, `[tokens, rows]`.
    sum: Vec<f32>,
    n_rows: usize,
}

impl Attended {
    pub fn new([n_tokens, n_rows]: [usize; 2]) -> Attended {
        Attended { sum: vec![0.0; n_tokens * n_rows], n_rows }
    }

    /// Adds a head's weights, `[tokens, rows]`, each row's relative to those of all tokens.
    pub fn add(&mut self, weights: &mut [f32]) {
        normalise(weights, self.n_rows);
        for (sum, weights) in self.sum.chunks_exact_mut(self.n_rows).zip(weights.chunks_exact(self.n_rows)) {
            add_filtered(weights, sum);
        }
    }

    /// The first row of each of the tokens in `tokens`.
    pub fn first_rows(&self, tokens: Range<usize>) -> Vec<usize> {
        path(&self.sum[tokens.start * self.n_rows..tokens.end * self.n_rows], self.n_rows)
    }
}

/// Mean 0 and standard deviation 1 over the tokens, for each row; 0 where all are equal.
fn normalise(weights: &mut [f32], n_rows: usize) {
    let n_tokens = (weights.len() / n_rows) as f32;
    let over_tokens = |weights: &[f32], of: &dyn Fn(usize, f32) -> f32| {
        let mut means = vec![0.0; n_rows];
        for token in weights.chunks_exact(n_rows) {
            means.iter_mut().zip(token).enumerate().for_each(|(row, (mean, weight))| *mean += of(row, *weight));
        }
        means.iter_mut().for_each(|mean| *mean /= n_tokens);
        means
    };
    let means = over_tokens(weights, &|_, weight| weight);
    let variances = over_tokens(weights, &|row, weight| (weight - means[row]).powi(2));
    let scales: Vec<f32> = variances.iter().map(|&v| if v > 0.0 { v.sqrt().recip() } else { 0.0 }).collect();
    for token in weights.chunks_exact_mut(n_rows) {
        token.iter_mut().zip(means.iter().zip(&scales)).for_each(|(weight, (mean, scale))| {
            *weight = (*weight - mean) * scale;
        });
    }
}

/// Adds the median around each row, which the rows near an end are mirrored for; the rows themselves if they are too few.
fn add_filtered(weights: &[f32], sum: &mut [f32]) {
    let n = weights.len();
    if n <= REACH {
        sum.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        return;
    }
    let mirrored = |at: usize| match at.checked_sub(REACH) {
        None => weights[REACH - at],
        Some(row) if row < n => weights[row],
        Some(row) => weights[2 * (n - 1) - row],
    };
    for (row, sum) in sum.iter_mut().enumerate() {
        let mut near: [f32; 2 * REACH + 1] = std::array::from_fn(|i| mirrored(row + i));
        *sum += *near.select_nth_unstable_by(REACH, f32::total_cmp).1;
    }
}

/// The first row of each token on the path of the highest sum from the first token and row to the last, where each step is to
/// the next token, the next row, or both.
fn path(matrix: &[f32], n_rows: usize) -> Vec<usize> {
    let n_tokens = matrix.len() / n_rows;
    // Costs up to each token and row, with a first row and column that no path comes from.
    let mut before = vec![f32::INFINITY; n_rows + 1];
    before[0] = 0.0;
    let mut steps = Vec::with_capacity(matrix.len());
    for token in matrix.chunks_exact(n_rows) {
        let mut costs = vec![f32::INFINITY; n_rows + 1];
        for (row, gain) in token.iter().enumerate() {
            let [both, next_token, next_row] = [before[row], before[row + 1], costs[row]];
            let (step, cost) = if both < next_token && both < next_row {
                (Step::Both, both)
            } else if next_token < both && next_token < next_row {
                (Step::Token, next_token)
            } else {
                (Step::Row, next_row)
            };
            costs[row + 1] = cost - gain;
            steps.push(step);
        }
        before = costs;
    }
    let mut firsts = vec![0; n_tokens];
    // The first token begins at row 0.
    let (mut token, mut row) = (n_tokens.saturating_sub(1), n_rows - 1);
    while token > 0 {
        firsts[token] = row;
        match steps[token * n_rows + row] {
            Step::Both if row > 0 => (token, row) = (token - 1, row - 1),
            Step::Row if row > 0 => row -= 1,
            _ => token -= 1,
        }
    }
    firsts
}

/// How a path comes to a token and a row.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Both,
    Token,
    Row,
}

/// The words of each part of a window's text. `parts`: tokens with their probabilities; `firsts`: the first row of each token
/// and of the end; `offset`: seconds before the window.
pub(super) fn words(
    tokenizer: &Tokenizer,
    language: &str,
    parts: &[Vec<(u32, f32)>],
    (firsts, offset): (&[usize], f64),
) -> Result<Vec<Vec<Word>>, Error> {
    let time = |token: usize| {
        let row = firsts.get(token).or(firsts.last()).copied().unwrap_or(0);
        hundredths(offset + row as f64 / ROWS_PER_SECOND)
    };
    let mut first = 0;
    let mut words_of = |tokens: &Vec<(u32, f32)>| {
        let bytes = tokens.iter().map(|&(id, _)| tokenizer.token_bytes(id)).collect::<Result<Vec<_>, _>>()?;
        let mut rest = &tokens[..];
        let word = |(text, n_tokens): (String, usize)| {
            let (own, others) = rest.split_at(n_tokens);
            let probability = own.iter().map(|(_, probability)| probability).sum::<f32>() / n_tokens as f32;
            let word = Word { start: time(first), end: time(first + n_tokens), text, probability };
            (rest, first) = (others, first + n_tokens);
            word
        };
        Ok(split(&bytes, !WITHOUT_SPACES.contains(&language)).into_iter().map(word).collect())
    };
    parts.iter().map(&mut words_of).collect()
}

fn hundredths(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

/// Texts of words, with the number of their tokens.
fn split(tokens: &[&[u8]], by_spaces: bool) -> Vec<(String, usize)> {
    let mut words: Vec<(String, usize)> = Vec::new();
    for (text, n_tokens) in whole_characters(tokens) {
        let begins = !by_spaces || text.starts_with(' ') || PUNCTUATION.contains(text.trim());
        match words.last_mut() {
            Some((word, n)) if !begins => {
                *word += &text;
                *n += n_tokens;
            }
            _ => words.push((text, n_tokens)),
        }
    }
    words
}

/// The shortest runs of tokens that are whole characters. Bytes of none become U+FFFD.
fn whole_characters(tokens: &[&[u8]]) -> Vec<(String, usize)> {
    let (mut found, mut bytes, mut n_tokens) = (Vec::new(), Vec::new(), 0);
    for (i, token) in tokens.iter().enumerate() {
        bytes.extend_from_slice(token);
        n_tokens += 1;
        let is_cut = std::str::from_utf8(&bytes).is_err_and(|error| error.error_len().is_none());
        if !is_cut || i + 1 == tokens.len() {
            found.push((String::from_utf8_lossy(&bytes).into_owned(), n_tokens));
            bytes.clear();
            n_tokens = 0;
        }
    }
    found
}

/// Gives each part its words. `spoken_until`: where the last word before ends; it becomes the end of the last part's.
pub(super) fn assign(parts: &mut [Part], mut words: Vec<Vec<Word>>, spoken_until: &mut f64) {
    let limits = Durations::of(words.iter().flatten());
    limits.shorten_at_sentences(&mut words.iter_mut().flatten().collect::<Vec<_>>());
    let mut until = *spoken_until;
    for (part, words) in parts.iter_mut().zip(words) {
        part.words = joined(words);
        limits.fit(part, &mut until);
    }
    if let Some(last) = parts.iter().rev().find_map(|part| part.words.last()) {
        *spoken_until = last.end;
    }
}

/// Joins punctuation to its words.
fn joined(words: Vec<Word>) -> Vec<Word> {
    let mut found: Vec<Word> = Vec::new();
    for word in words.into_iter().rev() {
        match found.last_mut() {
            Some(next) if word.text.starts_with(' ') && BEFORE_WORDS.contains(word.text.trim()) => {
                next.text.insert_str(0, &word.text);
            }
            _ => found.push(word),
        }
    }
    let mut all: Vec<Word> = Vec::with_capacity(found.len());
    for word in found.into_iter().rev() {
        match all.last_mut() {
            Some(last) if !last.text.ends_with(' ') && AFTER_WORDS.contains(&*word.text) => last.text += &word.text,
            _ => all.push(word),
        }
    }
    all
}

/// How long words of a window last, in seconds.
#[derive(Clone, Copy, Debug)]
struct Durations {
    median: f64,
    most: f64,
}

impl Durations {
    fn of<'a>(words: impl Iterator<Item = &'a Word>) -> Durations {
        let durations = words.map(|word| word.end - word.start);
        let mut durations: Vec<f64> = durations.filter(|&seconds| seconds != 0.0).collect();
        durations.sort_unstable_by(f64::total_cmp);
        let middle = durations.len() / 2;
        let median = match (durations.len() % 2, durations.get(middle)) {
            (_, None) => 0.0,
            (1, Some(&median)) => median,
            (_, Some(&upper)) => (durations[middle - 1] + upper) / 2.0,
        };
        let median = median.min(MAX_MEDIAN);
        Durations { median, most: 2.0 * median }
    }

    /// Shortens the marks that end sentences, and the words after them.
    fn shorten_at_sentences(&self, words: &mut [&mut Word]) {
        for i in 1..words.len() {
            let [after_end, ends] = [i - 1, i].map(|i| ENDS.contains(&*words[i].text));
            let word = &mut words[i];
            if word.end - word.start <= self.most {
                continue;
            }
            if ends {
                word.end = word.start + self.most;
            } else if after_end {
                word.start = word.end - self.most;
            }
        }
    }

    /// Shortens the first words of a part after a pause, and takes the times of a part from its words unless one of these is
    /// too long. `until`: where the last word before ends; it becomes the part's end.
    fn fit(&self, part: &mut Part, until: &mut f64) {
        let Durations { median, most } = *self;
        if let [first, rest @ ..] = &mut part.words[..]
            && first.end - *until > 4.0 * median
        {
            let second = rest.first_mut();
            let both = second.as_ref().map_or(0.0, |second| second.end - first.start);
            if first.end - first.start > most || both > 2.0 * most {
                if let Some(second) = second.filter(|second| second.end - second.start > most) {
                    let boundary = (second.end / 2.0).max(second.end - most);
                    (first.end, second.start) = (boundary, boundary);
                }
                first.start = (first.end - most).max(0.0);
            }
        }
        if let Some(first) = part.words.first_mut() {
            match part.start < first.end && part.start - MAX_MOVED > first.start {
                true => first.start = (first.end - median).min(part.start).max(0.0),
                false => part.start = first.start,
            }
        }
        if let Some(last) = part.words.last_mut() {
            match part.end > last.start && part.end + MAX_MOVED < last.end {
                true => last.end = (last.start + median).max(part.end),
                false => part.end = last.end,
            }
            *until = part.end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum along the best path, over all paths.
    fn best(matrix: &[f32], n_rows: usize, token: usize, row: usize) -> (f32, Vec<usize>) {
        let gain = matrix[token * n_rows + row];
        let from = [(1, 1), (1, 0), (0, 1)].into_iter().filter_map(|(t, r)| {
            let (from_token, from_row) = (token.checked_sub(t)?, row.checked_sub(r)?);
            let (sum, mut firsts) = best(matrix, n_rows, from_token, from_row);
            firsts.extend((t == 1).then_some(row));
            Some((sum + gain, firsts))
        });
        from.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((gain, vec![0]))
    }

    #[test]
    fn path_is_the_best_of_all() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 - 0.5
        };
        for (n_tokens, n_rows) in [(1, 1), (1, 4), (4, 1), (4, 6), (6, 4), (5, 5)] {
            for _ in 0..10 {
                let matrix: Vec<f32> = (0..n_tokens * n_rows).map(|_| next()).collect();
                let (_, want) = best(&matrix, n_rows, n_tokens - 1, n_rows - 1);
                assert_eq!(path(&matrix, n_rows), want, "{n_tokens} x {n_rows}: {matrix:?}");
            }
        }
    }

    #[test]
    fn weights_are_relative_to_other_tokens_and_filtered() {
        // Two tokens, six rows; row 2 is an outlier, and both see row 5 equally.
        let mut weights = [[0.1, 0.1, 9.0, 0.1, 0.1, 0.5], [0.3, 0.3, 1.0, 0.3, 0.3, 0.5]].concat();
        let mut attended = Attended::new([2, 6]);
        attended.add(&mut weights);
        for (found, want) in weights.iter().zip([-1.0, -1.0, 1.0, -1.0, -1.0, 0.0, 1.0, 1.0, -1.0, 1.0, 1.0, 0.0]) {
            assert!((found - want).abs() < 1e-4, "{weights:?}");
        }
        // Of row 5: rows 2, 3, 4, 5, 4, 3, 2.
        let near = |found: &[f32], want: [f32; 6]| found.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(near(&attended.sum[..6], [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0]), "{:?}", attended.sum);
        assert!(near(&attended.sum[6..], [1.0; 6]), "{:?}", attended.sum);
        let mut few = Attended::new([1, 3]);
        few.add(&mut [1.0, 2.0, 3.0]);
        assert_eq!(few.sum, [0.0; 3]);
    }

    #[test]
    fn words_are_split_at_spaces_and_punctuation_or_characters() {
        let owned =
            |words: &[(&str, usize)]| words.iter().map(|(text, n)| ((*text).to_owned(), *n)).collect::<Vec<_>>();
        let tokens: [&[u8]; 6] = [b" Ca", b"f\xc3", b"\xa9", b",", b" isn", b"'t"];
        assert_eq!(split(&tokens, true), owned(&[(" Caf\u{e9}", 3), (",", 1), (" isn't", 2)]));
        let tokens: [&[u8]; 4] = ["\u{65e5}".as_bytes(), &[0xe6, 0x9c], &[0xac], "\u{3002}".as_bytes()];
        assert_eq!(split(&tokens, false), owned(&[("\u{65e5}", 1), ("\u{672c}", 2), ("\u{3002}", 1)]));
        // Bytes that are no character, and one that is cut off.
        assert_eq!(split(&[b"a\xff", b"\xc3"], false), owned(&[("a\u{fffd}", 1), ("\u{fffd}", 1)]));
        assert!(split(&[], true).is_empty());
    }

    fn timed(words: &[(&str, f64, f64)]) -> Vec<Word> {
        let word = |&(text, start, end): &(&str, f64, f64)| Word { text: text.into(), start, end, probability: 1.0 };
        words.iter().map(word).collect()
    }

    #[test]
    fn punctuation_belongs_to_its_word() {
        let all = [" \"", "(", "Hello", ",", "\"", " she", " -", " said", ".", "."];
        let words = joined(timed(&all.map(|text| (text, 0.0, 1.0))));
        let texts: Vec<&str> = words.iter().map(|word| &*word.text).collect();
        assert_eq!(texts, [" \"(", "Hello,\"", " she", " - said.."]);
    }

    #[test]
    fn words_are_shortened_after_pauses_and_give_parts_their_times() {
        let words =
            [(" One", 0.0, 3.0), (" two", 3.0, 3.4), (" three", 3.4, 3.8), (".", 3.8, 6.0), (" Four", 6.0, 6.4)];
        let part = |start, end| Part { start, end, ids: Vec::new(), words: Vec::new() };
        let mut parts = [part(2.0, 3.8), part(6.0, 6.4), part(6.4, 7.0)];
        let mut until = 0.0;
        assign(&mut parts, vec![timed(&words[..4]), timed(&words[4..]), Vec::new()], &mut until);
        let words = parts.iter().flat_map(|part| &part.words);
        let shown = |text: &str, start: f64, end: f64| format!("{text} {start:.3} {end:.3}");
        let found: Vec<String> = words.map(|word| shown(word.text.trim(), word.start, word.end)).collect();
        assert_eq!(found, ["One 2.200 3.000", "two 3.000 3.400", "three. 3.400 3.800", "Four 6.000 6.400"]);
        let times: Vec<String> = parts.iter().map(|part| shown("part", part.start, part.end)).collect();
        assert_eq!(times, ["part 2.200 3.800", "part 6.000 6.400", "part 6.400 7.000"]);
        assert_eq!(until, 6.4);
        // A segment's own time is kept where the word is far from it.
        let mut parts = [part(2.0, 9.0)];
        assign(&mut parts, vec![timed(&[(" One", 0.0, 9.6)])], &mut 9.0);
        let [word] = &parts[0].words[..] else { panic!("{parts:?}") };
        assert_eq!((word.start, word.end, parts[0].start, parts[0].end), (2.0, 9.0, 2.0, 9.0));
    }
}
