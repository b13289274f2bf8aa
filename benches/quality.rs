//! Cost of quantisation: perplexity, and how often the most likely token equals that of the unquantised weights. Then
//! the effect of the GPU's tiers on greedy texts. `divergence.py` has the cost of rounding activations.
//!
//! Models come from the folder of test models. Texts are stories sampled from the built-in model: similar to all these
//! models' training data, but written by none of the measured models. In the first table the CPU executor computes in
//! F32, so that only the weights differ.

use std::path::{Path, PathBuf};

use tilewright::{Device, DeviceChoice, GenerateOptions, LoadOptions, Model, Tier};

/// Reference weights, and the quantised ones compared with them. The wide model computes the same function as the
/// narrow one.
const MODELS: [(&str, &[&str]); 3] = [
    (
        "stories260k/stories260k-f32.gguf",
        &["stories260k/stories260k-f16.gguf", "stories260k/stories260k-q8_0.gguf", "stories260k/stories260k-q4_0.gguf"],
    ),
    (
        "stories260k/stories260k-f32.gguf",
        &[
            "stories260k-wide/stories260k-wide-q6_k.gguf",
            "stories260k-wide/stories260k-wide-q5_k_m.gguf",
            "stories260k-wide/stories260k-wide-q4_k_m.gguf",
            "stories260k-wide/stories260k-wide-q4_0.gguf",
            "stories260k-wide/stories260k-wide-q3_k_m.gguf",
            "stories260k-wide/stories260k-wide-q2_k.gguf",
        ],
    ),
    ("tinystories656k", &["tinystories656k/tinystories656k-q8_0.gguf", "tinystories656k/tinystories656k-q5_0.gguf"]),
];

fn main() {
    let folder = std::env::var_os("TILEWRIGHT_DATA").map_or("../shared/data".into(), PathBuf::from);
    if !folder.is_dir() {
        println!("skipped: no folder of test models (TILEWRIGHT_DATA)");
        return;
    }
    let (cpu, stories) = (Device::cpu(), stories());
    let [against, top] = ["against F32", "top-1 as F32"];
    println!("{:<50} {:>9} {:>8} {:>11} {against:>13} {top:>12}", "weights", "bytes", "tokens", "perplexity");
    for (reference, quantised) in MODELS {
        let model = load(&cpu, &folder.join(reference));
        let texts = encode(&model, &stories);
        let exact = logits(&model, &texts);
        let base = report(reference, None, &texts, &exact, &exact);
        for file in quantised {
            let path = folder.join(file);
            report(file, Some((&path, base)), &texts, &logits(&load(&cpu, &path), &texts), &exact);
        }
    }
    println!();
    tiers(&folder, &stories);
}

/// Greedy texts in each tier of the first adapter against the CPU's: where the first of them diverges, and by how much
/// the CPU prefers its own token there.
fn tiers(folder: &Path, stories: &[String]) {
    const PROMPT: usize = 64;
    const TOKENS: usize = 128;
    let (texts, parting) = ("texts", "first parting");
    println!("{:<50} {:<10} {texts:>5} {:>6} {parting:>14} {:>9}", "greedy texts", "tier", "same", "margin");
    for tier in Tier::ALL {
        let device = match pollster::block_on(Device::open(&DeviceChoice::Gpu, Some(tier))) {
            Ok(device) => device,
            Err(reason) => {
                println!("left out: {}: {reason}", tier.name());
                continue;
            }
        };
        for file in MODELS.into_iter().flat_map(|(_, quantised)| quantised) {
            let path = folder.join(file);
            let (exact, model) = (load(&Device::cpu(), &path), load(&device, &path));
            let prompts: Vec<Vec<u32>> =
                encode(&exact, stories).into_iter().map(|text| text[..PROMPT.min(text.len())].to_vec()).collect();
            let (mut n_same, mut first) = (0, None);
            for prompt in &prompts {
                let [want, found] = [&exact, &model].map(|model| greedy(model, prompt, TOKENS));
                match want.iter().zip(&found).position(|(a, b)| a != b) {
                    None => n_same += 1,
                    Some(at) if first.is_none_or(|(earlier, _)| at < earlier) => {
                        let known = [&prompt[..], &want[..at]].concat();
                        let rows = logits(&exact, &[known]);
                        let row = rows[0].last().expect("a nonempty prompt");
                        first = Some((at, row[want[at] as usize] - row[found[at] as usize]));
                    }
                    Some(_) => {}
                }
            }
            let [at, margin] = first.map_or([String::from("-"), String::from("-")], |(at, margin)| {
                [format!("token {}", at + 1), format!("{margin:.1e}")]
            });
            let name = tier.name();
            println!("{file:<50} {name:<10} {:>5} {n_same:>6} {at:>14} {margin:>9}", prompts.len());
        }
    }
}

/// The most likely tokens after a prompt.
fn greedy(model: &Model, prompt: &[u32], n: usize) -> Vec<u32> {
    let options = GenerateOptions { max_tokens: n, temperature: 0.0, ignore_eos: true, ..Default::default() };
    let mut session = model.session().expect("the session fits");
    let mut generation = session.generate_ids(prompt, &options).expect("options are in range");
    let mut ids = Vec::new();
    while let Some(piece) = pollster::block_on(generation.next()) {
        ids.push(piece.expect("the recording runs").id);
    }
    ids
}

/// The most likely token.
fn best(row: &[f32]) -> Option<usize> {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]))
}

fn perplexity(texts: &[Vec<u32>], logits: &[Vec<Vec<f32>>]) -> f64 {
    let (mut surprise, mut n_predicted) = (0.0, 0);
    for (text, logits) in texts.iter().zip(logits) {
        for (row, &next) in logits.iter().zip(&text[1..]) {
            let highest = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = row.iter().map(|&logit| f64::from(logit - highest).exp()).sum();
            surprise += sum.ln() - f64::from(row[next as usize] - highest);
            n_predicted += 1;
        }
    }
    (surprise / f64::from(n_predicted)).exp()
}

fn encode(model: &Model, stories: &[String]) -> Vec<Vec<u32>> {
    stories.iter().map(|story| model.encode(story).expect("the text encodes")).collect()
}

fn load(device: &Device, path: &Path) -> Model {
    Model::load(device, path, LoadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// Stories by the built-in model, the same each time.
fn stories() -> Vec<String> {
    const N_STORIES: u64 = 16;
    let model = Model::builtin(&Device::cpu()).expect("the built-in model loads");
    let story = |seed| {
        let options = GenerateOptions { max_tokens: 300, temperature: 0.8, seed: Some(seed), ..Default::default() };
        let mut session = model.session().expect("the session fits");
        let beginning = "Once upon a time";
        let mut generation = session.generate(beginning, &options).expect("options are in range");
        let mut text = beginning.to_string();
        while let Some(piece) = pollster::block_on(generation.next()) {
            text += &piece.expect("the CPU runs it").text;
        }
        text
    };
    (0..N_STORIES).map(story).collect()
}

/// Logits after each token of each text.
fn logits(model: &Model, texts: &[Vec<u32>]) -> Vec<Vec<Vec<f32>>> {
    let vocab_size = model.config().vocab_size as usize;
    let of = |text: &Vec<u32>| {
        let trace = pollster::block_on(model.trace(text)).expect("the text fits");
        trace.logits.chunks_exact(vocab_size).map(<[f32]>::to_vec).collect()
    };
    texts.iter().map(of).collect()
}

/// Prints a line and returns the perplexity.
fn report(
    name: &str,
    quantised: Option<(&Path, f64)>,
    texts: &[Vec<u32>],
    logits: &[Vec<Vec<f32>>],
    exact: &[Vec<Vec<f32>>],
) -> f64 {
    let (mut n_same, mut n_rows) = (0, 0);
    for (logits, exact) in logits.iter().zip(exact) {
        n_rows += logits.len();
        n_same += logits.iter().zip(exact).filter(|(a, b)| best(a) == best(b)).count();
    }
    let perplexity = perplexity(texts, logits);
    let agreement = 100.0 * n_same as f64 / n_rows as f64;
    let (bytes, ratio) = match quantised {
        Some((path, base)) => {
            let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
            (bytes.to_string(), format!("{:+.2} %", 100.0 * (perplexity / base - 1.0)))
        }
        None => (String::new(), String::new()),
    };
    println!("{name:<50} {bytes:>9} {n_rows:>8} {perplexity:>11.3} {ratio:>13} {agreement:>10.2} %");
    perplexity
}
