//! Inspection of passes: attention weights against their definition in f64, and kernel times.

use std::path::{Path, PathBuf};

use tilewright::kernels::KvType;
use tilewright::{Clock, Device, Error, GenerateOptions, LoadOptions, Model, Session};

use super::common::shared::executors;
use super::common::{self, References, block_on};

fn tiny(name: &str) -> Option<PathBuf> {
    Some(common::data(&["tiny-random"])?.join("tiny-random").join(name))
}

fn load(device: &Device, path: &Path, kv_type: KvType) -> Model {
    // Small passes, so that caches of window layers wrap around.
    let options =
        LoadOptions { kv_type, context_length: Some(64), max_pass: Some(8), exact: true, ..LoadOptions::default() };
    Model::load(device, path, options).unwrap_or_else(|e| panic!("{e}"))
}

fn generated(model: &Model, prompt: &[u32], n: usize) -> Session {
    let mut session = model.session().unwrap();
    go_on(&mut session, prompt, n);
    session
}

fn go_on(session: &mut Session, ids: &[u32], n: usize) -> Vec<u32> {
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n) };
    common::collect(&mut session.generate_ids(ids, &options).unwrap()).0
}

/// Attention of an architecture with half-style RoPE, following the paper or the published code.
struct Oracle {
    name: &'static str,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    theta: f64,
    scale: f64,
    cap: Option<f64>,
    /// By layer.
    window: fn(usize) -> Option<usize>,
    /// Offset of the norm's weights.
    one: f64,
    eps: f64,
}

const ORACLES: [Oracle; 3] = [
    Oracle {
        name: "mistral-sliding",
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        theta: 1e4,
        scale: 0.25,
        cap: None,
        window: |_| Some(8),
        one: 0.0,
        eps: 1e-6,
    },
    Oracle {
        name: "gemma2",
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        theta: 1e4,
        scale: 0.204_124_145_231_931_5,
        cap: Some(2.0),
        window: |layer| (layer % 2 == 0).then_some(8),
        one: 1.0,
        eps: 1e-6,
    },
    Oracle {
        name: "qwen2",
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        theta: 1e6,
        scale: 0.25,
        cap: None,
        window: |_| None,
        one: 0.0,
        eps: 1e-6,
    },
];

impl Oracle {
    /// Heads of a projection of the residual stream, rotated, by position.
    fn heads(&self, file: &References, of: &str, layer: usize, hidden: &[f32], n_heads: usize) -> Vec<Vec<Vec<f64>>> {
        let dim = 64;
        let floats = |name: &str| -> Vec<f64> {
            file.floats(&format!("model.layers.{layer}.{name}")).into_iter().map(f64::from).collect()
        };
        let norm = floats("input_layernorm.weight");
        let matrix = floats(&format!("self_attn.{of}_proj.weight"));
        let bias = format!("self_attn.{of}_proj.bias");
        let bias = if file.has(&format!("model.layers.{layer}.{bias}")) {
            floats(&bias)
        } else {
            vec![0.0; matrix.len() / dim]
        };
        let at = |(position, h): (usize, &[f32])| {
            let mean = h.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / dim as f64;
            let x: Vec<f64> =
                h.iter().zip(&norm).map(|(&x, w)| f64::from(x) / (mean + self.eps).sqrt() * (self.one + w)).collect();
            let row = |r: usize| bias[r] + (0..dim).map(|c| matrix[r * dim + c] * x[c]).sum::<f64>();
            let half = self.head_dim / 2;
            let turned = |head: usize| {
                let y: Vec<f64> = (0..self.head_dim).map(|i| row(head * self.head_dim + i)).collect();
                let angle = |i: usize| position as f64 * self.theta.powf(-((i % half) as f64) / half as f64);
                let other = |i: usize| if i < half { -y[i + half] } else { y[i - half] };
                (0..self.head_dim).map(|i| y[i] * angle(i).cos() + other(i) * angle(i).sin()).collect()
            };
            (0..n_heads).map(turned).collect()
        };
        hidden.chunks_exact(dim).enumerate().map(at).collect()
    }

    /// `[T, T]`.
    fn weights(&self, file: &References, layer: usize, head: usize, hidden: &[f32]) -> Vec<Vec<f64>> {
        let queries = self.heads(file, "q", layer, hidden, self.n_heads);
        let keys = self.heads(file, "k", layer, hidden, self.n_kv_heads);
        let group = head / (self.n_heads / self.n_kv_heads);
        let row = |(t, query): (usize, &Vec<Vec<f64>>)| {
            let score = |(s, key): (usize, &Vec<Vec<f64>>)| {
                if s > t || (self.window)(layer).is_some_and(|window| t - s >= window) {
                    return 0.0;
                }
                let dot: f64 = query[head].iter().zip(&key[group]).map(|(q, k)| q * k).sum();
                let score = self.scale * dot;
                self.cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
            };
            let weights: Vec<f64> = keys.iter().enumerate().map(score).collect();
            let sum: f64 = weights.iter().sum();
            weights.into_iter().map(|weight| weight / sum).collect()
        };
        queries.iter().enumerate().map(row).collect()
    }
}

#[test]
fn head_weights_are_the_softmax_of_their_scores() {
    for oracle in &ORACLES {
        let Some(path) = tiny(oracle.name) else { return };
        let file = References::open(&path.join("model.safetensors"));
        for device in executors() {
            let kinds = [(KvType::F32, 2e-4), (KvType::F16, 3e-3), (KvType::Q8_0, 0.05)];
            // Every head and layer where that is cheap.
            let n_kinds = if device.is_gpu() { 2 } else { 3 };
            for (kv_type, tolerance) in &kinds[..n_kinds] {
                let model = load(&device, &path, *kv_type);
                let mut session = generated(&model, &(3..30).collect::<Vec<_>>(), 14);
                let hidden = block_on(model.trace(session.tokens())).unwrap().hidden;
                let n = session.tokens().len();
                let mut worst = 0.0f64;
                let heads = if device.is_gpu() { vec![(1, 2)] } else { vec![(0, 0), (1, 1), (1, 2), (2, 3)] };
                // One query, a pass with idle rows, several passes, and all tokens.
                for ((layer, head), n_queries) in heads.into_iter().flat_map(|of| [1, 5, 19, 100].map(|n| (of, n))) {
                    let got = block_on(session.head_weights(layer, head, n_queries)).unwrap();
                    let rows = n_queries.min(n);
                    assert_eq!((got.rows, got.columns, got.weights.len()), (rows, n, rows * n));
                    let want = oracle.weights(&file, layer, head, &hidden[layer]);
                    for (got, want) in got.weights.chunks_exact(n).zip(&want[n - rows..]) {
                        let sum: f32 = got.iter().sum();
                        assert!((sum - 1.0).abs() < 1e-5, "{}: a row's sum is {sum}", oracle.name);
                        assert!(got.iter().zip(want).all(|(&got, &want)| want > 0.0 || got == 0.0));
                        worst = got
                            .iter()
                            .zip(want)
                            .fold(worst, |worst, (&got, want)| worst.max((f64::from(got) - want).abs()));
                    }
                }
                println!("{} on {}, {kv_type}: weights within {worst:.1e}", oracle.name, device.info().name);
                assert!(worst < *tolerance, "{} on {}, {kv_type}: {worst}", oracle.name, device.info().name);
            }
        }
    }
}

/// The first token attends to itself and the sink only, for any angles: only YaRN's factor matters.
#[test]
fn attention_sinks_take_a_part_of_each_row() {
    let Some(path) = tiny("gpt-oss") else { return };
    let file = References::open(&path.join("model.safetensors"));
    // The factor applies twice: to query and key.
    let scale = 0.25 * (0.1 * 4f64.ln() + 1.0).powi(2);
    let oracle = Oracle { scale, eps: 1e-5, ..ORACLES[2] };
    let model = load(&common::cpu(), &path, KvType::F32);
    let mut session = generated(&model, &[5, 6, 7, 8], 4);
    let hidden = block_on(model.trace(session.tokens())).unwrap().hidden;
    for (layer, head) in [(0, 1), (1, 3)] {
        let got = block_on(session.head_weights(layer, head, 8)).unwrap();
        let first = &hidden[layer][..64];
        let dot: f64 = {
            let query = &oracle.heads(&file, "q", layer, first, 4)[0][head];
            let key = &oracle.heads(&file, "k", layer, first, 2)[0][head / 2];
            query.iter().zip(key).map(|(q, k)| q * k).sum()
        };
        let sink = f64::from(file.floats(&format!("model.layers.{layer}.self_attn.sinks"))[head]);
        let want = 1.0 / (1.0 + (sink - oracle.scale * dot).exp());
        assert!((f64::from(got.weights[0]) - want).abs() < 1e-4, "{} is not {want}", got.weights[0]);
        for row in got.weights.chunks_exact(8) {
            let sum: f32 = row.iter().sum();
            assert!(sum > 0.0 && sum < 0.999, "{sum}");
        }
    }
}

/// Inspection does not change the following tokens, even with recurrent states or short windows.
#[test]
fn inspecting_a_session_does_not_change_its_output() {
    for name in ["qwen2", "gemma4", "lfm2", "mistral-sliding"] {
        let Some(path) = tiny(name) else { return };
        let model = load(&common::cpu(), &path, KvType::F16);
        let layer = model.config().blocks.iter().position(|block| block.recurrence.is_none()).unwrap();
        let prompt: Vec<u32> = (5..30).collect();
        let [mut plain, mut asked] = [(); 2].map(|()| generated(&model, &prompt, 6));
        for n_queries in [1, 2, 20] {
            let timeline = block_on(asked.timeline()).unwrap();
            assert_eq!(timeline.position, asked.tokens().len() - 1, "{name}");
            block_on(asked.head_weights(layer, 0, n_queries)).unwrap();
            assert_eq!(asked.tokens(), plain.tokens(), "{name}");
            assert_eq!(asked.n_cached(), asked.tokens().len(), "{name}");
            assert_eq!(go_on(&mut asked, &[], 3), go_on(&mut plain, &[], 3), "{name} after {n_queries}");
        }
    }
}

#[test]
fn a_timeline_has_every_dispatch_of_a_decode_pass() {
    for device in common::executors() {
        let model = Model::builtin(&device).unwrap();
        let mut session = model.session().unwrap();
        common::collect(&mut session.generate("Once upon a time", &GenerateOptions::greedy(3)).unwrap());
        block_on(session.timeline()).unwrap();
        let before = device.counters().dispatches;
        let timeline = block_on(session.timeline()).unwrap();
        let n = timeline.dispatches.len();
        assert_eq!(device.counters().dispatches - before, n as u64);
        assert_eq!(n, session.decode_dispatches());
        assert_eq!(timeline.clock, if device.is_gpu() { Clock::Gpu } else { Clock::Cpu });
        let names: Vec<&str> = timeline.dispatches.iter().map(|dispatch| dispatch.kernel).collect();
        assert_eq!((names[0], names[n - 1]), ("embed", "advance"));
        assert!(timeline.dispatches.iter().all(|it| it.variant.starts_with(it.kernel) && !it.grid.contains(&0)));
        // Between them the layers in order, each with the same number of dispatches.
        let layers: Vec<_> = timeline.dispatches.chunk_by(|a, b| a.layer == b.layer).collect();
        let n_layers = model.config().n_layers();
        assert_eq!(layers.len() as u32, n_layers + 2);
        for (layer, dispatches) in (0..n_layers).zip(&layers[1..]) {
            assert_eq!(dispatches[0].layer, Some(layer));
            let n_attention = dispatches.iter().filter(|it| it.kernel == "attention_decode").count();
            assert_eq!((dispatches.len(), n_attention), (layers[1].len(), 1));
        }
        assert_eq!((layers[0][0].layer, layers[layers.len() - 1][0].layer), (None, None));
        assert_eq!(timeline.total(), timeline.dispatches.iter().map(|it| it.time).sum());
        assert!(timeline.total().as_nanos() > 0);
    }
}

#[test]
fn invalid_inspection_requests_are_refused_by_name() {
    let Some(path) = tiny("lfm2") else { return };
    let model = load(&common::cpu(), &path, KvType::F16);
    let mut session = model.session().unwrap();
    for error in [block_on(session.timeline()).unwrap_err(), block_on(session.head_weights(0, 0, 1)).unwrap_err()] {
        assert!(matches!(error, Error::Tokenizer { .. }), "{error}");
    }
    let mut session = generated(&model, &[5, 6, 7], 2);
    let blocks = &model.config().blocks;
    let recurrent = blocks.iter().position(|block| block.recurrence.is_some()).unwrap();
    let with_keys = blocks.iter().position(|block| block.recurrence.is_none()).unwrap();
    for (layer, head, n_queries, option, part) in [
        (blocks.len(), 0, 1, "layer", "below"),
        (recurrent, 0, 1, "layer", "a layer with attention"),
        (with_keys, 99, 1, "head", "99"),
        (with_keys, 0, 0, "last_queries", "1 to"),
    ] {
        let error = block_on(session.head_weights(layer, head, n_queries)).unwrap_err();
        let named = matches!(&error, Error::Option { option: found, .. } if *found == option);
        assert!(named && error.to_string().contains(part), "{error}");
    }
}
