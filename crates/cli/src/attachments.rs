//! Images of a conversation, and the vision encoder of a model.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value as Json, json};
use tilewright::chat::Message;
use tilewright::load::VisionFile;
use tilewright::picture::{Picture, PictureLimits};
use tilewright::{Error, ImageEmbeddings, Model, VisionEncoder, VisionOptions};

#[derive(Args)]
pub struct VisionArgs {
    /// Vision encoder of a GGUF model [default: the mmproj file beside it].
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Tokens that a picture may take; larger ones are made smaller.
    #[arg(long, value_name = "N", default_value_t = VisionOptions::default().max_rows)]
    image_max_tokens: u32,
}

impl VisionArgs {
    /// The model with its vision encoder: `--mmproj`, or the one in its folder or beside it, if there is one. The model
    /// does without the latter if it cannot be loaded.
    pub fn added_to(&self, model: Model, path: Option<&Path>) -> Result<Model, Error> {
        let options = VisionOptions { max_rows: self.image_max_tokens };
        let load = |path: &Path| VisionEncoder::load(model.device(), path, options);
        match (&self.mmproj, path) {
            (Some(mmproj), _) => {
                let encoder = load(mmproj)?;
                model.with_vision(encoder).map_err(|error| error.in_file(mmproj))
            }
            (None, Some(path)) => {
                let encoder = |file: Option<PathBuf>| file.map(|file| load(&file)).transpose();
                let added = VisionFile::beside(path).and_then(encoder).and_then(|encoder| match encoder {
                    Some(encoder) => model.clone().with_vision(encoder),
                    None => Ok(model.clone()),
                });
                Ok(added.unwrap_or_else(|error| {
                    notice!("`{}` reads no pictures: {error}", model.name());
                    model
                }))
            }
            (None, None) => Ok(model),
        }
    }
}

/// The images of a conversation by file, and the files for the next message.
#[derive(Default)]
pub struct Images {
    known: HashMap<PathBuf, Arc<ImageEmbeddings>>,
    next: Vec<PathBuf>,
}

impl Images {
    /// Adds a file to the next message. Returns the number of its rows.
    pub fn add(&mut self, model: &Model, path: &Path) -> Result<usize, Error> {
        let image = self.read(model, path)?;
        self.next.push(path.to_owned());
        Ok(image.n_rows())
    }

    /// The files for the next message, which are taken.
    pub fn take_next(&mut self) -> Vec<PathBuf> {
        std::mem::take(&mut self.next)
    }

    /// Reads the files that a loaded conversation names.
    pub fn load(&mut self, model: &Model, messages: &[Message]) -> Result<(), Error> {
        paths_of(messages).iter().try_for_each(|path| self.read(model, path).map(drop))
    }

    /// The images of these messages, in order.
    pub fn of(&self, messages: &[Message]) -> Vec<Arc<ImageEmbeddings>> {
        paths_of(messages).iter().filter_map(|path| self.known.get(path).cloned()).collect()
    }

    fn read(&mut self, model: &Model, path: &Path) -> Result<Arc<ImageEmbeddings>, Error> {
        let encoder = model.vision().ok_or_else(|| Error::Unsupported {
            format: "model",
            field: "image".into(),
            found: format!("`{}`, which has no vision encoder", model.name()),
            supported: "models with one in their folder, in an mmproj file beside them, or by --mmproj".into(),
        })?;
        let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let picture = Picture::decode(&bytes, &PictureLimits::default()).map_err(|error| error.in_file(path))?;
        let image = pollster::block_on(encoder.encode(&picture))?;
        self.known.insert(path.to_owned(), image.clone());
        Ok(image)
    }
}

/// A message with these files before its text.
pub fn message(text: &str, paths: &[PathBuf]) -> Message {
    let mut message = Message::with_images("user", paths.len(), text);
    let parts = message.content.as_array_mut().into_iter().flatten();
    for (part, path) in parts.zip(paths) {
        *part = json!({"type": "image", "path": path});
    }
    message
}

/// The text of a message with its images in brackets.
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

/// The files of all images in these messages, in order.
fn paths_of(messages: &[Message]) -> Vec<PathBuf> {
    let parts = messages.iter().filter_map(|message| message.content.as_array()).flatten();
    parts.filter_map(|part| Some(PathBuf::from(part.get("path")?.as_str()?))).collect()
}
