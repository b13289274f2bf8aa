//! Speech to text.

use std::cell::Cell;
use std::ops::ControlFlow;

use js_sys::Function;
use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::work::CurrentWork;
use super::{from_js, pick, plan_to_js, to_js, to_js_error};
use crate::error::Error;
use crate::kernels::KvType;
use crate::transcribe::{SpeechModel, Task, TranscribeOptions, TranscriberOptions, to_srt, to_vtt};

/// A speech model with its weights on a device.
#[wasm_bindgen]
pub struct Transcriber {
    model: SpeechModel,
    name: String,
    languages: Vec<String>,
    translates: bool,
    /// Taken by the current work.
    transcriber: Cell<Option<Box<crate::Transcriber>>>,
    work: CurrentWork,
}

/// A transcript, see `Transcript` in the npm package.
#[derive(Serialize)]
struct Transcript {
    text: String,
    language: String,
    seconds: f64,
    segments: Vec<Segment>,
}

/// A segment, see `Segment` in the npm package.
#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Segment {
    start: f64,
    end: f64,
    text: String,
    tokens: Vec<u32>,
    seek: u32,
    temperature: f32,
    mean_log_probability: f32,
    compression_ratio: f32,
    no_speech: f32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    words: Vec<Word>,
}

#[derive(Serialize, Deserialize)]
struct Word {
    start: f64,
    end: f64,
    text: String,
    probability: f32,
}

#[wasm_bindgen]
impl Transcriber {
    /// Describes the model, see `TranscriberInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Info<'a> {
            name: &'a str,
            architecture: &'a str,
            n_encoder_layers: u32,
            n_decoder_layers: u32,
            vocab_size: u32,
            max_tokens: u32,
            languages: &'a [String],
            translates: bool,
        }
        let config = self.model.config();
        to_js(&Info {
            name: &self.name,
            architecture: &config.decoder.architecture,
            n_encoder_layers: config.encoder.n_layers(),
            n_decoder_layers: config.decoder.n_layers(),
            vocab_size: config.decoder.vocab_size,
            max_tokens: config.decoder.max_seq_len,
            languages: &self.languages,
            translates: self.translates,
        })
    }

    /// See [`plan_to_js`].
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        self.model.plan(1).map_err(to_js_error).and_then(|plan| plan_to_js(&plan))
    }

    /// The transcript of samples of one channel at 16 kHz, see `Transcript` in the npm package; `undefined` if cancelled.
    /// `on_segments` receives those of each window. One call at a time.
    pub async fn transcribe(
        &self,
        samples: Vec<f32>,
        options: JsValue,
        on_segments: Function,
    ) -> Result<JsValue, JsValue> {
        let options = read_transcribe_options(options)?;
        let mut transcriber = self.take()?;
        let mut on_window = |segments: &[crate::transcribe::Segment]| {
            let segments: Vec<Segment> = segments.iter().map(Segment::of).collect();
            if let Ok(segments) = to_js(&segments) {
                // Ignore the listener's errors.
                let _ = on_segments.call1(&JsValue::UNDEFINED, &segments);
            }
            ControlFlow::Continue(())
        };
        let outcome = self.work.run(transcriber.transcribe_with(&samples, &options, &mut on_window)).await;
        self.transcriber.set(Some(transcriber));
        match outcome {
            None => Ok(JsValue::UNDEFINED),
            Some(found) => {
                let crate::Transcript { text, language, seconds, segments } = found.map_err(to_js_error)?;
                let segments = segments.iter().map(Segment::of).collect();
                to_js(&Transcript { text, language, seconds, segments })
            }
        }
    }

    /// The language of samples of one channel at 16 kHz, see `DetectedLanguage` in the npm package; `null` for silence
    /// and for a model of English alone, `undefined` if cancelled. One call at a time.
    #[wasm_bindgen(js_name = detectLanguage)]
    pub async fn detect_language(&self, samples: Vec<f32>) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        struct Detected {
            language: String,
            probability: f32,
        }
        let mut transcriber = self.take()?;
        let outcome = self.work.run(transcriber.detect_language(&samples)).await;
        self.transcriber.set(Some(transcriber));
        let Some(found) = outcome else { return Ok(JsValue::UNDEFINED) };
        match found.map_err(to_js_error)? {
            Some((language, probability)) => to_js(&Detected { language, probability }),
            None => Ok(JsValue::NULL),
        }
    }

    /// Cancels the current work after the pass in flight.
    pub fn cancel(&self) {
        self.work.cancel();
    }

    /// Segments as subtitles, in the format `srt` or `vtt`.
    pub fn subtitles(&self, segments: JsValue, format: &str) -> Result<String, JsValue> {
        let segments: Vec<Segment> = from_js("segments", segments)?;
        let segments: Vec<_> = segments.into_iter().map(Segment::timed_text).collect();
        match format {
            "srt" => Ok(to_srt(&segments)),
            "vtt" => Ok(to_vtt(&segments)),
            other => {
                let (expected, found) = ("srt or vtt".into(), other.into());
                Err(to_js_error(Error::Option { option: "format", expected, found }))
            }
        }
    }
}

impl Transcriber {
    pub(super) fn new(transcriber: crate::Transcriber) -> Transcriber {
        Transcriber {
            model: transcriber.model().clone(),
            name: transcriber.name().into(),
            languages: transcriber.languages().into_iter().map(Into::into).collect(),
            translates: transcriber.translates(),
            transcriber: Cell::new(Some(Box::new(transcriber))),
            work: CurrentWork::default(),
        }
    }

    fn take(&self) -> Result<Box<crate::Transcriber>, JsValue> {
        self.transcriber.take().ok_or_else(|| {
            let (expected, found) = ("one call at a time".into(), "a call beside another".into());
            to_js_error(Error::Operand { kernel: "transcribe", operand: "transcriber", expected, found })
        })
    }
}

impl Segment {
    fn of(segment: &crate::transcribe::Segment) -> Segment {
        let word = |word: &crate::transcribe::Word| {
            let crate::transcribe::Word { start, end, ref text, probability } = *word;
            Word { start, end, text: text.clone(), probability }
        };
        Segment {
            start: segment.start,
            end: segment.end,
            text: segment.text.clone(),
            tokens: segment.tokens.clone(),
            seek: segment.seek,
            temperature: segment.temperature,
            mean_log_probability: segment.mean_log_probability,
            compression_ratio: segment.compression_ratio,
            no_speech: segment.no_speech,
            words: segment.words.iter().map(word).collect(),
        }
    }

    /// The part that subtitles show.
    fn timed_text(self) -> crate::transcribe::Segment {
        let Segment { start, end, text, .. } = self;
        crate::transcribe::Segment { start, end, text, ..Default::default() }
    }
}

/// Deserialises the options of a load, `{ kvType?, memoryLimit? }`.
pub(super) fn read_options(value: JsValue) -> Result<TranscriberOptions, JsValue> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Options {
        kv_type: Option<String>,
        memory_limit: Option<u64>,
    }
    let given: Option<Options> = from_js("options", value)?;
    let Options { kv_type, memory_limit } = given.unwrap_or_default();
    let kv_type: Option<KvType> = kv_type.map(|name| name.parse()).transpose().map_err(to_js_error)?;
    Ok(TranscriberOptions { kv_type: kv_type.unwrap_or_default(), memory_limit })
}

/// Deserialises the options of a call, with defaults; see `TranscribeOptions` in the npm package.
fn read_transcribe_options(value: JsValue) -> Result<TranscribeOptions, JsValue> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Options {
        language: Option<String>,
        task: Option<String>,
        timestamps: Option<bool>,
        words: Option<bool>,
        prompt: Option<String>,
        follows_text: Option<bool>,
        temperatures: Option<Vec<f32>>,
        max_compression_ratio: Option<f32>,
        min_log_probability: Option<f32>,
        max_no_speech: Option<f32>,
        seed: Option<u64>,
    }
    let given: Option<Options> = from_js("options", value)?;
    let given = given.unwrap_or_default();
    let usual = TranscribeOptions::default();
    Ok(TranscribeOptions {
        language: given.language,
        task: pick("task", given.task, &Task::ALL, Task::name)?.unwrap_or_default(),
        timestamps: given.timestamps.unwrap_or(usual.timestamps),
        words: given.words.unwrap_or(usual.words),
        prompt: given.prompt,
        follows_text: given.follows_text.unwrap_or(usual.follows_text),
        temperatures: given.temperatures.unwrap_or(usual.temperatures),
        max_compression_ratio: given.max_compression_ratio.unwrap_or(usual.max_compression_ratio),
        min_log_probability: given.min_log_probability.unwrap_or(usual.min_log_probability),
        max_no_speech: given.max_no_speech.unwrap_or(usual.max_no_speech),
        seed: given.seed.unwrap_or(usual.seed),
        batch_size: usual.batch_size,
    })
}
