//! vLLM's API of tokens: `/tokenize` with `prompt`, and `/tokenizer_info`. lm-eval and `vllm bench serve` use
//! them.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tilewright::Error;
use tilewright::tokenizer::EncodeOptions;

use super::answers::ScoredToken;
use super::app::{ApiRequest, App, is_long};
use super::errors::ApiError;
use super::llama::{TokenizerNames, queried};
use super::models::Task;
use super::routes::Queried;
use super::sampling::MODEL;
use super::schema::{Field, Kind, field};
use super::tei::ADD_SPECIAL_TOKENS;

/// Fields of `/tokenize` with `prompt`.
pub const PROMPT: &[Field] = &[
    field("prompt", Kind::Text, "", "The text."),
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
