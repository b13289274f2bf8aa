//! `/v1/embeddings` and `/v1/rerank`, and what the APIs of other servers for embeddings share with them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::embed::{Embedder, Reranker, Tokens, Truncation, TruncationSide, shortened};
use tilewright::engine::Usage;
use tilewright::picture::Patches;

use super::app::{ApiRequest, App, Computed, RequestContext};
use super::conversation::{content_of, with_notice};
use super::errors::ApiError;
use super::fields::Fields;
use super::media;
use super::models::{Lease, Loaded, Task};
use super::sampling::MODEL;
use super::schema::{Endpoint, Field, Kind, Neutral, field, ids_of, neutral, required};

/// `/v1/embeddings`.
pub const EMBEDDINGS: Endpoint = Endpoint::post(
    "/v1/embeddings",
    "Computes embeddings, like OpenAI's Embeddings",
    &[&[
        MODEL,
        field(
            "input",
            Kind::Other(&["string", "array"], INPUT_OR_PICTURES),
            "",
            "Texts, or token ids of the model's vocabulary. Or, as in Jina's requests, a list of `{\"text\": ..}` and \
             `{\"image\": ..}`, a data URL or base64, for models that embed pictures. Required without `messages`.",
        ),
        field(
            "messages",
            Kind::Other(&["array"], MESSAGES),
            "",
            "Instead of `input`, as in vLLM's requests: one message, whose content is a text or one part, a `text` or an \
             `image_url` with a data URL.",
        ),
        field("encoding_format", Kind::OneOf(&["float", "base64"]), "\"float\"", "How vectors are written."),
        DIMENSIONS,
        field(
            "truncate",
            Kind::Other(&["boolean", "string"], TRUNCATE),
            "false",
            "Cut the end of a text that is too long, or its beginning (`START`), instead of refusing it.",
        ),
        field(
            "truncate_prompt_tokens",
            Kind::Whole(-1, i32::MAX as i64),
            "",
            "Cut texts to this many tokens; -1: to the model's limit.",
        ),
        field("truncation_side", Kind::OneOf(&["left", "right"]), "\"right\"", "The side that is cut."),
        neutral("user", &[Neutral::AnyText], "Ignored."),
    ]],
);

/// The row of the vectors' size.
pub const DIMENSIONS: Field = field(
    "dimensions",
    Kind::Whole(1, u32::MAX as i64),
    "the model's",
    "Elements to keep of each vector, which is then normalised again. Only vectors of models trained for it \
     (Matryoshka) keep their quality.",
);

/// `/v1/rerank`.
pub const RERANK: Endpoint = Endpoint::post(
    "/v1/rerank",
    "Ranks documents by a query, like Cohere's and Jina's Rerank",
    &[&[MODEL, required("query", Kind::Text, "The query."), INSTRUCTION], DOCUMENT_OPTIONS],
);

/// Fields about the documents of `/v1/rerank`.
pub const DOCUMENT_OPTIONS: &[Field] = &[
    field("documents", Kind::Other(&["array"], "a list of texts, or of objects with a text"), "", "The documents."),
    TOP_N,
    field("return_documents", Kind::Flag, "false", "Add the documents to the results."),
    neutral("truncate_prompt_tokens", &[Neutral::Number(-1.0)], "Documents are cut to the model's limit."),
    neutral("user", &[Neutral::AnyText], "Ignored."),
];

/// The row of the instruction, as in vLLM's requests.
pub const INSTRUCTION: Field = field(
    "instruction",
    Kind::Text,
    "the model's",
    "What a document must do for the query, for rerankers that take an instruction, such as Qwen3-Reranker.",
);

/// The row of the number of results.
pub const TOP_N: Field = field("top_n", Kind::Whole(1, i32::MAX as i64), "all", "Number of results.");

/// Values of `input`, for messages.
pub const INPUT: &str = "a text, a list of texts, a list of token ids, or a list of those";
const INPUT_OR_PICTURES: &str =
    "a text, a list of texts, a list of token ids, a list of those, or a list with objects of a text or an image";
const MESSAGES: &str = "one message with a text or a picture";
const TRUNCATE: &str = r#"true, false, "NONE", "START" or "END""#;

/// Texts or pictures computed between checks whether the client still waits.
const PART: usize = 64;

/// Concatenated rows of a part, and its number of tokens.
pub type Vectors = (Vec<f32>, usize);

impl Computed for Vectors {
    fn usage(parts: &[Vectors]) -> Usage {
        Usage { prompt_tokens: parts.iter().map(|(_, n)| n).sum(), ..Usage::default() }
    }
}

/// An input of the embeddings endpoints, which becomes a vector.
#[derive(Clone, Debug, PartialEq)]
pub enum EmbedInput {
    Text(String),
    /// Tokens as the model reads them, special ones included.
    Ids(Vec<u32>),
    /// A picture's file in base64.
    Picture(String),
}

impl EmbedInput {
    /// The picture of a content part.
    fn of_picture(part: &Json) -> EmbedInput {
        EmbedInput::Picture(part.get("data").and_then(Json::as_str).unwrap_or_default().to_owned())
    }
}

/// The inputs of a request, and whether it was a list of them.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedInputs {
    pub field: &'static str,
    pub list: Vec<EmbedInput>,
    pub is_list: bool,
}

impl EmbedInputs {
    /// Reads a text, a list of token ids, or a list of those, at most `most`.
    ///
    /// # Errors
    /// `invalid_value` naming the field.
    pub fn read(fields: Fields<'_>, field: &'static str, most: usize) -> Result<EmbedInputs, ApiError> {
        let one = |input: &Json| match input {
            Json::String(text) => Some(EmbedInput::Text(text.clone())),
            Json::Array(ids) if !ids.is_empty() => ids_of(ids).map(EmbedInput::Ids),
            _ => None,
        };
        let given = fields.get(field);
        if let Some(only) = given.and_then(one) {
            return Ok(EmbedInputs { field, list: vec![only], is_list: false });
        }
        let list = given.and_then(Json::as_array).filter(|list| (1..=most).contains(&list.len()));
        match list.and_then(|list| list.iter().map(one).collect()) {
            Some(list) => Ok(EmbedInputs { field, list, is_list: true }),
            None => {
                Err(fields.wrong(field, &format!("a text, a list of token ids, or a list of 1 to {most} of those")))
            }
        }
    }

    /// As [`EmbedInputs::read`]; also texts and pictures as in Jina's requests: a list with objects.
    ///
    /// # Errors
    /// As [`EmbedInputs::read`], and of pictures.
    fn read_with_pictures(fields: Fields<'_>, field: &'static str, most: usize) -> Result<EmbedInputs, ApiError> {
        let list = fields.get(field).and_then(Json::as_array).filter(|list| list.iter().any(Json::is_object));
        let Some(list) = list else { return EmbedInputs::read(fields, field, most) };
        if list.len() > most {
            return Err(fields.wrong(field, &format!("a list of 1 to {most} texts and pictures")));
        }
        let one = |(at, input): (usize, &Json)| {
            let param = format!("{field}[{at}]");
            let only = |name: &str| input.as_object().filter(|object| object.len() == 1)?.get(name);
            match (input.as_str().or_else(|| only("text")?.as_str()), only("image")) {
                (Some(text), None) => Ok(EmbedInput::Text(text.to_owned())),
                (None, Some(image)) => {
                    let part = media::of_url_or_base64(image.as_str(), &format!("{param}.image"))?;
                    Ok(EmbedInput::of_picture(&part))
                }
                _ => Err(ApiError::invalid(param, Some(input), r#"a text, {"text": ..} or {"image": ..}"#)),
            }
        };
        let list = list.iter().enumerate().map(one).collect::<Result<_, _>>()?;
        Ok(EmbedInputs { field, list, is_list: true })
    }

    /// The text or the picture of the only message, as in vLLM's requests.
    ///
    /// # Errors
    /// `invalid_value` naming the part; `unsupported` for several parts, which no model here makes one vector of.
    fn of_messages(fields: Fields<'_>) -> Result<EmbedInputs, ApiError> {
        let field = "messages";
        if fields.get("input").is_some() {
            return Err(ApiError::invalid(field, None, "either input or messages"));
        }
        let [message] = fields.list(field, MESSAGES)?.unwrap_or_default() else {
            return Err(fields.wrong(field, MESSAGES));
        };
        let param = "messages[0].content";
        let part = match message.get("content") {
            Some(Json::Array(parts)) => match content_of(parts, param, &["text"])? {
                Json::Array(parts) if parts.len() > 1 => {
                    let message = format!(
                        "{param} has {} parts; the model makes a vector of one text or one picture",
                        parts.len()
                    );
                    return Err(ApiError::unsupported(param, message));
                }
                Json::Array(parts) => parts.into_iter().next().unwrap_or_default(),
                text => text,
            },
            Some(text @ Json::String(_)) => text.clone(),
            other => return Err(ApiError::invalid(param, other, "a text, or a list of one text or picture")),
        };
        let input = match part {
            Json::String(text) => EmbedInput::Text(text),
            part if part.get("type").and_then(Json::as_str) == Some("image") => EmbedInput::of_picture(&part),
            _ => {
                let message = format!("{param} is a sound; the model makes vectors of texts and pictures");
                return Err(ApiError::unsupported(param, message));
            }
        };
        Ok(EmbedInputs { field: param, list: vec![input], is_list: false })
    }

    fn n_pictures(&self) -> usize {
        self.list.iter().filter(|input| matches!(input, EmbedInput::Picture(_))).count()
    }

    /// The path of an input in errors.
    fn path(&self, at: usize) -> String {
        if self.is_list { format!("{}[{at}]", self.field) } else { self.field.to_owned() }
    }
}

/// Vectors to compute.
pub struct EmbedJob {
    pub inputs: EmbedInputs,
    /// How inputs that are too long are truncated; `None`: they are refused.
    pub truncation: Option<Truncation>,
    /// Elements to keep of each vector.
    pub dimensions: Option<u64>,
    /// Whether vectors have length 1; default: as the model specifies.
    pub normalize: Option<bool>,
    /// Name of the model's prompt to put before texts, instead of its default one.
    pub prompt: Option<String>,
}

impl EmbedJob {
    /// Embeds inputs as the model specifies.
    pub fn new(inputs: EmbedInputs, truncation: Option<Truncation>) -> EmbedJob {
        EmbedJob { inputs, truncation, dimensions: None, normalize: None, prompt: None }
    }

    /// Embeds texts and truncates those that are too long.
    pub fn of_texts(texts: Vec<String>) -> EmbedJob {
        let list = texts.into_iter().map(EmbedInput::Text).collect();
        EmbedJob::new(EmbedInputs { field: "input", list, is_list: true }, Some(Truncation::default()))
    }

    /// The vectors and the number of tokens.
    ///
    /// # Errors
    /// `context_length_exceeded` naming an input that is too long; `invalid_value`; errors of [`App::compute`].
    pub async fn run(
        self,
        app: &App,
        lease: Lease,
        since: &RequestContext,
    ) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
        let mut embedder = lease.embedder()?;
        if let Some(name) = &self.prompt {
            embedder = embedder.with_prompt(Some(name)).map_err(|error| ApiError::of_option(error, "prompt_name"))?;
        }
        let dims = embedder.dims() as usize;
        let n_kept = self.dimensions.map_or(dims, |n| usize::try_from(n).unwrap_or(usize::MAX));
        if n_kept > dims {
            let expected = format!("1 to {dims}, the size of the model's vectors");
            return Err(ApiError::invalid("dimensions", Some(&n_kept.into()), &expected));
        }
        let is_normal = embedder.normalizes();
        if is_normal && self.normalize == Some(false) {
            let message = "normalize is false, but this model normalises its vectors itself; leave normalize out";
            return Err(ApiError::unsupported("normalize", message));
        }
        let normalizes = self.normalize.unwrap_or(is_normal) && (!is_normal || n_kept < dims);
        let n_pictures = self.inputs.n_pictures();
        if n_pictures > media::MOST {
            let (field, most) = (self.inputs.field, media::MOST);
            return Err(ApiError::unsupported(field, format!("{field} has {n_pictures} pictures, over {most}")));
        }
        lease.expect_batch(app.limits.batches)?;
        let parts = app.prepare_in_turn(n_pictures > 0, move || self.prepared(&embedder)).await?;
        let part = move |loaded: &Loaded, at: usize, _: &AtomicBool| {
            let (embedder, part) = (loaded.embedder()?, parts.get(at)?);
            Some(pollster::block_on(part.vectors(embedder)).map(|vectors| (vectors, part.n_tokens())))
        };
        let parts = app.compute(lease, since, part).await?;
        let n_tokens = parts.iter().map(|(_, n)| n).sum();
        let rows = |(numbers, _): &Vectors| {
            let numbers = shortened(numbers, dims, n_kept, normalizes);
            numbers.chunks(n_kept).map(<[f32]>::to_vec).collect::<Vec<_>>()
        };
        let vectors = parts.iter().flat_map(rows).collect();
        Ok((vectors, n_tokens))
    }

    /// The inputs as the model takes them.
    fn prepared(self, embedder: &Embedder) -> Result<Vec<Part>, ApiError> {
        let most = embedder.max_tokens();
        let asked = self.truncation.and_then(|truncation| truncation.max_tokens);
        if let Some(asked) = asked.filter(|&asked| asked > most) {
            let expected = format!("at most {most}, the model's limit");
            return Err(ApiError::invalid("truncate_prompt_tokens", Some(&asked.into()), &expected));
        }
        let mut parts: Vec<Part> = Vec::new();
        for (at, input) in self.inputs.list.iter().enumerate() {
            let (tokens, n) = match input {
                EmbedInput::Picture(data) => {
                    let param = self.inputs.path(at);
                    let refused = |error: Error| media::refused(&error, &param);
                    let images = embedder.images().map_err(refused)?;
                    let patches = images.prepare(&media::picture_of(data, &param)?).map_err(refused)?;
                    match parts.last_mut() {
                        Some(Part::Pictures(last)) => last.push(patches),
                        _ => parts.push(Part::Pictures(vec![patches])),
                    }
                    continue;
                }
                EmbedInput::Text(text) => embedder
                    .encode_truncated(text, self.truncation.unwrap_or_default())
                    .map_err(|error| ApiError::of_option(error, "truncate_prompt_tokens"))?,
                EmbedInput::Ids(ids) => {
                    self.check_ids(at, ids, embedder)?;
                    (truncated(ids, asked.unwrap_or(most) as usize, self.truncation), ids.len())
                }
            };
            if self.truncation.is_none() && n > most as usize {
                return Err(too_long(&self.inputs.path(at), n, most));
            }
            match parts.last_mut() {
                Some(Part::Texts(last)) if last.len() < PART => last.push(tokens),
                _ => parts.push(Part::Texts(vec![tokens])),
            }
        }
        Ok(parts)
    }

    fn check_ids(&self, at: usize, ids: &[u32], embedder: &Embedder) -> Result<(), ApiError> {
        let vocab_size = embedder.config().vocab_size;
        let Some((i, &id)) = ids.iter().enumerate().find(|(_, id)| **id >= vocab_size) else { return Ok(()) };
        let param = format!("{}[{i}]", self.inputs.path(at));
        let expected = format!(
            "a token id of the model, below {vocab_size}; clients that count tokens for OpenAI's models must send texts"
        );
        Err(ApiError::invalid(param, Some(&id.into()), &expected))
    }
}

/// Inputs that are computed together.
enum Part {
    Texts(Vec<Tokens>),
    Pictures(Vec<Patches>),
}

impl Part {
    async fn vectors(&self, embedder: &Embedder) -> Result<Vec<f32>, Error> {
        match self {
            Part::Texts(texts) => embedder.embed_tokens(texts).await,
            Part::Pictures(pictures) => embedder.embed_patches(pictures).await,
        }
    }

    /// Tokens; a picture has one for each patch.
    fn n_tokens(&self) -> usize {
        match self {
            Part::Texts(texts) => texts.iter().map(|text| text.ids.len()).sum(),
            Part::Pictures(pictures) => pictures.iter().map(|patches| patches.places.len()).sum(),
        }
    }
}

/// A list of token ids, truncated to `most`.
fn truncated(ids: &[u32], most: usize, truncation: Option<Truncation>) -> Tokens {
    let n = ids.len().min(most);
    let kept = match truncation.unwrap_or_default().side {
        TruncationSide::Right => ids.get(..n),
        TruncationSide::Left => ids.get(ids.len() - n..),
    };
    Tokens::from(kept.unwrap_or_default().to_vec())
}

/// The refusal of an input that is too long.
fn too_long(param: &str, n: usize, most: u32) -> ApiError {
    let message = format!(
        "{param} has {n} tokens, but the model reads at most {most}; shorten it, or send \"truncate\": true to cut it off"
    );
    ApiError { code: "context_length_exceeded", message, ..ApiError::invalid(param, None, "") }
}

/// How `/v1/embeddings` truncates: by `truncate`, as Ollama's and NVIDIA's clients send it, or by vLLM's fields.
fn truncation_of(fields: Fields<'_>) -> Result<Option<Truncation>, ApiError> {
    let left = || Truncation { side: TruncationSide::Left, ..Truncation::default() };
    let upper = fields.get("truncate").and_then(Json::as_str).map(str::to_ascii_uppercase);
    let truncation = match (fields.get("truncate"), upper.as_deref()) {
        (None | Some(Json::Bool(false)), _) | (_, Some("NONE")) => None,
        (Some(Json::Bool(true)), _) | (_, Some("END")) => Some(Truncation::default()),
        (_, Some("START")) => Some(left()),
        _ => return Err(fields.wrong("truncate", TRUNCATE)),
    };
    let max_tokens = match fields.checked_whole("truncate_prompt_tokens") {
        None => return Ok(truncation),
        Some(0) => return Err(fields.wrong("truncate_prompt_tokens", "1 or more, or -1 for the model's limit")),
        Some(n) => u32::try_from(n).ok(),
    };
    let side = match fields.text("truncation_side")? {
        Some("left") => TruncationSide::Left,
        _ => truncation.map_or(TruncationSide::Right, |truncation| truncation.side),
    };
    Ok(Some(Truncation { max_tokens, side }))
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
    let as_base64 = fields.text("encoding_format")? == Some("base64");
    let inputs = match fields.get("messages") {
        Some(_) => EmbedInputs::of_messages(fields)?,
        None => EmbedInputs::read_with_pictures(fields, "input", app.limits.texts)?,
    };
    let job = EmbedJob {
        dimensions: fields.checked_whole("dimensions").map(|n| n as u64),
        ..EmbedJob::new(inputs, truncation_of(fields)?)
    };
    let model = app.models.name_for(fields.text("model")?, Task::Embed).await?;
    let lease = app.models.get(&model).await?;
    let (vectors, n) = job.run(&app, lease, &asked.since).await?;
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
    Ok(Body(EmbeddingResponse { object: "list", data, model: &model, usage }).into_response())
}

/// Which numbers a reranker's documents get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreKind {
    /// As the model specifies.
    Model,
    Logit,
    Sigmoid,
}

/// Documents to rank.
pub struct RerankJob {
    /// The query of all documents, or one for each.
    pub queries: Arc<Vec<String>>,
    /// The instruction, for a model that takes one; default: the model's.
    pub instruction: Option<String>,
    /// The field of the documents in errors.
    pub field: &'static str,
    pub documents: Arc<Vec<String>>,
    /// Whether pairs that are too long are truncated; otherwise they are refused.
    pub truncates: bool,
    pub scores: ScoreKind,
}

/// Scored documents.
pub struct Scores {
    /// In the order of the documents.
    pub scores: Vec<f32>,
    pub n_tokens: usize,
    /// How many documents were truncated.
    pub n_truncated: usize,
}

impl Scores {
    /// Indices and scores, by descending score. Equal ones keep the order of the documents.
    pub fn ranked(self) -> impl Iterator<Item = (usize, f32)> {
        let mut ranked: Vec<(usize, f32)> = self.scores.into_iter().enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked.into_iter()
    }
}

impl RerankJob {
    /// Scores the documents.
    ///
    /// # Errors
    /// `context_length_exceeded` naming a document that is too long; errors of [`App::compute`].
    pub async fn run(self, app: &App, lease: Lease, since: &RequestContext) -> Result<Scores, ApiError> {
        let given = self.instruction.as_deref();
        let reranker = lease.reranker()?.with_instruction(given);
        let reranker = reranker.map_err(|error| ApiError::of_option(error, "instruction"))?;
        lease.expect_batch(app.limits.batches)?;
        let RerankJob { queries, documents, scores, instruction, .. } = &self;
        let (queries, documents) = (queries.clone(), documents.clone());
        let (scores, instruction) = (*scores, instruction.clone());
        let lengths = app.prepare(move || self.lengths(&reranker)).await?;
        let most = lease.reranker()?.max_tokens() as usize;
        let n_truncated = lengths.iter().filter(|&&n| n > most).count();
        let n_tokens = lengths.iter().map(|&n| n.min(most)).sum();
        let part = move |loaded: &Loaded, at: usize, _: &AtomicBool| {
            let reranker = loaded.reranker()?.with_instruction(instruction.as_deref());
            let texts = documents.get(at * PART..).filter(|rest| !rest.is_empty())?;
            let texts = texts.get(..PART).unwrap_or(texts);
            let each = |it: &Reranker| match queries.as_slice() {
                [query] => scored(it, query, texts, scores),
                queries => {
                    let pairs = queries.iter().skip(at * PART).zip(texts.chunks(1));
                    let scores: Result<Vec<_>, Error> =
                        pairs.map(|(query, text)| scored(it, query, text, scores)).collect();
                    scores.map(|scores| scores.concat())
                }
            };
            Some(reranker.and_then(|it| each(&it)).map(|scores| (scores, 0)))
        };
        let parts = app.compute(lease, since, part).await?;
        let scores = parts.into_iter().flat_map(|(scores, _)| scores).collect();
        Ok(Scores { scores, n_tokens, n_truncated })
    }

    /// Tokens of each pair before truncation.
    fn lengths(&self, reranker: &Reranker) -> Result<Vec<usize>, ApiError> {
        let most = reranker.max_tokens();
        let length = |(at, document): (usize, &String)| {
            let query = self.queries.get(at).or(self.queries.first()).map_or("", String::as_str);
            let n = reranker.pair_len(query, document)?;
            match self.truncates || n <= most as usize {
                true => Ok(n),
                false => Err(too_long(&format!("{}[{at}] with the query", self.field), n, most)),
            }
        };
        self.documents.iter().enumerate().map(length).collect()
    }
}

fn scored(reranker: &Reranker, query: &str, texts: &[String], scores: ScoreKind) -> Result<Vec<f32>, Error> {
    match scores {
        ScoreKind::Logit => pollster::block_on(reranker.logits(query, texts)),
        ScoreKind::Sigmoid if !reranker.has_sigmoid() => {
            let logits = pollster::block_on(reranker.logits(query, texts))?;
            Ok(logits.into_iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect())
        }
        ScoreKind::Model | ScoreKind::Sigmoid => pollster::block_on(reranker.score(query, texts)),
    }
}

/// The number of results that a request asks for.
pub fn top_n(fields: Fields<'_>) -> usize {
    fields.checked_whole("top_n").map_or(usize::MAX, |n| n as usize)
}

/// `/v1/rerank`, in the format common to Cohere's and Jina's APIs.
pub async fn rerank(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(RERANK.fields)?;
    let query = fields.some_text("query")?.to_owned();
    let most = app.limits.texts;
    let expected = format!("a list of 1 to {most} texts, or of objects with a text");
    let given = fields.list("documents", &expected)?.filter(|list| (1..=most).contains(&list.len()));
    let text = |one: &Json| Some(one.as_str().or_else(|| one.get("text")?.as_str())?.to_owned());
    let documents: Option<Vec<String>> = given.and_then(|list| list.iter().map(text).collect());
    let documents = Arc::new(documents.ok_or_else(|| fields.wrong("documents", &expected))?);
    let top_n = top_n(fields);
    let returns = fields.flag("return_documents")?.unwrap_or(false);
    let model = app.models.name_for(fields.text("model")?, Task::Rerank).await?;
    let lease = app.models.get(&model).await?;
    let job = RerankJob {
        queries: Arc::new(vec![query]),
        instruction: fields.text("instruction")?.map(str::to_owned),
        field: "documents",
        documents: documents.clone(),
        // As in Cohere's and Jina's APIs.
        truncates: true,
        scores: ScoreKind::Model,
    };
    let scores = job.run(&app, lease, &asked.since).await?;
    let (n_tokens, n_truncated) = (scores.n_tokens, scores.n_truncated);
    let result = |(index, score): (usize, f32)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if let Some(text) = documents.get(index).filter(|_| returns) {
            result["document"] = json!({"text": text});
        }
        result
    };
    let results: Vec<Json> = scores.ranked().take(top_n).map(result).collect();
    let usage = json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens});
    let body = json!({"object": "list", "model": model, "results": results, "usage": usage});
    let response = Body(body).into_response();
    if n_truncated == 0 {
        return Ok(response);
    }
    let n = documents.len();
    Ok(with_notice(
        response,
        &format!("{n_truncated} of {n} documents are longer than the model reads and were cut off"),
    ))
}
