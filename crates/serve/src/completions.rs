//! `/v1/completions`: text completion without a chat template.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::Error;
use tilewright::generate::Model;
use tilewright::tokenizer::EncodeOptions;

use super::answers::{AnswerEvent, AnswerOptions, Answers, End, PreparedPrompt, ScoredToken, usage_json};
use super::app::{AnswerMetadata, ApiRequest, App, is_long};
use super::errors::ApiError;
use super::fields::Fields;
use super::sampling::{self, RequestSampling};
use super::sse::{Disconnected, PartSender, Style, streamed};

const FIELDS: &[&str] = &["prompt", "max_completion_tokens", "max_tokens", "echo", "logprobs", "best_of"];

/// The default token limit, as in OpenAI's interface.
const USUAL_TOKENS: u64 = 16;

/// A text, or token ids.
#[derive(Clone)]
enum PromptInput {
    Text(String),
    Ids(Vec<u32>),
}

impl PromptInput {
    fn ids(&self, model: &Model) -> Result<Vec<u32>, Error> {
        match self {
            PromptInput::Text(text) => raw(model, text),
            PromptInput::Ids(ids) => Ok(ids.clone()),
        }
    }

    fn len(&self) -> usize {
        match self {
            PromptInput::Text(text) => text.len(),
            // An estimate: most tokens are shorter.
            PromptInput::Ids(ids) => ids.len().saturating_mul(8),
        }
    }

    fn text(&self, model: &Model) -> Result<String, Error> {
        match self {
            PromptInput::Text(text) => Ok(text.clone()),
            PromptInput::Ids(ids) => model.tokenizer()?.decode(ids, true),
        }
    }
}

/// Tokens of a prompt without a template: the client writes control tokens by name.
///
/// # Errors
/// Errors of the tokenizer.
pub fn raw(model: &Model, text: &str) -> Result<Vec<u32>, Error> {
    model.encode_with(text, EncodeOptions { add_special: true, parse_special: true })
}

/// Continues texts.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.only(&[sampling::FIELDS, &sampling::number_names(), FIELDS])?;
    let model = fields.some_text("model")?.to_owned();
    let RequestSampling { mut choices, streams, with_usage } =
        RequestSampling::read(fields, &app.limits, &["max_completion_tokens", "max_tokens"], Some(USUAL_TOKENS))?;
    let n_each = choices.seeds.len();
    if fields.whole("best_of", 1, app.limits.choices as u64)?.is_some_and(|n| n != n_each as u64) {
        return Err(ApiError::unsupported("best_of", "best_of must equal n: all generated answers are returned"));
    }
    let logprobs = fields.whole("logprobs", 0, 5)?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        return Err(ApiError::unsupported("logprobs", "logprobs with echo are not supported"));
    }
    choices.options.logprobs = logprobs.map(|n| n as u32);
    let prompts = prompts_of(fields)?;
    if prompts.len() * n_each > app.limits.choices {
        let expected = format!("at most {} answers to all prompts", app.limits.choices);
        return Err(fields.wrong("prompt", &expected));
    }
    let n_prompts = prompts.len();
    let is_slow = is_long(prompts.iter().map(PromptInput::len).sum());
    let n_echoed = prompts.iter().map(PromptInput::len).sum::<usize>().saturating_mul(n_each);
    if echo && n_echoed > app.limits.echo_bytes {
        let expected = format!("false for prompts of more than {} bytes in all answers", app.limits.echo_bytes);
        return Err(fields.wrong("echo", &expected));
    }
    let echoed = echo.then(|| prompts.clone());
    let lease = app.models.get(&model).await?;
    let decoder = lease.decoder()?;
    let choices: Arc<AnswerOptions> = Arc::new(choices);
    let asks = move |decoder: &super::models::Decoder| {
        let ask = |prompt: PromptInput| {
            Ok(PreparedPrompt { ids: prompt.ids(decoder.model())?, choices: choices.clone(), reader: None })
        };
        prompts.into_iter().map(ask).collect::<Result<Vec<_>, ApiError>>()
    };
    let answers = app.answer(lease, &asked.since, is_slow, asks).await?;
    // The text before each answer.
    let begins = match echoed {
        Some(prompts) => prompts.iter().map(|prompt| prompt.text(decoder.model())).collect::<Result<Vec<_>, _>>()?,
        None => vec![String::new(); n_prompts],
    };
    let begins: Vec<String> = begins.into_iter().flat_map(|begin| vec![begin; n_each]).collect();
    let formatter =
        CompletionFormatter { head: AnswerMetadata::new("cmpl", &model), has_logprobs: logprobs.is_some(), begins };
    match streams {
        true => {
            streamed(Style::Data, app.limits.keep_alive, move |parts| formatter.stream(answers, parts, with_usage))
                .await
        }
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    }
}

/// A text, a list of token ids, or a list of those.
fn prompts_of(fields: Fields<'_>) -> Result<Vec<PromptInput>, ApiError> {
    let id = |id: &Json| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let one = |prompt: &Json| match prompt {
        Json::String(text) => Some(PromptInput::Text(text.clone())),
        Json::Array(ids) if !ids.is_empty() => Some(PromptInput::Ids(ids.iter().map(id).collect::<Option<Vec<_>>>()?)),
        _ => None,
    };
    let given = fields.get("prompt");
    let all = given.and_then(|given| {
        one(given).map(|prompt| vec![prompt]).or_else(|| {
            let list = given.as_array().filter(|list| !list.is_empty())?;
            list.iter().map(one).collect()
        })
    });
    all.ok_or_else(|| fields.wrong("prompt", "a text, a list of token ids, or a list of those"))
}

/// Formats answers.
struct CompletionFormatter {
    head: AnswerMetadata,
    has_logprobs: bool,
    begins: Vec<String>,
}

/// Plain text has no tool calls.
fn finish_of(end: &End) -> &'static str {
    if end.is_cut() { "length" } else { "stop" }
}

impl CompletionFormatter {
    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let mut choices = Vec::new();
        for (index, (delta, end)) in answers.collect(most).await?.into_iter().enumerate() {
            let text = self.begins.get_mut(index).map(std::mem::take).unwrap_or_default() + &delta.text;
            let logprobs =
                if self.has_logprobs { TextOffsets::default().logprobs_of(&delta.tokens) } else { Json::Null };
            choices.push(json!({"index": index, "text": text, "finish_reason": finish_of(&end), "logprobs": logprobs}));
        }
        let mut body = self.head.object("text_completion");
        body.insert("choices".into(), choices.into());
        body.insert("usage".into(), usage_json(answers.usage()));
        Ok(Body(Json::Object(body)).into_response())
    }

    async fn stream(
        mut self,
        mut answers: Answers,
        parts: PartSender,
        with_usage: bool,
    ) -> Result<PartSender, Disconnected> {
        let mut offsets: Vec<TextOffsets> = self.begins.iter().map(|_| TextOffsets::default()).collect();
        while let Some(event) = answers.next().await {
            let (index, text, tokens, finish) = match event {
                Ok(AnswerEvent::Delta(index, delta)) => (index, delta.text, delta.tokens, None),
                Ok(AnswerEvent::End(index, end)) => (index, String::new(), Vec::new(), Some(finish_of(&end))),
                Err(error) => {
                    parts.fail(error).await?;
                    return Err(Disconnected);
                }
            };
            let text = self.begins.get_mut(index).map(std::mem::take).unwrap_or_default() + &text;
            let logprobs = match (self.has_logprobs && !tokens.is_empty(), offsets.get_mut(index)) {
                (true, Some(offsets)) => offsets.logprobs_of(&tokens),
                _ => Json::Null,
            };
            let choice = json!({"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs});
            parts.send(Json::Object(self.chunk(json!([choice]), with_usage.then_some(Json::Null)))).await?;
        }
        if with_usage {
            let usage = usage_json(answers.usage());
            parts.send(Json::Object(self.chunk(json!([]), Some(usage)))).await?;
        }
        Ok(parts)
    }

    fn chunk(&self, choices: Json, usage: Option<Json>) -> Map<String, Json> {
        let mut body = self.head.object("text_completion");
        body.insert("choices".into(), choices);
        body.extend(usage.map(|usage| ("usage".to_owned(), usage)));
        body
    }
}

/// Offsets of tokens in a text, in UTF-16 units as in OpenAI's interface. A token may be a partial character.
#[derive(Default)]
struct TextOffsets {
    n_units: usize,
    /// The bytes of an incomplete character.
    begun: Vec<u8>,
}

impl TextOffsets {
    fn logprobs_of(&mut self, tokens: &[ScoredToken]) -> Json {
        let (mut texts, mut logprobs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for token in tokens {
            texts.push(ScoredToken::text(&token.bytes));
            logprobs.push(token.logprob);
            let top: Map<String, Json> =
                token.top.iter().map(|(bytes, logprob)| (ScoredToken::text(bytes), (*logprob).into())).collect();
            tops.push(top);
            offsets.push(self.n_units);
            self.add(&token.bytes);
        }
        json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }

    fn add(&mut self, bytes: &[u8]) {
        self.begun.extend_from_slice(bytes);
        let mut rest = self.begun.as_slice();
        loop {
            let (text, wrong) = match std::str::from_utf8(rest) {
                Ok(text) => (text, None),
                Err(error) => {
                    let (valid, _) = rest.split_at(error.valid_up_to());
                    (std::str::from_utf8(valid).unwrap_or_default(), Some(error.error_len()))
                }
            };
            self.n_units += text.encode_utf16().count();
            rest = rest.get(text.len()..).unwrap_or_default();
            match wrong {
                // Invalid UTF-8 is shown as one replacement character.
                Some(Some(n)) => {
                    self.n_units += 1;
                    rest = rest.get(n..).unwrap_or_default();
                }
                _ => break,
            }
        }
        self.begun = rest.to_vec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_offsets_count_utf_16_units_of_split_characters() {
        let tokens = [&b"a"[..], &[0xf0, 0x9f], &[0x98, 0x80], b"\xffb", "é".as_bytes(), b"c"];
        let tokens: Vec<ScoredToken> =
            tokens.iter().map(|bytes| ScoredToken { bytes: bytes.to_vec(), logprob: 0.0, top: Vec::new() }).collect();
        let mut offsets = TextOffsets::default();
        let (begin, end) = tokens.split_at(2);
        assert_eq!(offsets.logprobs_of(begin)["text_offset"], json!([0, 1]));
        assert_eq!(offsets.logprobs_of(end)["text_offset"], json!([1, 3, 5, 6]));
    }
}
