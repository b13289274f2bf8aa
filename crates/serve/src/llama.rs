//! llama.cpp's API: `/completion`, `/infill`, `/embedding`, `/tokenize`, `/detokenize`, `/apply-template`, `/props` and
//! `/slots`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use axum::Json as Body;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value as Json, json};
use tilewright::ChatRequest;
use tilewright::engine::Usage;
use tilewright::generate::{GenerateOptions, Model, StopReason};
use tilewright::tokenizer::{EncodeOptions, Tokenizer};

use super::answers::{AnswerEvent, AnswerOptions, Answers, Delta, End, PreparedPrompt, ScoredToken};
use super::app::{ApiRequest, App, is_long};
use super::chat::{ADD_GENERATION_PROMPT, TEMPLATE_VARIABLES, TOOLS};
use super::completions::raw;
use super::constraints::{self, constraint};
use super::conversation::{message_of, tools_of};
use super::embeddings::{EmbedInputs, EmbedJob, INPUT};
use super::errors::ApiError;
use super::fields::Fields;
use super::limits::Limits;
use super::models::{Decoder, Lease, Task};
use super::routes::Queried;
use super::sampling::{self, MODEL, RequestSampling, drawn_seed, max_tokens_rows, number_rows};
use super::schema::{self, Endpoint, Field, Kind, Neutral, field, id_of, neutral, required};
use super::sse::{Disconnected, PartSender, Style, streamed};
use super::{tei, vllm};

/// `/completion`.
pub const COMPLETION: Endpoint = Endpoint::post(
    "/completion",
    "Continues a text, like llama.cpp's",
    &[PROMPT, OWN, &MAX_TOKENS, NUMBERS, sampling::FIELDS, constraints::FIELDS],
);

/// `/infill`.
pub const INFILL: Endpoint = Endpoint::post(
    "/infill",
    "Fills a gap in a text, like llama.cpp's",
    &[GAP, OWN, &MAX_TOKENS, NUMBERS, sampling::FIELDS, constraints::FIELDS],
);

/// `/embedding`.
pub const EMBEDDING: Endpoint = Endpoint::post(
    "/embedding",
    "Computes embeddings, like llama.cpp's",
    &[&[
        MODEL,
        required("content", Kind::Other(&["string", "array"], INPUT), "Texts, or token ids of the model."),
        neutral("embd_normalize", &[Neutral::Number(2.0)], "Vectors have length 1."),
    ]],
);

/// `/tokenize`, with the fields of three APIs.
pub const TOKENIZE: Endpoint = Endpoint::post(
    "/tokenize",
    "Tokens of `content`, like llama.cpp, of `prompt`, like vLLM, or of `inputs`, like TEI",
    &[&[MODEL], CONTENT, vllm::PROMPT, tei::INPUTS],
);

/// `/detokenize`.
pub const DETOKENIZE: Endpoint = Endpoint::post(
    "/detokenize",
    "The text of tokens, like llama.cpp's and vLLM's",
    &[&[MODEL, required("tokens", Kind::Other(&["array"], IDS), "Token ids.")]],
);

/// `/apply-template`.
pub const APPLY_TEMPLATE: Endpoint = Endpoint::post(
    "/apply-template",
    "The prompt of a conversation, like llama.cpp's",
    &[&[
        MODEL,
        required("messages", Kind::Other(&["array"], "a list of messages"), "As in /v1/chat/completions."),
        TOOLS,
        TEMPLATE_VARIABLES,
        ADD_GENERATION_PROMPT,
    ]],
);

/// The prompt of `/completion`.
const PROMPT: &[Field] = &[required(
    "prompt",
    Kind::Other(&["string", "array", "object"], PROMPT_EXPECTED),
    "A text, or a list of token ids and texts. A list of texts, or of such lists, has a prompt in each.",
)];

/// The prompt of `/infill`.
const GAP: &[Field] = &[
    required("input_prefix", Kind::Text, "The code before the gap."),
    required("input_suffix", Kind::Text, "The code after the gap."),
    field("input_extra", Kind::Other(&["array"], EXTRA), "[]", "Other files, each with a `filename` and a `text`."),
    field("prompt", Kind::Text, "\"\"", "The beginning of what fills the gap."),
];

/// Fields that other endpoints lack, or understand otherwise.
const OWN: &[Field] = &[
    field(
        "n_probs",
        Kind::Whole(0, GenerateOptions::MAX_LOGPROBS as i64),
        "0",
        "Add `completion_probabilities`: each token's log probability and those of this many most likely tokens.",
    ),
    field("return_tokens", Kind::Flag, "false", "Add the ids of the answer's tokens; streams always have them."),
    field("timings_per_token", Kind::Flag, "false", "Add `timings` to each part of a stream; the last one has them."),
    field(
        "response_fields",
        Kind::Other(&["array"], "a list of names"),
        "all",
        "Fields to send; `generation_settings/seed` is a field of an object.",
    ),
    neutral("n_discard", &[Neutral::AnyNumber], "A prompt is never shifted."),
    neutral("n_cache_reuse", &[Neutral::AnyNumber], "Only prefixes are reused."),
    neutral("n_indent", &[Neutral::Number(0.0)], "Lines are not indented."),
    neutral("t_max_predict_ms", &[Neutral::Number(0.0), Neutral::Number(-1.0)], "The server has a time limit."),
    neutral("t_max_prompt_ms", &[Neutral::Number(0.0), Neutral::Number(-1.0)], "The server has a time limit."),
    neutral("post_sampling_probs", &[Neutral::False], "Log probabilities are those before sampling."),
    neutral("return_progress", &[Neutral::False], "Progress is not reported."),
    field("dry_sequence_breakers", Kind::Other(&["array"], "a list of texts"), "", "Ignored: no DRY penalty."),
    neutral(
        "samplers",
        &[Neutral::Empty, Neutral::InOrder { texts: SAMPLERS, idle: IDLE_SAMPLERS }],
        "Samplers have one order.",
    ),
    neutral("penalize_nl", &[Neutral::False], "Line ends are penalised like other tokens."),
    neutral("image_data", &[Neutral::Empty], "Pictures are parts of messages in /v1/chat/completions."),
    neutral("lora", &[Neutral::Empty], "Name an adapter in `model`."),
];

/// The order of samplers.
const SAMPLERS: &[&str] = &["penalties", "top_k", "top_p", "min_p", "temperature"];

/// llama.cpp's further samplers, which do nothing at the only values that their fields may have.
const IDLE_SAMPLERS: &[&str] = &["dry", "top_n_sigma", "typ_p", "typical_p", "xtc"];

/// The token limit.
const MAX_TOKENS: [Field; 2] = max_tokens_rows(["n_predict", "max_tokens"], "-1");

/// The numbers, with llama.cpp's bounds.
const NUMBERS: &[Field] =
    &number_rows(&[("top_k", [-1.0, u32::MAX as f64]), ("repeat_last_n", [-1.0, u32::MAX as f64])], "0.8");

/// Fields of `/tokenize` with `content`.
const CONTENT: &[Field] = &[
    field("content", Kind::Text, "", "The text, as llama.cpp names it."),
    field("add_special", Kind::Flag, "false", "Add special tokens, such as BOS."),
    field("parse_special", Kind::Flag, "true", "Names of special tokens become those tokens."),
    field("with_pieces", Kind::Flag, "false", "Add each token's text, or its bytes if they are no text."),
];

const IDS: &str = "a list of token ids";
const PROMPT_EXPECTED: &str = "a text, a list of token ids and texts, or a list of prompts";
const EXTRA: &str = "a list of objects with a filename and a text";

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq)]
enum PromptPart {
    Text(String),
    Id(u32),
}

type Prompt = Vec<PromptPart>;

fn part_of(value: &Json) -> Option<PromptPart> {
    match value {
        Json::String(text) => Some(PromptPart::Text(text.clone())),
        id => id_of(id).map(PromptPart::Id),
    }
}

/// One prompt: a text, an object with one, or a list of ids and texts.
fn prompt_of(value: &Json) -> Option<Prompt> {
    match value {
        Json::String(text) => Some(vec![PromptPart::Text(text.clone())]),
        Json::Array(parts) if !parts.is_empty() => parts.iter().map(part_of).collect(),
        Json::Object(object) if object.len() == 1 => {
            prompt_of(object.get("prompt_string").filter(|one| one.is_string())?)
        }
        _ => None,
    }
}

/// The prompts of a request: as in llama.cpp, a list that has a number is one.
fn prompts_of(fields: Fields<'_>, most: usize) -> Result<Vec<Prompt>, ApiError> {
    let given = fields.get("prompt");
    let list = given.and_then(Json::as_array).filter(|list| !list.iter().any(Json::is_number));
    let prompts: Option<Vec<Prompt>> = match list {
        Some(list) => list.iter().map(prompt_of).collect(),
        None => given.and_then(prompt_of).map(|prompt| vec![prompt]),
    };
    let prompts = prompts.filter(|prompts| (1..=most).contains(&prompts.len()));
    prompts.ok_or_else(|| fields.wrong("prompt", &format!("{PROMPT_EXPECTED}, at most {most}")))
}

fn n_bytes(prompt: &Prompt) -> usize {
    let size = |part: &PromptPart| match part {
        PromptPart::Text(text) => text.len(),
        // An estimate: most tokens are shorter.
        PromptPart::Id(_) => 8,
    };
    prompt.iter().map(size).sum()
}

/// A prompt's tokens. Special tokens come before a text that begins it.
fn ids_of(prompt: &Prompt, model: &Model) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::new();
    for (at, part) in prompt.iter().enumerate() {
        match part {
            PromptPart::Id(id) => ids.push(*id),
            PromptPart::Text(text) if at == 0 => ids.extend(raw(model, text)?),
            PromptPart::Text(text) => ids.extend(special(model.tokenizer()?, text)?),
        }
    }
    Ok(ids)
}

/// Tokens of a text within a prompt, which may name control tokens.
fn special(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, ApiError> {
    Ok(tokenizer.encode_with(text, EncodeOptions { add_special: false, parse_special: true })?)
}

/// What `/completion` and `/infill` read besides the prompt.
struct CompletionRequest {
    sampling: RequestSampling,
    n_probs: u32,
    returns_tokens: bool,
    response_fields: Option<Vec<String>>,
    grammar: Json,
    json_schema: Json,
}

impl CompletionRequest {
    fn read(fields: Fields<'_>, limits: &Limits) -> Result<CompletionRequest, ApiError> {
        let mut sampling = RequestSampling::read(fields, limits, &MAX_TOKENS, NUMBERS)?;
        let n_probs = fields.checked_whole("n_probs").map_or(0, |n| n as u32);
        let options = &mut sampling.choices.options;
        (options.constraint, options.logprobs) = (constraint(fields)?, (n_probs > 0).then_some(n_probs));
        options.check()?;
        // llama.cpp shows a seed that is to be drawn as this number, and clients send it back.
        if fields.checked_whole("seed") == Some(u32::MAX.into()) {
            sampling.choices.seeds = vec![drawn_seed()];
        }
        let returns_tokens = sampling.streams || fields.checked_flag("return_tokens") == Some(true);
        // The last part has the prompt, as the text of its tokens.
        sampling.run.reports_ids = true;
        let names = fields.list("response_fields", "a list of names")?.filter(|names| !names.is_empty());
        let name = |name: &Json| name.as_str().map(str::to_owned);
        let response_fields = match names.map(|names| names.iter().map(name).collect::<Option<Vec<String>>>()) {
            Some(None) => return Err(fields.wrong("response_fields", "a list of names")),
            names => names.flatten(),
        };
        let or_empty = |field: &str| fields.get(field).cloned().unwrap_or_else(|| "".into());
        let (grammar, json_schema) = (or_empty("grammar"), or_empty("json_schema"));
        Ok(CompletionRequest { sampling, n_probs, returns_tokens, response_fields, grammar, json_schema })
    }

    /// The settings in llama.cpp's words.
    fn settings(&self) -> Json {
        let RequestSampling { choices: AnswerOptions { options, seeds }, streams, extras, .. } = &self.sampling;
        let mut settings = settings_of(options, seeds.first().copied().unwrap_or_default());
        let own = json!({
            "stream": streams,
            "n_probs": self.n_probs,
            "grammar": self.grammar,
            "json_schema": self.json_schema,
            "timings_per_token": extras.timings,
        });
        if let (Some(settings), Json::Object(own)) = (settings.as_object_mut(), own) {
            settings.extend(own);
        }
        settings
    }
}

/// Sampling options in llama.cpp's words. Samplers that this server lacks have the values that disable them.
fn settings_of(options: &GenerateOptions, seed: u64) -> Json {
    let n = if options.max_tokens < i32::MAX as usize { json!(options.max_tokens) } else { json!(-1) };
    json!({
        "n_predict": n,
        "max_tokens": n,
        "seed": seed,
        "temperature": options.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": 1.0,
        "repeat_last_n": options.repeat_last_n,
        "repeat_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "stop": options.stop,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": options.ignore_eos,
        "min_keep": 0,
        "samplers": SAMPLERS,
        "post_sampling_probs": false,
        "lora": [],
    })
}

/// `/completion`.
pub async fn create(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(COMPLETION.fields)?;
    let request = CompletionRequest::read(fields, &app.limits)?;
    let prompts = prompts_of(fields, app.limits.choices)?;
    let lease = app.models.get_for(fields.text("model")?, Task::Generate).await?;
    let is_slow = is_long(prompts.iter().map(n_bytes).sum());
    let ids = move |decoder: &Decoder| prompts.iter().map(|prompt| ids_of(prompt, decoder.model())).collect();
    complete(&app, asked, lease, request, is_slow, ids).await
}

/// `/infill`.
pub async fn infill(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(INFILL.fields)?;
    let mut request = CompletionRequest::read(fields, &app.limits)?;
    let gap = Gap::read(fields)?;
    let lease = app.models.get_for(fields.text("model")?, Task::Generate).await?;
    let Some(tokens) = FimTokens::of(lease.decoder()?.model().tokenizer()?) else {
        let message = format!(
            "{} has no tokens to fill a gap (FIM tokens); send the code before it to /completion",
            lease.entry.name()
        );
        return Err(ApiError::unsupported("model", message));
    };
    request.sampling.choices.options.stop_ids.extend(tokens.ends());
    let is_slow = is_long(gap.n_bytes());
    let ids = move |decoder: &Decoder| Ok(vec![gap.ids(&tokens, decoder.model().tokenizer()?)?]);
    complete(&app, asked, lease, request, is_slow, ids).await
}

/// Completes prompts.
async fn complete(
    app: &App,
    asked: ApiRequest,
    lease: Lease,
    request: CompletionRequest,
    is_slow: bool,
    ids: impl FnOnce(&Decoder) -> Result<Vec<Vec<u32>>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let formatter = CompletionFormatter {
        model: lease.entry.name().to_owned(),
        n_context: lease.decoder()?.model().context_length(),
        have_new_line: HashSet::new(),
        request,
    };
    let sampling = &formatter.request.sampling;
    let choices = Arc::new(sampling.choices.clone());
    let is_slow = is_slow || choices.options.constraint.is_some();
    let asks = move |decoder: &Decoder| {
        let ask = |ids| PreparedPrompt { ids, images: Vec::new(), choices: choices.clone(), reader: None };
        Ok(ids(decoder)?.into_iter().map(ask).collect())
    };
    let answers = app.answer(lease, &asked.since.with(sampling.run), is_slow, asks).await?;
    match formatter.request.sampling.streams {
        true => {
            let work = move |parts| formatter.stream(answers, parts);
            streamed(Style::Completion, app.limits.keep_alive, work).await
        }
        false => formatter.whole(answers, app.limits.answer_bytes).await,
    }
}

/// Formats answers.
struct CompletionFormatter {
    model: String,
    n_context: u32,
    /// Answers with a line break so far.
    have_new_line: HashSet<usize>,
    request: CompletionRequest,
}

impl CompletionFormatter {
    /// The fields of each part.
    fn part(&mut self, index: usize, delta: &Delta, usage: Usage) -> Json {
        if delta.text.contains('\n') {
            self.have_new_line.insert(index);
        }
        let ids = if self.request.returns_tokens { delta.ids.as_slice() } else { &[] };
        let mut body = json!({
            "index": index,
            "content": delta.text,
            "tokens": ids,
            "id_slot": index,
            "stop": false,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
        });
        if self.request.n_probs > 0 {
            body["completion_probabilities"] = delta.tokens.iter().map(probabilities_of).collect();
        }
        body
    }

    /// The last part.
    ///
    /// # Errors
    /// Those of the tokenizer.
    fn end(&mut self, index: usize, delta: &Delta, end: &End, answers: &Answers) -> Result<Json, ApiError> {
        let mut body = self.part(index, delta, end.usage);
        let stop = end.stop.filter(|_| end.reason == StopReason::StopText);
        let stop = stop.and_then(|at| self.request.sampling.choices.options.stop.get(at));
        let kind = match end.reason {
            StopReason::StopText => "word",
            StopReason::Eos | StopReason::Complete => "eos",
            _ => "limit",
        };
        let mut settings = self.request.settings();
        (settings["n_ctx"], settings["model"]) = (self.n_context.into(), self.model.as_str().into());
        let prompt = answers.prompt(index).map(|prompt| answers.tokenizer()?.decode(&prompt.ids, false)).transpose()?;
        let more = json!({
            "stop": true,
            "model": self.model,
            "generation_settings": settings,
            "prompt": prompt,
            "has_new_line": self.have_new_line.contains(&index),
            "truncated": end.reason == StopReason::ContextFull,
            "stop_type": kind,
            "stopping_word": stop.map_or("", String::as_str),
            "tokens_cached": end.usage.cached_tokens,
            "timings": answers.timings(),
        });
        if let (Some(body), Json::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        Ok(match &self.request.response_fields {
            Some(names) => selected(&body, names),
            None => body,
        })
    }

    async fn whole(mut self, mut answers: Answers, most: usize) -> Result<Response, ApiError> {
        let all = answers.collect(most).await?;
        let ended = all.iter().enumerate();
        let end = |(index, (delta, end)): (usize, &(Delta, End))| self.end(index, delta, end, &answers);
        let mut bodies = ended.map(end).collect::<Result<Vec<Json>, ApiError>>()?;
        let body = if bodies.len() == 1 { bodies.remove(0) } else { bodies.into() };
        Ok(Body(body).into_response())
    }

    async fn stream(mut self, mut answers: Answers, parts: PartSender) -> Result<PartSender, Disconnected> {
        while let Some(event) = answers.next().await {
            let part = event.and_then(|event| self.event(event, &answers));
            parts.send(parts.checked(part).await?).await?;
        }
        Ok(parts)
    }

    fn event(&mut self, event: AnswerEvent, answers: &Answers) -> Result<Json, ApiError> {
        match event {
            AnswerEvent::Delta(index, delta) => {
                let mut part = self.part(index, &delta, answers.usage_of(index));
                if self.request.sampling.extras.timings {
                    part["timings"] = answers.timings();
                }
                Ok(part)
            }
            AnswerEvent::End(index, end) => self.end(index, &Delta::default(), &end, answers),
        }
    }
}

/// The named fields of a body; that of a nested object moves to the top.
fn selected(body: &Json, names: &[String]) -> Json {
    let value = |name: &String| body.pointer(&format!("/{name}")).cloned();
    let last = |name: &String| name.rsplit('/').next().unwrap_or_default().to_owned();
    names.iter().filter_map(|name| Some((last(name), value(name)?))).collect::<Map<String, Json>>().into()
}

/// A token with its most likely alternatives.
fn probabilities_of(token: &ScoredToken) -> Json {
    let of = |id: u32, bytes: &[u8], logprob: f32| json!({"id": id, "token": ScoredToken::text(bytes), "bytes": bytes, "logprob": logprob});
    let mut body = of(token.id, &token.bytes, token.logprob);
    body["top_logprobs"] = token.top.iter().map(|(id, bytes, logprob)| of(*id, bytes, *logprob)).collect();
    body
}

/// Tokens that mark the parts of a text with a gap (fill in the middle, <https://arxiv.org/abs/2207.14255>).
struct FimTokens {
    prefix: u32,
    suffix: u32,
    middle: u32,
    /// Tokens before a repository's name and a file's name.
    repository: Option<(u32, u32)>,
    /// The token that fills rows in training.
    pad: Option<u32>,
}

impl FimTokens {
    /// Names by model family: Qwen, CodeGemma and Seed; StarCoder; Granite; CodeLlama; DeepSeek; GLM.
    const NAMES: [[&str; 3]; 7] = [
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
        ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
        ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
        ["▁<PRE>", "▁<SUF>", "▁<MID>"],
        ["<PRE>", "<SUF>", "<MID>"],
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    ];
    const REPOSITORY: [[&str; 2]; 3] =
        [["<|repo_name|>", "<|file_sep|>"], ["<repo_name>", "<file_sep>"], ["<reponame>", "<filename>"]];
    const PAD: [&str; 3] = ["<|fim_pad|>", "<fim_pad>", "<fim-pad>"];

    fn of(tokenizer: &Tokenizer) -> Option<FimTokens> {
        let id = |name: &str| tokenizer.special_id(name);
        let all = |names: &[&str; 3]| Some([id(names[0])?, id(names[1])?, id(names[2])?]);
        let [prefix, suffix, middle] = Self::NAMES.iter().find_map(all)?;
        let repository = Self::REPOSITORY.iter().find_map(|[name, file]| Some((id(name)?, id(file)?)));
        Some(FimTokens { prefix, suffix, middle, repository, pad: Self::PAD.iter().find_map(|name| id(name)) })
    }

    /// Tokens that end what fills the gap.
    fn ends(&self) -> impl Iterator<Item = u32> {
        self.repository.into_iter().flat_map(|(name, file)| [name, file]).chain(self.pad)
    }
}

/// A text with a gap.
struct Gap {
    prefix: String,
    suffix: String,
    /// Names and texts of other files.
    files: Vec<(String, String)>,
    begun: String,
}

impl Gap {
    fn read(fields: Fields<'_>) -> Result<Gap, ApiError> {
        let file = |file: &Json| {
            let text = |field: &str| file.get(field).and_then(Json::as_str).map(str::to_owned);
            // The name is optional, as in llama.cpp.
            Some((text("filename").unwrap_or_else(|| "tmp".into()), text("text")?))
        };
        let given = fields.list("input_extra", EXTRA)?.unwrap_or_default();
        let files: Option<Vec<_>> = given.iter().map(file).collect();
        Ok(Gap {
            prefix: fields.some_text("input_prefix")?.to_owned(),
            suffix: fields.some_text("input_suffix")?.to_owned(),
            files: files.ok_or_else(|| fields.wrong("input_extra", EXTRA))?,
            begun: fields.text("prompt")?.unwrap_or_default().to_owned(),
        })
    }

    fn n_bytes(&self) -> usize {
        let files: usize = self.files.iter().map(|(path, text)| path.len() + text.len()).sum();
        self.prefix.len() + self.suffix.len() + self.begun.len() + files
    }

    /// The prompt: other files in the format of repositories if the model knows it, then the file with the gap. Names
    /// of control tokens in the code are plain text.
    fn ids(&self, tokens: &FimTokens, tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
        let mut ids = tokenizer.encode("", true)?;
        ids.truncate(usize::from(ids.first().is_some_and(|&first| Some(first) == tokenizer.bos_id())));
        let encode = |text: &str| tokenizer.encode(text, false);
        match tokens.repository {
            Some((name, file)) if !self.files.is_empty() => {
                ids.push(name);
                ids.extend(encode("myproject\n")?);
                for (path, text) in &self.files {
                    ids.push(file);
                    ids.extend(encode(&format!("{path}\n{text}"))?);
                }
                ids.push(file);
                ids.extend(encode("filename\n")?);
            }
            _ => {
                for (path, text) in &self.files {
                    ids.extend(encode(&format!("{path}\n{text}\n"))?);
                }
            }
        }
        for (mark, text) in [(tokens.prefix, &self.prefix), (tokens.suffix, &self.suffix), (tokens.middle, &self.begun)]
        {
            ids.push(mark);
            ids.extend(encode(text)?);
        }
        Ok(ids)
    }
}

/// `/tokenize` with `content`.
pub async fn tokenize(app: &App, asked: &ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(&[&[MODEL], CONTENT])?;
    let content = fields.some_text("content")?.to_owned();
    let options = EncodeOptions {
        add_special: fields.flag("add_special")?.unwrap_or(false),
        parse_special: fields.flag("parse_special")?.unwrap_or(true),
    };
    let with_pieces = fields.flag("with_pieces")?.unwrap_or(false);
    let lease = app.models.get_for(fields.text("model")?, Task::Any).await?;
    let loaded = lease.loaded.clone();
    let tokens = app.prepare_in_turn(is_long(content.len()), move || {
        let tokenizer = loaded.tokenizer()?;
        let ids = tokenizer.encode_with(&content, options)?;
        Ok(match with_pieces {
            true => ids.into_iter().map(|id| piece_of(tokenizer, id)).collect::<Result<Vec<Json>, ApiError>>()?.into(),
            false => json!(ids),
        })
    });
    Ok(Body(json!({"tokens": tokens.await?})).into_response())
}

/// A token with its text, or its bytes if they are none.
fn piece_of(tokenizer: &Tokenizer, id: u32) -> Result<Json, ApiError> {
    let bytes = tokenizer.token_bytes(id)?;
    let piece = std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text));
    Ok(json!({"id": id, "piece": piece}))
}

/// `/detokenize`.
pub async fn detokenize(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(DETOKENIZE.fields)?;
    let ids = fields.list("tokens", IDS)?.and_then(schema::ids_of).ok_or_else(|| fields.wrong("tokens", IDS))?;
    let lease = app.models.get_for(fields.text("model")?, Task::Any).await?;
    let loaded = lease.loaded.clone();
    let text = app.prepare(move || Ok(loaded.tokenizer()?.decode(&ids, false)?)).await?;
    // llama.cpp's and vLLM's requests are equal.
    Ok(Body(json!({"content": text, "prompt": text})).into_response())
}

/// `/embedding`. Each vector is in a list, which has more where vectors are not pooled.
pub async fn embedding(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(EMBEDDING.fields)?;
    let inputs = EmbedInputs::read(fields, "content", app.limits.texts)?;
    let job = EmbedJob { normalize: Some(true), ..EmbedJob::new(inputs, None) };
    let lease = app.models.get_for(fields.text("model")?, Task::Embed).await?;
    let (vectors, _) = job.run(&app, lease, &asked.since).await?;
    let one = |(index, vector): (usize, &Vec<f32>)| json!({"index": index, "embedding": [vector]});
    Ok(Body(vectors.iter().enumerate().map(one).collect::<Json>()).into_response())
}

/// `/apply-template`.
pub async fn apply_template(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(APPLY_TEMPLATE.fields)?;
    let given = fields.list("messages", "a list of messages")?.filter(|list| !list.is_empty());
    let given = given.ok_or_else(|| fields.wrong("messages", "a list of one message or more"))?;
    let parse = |(at, message): (usize, &Json)| message_of(message, &format!("messages[{at}]"));
    let messages = given.iter().enumerate().map(parse).collect::<Result<Vec<_>, ApiError>>()?;
    let (tools, _) = tools_of(fields, &app.limits, |tool| (tool.get("function"), ".function"))?;
    let variables = fields.object("chat_template_kwargs", "an object")?.cloned().unwrap_or_default();
    let lease = app.models.get_for(fields.text("model")?, Task::Generate).await?;
    let decoder = lease.decoder()?;
    let add_generation_prompt = fields.checked_flag("add_generation_prompt").unwrap_or(true);
    let request = ChatRequest { tools, variables, add_generation_prompt, ..ChatRequest::new(messages) };
    let prompt = app.prepare(move || Ok(decoder.chat.prompt_text(&request)?)).await?;
    Ok(Body(json!({"prompt": prompt})).into_response())
}

/// A model's chat template, and the texts of the tokens that begin and end a text.
pub struct TokenizerNames<'m> {
    pub template: Option<&'m str>,
    pub bos: Option<String>,
    pub eos: Option<String>,
}

impl TokenizerNames<'_> {
    /// Those of a model.
    ///
    /// # Errors
    /// Those of [`Model::tokenizer`].
    pub fn of(model: &Model) -> Result<TokenizerNames<'_>, ApiError> {
        let tokenizer = model.tokenizer()?;
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_bytes(id).ok()).map(ScoredToken::text);
        Ok(TokenizerNames {
            template: model.chat_source().templates.first().map(|(_, source)| source.as_str()),
            bos: text(tokenizer.bos_id()),
            eos: text(tokenizer.eos_ids().first().copied()),
        })
    }
}

/// `GET /props`, for the model in the query or the only one.
pub async fn props(State(app): State<Arc<App>>, Query(query): Queried) -> Result<Response, ApiError> {
    let decoder = queried(&app, &query).await?;
    let model = decoder.model();
    let names = TokenizerNames::of(model)?;
    let defaults = GenerateOptions { max_tokens: usize::MAX, ..GenerateOptions::default() };
    Ok(Body(json!({
        "default_generation_settings": {
            "params": settings_of(&defaults, u32::MAX.into()),
            "n_ctx": model.context_length(),
        },
        "total_slots": decoder.engine.max_sequences(),
        "model_alias": model.name(),
        "model_path": model.name(),
        "modalities": {"vision": model.vision().is_some(), "audio": model.audio().is_some()},
        "chat_template": names.template.unwrap_or_default(),
        "bos_token": names.bos.unwrap_or_default(),
        "eos_token": names.eos.unwrap_or_default(),
        "build_info": concat!("tilewright ", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    }))
    .into_response())
}

/// `GET /slots`: one for each sequence that may run at once.
pub async fn slots(State(app): State<Arc<App>>, Query(query): Queried) -> Result<Response, ApiError> {
    let decoder = queried(&app, &query).await?;
    let (n_slots, n_running) = (decoder.engine.max_sequences(), decoder.engine.stats().n_running);
    if n_running >= n_slots && query.get("fail_on_no_slot").is_some_and(|value| value != "0") {
        let message = format!("all {n_slots} slots are in use");
        return Err(ApiError::refusal(StatusCode::SERVICE_UNAVAILABLE, "busy", message));
    }
    let slot = |at: usize| {
        json!({
            "id": at,
            "n_ctx": decoder.model().context_length(),
            "speculative": decoder.model().draft().is_some(),
            "is_processing": at < n_running,
        })
    };
    Ok(Body((0..n_slots).map(slot).collect::<Json>()).into_response())
}

/// The model in a URL's query, or the only one.
pub async fn queried(app: &App, query: &HashMap<String, String>) -> Result<Arc<Decoder>, ApiError> {
    app.models.get_for(query.get("model").map(String::as_str), Task::Generate).await?.decoder()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_texts_ids_and_mixtures() {
        let read = |prompt: Json| {
            let request = json!({"prompt": prompt});
            prompts_of(Fields::of(&request, None).ok().unwrap(), 3).ok()
        };
        let (a, b) = (|| PromptPart::Text("a".into()), || PromptPart::Id(7));
        assert_eq!(read(json!("a")), Some(vec![vec![a()]]));
        assert_eq!(read(json!([7, 7])), Some(vec![vec![b(), b()]]));
        assert_eq!(read(json!(["a", 7])), Some(vec![vec![a(), b()]]));
        assert_eq!(read(json!(["a", "a"])), Some(vec![vec![a()], vec![a()]]));
        assert_eq!(
            read(json!([["a", 7], "a", {"prompt_string": "a"}])),
            Some(vec![vec![a(), b()], vec![a()], vec![a()]])
        );
        for wrong in [json!(7), json!([]), json!([[]]), json!([-1]), json!(vec!["a"; 4]), json!({"prompt_string": [7]})]
        {
            assert_eq!(read(wrong.clone()), None, "{wrong}");
        }
    }
}
