//! Loading from files that arrive in pieces.

use std::rc::Rc;

use js_sys::{Function, Promise, Uint8Array};
use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

#[cfg(feature = "web-speech")]
use super::transcriber::{self, Transcriber};
use super::{Device, from_js, to_js, to_js_error};
#[cfg(feature = "web")]
use super::{
    embedder::{self, Embedder},
    index::Index,
    model::Model,
    mol,
    reranker::{self, Reranker},
    vision::{self, VisionEncoder},
};
use crate::error::Error;
use crate::generate::LoadOptions;
use crate::load::{self, FileName, ReadFile};
use crate::retrieval::index::IndexLoader;
use crate::target::Tuning;

/// Loads a model, an encoder, a transcriber or vectors onto a device while their files arrive.
#[wasm_bindgen]
pub struct Loader(LoaderKind);

enum LoaderKind {
    #[cfg(feature = "web")]
    Model(load::Loader<crate::Model>),
    #[cfg(feature = "web")]
    Embedder(load::Loader<crate::Embedder>),
    #[cfg(feature = "web")]
    Reranker(load::Loader<crate::Reranker>),
    #[cfg(feature = "web")]
    Index(IndexLoader),
    #[cfg(feature = "web")]
    Mol(crate::Device, mol::MolUpload),
    #[cfg(feature = "web")]
    Vision(load::Loader<crate::VisionEncoder>),
    #[cfg(feature = "web-speech")]
    Transcriber(load::Loader<crate::Transcriber>),
}

/// Applies the same to any kind of loader: of model files, an index, a mixture's weights.
macro_rules! any {
    ($loader:expr, $inner:ident => $of_model:expr, $index:ident => $of_index:expr, $mol:ident => $of_mol:expr) => {
        match $loader {
            #[cfg(feature = "web")]
            LoaderKind::Model($inner) => $of_model,
            #[cfg(feature = "web")]
            LoaderKind::Embedder($inner) => $of_model,
            #[cfg(feature = "web")]
            LoaderKind::Reranker($inner) => $of_model,
            #[cfg(feature = "web")]
            LoaderKind::Vision($inner) => $of_model,
            #[cfg(feature = "web")]
            LoaderKind::Index($index) => $of_index,
            #[cfg(feature = "web")]
            LoaderKind::Mol(_, $mol) => $of_mol,
            #[cfg(feature = "web-speech")]
            LoaderKind::Transcriber($inner) => $of_model,
        }
    };
}

/// The next bytes that a loader wants.
#[derive(Serialize)]
pub(super) struct RangeRequest {
    file: usize,
    offset: u64,
}

impl RangeRequest {
    /// `{ file, offset }`, or `undefined` when nothing is wanted.
    pub fn to_js(wanted: Option<(usize, u64)>) -> Result<JsValue, JsValue> {
        match wanted {
            Some((file, offset)) => to_js(&RangeRequest { file, offset }),
            None => Ok(JsValue::UNDEFINED),
        }
    }
}

#[cfg(feature = "web")]
#[wasm_bindgen]
impl Loader {
    /// A loader of a [`Model`]. `files`: `{ name, size? }[]`; `options`:
    /// `{ contextLength?, fitContext?, kvType?, exact?, memoryLimit? }`. `read(file, offset, length)` promises at
    /// most `length` bytes of a file, after all files were pushed. Passes call it for weights that do not fit in memory.
    pub fn model(device: &Device, files: JsValue, options: JsValue, read: Option<Function>) -> Result<Loader, JsValue> {
        #[derive(Deserialize, Default)]
        #[serde(rename_all = "camelCase", default)]
        struct Options {
            context_length: Option<u32>,
            fit_context: bool,
            kv_type: Option<String>,
            exact: bool,
            memory_limit: Option<u64>,
        }
        let options: Option<Options> = from_js("options", options)?;
        let Options { context_length, fit_context, kv_type, exact, memory_limit } = options.unwrap_or_default();
        let kv_type = kv_type.map(|name| name.parse()).transpose().map_err(to_js_error)?.unwrap_or_default();
        let stream_layers = read.is_some();
        let defaults = LoadOptions::default();
        let options =
            LoadOptions { context_length, fit_context, kv_type, exact, memory_limit, stream_layers, ..defaults };
        let (device, files) = (&device.0, read_files(files)?);
        let loader = match read {
            Some(read) => crate::Model::loader_reading(device, files, options, file_reader(read)),
            None => crate::Model::loader(device, files, options),
        };
        Ok(Loader(LoaderKind::Model(loader.map_err(to_js_error)?)))
    }

    /// A loader of an [`Embedder`]. `files`: `{ name, size? }[]`; `options`: `EmbedderOptions` in the npm package.
    pub fn embedder(device: &Device, files: JsValue, options: JsValue) -> Result<Loader, JsValue> {
        let options = embedder::read_options(options)?;
        let loader = crate::Embedder::loader(&device.0, read_files(files)?, options).map_err(to_js_error)?;
        Ok(Loader(LoaderKind::Embedder(loader)))
    }

    /// A loader of a [`Reranker`]. `files`: `{ name, size? }[]`; `options`: `RerankerOptions` in the npm package.
    pub fn reranker(device: &Device, files: JsValue, options: JsValue) -> Result<Loader, JsValue> {
        let options = reranker::read_options(options)?;
        let loader = crate::Reranker::loader(&device.0, read_files(files)?, options).map_err(to_js_error)?;
        Ok(Loader(LoaderKind::Reranker(loader)))
    }

    /// A loader of an [`Index`] file from `saving`, with its size if known.
    pub fn index(device: &Device, size: Option<f64>) -> Loader {
        Loader(LoaderKind::Index(IndexLoader::new(&device.0, size.map(|size| size as u64))))
    }

    /// A loader of a [`Mol`](mol::Mol) without items, from a safetensors file. `storage`: as for an [`Index`].
    pub fn mol(device: &Device, size: Option<f64>, storage: Option<String>) -> Result<Loader, JsValue> {
        Ok(Loader(LoaderKind::Mol(device.0.clone(), mol::MolUpload::new(size.map(|size| size as u64), storage)?)))
    }

    /// A loader of a [`VisionEncoder`]. `files`: `{ name, size? }[]`; `options`: `{ maxTokens? }`.
    pub fn vision(device: &Device, files: JsValue, options: JsValue) -> Result<Loader, JsValue> {
        let options = vision::read_options(options)?;
        let loader = crate::VisionEncoder::loader(&device.0, read_files(files)?, options).map_err(to_js_error)?;
        Ok(Loader(LoaderKind::Vision(loader)))
    }

    /// Uses the result of an earlier `tune` of the model. Returns why it is not applicable, if so.
    #[wasm_bindgen(js_name = useTuning)]
    pub fn use_tuning(&mut self, text: &str) -> Result<Option<String>, JsValue> {
        let loader = self.of_model()?;
        Ok(match Tuning::parse(text.as_bytes(), loader.device().info()) {
            Ok((tuning, found)) => {
                loader.set_tuning(tuning);
                loader.device().tested().merge(found);
                None
            }
            Err(why) => Some(why),
        })
    }

    /// Measures the device's fastest variants for the model's products and uses them, after all wanted bytes were
    /// pushed. Returns a text for `useTuning`.
    pub async fn tune(&mut self) -> Result<String, JsValue> {
        let loader = self.of_model()?;
        loader.tune().await.map_err(to_js_error)?;
        let device = loader.device();
        Ok(device.tuning().text(device.info(), &device.tested().found()))
    }
}

#[cfg(feature = "web-speech")]
#[wasm_bindgen]
impl Loader {
    /// A loader of a [`Transcriber`]. `files`: `{ name, size? }[]`; `options`: `{ kvType?, memoryLimit? }`.
    pub fn transcriber(device: &Device, files: JsValue, options: JsValue) -> Result<Loader, JsValue> {
        let options = transcriber::read_options(options)?;
        let loader = crate::Transcriber::loader(&device.0, read_files(files)?, options).map_err(to_js_error)?;
        Ok(Loader(LoaderKind::Transcriber(loader)))
    }
}

#[wasm_bindgen]
impl Loader {
    /// Sets the name of the files' folder, before the first bytes are pushed.
    #[wasm_bindgen(js_name = setFolder)]
    pub fn set_folder(&mut self, name: &str) {
        any!(&mut self.0, loader => loader.set_folder(name), _index => {}, _mol => {});
    }

    /// `{ file, offset }` of the next bytes wanted, or `undefined` when complete.
    pub fn want(&mut self) -> Result<JsValue, JsValue> {
        RangeRequest::to_js(any!(
            &mut self.0,
            loader => loader.wanted(),
            index => in_only_file(index.wanted()),
            mol => in_only_file(mol.weights().wanted())
        ))
    }

    /// Adds bytes at the wanted offset.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), JsValue> {
        any!(&mut self.0, loader => loader.push(bytes).await, index => index.push(bytes).await, mol => mol.weights().push(bytes))
            .map_err(to_js_error)
    }

    /// Ends the wanted file.
    pub fn end(&mut self) -> Result<(), JsValue> {
        any!(&mut self.0, loader => loader.end(), index => index.end(), mol => mol.weights().end()).map_err(to_js_error)
    }

    /// The loaded object.
    pub async fn finish(self) -> Result<JsValue, JsValue> {
        match self.0 {
            #[cfg(feature = "web")]
            LoaderKind::Model(loader) => loader.finish().await.map(|model| Model::new(model).into()),
            #[cfg(feature = "web")]
            LoaderKind::Embedder(loader) => loader.finish().await.map(|embedder| Embedder::new(embedder).into()),
            #[cfg(feature = "web")]
            LoaderKind::Reranker(loader) => loader.finish().await.map(|reranker| Reranker::new(reranker).into()),
            #[cfg(feature = "web")]
            LoaderKind::Index(loader) => loader.finish().map(|index| Index::new(index).into()),
            #[cfg(feature = "web")]
            LoaderKind::Mol(device, loader) => loader.finish(&device).map(Into::into),
            #[cfg(feature = "web")]
            LoaderKind::Vision(loader) => loader.finish().await.map(|encoder| VisionEncoder::new(encoder).into()),
            #[cfg(feature = "web-speech")]
            LoaderKind::Transcriber(loader) => {
                loader.finish().await.map(|transcriber| Transcriber::new(transcriber).into())
            }
        }
        .map_err(to_js_error)
    }
}

#[cfg(feature = "web")]
impl Loader {
    fn of_model(&mut self) -> Result<&mut load::Loader<crate::Model>, JsValue> {
        let found = match &mut self.0 {
            LoaderKind::Model(loader) => return Ok(loader),
            LoaderKind::Embedder(_) => "an embedder's",
            LoaderKind::Reranker(_) => "a reranker's",
            LoaderKind::Index(_) => "an index's",
            LoaderKind::Mol(..) => "a mixture's",
            LoaderKind::Vision(_) => "a vision encoder's",
            #[cfg(feature = "web-speech")]
            LoaderKind::Transcriber(_) => "a transcriber's",
        };
        let (expected, found) = ("a model's".into(), found.into());
        Err(to_js_error(Error::Operand { kernel: "tune", operand: "loader", expected, found }))
    }
}

/// An offset in the only file.
#[cfg(feature = "web")]
fn in_only_file(offset: Option<u64>) -> Option<(usize, u64)> {
    offset.map(|offset| (0, offset))
}

/// Reads files through a JavaScript function, and reports its error messages.
#[cfg(feature = "web")]
fn file_reader(read: Function) -> ReadFile {
    let failed = |thrown: JsValue| {
        let said = js_sys::Reflect::get(&thrown, &"message".into()).ok().and_then(|message| message.as_string());
        let source = std::io::Error::other(said.unwrap_or_else(|| "it cannot be read again".into()));
        Error::Io { path: "a file of the model".into(), source }
    };
    Rc::new(move |file, offset, len| {
        let [file, offset, len] = [file as f64, offset as f64, len as f64].map(JsValue::from);
        let promised = read.call3(&JsValue::UNDEFINED, &file, &offset, &len);
        Box::pin(async move {
            let bytes = JsFuture::from(Promise::resolve(&promised.map_err(failed)?)).await.map_err(failed)?;
            Ok(if bytes.is_undefined() { Vec::new() } else { Uint8Array::new(&bytes).to_vec() })
        })
    })
}

/// Deserialises a list of files.
pub(super) fn read_files(files: JsValue) -> Result<Vec<FileName>, JsValue> {
    #[derive(Deserialize)]
    struct File {
        name: String,
        size: Option<u64>,
    }
    let files: Vec<File> = from_js("files", files)?;
    Ok(files.into_iter().map(|File { name, size }| FileName { name, size }).collect())
}
