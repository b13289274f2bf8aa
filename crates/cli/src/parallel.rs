//! `tilewright run --parallel`: continues each line of a file, with continuous batching.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::time::Instant;

use clap::Args;
use serde_json::json;
use tilewright::engine::{Engine, EngineOptions, Request, Stream};
use tilewright::generate::StopReason;
use tilewright::tokenizer::EncodeOptions;
use tilewright::{Error, GenerateOptions, Model, Recovery};

use super::CommandFailure;

/// Options for a single completion.
const OF_ONE: &[&str] = &["profile", "session", "count", "beams", "tokens_per_submit", "tools"];

#[derive(Args)]
pub struct ParallelArgs {
    /// Continue each line of --prompt-file, N (1-64) at a time, and print the texts in order.
    ///
    /// With --json, prints JSON lines. Each text is the same as in a run of its own; the first one uses the seed, the
    /// next one seed + 1, and so on.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(EngineOptions::MAX_SEQUENCES)),
        requires = "prompt_file",
        conflicts_with_all = OF_ONE
    )]
    pub parallel: Option<u32>,
}

/// The completion of a line.
struct PromptLine<'a> {
    at: usize,
    /// The text to print before the completion.
    prompt: &'a str,
    stream: Stream,
    seed: u64,
}

/// Continues the lines of `prompts` and prints the texts in order: as JSON lines, or as text with or without the
/// prompts.
pub fn run(
    model: &Model,
    recovery: &mut Recovery<'_, Model>,
    (n_at_once, draft_tokens): (u32, u32),
    prompts: (&str, EncodeOptions),
    options: &GenerateOptions,
    shows: (bool, bool),
) -> Result<(), CommandFailure> {
    let engine_options = EngineOptions {
        max_sequences: n_at_once,
        max_queued: n_at_once as usize,
        prompt_lookup: options.prompt_lookup,
        draft_tokens,
        mtp_tokens: options.mtp_tokens,
        // Each text is the same as in a run of its own.
        deterministic: true,
        ..EngineOptions::default()
    };
    let (engine, mut driver) = Engine::new(model, &engine_options)?;
    let start = Instant::now();
    let stats = std::thread::scope(|scope| {
        // Another thread prints, so that neither waits for the other.
        let printer = scope.spawn(move || {
            let printed = print_all(&engine, prompts, options, shows);
            printed.map(|()| engine.stats())
        });
        pollster::block_on(driver.run_with(recovery));
        printer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    summary!(
        "\n{} texts; {} prompt tokens computed, {} cached; {} tokens generated, {:.1} tokens/s",
        stats.n_finished,
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.generated_tokens,
        stats.generated_tokens as f64 / seconds
    );
    Ok(())
}

fn print_all(
    engine: &Engine,
    (prompts, encoding): (&str, EncodeOptions),
    options: &GenerateOptions,
    (as_json, shows_prompt): (bool, bool),
) -> Result<(), CommandFailure> {
    let mut waiting: VecDeque<PromptLine<'_>> = VecDeque::new();
    for (at, prompt) in prompts.lines().enumerate() {
        let ids = engine.model().encode_with(prompt, encoding)?;
        let seed = options.seed.unwrap_or_default().wrapping_add(at as u64);
        let request = Request::new(ids, GenerateOptions { seed: Some(seed), ..options.clone() });
        let stream = loop {
            match engine.submit(request.clone()) {
                // The queue has room once the first text has ended.
                Err(error @ Error::Busy { .. }) => print(waiting.pop_front().ok_or(error)?, as_json)?,
                submitted => break submitted?,
            }
        };
        let prompt = if shows_prompt { prompt } else { "" };
        waiting.push_back(PromptLine { at, prompt, stream, seed });
    }
    waiting.into_iter().try_for_each(|line| print(line, as_json))
}

fn print(PromptLine { at, prompt, mut stream, seed }: PromptLine<'_>, as_json: bool) -> Result<(), CommandFailure> {
    let (mut text, mut token_ids, mut logprobs) = (String::new(), Vec::new(), Vec::new());
    while let Some(piece) = pollster::block_on(stream.next()) {
        let piece = piece?;
        text += &piece.text;
        token_ids.push(piece.id);
        logprobs.extend(piece.logprobs);
    }
    let mut out = io::stdout().lock();
    if as_json {
        let stop_reason = stream.stop_reason().unwrap_or(StopReason::Cancelled);
        let logprobs = (!logprobs.is_empty()).then_some(logprobs);
        let line_json = json!({
            "line": at, "seed": seed, "text": text, "token_ids": token_ids, "logprobs": logprobs,
            "stop_reason": stop_reason, "usage": stream.usage(),
        });
        writeln!(out, "{line_json}")?;
    } else {
        writeln!(out, "{}{prompt}{text}", if at == 0 { "" } else { "---\n" })?;
    }
    Ok(out.flush()?)
}
