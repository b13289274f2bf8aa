//! `tilewright rerank`: ranks texts by how well they answer a query.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value, json};
use tilewright::{Device, Error, Recovery, RerankOptions, Reranker};

use super::embed::error::{EXIT_CODES, EmbedError};
use super::embed::input::{InputFormat, InputSource, ReadProgress};
use super::embed::job::{OnError, of_texts};
use super::embed::log::Log;
use super::embed::rows::Records;
use super::lost::TestLosses;
use super::run::with_loading_bar;
use super::{DeviceArgs, hub};

/// Rank texts by how well they answer a query, with a cross-encoder or Qwen3-Reranker.
///
/// Prints a score and a text per line, best first; with `--json`, the record with its number and score. Records with a
/// null text are left out.
#[derive(Args)]
#[command(after_help = EXIT_CODES)]
pub struct RerankArgs {
    /// Reranker: Hugging Face folder, GGUF file, or address hf:OWNER/REPO.
    model: PathBuf,
    /// File with the texts; `-` is stdin.
    #[arg(default_value = "-")]
    input: PathBuf,
    /// Query to rank the texts by.
    #[arg(long, value_name = "TEXT")]
    query: String,
    /// What a document must do for the query, for rerankers that take an instruction [default: the model's].
    #[arg(long, value_name = "TEXT")]
    instruction: Option<String>,
    /// Input format; Arrow, CSV and Parquet need a build with `--features tables`.
    #[arg(long, value_enum, default_value = "auto", value_name = "FORMAT")]
    io: InputFormat,
    /// Column or field with the texts.
    #[arg(long, default_value = "text", value_name = "NAME")]
    column: String,
    /// Print only the N best [default: all].
    #[arg(long, value_name = "N")]
    top_k: Option<std::num::NonZeroUsize>,
    /// Print raw logits instead of sigmoid scores [default: as the model specifies].
    #[arg(long)]
    logits: bool,
    /// Truncate query and text together to N tokens [default: as the model specifies].
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// What to do with a record without a valid text.
    ///
    /// A skipped record is reported on stderr and left out.
    #[arg(long, value_enum, default_value = "fail", value_name = "WHAT")]
    on_error: OnError,
    /// Print JSON lines: each record, with its number as `record` and its `score`.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Log to stderr as JSON lines.
    #[arg(long)]
    json_logs: bool,
}

/// A scored record.
struct Scored {
    score: f32,
    record: u64,
    /// The line to print.
    line: String,
}

pub fn rerank(mut args: RerankArgs) -> ExitCode {
    let log = Log { json: args.json_logs };
    log.ended(log.localise(&mut args.model).and_then(|()| args.run(log)))
}

impl RerankArgs {
    fn run(&self, log: Log) -> Result<(), EmbedError> {
        let device = self.device.choose()?;
        log.notices(device.info());
        let load = |device: &Device| self.load(device);
        let tell = |notice: &str| log.say("notice", notice, json!({}));
        let mut recovery = Recovery::new(|| self.device.choose(), load, tell);
        let loaded = recovery.load(&device).map_err(EmbedError::Model);
        log.findings(&device);
        let mut reranker = loaded?;
        drop(device);
        log.loaded(reranker.name(), reranker.device().info(), json!({}));
        let mut test = TestLosses::from_env();
        let mut score = |texts: &[&str]| {
            recovery.retry(&mut reranker, |reranker| {
                test.step(reranker.device());
                pollster::block_on(reranker.score(&self.query, texts))
            })
        };
        let source = InputSource {
            path: &self.input,
            format: self.io,
            column: &self.column,
            batch_size: 1024,
            read: ReadProgress::default(),
        };
        let input = source.open()?;
        let mut best: Vec<Scored> = Vec::new();
        for rows in input.batches {
            best.extend(self.scored(&mut score, &input.name, rows?, log)?);
            // Ties keep the input order.
            best.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.record.cmp(&b.record)));
            best.truncate(self.top_k.map_or(usize::MAX, usize::from));
        }
        let stdout = Path::new("-");
        let mut out = io::BufWriter::new(io::stdout().lock());
        for scored in best {
            writeln!(out, "{}", scored.line).map_err(|error| EmbedError::write(stdout, error))?;
        }
        out.flush().map_err(|error| EmbedError::write(stdout, error))?;
        log.findings(reranker.device());
        log.unsaved("pipeline cache", reranker.device().save_pipeline_cache());
        Ok(())
    }

    /// The records of a batch that have a text, with the scores from `score`.
    fn scored(
        &self,
        score: impl FnMut(&[&str]) -> Result<Vec<f32>, Error>,
        input: &str,
        mut rows: Records,
        log: Log,
    ) -> Result<Vec<Scored>, EmbedError> {
        let (given, scores) = of_texts(&mut rows, input, &self.column, self.on_error, score)?;
        for bad in &rows.bad {
            log.say("warning", &format!("skipped {bad}"), json!({ "record": bad.record }));
        }
        let texts = rows.texts(&self.column);
        let scored = given.into_iter().zip(scores).map(|(row, score)| {
            let line = self.line(&rows, row, texts[row].unwrap_or_default(), score)?;
            Ok(Scored { score, record: rows.first_record + row as u64, line })
        });
        scored.collect::<serde_json::Result<_>>().map_err(|error| EmbedError::input(input, error))
    }

    fn line(&self, rows: &Records, row: usize, text: &str, score: f32) -> serde_json::Result<String> {
        if !self.json {
            return Ok(format!("{score:.4}\t{}", text.replace(['\n', '\r', '\t'], " ")));
        }
        let mut object: Map<String, Value> = serde_json::from_str(&rows.json(row)?)?;
        object.insert("record".into(), (rows.first_record + row as u64).into());
        // With the digits of an f32, not those of the same value as f64.
        object.insert("score".into(), serde_json::from_str(&serde_json::to_string(&score)?)?);
        serde_json::to_string(&object)
    }

    fn load(&self, device: &Device) -> Result<Reranker, Error> {
        hub::check(&self.model)?;
        let reranker = with_loading_bar(|progress| {
            let options = RerankOptions {
                max_tokens: self.max_tokens,
                sigmoid: self.logits.then_some(false),
                progress: Some(progress),
                ..RerankOptions::default()
            };
            Reranker::load(device, &self.model, options)
        })?;
        let reranker = reranker.with_instruction(self.instruction.as_deref())?;
        // Fails for a model without a tokenizer, before any input is read.
        reranker.encode(&self.query, "")?;
        Ok(reranker)
    }
}
