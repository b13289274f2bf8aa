//! The texts of windows, decoded side by side: greedy or drawn, and again at a higher temperature where one seems wrong
//! (Radford et al. 2022, arXiv:2212.04356, section 4.5).

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::model::SpeechSession;
use super::options::TranscribeOptions;
use super::rules::SpeechTokens;
use crate::error::Error;
use crate::generate::log_sum_exp;
use crate::tokenizer::Tokenizer;

/// The text of a window, with what it is judged by.
#[derive(Clone, Debug)]
pub(super) struct WindowText {
    pub ids: Vec<u32>,
    /// The probability of each.
    pub probabilities: Vec<f32>,
    pub temperature: f32,
    /// Of the tokens and the end.
    pub mean_log_probability: f32,
    pub compression_ratio: f32,
    pub no_speech: f32,
}

impl WindowText {
    /// Whether there is no speech: the model says so, and is not sure of its text.
    pub fn is_silent(&self, options: &TranscribeOptions) -> bool {
        self.no_speech > options.max_no_speech && self.mean_log_probability <= options.min_log_probability
    }

    fn is_wrong(&self, options: &TranscribeOptions) -> bool {
        let is_unlikely = self.mean_log_probability < options.min_log_probability;
        // An unlikely text of silence is not tried again.
        let is_silent = self.no_speech > options.max_no_speech && is_unlikely;
        !is_silent && (self.compression_ratio > options.max_compression_ratio || is_unlikely)
    }
}

/// A window that the session has heard.
pub(super) struct Window {
    pub random: Random,
    /// Seconds before which a pair of timestamps does not end the text, at the first temperature: a text that seems wrong may
    /// be one that should have ended.
    pub least_end: f64,
}

/// Decodes the first windows of the session. `previous`: tokens of the text before; `beginning`: those that begin the
/// transcript.
pub(super) async fn decode(
    session: &mut SpeechSession,
    (tokenizer, tokens): (&Tokenizer, &SpeechTokens),
    (previous, beginning): (&[u32], &[u32]),
    options: &TranscribeOptions,
    windows: &mut [Window],
) -> Result<Vec<WindowText>, Error> {
    let max_ids = session.capacity() / 2;
    let mut before: Vec<u32> = Vec::new();
    if let Some(id) = tokens.previous.filter(|_| !previous.is_empty()) {
        let n_kept = previous.len().min(max_ids.saturating_sub(1));
        before.push(id);
        before.extend(&previous[previous.len() - n_kept..]);
    }
    let (start, rest) = beginning.split_at(beginning.len().min(1));
    (0..windows.len()).for_each(|window| session.rewind(window, 0));
    let at_start = append(session, windows.len(), &[&before[..], start].concat()).await?;
    let no_speech: Vec<f32> =
        at_start.iter().map(|logits| tokens.no_speech.map_or(0.0, |id| probability(logits, id))).collect();
    let first = if rest.is_empty() { at_start } else { append(session, windows.len(), rest).await? };
    let begun = before.len() + beginning.len();
    let max_ids = max_ids.min(session.capacity() - begun);
    let mut found: Vec<Option<WindowText>> = vec![None; windows.len()];
    for &temperature in &options.temperatures {
        let is_open = |text: &Option<WindowText>| text.as_ref().is_none_or(|text| text.is_wrong(options));
        let mut samples: Vec<Sample> = Vec::new();
        for (window, logits) in first.iter().enumerate().filter(|&(window, _)| is_open(&found[window])) {
            session.rewind(window, begun);
            samples.push(Sample::new(window, logits.clone()));
        }
        sample(session, tokens, (&mut samples, max_ids), (options, temperature), windows).await?;
        for Sample { window, ids, probabilities, sum, .. } in samples {
            let text: Vec<u32> = ids.iter().copied().filter(|&id| tokens.is_text(id)).collect();
            found[window] = Some(WindowText {
                mean_log_probability: (sum / (ids.len() + 1) as f64) as f32,
                compression_ratio: compression_ratio(tokenizer.decode(&text, true)?.trim()),
                ids,
                probabilities,
                temperature,
                no_speech: no_speech[window],
            });
        }
    }
    let none = || Error::Option { option: "temperatures", expected: "one or more".into(), found: "none".into() };
    found.into_iter().map(|text| text.ok_or_else(none)).collect()
}

/// Appends the same tokens to the first `n` windows. Returns the logits of each.
async fn append(session: &mut SpeechSession, n: usize, ids: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
    if let [id] = *ids {
        return session.logits_of_each(&(0..n).map(|window| (window, id)).collect::<Vec<_>>()).await;
    }
    let mut logits = Vec::with_capacity(n);
    for window in 0..n {
        logits.push(session.logits(window, ids).await?);
    }
    Ok(logits)
}

/// The tokens of a window that are chosen so far.
struct Sample {
    window: usize,
    ids: Vec<u32>,
    /// The probability of each.
    probabilities: Vec<f32>,
    /// Sum of the logarithms, of the end's too.
    sum: f64,
    /// Of the next token; none after the last.
    logits: Option<Vec<f32>>,
}

impl Sample {
    fn new(window: usize, logits: Vec<f32>) -> Sample {
        Sample { window, ids: Vec::new(), probabilities: Vec::new(), sum: 0.0, logits: Some(logits) }
    }
}

/// Chooses tokens of each window up to its end.
async fn sample(
    session: &mut SpeechSession,
    tokens: &SpeechTokens,
    (samples, max_ids): (&mut [Sample], usize),
    (options, temperature): (&TranscribeOptions, f32),
    windows: &mut [Window],
) -> Result<(), Error> {
    let is_first = options.temperatures.first() == Some(&temperature);
    loop {
        let (mut chosen, mut waiting) = (Vec::new(), Vec::new());
        for sample in samples.iter_mut() {
            let Some(mut logits) = sample.logits.take().filter(|_| sample.ids.len() < max_ids) else { continue };
            let Window { random, least_end } = &mut windows[sample.window];
            let least_end = if is_first { *least_end } else { 0.0 };
            tokens.apply(&mut logits, &sample.ids, options.timestamps, least_end);
            let id = choose(&logits, temperature, random);
            let log_probability = f64::from(logits[id as usize]) - log_sum_exp(&logits);
            sample.sum += log_probability;
            if id == tokens.end {
                continue;
            }
            sample.ids.push(id);
            sample.probabilities.push(log_probability.exp() as f32);
            if sample.ids.len() < max_ids {
                chosen.push((sample.window, id));
                waiting.push(sample);
            }
        }
        if chosen.is_empty() {
            return Ok(());
        }
        let logits = session.logits_of_each(&chosen).await?;
        waiting.into_iter().zip(logits).for_each(|(sample, logits)| sample.logits = Some(logits));
    }
}

/// The likeliest token, or one that is drawn.
fn choose(logits: &[f32], temperature: f32, random: &mut Random) -> u32 {
    let all = || logits.iter().copied().enumerate();
    let (likeliest, highest) =
        all().fold((0, f32::NEG_INFINITY), |most, (id, logit)| if logit > most.1 { (id, logit) } else { most });
    if temperature == 0.0 {
        return likeliest as u32;
    }
    let weight = |logit: f32| (f64::from(logit - highest) / f64::from(temperature)).exp();
    let mut left = random.share() * all().map(|(_, logit)| weight(logit)).sum::<f64>();
    for (id, logit) in all() {
        left -= weight(logit);
        if left < 0.0 {
            return id as u32;
        }
    }
    likeliest as u32
}

/// The probability of a token.
pub(super) fn probability(logits: &[f32], id: u32) -> f32 {
    logits.get(id as usize).map_or(0.0, |&logit| (f64::from(logit) - log_sum_exp(logits)).exp() as f32)
}

/// How many times the bytes of a text are those of its zlib stream: high where it repeats itself.
fn compression_ratio(text: &str) -> f32 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    // Writing to memory does not fail.
    let stream = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish()).unwrap_or_default();
    text.len() as f32 / stream.len().max(1) as f32
}

/// Numbers from a seed: SplitMix64 (Steele et al. 2014).
pub(super) struct Random(pub u64);

impl Random {
    /// From 0 to below 1.
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / 2f64.powi(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_texts_compress_well() {
        // Python: len(text) / len(zlib.compress(text)).
        for (text, zlib_bytes) in [("Thank you. ".repeat(20), 22.0), ("Plain words.".into(), 20.0)] {
            assert_eq!(compression_ratio(&text), text.len() as f32 / zlib_bytes, "{text:?}");
        }
        assert_eq!(compression_ratio(""), 0.0);
    }

    #[test]
    fn temperature_draws_by_probability() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 0.0];
        let mut random = Random(1);
        assert_eq!(choose(&logits, 0.0, &mut random), 1);
        let mut counts = [0u32; 4];
        (0..8000).for_each(|_| counts[choose(&logits, 1.0, &mut random) as usize] += 1);
        assert!(counts[2] == 0 && counts[1].abs_diff(4000) < 200 && counts[0].abs_diff(2000) < 200, "{counts:?}");
    }

    #[test]
    fn texts_are_judged_by_likelihood_and_repetition() {
        let options = TranscribeOptions::default();
        let text = |mean, ratio, no_speech| WindowText {
            ids: Vec::new(),
            probabilities: Vec::new(),
            temperature: 0.0,
            mean_log_probability: mean,
            compression_ratio: ratio,
            no_speech,
        };
        for (text, wrong, silent) in [
            (text(-0.3, 1.5, 0.1), false, false),
            (text(-1.3, 1.5, 0.1), true, false),
            (text(-0.3, 2.5, 0.1), true, false),
            (text(-1.3, 2.5, 0.9), false, true),
            (text(-0.3, 1.5, 0.9), false, false),
        ] {
            assert_eq!((text.is_wrong(&options), text.is_silent(&options)), (wrong, silent), "{text:?}");
        }
    }
}
