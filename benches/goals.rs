//! The shapes named by the promised figures, on the CPU executor and the first adapter.
//!
//! `cargo bench --bench goals` prints one JSON object; `scripts/record` formats it as a table with the figures to
//! beat. Each row compares two ways to the same result, in turns, from submission to completion: both medians and
//! their ratio. A row with one way has the time only.

mod common;

use std::time::Instant;

use serde_json::{Value, json};
use tilewright::kernels::{
    Activation, AttentionConfig, CachedKeys, Embedding, Gelu, KvType, LayerNorm, Linear, Norm, StepState, attention,
    embed, gelu, layer_norm, linear_norm, matmul, matmul_plain, matvec, rms_norm, scale, softmax,
};
use tilewright::load::{ModelFile, ModelShape};
use tilewright::tokenizer::EncodeOptions;
use tilewright::{
    DType, Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Matrix, Model, Recorder, Recording, Role, Tensor,
    WeightType, Workspace, file_row_bytes,
};

/// Rounds of a comparison; the first one compiles and is not counted.
const ROUNDS: usize = 9;

fn main() {
    let mut devices = vec![Device::cpu()];
    match pollster::block_on(Device::open(&DeviceChoice::Gpu, None)) {
        Ok(device) => devices.push(device),
        Err(error) => eprintln!("skipped: {error}"),
    }
    let measured: Vec<Value> = devices.iter().map(|device| measure(device).expect("the recording runs")).collect();
    println!("{}", json!({ "devices": measured, "tokenizer_cache": tokenizer_cache() }));
}

/// All rows for one device.
fn measure(device: &Device) -> Result<Value, Error> {
    let mut rows = vec![
        norm_and_linear(device)?,
        linear_and_norm(device)?,
        linear_and_gelu(device)?,
        dequantised(device)?,
        flash_attention(device)?,
    ];
    for size in [[128, 256, 128], [256, 512, 256], [512, 1024, 512]] {
        rows.push(product(device, size)?);
    }
    Ok(json!({ "device": device.info(), "rows": rows, "kv_cache": kv_cache(device)?, "pool": pool(device)? }))
}

/// RMSNorm and a product of one row: separate and fused.
fn norm_and_linear(device: &Device) -> Result<Value, Error> {
    let (w, x, y) = (matrix(device, 1024, 512)?, input(device, &[1, 512])?, output(&[1, 1024])?);
    let weight = input(device, &[512])?;
    let apart = record(device, |rec| {
        let normed = rec.temporary("normed", &[1, 512])?;
        rms_norm(rec, &x, &weight, &normed, 1e-5)?;
        matvec(rec, &Linear::new(&w), &normed, &y)
    })?;
    let norm = Some(Norm { weight: &weight, eps: 1e-5 });
    let fused = record(device, |rec| matvec(rec, &Linear { norm, ..Linear::new(&w) }, &x, &y))?;
    compare(device, "RMSNorm + linear, 1x512->1024", &y, &apart, &fused)
}

/// A product of 32 rows, its residual and a layer normalisation: separate and fused.
fn linear_and_norm(device: &Device) -> Result<Value, Error> {
    let (w, x, y) = (matrix(device, 1024, 512)?, input(device, &[32, 512])?, output(&[32, 1024])?);
    let weight = input(device, &[1024])?;
    let norm = LayerNorm { weight: &weight, bias: Some(&weight), eps: 1e-5 };
    let apart = record(device, |rec| {
        let sums = rec.temporary("sums", &[32, 1024])?;
        matmul(rec, &Linear::new(&w), &x, &sums)?;
        layer_norm(rec, &sums, &norm, &y)
    })?;
    let fused = record(device, |rec| linear_norm(rec, &Linear::new(&w), &norm, &x, &y))?;
    compare(device, "linear + LayerNorm, 32x512->1024", &y, &apart, &fused)
}

/// A product of 32 rows and its GELU: separate and fused.
fn linear_and_gelu(device: &Device) -> Result<Value, Error> {
    let (w, x, y) = (matrix(device, 1024, 512)?, input(device, &[32, 512])?, output(&[32, 1024])?);
    let apart = record(device, |rec| {
        let sums = rec.temporary("sums", &[32, 1024])?;
        matmul(rec, &Linear::new(&w), &x, &sums)?;
        gelu(rec, &sums, &y, Gelu::Exact)
    })?;
    let activation = Some(Activation::Gelu(Gelu::Exact));
    let fused = record(device, |rec| matmul(rec, &Linear { activation, ..Linear::new(&w) }, &x, &y))?;
    compare(device, "linear + GELU, 32x512->1024", &y, &apart, &fused)
}

/// One token by a Q4_K matrix: dequantised and then multiplied, and read packed.
fn dequantised(device: &Device) -> Result<Value, Error> {
    const DIM: u32 = 2048;
    let n_bytes = DIM as usize * file_row_bytes(WeightType::Q4_K, DIM as usize);
    let mut bytes: Vec<u8> = common::words(n_bytes / 4).flat_map(u32::to_le_bytes).collect();
    // Scales of ordinary size: subnormals and NaNs can take a different time.
    bytes.chunks_exact_mut(144).for_each(|unit| [1, 3].into_iter().for_each(|place| unit[place] = 0x20));
    let w = Matrix::declare(&device.target(), "w", WeightType::Q4_K, DIM, DIM)?;
    w.upload(device, &[&bytes])?;
    let ids: Vec<u32> = (0..DIM).collect();
    let (ids, state) = (device.upload("ids", &[DIM], &ids)?, StepState::declare()?);
    state.set(device, 0, DIM)?;
    let (x, column) = (input(device, &[1, DIM])?, input(device, &[DIM, 1])?);
    let (y, y_column) = (output(&[1, DIM])?, output(&[DIM, 1])?);
    let expanded = record(device, |rec| {
        let floats = rec.temporary("floats", &[DIM, DIM])?;
        embed(rec, &state, &ids, &Embedding::new(&w), &floats)?;
        matmul_plain(rec, &floats, &column, &y_column)
    })?;
    let packed = record(device, |rec| matvec(rec, &Linear::new(&w), &x, &y))?;
    let row = compare(device, "Q4_K 2048x2048: expanded, then multiplied / packed", &y, &expanded, &packed)?;
    let ratio = f64::from(DIM) * f64::from(DIM) * 4.0 / n_bytes as f64;
    Ok(with(row, "bytes_ratio", json!(ratio)))
}

/// One head of 512 queries and keys: separate scores, softmax and sum, and the streaming kernel.
fn flash_attention(device: &Device) -> Result<Value, Error> {
    const T: u32 = 512;
    const D: u32 = 64;
    let config = AttentionConfig {
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: D,
        window: None,
        scale: 0.125,
        soft_cap: None,
        values_from: None,
        causal: false,
        whole_pass: false,
    };
    let (q, k_columns) = (input(device, &[T, D])?, input(device, &[D, T])?);
    let (v_rows, y) = (input(device, &[T, D])?, output(&[T, D])?);
    // F32, as in the separate kernels.
    let cached = CachedKeys::declare("cache", KvType::F32, [1, T, D], T)?;
    for rows in [&cached.k].into_iter().chain(&cached.v) {
        let bits: Vec<u32> = common::uniform((T * D) as usize).into_iter().map(f32::to_bits).collect();
        device.write(rows, 0, &bits)?;
    }
    let state = StepState::declare()?;
    state.set(device, 0, T)?;
    let apart = record(device, |rec| {
        let [scores, scaled, probs] =
            [rec.temporary("scores", &[T, T])?, rec.temporary("scaled", &[T, T])?, rec.temporary("probs", &[T, T])?];
        matmul_plain(rec, &q, &k_columns, &scores)?;
        scale(rec, &scores, &scaled, config.scale)?;
        softmax(rec, &scaled, &probs)?;
        matmul_plain(rec, &probs, &v_rows, &y)
    })?;
    let streamed = record(device, |rec| attention(rec, &state, &config, None, &q, &cached, &y))?;
    let row = compare(device, "attention, one head of 512x512x64: in parts / streamed", &y, &apart, &streamed)?;
    // Scores, scaled scores and probabilities; the streaming kernel stores none of them.
    Ok(with(row, "bytes_saved", json!(3 * 4 * T * T)))
}

/// A product of `[m, k]` and `[k, n]`.
fn product(device: &Device, [m, k, n]: [u32; 3]) -> Result<Value, Error> {
    let (w, x, y) = (matrix(device, n, k)?, input(device, &[m, k])?, output(&[m, n])?);
    let recording = record(device, |rec| matmul(rec, &Linear::new(&w), &x, &y))?;
    let (mut run, mut read) = (Vec::new(), Vec::new());
    let one = output(&[1])?;
    device.allocate(&one)?;
    for round in 0..=ROUNDS {
        let start = Instant::now();
        pollster::block_on(device.run_and_read(&recording, &one)?)?;
        let to_done = start.elapsed().as_secs_f64();
        let start = Instant::now();
        pollster::block_on(device.run_and_read(&recording, &y)?)?;
        if round > 0 {
            run.push(to_done);
            read.push(start.elapsed().as_secs_f64());
        }
    }
    let (us, read_us) = (1e6 * median(run), 1e6 * median(read));
    Ok(json!({ "name": format!("matmul {m}x{k}x{n}"), "us": us, "with_result_us": read_us }))
}

/// Speed-up from the KV cache, by sequence length.
fn kv_cache(device: &Device) -> Result<Value, Error> {
    // Longer than the training context: speed does not depend on the text.
    const CONTEXT: u32 = 1024;
    let mut file = ModelFile::builtin()?;
    if let ModelShape::Decoder(config) = &mut file.header.shape {
        config.max_seq_len = CONTEXT;
    }
    let options = LoadOptions { context_length: Some(CONTEXT), ..LoadOptions::default() };
    let model = Model::from_file(device, file, options)?;
    let mut rows = Vec::new();
    // Without a cache the cost is quadratic, too slow for software adapters.
    let lengths: &[usize] = if device.is_gpu() { &[10, 50, 100] } else { &[10, 50, 100, 1000] };
    for &n_tokens in lengths {
        let row = pollster::block_on(tilewright::bench::measure_cache(&mut model.session()?, n_tokens))?;
        rows.push(json!({ "tokens": n_tokens, "ratio": row.uncached_seconds / row.cached_seconds }));
    }
    Ok(json!({ "context": CONTEXT, "rows": rows }))
}

/// Buffers requested during decoding, and how many of them the pool supplies.
fn pool(device: &Device) -> Result<Value, Error> {
    let mut session = Model::builtin(device)?.session()?;
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(72) };
    let mut generation = session.generate("Once upon a time", &options)?;
    let mut next = |n| (0..n).try_for_each(|_| pollster::block_on(generation.next()).map_or(Ok(()), |p| p.map(drop)));
    next(8)?;
    let before = device.counters();
    next(64)?;
    let did = device.counters() - before;
    Ok(json!({ "tokens": 64, "hits": did.pool_hits, "misses": did.pool_misses, "created": did.buffers_created }))
}

/// Cached encodings against encoding again.
fn tokenizer_cache() -> Value {
    const TEXTS: usize = 200;
    let model = Model::builtin(&Device::cpu()).expect("the built-in model loads");
    let cache = model.encodings().expect("the model has a tokenizer");
    let words = ["the", "little", "rabbit", "wanted", "to", "learn", "how", "skate", "by", "sea"];
    let picks: Vec<u32> = common::words(TEXTS * 40).collect();
    let text = |picks: &[u32]| picks.iter().map(|&p| words[p as usize % words.len()]).collect::<Vec<_>>().join(" ");
    let texts: Vec<String> = picks.chunks_exact(40).map(text).collect();
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    let mut hit_rate = 0.0;
    for _ in 0..=ROUNDS {
        cache.clear();
        let encode = || {
            let start = Instant::now();
            let ids: Vec<_> =
                texts.iter().map(|t| cache.encode(t, EncodeOptions::default()).expect("the text encodes")).collect();
            (start.elapsed().as_secs_f64(), ids)
        };
        let [(first, ids), (second, again)] = [encode(), encode()];
        assert_eq!(ids, again, "a remembered encoding is the same");
        cold.push(first);
        warm.push(second);
        hit_rate = cache.hits() as f64 / (cache.hits() + cache.misses()) as f64;
    }
    json!({ "texts": TEXTS, "ratio": median(cold) / median(warm), "hit_rate": hit_rate })
}

/// Times two recordings in turns.
fn compare(device: &Device, name: &str, y: &Tensor, first: &Recording, second: &Recording) -> Result<Value, Error> {
    // One element to wait for: reading the product's result is not timed.
    let one = output(&[1])?;
    device.allocate(&one)?;
    device.allocate(y)?;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (recording, times) in [first, second].into_iter().zip(&mut times) {
            let start = Instant::now();
            pollster::block_on(device.run_and_read(recording, &one)?)?;
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let [first, second] = times.map(median);
    Ok(json!({ "name": name, "apart_us": 1e6 * first, "us": 1e6 * second, "ratio": first / second }))
}

/// Adds a field to a row.
fn with(mut row: Value, field: &str, value: Value) -> Value {
    row[field] = value;
    row
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn record(device: &Device, body: impl FnOnce(&mut Recorder) -> Result<(), Error>) -> Result<Recording, Error> {
    let mut rec = device.recorder();
    body(&mut rec)?;
    Ok(rec.finish(&mut Workspace::default()))
}

fn matrix(device: &Device, rows: u32, cols: u32) -> Result<Matrix, Error> {
    device.upload_matrix("w", [rows, cols], &common::uniform((rows * cols) as usize))
}

fn input(device: &Device, shape: &[u32]) -> Result<Tensor, Error> {
    device.upload("x", shape, &common::uniform(shape.iter().product::<u32>() as usize))
}

fn output(shape: &[u32]) -> Result<Tensor, Error> {
    Tensor::declare("y", Role::Activations, shape, DType::F32)
}
