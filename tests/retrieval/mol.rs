//! Mixtures of logits: weights from files, scores against an f64 oracle of the whole formula, and search results.

use std::collections::HashSet;

use tilewright::kernels::{Combination, Pairing};
use tilewright::retrieval::mol::{Mol, MolHits, MolLoader, MolSearch, MolWeights};
use tilewright::{Device, Error, Tier, WeightType};

use crate::common::{self, Rng, block_on, shared};

const N: usize = 4;
const M: usize = 4;
const D: usize = 8;
const H: usize = 16;
const F: usize = 10;
const QUERY: usize = 6;
const ITEM: usize = 5;

/// A safetensors file under construction.
#[derive(Clone, Default)]
struct File {
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
    metadata: Vec<(String, String)>,
}

impl File {
    fn push(&mut self, name: &str, shape: &[usize], data: Vec<f32>) {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "{name}");
        self.tensors.push((name.into(), shape.to_vec(), data));
    }

    fn set(&mut self, key: &str, value: &str) {
        self.metadata.retain(|(other, _)| other != key);
        self.metadata.push((key.into(), value.into()));
    }

    fn get(&self, name: &str) -> Vec<f64> {
        let found = self.tensors.iter().find(|(other, ..)| other.ends_with(name));
        found.map(|(_, _, data)| data.iter().map(|&x| f64::from(x)).collect()).unwrap_or_default()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = serde_json::Map::new();
        let metadata = self.metadata.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        header.insert("__metadata__".into(), serde_json::Value::Object(metadata));
        let mut data = Vec::new();
        for (name, shape, values) in &self.tensors {
            let begin = data.len();
            values.iter().for_each(|x| data.extend(x.to_le_bytes()));
            let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name.clone(), entry);
        }
        let header = serde_json::Value::Object(header).to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
    }
}

fn normal(rng: &mut Rng, n: usize, scale: f64) -> Vec<f32> {
    (0..n).map(|_| (rng.normal() * scale) as f32).collect()
}

/// All features of RAILS: a gated hidden layer, a user component, three gate parts.
fn rails(seed: u64) -> File {
    let mut rng = Rng::new(seed);
    let mut file = File::default();
    let mut push = |name: &str, shape: &[usize], scale: f64| {
        file.push(&format!("model.{name}"), shape, normal(&mut rng, shape.iter().product(), scale));
    };
    push("_query_embeddings_fn._query_emb_proj_module.1._w", &[QUERY, 2 * F], 0.6);
    push("_query_embeddings_fn._query_emb_proj_module.1._b", &[1, 2 * F], 0.2);
    push("_query_embeddings_fn._query_emb_proj_module.2.weight", &[(N - 1) * D, F], 0.5);
    push("_query_embeddings_fn._query_emb_proj_module.2.bias", &[(N - 1) * D], 0.1);
    push("_query_embeddings_fn._uid_embeddings_0.weight", &[8, D], 1.0);
    push("_item_embeddings_fn._item_emb_proj_module.1.weight", &[M * D, ITEM], 0.6);
    push("_item_embeddings_fn._item_emb_proj_module.1.bias", &[M * D], 0.1);
    push("_gating_fn._query_only_partial_module.0.weight", &[H, QUERY], 0.5);
    push("_gating_fn._query_only_partial_module.0.bias", &[H], 0.5);
    push("_gating_fn._query_only_partial_module.2.weight", &[N * M, H], 0.4);
    push("_gating_fn._item_only_partial_module.1.weight", &[H, ITEM], 0.5);
    push("_gating_fn._item_only_partial_module.1.bias", &[H], 0.5);
    push("_gating_fn._item_only_partial_module.3.weight", &[N * M, H], 0.4);
    push("_gating_fn._qi_partial_module.1.weight", &[H, N * M], 0.1);
    push("_gating_fn._qi_partial_module.1.bias", &[H], 0.1);
    push("_gating_fn._qi_partial_module.3.weight", &[N * M, H], 0.3);
    push("_gating_fn._qi_partial_module.3.bias", &[N * M], 0.1);
    for (key, value) in [("query_components", "4"), ("item_components", "4"), ("temperature", "0.05")] {
        file.set(&format!("mol.{key}"), value);
    }
    file
}

/// As [`rails`], with a gate that depends only on the logits, so that scores are close to the highest logit.
fn decided(seed: u64) -> File {
    let mut file = rails(seed);
    for (name, _, data) in &mut file.tensors {
        if name.contains("_qi_partial_module") {
            let is_weight = name.ends_with("weight");
            data.iter_mut().enumerate().for_each(|(i, x)| *x = f32::from(u8::from(is_weight && i / H == i % H)));
        }
    }
    file
}

/// Aligned pairs after one layer, with a perceptron of both vectors as gate.
fn aligned(seed: u64) -> File {
    let mut rng = Rng::new(seed);
    let mut file = File::default();
    let mut push = |name: &str, shape: &[usize], scale: f64| {
        file.push(name, shape, normal(&mut rng, shape.iter().product(), scale));
    };
    push("_query_embeddings_fn._query_emb_proj_module.1.weight", &[N * D, QUERY], 0.5);
    push("_item_proj_module.1.weight", &[M * D, ITEM], 0.6);
    push("_gating_fn._pair_module.0.weight", &[H, QUERY + ITEM], 0.5);
    push("_gating_fn._pair_module.0.bias", &[H], 0.5);
    push("_gating_fn._pair_module.2.weight", &[N, H], 0.8);
    push("_gating_fn._pair_module.2.bias", &[N], 0.4);
    for (key, value) in [
        ("query_components", "4"),
        ("item_components", "4"),
        ("temperature", "1"),
        ("pairing", "aligned"),
        ("gate_activation", "relu"),
        ("l2_norm", "false"),
    ] {
        file.set(&format!("mol.{key}"), value);
    }
    file
}

/// `w x + b` with `w` as `[out, in]`; a missing bias is zero.
fn layer(file: &File, name: &str, x: &[f64]) -> Vec<f64> {
    let (w, b) = (file.get(&format!("{name}.weight")), file.get(&format!("{name}.bias")));
    let row = |(i, w): (usize, &[f64])| b.get(i).unwrap_or(&0.0) + w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    w.chunks_exact(x.len()).enumerate().map(row).collect()
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// `1 + erf(x / sqrt 2)` by the series of the error function.
fn twice_the_normal(x: f64) -> f64 {
    let a = x / std::f64::consts::SQRT_2;
    let mut term = a;
    let mut sum = a;
    for n in 1..200 {
        term *= -a * a / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    1.0 + sum * std::f64::consts::FRAC_2_SQRT_PI
}

fn components(file: &File, x: Vec<f64>) -> Vec<Vec<f64>> {
    let is_normal = !file.metadata.contains(&("mol.l2_norm".into(), "false".into()));
    let scale = |row: &[f64]| {
        let norm = if is_normal { row.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-6) } else { 1.0 };
        row.iter().map(|x| x / norm).collect()
    };
    x.chunks_exact(D).map(scale).collect()
}

/// The whole formula, from the vectors.
fn score(file: &File, query: &[f32], user: u32, item: &[f32]) -> f64 {
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
    let (q, x) = (wide(query), wide(item));
    let text = |key: &str| file.metadata.iter().find(|(other, _)| other == key).map(|(_, value)| value.as_str());
    let temperature: f64 = text("mol.temperature").unwrap().parse().unwrap();
    let dot = |f: &[f64], g: &[f64]| f.iter().zip(g).map(|(f, g)| f * g).sum::<f64>() / temperature;
    let (l, gate): (Vec<f64>, Vec<f64>) = if text("mol.pairing") == Some("aligned") {
        let f = components(file, layer(file, "_query_emb_proj_module.1", &q));
        let g = components(file, layer(file, "_item_proj_module.1", &x));
        let hidden =
            layer(file, "_pair_module.0", &[q, x].concat()).into_iter().map(|z| z.max(0.0)).collect::<Vec<_>>();
        (f.iter().zip(&g).map(|(f, g)| dot(f, g)).collect(), layer(file, "_pair_module.2", &hidden))
    } else {
        let (w, b) = (file.get("_query_emb_proj_module.1._w"), file.get("_query_emb_proj_module.1._b"));
        let z = |out: usize| b[out] + (0..QUERY).map(|i| w[i * 2 * F + out] * q[i]).sum::<f64>();
        let act = |z: f64| {
            if text("mol.activation") == Some("swiglu") { z * sigmoid(z) } else { z / 2.0 * twice_the_normal(z) }
        };
        let hidden: Vec<f64> = (0..F).map(|out| act(z(out)) * z(F + out)).collect();
        let mut f = layer(file, "_query_emb_proj_module.2", &hidden);
        f.extend(&file.get("_uid_embeddings_0.weight")[(user as usize % 7 + 1) * D..][..D]);
        let (f, g) = (components(file, f), components(file, layer(file, "_item_emb_proj_module.1", &x)));
        let l: Vec<f64> = f.iter().flat_map(|f| g.iter().map(move |g| dot(f, g))).collect();
        let silu = |x: Vec<f64>| -> Vec<f64> { x.into_iter().map(|z| z * sigmoid(z)).collect() };
        let a = layer(file, "_query_only_partial_module.2", &silu(layer(file, "_query_only_partial_module.0", &q)));
        let b = layer(file, "_item_only_partial_module.3", &silu(layer(file, "_item_only_partial_module.1", &x)));
        let c = layer(file, "_qi_partial_module.3", &silu(layer(file, "_qi_partial_module.1", &l)));
        let z: Vec<f64> = (0..N * M).map(|p| a[p] * b[p] + c[p]).collect();
        let mean = z.iter().sum::<f64>() / z.len() as f64;
        let variance = z.iter().map(|z| (z - mean).powi(2)).sum::<f64>() / z.len() as f64;
        let gate = (0..N * M).map(|p| match text("mol.combination") {
            Some("none") => a[p] + b[p] + c[p],
            Some("glu_silu_ln") => z[p] * sigmoid((z[p] - mean) / (variance + 1e-5).sqrt()),
            _ => z[p] * sigmoid(z[p]),
        });
        let gate = gate.collect();
        (l, gate)
    };
    let top = gate.iter().copied().fold(f64::MIN, f64::max);
    let (sum, weights) = gate.iter().zip(&l).fold((0.0, 0.0), |(sum, weights), (gate, l)| {
        let e = (gate - top).exp();
        (sum + e * l, weights + e)
    });
    sum / weights
}

/// Tiers for searches.
const TIERS: [Tier; 2] = [Tier::Baseline, Tier::Scalar];

/// Devices for searches.
fn devices() -> Vec<Device> {
    std::iter::once(common::cpu()).chain(shared::gpus_beside_cpu(TIERS)).collect()
}

fn corpus(device: &Device, file: &File, storage: WeightType, items: &[f32]) -> Mol {
    let weights = MolWeights::from_safetensors(&file.bytes()).expect("the file is valid");
    let mut mol = Mol::new(device, &weights, storage).expect("a form of the kernel");
    // In two parts: ids continue.
    let cut = items.len() / ITEM / 3 * ITEM;
    let parts = [&items[..cut], &items[cut..]].into_iter().filter(|part| !part.is_empty());
    let ids: Vec<_> = parts.map(|part| block_on(mol.append(part)).expect("items are appended")).collect();
    assert_eq!(ids.last().map(|ids| ids.end as usize), Some(items.len() / ITEM));
    mol
}

fn search(mol: &Mol, queries: &[f32], k: usize, how: MolSearch) -> MolHits {
    let users: Vec<u32> = (0..queries.len() / QUERY).map(|i| 3 * i as u32).collect();
    let users = if mol.config().form.pairing == Pairing::Cross { &users[..] } else { &[] };
    block_on(mol.search(queries, users, k, how)).unwrap_or_else(|error| panic!("{how:?}: {error}"))
}

#[test]
fn mol_scores_match_their_formula() {
    let mut rng = Rng::new(5);
    let (queries, items) = (normal(&mut rng, 5 * QUERY, 1.0), normal(&mut rng, 70 * ITEM, 1.0));
    let mut forms = vec![aligned(3)];
    for (combination, activation) in [("glu_silu", "geglu"), ("glu_silu_ln", "swiglu"), ("none", "geglu")] {
        let mut file = rails(2);
        file.set("mol.combination", combination);
        file.set("mol.activation", activation);
        forms.push(file);
    }
    for (device, file) in devices().iter().flat_map(|device| forms.iter().map(move |file| (device, file))) {
        let mol = corpus(device, file, WeightType::F32, &items);
        for how in [MolSearch::Naive { per_pair: 5 }, MolSearch::Highest { candidates: 9 }] {
            search(&mol, &queries, 7, how);
        }
        common::assert_tested(device);
        let found = search(&mol, &queries, 70, MolSearch::BruteForce);
        let (mut noise, mut power) = (0.0, 0.0);
        for (query, hits) in found.hits.iter().enumerate() {
            assert!(hits.len() == 70 && hits.is_sorted_by(|a, b| (b.score, a.id) < (a.score, b.id)), "{query}");
            for hit in hits {
                let [q, x] = [&queries[query * QUERY..][..QUERY], &items[hit.id as usize * ITEM..][..ITEM]];
                let want = score(file, q, 3 * query as u32, x);
                (noise, power) = (noise + (f64::from(hit.score) - want).powi(2), power + want * want);
            }
        }
        println!("{} {:?}: NMSE {:.1e}", device.info().tier, file.metadata.last(), noise / power);
        assert!(noise / power <= 1e-9, "{:?} on {}: NMSE {:.1e}", file.metadata, device.info().name, noise / power);
    }
}

/// The demo page's file, against scores computed in float64 by `scripts/train_search/train.py`.
#[test]
fn demo_page_mol_weights_match_their_f64_reference() {
    let root = env!("CARGO_MANIFEST_DIR");
    let text = std::fs::read_to_string(format!("{root}/tests/data/search/reference.json")).expect("the file exists");
    let reference: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let rows = |name: &str| -> Vec<Vec<f64>> {
        serde_json::from_value(reference[name].clone()).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let flat = |name: &str| rows(name).concat().iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let weights = std::fs::read(format!("{root}/www/mol.safetensors")).expect("the file exists");
    let weights = MolWeights::from_safetensors(&weights).expect("the file is valid");
    for device in devices() {
        let mut mol = Mol::new(&device, &weights, WeightType::F32).expect("a form of the kernel");
        block_on(mol.append(&flat("items"))).expect("items are appended");
        let found = block_on(mol.search(&flat("queries"), &[], 4, MolSearch::BruteForce)).expect("the search succeeds");
        let (name, want) = (&device.info().name, rows("scores"));
        assert_eq!((found.hits.len(), want.concat().len()), (want.len(), 8), "{name}");
        for (query, (hits, want)) in found.hits.iter().zip(&want).enumerate() {
            assert_eq!(hits.len(), want.len(), "query {query} on {name}");
            for hit in hits {
                let (found, want) = (f64::from(hit.score), want[hit.id as usize]);
                assert!((found - want).abs() < 1e-4, "query {query}, item {} on {name}: {found}, {want}", hit.id);
            }
        }
    }
}

/// Corpora on which approximate results look right: equal items, near ties, a single component, sharp gates, zeros.
fn adversarial(rng: &mut Rng, n: usize) -> Vec<(File, Vec<f32>)> {
    let one = normal(rng, ITEM, 1.0);
    let equal: Vec<f32> = (0..n).flat_map(|_| one.clone()).collect();
    let few = normal(rng, 7 * ITEM, 1.0);
    let duplicates: Vec<f32> = (0..n).flat_map(|i| few[i % 7 * ITEM..][..ITEM].to_vec()).collect();
    let near: Vec<f32> =
        (0..n).flat_map(|i| one.iter().map(move |x| x * (1.0 + (i * 37 % 11) as f32 * f32::EPSILON))).collect();
    let random = normal(rng, n * ITEM, 1.0);
    // Gates so sharp that a score equals its highest logit to the last digit.
    let mut sharp = rails(11);
    sharp.set("mol.temperature", "0.0005");
    let mut single = rails(12);
    for (name, _, data) in &mut single.tensors {
        if name.ends_with("_item_emb_proj_module.1.weight") {
            data[D * ITEM..].fill(0.0);
        }
        if name.ends_with("_qi_partial_module.3.bias") {
            data[0] = 40.0;
        }
    }
    vec![(rails(8), equal), (rails(9), duplicates), (rails(10), near), (sharp, random.clone()), (single, random)]
}

#[test]
fn two_pass_search_finds_what_brute_force_finds() {
    let mut rng = Rng::new(77);
    let n_items = 400;
    for device in devices() {
        let random = (0..20).map(|seed| if seed % 2 == 0 { decided(100 + seed) } else { rails(100 + seed) });
        let random: Vec<_> = random.map(|file| (file, normal(&mut rng, n_items * ITEM, 1.0))).collect();
        let mut scored = 0;
        for (i, (file, items)) in random.into_iter().chain(adversarial(&mut rng, n_items)).enumerate() {
            let storage = [WeightType::F16, WeightType::F32, WeightType::Q8_0][i % 3];
            let mol = corpus(&device, &file, storage, &items);
            let queries = normal(&mut rng, 6 * QUERY, 1.0);
            let want = search(&mol, &queries, 10, MolSearch::BruteForce);
            let found = search(&mol, &queries, 10, MolSearch::TwoPass { candidates: 30 });
            assert_eq!(found.hits, want.hits, "corpus {i} on {}", device.info().name);
            scored += if i < 20 && i % 2 == 0 { found.scored.iter().sum::<usize>() } else { 0 };
        }
        let share = scored as f64 / (10 * 6 * n_items) as f64;
        println!("{}: {:.0} % of the items are scored where gates are decided", device.info().tier, 100.0 * share);
        assert!(share < 0.5, "the bound keeps {:.0} % of the items", 100.0 * share);
    }
}

#[test]
fn searches_that_score_everything_are_exact() {
    let mut rng = Rng::new(6);
    let (queries, items) = (normal(&mut rng, 40 * QUERY, 1.0), normal(&mut rng, 100 * ITEM, 1.0));
    for (device, file) in devices().iter().flat_map(|device| [rails(4), aligned(4)].map(|file| (device, file))) {
        let mol = corpus(device, &file, WeightType::F16, &items);
        assert_eq!((mol.len(), mol.config().form.combination), (100, Combination::GluSilu));
        let want = search(&mol, &queries, 7, MolSearch::BruteForce);
        assert_eq!((want.hits.len(), want.scored[39]), (40, 100));
        for how in [
            MolSearch::Avg { candidates: 100 },
            MolSearch::Highest { candidates: 100 },
            MolSearch::Naive { per_pair: 100 },
            MolSearch::Comb { per_pair: 1, candidates: 1000 },
            MolSearch::HIndexer { candidates: 100, sample: 20 },
        ] {
            let found = search(&mol, &queries, 7, how);
            assert_eq!(found, want, "{how:?}");
        }
        for (how, most) in [
            (MolSearch::Avg { candidates: 20 }, 20),
            (MolSearch::Highest { candidates: 20 }, 20),
            (MolSearch::Naive { per_pair: 3 }, 3 * N * M),
            (MolSearch::Comb { per_pair: 2, candidates: 10 }, 2 * N * M + 10),
            (MolSearch::Mips, 0),
        ] {
            let found = search(&mol, &queries, 7, how);
            assert!(
                found.scored.iter().all(|&n| n <= most) && found.hits.iter().all(|hits| hits.len() == 7),
                "{how:?}"
            );
        }
        let found = search(&mol, &queries, 7, MolSearch::HIndexer { candidates: 20, sample: 50 });
        let mean = found.scored.iter().sum::<usize>() as f64 / 40.0;
        assert!((8.0..40.0).contains(&mean), "{mean} items pass, 20 were asked for");
    }
}

/// The device selects up to 1024 candidates, the host more.
#[test]
fn candidates_beyond_the_device_limit_are_still_the_best() {
    const N_ITEMS: usize = 3000;
    let mut rng = Rng::new(9);
    let (queries, items) = (normal(&mut rng, 3 * QUERY, 1.0), normal(&mut rng, N_ITEMS * ITEM, 1.0));
    for device in devices() {
        let mol = corpus(&device, &rails(6), WeightType::F16, &items);
        let all = search(&mol, &queries, N_ITEMS, MolSearch::BruteForce).hits;
        let [few, many] = [1000, 1700].map(|k| search(&mol, &queries, k, MolSearch::Mips).hits);
        let found = search(&mol, &queries, 10, MolSearch::Avg { candidates: 1700 });
        assert_eq!(found.scored, [1700; 3], "{}", device.info().name);
        for (query, many) in many.iter().enumerate() {
            assert!(many.is_sorted_by(|a, b| (b.score, a.id) < (a.score, b.id)) && many.len() == 1700);
            assert_eq!(few[query], many[..1000], "query {query} on {}", device.info().name);
            let ids: HashSet<u32> = many.iter().map(|hit| hit.id).collect();
            let want: Vec<_> = all[query].iter().filter(|hit| ids.contains(&hit.id)).take(10).copied().collect();
            assert_eq!(found.hits[query], want, "query {query} on {}", device.info().name);
        }
    }
}

#[test]
fn repeated_mol_search_creates_nothing_new() {
    let mut rng = Rng::new(14);
    let (queries, items) = (normal(&mut rng, 7 * QUERY, 1.0), normal(&mut rng, 200 * ITEM, 1.0));
    for device in std::iter::once(common::cpu()).chain(common::gpus_beside_cpu(TIERS)) {
        // Two shards.
        let mut mol = corpus(&device, &rails(4), WeightType::F16, &items);
        for (how, submits) in [
            // Encoding, one selection per shard, the merge.
            (MolSearch::BruteForce, 1 + 2 + 1),
            (MolSearch::Mips, 1 + 2 + 1),
            // And the candidates' scores in each shard.
            (MolSearch::Avg { candidates: 60 }, 1 + 2 + 1 + 2),
            (MolSearch::Highest { candidates: 60 }, 1 + 2 + 1 + 2),
        ] {
            let first = search(&mol, &queries, 5, how);
            let before = device.counters();
            assert_eq!(search(&mol, &queries, 5, how), first, "{how:?}");
            let made = device.counters() - before;
            assert_eq!(
                [made.buffers_created, made.bind_groups_created, made.pipelines_created, made.submits],
                // A GPU copies the queries' components and gates separately.
                [0, 0, 0, submits + if device.is_gpu() { 2 } else { 0 }],
                "{how:?} on {}",
                device.info().name
            );
        }
        // Recordings are invalidated by a change.
        let better: Vec<f32> = normal(&mut rng, 50 * ITEM, 3.0);
        block_on(mol.append(&better)).expect("items are appended");
        let found = search(&mol, &queries, 250, MolSearch::BruteForce);
        assert!(found.hits.iter().all(|hits| hits.len() == 250));
    }
}

#[test]
fn chosen_mol_search_reaches_the_requested_recall() {
    let mut rng = Rng::new(16);
    let (queries, items) = (normal(&mut rng, 32 * QUERY, 1.0), normal(&mut rng, 6000 * ITEM, 1.0));
    let users: Vec<u32> = (0..32).collect();
    let mol = corpus(&common::cpu(), &decided(21), WeightType::F16, &items);
    let choice = block_on(mol.choose(&queries, &users, 10, 0.9)).expect("the queries are valid");
    let (first, best) = (&choice.trials[0], &choice.trials[choice.best]);
    assert_eq!((first.how, first.recall, first.scored), (MolSearch::BruteForce, 1.0, 6000.0));
    assert!(best.recall >= 0.9 && best.seconds <= first.seconds, "{best:?}");
    let exact = block_on(mol.search(&queries, &users, 10, MolSearch::BruteForce)).expect("the queries are valid");
    for trial in &choice.trials {
        let found = block_on(mol.search(&queries, &users, 10, trial.how)).expect("the queries are valid");
        let mut n_found = 0;
        for (found, exact) in found.hits.iter().zip(&exact.hits) {
            n_found += exact.iter().filter(|hit| found.contains(hit)).count();
        }
        assert!((n_found as f64 / 320.0 - trial.recall).abs() < 1e-9, "{trial:?} found {n_found}");
    }
    let refused = block_on(mol.choose(&queries, &users, 10, 1.5));
    assert!(matches!(refused, Err(Error::Option { option: "recall", .. })), "{refused:?}");
}

#[test]
fn concurrent_mol_searches_do_not_interfere() {
    let mut rng = Rng::new(15);
    let (queries, items) = (normal(&mut rng, 32 * QUERY, 1.0), normal(&mut rng, 300 * ITEM, 1.0));
    let mol = corpus(&common::cpu(), &rails(4), WeightType::F16, &items);
    let alone: Vec<MolHits> =
        queries.chunks(8 * QUERY).map(|part| search(&mol, part, 9, MolSearch::TwoPass { candidates: 20 })).collect();
    std::thread::scope(|scope| {
        for (part, alone) in queries.chunks(8 * QUERY).zip(&alone) {
            let mol = &mol;
            scope.spawn(move || {
                for _ in 0..20 {
                    assert_eq!(search(mol, part, 9, MolSearch::TwoPass { candidates: 20 }), *alone);
                }
            });
        }
    });
}

#[test]
fn invalid_mol_weights_and_inputs_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut File), named: &str| {
        let mut file = rails(1);
        change(&mut file);
        match MolWeights::from_safetensors(&file.bytes()) {
            Err(Error::Config { field, .. } | Error::Format { field, .. }) => {
                assert!(field.contains(named), "`{named}` expected, `{field}` named");
            }
            other => panic!("{named}: {:?}", other.map(|weights| weights.config().clone())),
        }
    };
    let without = |name: &'static str| move |file: &mut File| file.tensors.retain(|(other, ..)| !other.contains(name));
    refused(&|file| file.metadata.clear(), "mol.query_components");
    refused(&|file| file.set("mol.query_components", "65"), "mol.query_components");
    refused(&|file| file.set("mol.query_components", "5"), "components");
    refused(&|file| file.set("mol.temperature", "0"), "mol.temperature");
    refused(&|file| file.set("mol.combination", "glu"), "mol.combination");
    refused(&|file| file.set("mol.pairing", "aligned"), "_pair_module");
    refused(&without("_query_emb_proj_module"), "_query_emb_proj_module");
    refused(&without("_query_emb_proj_module.1._b"), "_query_emb_proj_module.1._b");
    refused(&without("_item_emb_proj_module"), "_item_emb_proj_module");
    refused(&without("_query_only_partial_module"), "mol.combination");
    for (name, shape) in [("_uid_embeddings_0", vec![1, D]), ("_qi_partial_module.3.weight", vec![N * M, H - 1])] {
        let change = |file: &mut File| {
            for (other, dims, data) in &mut file.tensors {
                if other.contains(name) {
                    data.truncate(shape.iter().product());
                    dims.clone_from(&shape);
                }
            }
        };
        refused(&change, name);
    }
    refused(&|file| file.tensors[3].2[1] = f32::NAN, "_query_emb_proj_module.2.bias");
    let bytes = rails(1).bytes();
    assert!(matches!(MolWeights::from_safetensors(&bytes[..bytes.len() - 4]), Err(Error::Format { .. })));

    // The same in pieces, with and without a length.
    let whole = MolWeights::from_safetensors(&bytes).expect("the file is valid");
    for (at_once, len) in [(1, None), (1000, Some(bytes.len() as u64)), (usize::MAX, None)] {
        let mut loader = MolLoader::new(len);
        while let Some(start) = loader.wanted() {
            let rest = &bytes[start as usize..];
            loader.push(&rest[..rest.len().min(at_once)]).expect("the file is valid");
        }
        let weights = loader.finish().expect("the file is valid");
        assert_eq!(format!("{weights:?}"), format!("{whole:?}"));
    }
    let mut loader = MolLoader::new(None);
    loader.push(&bytes[..bytes.len() - 4]).expect("a valid prefix");
    assert!(matches!(loader.end(), Err(Error::Truncated { .. })));

    let device = common::cpu();
    let mut named = rails(1);
    named.set("model", "an encoder");
    let named = MolWeights::from_safetensors(&named.bytes()).expect("the file is valid");
    let weights = MolWeights::from_safetensors(&bytes).expect("the file is valid");
    assert_eq!((named.model(), weights.model()), (Some("an encoder"), None));
    assert!(matches!(Mol::new(&device, &weights, WeightType::Q4_0), Err(Error::Option { option: "storage", .. })));
    let mut mol = Mol::new(&device, &weights, WeightType::F16).expect("a form of the kernel");
    let option = |result: Result<(), Error>| match result {
        Err(Error::Option { option, found, .. }) => format!("{option}: {found}"),
        other => panic!("{other:?}"),
    };
    let mut items = vec![1.0; 3 * ITEM];
    assert_eq!(option(block_on(mol.append(&items[1..])).map(drop)), "items: 14 numbers");
    items[2 * ITEM] = f32::NAN;
    assert_eq!(option(block_on(mol.append(&items)).map(drop)), "items: NaN in vector 2");
    items[2 * ITEM] = 0.0;
    assert!(mol.is_empty() && block_on(mol.append(&items)).is_ok());
    let query = [1.0; QUERY];
    let ask = |query: &[f32], users: &[u32], k, how| option(block_on(mol.search(query, users, k, how)).map(drop));
    assert_eq!(ask(&query[1..], &[1], 1, MolSearch::Mips), "queries: 5 numbers");
    assert_eq!(ask(&query, &[], 1, MolSearch::Mips), "users: 0");
    assert_eq!(ask(&query, &[1], 0, MolSearch::Mips), "k: 0");
    assert_eq!(ask(&query, &[1], 1, MolSearch::Naive { per_pair: 0 }), "search: Naive { per_pair: 0 }");
}
