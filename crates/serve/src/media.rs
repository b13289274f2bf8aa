//! Pictures and sounds in messages: parts of each API's own form become `{"type": "image", "data": BASE64}`, of sounds
//! `"audio"`, which are decoded when the prompt is made. [`picture_of`] also decodes pictures to embed.

use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value as Json, json};
use tilewright::chat::Message;
use tilewright::picture::{Picture, PictureLimits};
use tilewright::sound::Sound;
use tilewright::{Error, ImageEmbeddings};

use super::errors::ApiError;
use super::models::Decoder;

/// Pictures and sounds of a request at most.
pub const MOST: usize = 32;

/// The picture or sound of a content part, if it is one: OpenAI's `image_url`, `input_image` and `input_audio`,
/// Anthropic's `image`.
///
/// # Errors
/// Errors naming the part, for one without data: addresses are not fetched.
pub fn part_of(part: &Json, param: &str) -> Option<Result<Json, ApiError>> {
    let text = |path: &str| part.pointer(path).and_then(Json::as_str);
    match text("/type")? {
        "image_url" => Some(of_url(text("/image_url/url").or(text("/image_url")), &format!("{param}.image_url"))),
        "input_image" => Some(of_url(text("/image_url"), &format!("{param}.image_url"))),
        "input_audio" => Some(of_audio(part.get("input_audio"), &format!("{param}.input_audio"))),
        "image" => Some(match text("/source/type") {
            Some("base64") => of_base64(text("/source/data"), &format!("{param}.source.data")),
            _ => Err(not_fetched(&format!("{param}.source"), "an address or a file")),
        }),
        _ => None,
    }
}

/// A part from base64.
///
/// # Errors
/// `invalid_value` if there is none.
pub fn of_base64(data: Option<&str>, param: &str) -> Result<Json, ApiError> {
    match data {
        Some(data) if !data.is_empty() => Ok(json!({"type": "image", "data": data})),
        _ => Err(ApiError::invalid(param, data.map(Json::from).as_ref(), "a picture in base64")),
    }
}

/// A part from a data URL or base64, as in Jina's requests.
///
/// # Errors
/// As [`of_base64`]; for an address, which is not fetched.
pub fn of_url_or_base64(text: Option<&str>, param: &str) -> Result<Json, ApiError> {
    match text {
        Some(text) if text.starts_with("data:") || text.contains("://") => of_url(Some(text), param),
        _ => of_base64(text, param),
    }
}

fn of_audio(audio: Option<&Json>, param: &str) -> Result<Json, ApiError> {
    let field = |name: &str| audio.and_then(|audio| audio.get(name));
    // The format is detected from the data; other names are refused, as by OpenAI.
    match field("format").and_then(Json::as_str) {
        Some("wav" | "mp3") => {}
        _ => return Err(ApiError::invalid(format!("{param}.format"), field("format"), "wav or mp3")),
    }
    match field("data").and_then(Json::as_str) {
        Some(data) if !data.is_empty() => Ok(json!({"type": "audio", "data": data})),
        _ => Err(ApiError::invalid(format!("{param}.data"), field("data"), "a sound in base64")),
    }
}

fn of_url(url: Option<&str>, param: &str) -> Result<Json, ApiError> {
    let expected = "a data URL, data:image/png;base64,..";
    let url = url.ok_or_else(|| ApiError::invalid(param, None, expected))?;
    let Some(rest) = url.strip_prefix("data:") else { return Err(not_fetched(param, "an address")) };
    match rest.split_once(',') {
        Some((kind, data)) if kind.ends_with(";base64") => of_base64(Some(data), param),
        _ => Err(ApiError::invalid(param, None, expected)),
    }
}

fn not_fetched(param: &str, found: &str) -> ApiError {
    let message = format!("{param} is {found}, which this server does not fetch; send a data URL or base64");
    ApiError::unsupported(param, message)
}

/// The pictures and the sounds of a request, in order.
#[derive(Default)]
pub struct Media {
    pub images: Vec<Arc<ImageEmbeddings>>,
    pub sounds: Vec<Arc<ImageEmbeddings>>,
}

/// Takes the data out of the messages' parts and computes the pictures and sounds. Takes long.
///
/// # Errors
/// Errors naming the message and part.
pub fn take_media(messages: &mut [Message], decoder: &Decoder) -> Result<Media, ApiError> {
    let mut media = Media::default();
    for (at, message) in messages.iter_mut().enumerate() {
        let parts = message.content.as_array_mut().into_iter().flatten().enumerate();
        for (part_at, part) in parts {
            let Some(part) = part.as_object_mut() else { continue };
            let Some(data) = part.remove("data") else { continue };
            let param = format!("messages[{at}].content[{part_at}]");
            if media.images.len() + media.sounds.len() == MOST {
                return Err(ApiError::unsupported(
                    "messages",
                    format!("messages have over {MOST} pictures and sounds"),
                ));
            }
            let data = data.as_str().unwrap_or_default();
            match part.get("type").and_then(Json::as_str) {
                Some("audio") => media.sounds.push(sound_of(data, decoder, &param)?),
                _ => media.images.push(image_of(data, decoder, &param)?),
            }
        }
    }
    Ok(media)
}

fn image_of(data: &str, decoder: &Decoder, param: &str) -> Result<Arc<ImageEmbeddings>, ApiError> {
    let Some(vision) = decoder.model().vision() else {
        let message = format!(
            "{param} is a picture, which {} does not support: it has no vision encoder",
            decoder.model().name()
        );
        return Err(ApiError::unsupported(param, message));
    };
    let picture = picture_of(data, param)?;
    vision.n_rows(picture.width(), picture.height()).map_err(|error| refused(&error, param))?;
    Ok(pollster::block_on(vision.encode(&picture))?)
}

fn sound_of(data: &str, decoder: &Decoder, param: &str) -> Result<Arc<ImageEmbeddings>, ApiError> {
    let Some(audio) = decoder.model().audio() else {
        let message = format!(
            "{param} is a sound, which {} does not support; models of Gemma 4 unified (12B) do, with their mmproj file",
            decoder.model().name()
        );
        return Err(ApiError::unsupported(param, message));
    };
    let refused = |error: Error| refused(&error, param);
    let sound = Sound::decode_at(&decoded(data, param)?, audio.rate(), &audio.limits()).map_err(refused)?;
    audio.n_rows(&sound).map_err(refused)?;
    Ok(pollster::block_on(audio.encode(&sound))?)
}

/// The pixels of a picture in base64. Takes long.
///
/// # Errors
/// Errors naming the part.
pub fn picture_of(data: &str, param: &str) -> Result<Picture, ApiError> {
    Picture::decode(&decoded(data, param)?, &PictureLimits::default()).map_err(|error| refused(&error, param))
}

fn decoded(data: &str, param: &str) -> Result<Vec<u8>, ApiError> {
    let not_base64 = |error| ApiError::unsupported(param, format!("{param} is no base64: {error}"));
    BASE64_STANDARD.decode(data.trim_end()).map_err(not_base64)
}

/// The refusal of a picture or sound for this reason.
pub fn refused(error: &Error, param: &str) -> ApiError {
    ApiError::unsupported(param, format!("{param}: {error}"))
}
