//! Facts and memory plans from the headers of a model's files.

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::loader::{RangeRequest, read_files};
use super::{Device, from_js, plan_to_js, to_js, to_js_error};
use crate::chat::ChatTemplate;
use crate::error::Error;
use crate::generate::LoadOptions;
use crate::load::{HeaderReader, ModelFile, ModelHeader, ModelShape, Outline, WeightShare};

/// The headers of a model's files, pushed as to a `Loader`.
#[wasm_bindgen]
pub struct Header {
    /// Until the headers are complete.
    reader: Option<HeaderReader>,
    read: Option<ParsedHeaders>,
}

/// The largest exact integer of JavaScript; a hostile header may claim more.
const MAX_SAFE: u64 = (1 << 53) - 1;

/// The parsed headers.
struct ParsedHeaders {
    outline: Outline,
    /// The model's header, or why it cannot be loaded.
    header: Result<ModelHeader, Error>,
}

#[wasm_bindgen]
impl Header {
    /// Of these files, `{ name, size? }[]`.
    #[wasm_bindgen(constructor)]
    pub fn new(files: JsValue) -> Result<Header, JsValue> {
        let reader = HeaderReader::new(read_files(files)?).map_err(to_js_error)?;
        Ok(Header { reader: Some(reader), read: None })
    }

    /// Sets the name of the files' folder.
    #[wasm_bindgen(js_name = setFolder)]
    pub fn set_folder(&mut self, name: &str) {
        if let Some(reader) = &mut self.reader {
            reader.set_folder(name);
        }
    }

    /// `{ file, offset }` of the next bytes wanted, or `undefined` when the headers are complete.
    pub fn want(&self) -> Result<JsValue, JsValue> {
        RangeRequest::to_js(self.reader.as_ref().and_then(HeaderReader::wanted))
    }

    /// Adds bytes at the wanted offset.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), JsValue> {
        self.reader.as_mut().map_or(Ok(()), |reader| reader.push(bytes)).map_err(to_js_error)
    }

    /// Ends the wanted file.
    pub fn end(&mut self) -> Result<(), JsValue> {
        self.reader.as_mut().map_or(Ok(()), HeaderReader::end).map_err(to_js_error)
    }

    /// The headers' facts, once nothing more is wanted; see `HeaderFacts` in the npm package.
    pub fn facts(&mut self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Weights {
            r#type: String,
            parameters: u64,
            size_bytes: u64,
        }
        #[derive(Serialize, Default)]
        #[serde(rename_all = "camelCase")]
        struct Facts<'a> {
            kind: &'static str,
            name: Option<&'a str>,
            architecture: Option<&'a str>,
            licence: Option<&'a str>,
            max_context_length: Option<u64>,
            chat_template: bool,
            weights: Vec<Weights>,
            problem: Option<String>,
        }
        let ParsedHeaders { outline, header } = self.read().map_err(to_js_error)?;
        let weights = |shares: Vec<WeightShare>| {
            let weights_of = |WeightShare { block_type, n_elements, size_bytes }| Weights {
                r#type: block_type.to_string(),
                parameters: n_elements.min(MAX_SAFE),
                size_bytes: size_bytes.min(MAX_SAFE),
            };
            shares.into_iter().map(weights_of).collect()
        };
        let licence = outline.licence.as_deref();
        let facts = match header {
            Ok(header) => Facts {
                kind: match &header.shape {
                    ModelShape::Decoder(_) => "model",
                    ModelShape::Encoder(shape) if shape.ranks() => "reranker",
                    ModelShape::Encoder(_) => "embedder",
                },
                name: Some(&header.name),
                architecture: Some(&header.shape.config().architecture),
                max_context_length: Some(
                    match &header.shape {
                        ModelShape::Decoder(config) => config.max_seq_len,
                        ModelShape::Encoder(shape) => shape.max_tokens,
                    }
                    .into(),
                ),
                chat_template: has_template(header),
                weights: weights(header.tensor_index.shares()),
                licence,
                problem: None,
            },
            Err(problem) => Facts {
                kind: "other",
                name: outline.name.as_deref(),
                architecture: outline.architecture.as_deref(),
                max_context_length: outline.max_context_length.map(|length| length.min(MAX_SAFE)),
                weights: weights(outline.weights.clone()),
                licence,
                problem: Some(problem.to_string()),
                ..Facts::default()
            },
        };
        to_js(&facts)
    }

    /// Memory plan of the model on a device, whatever is available, as in [`plan_to_js`]. `options`:
    /// `{ contextLength?, kvType?, memoryLimit? }`, the first two for generative models.
    pub fn plan(&mut self, device: &Device, options: JsValue) -> Result<JsValue, JsValue> {
        let (options, device) = (read_options(options)?, &device.0);
        let header = self.of_model().map_err(to_js_error)?;
        let file = ModelFile { header: header.for_plan(), files: Vec::new() };
        let plan = match &header.shape {
            ModelShape::Decoder(_) => crate::Model::plan_file(&device.model_target(options.exact), &file, &options),
            ModelShape::Encoder(shape) if shape.ranks() => crate::Reranker::plan_file(device, file),
            ModelShape::Encoder(_) => crate::Embedder::plan_file(device, file),
        };
        plan.map_err(to_js_error).and_then(|plan| plan_to_js(&plan))
    }

    /// Throws what loading the model onto a device would throw by its headers, such as too little memory. `options`:
    /// those of `plan`, and `readsAgain?`: whether passes can read layers from the files.
    pub fn check(&mut self, device: &Device, options: JsValue) -> Result<(), JsValue> {
        let (options, device) = (read_options(options)?, &device.0);
        let header = self.of_model().map_err(to_js_error)?;
        let file = ModelFile { header: header.for_plan(), files: Vec::new() };
        match &header.shape {
            ModelShape::Decoder(_) => crate::Model::check_header(device, file.header, &options),
            ModelShape::Encoder(shape) if shape.ranks() => crate::Reranker::plan_file(device, file).map(drop),
            ModelShape::Encoder(_) => crate::Embedder::plan_file(device, file).map(drop),
        }
        .map_err(to_js_error)
    }
}

fn read_options(options: JsValue) -> Result<LoadOptions<'static>, JsValue> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Options {
        context_length: Option<u32>,
        kv_type: Option<String>,
        memory_limit: Option<u64>,
        reads_again: bool,
    }
    let Options { context_length, kv_type, memory_limit, reads_again } = from_js("options", options)?;
    let kv_type = kv_type.map(|name| name.parse()).transpose().map_err(to_js_error)?.unwrap_or_default();
    Ok(LoadOptions { context_length, kv_type, memory_limit, stream_layers: reads_again, ..LoadOptions::default() })
}

impl Header {
    fn of_model(&mut self) -> Result<&ModelHeader, Error> {
        let ParsedHeaders { header, .. } = self.read()?;
        header.as_ref().map_err(|problem| Error::Config {
            field: "header".into(),
            expected: "a model's header".into(),
            found: problem.to_string(),
        })
    }

    fn read(&mut self) -> Result<&ParsedHeaders, Error> {
        if let Some(reader) = self.reader.take() {
            let outline = reader.outline()?;
            let header = match &outline.content {
                Some(content) => Err(Error::Unsupported {
                    format: "gguf",
                    field: "general.type".into(),
                    found: content.clone(),
                    supported: "a model".into(),
                }),
                None => reader.finish().map(|(header, _)| header),
            };
            let header = match header {
                // A well-formed file of another kind still has facts.
                Err(error) if error.code() != "unsupported" => return Err(error),
                header => header,
            };
            self.read = Some(ParsedHeaders { outline, header });
        }
        self.read.as_ref().ok_or_else(|| Error::Config {
            field: "header".into(),
            expected: "complete headers".into(),
            found: "missing".into(),
        })
    }
}

/// Whether there is a chat template, in the files or built in for its tokens.
fn has_template(header: &ModelHeader) -> bool {
    let known = || ChatTemplate::for_model(&header.chat, header.tokenizer.as_ref().ok()?);
    !header.chat.templates.is_empty() || known().is_some()
}
