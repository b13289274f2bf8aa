//! How to transcribe.

use super::languages::code_of;
use crate::error::Error;
use crate::kernels::KvType;

/// The most windows that are decoded side by side.
pub const MAX_BATCH: usize = 64;

/// How to load a speech model.
#[derive(Clone, Copy, Debug, Default)]
pub struct TranscriberOptions {
    /// What keys and values are cached as. Default: [`KvType::F16`].
    pub kv_type: KvType,
    /// Bytes that the model may take; one that needs more is refused before its upload. Default: free memory, if known.
    pub memory_limit: Option<u64>,
}

/// What becomes of speech.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// Text in the language that is spoken.
    #[default]
    Transcribe,
    /// Text in English.
    Translate,
}

impl Task {
    /// All tasks.
    pub const ALL: [Task; 2] = [Task::Transcribe, Task::Translate];

    /// The name in OpenAI's `whisper`.
    pub fn name(self) -> &'static str {
        match self {
            Task::Transcribe => "transcribe",
            Task::Translate => "translate",
        }
    }
}

/// How to transcribe a sound. Defaults are those of OpenAI's `whisper`.
#[derive(Clone, Debug, PartialEq)]
pub struct TranscribeOptions {
    /// The language that is spoken, by code or English name; `auto` and the default: detected in the first window.
    pub language: Option<String>,
    /// What becomes of speech. Default: [`Task::Transcribe`].
    pub task: Task,
    /// Whether segments have times by the model's timestamps; otherwise each window is a segment. Default: true.
    pub timestamps: bool,
    /// Whether segments have words with times. Segments then begin and end with their words. Default: false.
    pub words: bool,
    /// A text before the first window, in a batch before each: names, spelling, style.
    pub prompt: Option<String>,
    /// Whether the text of a window is the prompt of the next, unless they are decoded in a batch. Default: true.
    pub follows_text: bool,
    /// Number of windows to decode at once, 1 to [`MAX_BATCH`]: faster for long sounds, but needs more memory. With more than
    /// one, the sound is cut at pauses, no window has the text before it as context, and each has the prompt. Default: 1.
    pub batch_size: usize,
    /// Temperatures, the next of which is taken where a text seems wrong. Default: 0, 0.2, .. 1.
    pub temperatures: Vec<f32>,
    /// A text is wrong whose bytes are more than so many times those of its zlib stream. Default: 2.4.
    pub max_compression_ratio: f32,
    /// A text is wrong whose mean log-probability is lower. Default: -1.
    pub min_log_probability: f32,
    /// A window is silent where the token for no speech has a higher probability and the text a mean log-probability below
    /// [`TranscribeOptions::min_log_probability`]. Default: 0.6.
    pub max_no_speech: f32,
    /// Seed of what temperatures above 0 draw.
    pub seed: u64,
}

impl Default for TranscribeOptions {
    fn default() -> TranscribeOptions {
        TranscribeOptions {
            language: None,
            task: Task::Transcribe,
            timestamps: true,
            words: false,
            prompt: None,
            follows_text: true,
            batch_size: 1,
            temperatures: vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            max_compression_ratio: 2.4,
            min_log_probability: -1.0,
            max_no_speech: 0.6,
            seed: 0,
        }
    }
}

impl TranscribeOptions {
    /// Checks the options against a model's languages, [`Transcriber::languages`](crate::Transcriber::languages), and
    /// returns the code of the requested one.
    ///
    /// # Errors
    /// [`Error::Option`] for an option out of range, or that the model does not have.
    pub fn check<'a>(&self, languages: &[&'a str], translates: bool) -> Result<Option<&'a str>, Error> {
        let wrong = |option, expected: String, found: String| Err(Error::Option { option, expected, found });
        if self.temperatures.is_empty() || self.temperatures.iter().any(|t| !(0.0..=2.0).contains(t)) {
            return wrong("temperatures", "one or more from 0 to 2".into(), format!("{:?}", self.temperatures));
        }
        if !(1..=MAX_BATCH).contains(&self.batch_size) {
            return wrong("batch_size", format!("1 to {MAX_BATCH}"), self.batch_size.to_string());
        }
        for (option, value) in [
            ("max_compression_ratio", self.max_compression_ratio),
            ("min_log_probability", self.min_log_probability),
            ("max_no_speech", self.max_no_speech),
        ] {
            if value.is_nan() {
                return wrong(option, "a number".into(), value.to_string());
            }
        }
        if self.task == Task::Translate && !translates {
            return wrong("task", "transcribe, as this model knows English alone".into(), "translate".into());
        }
        let asked = self.language.as_deref().filter(|language| !["", "auto"].contains(language));
        let Some(language) = asked else { return Ok(None) };
        // `de-DE` is German.
        let code = code_of(language).or_else(|| code_of(language.split_once(['-', '_'])?.0));
        let known = |code: &str| languages.iter().copied().find(|known| *known == code);
        match known(language).or_else(|| code.and_then(known)) {
            Some(found) => Ok(Some(found)),
            None => {
                let expected = match languages {
                    ["en"] => "en, as this model knows English alone".into(),
                    _ => format!("a code or name of a language that the model knows: {}", languages.join(", ")),
                };
                wrong("language", expected, language.to_owned())
            }
        }
    }
}
