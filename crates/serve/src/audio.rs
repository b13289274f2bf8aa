//! `/v1/audio/transcriptions` and `/v1/audio/translations`: speech to text, like OpenAI's.
//!
//! ```text
//! form --> fields, samples at 16 kHz --> queue, one at a time (`App::compute`) --> text, or an event for each segment
//! ```

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json as JsonBody;
use axum::body::{Body, Bytes};
use axum::extract::multipart::MultipartError;
use axum::extract::{DefaultBodyLimit, FromRequest, Multipart, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Number, Value as Json, json};
use tilewright::engine::Usage;
use tilewright::model::ModelConfig;
use tilewright::sound::{SAMPLE_RATE, Sound, SoundLimits};
use tilewright::transcribe::{
    Segment, SpeechModel, Task as SpeechTask, language_name, to_json, to_srt, to_vtt, words_to_json,
};
use tilewright::{Device, Error, MemoryPlan, TranscribeOptions, Transcriber, Transcript};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::app::{App, Computed, HeldBytes, Received, RequestContext, broken};
use super::errors::ApiError;
use super::fields::Fields;
use super::models::{Lease, Loaded, Task};
use super::sampling::MODEL;
use super::schema::{Endpoint, FORM, Field, Kind, Neutral, field, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};

/// `/v1/audio/transcriptions`.
pub const TRANSCRIPTIONS: Endpoint =
    Endpoint::form("/v1/audio/transcriptions", "Transcribes speech, like OpenAI's Audio", &[FIELDS]);

/// `/v1/audio/translations`.
pub const TRANSLATIONS: Endpoint =
    Endpoint::form("/v1/audio/translations", "Translates speech into English text, like OpenAI's Audio", &[FIELDS]);

const FIELDS: &[Field] = &[
    required(FILE, Kind::File, "The sound: a WAV, FLAC, MP3, M4A (AAC), Ogg or WebM (Opus, Vorbis) file."),
    MODEL,
    field("language", Kind::Text, "detected", "Language that is spoken, by its code or English name."),
    field("prompt", Kind::Text, "", "Text that the model takes for what was said before: names, spelling, style."),
    field(
        "response_format",
        Kind::OneOf(&["json", "text", "srt", "verbose_json", "vtt"]),
        "\"json\"",
        "Format of the answer: the text, subtitles, or (`verbose_json`) segments with times.",
    ),
    field(
        "temperature",
        Kind::Number(0.0, 1.0),
        "0",
        "Sampling temperature. 0 also tries 0.2 to 1 where a text seems wrong.",
    ),
    field(
        "stream",
        Kind::Flag,
        "false",
        "Send events `transcript.text.delta` with the text of each segment, and `transcript.text.done` with all of it.",
    ),
    field(
        GRANULARITIES,
        Kind::Other(&["array"], GRANULARITY_LIST),
        "[\"segment\"]",
        "What has times in the answer: `segment`, `word` or both. Words need `verbose_json`.",
    ),
    neutral("chunking_strategy", &[Neutral::Text("auto")], "Sounds are heard in windows of 30 seconds."),
];

/// The field of what has times.
const GRANULARITIES: &str = "timestamp_granularities[]";
const GRANULARITY_LIST: &str = "a list of \"segment\" and \"word\"";

/// The field of the sound.
const FILE: &str = "file";

/// Parts of a form at most.
const MAX_PARTS: usize = 64;

/// Bytes of a form's text at most.
const MAX_TEXT: usize = 64 << 10;

/// A speech model, which transcribes one sound at a time. Clones share it.
#[derive(Clone)]
pub struct SharedTranscriber {
    // What others read while it transcribes.
    name: String,
    model: SpeechModel,
    languages: Vec<String>,
    translates: bool,
    plan: Option<MemoryPlan>,
    transcriber: Arc<Mutex<Transcriber>>,
}

impl From<Transcriber> for SharedTranscriber {
    fn from(transcriber: Transcriber) -> SharedTranscriber {
        SharedTranscriber {
            name: transcriber.name().to_owned(),
            model: transcriber.model().clone(),
            languages: transcriber.languages().into_iter().map(str::to_owned).collect(),
            translates: transcriber.translates(),
            plan: transcriber.model().plan(1).ok(),
            transcriber: Arc::new(Mutex::new(transcriber)),
        }
    }
}

impl SharedTranscriber {
    /// The model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.model.device()
    }

    /// Shape of the decoder.
    pub fn config(&self) -> &ModelConfig {
        &self.model.config().decoder
    }

    /// Languages that the model knows.
    pub fn n_languages(&self) -> usize {
        self.languages.len()
    }

    /// Bytes of memory by kind.
    pub fn plan(&self) -> Option<MemoryPlan> {
        self.plan
    }

    /// As [`TranscribeOptions::check`].
    fn check(&self, options: &TranscribeOptions) -> Result<(), Error> {
        let languages: Vec<&str> = self.languages.iter().map(String::as_str).collect();
        options.check(&languages, self.translates).map(drop)
    }

    /// As [`Transcriber::transcribe_with`]. Blocks.
    fn transcribe(
        &self,
        samples: &[f32],
        options: &TranscribeOptions,
        on_window: &mut dyn FnMut(&[Segment]) -> ControlFlow<()>,
    ) -> Result<Transcript, Error> {
        let mut transcriber = self.transcriber.lock().unwrap_or_else(PoisonError::into_inner);
        pollster::block_on(transcriber.transcribe_with(samples, options, on_window))
    }
}

impl Computed for Transcript {
    fn usage(parts: &[Transcript]) -> Usage {
        let segments = parts.iter().flat_map(|part| &part.segments);
        Usage { completion_tokens: segments.map(|segment| segment.tokens.len()).sum(), ..Usage::default() }
    }
}

/// A form with a sound.
pub struct AudioRequest {
    /// Its texts, as the values of [`FIELDS`]; of the file only the name.
    json: Json,
    file: Bytes,
    since: RequestContext,
    held: HeldBytes,
}

impl FromRequest<Arc<App>> for AudioRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<AudioRequest, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE).cloned();
        let Received { since, body, held } = app.receive(request, Some(FORM), app.limits.audio_bytes).await?;
        let read = move || pollster::block_on(read_form(kind, body));
        let (json, file) = app.prepare(read).await?;
        Ok(AudioRequest { json, file, since, held })
    }
}

/// Reads a form: its texts as JSON, and its file.
async fn read_form(kind: Option<HeaderValue>, body: Vec<u8>) -> Result<(Json, Bytes), ApiError> {
    let invalid = |message: String| ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_form", message);
    let unreadable = |error: MultipartError| invalid(format!("the form cannot be read: {}", error.body_text()));
    let mut request = Request::new(Body::from(body));
    if let Some(kind) = kind {
        request.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    // The body is here already.
    DefaultBodyLimit::disable().apply(&mut request);
    let form = Multipart::from_request(request, &()).await;
    let mut form = form.map_err(|_| invalid(format!("the request has no boundary, expected {FORM} with one")))?;
    let (mut texts, mut file, mut n_parts) = (Map::new(), Bytes::new(), 0);
    while let Some(part) = form.next_field().await.map_err(unreadable)? {
        n_parts += 1;
        if n_parts > MAX_PARTS {
            return Err(invalid(format!("the form has over {MAX_PARTS} parts")));
        }
        let name = part.name().ok_or_else(|| invalid("a part of the form has no name".into()))?.to_owned();
        let file_name = part.file_name().map(str::to_owned);
        let bytes = part.bytes().await.map_err(unreadable)?;
        let value = if name == FILE {
            file = bytes;
            file_name.unwrap_or_default().into()
        } else {
            text_of(&name, &bytes)?
        };
        add(&mut texts, name, value)?;
    }
    Ok((texts.into(), file))
}

/// The value of a text by its field's row; an empty one counts as missing. Unknown fields, which may be large files, are
/// refused by their names.
fn text_of(name: &str, bytes: &[u8]) -> Result<Json, ApiError> {
    let Some(row) = FIELDS.iter().find(|row| row.name == name) else { return Ok("".into()) };
    let wrong = |found: &str| {
        let message = format!("{name} is {found}, expected a text of at most {} KiB", MAX_TEXT >> 10);
        ApiError { message, ..ApiError::invalid(name, None, "") }
    };
    if bytes.len() > MAX_TEXT {
        return Err(wrong(&format!("{} bytes", bytes.len())));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| wrong("not UTF-8"))?;
    let number = || Some(Json::Number(Number::from_f64(text.trim().parse().ok()?)?));
    let typed = match row.kind {
        _ if text.is_empty() => Some(Json::Null),
        Kind::Flag => text.trim().to_ascii_lowercase().parse().ok().map(Json::Bool),
        Kind::Number(..) => number(),
        _ => None,
    };
    Ok(typed.unwrap_or_else(|| text.into()))
}

/// Adds a value; names that end with `[]` are those of lists.
fn add(texts: &mut Map<String, Json>, name: String, value: Json) -> Result<(), ApiError> {
    if name.ends_with("[]") {
        if let Json::Array(list) = texts.entry(name).or_insert_with(|| json!([])) {
            list.push(value);
        }
        return Ok(());
    }
    if texts.contains_key(&name) {
        let message = format!("{} is in the form twice", name.chars().take(60).collect::<String>());
        return Err(ApiError { message, ..ApiError::invalid(name, None, "") });
    }
    texts.insert(name, value);
    Ok(())
}

/// `/v1/audio/transcriptions`.
pub async fn transcribe(State(app): State<Arc<App>>, asked: AudioRequest) -> Result<Response, ApiError> {
    answer(app, asked, SpeechTask::Transcribe).await
}

/// `/v1/audio/translations`.
pub async fn translate(State(app): State<Arc<App>>, asked: AudioRequest) -> Result<Response, ApiError> {
    answer(app, asked, SpeechTask::Translate).await
}

async fn answer(app: Arc<App>, asked: AudioRequest, task: SpeechTask) -> Result<Response, ApiError> {
    let AudioRequest { json, file, since, held } = asked;
    let fields = Fields::of(&json, since.ignored.as_deref())?;
    fields.check(&[FIELDS])?;
    let format = fields.text("response_format")?.unwrap_or("json").to_owned();
    let is_streamed = fields.checked_flag("stream").unwrap_or(false);
    if is_streamed && !matches!(&*format, "json" | "text") {
        let message =
            format!("response_format is {format:?}, which is not streamed; leave out stream, or send \"json\"");
        return Err(ApiError::unsupported("response_format", message));
    }
    let granularities = Granularities::of(fields, &format)?;
    let options = TranscribeOptions { words: granularities.words, ..options_of(fields, task)? };
    let lease = app.models.get_for(fields.text("model")?, Task::Transcribe).await?;
    lease.transcriber()?.check(&options).map_err(|error| match error {
        Error::Option { option: "task", .. } => {
            let name = lease.entry.name();
            let message = format!("{name} knows English alone and does not translate; use /v1/audio/transcriptions");
            ApiError { message, ..ApiError::invalid("model", None, "") }
        }
        error => error.into(),
    })?;
    lease.expect_batch(app.limits.batches)?;
    let (sound, held) = sound_of(&app, file, held).await?;
    let job = SpeechJob { lease, since, sound, options, _held: held };
    if is_streamed {
        let alive = app.limits.keep_alive;
        return streamed(Style::Data, alive, move |parts| job.stream(app, parts)).await;
    }
    let transcript = job.run(&app, None).await?;
    Ok(formatted(&transcript, (&format, granularities), task))
}

/// What has times in an answer with `verbose_json`.
#[derive(Clone, Copy)]
struct Granularities {
    segments: bool,
    words: bool,
}

impl Granularities {
    fn of(fields: Fields<'_>, format: &str) -> Result<Granularities, ApiError> {
        let Some(list) = fields.list(GRANULARITIES, GRANULARITY_LIST)? else {
            return Ok(Granularities { segments: true, words: false });
        };
        let has = |granularity: &str| list.iter().any(|value| value == granularity);
        let found = Granularities { segments: has("segment"), words: has("word") };
        if list.iter().any(|value| value != "segment" && value != "word") {
            return Err(fields.wrong(GRANULARITIES, GRANULARITY_LIST));
        }
        if found.words && format != "verbose_json" {
            let message =
                format!("{GRANULARITIES} has \"word\", which needs response_format \"verbose_json\", not {format:?}");
            return Err(ApiError::unsupported(GRANULARITIES, message));
        }
        Ok(found)
    }
}

fn options_of(fields: Fields<'_>, task: SpeechTask) -> Result<TranscribeOptions, ApiError> {
    let text = |field: &str| Ok::<_, ApiError>(fields.text(field)?.map(str::to_owned));
    let usual = TranscribeOptions { language: text("language")?, prompt: text("prompt")?, task, ..Default::default() };
    Ok(match fields.checked_number("temperature").filter(|&temperature| temperature > 0.0) {
        Some(temperature) => TranscribeOptions { temperatures: vec![temperature as f32], ..usual },
        None => usual,
    })
}

/// A file's sound at [`SAMPLE_RATE`], decoded one at a time: a small file may have an hour. `held`: the file's bytes in the
/// shared limit of bodies, until it is decoded.
async fn sound_of(app: &App, file: Bytes, held: HeldBytes) -> Result<(Sound, HeldBytes), ApiError> {
    let limits = SoundLimits { max_seconds: app.limits.audio_time.as_secs_f64(), ..SoundLimits::default() };
    let decode = move || {
        // Also if the client has disconnected.
        let _held = held;
        Sound::decode_at(&file, SAMPLE_RATE, &limits).map_err(refused)
    };
    let sound = app.prepare_in_turn(true, decode).await?;
    let held = app.hold_sound(size_of_val(sound.samples()))?;
    Ok((sound, held))
}

/// The refusal of a file.
fn refused(error: Error) -> ApiError {
    let message = match &error {
        Error::Format { format: "sound", expected, found, .. } => format!("{FILE} is {found}, expected {expected}"),
        _ => format!("{FILE}: {error}"),
    };
    ApiError { message, ..ApiError::invalid(FILE, None, "") }
}

/// A sound to transcribe.
struct SpeechJob {
    lease: Lease,
    since: RequestContext,
    sound: Sound,
    options: TranscribeOptions,
    /// Of the sound.
    _held: HeldBytes,
}

impl SpeechJob {
    /// Transcribes the sound, and sends the text of each segment as soon as it is known. Stops after a window if the client
    /// has disconnected.
    ///
    /// # Errors
    /// Those of [`App::compute`].
    async fn run(self, app: &App, deltas: Option<UnboundedSender<String>>) -> Result<Transcript, ApiError> {
        let SpeechJob { lease, since, sound, options, _held } = self;
        // Seconds whose text was sent: after a lost device, the sound is heard again from its beginning.
        let mut sent_until = 0.0;
        let part = move |loaded: &Loaded, at: usize, is_wanted: &AtomicBool| {
            let transcriber = loaded.transcriber().filter(|_| at == 0)?;
            // Released with the sound.
            let _held = &_held;
            let sent_before = sent_until;
            let mut on_window = |segments: &[Segment]| {
                let new = segments.iter().filter(|segment| (segment.start + segment.end) / 2.0 >= sent_before);
                for segment in new.filter(|_| deltas.is_some()) {
                    sent_until = segment.end;
                    // The client may have disconnected.
                    let _ = deltas.as_ref().map(|deltas| deltas.send(segment.text.clone()));
                }
                match is_wanted.load(Ordering::Relaxed) {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            };
            Some(transcriber.transcribe(sound.samples(), &options, &mut on_window))
        };
        app.compute(lease, &since, part).await?.pop().ok_or_else(broken)
    }

    /// Sends the text of each segment, then all of it.
    async fn stream(self, app: Arc<App>, parts: PartSender) -> Result<PartSender, Disconnected> {
        let (sender, mut deltas) = unbounded_channel::<String>();
        let forward = async {
            let mut text = String::new();
            while let Some(delta) = deltas.recv().await {
                // As in the whole text.
                let delta = if text.is_empty() { delta.trim_start() } else { &delta };
                text += delta;
                parts.send(json!({"type": "transcript.text.delta", "delta": delta})).await?;
            }
            Ok(text)
        };
        let (done, text) = tokio::join!(self.run(&app, Some(sender)), forward);
        parts.checked(done).await?;
        parts.send(json!({"type": "transcript.text.done", "text": text?.trim_end()})).await?;
        Ok(parts)
    }
}

/// A transcript in one of OpenAI's formats.
fn formatted(transcript: &Transcript, (format, has): (&str, Granularities), task: SpeechTask) -> Response {
    let usage = json!({"type": "duration", "seconds": transcript.seconds.ceil()});
    let text = match format {
        "text" => format!("{}\n", transcript.text),
        "srt" => to_srt(&transcript.segments),
        "vtt" => to_vtt(&transcript.segments),
        "verbose_json" => {
            let mut json = to_json(transcript, task);
            json["language"] = language_name(&transcript.language).into();
            if has.words {
                json["words"] = words_to_json(transcript);
            }
            if let Some(segments) = json["segments"].as_array_mut() {
                // Words are beside the segments here.
                segments.iter_mut().filter_map(Json::as_object_mut).for_each(|segment| drop(segment.remove("words")));
            }
            if let Some(json) = json.as_object_mut().filter(|_| !has.segments) {
                json.remove("segments");
            }
            json["usage"] = usage;
            return JsonBody(json).into_response();
        }
        _ => return JsonBody(json!({"text": transcript.text, "usage": usage})).into_response(),
    };
    // Text is `text/plain` in UTF-8.
    text.into_response()
}
