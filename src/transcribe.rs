//! Speech to text: Whisper (Radford et al. 2022, arXiv:2212.04356).
//!
//! A sound is heard in windows of 30 seconds. The next window begins where the last complete segment ends, and has the text
//! before as its prompt. Or the sound is cut at pauses, and several windows are decoded side by side
//! ([`TranscribeOptions::batch_size`]).

mod align;
mod format;
mod languages;
mod model;
mod options;
mod pauses;
mod rules;
mod segments;
mod window;

use std::ops::ControlFlow;
use std::path::Path;

pub use format::{to_json, to_srt, to_timed_words, to_vtt, words_to_json};
pub use languages::language_name;
pub use model::{SpeechModel, SpeechSession};
pub use options::{MAX_BATCH, Task, TranscribeOptions, TranscriberOptions};

use crate::device::Device;
use crate::error::Error;
use crate::load::{FileName, Loader, SpeechFile, WeightUploader};
use crate::model::SpeechConfig;
use crate::sound::{HOP, SAMPLE_RATE, Spectrogram, check_finite, frames_of};
use crate::tokenizer::Tokenizer;
use align::Attended;
use pauses::{sound_size, window_size};
use rules::SpeechTokens;
use segments::{FRAMES_PER_SECOND, Part, Parts};
use window::{Random, Window, WindowText};

/// Windows of samples below this are not heard: less than one step of 16 bits.
const SILENCE: f32 = 1.0 / 32768.0;
/// Seconds at the end of a window's sound that its text may leave out, though the model has heard more.
const MAX_UNHEARD: f64 = 0.5;
/// A text that was drawn at a higher temperature is no prompt.
const MAX_PROMPT_TEMPERATURE: f32 = 0.5;

/// Transcribes speech, one sound at a time.
///
/// ```no_run
/// use tilewright::sound::{SAMPLE_RATE, Sound, SoundLimits};
/// use tilewright::transcribe::{TranscribeOptions, Transcriber, TranscriberOptions};
/// use tilewright::Device;
///
/// # pollster::block_on(async {
/// let device = Device::auto().await;
/// let mut transcriber = Transcriber::load(&device, "whisper-tiny", TranscriberOptions::default())?;
/// let sound = Sound::decode_at(&std::fs::read("speech.mp3").unwrap(), SAMPLE_RATE, &SoundLimits::default())?;
/// let transcript = transcriber.transcribe(sound.samples(), &TranscribeOptions::default()).await?;
/// for segment in &transcript.segments {
///     println!("{:.2} to {:.2}: {}", segment.start, segment.end, segment.text);
/// }
/// # Ok::<(), tilewright::Error>(())
/// # }).unwrap();
/// ```
pub struct Transcriber {
    name: String,
    model: SpeechModel,
    session: SpeechSession,
    tokenizer: Tokenizer,
    tokens: SpeechTokens,
    /// Layers and heads that words' times come from.
    alignment_heads: Vec<[u32; 2]>,
}

/// What was said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transcript {
    /// The text of all segments.
    pub text: String,
    /// Code of the language, of the text's if translated: `en`. Empty where all was silence.
    pub language: String,
    /// Seconds of the sound.
    pub seconds: f64,
    /// Its parts in order.
    pub segments: Vec<Segment>,
}

/// A part of a transcript.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Segment {
    /// Seconds from the sound's beginning.
    pub start: f64,
    /// Where it ends.
    pub end: f64,
    /// What was said, mostly with a space before it.
    pub text: String,
    /// The tokens, timestamps included.
    pub tokens: Vec<u32>,
    /// Frame of the spectrogram, a hundredth of a second, where its window begins.
    pub seek: u32,
    /// Temperature of the window.
    pub temperature: f32,
    /// Mean logarithmic probability of the window's tokens.
    pub mean_log_probability: f32,
    /// Bytes of the window's text by those of its zlib stream.
    pub compression_ratio: f32,
    /// Probability of the token for no speech in the window.
    pub no_speech: f32,
    /// Its words, if asked for.
    pub words: Vec<Word>,
}

/// A word of a segment, with the punctuation at it. In languages without spaces: a character.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Word {
    /// Seconds from the sound's beginning.
    pub start: f64,
    /// Where it ends.
    pub end: f64,
    /// The word, mostly with a space before it.
    pub text: String,
    /// Mean probability of its tokens.
    pub probability: f32,
}

impl Transcriber {
    /// Loads the speech model of a Hugging Face folder: `whisper` in all sizes, distilled ones and those of English alone.
    ///
    /// # Errors
    /// Those of [`SpeechFile::open`] and [`Transcriber::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: TranscriberOptions) -> Result<Transcriber, Error> {
        let path = path.as_ref();
        Transcriber::from_file(device, SpeechFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Uploads a speech model's weights.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape, [`Error::Tokenizer`] if the tokenizer lacks Whisper's
    /// tokens; errors of the device.
    pub fn from_file(device: &Device, mut file: SpeechFile, options: TranscriberOptions) -> Result<Transcriber, Error> {
        let files = std::mem::take(&mut file.files);
        let (transcriber, mut uploader) = Transcriber::declare(device, file, options)?;
        uploader.take_all(transcriber.model.device(), &files, None)?;
        Ok(transcriber)
    }

    /// A loader of these files: those of a Hugging Face folder, or one of whisper.cpp.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none, or several of whisper.cpp.
    pub fn loader(
        device: &Device,
        files: Vec<FileName>,
        options: TranscriberOptions,
    ) -> Result<Loader<Transcriber>, Error> {
        Loader::of_speech(device, files, move |device, file| Transcriber::declare(device, file, options))
    }

    /// The transcriber without its weights.
    fn declare(
        device: &Device,
        file: SpeechFile,
        options: TranscriberOptions,
    ) -> Result<(Transcriber, WeightUploader), Error> {
        let (model, uploader) = SpeechModel::declare(device, &file, options)?;
        let SpeechFile { name, config, generation, tokenizer, .. } = file;
        let tokenizer = tokenizer?;
        let tokens = SpeechTokens::new(&tokenizer, &generation, config.decoder.vocab_size)?;
        let alignment_heads = match generation.alignment_heads.is_empty() {
            true => upper_heads(&config),
            false => generation.alignment_heads,
        };
        Ok((Transcriber { name, session: model.session(1)?, model, tokenizer, tokens, alignment_heads }, uploader))
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model.
    pub fn model(&self) -> &SpeechModel {
        &self.model
    }

    /// Codes of the languages that the model knows.
    pub fn languages(&self) -> Vec<&str> {
        match self.tokens.languages.is_empty() {
            true => vec!["en"],
            false => self.tokens.languages.iter().map(|(code, _)| code.as_str()).collect(),
        }
    }

    /// Whether the model knows [`Task::Translate`].
    pub fn translates(&self) -> bool {
        self.tokens.translate.is_some()
    }

    /// Transcribes samples of one channel at [`SAMPLE_RATE`]. Silence has no segments.
    ///
    /// # Errors
    /// [`Error::Operand`] for a sample that is no finite number, [`Error::Option`] for an option out of range; errors of the
    /// device.
    pub async fn transcribe(&mut self, samples: &[f32], options: &TranscribeOptions) -> Result<Transcript, Error> {
        self.transcribe_with(samples, options, &mut |_| ControlFlow::Continue(())).await
    }

    /// As [`Transcriber::transcribe`], calling `on_window` after each window that was heard, with its segments, perhaps none; of
    /// a batch after all its windows. Where it breaks, the transcript ends with this window.
    ///
    /// # Errors
    /// As [`Transcriber::transcribe`].
    pub async fn transcribe_with(
        &mut self,
        samples: &[f32],
        options: &TranscribeOptions,
        on_window: &mut dyn FnMut(&[Segment]) -> ControlFlow<()>,
    ) -> Result<Transcript, Error> {
        let asked = options.check(&self.languages(), self.translates())?;
        let languages = &self.tokens.languages;
        let mut language = languages.iter().find(|(code, _)| Some(code.as_str()) == asked).cloned();
        let are_apart = options.batch_size > 1;
        let mut sound = Windows::new(samples, self.model.config(), are_apart)?;
        self.resize(options.batch_size.min(sound.most()))?;
        let mut text = Text::new(self.prompt(options)?);
        let mut states = vec![Window { random: Random(options.seed), least_end: 0.0 }];
        let mut segments: Vec<Segment> = Vec::new();
        let seconds = samples.len() as f64 / f64::from(SAMPLE_RATE);
        let (mut n_heard, mut spoken_until) = (0, 0.0);
        'sound: loop {
            let mut windows: Vec<[u32; 2]> = Vec::new();
            while windows.len() < self.session.n_windows() {
                let Some(window) = sound.next() else { break };
                self.session.hear(windows.len(), &sound.frames(window)?).await?;
                windows.push(window);
            }
            if windows.is_empty() {
                break;
            }
            if language.is_none() {
                language = self.detect().await?;
            }
            if are_apart {
                // A window draws the same numbers in any batch, and no other hears its end.
                let state = |(i, &window): (u64, &[u32; 2])| Window {
                    random: Random(options.seed.wrapping_add(i)),
                    least_end: f64::from(sound_size(samples, window)) / FRAMES_PER_SECOND - MAX_UNHEARD,
                };
                states = (n_heard..).zip(&windows).map(state).collect();
                n_heard += windows.len() as u64;
            }
            let beginning =
                self.tokens.beginning(language.as_ref().map(|(_, id)| *id), options.task, options.timestamps);
            let previous = text.prompt(options.follows_text);
            let with = (&self.tokenizer, &self.tokens);
            let found = window::decode(&mut self.session, with, (previous, &beginning), options, &mut states).await?;
            for (i, (window @ [seek, size], found)) in windows.into_iter().zip(found).enumerate() {
                if found.is_silent(options) {
                    match on_window(&[]) {
                        ControlFlow::Continue(()) => continue,
                        ControlFlow::Break(()) => break 'sound,
                    }
                }
                let mut cut = segments::parts(&self.tokens, &found.ids, window, are_apart);
                if options.words {
                    let language = language.as_ref().filter(|_| options.task == Task::Transcribe);
                    let code = language.map_or("en", |(code, _)| code);
                    self.find_words(&mut cut, (&found, &beginning, code), (i, window), &mut spoken_until).await?;
                }
                let n_before = segments.len();
                let is_cut = are_apart && seek + size < sound.n_frames;
                let end = if is_cut { f64::from(seek + size) / FRAMES_PER_SECOND } else { seconds };
                for part in cut.parts {
                    let Some(segment) = self.segment(part, (seek, end), &found)? else { continue };
                    if !are_apart {
                        text.ids.extend(&segment.tokens);
                    }
                    segments.push(segment);
                }
                if !are_apart {
                    sound.seek = seek + cut.next;
                    if found.temperature > MAX_PROMPT_TEMPERATURE {
                        text.first = text.ids.len();
                    }
                }
                if on_window(&segments[n_before..]).is_break() {
                    break 'sound;
                }
            }
        }
        let only = self.tokens.languages.is_empty().then(|| "en".to_owned());
        let spoken = language.map(|(code, _)| code).or(only).unwrap_or_default();
        Ok(Transcript {
            text: segments.iter().map(|segment| segment.text.as_str()).collect::<String>().trim().into(),
            language: if options.task == Task::Translate { "en".into() } else { spoken },
            seconds,
            segments,
        })
    }

    /// Gives the parts of a window their words, and lets the next window begin after the last word, unless nobody speaks in
    /// the rest. `spoken_until`: where the last word before ends.
    async fn find_words(
        &mut self,
        cut: &mut Parts,
        (found, beginning, language): (&WindowText, &[u32], &str),
        (window, [seek, size]): (usize, [u32; 2]),
        spoken_until: &mut f64,
    ) -> Result<(), Error> {
        let mut probabilities = found.probabilities.iter().copied();
        let mut text_of = |part: &Part| -> Vec<(u32, f32)> {
            let tokens = part.ids.iter().copied().zip(probabilities.by_ref());
            tokens.filter(|(id, _)| self.tokens.is_text(*id)).collect()
        };
        let text: Vec<Vec<(u32, f32)>> = cut.parts.iter().map(&mut text_of).collect();
        if text.iter().all(Vec::is_empty) {
            return Ok(());
        }
        // As without timestamps: that token is before the text, and the end after it.
        let mut ids: Vec<u32> = beginning.iter().copied().filter(|&id| id != self.tokens.no_timestamps).collect();
        let first = ids.len();
        ids.push(self.tokens.no_timestamps);
        ids.extend(text.iter().flatten().map(|(id, _)| id));
        ids.push(self.tokens.end);
        let n_rows = (size as usize / 2).max(1);
        let mut attended = Attended::new([ids.len(), n_rows]);
        let heads = (&self.alignment_heads[..], n_rows);
        self.session.attention_weights(window, &ids, heads, &mut |weights: &mut [f32]| attended.add(weights)).await?;
        // A token's weights are those at the token before it.
        let firsts = attended.first_rows(first..ids.len() - 1);
        let offset = f64::from(seek) / FRAMES_PER_SECOND;
        let words = align::words(&self.tokenizer, language, &text, (&firsts, offset))?;
        align::assign(&mut cut.parts, words, spoken_until);
        if !cut.is_end && cut.parts.iter().any(|part| !part.words.is_empty()) {
            let heard = (*spoken_until * FRAMES_PER_SECOND).round() as u32;
            cut.next = if heard > seek { heard - seek } else { cut.next };
        }
        Ok(())
    }

    /// The language of a sound's first window that is not silent, with its probability among all languages. `None` for
    /// silence, and for a model of English alone.
    ///
    /// # Errors
    /// As [`Transcriber::transcribe`].
    pub async fn detect_language(&mut self, samples: &[f32]) -> Result<Option<(String, f32)>, Error> {
        let n_window = self.model.config().n_frames();
        let spectrogram = Spectrogram::new(samples, self.model.config().n_bands, n_window)?;
        let starts = (0..spectrogram.n_frames()).step_by(n_window as usize);
        let Some(first) = starts.into_iter().find(|&first| !is_silent(samples, [first, n_window])) else {
            return Ok(None);
        };
        self.session.hear(0, &spectrogram.frames(first, n_window)).await?;
        Ok(self.likely_languages().await?.into_iter().next().map(|(code, _, share)| (code, share)))
    }

    /// The language of the session's first window.
    async fn detect(&mut self) -> Result<Option<(String, u32)>, Error> {
        Ok(self.likely_languages().await?.into_iter().next().map(|(code, id, _)| (code, id)))
    }

    /// Languages with their tokens and probabilities, the likeliest first.
    async fn likely_languages(&mut self) -> Result<Vec<(String, u32, f32)>, Error> {
        if self.tokens.languages.is_empty() {
            return Ok(Vec::new());
        }
        self.session.rewind(0, 0);
        let logits = self.session.logits(0, &[self.tokens.start]).await?;
        let of = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let own: Vec<f32> = self.tokens.languages.iter().map(|(_, id)| of(*id)).collect();
        let all = self.tokens.languages.iter().zip(0..);
        let share = |i: u32| window::probability(&own, i);
        let mut found: Vec<_> = all.map(|((code, id), i)| (code.clone(), *id, share(i))).collect();
        found.sort_by(|a, b| b.2.total_cmp(&a.2));
        Ok(found)
    }

    /// Replaces the session, unless it is for `n_windows`.
    fn resize(&mut self, n_windows: usize) -> Result<(), Error> {
        if self.session.n_windows() != n_windows {
            let held = self.model.plan(self.session.n_windows())?.total_bytes();
            self.model.check_memory(n_windows, held)?;
            self.session = self.model.session(n_windows)?;
        }
        Ok(())
    }

    /// Tokens of the prompt before the first window.
    fn prompt(&self, options: &TranscribeOptions) -> Result<Vec<u32>, Error> {
        match options.prompt.as_deref().map(str::trim).filter(|prompt| !prompt.is_empty()) {
            Some(prompt) => self.tokenizer.encode(&format!(" {prompt}"), false),
            None => Ok(Vec::new()),
        }
    }

    /// The segment of a part; `None` for one without text or length. `until`: seconds to where the sound that is heard ends.
    fn segment(
        &self,
        Part { start, end, ids, mut words }: Part,
        (seek, until): (u32, f64),
        window: &WindowText,
    ) -> Result<Option<Segment>, Error> {
        let text: Vec<u32> = ids.iter().copied().filter(|&id| self.tokens.is_text(id)).collect();
        let text = self.tokenizer.decode(&text, true)?;
        if text.trim().is_empty() || end <= start {
            return Ok(None);
        }
        // A text whose times are after the end is kept, without length.
        let [start, end] = [start, end].map(|at| at.min(until));
        words.iter_mut().for_each(|word| (word.start, word.end) = (word.start.min(until), word.end.min(until)));
        Ok(Some(Segment {
            start,
            end,
            text,
            tokens: ids,
            seek,
            temperature: window.temperature,
            mean_log_probability: window.mean_log_probability,
            compression_ratio: window.compression_ratio,
            no_speech: window.no_speech,
            words,
        }))
    }
}

impl Loader<Transcriber> {
    /// The transcriber, once no more bytes are wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are still wanted; errors of the device.
    pub async fn finish(self) -> Result<Transcriber, Error> {
        let (transcriber, device) = self.loaded()?;
        device.drained().await?;
        Ok(transcriber)
    }
}

/// All heads of the upper half of the decoder's layers.
fn upper_heads(config: &SpeechConfig) -> Vec<[u32; 2]> {
    let blocks = (0..).zip(&config.decoder.blocks).skip(config.decoder.blocks.len() / 2);
    blocks.flat_map(|(layer, block)| (0..block.attention.n_heads).map(move |head| [layer, head])).collect()
}

/// The windows of a sound in order.
struct Windows<'a> {
    samples: &'a [f32],
    n_bands: u32,
    n_window: u32,
    n_frames: u32,
    /// Of the whole sound; none if it is cut at pauses, as each window then is a sound of its own.
    spectrogram: Option<Spectrogram<'a>>,
    /// Frame where the next one begins.
    seek: u32,
}

impl<'a> Windows<'a> {
    fn new(samples: &'a [f32], config: &SpeechConfig, are_apart: bool) -> Result<Windows<'a>, Error> {
        let (n_bands, n_window) = (config.n_bands, config.n_frames());
        let spectrogram = match are_apart {
            true => check_finite(samples).map(|()| None)?,
            false => Some(Spectrogram::new(samples, n_bands, n_window)?),
        };
        Ok(Windows { samples, n_bands, n_window, n_frames: frames_of(samples), spectrogram, seek: 0 })
    }

    /// Their number at most.
    fn most(&self) -> usize {
        let before_last = self.n_frames.saturating_sub(self.n_window);
        1 + before_last.div_ceil(pauses::least_size(self.n_window)) as usize
    }

    /// Start and size of the next one that is not silent.
    fn next(&mut self) -> Option<[u32; 2]> {
        let Windows { samples, n_window, n_frames, .. } = *self;
        while self.seek < n_frames {
            let seek = self.seek;
            let size = match &self.spectrogram {
                Some(_) => n_window.min(n_frames - seek),
                None => window_size(samples, seek, [n_window, n_frames]),
            };
            self.seek += size;
            if !is_silent(samples, [seek, size]) {
                return Some([seek, size]);
            }
        }
        None
    }

    /// The spectrogram of a window, filled up.
    fn frames(&self, [seek, size]: [u32; 2]) -> Result<Vec<f32>, Error> {
        if let Some(whole) = &self.spectrogram {
            return Ok(whole.frames(seek, self.n_window));
        }
        let end = if seek + size < self.n_frames { (seek + size) as usize * HOP } else { self.samples.len() };
        let own = Spectrogram::new(&self.samples[seek as usize * HOP..end], self.n_bands, self.n_window)?;
        Ok(own.frames(0, self.n_window))
    }
}

/// Tokens of the text so far.
struct Text {
    ids: Vec<u32>,
    /// The first that may be a prompt.
    first: usize,
    /// Tokens of the prompt that the caller gave.
    n_given: usize,
}

impl Text {
    fn new(ids: Vec<u32>) -> Text {
        Text { n_given: ids.len(), ids, first: 0 }
    }

    /// The prompt of the next window: the text before, or none but the first window's.
    fn prompt(&self, follows_text: bool) -> &[u32] {
        match follows_text || self.ids.len() == self.n_given {
            true => self.ids.get(self.first..).unwrap_or_default(),
            false => &[],
        }
    }
}

/// Whether all samples of `n` frames from `first` on are silent.
fn is_silent(samples: &[f32], [first, n]: [u32; 2]) -> bool {
    let at = |frame: u32| (frame as usize * HOP).min(samples.len());
    samples[at(first)..at(first + n)].iter().all(|sample| sample.abs() < SILENCE)
}
