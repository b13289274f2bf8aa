//! Retrieval by a learned similarity.

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::index::hits_to_js;
use super::{from_js, pick, to_js, to_js_error};
use crate::error::Error;
use crate::retrieval::index::Storage;
use crate::retrieval::mol::{self, MolLoader, MolSearch};

/// Maximum number of items that are all scored by default.
const MAX_BRUTE_FORCE: usize = 100_000;
/// Default number of candidates above that.
const CANDIDATES: usize = 10_000;

/// Items on a device, searched by a mixture of logits.
#[wasm_bindgen]
pub struct Mol {
    mol: mol::Mol,
    storage: Storage,
    model: Option<String>,
}

#[wasm_bindgen]
impl Mol {
    /// Describes the mixture and its items, see `MolInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Info<'a> {
            query_dims: u32,
            item_dims: u32,
            query_components: u32,
            item_components: u32,
            component_dims: u32,
            storage: &'static str,
            model: Option<&'a str>,
            length: usize,
            size_bytes: u64,
        }
        let config = self.mol.config();
        to_js(&Info {
            query_dims: config.query_dim,
            item_dims: config.item_dim,
            query_components: config.form.query_components,
            item_components: config.form.item_components,
            component_dims: config.dim,
            storage: self.storage.name(),
            model: self.model.as_deref(),
            length: self.mol.len(),
            size_bytes: self.mol.len() as u64 * self.mol.item_bytes(),
        })
    }

    /// Appends concatenated items. Returns the first id; the others follow.
    pub async fn append(&mut self, vectors: Vec<f32>) -> Result<u32, JsValue> {
        self.mol.append(&vectors).await.map(|ids| ids.start).map_err(to_js_error)
    }

    /// The best items for each query: `{ id, score }[][]`. `method`: see `MolMethod` in the npm package; `users`: an
    /// id per query if the mixture has user components.
    pub async fn search(
        &self,
        queries: Vec<f32>,
        k: u32,
        method: JsValue,
        users: Option<Vec<u32>>,
    ) -> Result<JsValue, JsValue> {
        let method: Option<SearchMethod> = from_js("method", method)?;
        let method = match method {
            Some(method) => method.search()?,
            None if self.mol.len() <= MAX_BRUTE_FORCE => MolSearch::BruteForce,
            None => MolSearch::Highest { candidates: CANDIDATES },
        };
        let users = users.unwrap_or_default();
        let found = self.mol.search(&queries, &users, k as usize, method).await.map_err(to_js_error)?;
        hits_to_js(found.hits)
    }
}

/// Loads the weights of a [`Mol`].
pub(super) struct MolUpload {
    weights: MolLoader,
    storage: Storage,
}

impl MolUpload {
    /// `storage`: as for an [`Index`](super::index::Index).
    pub fn new(file_len: Option<u64>, storage: Option<String>) -> Result<MolUpload, JsValue> {
        let storage = pick("storage", storage, &Storage::ALL, Storage::name)?.unwrap_or_default();
        Ok(MolUpload { weights: MolLoader::new(file_len), storage })
    }

    pub fn weights(&mut self) -> &mut MolLoader {
        &mut self.weights
    }

    /// A mixture without items.
    pub fn finish(self, device: &crate::Device) -> Result<Mol, Error> {
        let weights = self.weights.finish()?;
        let mol = mol::Mol::new(device, &weights, self.storage.weight())?;
        Ok(Mol { mol, storage: self.storage, model: weights.model().map(str::to_string) })
    }
}

/// A [`MolSearch`] from JavaScript.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SearchMethod {
    kind: String,
    candidates: Option<usize>,
    per_pair: Option<usize>,
    sample: Option<usize>,
}

impl SearchMethod {
    fn search(&self) -> Result<MolSearch, JsValue> {
        let error = |expected: &str, found: String| {
            to_js_error(Error::Option { option: "method", expected: expected.into(), found })
        };
        let given = |number: Option<usize>, name: &str| {
            number.ok_or_else(|| error(&format!("a number as `{name}`"), format!("{} without one", self.kind)))
        };
        let candidates = || given(self.candidates, "candidates");
        let per_pair = || given(self.per_pair, "perPair");
        Ok(match self.kind.as_str() {
            "bruteForce" => MolSearch::BruteForce,
            "naive" => MolSearch::Naive { per_pair: per_pair()? },
            "avg" => MolSearch::Avg { candidates: candidates()? },
            "comb" => MolSearch::Comb { per_pair: per_pair()?, candidates: candidates()? },
            "highest" => MolSearch::Highest { candidates: candidates()? },
            "twoPass" => MolSearch::TwoPass { candidates: candidates()? },
            "hIndexer" => MolSearch::HIndexer { candidates: candidates()?, sample: given(self.sample, "sample")? },
            "mips" => MolSearch::Mips,
            other => {
                let all = "bruteForce, naive, avg, comb, highest, twoPass, hIndexer, mips";
                return Err(error(all, format!("`{}`", other.escape_debug())));
            }
        })
    }
}
