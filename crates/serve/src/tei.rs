//! The API of Hugging Face's Text Embeddings Inference (TEI): `/embed`, `/similarity`, `/rerank`, `/tokenize`, `/decode`
//! and `/info`.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::{MatchedPath, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::embed::{Truncation, TruncationSide};
use tilewright::formats::BlockType;
use tilewright::tokenizer::{EncodeOptions, Tokenizer};

use super::app::{ApiRequest, App};
use super::embeddings::{
    DIMENSIONS, DOCUMENT_OPTIONS, EmbedInput, EmbedInputs, EmbedJob, INPUT, INSTRUCTION, RerankJob, ScoreKind, TOP_N,
    top_n,
};
use super::errors::ApiError;
use super::fields::Fields;
use super::models::{Loaded, Task};
use super::routes::Queried;
use super::sampling::MODEL;
use super::schema::{Endpoint, Field, Kind, Neutral, field, ids_of, neutral, required};

/// `/embed`.
pub const EMBED: Endpoint = Endpoint::post("/embed", "Computes embeddings, like Hugging Face's TEI", &[EMBED_FIELDS]);

/// `/rerank`.
pub const RERANK: Endpoint = Endpoint::post(
    "/rerank",
    "Ranks `texts` by a query, like TEI, or `documents`, like /v1/rerank",
    &[RANK_FIELDS, DOCUMENT_OPTIONS],
);

/// `/similarity`.
pub const SIMILARITY: Endpoint = Endpoint::post(
    "/similarity",
    "Cosine similarities of a text and others, like TEI's",
    &[&[
        MODEL,
        required("inputs", Kind::Object(&[SENTENCES]), "The texts."),
        field("parameters", Kind::Object(&[PARAMETERS]), "{}", "How texts are read."),
    ]],
);

/// `/decode`.
pub const DECODE: Endpoint = Endpoint::post(
    "/decode",
    "Texts of tokens, like TEI's",
    &[&[
        MODEL,
        required("ids", Kind::Other(&["array"], IDS), "Token ids."),
        field("skip_special_tokens", Kind::Flag, "true", "Whether special tokens are left out."),
    ]],
);

const EMBED_FIELDS: &[Field] = &[
    MODEL,
    required("inputs", Kind::Other(&["string", "array"], INPUT), "Texts, or token ids of the model's own vocabulary."),
    PARAMETERS[0],
    PARAMETERS[1],
    field("normalize", Kind::Flag, "true", "Whether vectors have length 1. Models that normalise refuse `false`."),
    DIMENSIONS,
    PARAMETERS[2],
];

/// How texts are read.
const PARAMETERS: &[Field] = &[
    field("truncate", Kind::Flag, "false", "Whether a text that is too long is cut off; otherwise it is refused."),
    field("truncation_direction", Kind::OneOf(SIDES), "\"Right\"", "The side that is cut off."),
    field("prompt_name", Kind::Text, "the model's", "Name of the model's prompt to put before each text."),
];

/// Fields of `inputs` of `/similarity`.
const SENTENCES: &[Field] = &[
    required("source_sentence", Kind::Text, "The text to compare with."),
    required("sentences", Kind::Other(&["array"], "a list of texts"), "The texts to compare."),
];

/// Fields of `/rerank` with `texts`.
const RANK_FIELDS: &[Field] = &[
    MODEL,
    required("query", Kind::Text, "The query."),
    field("texts", Kind::Other(&["array"], "a list of texts"), "", "The texts to rank."),
    INSTRUCTION,
    field("raw_scores", Kind::Flag, "false", "Whether scores are logits instead of numbers from 0 to 1."),
    field("return_text", Kind::Flag, "false", "Whether results have the texts."),
    field("truncate", Kind::Flag, "false", "Whether a text that is too long is cut off; otherwise it is refused."),
    neutral("truncation_direction", &[Neutral::Text("Right"), Neutral::Text("right")], "Only the end is cut off."),
];

/// Fields of `/tokenize` with `inputs`.
pub const INPUTS: &[Field] = &[
    field(
        "inputs",
        Kind::Other(&["string", "array"], "a text or a list of texts"),
        "",
        "The texts, as TEI names them.",
    ),
    ADD_SPECIAL_TOKENS,
    field("prompt_name", Kind::Text, "", "Name of the model's prompt to put before each text."),
];

/// The row of special tokens in TEI's and vLLM's requests.
pub const ADD_SPECIAL_TOKENS: Field =
    field("add_special_tokens", Kind::Flag, "true", "Whether to add the model's special tokens.");

const IDS: &str = "a list of token ids, or a list of those";
const SIDES: &[&str] = &["Left", "Right", "left", "right"];

/// `/embed`.
pub async fn embed(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(EMBED.fields)?;
    let inputs = EmbedInputs::read(fields, "inputs", app.limits.texts)?;
    let job = EmbedJob {
        dimensions: fields.checked_whole("dimensions").map(|n| n as u64),
        normalize: Some(fields.flag("normalize")?.unwrap_or(true)),
        ..job_of(inputs, fields)?
    };
    Ok(Body(vectors_of(job, &app, &asked).await?).into_response())
}

/// A job with the fields of [`PARAMETERS`].
fn job_of(inputs: EmbedInputs, parameters: Fields<'_>) -> Result<EmbedJob, ApiError> {
    let side = match parameters.text("truncation_direction")? {
        Some("Left" | "left") => TruncationSide::Left,
        _ => TruncationSide::Right,
    };
    let truncates = parameters.flag("truncate")?.unwrap_or(false);
    Ok(EmbedJob {
        prompt: parameters.text("prompt_name")?.map(str::to_owned),
        ..EmbedJob::new(inputs, truncates.then_some(Truncation { max_tokens: None, side }))
    })
}

async fn vectors_of(job: EmbedJob, app: &App, asked: &ApiRequest) -> Result<Vec<Vec<f32>>, ApiError> {
    let lease = app.models.get_for(asked.fields()?.text("model")?, Task::Embed).await?;
    lease.embedder().map_err(of_model)?;
    Ok(job.run(app, lease, &asked.since).await?.0)
}

/// `/similarity`.
pub async fn similarity(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(SIMILARITY.fields)?;
    let none = Map::new();
    let inputs = fields.inside(fields.object("inputs", "an object")?.unwrap_or(&none), "inputs.");
    let parameters = fields.inside(fields.object("parameters", "an object")?.unwrap_or(&none), "parameters.");
    let expected = format!("a list of 1 to {} texts", app.limits.texts - 1);
    let given = inputs.list("sentences", &expected)?.filter(|list| (1..app.limits.texts).contains(&list.len()));
    let text = |one: &Json| one.as_str().map(|text| EmbedInput::Text(text.to_owned()));
    let others: Option<Vec<EmbedInput>> = given.and_then(|list| list.iter().map(text).collect());
    let source = EmbedInput::Text(inputs.some_text("source_sentence")?.to_owned());
    let mut list = others.ok_or_else(|| inputs.wrong("sentences", &expected))?;
    // Errors count the sentences from 0.
    list.push(source);
    let inputs = EmbedInputs { field: "inputs.sentences", list, is_list: true };
    let job = EmbedJob { normalize: Some(true), ..job_of(inputs, parameters)? };
    let n_others = job.inputs.list.len() - 1;
    let of_source = |error: ApiError| match error.param.as_deref() {
        Some(param) if param == format!("inputs.sentences[{n_others}]") => {
            let message = error.message.replacen(param, "inputs.source_sentence", 1);
            ApiError { param: Some("inputs.source_sentence".into()), message, ..error }
        }
        _ => error,
    };
    let vectors = vectors_of(job, &app, &asked).await.map_err(of_source)?;
    let Some((source, others)) = vectors.split_last() else { return Ok(Body(json!([])).into_response()) };
    let cosine = |other: &Vec<f32>| other.iter().zip(source).map(|(a, b)| a * b).sum::<f32>();
    Ok(Body(others.iter().map(cosine).collect::<Vec<f32>>()).into_response())
}

/// `/decode`.
pub async fn decode(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(DECODE.fields)?;
    let given = fields.list("ids", IDS)?.filter(|list| !list.is_empty());
    let each = |list: &[Json]| list.iter().map(|one| ids_of(one.as_array()?)).collect::<Option<Vec<_>>>();
    let lists = given.and_then(|list| ids_of(list).map(|ids| vec![ids]).or_else(|| each(list)));
    let lists = lists.ok_or_else(|| fields.wrong("ids", IDS))?;
    let skips = fields.flag("skip_special_tokens")?.unwrap_or(true);
    let lease = app.models.get_for(fields.text("model")?, Task::Any).await?;
    let loaded = lease.loaded.clone();
    let texts = app.prepare(move || {
        let tokenizer = loaded.tokenizer()?;
        let text = |ids: &Vec<u32>| Ok(tokenizer.decode(ids, skips)?);
        lists.iter().map(text).collect::<Result<Vec<String>, ApiError>>()
    });
    Ok(Body(texts.await?).into_response())
}

/// `/rerank` with `texts`.
pub async fn rerank(app: &App, asked: &ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    // LiteLLM sends `top_n`.
    fields.check(&[RANK_FIELDS, &[TOP_N]])?;
    let most = app.limits.texts;
    let expected = format!("a list of 1 to {most} texts");
    let texts = fields.list("texts", &expected)?.filter(|list| (1..=most).contains(&list.len()));
    let text = |one: &Json| one.as_str().map(str::to_owned);
    let texts: Option<Vec<String>> = texts.and_then(|list| list.iter().map(text).collect());
    let texts = Arc::new(texts.ok_or_else(|| fields.wrong("texts", &expected))?);
    let is_raw = fields.flag("raw_scores")?.unwrap_or(false);
    let job = RerankJob {
        queries: Arc::new(vec![fields.some_text("query")?.to_owned()]),
        instruction: fields.text("instruction")?.map(str::to_owned),
        field: "texts",
        documents: texts.clone(),
        truncates: fields.flag("truncate")?.unwrap_or(false),
        scores: if is_raw { ScoreKind::Logit } else { ScoreKind::Sigmoid },
    };
    let returns = fields.flag("return_text")?.unwrap_or(false);
    let top_n = top_n(fields);
    let lease = app.models.get_for(fields.text("model")?, Task::Rerank).await?;
    lease.reranker().map_err(of_model)?;
    let scores = job.run(app, lease, &asked.since).await?;
    let rank = |(index, score): (usize, f32)| {
        let mut rank = json!({"index": index, "score": score});
        if let Some(text) = texts.get(index).filter(|_| returns) {
            rank["text"] = text.as_str().into();
        }
        rank
    };
    Ok(Body(scores.ranked().take(top_n).map(rank).collect::<Json>()).into_response())
}

/// `/tokenize` with `inputs`. Tokens have no offsets: normalisers change the text.
pub async fn tokenize(app: &App, asked: &ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(&[&[MODEL], INPUTS])?;
    let most = app.limits.texts;
    let texts = fields.texts("inputs", most)?;
    let texts = texts.ok_or_else(|| fields.wrong("inputs", &format!("a text or a list of 1 to {most} texts")))?;
    let mut texts: Vec<String> = texts.into_iter().map(str::to_owned).collect();
    let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let lease = app.models.get_for(fields.text("model")?, Task::Any).await?;
    if let Some(name) = fields.text("prompt_name")? {
        let embedder = lease.embedder().map_err(of_model)?.with_prompt(Some(name));
        let embedder = embedder.map_err(|error| ApiError::of_option(error, "prompt_name"))?;
        texts.iter_mut().for_each(|text| text.insert_str(0, embedder.prompt()));
    }
    let loaded = lease.loaded.clone();
    let tokens = app.prepare(move || {
        let tokenizer = loaded.tokenizer()?;
        let of_text = |text: &String| {
            let ids = tokenizer.encode_with(text, EncodeOptions { add_special, parse_special: false })?;
            ids.into_iter().map(|id| token_of(tokenizer, id)).collect()
        };
        texts.iter().map(of_text).collect::<Result<Vec<Vec<Json>>, ApiError>>()
    });
    Ok(Body(tokens.await?).into_response())
}

fn token_of(tokenizer: &Tokenizer, id: u32) -> Result<Json, ApiError> {
    let text = String::from_utf8_lossy(tokenizer.token_bytes(id)?);
    Ok(json!({"id": id, "text": text, "special": tokenizer.is_control(id), "start": null, "stop": null}))
}

/// `GET /info`, for the model in the query or the only encoder.
pub async fn info(State(app): State<Arc<App>>, Query(query): Queried) -> Result<Response, ApiError> {
    let model = app.models.name_for(query.get("model").map(String::as_str), Task::Encode).await?;
    let lease = app.models.get(&model).await?;
    let (kind, types, max_tokens, batch_tokens) = match &lease.loaded {
        Loaded::Embedder(embedder) => (
            json!({"embedding": {"pooling": embedder.pooling().name()}}),
            embedder.block_types(),
            embedder.max_tokens(),
            embedder.max_batch_tokens(),
        ),
        Loaded::Reranker(reranker) => (
            json!({"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
            reranker.block_types(),
            reranker.max_tokens(),
            reranker.max_batch_tokens(),
        ),
        Loaded::Decoder(_) | Loaded::Transcriber(_) => return Err(of_model(lease.wrong_kind("encodes no texts"))),
    };
    Ok(Body(json!({
        "model_id": model,
        "model_sha": null,
        "model_dtype": types.first().map_or_else(String::new, dtype_of),
        "model_type": kind,
        "max_concurrent_requests": app.limits.batches,
        "max_input_length": max_tokens,
        "max_batch_tokens": batch_tokens,
        "max_batch_requests": null,
        "max_client_batch_size": app.limits.texts,
        "auto_truncate": false,
        "tokenization_workers": std::thread::available_parallelism().map_or(1, usize::from),
        "version": env!("CARGO_PKG_VERSION"),
        "sha": null,
        "docker_label": null,
    }))
    .into_response())
}

/// A weight type in TEI's words.
fn dtype_of(kind: &BlockType) -> String {
    match kind.to_string().as_str() {
        "F32" => "float32".into(),
        "F16" => "float16".into(),
        "BF16" => "bfloat16".into(),
        other => other.to_lowercase(),
    }
}

/// Endpoints of TEI that this server has no models for.
pub async fn refuse(path: MatchedPath) -> ApiError {
    let (lacks, instead) = match path.as_str() {
        "/embed_all" => ("vectors of single tokens", "/embed returns one vector for each text"),
        "/embed_sparse" => ("sparse vectors", "/embed returns dense ones"),
        _ => ("classes of texts", "/rerank scores texts by a query"),
    };
    let message = format!("{} is not supported: this server computes no {lacks}; {instead}", path.as_str());
    ApiError::refusal(StatusCode::FAILED_DEPENDENCY, "unsupported_value", message)
}

/// TEI reports a model of another kind as a failed dependency.
fn of_model(error: ApiError) -> ApiError {
    ApiError { status: StatusCode::FAILED_DEPENDENCY, ..error }
}
