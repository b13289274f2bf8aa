//! Segments of a window's tokens, and how far the next window is.

use super::Word;
use super::rules::SpeechTokens;

/// Frames of a spectrogram in a second.
pub(super) const FRAMES_PER_SECOND: f64 = 100.0;

/// A part of a window's tokens, in seconds from the sound's beginning.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    pub start: f64,
    pub end: f64,
    pub ids: Vec<u32>,
    pub words: Vec<Word>,
}

impl Part {
    fn new(start: f64, end: f64, ids: &[u32]) -> Part {
        Part { start, end, ids: ids.to_vec(), words: Vec::new() }
    }
}

/// The parts of a window.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Parts {
    pub parts: Vec<Part>,
    /// Frames to the next window: to the last pair of timestamps, after which the text is not complete, or else all.
    pub next: u32,
    /// Whether nobody speaks after the last part: a single timestamp ends it.
    pub is_end: bool,
}

/// Cuts the tokens of a window of `n_frames` from frame `seek` on at pairs of timestamps. `is_whole`: what follows the last pair
/// is a part, too, as no other window begins there.
pub(super) fn parts(tokens: &SpeechTokens, ids: &[u32], [seek, n_frames]: [u32; 2], is_whole: bool) -> Parts {
    let offset = f64::from(seek) / FRAMES_PER_SECOND;
    let is_time = |id: &u32| tokens.is_timestamp(*id);
    let is_end = matches!(ids, [.., text, time] if !is_time(text) && is_time(time));
    let mut cuts: Vec<usize> =
        (1..ids.len()).filter(|&i| ids.get(i - 1..=i).is_some_and(|pair| pair.iter().all(is_time))).collect();
    let seconds = f64::from(n_frames) / FRAMES_PER_SECOND;
    if cuts.is_empty() {
        let last = ids.iter().rev().find(|id| is_time(id)).map(|&id| tokens.seconds(id));
        let end = last.filter(|&end| end > 0.0).unwrap_or(seconds);
        return Parts { parts: vec![Part::new(offset, offset + end, ids)], next: n_frames, is_end };
    }
    if is_end || is_whole {
        cuts.push(ids.len());
    }
    let time = |id: Option<&u32>| id.map_or(0.0, |&id| tokens.seconds(id));
    let (mut found, mut from, mut end) = (Vec::new(), 0, 0.0);
    for cut in cuts {
        let ids = &ids[from..cut];
        end = if ids.last().is_some_and(is_time) { time(ids.last()) } else { seconds };
        found.push(Part::new(offset + time(ids.first()), offset + end, ids));
        from = cut;
    }
    let heard = (end * FRAMES_PER_SECOND).round() as u32;
    let next = if is_end || is_whole { n_frames } else { heard.min(n_frames) };
    // A window that ends where it began would come again for ever.
    Parts { parts: found, next: if next == 0 { n_frames } else { next }, is_end }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transcribe::rules::tests::tokens;

    fn cut(ids: &[u32]) -> (Vec<(f64, f64, Vec<u32>)>, u32) {
        rounded(parts(&tokens(), ids, [0, 100], false))
    }

    fn rounded(Parts { parts, next, .. }: Parts) -> (Vec<(f64, f64, Vec<u32>)>, u32) {
        let hundredth = |seconds: f64| (seconds * 100.0).round() / 100.0;
        (parts.into_iter().map(|part| (hundredth(part.start), hundredth(part.end), part.ids)).collect(), next)
    }

    #[test]
    fn what_follows_the_last_pair_of_a_whole_window_is_a_part() {
        let cut = |ids: &[u32]| rounded(parts(&tokens(), ids, [0, 100], true));
        let (parts, next) = cut(&[9, 1, 12, 12, 2, 3]);
        assert_eq!(parts, [(0.0, 0.06, vec![9, 1, 12]), (0.06, 1.0, vec![12, 2, 3])]);
        assert_eq!(next, 100);
        assert_eq!(cut(&[9, 1, 12, 13, 2, 15]), super::tests::cut(&[9, 1, 12, 13, 2, 15]));
        assert_eq!(cut(&[9, 1, 2]), super::tests::cut(&[9, 1, 2]));
    }

    #[test]
    fn pairs_of_timestamps_cut_and_the_next_window_begins_at_the_last() {
        let (parts, next) = cut(&[9, 1, 12, 12, 2, 15, 15, 3]);
        assert_eq!(parts, [(0.0, 0.06, vec![9, 1, 12]), (0.06, 0.12, vec![12, 2, 15])]);
        assert_eq!(next, 12);
    }

    #[test]
    fn a_single_timestamp_at_the_end_ends_the_window() {
        let (parts, next) = cut(&[9, 1, 12, 13, 2, 15]);
        assert_eq!(parts, [(0.0, 0.06, vec![9, 1, 12]), (0.08, 0.12, vec![13, 2, 15])]);
        assert_eq!(next, 100);
    }

    #[test]
    fn without_a_pair_a_window_is_one_segment() {
        assert_eq!(cut(&[9, 1, 2, 14]), (vec![(0.0, 0.1, vec![9, 1, 2, 14])], 100));
        assert_eq!(cut(&[9, 1, 2]), (vec![(0.0, 1.0, vec![9, 1, 2])], 100));
        assert_eq!(cut(&[]), (vec![(0.0, 1.0, vec![])], 100));
    }

    #[test]
    fn a_window_that_ends_where_it_began_is_left() {
        assert_eq!(cut(&[9, 1, 9, 9]).1, 100);
    }
}
