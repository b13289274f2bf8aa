//! Greedy continuations of token ids, to compare with other implementations: reads one JSON object per line on stdin,
//! writes one array of ids per line on stdout.
//!
//! `echo '{"model":"model.gguf","device":"cpu","prompt":[1],"n_tokens":8}' | cargo run --example continue_ids`

use std::error::Error;
use std::io::{BufRead, stdin};
use std::path::PathBuf;

use serde::Deserialize;
use tilewright::kernels::KvType;
use tilewright::{Device, DeviceChoice, GenerateOptions, LoadOptions, Model};

#[derive(Deserialize)]
struct Case {
    /// GGUF file, or folder with config.json and safetensors.
    model: PathBuf,
    /// `cpu`, `gpu`, or a part of an adapter's name.
    device: String,
    prompt: Vec<u32>,
    n_tokens: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut loaded: Option<(PathBuf, String, Model)> = None;
    for line in stdin().lock().lines() {
        let case: Case = serde_json::from_str(&line?)?;
        // The device caches pipelines, so models on the same device do not compile them again.
        let device = match &loaded {
            Some((_, name, model)) if *name == case.device => model.device().clone(),
            _ => pollster::block_on(Device::open(&case.device.parse::<DeviceChoice>()?, None))?,
        };
        // Cases of one model usually follow each other.
        let model = match loaded.take() {
            Some((path, name, model)) if path == case.model && name == case.device => model,
            _ => {
                // Other implementations do not round, so neither do we.
                let options = LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() };
                Model::load(&device, &case.model, options)?
            }
        };
        let mut session = model.session()?;
        let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(case.n_tokens) };
        let mut generation = session.generate_ids(&case.prompt, &options)?;
        let mut ids = Vec::new();
        while let Some(piece) = pollster::block_on(generation.next()) {
            ids.push(piece?.id);
        }
        println!("{}", serde_json::to_string(&ids)?);
        loaded = Some((case.model, case.device, model));
    }
    Ok(())
}
