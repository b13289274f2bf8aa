//! vLLM's own API: `/tokenize` with `prompt` and `/tokenizer_info`, which lm-eval and `vllm bench serve` use, `/score` and
//! `/version`.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::tokenizer::EncodeOptions;

use super::answers::ScoredToken;
use super::app::{AnswerMetadata, ApiRequest, App, is_long};
use super::embeddings::{INSTRUCTION, RerankJob, ScoreKind, Scores};
use super::errors::ApiError;
use super::llama::{TokenizerNames, queried};
use super::models::Task;
use super::routes::Queried;
use super::sampling::MODEL;
use super::schema::{Endpoint, Field, Kind, Neutral, field, neutral, required};
use super::tei::ADD_SPECIAL_TOKENS;

/// `/score`.
pub const SCORE: Endpoint = Endpoint::post(
    "/score",
    "Scores pairs of texts by a cross-encoder, like vLLM's",
    &[&[
        MODEL,
        required("text_1", Kind::Other(&["string", "array"], TEXTS), "The first texts: one for all, or as many."),
        required("text_2", Kind::Other(&["string", "array"], TEXTS), "The second texts."),
        INSTRUCTION,
        neutral("truncate_prompt_tokens", &[Neutral::Number(-1.0)], "Pairs are cut to the model's limit."),
        neutral("user", &[Neutral::AnyText], "Ignored."),
    ]],
);

const TEXTS: &str = "a text or a list of texts";

/// Fields of `/tokenize` with `prompt`.
pub const PROMPT: &[Field] = &[
    field("prompt", Kind::Text, "", "The text, as vLLM names it."),
    field("return_token_strs", Kind::Flag, "false", "Add the texts of the tokens."),
];

/// `/tokenize` with `prompt`.
pub async fn tokenize(app: &App, asked: &ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(&[&[MODEL, ADD_SPECIAL_TOKENS], PROMPT])?;
    let prompt = fields.some_text("prompt")?.to_owned();
    let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let has_texts = fields.flag("return_token_strs")?.unwrap_or(false);
    // `model` may also name an encoder.
    let lease = app.models.get_for(fields.text("model")?, Task::Generate).await?;
    let loaded = lease.loaded.clone();
    let n_context = loaded.context_length();
    let tokens = app.prepare_in_turn(is_long(prompt.len()), move || {
        let tokenizer = loaded.tokenizer()?;
        let ids = tokenizer.encode_with(&prompt, EncodeOptions { add_special, parse_special: true })?;
        let text = |id: &u32| tokenizer.token_bytes(*id).map(ScoredToken::text);
        let texts = has_texts.then(|| ids.iter().map(text).collect::<Result<Vec<String>, Error>>());
        Ok((texts.transpose()?, ids))
    });
    let (texts, ids) = tokens.await?;
    let body = json!({"count": ids.len(), "max_model_len": n_context, "tokens": ids, "token_strs": texts});
    Ok(Body(body).into_response())
}

/// `GET /tokenizer_info`, for the model in the query or the only one.
pub async fn tokenizer_info(State(app): State<Arc<App>>, Query(query): Queried) -> Result<Response, ApiError> {
    let decoder = queried(&app, &query).await?;
    let TokenizerNames { template, bos, eos } = TokenizerNames::of(decoder.model())?;
    let body = json!({
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": null,
        "chat_template": template,
        "model_max_length": decoder.model().context_length(),
    });
    Ok(Body(body).into_response())
}

/// `GET /version`.
pub async fn version() -> Body<Json> {
    Body(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `/score`. Pairs that are too long are truncated, as in `/v1/rerank`.
pub async fn score(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(SCORE.fields)?;
    let most = app.limits.texts;
    let texts = |field: &str| {
        let texts = fields.texts(field, most)?;
        texts.ok_or_else(|| fields.wrong(field, &format!("a text or a list of 1 to {most} texts")))
    };
    let (queries, documents) = (texts("text_1")?, texts("text_2")?);
    if ![1, documents.len()].contains(&queries.len()) {
        let expected = format!("one text, or {} as in text_2", documents.len());
        return Err(ApiError::invalid("text_1", Some(&queries.len().into()), &expected));
    }
    let model = app.models.name_for(fields.text("model")?, Task::Rerank).await?;
    let owned = |texts: Vec<&str>| Arc::new(texts.into_iter().map(str::to_owned).collect::<Vec<String>>());
    let job = RerankJob {
        queries: owned(queries),
        instruction: fields.text("instruction")?.map(str::to_owned),
        field: "text_2",
        documents: owned(documents),
        truncates: true,
        scores: ScoreKind::Model,
    };
    let lease = app.models.get(&model).await?;
    let Scores { scores, n_tokens, .. } = job.run(&app, lease, &asked.since).await?;
    let one = |(index, score): (usize, &f32)| json!({"index": index, "object": "score", "score": score});
    let mut answer = AnswerMetadata::new("score-", &model).object("list");
    answer.insert("data".into(), scores.iter().enumerate().map(one).collect());
    answer.insert("usage".into(), json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0}));
    Ok(Body(Json::Object(answer)).into_response())
}
