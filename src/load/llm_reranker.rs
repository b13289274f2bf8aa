//! Rerankers that are language models: Qwen3-Reranker (Zhang et al. 2025, arXiv:2506.05176) answers `yes` or `no`,
//! and the two logits of the last token are the score.
//!
//! A folder is one if `modules.json` has sentence-transformers' `LogitScore`, if `config.json` has vLLM's
//! `classifier_from_token`, if it is a `Qwen3ForSequenceClassification`, or if its name contains `qwen3-reranker`,
//! by which llama.cpp's converter knows the first published folders. A GGUF file is one by its pooling type.

use serde_json::Value;

use super::Scoring;
use super::huggingface::{FolderTexts, LOGIT_SCORE, MODULES, missing};
use super::keys::{Key, Keys};
use super::tensor_index::TensorIndex;
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::Metadata;
use crate::formats::text::read_json;
use crate::kernels::Pooling;
use crate::model::ScoreConfig;
use crate::tokenizer::Tokenizer;

/// Tokens that a pair may have by default, as in Qwen3-Reranker's model card. Contexts are five times longer.
pub(super) const MAX_TOKENS: u32 = 8192;
/// Names of the rows of the output head that are read, `no` first.
pub(super) const ROWS: [&str; 2] = ["cls.output.no", "cls.output.yes"];
/// Name of a GGUF file's head.
const OUTPUT: &str = "cls.output.weight";
/// Name of its template.
const TEMPLATE: &str = "tokenizer.chat_template.rerank";
/// vLLM's key for the two answers.
const ANSWERS: &str = "classifier_from_token";

/// The text around a query and a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RerankPrompt {
    /// Text before the instruction.
    pub before: String,
    /// The default instruction; `None` if the prompt has no place for one.
    pub instruction: Option<String>,
    /// Text between the instruction and the query.
    pub query: String,
    /// Text between the query and the document.
    pub document: String,
    /// Text after the document.
    pub after: String,
}

impl RerankPrompt {
    /// Beginning of the instruction and of the query.
    const LABELS: [&str; 2] = ["<Instruct>: ", "\n<Query>: "];

    /// Qwen3-Reranker's, from its model card.
    fn qwen3() -> RerankPrompt {
        RerankPrompt {
            before: "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
                     Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                     <|im_start|>user\n<Instruct>: "
                .into(),
            instruction: Some("Given a web search query, retrieve relevant passages that answer the query".into()),
            query: RerankPrompt::LABELS[1].into(),
            document: "\n<Document>: ".into(),
            after: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n".into(),
        }
    }

    /// A template of llama.cpp's, with the places `{query}` and `{document}`.
    fn parse(template: &str) -> Option<RerankPrompt> {
        let (before, rest) = template.split_once("{query}")?;
        let (document, after) = rest.split_once("{document}")?;
        let [label, end] = RerankPrompt::LABELS;
        let instructed = before.strip_suffix(end).and_then(|before| before.split_once(label));
        let (before, instruction, query) = match instructed {
            Some((before, instruction)) => (format!("{before}{label}"), Some(instruction.to_owned()), end),
            None => (before.to_owned(), None, ""),
        };
        Some(RerankPrompt { before, instruction, query: query.into(), document: document.into(), after: after.into() })
    }
}

/// The head of such a model. `answers`: whether it has two logits, whose difference is one.
fn scoring(prompt: RerankPrompt, answers: bool) -> Scoring {
    let head = ScoreConfig { pooling: Pooling::Last, dense: None, norm: false, answers };
    Scoring { head, n_labels: 1, activation_fn: None, prompt: Some(prompt) }
}

/// Where a folder's logits come from.
pub(super) enum LogitSource {
    /// Rows of the output head by token, `no` first.
    Ids([u32; 2]),
    /// The same by the tokens' texts.
    Texts([String; 2]),
    /// The head of a sequence classifier, `score.weight`.
    Score,
}

/// The source of the logits, if a folder of this name is a language model as a reranker.
///
/// # Errors
/// [`Error::Unsupported`] or [`Error::Config`] naming the key of a kind of scores or answers without support.
pub(super) fn of_folder(name: &str, json: &ConfigJson, texts: &FolderTexts) -> Result<Option<LogitSource>, Error> {
    if json.get_str("model_type")? != Some("qwen3") {
        return Ok(None);
    }
    let classes = json.get_str_array("architectures")?.unwrap_or_default();
    if let Some(answers) = json.get_str_array(ANSWERS)? {
        return match answers[..] {
            [no, yes] => Ok(Some(LogitSource::Texts([no, yes].map(str::to_owned)))),
            _ => Err(wrong(ANSWERS, "the two answers, the negative one first", format!("{} of them", answers.len()))),
        };
    }
    if classes.iter().any(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(Some(LogitSource::Score));
    }
    if let Some(ids) = logit_score(texts)? {
        return Ok(Some(LogitSource::Ids(ids)));
    }
    let is_named = name.to_ascii_lowercase().contains("qwen3-reranker");
    let is_plain = texts.modules.is_none() && texts.pooling.is_none();
    Ok((is_named && is_plain).then(|| LogitSource::Texts(["no", "yes"].map(str::to_owned))))
}

/// The tokens of sentence-transformers' `LogitScore`, the negative one first, if it is among the modules.
fn logit_score(texts: &FolderTexts) -> Result<Option<[u32; 2]>, Error> {
    let Some(modules) = &texts.modules else { return Ok(None) };
    let modules: Vec<Value> = read_json(modules).unwrap_or_default();
    let is_score = |module: &Value| module["type"].as_str().is_some_and(|kind| kind.ends_with(".LogitScore"));
    if !modules.iter().any(is_score) {
        return Ok(None);
    }
    let read = || {
        let json = ConfigJson::parse(texts.logit_score.as_ref().ok_or_else(|| missing("file"))?)?;
        let id = |key: &str| json.get_u32(key)?.ok_or_else(|| wrong(key, "a token id", "missing or null".into()));
        Ok([id("false_token_id")?, id("true_token_id")?])
    };
    let ids = read().map_err(|error: Error| error.in_file(LOGIT_SCORE))?;
    refuse_modules(&modules)?;
    Ok(Some(ids))
}

/// Refuses modules beside the model and its score.
fn refuse_modules(modules: &[Value]) -> Result<(), Error> {
    let kind = |module: &Value| module["type"].as_str().unwrap_or("missing").to_owned();
    let is_known = |kind: &String| kind.ends_with(".Transformer") || kind.ends_with(".LogitScore");
    match modules.iter().map(kind).find(|kind| !is_known(kind)) {
        None => Ok(()),
        Some(kind) => Err(Error::Unsupported {
            format: "modules.json",
            field: "type".into(),
            found: format!("`{kind}`"),
            supported: "Transformer, LogitScore".into(),
        }
        .in_file(MODULES)),
    }
}

/// Marks the keys of a folder's `config.json` that vLLM's users add to it as read.
///
/// # Errors
/// [`Error::Unsupported`] for another way from answers to scores.
pub(super) fn read_overrides(keys: &Keys<'_>) -> Result<(), Error> {
    keys.says(Key("", "is_original_qwen3_reranker"));
    let method = Key("", "method");
    match keys.str(method)? {
        None | Some("from_2_way_softmax") => Ok(()),
        Some(found) => Err(keys.unsupported(method, found, "from_2_way_softmax")),
    }
}

/// The GGUF name of a folder's tensor that such models have besides the decoder's.
pub(super) fn tensor_name(source: Option<&LogitSource>, name: &str) -> Option<String> {
    let is_head = name == "score.weight" && matches!(source, Some(LogitSource::Score));
    is_head.then(|| OUTPUT.to_owned())
}

/// The scoring of a folder. `default`: the instruction of its `config_sentence_transformers.json`; `classifier`: the
/// number of labels and the activation of a sequence classifier.
pub(super) fn folder_scoring(
    source: &LogitSource,
    default: Option<&str>,
    (n_labels, activation_fn): (u32, Option<String>),
) -> Scoring {
    let mut prompt = RerankPrompt::qwen3();
    if let Some(default) = default {
        prompt.instruction = Some(default.to_owned());
    }
    match source {
        LogitSource::Score => Scoring { n_labels, activation_fn, ..scoring(prompt, false) },
        LogitSource::Ids(_) | LogitSource::Texts(_) => scoring(prompt, true),
    }
}

/// Refuses a folder whose template for pairs is another one.
///
/// # Errors
/// [`Error::Unsupported`].
pub(super) fn check_template(templates: &[(String, String)]) -> Result<(), Error> {
    let reads_pairs = |template: &str| template.contains("document") && template.contains("query");
    let is_known = |template: &str| template.contains("Judge whether the Document meets the requirements");
    match templates.iter().any(|(_, template)| reads_pairs(template) && !is_known(template)) {
        false => Ok(()),
        true => Err(Error::Unsupported {
            format: "model",
            field: "chat_template".into(),
            found: "a template for queries and documents other than Qwen3-Reranker's".into(),
            supported: "Qwen3-Reranker's, or a chat template".into(),
        }),
    }
}

/// Adds the rows of a folder's two logits to its tensors.
///
/// # Errors
/// [`Error::Config`] for an answer that is not one token, or a row past the end of the output head; errors of a missing
/// tokenizer.
pub(super) fn add_rows(
    tensor_index: &mut TensorIndex,
    source: &LogitSource,
    is_tied: bool,
    tokenizer: &Result<Tokenizer, Error>,
) -> Result<(), Error> {
    let ids = match source {
        LogitSource::Score => return Ok(()),
        LogitSource::Ids(ids) => *ids,
        LogitSource::Texts(texts) => {
            let tokenizer = tokenizer.as_ref().map_err(|reason| {
                wrong(ANSWERS, "a tokenizer that has the answers as tokens", format!("none: {reason}"))
            })?;
            let id = |text: &str| match tokenizer.encode(text, false)?[..] {
                [id] => Ok(id),
                ref ids => Err(wrong(ANSWERS, "single tokens", format!("`{text}`, which is {}", ids.len()))),
            };
            [id(&texts[0])?, id(&texts[1])?]
        }
    };
    let head = if is_tied { "token_embd.weight" } else { "output.weight" };
    for (name, id) in ROWS.into_iter().zip(ids) {
        tensor_index.insert_row(format!("{name}.weight"), head, id)?;
    }
    Ok(())
}

/// The scoring of a GGUF file of Qwen3 with pooling type `rank`.
///
/// # Errors
/// [`Error::Config`] for a template without places for query and document.
pub(super) fn gguf_scoring(metadata: &Metadata) -> Result<Scoring, Error> {
    let prompt = match metadata.get_str(TEMPLATE)? {
        None => RerankPrompt::qwen3(),
        Some(template) => RerankPrompt::parse(template)
            .ok_or_else(|| wrong(TEMPLATE, "{query}, then {document}", template.escape_debug().take(200).collect()))?,
    };
    Ok(scoring(prompt, true))
}

/// Adds the rows of a GGUF file's two logits to its tensors, in the order of its labels.
///
/// # Errors
/// [`Error::Config`] naming the labels or the head.
pub(super) fn add_gguf_rows(
    tensor_index: &mut TensorIndex,
    labels: Option<Vec<&str>>,
    key: String,
) -> Result<(), Error> {
    let labels = labels.unwrap_or_default();
    let places = ["no", "yes"].map(|answer| labels.iter().position(|label| *label == answer));
    let ([Some(no), Some(yes)], 2) = (places, labels.len()) else {
        let found = if labels.is_empty() { "missing".into() } else { labels.join(", ").escape_debug().to_string() };
        return Err(wrong(&key, "the labels yes and no", found));
    };
    match tensor_index.find(OUTPUT).map(|(_, info)| info.shape.as_slice()) {
        Some([2, _]) => {}
        found => {
            let found = found.map_or("missing".into(), |shape| format!("of shape {shape:?}"));
            return Err(wrong(OUTPUT, "a row for each of the 2 labels", found));
        }
    }
    for (name, row) in ROWS.into_iter().zip([no, yes]) {
        tensor_index.insert_row(format!("{name}.weight"), OUTPUT, row as u32)?;
    }
    Ok(())
}

fn wrong(field: &str, expected: &str, found: String) -> Error {
    Error::Config { field: field.into(), expected: expected.into(), found }
}

#[cfg(test)]
mod tests {
    use super::RerankPrompt;

    /// As `conversion/qwen.py` of llama.cpp writes it.
    const TEMPLATE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query \
        and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n\
        <Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n\
        <Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

    #[test]
    fn converted_template_is_the_published_prompt() {
        assert_eq!(RerankPrompt::parse(TEMPLATE), Some(RerankPrompt::qwen3()));
        let plain = RerankPrompt::parse("q: {query} d: {document}!").unwrap();
        assert_eq!((plain.before.as_str(), plain.instruction, plain.after.as_str()), ("q: ", None, "!"));
        for broken in ["", "{query}", "{document} {query}"] {
            assert_eq!(RerankPrompt::parse(broken), None, "{broken}");
        }
    }
}
