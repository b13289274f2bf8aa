//! `/v1/embeddings` and `/v1/rerank`.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use serde_json::{Value as Json, json};
use tilewright::Error;

use super::app::{ApiRequest, App, RequestContext};
use super::errors::ApiError;
use super::models::{Lease, Loaded};
use super::sampling::MODEL;
use super::schema::{Endpoint, Kind, Neutral, field, neutral, required};

/// Texts computed between checks whether the client still waits.
const PART: usize = 64;

/// Concatenated vectors of a part, and its number of tokens.
pub type Vectors = (Vec<f32>, usize);

/// `/v1/embeddings`.
pub const EMBEDDINGS: Endpoint = Endpoint::post(
    "/v1/embeddings",
    "Computes embeddings, like OpenAI's Embeddings",
    &[&[
        MODEL,
        required("input", Kind::Other(&["string", "array"], "a text or a list of texts"), "The texts."),
        field("encoding_format", Kind::OneOf(&["float", "base64"]), "\"float\"", "How vectors are written."),
        field("dimensions", Kind::Whole(1, (1 << 31) - 1), "", "Width of the vectors: the model's own."),
        neutral("user", &[Neutral::AnyText], "Ignored."),
    ]],
);

/// `/v1/rerank`.
pub const RERANK: Endpoint = Endpoint::post(
    "/v1/rerank",
    "Ranks documents by a query, like Cohere's and Jina's Rerank",
    &[&[
        MODEL,
        required("query", Kind::Text, "The query."),
        required("documents", Kind::Other(&["array"], "a list of texts, or of objects with a text"), "The documents."),
        field("top_n", Kind::Whole(1, (1 << 31) - 1), "all", "Number of results."),
        field("return_documents", Kind::Flag, "false", "Add the documents to the results."),
        neutral("user", &[Neutral::AnyText], "Ignored."),
    ]],
);

/// Computes embeddings.
///
/// # Errors
/// Errors of [`App::compute`].
pub async fn vectors_of(
    app: &App,
    lease: Lease,
    since: &RequestContext,
    texts: Vec<String>,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let dims = lease.embedder()?.dims() as usize;
    let part = move |loaded: &Loaded, at: usize| {
        let embedder = loaded.embedder()?;
        let texts = texts.get(at * PART..).filter(|rest| !rest.is_empty())?;
        let texts = texts.get(..PART).unwrap_or(texts);
        let compute = || {
            let mut n_tokens = 0;
            for text in texts {
                n_tokens += embedder.encode(text)?.ids.len();
            }
            Ok::<Vectors, Error>((pollster::block_on(embedder.embed(texts))?, n_tokens))
        };
        Some(compute())
    };
    let parts = app.compute(lease, since, part).await?;
    let n_tokens = parts.iter().map(|(_, n)| n).sum();
    let vectors = parts.iter().flat_map(|(numbers, _)| numbers.chunks(dims).map(<[f32]>::to_vec)).collect();
    Ok((vectors, n_tokens))
}

/// An answer serialised from the numbers themselves: JSON values would take eighteen times the memory.
#[derive(Serialize)]
struct EmbeddingResponse<'a> {
    object: &'static str,
    data: Vec<EmbeddingData<'a>>,
    model: &'a str,
    usage: Json,
}

#[derive(Serialize)]
struct EmbeddingData<'a> {
    object: &'static str,
    index: usize,
    embedding: EncodedVector<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EncodedVector<'a> {
    Numbers(&'a [f32]),
    Base64(String),
}

/// `/v1/embeddings`.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(EMBEDDINGS.fields)?;
    let model = &app.models.named(fields)?;
    let as_base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(fields.wrong("encoding_format", r#""float" or "base64""#)),
    };
    fields.text("user")?;
    let is_of_ids = |input: &Json| {
        input
            .as_array()
            .is_some_and(|list| !list.is_empty() && list.iter().all(|one| one.is_number() || one.is_array()))
    };
    if fields.get("input").is_some_and(is_of_ids) {
        return Err(ApiError::unsupported("input", "input has token ids; only texts are supported"));
    }
    let texts = fields.texts("input", app.limits.texts)?;
    let texts =
        texts.ok_or_else(|| fields.wrong("input", &format!("a text or a list of 1 to {} texts", app.limits.texts)))?;
    let texts: Vec<String> = texts.into_iter().map(str::to_owned).collect();
    let dimensions = fields.whole("dimensions", 1, (1 << 31) - 1)?;
    let lease = app.models.get(model).await?;
    let dims = u64::from(lease.embedder()?.dims());
    if let Some(dimensions) = dimensions.filter(|&dimensions| dimensions != dims) {
        let message = format!("dimensions is {dimensions}, but vectors of {model} have {dims} and cannot be truncated");
        return Err(ApiError::unsupported("dimensions", message));
    }
    let (vectors, n) = vectors_of(&app, lease, &asked.since, texts).await?;
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let embedding = match as_base64 {
            true => {
                let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
                EncodedVector::Base64(BASE64_STANDARD.encode(bytes))
            }
            false => EncodedVector::Numbers(vector),
        };
        EmbeddingData { object: "embedding", index, embedding }
    });
    let data = data.collect();
    let usage = json!({"prompt_tokens": n, "total_tokens": n});
    Ok(Body(EmbeddingResponse { object: "list", data, model, usage }).into_response())
}

/// `/v1/rerank`, in the shape common to Cohere's and Jina's interfaces.
pub async fn rerank(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(RERANK.fields)?;
    let model = &app.models.named(fields)?;
    let query = fields.some_text("query")?.to_owned();
    let most = app.limits.texts;
    let expected = format!("a list of 1 to {most} texts, or of objects with a text");
    let given = fields.list("documents", &expected)?.filter(|list| (1..=most).contains(&list.len()));
    let text = |one: &Json| Some(one.as_str().or_else(|| one.get("text")?.as_str())?.to_owned());
    let documents: Option<Vec<String>> = given.and_then(|list| list.iter().map(text).collect());
    let documents = Arc::new(documents.ok_or_else(|| fields.wrong("documents", &expected))?);
    let top_n = fields.whole("top_n", 1, (1 << 31) - 1)?.map_or(usize::MAX, |n| n as usize);
    let returns = fields.flag("return_documents")?.unwrap_or(false);
    let lease = app.models.get(model).await?;
    lease.reranker()?;
    let of_thread = documents.clone();
    let part = move |loaded: &Loaded, at: usize| {
        let reranker = loaded.reranker()?;
        let texts = of_thread.get(at * PART..).filter(|rest| !rest.is_empty())?;
        let texts = texts.get(..PART).unwrap_or(texts);
        let compute = || {
            let mut n_tokens = 0;
            for text in texts {
                n_tokens += reranker.encode(&query, text)?.ids.len();
            }
            Ok::<Vectors, Error>((pollster::block_on(reranker.score(&query, texts))?, n_tokens))
        };
        Some(compute())
    };
    let parts = app.compute(lease, &asked.since, part).await?;
    let n: usize = parts.iter().map(|(_, n)| n).sum();
    let mut ranked: Vec<(usize, f32)> = parts.into_iter().flat_map(|(scores, _)| scores).enumerate().collect();
    // Equal scores keep the order of the documents.
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    ranked.truncate(top_n);
    let result = |(index, score): (usize, f32)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if let Some(text) = documents.get(index).filter(|_| returns) {
            result["document"] = json!({"text": text});
        }
        result
    };
    let results: Vec<Json> = ranked.into_iter().map(result).collect();
    let usage = json!({"prompt_tokens": n, "total_tokens": n});
    Ok(Body(json!({"object": "list", "model": model, "results": results, "usage": usage})).into_response())
}
