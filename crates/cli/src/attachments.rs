//! Pictures and sounds of a conversation, and the encoders of a model.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value as Json, json};
use tilewright::chat::Message;
use tilewright::load::{AudioFile, VisionFile};
use tilewright::picture::{Picture, PictureLimits};
use tilewright::sound::Sound;
use tilewright::{AudioEncoder, Error, ImageEmbeddings, Model, VisionEncoder, VisionOptions};

#[derive(Args)]
pub struct VisionArgs {
    /// File of a GGUF model's encoders of pictures and sound [default: the mmproj file beside it].
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Tokens that a picture may take; larger ones are made smaller.
    #[arg(long, value_name = "N", default_value_t = VisionOptions::default().max_rows)]
    image_max_tokens: u32,
}

impl VisionArgs {
    /// The model with its vision encoder and its part for sound: of `--mmproj`, or of its folder or the file beside it,
    /// if they have them. The model does without the latter if it cannot be loaded.
    pub fn added_to(&self, model: Model, path: Option<&Path>) -> Result<Model, Error> {
        let Some(path) = self.mmproj.as_deref().or(path) else { return Ok(model) };
        let options = VisionOptions { max_rows: self.image_max_tokens };
        let load = |path: &Path| VisionEncoder::load(model.device(), path, options);
        let model = match &self.mmproj {
            Some(mmproj) => {
                let encoder = load(mmproj)?;
                model.with_vision(encoder).map_err(|error| error.in_file(mmproj))?
            }
            None => {
                let encoder = |file: Option<PathBuf>| file.map(|file| load(&file)).transpose();
                let added = VisionFile::beside(path).and_then(encoder).and_then(|encoder| match encoder {
                    Some(encoder) => model.clone().with_vision(encoder),
                    None => Ok(model.clone()),
                });
                match added {
                    Ok(model) => model,
                    Err(error) => {
                        notice!("`{}` reads no pictures: {error}", model.name());
                        // The same file is the one for sounds.
                        return Ok(model);
                    }
                }
            }
        };
        let found = match &self.mmproj {
            Some(mmproj) if mmproj.is_file() => AudioFile::is_in(mmproj).map(|is_in| is_in.then(|| mmproj.clone())),
            _ => AudioFile::beside(path),
        };
        let part = found.and_then(|file| file.map(|file| AudioEncoder::load(model.device(), file)).transpose());
        let added = part.and_then(|part| match part {
            Some(part) => model.clone().with_audio(part),
            None => Ok(model.clone()),
        });
        Ok(added.unwrap_or_else(|error| {
            notice!("`{}` takes no sounds: {error}", model.name());
            model
        }))
    }
}

/// The kinds of files that messages carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Image,
    Sound,
}

impl Kind {
    /// The type of its parts in messages.
    fn part(self) -> &'static str {
        match self {
            Kind::Image => "image",
            Kind::Sound => "audio",
        }
    }
}

/// The pictures and sounds of a conversation by file, and the files for the next message.
#[derive(Default)]
pub struct Attachments {
    known: HashMap<(Kind, PathBuf), Arc<ImageEmbeddings>>,
    next: Vec<(Kind, PathBuf)>,
}

impl Attachments {
    /// Adds a file to the next message. Returns the number of its rows.
    pub fn add(&mut self, model: &Model, kind: Kind, path: &Path) -> Result<usize, Error> {
        let rows = self.read(model, kind, path)?;
        self.next.push((kind, path.to_owned()));
        Ok(rows.n_rows())
    }

    /// The files for the next message, which are taken.
    pub fn take_next(&mut self) -> Vec<(Kind, PathBuf)> {
        std::mem::take(&mut self.next)
    }

    /// Reads the files that a loaded conversation names.
    pub fn load(&mut self, model: &Model, messages: &[Message]) -> Result<(), Error> {
        files_of(messages).try_for_each(|(kind, path)| self.read(model, kind, &path).map(drop))
    }

    /// The pictures or the sounds of these messages, in order.
    pub fn of(&self, messages: &[Message], wanted: Kind) -> Vec<Arc<ImageEmbeddings>> {
        let files = files_of(messages).filter(|(kind, _)| *kind == wanted);
        files.filter_map(|file| self.known.get(&file).cloned()).collect()
    }

    fn read(&mut self, model: &Model, kind: Kind, path: &Path) -> Result<Arc<ImageEmbeddings>, Error> {
        let bytes = || std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source });
        let in_file = |error: Error| error.in_file(path);
        let unsupported = |field: &str, lacks: &str, supported: &str| Error::Unsupported {
            format: "model",
            field: field.into(),
            found: format!("`{}`, which {lacks}", model.name()),
            supported: supported.into(),
        };
        let rows = match kind {
            Kind::Image => {
                let supported = "models with one in their folder, in an mmproj file beside them, or by --mmproj";
                let encoder = model.vision().ok_or_else(|| unsupported("image", "has no vision encoder", supported))?;
                let picture = Picture::decode(&bytes()?, &PictureLimits::default()).map_err(in_file)?;
                pollster::block_on(encoder.encode(&picture))?
            }
            Kind::Sound => {
                let supported = "models of Gemma 4 unified (12B), with their mmproj file beside them or by --mmproj";
                let encoder = model.audio().ok_or_else(|| unsupported("sound", "takes no sounds", supported))?;
                let sound = Sound::decode_at(&bytes()?, encoder.rate(), &encoder.limits()).map_err(in_file)?;
                pollster::block_on(encoder.encode(&sound)).map_err(in_file)?
            }
        };
        self.known.insert((kind, path.to_owned()), rows.clone());
        Ok(rows)
    }
}

/// A message with these files before its text.
pub fn message(text: &str, files: &[(Kind, PathBuf)]) -> Message {
    let parts = files.iter().map(|(kind, path)| json!({"type": kind.part(), "path": path}));
    let content = parts.chain([json!({"type": "text", "text": text})]).collect();
    Message { content, ..Message::new("user", "") }
}

/// The text of a message with its files in brackets.
pub fn text_of(message: &Message) -> String {
    match &message.content {
        Json::Array(parts) => parts.iter().map(part_text).collect::<Vec<_>>().join(" "),
        content => content.as_str().unwrap_or_default().into(),
    }
}

fn part_text(part: &Json) -> String {
    let text = |key: &str| part.get(key).and_then(Json::as_str);
    match (text("path"), text("text")) {
        (Some(path), _) => format!("[{path}]"),
        (None, found) => found.unwrap_or_default().into(),
    }
}

/// The files in these messages, in order.
fn files_of(messages: &[Message]) -> impl Iterator<Item = (Kind, PathBuf)> {
    let parts = messages.iter().filter_map(|message| message.content.as_array()).flatten();
    parts.filter_map(|part| {
        let kind = part.get("type").and_then(Json::as_str);
        let kind = [Kind::Image, Kind::Sound].into_iter().find(|known| Some(known.part()) == kind)?;
        Some((kind, PathBuf::from(part.get("path")?.as_str()?)))
    })
}
