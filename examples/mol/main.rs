//! Retrieval by a learned similarity: `cargo run --release --example mol -- [items] [cpu | adapter's name]`.
//!
//! `train.py` made the weights. Items and users are drawn from the world that it describes; each search is compared
//! with brute force.

use std::time::Instant;

use tilewright::bench::normal;
use tilewright::retrieval::mol::{Mol, MolSearch, MolWeights};
use tilewright::{Device, DeviceChoice, Error, WeightType};

const QUERIES: usize = 32;
const K: usize = 10;
const INTERESTS: usize = 3;
const TASTE: usize = 12;

async fn run(n_items: usize, choice: &DeviceChoice) -> Result<(), Error> {
    let device = Device::open(choice, None).await?;
    let weights = MolWeights::from_safetensors(include_bytes!("mol.safetensors"))?;
    let mut mol = Mol::new(&device, &weights, WeightType::F16)?;
    let width = mol.config().item_dim as usize;
    let mut random = normal(1);
    // A taste is an interest plus noise: normal numbers again, with a larger spread.
    let item = |random: &mut dyn Iterator<Item = f32>| -> Vec<f32> {
        (0..width).map(|i| random.next().unwrap_or_default() * if i < TASTE { 1.06 } else { 1.0 }).collect()
    };
    let items: Vec<f32> = (0..n_items).flat_map(|_| item(&mut random)).collect();
    let queries: Vec<f32> = random.take(QUERIES * INTERESTS * TASTE).collect();
    let start = Instant::now();
    mol.append(&items).await?;
    println!("{}: {n_items} items encoded in {:.1} s", device.info().name, start.elapsed().as_secs_f64());

    println!("{QUERIES} queries, the {K} best; recall and speed-up are against brute force");
    let mut exact = None;
    for how in [
        MolSearch::BruteForce,
        MolSearch::TwoPass { candidates: 1000 },
        MolSearch::Naive { per_pair: 10 },
        MolSearch::Naive { per_pair: 100 },
        MolSearch::Naive { per_pair: 200 },
        MolSearch::Highest { candidates: 1000 },
        MolSearch::Highest { candidates: 5000 },
        MolSearch::Highest { candidates: 10_000 },
        MolSearch::Avg { candidates: 1000 },
        MolSearch::Avg { candidates: 4000 },
        MolSearch::Comb { per_pair: 100, candidates: 1000 },
        MolSearch::HIndexer { candidates: 4000, sample: 4096 },
        MolSearch::Mips,
    ] {
        // The first run compiles pipelines.
        mol.search(&queries, &[], K, how).await?;
        let start = Instant::now();
        let found = mol.search(&queries, &[], K, how).await?;
        let seconds = start.elapsed().as_secs_f64();
        let (brute, brute_seconds) = exact.get_or_insert_with(|| (found.clone(), seconds));
        let kept = found
            .hits
            .iter()
            .zip(&brute.hits)
            .map(|(found, brute)| brute.iter().filter(|hit| found.iter().any(|other| other.id == hit.id)).count());
        let recall = kept.sum::<usize>() as f64 / brute.hits.iter().map(Vec::len).sum::<usize>() as f64;
        let scored = found.scored.iter().sum::<usize>() / QUERIES;
        println!(
            "{:45} recall {recall:.4}  {:9.1} ms  {:7.1} x  {scored:7} scored per query",
            format!("{how:?}"),
            seconds * 1e3,
            *brute_seconds / seconds
        );
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let n_items = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(50_000);
    let choice: DeviceChoice = arguments.next().unwrap_or("auto".into()).parse().unwrap_or_default();
    pollster::block_on(run(n_items, &choice))
}
