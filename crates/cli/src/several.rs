//! Several completions of one prompt: sampled one after the other, or by beam search.

use std::io::{self, Write};

use clap::Args;
use serde_json::{Value, json};
use tilewright::generate::{BeamOptions, StopReason};
use tilewright::{Error, GenerateOptions, Session};

use super::{CommandFailure, print_json};

/// Sampling options and options about single tokens, which beam search does not support.
const OF_DRAWS: [&str; 14] = [
    "count",
    "profile",
    "session",
    "logprobs",
    "seed",
    "stop",
    "slide",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "draft",
    "prompt_lookup",
    "mtp",
];

#[derive(Args)]
pub struct SeveralArgs {
    /// Print the N best texts of a beam search, best first, each after its mean log-probability per token.
    #[arg(long, value_name = "N", conflicts_with_all = OF_DRAWS)]
    beams: Option<usize>,
    /// Generate N texts from the prompt, with the seed, seed + 1 and so on.
    ///
    /// Prefill runs once.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..),
        conflicts_with_all = ["profile", "session", "logprobs", "draft"]
    )]
    count: Option<u64>,
}

/// How completions are printed.
pub struct Output<'a> {
    /// As one JSON object.
    pub json: bool,
    /// Token ids instead of text.
    pub ids: bool,
    /// Text before each completion.
    pub prompt: &'a str,
}

impl SeveralArgs {
    /// Prints the completions, or their token ids, and returns `true` if several are requested.
    pub fn print(
        &self,
        session: &mut Session,
        prompt_ids: &[u32],
        options: &GenerateOptions,
        output: &Output<'_>,
    ) -> Result<bool, CommandFailure> {
        match (self.beams, self.count) {
            (Some(width), _) => print_beams(session, prompt_ids, options, width, output)?,
            (None, Some(count)) => print_drawn(session, prompt_ids, options, count, output)?,
            (None, None) => return Ok(false),
        }
        Ok(true)
    }
}

fn print_beams(
    session: &Session,
    prompt_ids: &[u32],
    options: &GenerateOptions,
    width: usize,
    output: &Output<'_>,
) -> Result<(), CommandFailure> {
    refuse_constraint(options)?;
    let model = session.model();
    let beam = BeamOptions {
        width,
        max_tokens: options.max_tokens,
        stop_ids: options.stop_ids.clone(),
        ignore_eos: options.ignore_eos,
        ..BeamOptions::default()
    };
    let beams = pollster::block_on(model.beam_search(prompt_ids, &beam))?;
    let text = |ids: &[u32]| match output.ids {
        true => Ok(shown(ids)),
        false => model.tokenizer()?.decode(ids, true),
    };
    if output.json {
        let rows = beams.iter().map(|beam| Ok(json!({ "text": text(&beam.ids)?, "beam": beam })));
        let beams = rows.collect::<Result<Vec<Value>, Error>>()?;
        return print_json(&json!({ "model": model.name(), "prompt_token_ids": prompt_ids, "beams": beams }));
    }
    let mut out = io::stdout().lock();
    for beam in beams {
        let text = output.prompt.to_owned() + &text(&beam.ids)?;
        writeln!(out, "{:.4}\t{}", beam.score, text.escape_debug())?;
    }
    Ok(())
}

fn shown(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Refuses a constraint, which beam search does not support.
fn refuse_constraint(options: &GenerateOptions) -> Result<(), Error> {
    if options.constraint.is_some() {
        let (expected, found) = ("no constraint".into(), "a constraint".into());
        return Err(Error::Option { option: "beams", expected, found });
    }
    let _ = options;
    Ok(())
}

fn print_drawn(
    session: &mut Session,
    prompt_ids: &[u32],
    options: &GenerateOptions,
    count: u64,
    output: &Output<'_>,
) -> Result<(), CommandFailure> {
    let mut texts = Vec::new();
    for i in 0..count {
        let options = GenerateOptions { seed: options.seed.map(|seed| seed.wrapping_add(i)), ..options.clone() };
        let mut generation = session.generate_from(prompt_ids, &options)?;
        let (mut text, mut token_ids) = (String::new(), Vec::new());
        while let Some(piece) = pollster::block_on(generation.next()) {
            let piece = piece?;
            text += &piece.text;
            token_ids.push(piece.id);
        }
        let stop_reason = generation.stop_reason().unwrap_or(StopReason::Cancelled);
        if output.json {
            let prefill = generation.prefill();
            texts.push(json!({
                "seed": options.seed,
                "token_ids": token_ids,
                "text": text,
                "stop_reason": stop_reason,
                "prefill": prefill,
            }));
        } else {
            let mut out = io::stdout().lock();
            let text = if output.ids { shown(&token_ids) } else { text };
            writeln!(out, "{}{}{text}\n", if i == 0 { "" } else { "---\n" }, output.prompt)?;
        }
    }
    match output.json {
        true => print_json(&json!({ "model": session.model().name(), "prompt_token_ids": prompt_ids, "texts": texts })),
        false => Ok(()),
    }
}
