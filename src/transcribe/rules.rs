//! Which tokens may follow: those of a transcript, and timestamps in pairs that do not go back (Radford et al. 2022,
//! arXiv:2212.04356, section 4.5).

use super::options::Task;
use crate::error::Error;
use crate::generate::log_sum_exp;
use crate::load::{LANGUAGES, SpeechGeneration};
use crate::tokenizer::Tokenizer;

/// Seconds of a step between timestamps.
const STEP_SECONDS: f64 = 0.02;

/// The tokens of a speech model that are no text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SpeechTokens {
    /// Begins a transcript.
    pub start: u32,
    /// Ends it.
    pub end: u32,
    /// Languages by code; empty in models of English alone.
    pub languages: Vec<(String, u32)>,
    pub transcribe: Option<u32>,
    pub translate: Option<u32>,
    /// Begins the text of an earlier part.
    pub previous: Option<u32>,
    /// Stands for a part without speech.
    pub no_speech: Option<u32>,
    pub no_timestamps: u32,
    /// The timestamp of the beginning; later ones follow it.
    pub first_timestamp: u32,
    /// Tokens that are never chosen, in order.
    suppressed: Vec<u32>,
    /// Tokens that are not chosen first.
    suppressed_first: Vec<u32>,
    max_first_timestamp: u32,
}

impl SpeechTokens {
    /// By the tokenizer's special tokens and the settings of a model with so many tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming a token that is missing.
    pub fn new(tokenizer: &Tokenizer, settings: &SpeechGeneration, vocab_size: u32) -> Result<SpeechTokens, Error> {
        let id = |names: &[&str]| names.iter().find_map(|name| tokenizer.special_id(&format!("<|{name}|>")));
        let required = |name: &str| {
            id(&[name]).ok_or_else(|| Error::Tokenizer {
                field: format!("<|{name}|>"),
                expected: "a token of this name, as in all Whisper models".into(),
                found: "missing".into(),
            })
        };
        let start = settings.start_id.map_or_else(|| required("startoftranscript"), Ok)?;
        let end = settings.end_id.map_or_else(|| required("endoftext"), Ok)?;
        let no_timestamps = required("notimestamps")?;
        let first_timestamp = no_timestamps + 1;
        if first_timestamp >= vocab_size {
            return Err(Error::Tokenizer {
                field: "<|notimestamps|>".into(),
                expected: format!("timestamps after it, below {vocab_size}"),
                found: no_timestamps.to_string(),
            });
        }
        // A model of English alone has these tokens, too, and does not use them.
        let is_multilingual =
            settings.is_multilingual.unwrap_or(!settings.languages.is_empty() || vocab_size >= 51_865);
        let listed = || {
            let of = |(code, _): &(&str, &str)| Some(((*code).to_owned(), id(&[code])?));
            LANGUAGES.iter().filter_map(of).collect()
        };
        let languages = match (is_multilingual, settings.languages.is_empty()) {
            (false, _) => Vec::new(),
            (true, true) => listed(),
            (true, false) => settings.languages.clone(),
        };
        let is_special = |id: &u32| *id < first_timestamp && *id != end;
        let special = tokenizer.special_tokens().map(|(_, id)| id).filter(is_special);
        let mut suppressed: Vec<u32> = special.chain(settings.suppressed.iter().copied()).collect();
        suppressed.extend([start, no_timestamps]);
        suppressed.retain(|&id| id < vocab_size && id != end);
        suppressed.sort_unstable();
        suppressed.dedup();
        Ok(SpeechTokens {
            start,
            end,
            languages,
            transcribe: id(&["transcribe"]).filter(|_| is_multilingual),
            translate: id(&["translate"]).filter(|_| is_multilingual),
            previous: id(&["startofprev"]),
            no_speech: id(&["nospeech", "nocaptions"]),
            no_timestamps,
            first_timestamp,
            suppressed,
            suppressed_first: settings.suppressed_first.iter().copied().filter(|&id| id < vocab_size).collect(),
            max_first_timestamp: settings.max_first_timestamp,
        })
    }

    /// Whether a token is a timestamp.
    pub fn is_timestamp(&self, id: u32) -> bool {
        id >= self.first_timestamp
    }

    /// Seconds from the beginning of a window to a timestamp.
    pub fn seconds(&self, id: u32) -> f64 {
        f64::from(id.saturating_sub(self.first_timestamp)) * STEP_SECONDS
    }

    /// Whether a token is a part of the text.
    pub fn is_text(&self, id: u32) -> bool {
        !self.is_timestamp(id) && id != self.end && self.suppressed.binary_search(&id).is_err()
    }

    /// The tokens that begin a transcript.
    pub fn beginning(&self, language: Option<u32>, task: Task, timestamps: bool) -> Vec<u32> {
        let task = match task {
            Task::Transcribe => self.transcribe,
            Task::Translate => self.translate,
        };
        let no_timestamps = (!timestamps).then_some(self.no_timestamps);
        [Some(self.start), language, task, no_timestamps].into_iter().flatten().collect()
    }

    /// Makes tokens impossible that cannot follow `chosen`, all that were chosen in a window. `least_end`: a pair of timestamps
    /// before this many seconds does not end the text, though it says that the model has heard more.
    pub fn apply(&self, logits: &mut [f32], chosen: &[u32], timestamps: bool, least_end: f64) {
        const IMPOSSIBLE: f32 = f32::NEG_INFINITY;
        let forbid = |logits: &mut [f32], ids: &[u32]| {
            ids.iter().filter_map(|&id| usize::try_from(id).ok()).for_each(|id| {
                if let Some(logit) = logits.get_mut(id) {
                    *logit = IMPOSSIBLE;
                }
            });
        };
        forbid(logits, &self.suppressed);
        if chosen.is_empty() {
            forbid(logits, &self.suppressed_first);
            forbid(logits, &[self.end]);
        }
        let first = (self.first_timestamp as usize).min(logits.len());
        if !timestamps {
            logits[first..].fill(IMPOSSIBLE);
            return;
        }
        let (last, before) = match chosen {
            [.., before, last] => (self.is_timestamp(*last), self.is_timestamp(*before)),
            [last] => (self.is_timestamp(*last), true),
            [] => (false, true),
        };
        if last && before {
            // Text follows a pair.
            logits[first..].fill(IMPOSSIBLE);
            if matches!(chosen, [.., _, last] if self.seconds(*last) < least_end) {
                forbid(logits, &[self.end]);
            }
        } else if last {
            // A timestamp that ends a text is followed by one that begins the next, or by the end.
            let end = logits.get(self.end as usize).copied();
            logits[..first].fill(IMPOSSIBLE);
            if let (Some(logit), Some(end)) = (logits.get_mut(self.end as usize), end) {
                *logit = end;
            }
        }
        if let Some(latest) = chosen.iter().rev().find(|&&id| self.is_timestamp(id)) {
            // Only one that begins a text may equal the last.
            let least = latest + u32::from(!last || before);
            let least = (least as usize).min(logits.len());
            logits[first..least].fill(IMPOSSIBLE);
        }
        if chosen.is_empty() {
            logits[..first].fill(IMPOSSIBLE);
            let after = (first + self.max_first_timestamp as usize + 1).min(logits.len());
            logits[after..].fill(IMPOSSIBLE);
        }
        // A timestamp, if all together are likelier than any text.
        let (texts, times) = logits.split_at(first);
        let likeliest = texts.iter().copied().fold(IMPOSSIBLE, f32::max);
        if log_sum_exp(times) > f64::from(likeliest) {
            logits[..first].fill(IMPOSSIBLE);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// 0 to 5: text; 6: the end; 7: the start; 8: no timestamps; 9 to 19: timestamps.
    pub fn tokens() -> SpeechTokens {
        SpeechTokens {
            start: 7,
            end: 6,
            languages: Vec::new(),
            transcribe: None,
            translate: None,
            previous: None,
            no_speech: None,
            no_timestamps: 8,
            first_timestamp: 9,
            suppressed: vec![5, 7, 8],
            suppressed_first: vec![0],
            max_first_timestamp: 4,
        }
    }

    fn possible(chosen: &[u32], likely: &[(usize, f32)]) -> Vec<usize> {
        let mut logits = [0.0f32; 20];
        likely.iter().for_each(|&(id, logit)| logits[id] = logit);
        tokens().apply(&mut logits, chosen, true, 0.0);
        (0..20).filter(|&id| logits[id] > f32::NEG_INFINITY).collect()
    }

    #[test]
    fn a_transcript_begins_with_an_early_timestamp() {
        assert_eq!(possible(&[], &[(1, 9.0)]), (9..=13).collect::<Vec<_>>());
    }

    #[test]
    fn text_follows_a_timestamp_that_begins_it() {
        assert_eq!(possible(&[9], &[]), [0, 1, 2, 3, 4, 6]);
        assert_eq!(possible(&[9, 1, 12, 12], &[]), [0, 1, 2, 3, 4, 6]);
    }

    #[test]
    fn text_follows_a_pair_before_the_least_end() {
        let ends = |chosen: &[u32], least_end| {
            let mut logits = [0.0f32; 20];
            logits[6] = 9.0;
            tokens().apply(&mut logits, chosen, true, least_end);
            logits[6] > f32::NEG_INFINITY
        };
        // The pair is at 0.06 s.
        assert_eq!([0.05, 0.07].map(|least| ends(&[9, 1, 12, 12], least)), [true, false]);
        // Nobody speaks, or no more.
        assert!(ends(&[9], 0.07) && ends(&[9, 1, 12], 0.07) && ends(&[9, 1], 0.07));
    }

    #[test]
    fn a_timestamp_or_the_end_follows_one_that_ends_a_text() {
        assert_eq!(possible(&[9, 1, 12], &[(6, 9.0)]), [vec![6], (12..20).collect()].concat());
    }

    #[test]
    fn timestamps_do_not_go_back() {
        assert_eq!(possible(&[10, 1], &[(1, 9.0)]), [vec![0, 1, 2, 3, 4, 6], (11..20).collect()].concat());
    }

    #[test]
    fn likely_timestamps_exclude_text() {
        // Nine of 0 are together as likely as one of 2.2.
        assert_eq!(possible(&[10, 1], &[(1, 2.1)]), (11..20).collect::<Vec<_>>());
        assert!(possible(&[10, 1], &[(1, 2.3)]).contains(&1));
    }

    #[test]
    fn without_timestamps_only_text_is_possible() {
        let mut logits = [0.0f32; 20];
        tokens().apply(&mut logits, &[], false, 0.0);
        let possible: Vec<usize> = (0..20).filter(|&id| logits[id] == 0.0).collect();
        assert_eq!(possible, [1, 2, 3, 4]);
    }

    #[test]
    fn log_sums_are_of_exponentials() {
        assert!((log_sum_exp(&[0.0, 1.0, -1.0]) - (1.0 + 1f64.exp() + (-1f64).exp()).ln()).abs() < 1e-12);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY]), f64::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[]), f64::NEG_INFINITY);
    }
}
