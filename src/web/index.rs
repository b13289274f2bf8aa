//! Vector search.

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::saving::Saving;
use super::{Device, from_js, pick, to_js, to_js_error};
use crate::error::Error;
use crate::retrieval;
use crate::retrieval::index::{self, Bitset, IndexOptions, Metric, Storage};

/// Vectors on a device that can be searched.
#[wasm_bindgen]
pub struct Index(index::Index);

#[wasm_bindgen]
impl Index {
    /// An empty index. `options`: `{ dims, metric?, storage?, model?, pooling? }`.
    pub fn create(device: &Device, options: JsValue) -> Result<Index, JsValue> {
        #[derive(Deserialize)]
        struct Options {
            dims: u32,
            metric: Option<String>,
            storage: Option<String>,
            model: Option<String>,
            pooling: Option<String>,
        }
        let Options { dims, metric, storage, model, pooling } = from_js("options", options)?;
        let metric = pick("metric", metric, &Metric::ALL, Metric::name)?.unwrap_or_default();
        let storage = pick("storage", storage, &Storage::ALL, Storage::name)?.unwrap_or_default();
        let options = IndexOptions { metric, storage, model, pooling };
        index::Index::new(&device.0, dims, options).map(Index).map_err(to_js_error)
    }

    /// Throws if the vectors are of another model, length or pooling: `{ model, dims?, pooling? }`.
    pub fn expect(&self, wanted: JsValue) -> Result<(), JsValue> {
        #[derive(Deserialize)]
        struct Wanted {
            model: String,
            dims: Option<u32>,
            pooling: Option<String>,
        }
        let Wanted { model, dims, pooling } = from_js("expect", wanted)?;
        self.0.expect_model(&model, dims.unwrap_or(self.0.dims())).map_err(to_js_error)?;
        let found = self.0.options().pooling.as_deref();
        match pooling.filter(|pooling| found.is_some_and(|found| found != pooling)) {
            Some(pooling) => Err(to_js_error(Error::Index {
                field: "pooling".into(),
                expected: format!("`{pooling}`"),
                found: format!("`{}`", found.unwrap_or_default().escape_debug()),
            })),
            None => Ok(()),
        }
    }

    /// Describes the index, see `IndexInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Info<'a> {
            dims: u32,
            metric: &'static str,
            storage: &'static str,
            model: Option<&'a str>,
            pooling: Option<&'a str>,
            length: u32,
            n_ids: u32,
            size_bytes: u64,
        }
        let IndexOptions { metric, storage, model, pooling } = self.0.options();
        to_js(&Info {
            dims: self.0.dims(),
            metric: metric.name(),
            storage: storage.name(),
            model: model.as_deref(),
            pooling: pooling.as_deref(),
            length: self.0.len(),
            n_ids: self.0.n_ids(),
            size_bytes: self.0.size_bytes(),
        })
    }

    /// Appends concatenated vectors. Returns the first id; the others follow.
    pub async fn append(&mut self, vectors: Vec<f32>) -> Result<u32, JsValue> {
        self.0.append(&vectors).await.map(|ids| ids.start).map_err(to_js_error)
    }

    /// Deletes vectors. Returns how many existed.
    pub fn delete(&mut self, ids: &[u32]) -> Result<u32, JsValue> {
        self.0.delete(ids).map_err(to_js_error)
    }

    /// The best vectors for each query, restricted to the ids in `filter` if given: `{ id, score }[][]`.
    pub async fn search(&self, queries: Vec<f32>, k: u32, filter: Option<Vec<u32>>) -> Result<JsValue, JsValue> {
        let filter = filter.map(|ids| self.bits(&ids)).transpose().map_err(to_js_error)?;
        let lists = self.0.search(&queries, k as usize, filter.as_ref()).await.map_err(to_js_error)?;
        hits_to_js(lists)
    }

    /// The index's current state as a file.
    pub fn saving(&self) -> Result<Saving, JsValue> {
        self.0.saving().map(Saving).map_err(to_js_error)
    }
}

impl Index {
    pub(super) fn new(index: index::Index) -> Index {
        Index(index)
    }

    /// These ids as a set.
    fn bits(&self, ids: &[u32]) -> Result<Bitset, Error> {
        let n_ids = self.0.n_ids();
        let mut bits = Bitset::new(n_ids);
        for &id in ids {
            if id >= n_ids {
                let (expected, found) = (format!("an id below {n_ids}"), id.to_string());
                return Err(Error::Index { field: "id in filter".into(), expected, found });
            }
            bits.set(id, true);
        }
        Ok(bits)
    }
}

/// `{ id, score }[][]`.
pub(super) fn hits_to_js(lists: Vec<Vec<retrieval::Hit>>) -> Result<JsValue, JsValue> {
    #[derive(Serialize)]
    struct Hit {
        id: u32,
        score: f32,
    }
    let plain = |list: Vec<retrieval::Hit>| -> Vec<Hit> {
        list.into_iter().map(|retrieval::Hit { id, score }| Hit { id, score }).collect()
    };
    to_js(&lists.into_iter().map(plain).collect::<Vec<_>>())
}
