//! The tools beside the engine, as a user types them: `perplexity`, `imatrix`, `split`, `merge`, `tokenize` and
//! `detokenize`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tilewright::formats::block::dequantize;
use tilewright::formats::gguf::Gguf;
use tilewright::generate::importance::ImportanceRun;
use tilewright::generate::perplexity::TextWindows;
use tilewright::{Device, LoadOptions, Model};

const BUILTIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf");
const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data");
const STORY: &str = include_str!("story.txt");

/// Runs the program with this stdin.
fn run(args: &[&str], stdin: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(args).env("TILEWRIGHT_CACHE_DIR", "").env("TILEWRIGHT_DEVICE", "cpu");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that fails early does not read.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn printed(args: &[&str], stdin: &str) -> String {
    let output = run(args, stdin);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

fn json(args: &[&str], stdin: &str) -> Value {
    serde_json::from_str(&printed(args, stdin)).unwrap()
}

fn fails(args: &[&str], code: i32, expected: &str) {
    let output = run(args, "");
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
    assert!(message.contains(expected) && !message.contains("panicked"), "{args:?}: {message}");
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("tools").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn near(found: &Value, expected: f64, share: f64) -> bool {
    found.as_f64().is_some_and(|found| (found / expected - 1.0).abs() <= share)
}

/// Of llama.cpp, build 11739, by `llama_decode` over the same windows of the same file, whose weights are F32.
#[test]
fn perplexity_equals_that_of_llama_cpp() {
    const LLAMA: (f64, f64) = (4106.992468839312, 1706.4947149918917);
    let folder = folder("perplexity");
    let model = folder.join("f32.gguf");
    printed(&["quantize", BUILTIN, path(&model), "F32"], "");
    let found = json(&["perplexity", path(&model), "-f", "-", "-c", "64", "--json"], STORY);
    assert_eq!((&found["windows"], &found["tokens"]), (&5.into(), &155.into()), "{found}");
    assert!(near(&found["perplexity"]["value"], LLAMA.0, 1e-4), "{found}");
    assert!(near(&found["perplexity"]["error"], LLAMA.1, 1e-4), "{found}");
    let shown = printed(&["perplexity", "-f", "-", "--ctx", "64", "--chunks", "2"], STORY);
    assert!(shown.starts_with("perplexity  ") && shown.ends_with("62 tokens scored in 2 windows of 64\n"), "{shown}");
    fails(&["perplexity", BUILTIN], 2, "--file <FILE>");
    let story = folder.join("story.txt");
    std::fs::write(&story, STORY).unwrap();
    fails(&["perplexity", BUILTIN, "-f", path(&story)], 2, "--ctx is 512, expected at most the text's ");
    fails(&["perplexity", BUILTIN, "-f", path(&story), "-c", "2"], 2, "expected 4 or more");
    fails(&["perplexity", BUILTIN, "-f", path(&story), "-c", "100000"], 2, "-c is 100000, expected 1 to");
}

/// A model has no divergence from itself, and a coarser one has, by the same sum in f64 over whole distributions.
#[test]
fn divergence_from_recorded_predictions_matches_a_direct_sum() {
    let folder = folder("divergence");
    let (base, coarse) = (folder.join("base.kld"), folder.join("coarse.gguf"));
    printed(&["quantize", BUILTIN, path(&coarse), "Q4_0", "--pure"], "");
    let recorded = ["perplexity", BUILTIN, "-f", "-", "-c", "48", "--chunks", "3", "--exact", "--json"];
    let own = json(&[&recorded[..], &["--kl-save", path(&base)]].concat(), STORY);
    let same = json(&["perplexity", BUILTIN, "--kl", path(&base), "--exact", "--json"], "");
    let kl = |found: &Value| found["divergence"]["kl"]["value"].as_f64().unwrap();
    // Predictions are recorded in 65,536 steps.
    assert!(kl(&same).abs() < 1e-5 && same["divergence"]["same_top"]["value"] == 1.0, "{same}");
    assert_eq!(same["perplexity"], own["perplexity"]);

    let found = json(&["perplexity", path(&coarse), "--kl", path(&base), "--exact", "--json"], "");
    let device = Device::cpu();
    let models = [Path::new(BUILTIN), &coarse].map(|file| Model::load(&device, file, LoadOptions::default()).unwrap());
    let ids = models[0].encode(STORY).unwrap();
    let (mut sum, mut n_same, mut n) = (0.0, 0, 0);
    for window in ids.chunks_exact(48).take(3) {
        let bos = models[0].tokenizer().unwrap().bos_id().unwrap();
        let window = [&[bos], &window[1..47]].concat();
        let logits = models.each_ref().map(|model| pollster::block_on(model.trace(&window)).unwrap().logits);
        let vocab_size = models[0].config().vocab_size as usize;
        for (base, own) in logits[0].chunks_exact(vocab_size).zip(logits[1].chunks_exact(vocab_size)).skip(24) {
            let [p, q] = [base, own].map(|row| {
                let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
                row.iter().map(|&logit| f64::from(logit).exp() / total).collect::<Vec<f64>>()
            });
            sum += p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
            let top = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            n_same += usize::from(top(&p) == top(&q));
            n += 1;
        }
    }
    assert!(near(&found["divergence"]["kl"]["value"], sum / f64::from(n), 2e-3), "{found}: {}", sum / f64::from(n));
    assert_eq!(found["divergence"]["same_top"]["value"], n_same as f64 / f64::from(n), "{found}");

    let whole = std::fs::read(&base).unwrap();
    std::fs::write(&base, &whole[..whole.len() - 1]).unwrap();
    fails(&["perplexity", BUILTIN, "--kl", path(&base)], 1, "the file is cut off or damaged");
    fails(&["perplexity", BUILTIN, "--kl", BUILTIN], 1, "expected `_logits_`, of recorded predictions");
}

/// Against norms of the residual stream in f64, and the number of tokens that chose each expert.
#[test]
fn importance_matrix_matches_a_direct_sum_of_squares() {
    let folder = folder("importance");
    let output = folder.join("imatrix.gguf");
    let args = ["imatrix", BUILTIN, "-f", "-", "-c", "40", "--chunks", "3", "-o", path(&output), "--json"];
    let report = json(&args, STORY);
    let (bytes, model) = (std::fs::read(&output).unwrap(), std::fs::read(BUILTIN).unwrap());
    let (file, source) = [&bytes, &model].map(|bytes| Gguf::parse(bytes, bytes.len() as u64).unwrap()).into();
    assert_eq!(file.metadata.get_str("general.type").unwrap(), Some("imatrix"));
    assert_eq!(file.metadata.get_u32("imatrix.chunk_count").unwrap(), Some(3));
    let floats = |gguf: &Gguf, bytes: &[u8], name: &str| {
        let tensor = gguf.tensor(name).unwrap_or_else(|| panic!("{name}"));
        let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        dequantize(tensor.block_type, tensor.bytes(bytes).unwrap(), &mut values).unwrap();
        values
    };
    let loaded = Model::load(&Device::cpu(), BUILTIN, LoadOptions::default()).unwrap();
    let ids = loaded.encode(STORY).unwrap();
    let config = loaded.config();
    let mut expected = vec![vec![0.0_f64; config.dim as usize]; config.blocks.len()];
    for window in ids.chunks_exact(40).take(3) {
        let bos = loaded.tokenizer().unwrap().bos_id().unwrap();
        let trace = pollster::block_on(loaded.trace(&[&[bos], &window[1..]].concat())).unwrap();
        for (layer, sums) in expected.iter_mut().enumerate() {
            let weight = floats(&source, &model, &format!("blk.{layer}.attn_norm.weight"));
            for row in trace.hidden[layer].chunks_exact(config.dim as usize) {
                let square = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
                let scale = 1.0 / (square + f64::from(config.norm_eps)).sqrt();
                let normed = row.iter().zip(&weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w));
                sums.iter_mut().zip(normed).for_each(|(sum, x)| *sum += x * x);
            }
        }
    }
    for (layer, sums) in expected.iter().enumerate() {
        for name in ["attn_q", "attn_k", "attn_v"] {
            let name = format!("blk.{layer}.{name}.weight");
            assert_eq!(floats(&file, &bytes, &format!("{name}.counts")), [120.0]);
            let found = floats(&file, &bytes, &format!("{name}.in_sum2"));
            let is_near = |(found, sum): (&f32, &f64)| (f64::from(*found) - sum).abs() <= 1e-3 * sum + 1e-6;
            assert!(found.iter().zip(sums).all(is_near), "{name}");
        }
    }
    let matrices = source.tensors.iter().filter(|tensor| tensor.name.starts_with("blk.") && tensor.shape.len() > 1);
    assert_eq!(report["tensors"], matrices.count());

    let quantised = folder.join("q4_k_m.gguf");
    let imatrix = ["--imatrix", path(&output)];
    let made = json(&[&["quantize", BUILTIN, path(&quantised), "Q4_0", "--json"], &imatrix[..]].concat(), "");
    assert_eq!(made["n_weighted"], report["tensors"]);
    fails(&args, 1, "imatrix.gguf: exists already; --force overwrites it");
}

#[test]
fn importances_of_experts_count_the_tokens_that_chose_them() {
    for name in ["mixtral", "qwen3-moe", "qwen35-moe"] {
        let (model, output) = (format!("{DATA}/tiny-random/{name}"), folder("experts").join("imatrix.gguf"));
        let loaded = Model::load(&Device::cpu(), &model, LoadOptions::default()).unwrap();
        let vocab_size = loaded.config().vocab_size;
        let ids = (0..100u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab_size).collect();
        let mut run = ImportanceRun::new(&loaded, TextWindows::of_tokens(&loaded, ids, 32, None).unwrap()).unwrap();
        while pollster::block_on(run.next_window()).unwrap().is_some() {}
        run.sums().renamed(|_| None).write(&output, "numbers").unwrap();
        let bytes = std::fs::read(&output).unwrap();
        let file = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let tensor = file.tensor(name).unwrap_or_else(|| panic!("{name}"));
            tensor.bytes(&bytes).unwrap().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let experts = loaded.config().blocks[0].feed_forward.experts.unwrap();
        let n_tokens = floats("blk.0.ffn_gate_inp.weight.counts")[0];
        assert_eq!(n_tokens, 96.0);
        let router = floats("blk.0.ffn_gate_inp.weight.in_sum2");
        let (counts, sums) = (floats("blk.0.ffn_up_exps.weight.counts"), floats("blk.0.ffn_up_exps.weight.in_sum2"));
        assert_eq!((counts.len(), sums.len()), (experts.n as usize, experts.n as usize * router.len()), "{name}");
        assert_eq!(counts.iter().sum::<f32>(), n_tokens * experts.n_used as f32, "{name}");
        assert_eq!(counts, floats("blk.0.ffn_down_exps.weight.counts"), "{name}");
        assert_eq!(sums, floats("blk.0.ffn_gate_exps.weight.in_sum2"), "{name}");
        // The router sees each token once, the experts as often as they are chosen.
        for (column, &all) in router.iter().enumerate() {
            let of_experts: f32 = sums.iter().skip(column).step_by(router.len()).sum();
            assert!((of_experts - experts.n_used as f32 * all).abs() <= 1e-3 * of_experts, "{name}: column {column}");
        }
        if let Some(shared) = experts.shared {
            assert_eq!(floats("blk.0.ffn_up_shexp.weight.in_sum2"), router, "{name}");
            assert_eq!(floats("blk.0.ffn_down_shexp.weight.in_sum2").len(), shared.dim as usize, "{name}");
        }
    }
}

#[test]
fn shards_run_and_merge_to_the_same_bytes() {
    let folder = folder("shards");
    let whole = folder.join("whole.gguf");
    // In llama.cpp's order, as its quantiser leaves files.
    printed(&["quantize", BUILTIN, path(&whole), "Q4_0"], "");
    let told =
        |model: &Path| json(&["run", path(model), "--prompt", "Once", "-n", "8", "--temperature", "0", "--json"], "");
    for (name, limit) in [("bytes", ["--max-size", "200K"]), ("tensors", ["--max-tensors", "7"])] {
        let prefix = folder.join(name);
        let split = json(&[&["split", path(&whole), path(&prefix), "--json"], &limit[..]].concat(), "");
        let shards = split["shards"].as_array().unwrap();
        assert!(shards.len() > 2, "{split}");
        let first = PathBuf::from(shards[0]["file"].as_str().unwrap());
        assert_eq!(first, folder.join(format!("{name}-00001-of-{:05}.gguf", shards.len())));
        let n: u64 = shards.iter().map(|shard| shard["tensors"].as_u64().unwrap()).sum();
        for (no, shard) in shards.iter().enumerate() {
            let bytes = std::fs::read(shard["file"].as_str().unwrap()).unwrap();
            assert_eq!(shard["size_bytes"], bytes.len());
            let file = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
            let keys =
                ["split.no", "split.count", "split.tensors.count"].map(|key| file.metadata.get_u64(key).unwrap());
            assert_eq!(keys, [no as u64, shards.len() as u64, n].map(Some));
        }
        assert_eq!(told(&first)["text"], told(&whole)["text"]);
        let merged = folder.join(format!("{name}.gguf"));
        printed(&["merge", path(&first), path(&merged)], "");
        assert!(std::fs::read(&merged).unwrap() == std::fs::read(&whole).unwrap(), "{name}");
        fails(&["merge", path(&first), path(&merged)], 1, "exists already; --force overwrites it");
        fails(&["split", path(&first)], 1, "merge these first");
    }
    let planned = json(&["split", path(&whole), "--no-tensor-first-split", "--dry-run", "--json"], "");
    assert_eq!((planned["shards"].as_array().unwrap().len(), &planned["shards"][0]["tensors"]), (2, &0.into()));
    assert!(!folder.join("whole-00001-of-00002.gguf").exists());
    fails(&["split", path(&whole), "--max-size", "1K"], 2, "the size of `");
    fails(&["merge", path(&whole), path(&folder.join("x.gguf"))], 1, "expected a shard");
}

#[test]
fn token_ids_go_through_a_pipe_and_back() {
    let line = "Once upon a time, there was a café.\n";
    let ids = printed(&["tokenize", "--ids", "--no-special"], line);
    assert!(ids.trim().split(' ').all(|id| id.parse::<u32>().is_ok()), "{ids}");
    assert_eq!(printed(&["detokenize"], &ids).trim_start(), line);
    assert_eq!(printed(&["detokenize", BUILTIN, "-"], &ids).trim_start(), line);
    let list: Vec<&str> = ids.trim().split(' ').collect();
    assert_eq!(printed(&[&["detokenize", "--model", BUILTIN], &list[..]].concat(), "").trim_start(), line);
    assert_eq!(printed(&["detokenize", BUILTIN, &format!("[{}]", list.join(", "))], "").trim_start(), line);
    let count = printed(&["tokenize", "--count", "--no-special", "-"], line);
    assert_eq!(count.trim(), list.len().to_string());
    let file = folder("tokens").join("line.txt");
    std::fs::write(&file, line).unwrap();
    assert_eq!(printed(&["tokenize", "--ids", "--no-special", "--file", path(&file)], ""), ids);
    let with_special = json(&["tokenize", "--json", "-f", "-"], line);
    assert_eq!(with_special["token_ids"].as_array().unwrap().len(), list.len() + 1);
    fails(&["detokenize", BUILTIN, "1", "two"], 1, "token id is `two`, expected a number");
    fails(&["detokenize", "999999999"], 1, "999999999");
}
