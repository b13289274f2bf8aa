//! `/v1/completions`: text completion without a chat template.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::Error;
use tilewright::generate::{Model, PromptLogprobs};
use tilewright::tokenizer::{EncodeOptions, Tokenizer};

use super::answers::{AnswerEvent, Answers, Delta, End, PreparedPrompt, PromptReport, ScoredToken, usage_json};
use super::app::{AnswerMetadata, ApiRequest, App, is_long};
use super::constraints::{self, constraint};
use super::errors::ApiError;
use super::extras::Extras;
use super::fields::Fields;
use super::models::Task;
use super::sampling::{self, RequestSampling, max_tokens_rows};
use super::schema::{Endpoint, Field, Kind, Neutral, field, ids_of, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};

/// `/v1/completions`.
pub const ENDPOINT: Endpoint = Endpoint::post(
    "/v1/completions",
    "Continues texts, like OpenAI's Completions",
    &[
        FIELDS,
        &MAX_TOKENS,
        sampling::FIELDS,
        sampling::NUMBERS,
        sampling::REPORTS,
        sampling::NO_PROBS,
        constraints::FIELDS,
    ],
);

const FIELDS: &[Field] = &[
    required("prompt", Kind::Other(&["string", "array"], PROMPTS), "The text, or its tokens."),
    field("echo", Kind::Flag, "false", "Begin the answer with the prompt, with its log probabilities too."),
    field(
        "logprobs",
        Kind::Whole(0, sampling::MAX_LOGPROBS),
        "",
        "Add the log probability of each token, and of this many most likely tokens.",
    ),
    field("add_special_tokens", Kind::Flag, "true", "Put the model's special tokens, such as BOS, around a text."),
    field("best_of", Kind::Other(&["integer"], "the value of n"), "n", "All generated answers are returned."),
    neutral("store", &[Neutral::False], "Completions are not stored."),
    neutral("suffix", &[Neutral::Empty], "Nothing can follow the answer."),
];

const PROMPTS: &str = "a text, a list of token ids, or a list of those";

/// The token limit, with the default of OpenAI's interface.
const MAX_TOKENS: [Field; 3] = max_tokens_rows(["max_completion_tokens", "max_tokens", "n_predict"], "16");

/// A text, or token ids.
#[derive(Clone)]
enum PromptInput {
    Text(String),
    Ids(Vec<u32>),
}

impl PromptInput {
    fn ids(&self, model: &Model, add_special: bool) -> Result<Vec<u32>, Error> {
        match self {
            PromptInput::Text(text) => model.encode_with(text, EncodeOptions { add_special, parse_special: true }),
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
    fields.check(ENDPOINT.fields)?;
    let model = app.models.name_for(fields.text("model")?, Task::Generate).await?;
    let RequestSampling { mut choices, streams, extras, run } =
        RequestSampling::read(fields, &app.limits, &MAX_TOKENS, sampling::NUMBERS)?;
    let n_each = choices.seeds.len();
    if fields.checked_whole("best_of").is_some_and(|n| n != n_each as i64) {
        return Err(ApiError::unsupported("best_of", "best_of must equal n: all generated answers are returned"));
    }
    let logprobs = fields.checked_whole("logprobs").map(|n| n as u32);
    let echo = fields.checked_flag("echo").unwrap_or(false);
    let options = &mut choices.options;
    options.logprobs = logprobs;
    // Both report the prompt; the one that wants more tokens decides.
    options.prompt_logprobs = options.prompt_logprobs.max(logprobs.filter(|_| echo));
    options.constraint = constraint(fields)?;
    let add_special = fields.checked_flag("add_special_tokens").unwrap_or(true);
    let prompts = prompts_of(fields)?;
    if prompts.len() * n_each > app.limits.choices {
        let expected = format!("at most {} answers to all prompts", app.limits.choices);
        return Err(fields.wrong("prompt", &expected));
    }
    let is_slow = options.constraint.is_some() || is_long(prompts.iter().map(PromptInput::len).sum());
    let n_echoed = prompts.iter().map(PromptInput::len).sum::<usize>().saturating_mul(n_each);
    if echo && n_echoed > app.limits.echo_bytes {
        let expected = format!("false for prompts of more than {} bytes in all answers", app.limits.echo_bytes);
        return Err(fields.wrong("echo", &expected));
    }
    let echoed = if echo { prompts.clone() } else { Vec::new() };
    let lease = app.models.get(&model).await?;
    let decoder = lease.decoder()?;
    let choices = Arc::new(choices);
    let asks = move |decoder: &super::models::Decoder| {
        let ask = |prompt: PromptInput| {
            let ids = prompt.ids(decoder.model(), add_special)?;
            Ok(PreparedPrompt { ids, images: Vec::new(), choices: choices.clone(), reader: None })
        };
        prompts.into_iter().map(ask).collect::<Result<Vec<_>, ApiError>>()
    };
    let answers = app.answer(lease, &asked.since.with(run), is_slow, asks).await?;
    // The text before each answer.
    let begins = echoed.iter().map(|prompt| prompt.text(decoder.model())).collect::<Result<Vec<_>, _>>()?;
    let begins: Vec<String> = begins.into_iter().flat_map(|begin| vec![begin; n_each]).collect();
    let head = AnswerMetadata::new("cmpl-", &model);
    let formatter = CompletionFormatter { head, extras, n_top: logprobs, echo, begins };
    match streams {
        true => streamed(Style::Data, app.limits.keep_alive, move |parts| formatter.stream(answers, parts)).await,
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    }
}

/// A text, a list of token ids, or a list of those.
fn prompts_of(fields: Fields<'_>) -> Result<Vec<PromptInput>, ApiError> {
    let one = |prompt: &Json| match prompt {
        Json::String(text) => Some(PromptInput::Text(text.clone())),
        Json::Array(ids) if !ids.is_empty() => ids_of(ids).map(PromptInput::Ids),
        _ => None,
    };
    let given = fields.get("prompt");
    let all = given.and_then(|given| {
        one(given).map(|prompt| vec![prompt]).or_else(|| {
            let list = given.as_array().filter(|list| !list.is_empty())?;
            list.iter().map(one).collect()
        })
    });
    all.ok_or_else(|| fields.wrong("prompt", PROMPTS))
}

/// Formats answers.
struct CompletionFormatter {
    head: AnswerMetadata,
    extras: Extras,
    /// Number of most likely tokens to report with each token.
    n_top: Option<u32>,
    /// Whether answers begin with their prompts, and the texts of these.
    echo: bool,
    begins: Vec<String>,
}

/// Plain text has no tool calls.
fn finish_of(end: &End) -> &'static str {
    if end.is_cut() { "length" } else { "stop" }
}

impl CompletionFormatter {
    /// The text and the tokens before an answer, once.
    fn begin(&mut self, index: usize, answers: &Answers, list: &mut TokenList) -> Result<String, ApiError> {
        let text = self.begins.get_mut(index).map(std::mem::take).unwrap_or_default();
        if let (true, Some(n_top), Some(prompt)) = (self.echo, self.n_top, answers.prompt(index)) {
            list.add_prompt(prompt, n_top as usize, answers.tokenizer()?)?;
        }
        list.offsets.n_units = text.encode_utf16().count();
        Ok(text)
    }

    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let mut choices = Vec::new();
        for (index, (delta, end)) in answers.collect(most).await?.into_iter().enumerate() {
            let mut list = TokenList::default();
            let text = self.begin(index, &answers, &mut list)? + &delta.text;
            list.add(&delta.tokens);
            let logprobs = if self.n_top.is_some() { list.json() } else { Json::Null };
            let mut choice = json!({
                "index": index, "text": text, "finish_reason": finish_of(&end), "logprobs": logprobs,
            });
            if self.extras.token_ids {
                choice["token_ids"] = delta.ids.into();
            }
            if let (Some(choice), Some(prompt)) = (choice.as_object_mut(), answers.prompt(index)) {
                choice.extend(self.extras.of_prompt(prompt, answers.tokenizer()?)?);
            }
            choices.push(choice);
        }
        let mut body = self.head.object("text_completion");
        body.insert("choices".into(), choices.into());
        body.insert("usage".into(), usage_json(answers.usage()));
        self.extras.add_timings(&mut body, &answers);
        Ok(Body(Json::Object(body)).into_response())
    }

    async fn stream(mut self, mut answers: Answers, parts: PartSender) -> Result<PartSender, Disconnected> {
        // Per answer: the offsets of the tokens to come, once begun.
        let mut begun: HashMap<usize, TextOffsets> = HashMap::new();
        while let Some(event) = answers.next().await {
            let part = event.and_then(|event| {
                let (index, delta, finish) = match event {
                    AnswerEvent::Delta(index, delta) => (index, delta, None),
                    AnswerEvent::End(index, end) => (index, Delta::default(), Some(finish_of(&end))),
                };
                self.part(index, delta, finish, &answers, &mut begun)
            });
            parts.send(parts.checked(part).await?).await?;
        }
        if self.extras.usage {
            let mut body = self.chunk(json!([]), &answers);
            body.insert("usage".into(), usage_json(answers.usage()));
            parts.send(Json::Object(body)).await?;
        }
        Ok(parts)
    }

    fn part(
        &mut self,
        index: usize,
        delta: Delta,
        finish: Option<&str>,
        answers: &Answers,
        begun: &mut HashMap<usize, TextOffsets>,
    ) -> Result<Json, ApiError> {
        let (mut list, mut text) = (TokenList::default(), String::new());
        let is_first = match begun.remove(&index) {
            Some(offsets) => {
                list.offsets = offsets;
                false
            }
            None => {
                text = self.begin(index, answers, &mut list)?;
                true
            }
        };
        list.add(&delta.tokens);
        let has_tokens = self.n_top.is_some() && !list.texts.is_empty();
        let logprobs = if has_tokens { list.json() } else { Json::Null };
        begun.insert(index, list.offsets);
        let mut choice =
            json!({"index": index, "text": text + &delta.text, "finish_reason": finish, "logprobs": logprobs});
        if self.extras.token_ids {
            choice["token_ids"] = delta.ids.into();
            if let Some(prompt) = answers.prompt(index).filter(|_| is_first) {
                choice["prompt_token_ids"] = json!(prompt.ids);
            }
        }
        Ok(Json::Object(self.chunk(json!([choice]), answers)))
    }

    fn chunk(&self, choices: Json, answers: &Answers) -> Map<String, Json> {
        let mut body = self.head.object("text_completion");
        body.insert("choices".into(), choices);
        self.extras.add(&mut body, answers);
        body
    }
}

/// Tokens with their log probabilities, in the shape of OpenAI's older interface.
#[derive(Default)]
struct TokenList {
    texts: Vec<String>,
    /// `None` for the first token of a prompt.
    logprobs: Vec<Option<f32>>,
    tops: Vec<Option<Map<String, Json>>>,
    places: Vec<usize>,
    offsets: TextOffsets,
}

impl TokenList {
    /// The most likely tokens, and the token itself.
    fn push(&mut self, text: String, logprob: f32, top: impl Iterator<Item = (String, f32)>) {
        let own = [(text.clone(), logprob)];
        self.tops.push(Some(top.chain(own).map(|(text, logprob)| (text, logprob.into())).collect()));
        self.texts.push(text);
        self.logprobs.push(Some(logprob));
    }

    /// Adds generated tokens.
    fn add(&mut self, tokens: &[ScoredToken]) {
        for token in tokens {
            let top = token.top.iter().map(|(_, bytes, logprob)| (ScoredToken::text(bytes), *logprob));
            self.push(ScoredToken::text(&token.bytes), token.logprob, top);
            self.places.push(self.offsets.n_units);
            self.offsets.add(&token.bytes);
        }
    }

    /// Adds a prompt's tokens.
    fn add_prompt(&mut self, prompt: &PromptReport, n_top: usize, tokenizer: &Tokenizer) -> Result<(), Error> {
        let text = |id: u32| Ok::<_, Error>(ScoredToken::text(tokenizer.token_bytes(id)?));
        let mut decoder = tokenizer.decoder();
        for (at, &id) in prompt.ids.iter().enumerate() {
            match at.checked_sub(1).and_then(|at| prompt.logprobs.get(at)) {
                Some(PromptLogprobs { logprobs, .. }) => {
                    let top = logprobs.top.iter().take(n_top).map(|&(id, logprob)| Ok((text(id)?, logprob)));
                    let top = top.collect::<Result<Vec<_>, Error>>()?;
                    self.push(text(id)?, logprobs.logprob, top.into_iter());
                }
                None => {
                    self.texts.push(text(id)?);
                    self.logprobs.push(None);
                    self.tops.push(None);
                }
            }
            self.places.push(self.offsets.n_units);
            self.offsets.n_units += decoder.push(id)?.encode_utf16().count();
        }
        Ok(())
    }

    fn json(&mut self) -> Json {
        json!({
            "tokens": std::mem::take(&mut self.texts),
            "token_logprobs": std::mem::take(&mut self.logprobs),
            "top_logprobs": std::mem::take(&mut self.tops),
            "text_offset": std::mem::take(&mut self.places),
        })
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
        let tokens: Vec<ScoredToken> = tokens
            .iter()
            .map(|bytes| ScoredToken { id: 0, bytes: bytes.to_vec(), logprob: 0.0, top: Vec::new() })
            .collect();
        let mut list = TokenList::default();
        list.add(&tokens);
        assert_eq!(list.json()["text_offset"], json!([0, 1, 1, 3, 5, 6]));
    }
}
