//! Pictures in messages: parts of each API's own form become `{"type": "image", "data": BASE64}`, which is decoded when
//! the prompt is made.

use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value as Json, json};
use tilewright::ImageEmbeddings;
use tilewright::chat::Message;
use tilewright::picture::{Picture, PictureLimits};

use super::errors::ApiError;
use super::models::Decoder;

/// Pictures of a request at most.
const MOST: usize = 32;

/// The picture of a content part, if it is one: OpenAI's `image_url` and `input_image`, Anthropic's `image`.
///
/// # Errors
/// Errors naming the part, for one without data: addresses are not fetched.
pub fn part_of(part: &Json, param: &str) -> Option<Result<Json, ApiError>> {
    let text = |path: &str| part.pointer(path).and_then(Json::as_str);
    match text("/type")? {
        "image_url" => Some(of_url(text("/image_url/url").or(text("/image_url")), &format!("{param}.image_url"))),
        "input_image" => Some(of_url(text("/image_url"), &format!("{param}.image_url"))),
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

/// Takes the data out of the messages' image parts and computes the images, in order. Takes long.
///
/// # Errors
/// Errors naming the message and part.
pub fn take_images(messages: &mut [Message], decoder: &Decoder) -> Result<Vec<Arc<ImageEmbeddings>>, ApiError> {
    let mut images = Vec::new();
    for (at, message) in messages.iter_mut().enumerate() {
        let parts = message.content.as_array_mut().into_iter().flatten().enumerate();
        for (part_at, part) in parts {
            let Some(data) = part.as_object_mut().and_then(|part| part.remove("data")) else { continue };
            let param = format!("messages[{at}].content[{part_at}]");
            if images.len() == MOST {
                return Err(ApiError::unsupported("messages", format!("messages have over {MOST} pictures")));
            }
            images.push(image_of(data.as_str().unwrap_or_default(), decoder, &param)?);
        }
    }
    Ok(images)
}

fn image_of(data: &str, decoder: &Decoder, param: &str) -> Result<Arc<ImageEmbeddings>, ApiError> {
    let Some(vision) = decoder.model().vision() else {
        let message = format!(
            "{param} is a picture, which {} does not support: it has no vision encoder",
            decoder.model().name()
        );
        return Err(ApiError::unsupported(param, message));
    };
    let refused = |error: tilewright::Error| ApiError::unsupported(param, format!("{param}: {error}"));
    let bytes = BASE64_STANDARD
        .decode(data.trim_end())
        .map_err(|error| ApiError::unsupported(param, format!("{param} is no base64: {error}")))?;
    let picture = Picture::decode(&bytes, &PictureLimits::default()).map_err(refused)?;
    vision.n_rows(picture.width(), picture.height()).map_err(refused)?;
    Ok(pollster::block_on(vision.encode(&picture))?)
}
