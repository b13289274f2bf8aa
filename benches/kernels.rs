//! Kernels one by one, on every tier of the GPU adapter and on the CPU executor.
//!
//! `cargo bench --bench kernels` takes a few minutes on two slow cores; `TILEWRIGHT_BENCH=full` measures more sizes
//! and samples. `cargo bench --bench kernels -- matvec/Q4_0` selects by name. Rates count an operation's minimal work:
//! `2 M N K` operations for a matrix product, each byte once for memory-bound kernels. Criterion calls an operation an
//! element. At the end each result has a line with its median in plain units, and for matrix products the ratio to the
//! naive kernel of the same run. Fused kernels against the chains that they replace come last.

mod common;

use std::cell::RefCell;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use tilewright::kernels::microbench::{
    FmaRounds, PROBE_FMA_FLOP, PROBE_READS, ReadOrder, matmul_naive, probe_copy, probe_fma, probe_read, probe_reduce,
};
use tilewright::kernels::{
    AttentionConfig, CachedKeys, Gate, Heads, KvType, LayerNorm, Linear, Norm, QkNorm, RopeConfig, RopeStyle,
    StepState, TopStrip, attention, attention_next, by_head, gate_up, layer_norm, mask_logits, matmul, matvec,
    merge_top, rms_norm, rope, rope_kv, rope_packed, rope_table, select_top, softmax, split_sum, swiglu, top_splits,
};
#[cfg(feature = "lora")]
use tilewright::kernels::{LowRank, add_lora, matvec_lora};
use tilewright::{DType, Device, Error, Matrix, Recorder, Role, Tensor, WeightType, Workspace, file_row_bytes};

use common::Target;

/// Minimal work of one run of a kernel.
#[derive(Clone, Copy)]
enum Work {
    Bytes(u64),
    Operations(u64),
}

/// Median time of one result.
struct Row {
    kernel: String,
    target: &'static str,
    work: Work,
    median: Duration,
}

struct Bench<'c> {
    criterion: &'c mut Criterion,
    targets: Vec<Target>,
    rows: Vec<Row>,
}

impl Bench<'_> {
    /// Measures a kernel on every device with its own variant. `record` declares operands, fills them, records, and
    /// returns the output. Devices alternate kernel by kernel, so that other load on the machine affects neighbours
    /// alike.
    fn measure(
        &mut self,
        kernel: &str,
        size: &str,
        work: Work,
        record: impl Fn(&Device, &mut Recorder) -> Result<Tensor, Error>,
    ) {
        let name = format!("{kernel}/{size}");
        let mut group = self.criterion.benchmark_group(&name);
        group.throughput(match work {
            Work::Bytes(n) => Throughput::BytesDecimal(n),
            Work::Operations(n) => Throughput::Elements(n),
        });
        for target in self.targets.iter().filter(|target| target.has_own(kernel)) {
            let mut rec = target.device.recorder();
            let result =
                record(&target.device, &mut rec).unwrap_or_else(|error| panic!("{name} on {}: {error}", target.name));
            let recording = rec.finish(&mut Workspace::default());
            let times = RefCell::new(Vec::new());
            group.bench_function(target.name, |bencher| {
                // Drops the times of the warm-up, which is a call of its own.
                times.borrow_mut().clear();
                bencher.iter_custom(|n| {
                    let time = target.time(&recording, &result, n);
                    times.borrow_mut().push(time.div_f64(n as f64));
                    time
                });
            });
            let mut times = times.into_inner();
            // Empty if the command line filtered the name out.
            if !times.is_empty() {
                times.sort();
                let median = times[times.len() / 2];
                self.rows.push(Row { kernel: name.clone(), target: target.name, work, median });
            }
        }
        group.finish();
    }

    /// Prints all results again, one per line.
    fn print(&self) {
        println!("\n{:<36} {:<10} {:>12} {:>14} {:>10}", "kernel", "device", "median us", "rate", "vs naive");
        for row in &self.rows {
            let seconds = row.median.as_secs_f64();
            let rate = match row.work {
                Work::Bytes(n) => format!("{:.2} GB/s", n as f64 / seconds / 1e9),
                Work::Operations(n) => format!("{:.2} GFLOP/s", n as f64 / seconds / 1e9),
            };
            let naive = row.kernel.strip_prefix("matmul/").map(|size| format!("matmul_naive/{size}"));
            let naive = self.rows.iter().find(|r| Some(&r.kernel) == naive.as_ref() && r.target == row.target);
            let ratio = naive.map_or(String::new(), |naive| format!("{:.2}x", naive.median.as_secs_f64() / seconds));
            println!("{:<36} {:<10} {:>12.1} {:>14} {:>10}", row.kernel, row.target, seconds * 1e6, rate, ratio);
        }
    }
}

fn main() {
    let mut criterion = common::criterion();
    let mut bench = Bench { criterion: &mut criterion, targets: common::targets(), rows: Vec::new() };
    let is_full = common::is_full();
    let sizes: &[u32] = if is_full { &[64, 128, 256, 512, 1024] } else { &[64, 256, 1024] };
    for &size in sizes {
        matmuls(&mut bench, size);
    }
    split_sums(&mut bench);
    let sizes: &[u32] = if is_full { &[1024, 2048, 4096] } else { &[2048] };
    for &size in sizes {
        for weight in WeightType::ALL {
            matvecs(&mut bench, weight, size);
        }
    }
    let shapes: &[[u32; 2]] =
        if is_full { &[[1, 2048], [1, 4096], [128, 2048], [512, 4096]] } else { &[[1, 2048], [128, 2048]] };
    for &[n_rows, dim] in shapes {
        rows(&mut bench, n_rows, dim);
    }
    choices(&mut bench);
    ropes(&mut bench);
    layouts(&mut bench);
    reads(&mut bench);
    probes(&mut bench);
    for n_rows in [1, 32] {
        for k in [16, 1024] {
            selections(&mut bench, n_rows, k);
        }
    }
    let cached: &[u32] = if is_full { &[20, 256, 1024, 4096] } else { &[20, 1024] };
    for kind in KvType::ALL {
        for &n_cached in cached {
            attentions(&mut bench, &format!("attention/decode/{kind}"), kind, 1, n_cached);
        }
        attentions(&mut bench, &format!("attention/prefill/{kind}"), kind, 128, 0);
    }
    bench.print();
    let targets = std::mem::take(&mut bench.targets);
    criterion.final_summary();
    fusions(&targets);
}

/// Square F32 products, naive and tiled; the same on the CPU, so there only `matmul` is measured.
fn matmuls(bench: &mut Bench, size: u32) {
    type Product = fn(&mut Recorder, &Linear, &Tensor, &Tensor) -> Result<(), Error>;
    let kernels: [(&str, Product); 2] = [("matmul_naive", matmul_naive), ("matmul", matmul)];
    for (name, kernel) in kernels {
        let work = Work::Operations(2 * u64::from(size).pow(3));
        bench.measure(name, &size.to_string(), work, |device, rec| {
            let values = common::uniform((size * size) as usize);
            let w = device.upload_matrix("w", [size, size], &values)?;
            let x = device.upload("x", &[size, size], &values)?;
            let y = output("y", &[size, size])?;
            kernel(rec, &Linear::new(&w), &x, &y)?;
            Ok(y)
        });
    }
}

/// One token by a square matrix of each weight type.
fn matvecs(bench: &mut Bench, weight: WeightType, size: u32) {
    let row_bytes = file_row_bytes(weight, size as usize) as u64;
    let work = Work::Bytes(u64::from(size) * row_bytes + 2 * 4 * u64::from(size));
    bench.measure("matvec", &format!("{weight}/{size}"), work, |device, rec| {
        let w = Matrix::declare(&device.target(), "w", weight, size, size)?;
        w.upload(device, &[&weight_bytes(weight, (u64::from(size) * row_bytes) as usize)])?;
        let x = device.upload("x", &[1, size], &common::uniform(size as usize))?;
        let y = output("y", &[1, size])?;
        matvec(rec, &Linear::new(&w), &x, &y)?;
        Ok(y)
    });
}

/// The last step of a product of few tiles.
fn split_sums(bench: &mut Bench) {
    let [n_splits, n_tokens, n_out] = [8, 32, 2048];
    let work = Work::Bytes(4 * u64::from((n_splits + 1) * n_tokens * n_out));
    bench.measure("split_sum", "8x32x2048", work, |device, rec| {
        let shape = [n_splits * n_tokens, n_out];
        let parts = device.upload("parts", &shape, &common::uniform((shape[0] * shape[1]) as usize))?;
        let y = output("y", &[n_tokens, n_out])?;
        split_sum(rec, &parts, None, None, 0, false, &y)?;
        Ok(y)
    });
}

/// Row-wise kernels.
fn rows(bench: &mut Bench, n_rows: u32, dim: u32) {
    let shape = [n_rows, dim];
    let (len, row) = (u64::from(n_rows * dim), u64::from(dim));
    let size = format!("{n_rows}x{dim}");
    let x = |device: &Device| device.upload("x", &shape, &common::uniform(len as usize));
    let weight = |device: &Device| device.upload("weight", &[dim], &common::uniform(dim as usize));
    bench.measure("rms_norm", &size, Work::Bytes(4 * (2 * len + row)), |device, rec| {
        let y = output("y", &shape)?;
        rms_norm(rec, &x(device)?, &weight(device)?, &y, 1e-5)?;
        Ok(y)
    });
    if dim.is_multiple_of(128) && dim >= 512 {
        let n_kv_heads = dim / 512;
        let n_heads = dim / 128 - 2 * n_kv_heads;
        let heads = Heads {
            n_heads,
            n_kv_heads,
            head_dim: 128,
            keys_hold_values: false,
            first_column: 0,
            rope: None,
            norm: None,
        };
        bench.measure("rope_packed, norm alone", &size, Work::Bytes(4 * (2 * len / 4 * 3 + 256)), |device, rec| {
            let (weight, qkv) = (device.upload("weight", &[256], &common::uniform(256))?, x(device)?);
            let tokens = device.upload("tokens", &[n_rows, 3], &vec![0u32; 3 * n_rows as usize])?;
            rope_packed(rec, &Heads { norm: Some((QkNorm::Heads, &weight, 1e-5)), ..heads }, &tokens, &qkv)?;
            Ok(qkv)
        });
    }
    bench.measure("layer_norm", &size, Work::Bytes(4 * (2 * len + 2 * row)), |device, rec| {
        let y = output("y", &shape)?;
        let (weight, bias) = (weight(device)?, weight(device)?);
        layer_norm(rec, &x(device)?, &LayerNorm { weight: &weight, bias: Some(&bias), eps: 1e-5 }, &y)?;
        Ok(y)
    });
    bench.measure("softmax", &size, Work::Bytes(4 * 2 * len), |device, rec| {
        let y = output("y", &shape)?;
        softmax(rec, &x(device)?, &y)?;
        Ok(y)
    });
}

/// Logits of a large vocabulary with half of its tokens allowed.
fn choices(bench: &mut Bench) {
    let n_vocab = 151_936;
    bench.measure("mask_logits", "151936", Work::Bytes(4 * 2 * u64::from(n_vocab)), |device, rec| {
        let allowed: Vec<u32> = common::words(n_vocab as usize / 32).collect();
        let allowed = device.upload("allowed", &[n_vocab / 32], &allowed)?;
        let logits = device.upload("logits", &[1, n_vocab], &common::uniform(n_vocab as usize))?;
        mask_logits(rec, &allowed, &logits)?;
        Ok(logits)
    });
}

/// Heads of a prefill chunk.
fn ropes(bench: &mut Bench) {
    let shape = [128, 32, 64]; // [T, H, D]
    let len: u32 = shape.iter().product();
    let table_len = shape[0] * shape[2];
    bench.measure("rope", "128x32x64", Work::Bytes(4 * u64::from(2 * len + table_len)), |device, rec| {
        let config = RopeConfig::new(64, 1e4, RopeStyle::Interleaved);
        let state = StepState::declare()?;
        state.set(device, 0, shape[0])?;
        let table = device.upload("table", &[shape[0], 32, 2], &rope_table(&config, shape[0]))?;
        let x = device.upload("x", &shape, &common::uniform(len as usize))?;
        let y = output("y", &shape)?;
        rope(rec, &state, &config, &table, &x, &y)?;
        Ok(y)
    });
}

/// Keys of a prefill chunk, in the layout of a cache.
fn layouts(bench: &mut Bench) {
    let [n_rows, n_heads, head_dim] = [128, 8, 64]; // [S, H, D]
    let len = n_rows * n_heads * head_dim;
    bench.measure("by_head", "128x8x64", Work::Bytes(4 * u64::from(2 * len)), |device, rec| {
        let x = device.upload("x", &[n_rows, n_heads * head_dim], &common::uniform(len as usize))?;
        let y = output("y", &[n_heads, n_rows, head_dim])?;
        by_head(rec, &x, &y)?;
        Ok(y)
    });
}

/// Sequential reads, one word of each 128 bytes, and random reads.
fn reads(bench: &mut Bench) {
    let n: u32 = 1 << 18;
    let len = n * PROBE_READS;
    let orders =
        [("sequence", ReadOrder::Strided(1)), ("stride", ReadOrder::Strided(32)), ("scattered", ReadOrder::Scattered)];
    for (name, order) in orders {
        bench.measure("probe_read", &format!("{name}/{len}"), Work::Bytes(4 * u64::from(len + n)), |device, rec| {
            let x = device.upload("x", &[len], &common::words(len as usize).collect::<Vec<u32>>())?;
            let y = Tensor::declare("y", Role::Activations, &[n], DType::U32)?;
            probe_read(rec, &x, &y, order)?;
            Ok(y)
        });
    }
}

/// Other device measurements: copies, sums, multiply-adds. Only reports measure matrices: their amount of work depends
/// on the device.
fn probes(bench: &mut Bench) {
    let [rows, columns]: [u32; 2] = [1 << 10, 1 << 12];
    let len = rows * columns;
    let declare = |shape: &[u32], dtype| Tensor::declare("y", Role::Activations, shape, dtype);
    bench.measure("probe_copy", &len.to_string(), Work::Bytes(8 * u64::from(len)), |device, rec| {
        let x = device.upload("x", &[len], &common::words(len as usize).collect::<Vec<u32>>())?;
        let y = declare(&[len], DType::U32)?;
        probe_copy(rec, &x, &y)?;
        Ok(y)
    });
    bench.measure(
        "probe_reduce",
        &format!("{rows}x{columns}"),
        Work::Bytes(4 * u64::from(len + rows)),
        |device, rec| {
            let x = device.upload("x", &[rows, columns], &common::uniform(len as usize))?;
            let y = declare(&[rows], DType::F32)?;
            probe_reduce(rec, &x, &y)?;
            Ok(y)
        },
    );
    let what = FmaRounds { rounds: 256, factor: 1.0, step: 1.0 };
    let flop = u64::from(rows) * u64::from(what.rounds) * PROBE_FMA_FLOP;
    bench.measure("probe_fma", &format!("{rows}x{}", what.rounds), Work::Operations(flop), |_, rec| {
        let y = declare(&[rows], DType::F32)?;
        probe_fma(rec, what, &y)?;
        Ok(y)
    });
}

/// Selects from the scores of 65,536 items into lists full of equal scores, and merges the lists.
fn selections(bench: &mut Bench, n_rows: u32, k: u32) {
    let shape = [n_rows, 1 << 16];
    let n_splits = top_splits(n_rows, shape[1]);
    let len = (shape[0] * shape[1]) as usize;
    let size = format!("{n_rows}x{}/{k}", shape[1]);
    let lists = |device: &Device| {
        let scores = device.upload("scores", &shape, &common::uniform(len))?;
        let lists = Tensor::declare("lists", Role::Activations, &[n_rows, n_splits, k, 2], DType::U32)?;
        let mut first = device.recorder();
        select_top(&mut first, &scores, &TopStrip { first_id: 0, begins: true, allowed: None }, &lists)?;
        device.run(&first.finish(&mut Workspace::default()))?;
        Ok::<_, Error>((scores, lists))
    };
    bench.measure("select_top", &size, Work::Bytes(4 * len as u64), |device, rec| {
        let (scores, lists) = lists(device)?;
        select_top(rec, &scores, &TopStrip { first_id: shape[1], begins: false, allowed: None }, &lists)?;
        Ok(lists)
    });
    bench.measure("merge_top", &size, Work::Bytes(8 * u64::from(n_rows * n_splits * k)), |device, rec| {
        let (_, lists) = lists(device)?;
        let best = Tensor::declare("best", Role::Activations, &[n_rows, k, 2], DType::U32)?;
        merge_top(rec, &lists, &best)?;
        Ok(best)
    });
}

/// `n_tokens` queries of 32 heads after `n_cached` keys, 8 key/value heads.
fn attentions(bench: &mut Bench, name: &str, kind: KvType, n_tokens: u32, n_cached: u32) {
    let config = AttentionConfig {
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 64,
        window: None,
        scale: 0.125,
        soft_cap: None,
        values_from: None,
        causal: true,
        whole_pass: false,
    };
    let (q_dim, capacity) = (config.n_heads * config.head_dim, n_cached + n_tokens);
    let visible: u64 = (0..n_tokens).map(|t| u64::from(n_cached + t + 1)).sum();
    // A multiply and an add per element of each visible key and value.
    let work = Work::Operations(4 * u64::from(q_dim) * visible);
    bench.measure(name, &format!("{n_tokens}x{capacity}"), work, |device, rec| {
        let state = StepState::declare()?;
        state.set(device, n_cached, n_tokens)?;
        let shape = [config.n_kv_heads, capacity, config.head_dim];
        let cached = CachedKeys::declare("cache", kind, shape, capacity)?;
        for rows in [&cached.k].into_iter().chain(&cached.v) {
            // Pairs of 1.0 in any type but Q8_0, which reads them as small numbers.
            device.write(rows, 0, &vec![0x3c00_3c00u32; rows.len()])?;
        }
        let y = output("y", &[n_tokens, q_dim])?;
        if n_tokens == 1 {
            let qkv_dim = q_dim + 2 * config.n_kv_heads * config.head_dim;
            let qkv = device.upload("qkv", &[1, qkv_dim], &common::uniform(qkv_dim as usize))?;
            let (n_heads, n_kv_heads, head_dim) = (config.n_heads, config.n_kv_heads, config.head_dim);
            let heads = Heads {
                n_heads,
                n_kv_heads,
                head_dim,
                keys_hold_values: false,
                first_column: 0,
                rope: None,
                norm: None,
            };
            attention_next(rec, &state, &config, &heads, None, &qkv, &cached, &y)?;
        } else {
            let q = device.upload("q", &[n_tokens, q_dim], &common::uniform((n_tokens * q_dim) as usize))?;
            attention(rec, &state, &config, None, &q, &cached, &y)?;
        }
        Ok(y)
    });
}

const ATTENTION: AttentionConfig = AttentionConfig {
    n_heads: 16,
    n_kv_heads: 4,
    head_dim: 64,
    window: None,
    scale: 0.125,
    soft_cap: None,
    values_from: None,
    causal: true,
    whole_pass: false,
};

/// One token through a layer of width 1024 with 16 heads and 4 key/value heads of 64, and its feed-forward of 2816.
struct Layer {
    norm: Tensor,
    qkv: Matrix,
    gate_up: Matrix,
    x: Tensor,
    /// A token's projection.
    one: Tensor,
    state: StepState,
    rope: RopeConfig,
    table: Tensor,
    cache: CachedKeys,
    /// LoRA adapter of queries, keys and values, each of rank 16.
    #[cfg(feature = "lora")]
    first: Matrix,
    #[cfg(feature = "lora")]
    second: Tensor,
}

type Record = fn(&Layer, &mut Recorder) -> Result<Tensor, Error>;

/// Fused kernels and the chains that they replace.
const FUSIONS: &[(&str, Record, Record)] = &[
    (
        "norm in matvec",
        |layer, rec| {
            let (normed, y) = (rec.temporary("normed", &[1, 1024])?, rec.temporary("y", &[1, 1536])?);
            rms_norm(rec, &layer.x, &layer.norm, &normed, 1e-5)?;
            matvec(rec, &Linear::new(&layer.qkv), &normed, &y)?;
            Ok(y)
        },
        |layer, rec| {
            let y = rec.temporary("y", &[1, 1536])?;
            matvec(rec, &Linear { norm: Some(layer.norm()), ..Linear::new(&layer.qkv) }, &layer.x, &y)?;
            Ok(y)
        },
    ),
    (
        "turn in attention",
        |layer, rec| {
            let (q, y) = (rec.temporary("q", &[1, 1024])?, rec.temporary("y", &[1, 1024])?);
            rope_kv(rec, &layer.state, &layer.heads(), &layer.one, &q, &layer.cache)?;
            attention(rec, &layer.state, &ATTENTION, None, &q, &layer.cache, &y)?;
            Ok(y)
        },
        |layer, rec| {
            let y = rec.temporary("y", &[1, 1024])?;
            attention_next(rec, &layer.state, &ATTENTION, &layer.heads(), None, &layer.one, &layer.cache, &y)?;
            Ok(y)
        },
    ),
    (
        "gate_up",
        |layer, rec| {
            let (both, y) = (rec.temporary("both", &[1, 2 * 2816])?, rec.temporary("y", &[1, 2816])?);
            matvec(rec, &Linear::new(&layer.gate_up), &layer.x, &both)?;
            swiglu(rec, &both, &y)?;
            Ok(y)
        },
        |layer, rec| layer.record_gate_up(rec, None, &layer.x),
    ),
    (
        "norm in gate_up",
        |layer, rec| {
            let normed = rec.temporary("normed", &[1, 1024])?;
            rms_norm(rec, &layer.x, &layer.norm, &normed, 1e-5)?;
            layer.record_gate_up(rec, None, &normed)
        },
        |layer, rec| layer.record_gate_up(rec, Some(layer.norm()), &layer.x),
    ),
    #[cfg(feature = "lora")]
    (
        "adapter in matvec",
        |layer, rec| {
            let (inner, y) = (rec.temporary("inner", &[1, 48])?, rec.temporary("y", &[1, 1536])?);
            matvec(rec, &Linear::new(&layer.first), &layer.x, &inner)?;
            matvec(rec, &Linear::new(&layer.qkv), &layer.x, &y)?;
            add_lora(rec, &layer.low(&inner), &y)?;
            Ok(y)
        },
        |layer, rec| {
            let (inner, y) = (rec.temporary("inner", &[1, 48])?, rec.temporary("y", &[1, 1536])?);
            matvec(rec, &Linear::new(&layer.first), &layer.x, &inner)?;
            matvec_lora(rec, &Linear::new(&layer.qkv), &layer.low(&inner), &layer.x, &y)?;
            Ok(y)
        },
    ),
    #[cfg(feature = "lora")]
    (
        "no adapter in matvec",
        |layer, rec| {
            let (inner, y) = (rec.temporary("inner", &[1, 48])?, rec.temporary("y", &[1, 1536])?);
            matvec(rec, &Linear::new(&layer.first), &layer.x, &inner)?;
            matvec_lora(rec, &Linear::new(&layer.qkv), &layer.low(&inner), &layer.x, &y)?;
            Ok(y)
        },
        |layer, rec| {
            let y = rec.temporary("y", &[1, 1536])?;
            matvec(rec, &Linear::new(&layer.qkv), &layer.x, &y)?;
            Ok(y)
        },
    ),
];

impl Layer {
    fn new(target: &Target, weight: WeightType) -> Result<Layer, Error> {
        let device = &target.device;
        let matrix = |rows: u32| {
            let w = Matrix::declare(&device.target(), "w", weight, rows, 1024)?;
            let n_bytes = rows as usize * file_row_bytes(weight, 1024);
            w.upload(device, &[&weight_bytes(weight, n_bytes)]).map(|()| w)
        };
        let rope = RopeConfig::new(64, 1e4, RopeStyle::Interleaved);
        let state = StepState::declare()?;
        state.set(device, 100, 1)?;
        Ok(Layer {
            norm: device.upload("norm", &[1024], &common::uniform(1024))?,
            qkv: matrix(1536)?,
            gate_up: matrix(2 * 2816)?,
            x: device.upload("x", &[1, 1024], &common::uniform(1024))?,
            state,
            table: device.upload("table", &[256, 32, 2], &rope_table(&rope, 256))?,
            rope,
            one: device.upload("one", &[1, 1536], &common::uniform(1536))?,
            cache: CachedKeys::declare("cache", KvType::F16, [4, 256, 64], 256)?,
            #[cfg(feature = "lora")]
            first: device.upload_matrix("first", [48, 1024], &common::uniform(48 * 1024))?,
            #[cfg(feature = "lora")]
            second: device.upload("second", &[1536, 16], &common::uniform(1536 * 16))?,
        })
    }

    #[cfg(feature = "lora")]
    fn low<'a>(&'a self, inner: &'a Tensor) -> LowRank<'a> {
        LowRank { inner, b: &self.second, starts: &[0, 1024, 1280] }
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.norm, eps: 1e-5 }
    }

    fn heads(&self) -> Heads<'_> {
        let rope = Some((&self.rope, &self.table));
        Heads { n_heads: 16, n_kv_heads: 4, head_dim: 64, keys_hold_values: false, first_column: 0, rope, norm: None }
    }

    fn record_gate_up(&self, rec: &mut Recorder, norm: Option<Norm<'_>>, x: &Tensor) -> Result<Tensor, Error> {
        let y = rec.temporary("y", &[1, 2816])?;
        gate_up(rec, &self.gate_up, norm, Gate::Silu, x, &y)?;
        Ok(y)
    }
}

/// Measures fused kernels against the chains that they replace, in turns, from submission to completion: fusion saves
/// the gaps between kernels.
fn fusions(targets: &[Target]) {
    /// Copies in one submission, as many as a small model has layers.
    const COPIES: usize = 12;
    const ROUNDS: usize = 31;
    let weights = [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0];
    println!("\n{:<26} {:<10} {:>10} {:>10} {:>8}", "fusion", "device", "chain us", "fused us", "ratio");
    for (target, weight) in targets.iter().flat_map(|target| weights.map(|weight| (target, weight))) {
        let layer = Layer::new(target, weight).expect("the layer is valid");
        for &(name, chain, fused) in FUSIONS {
            let recordings = [chain, fused].map(|record| {
                let mut rec = target.device.recorder();
                (0..COPIES).for_each(|_| drop(record(&layer, &mut rec).expect("shapes agree")));
                rec.finish(&mut Workspace::default())
            });
            let mut times = [Vec::new(), Vec::new()];
            for round in 0..=ROUNDS {
                for (recording, times) in recordings.iter().zip(&mut times) {
                    let start = Instant::now();
                    let pending = target.device.run_and_read(recording, layer.state.tensor());
                    pending.and_then(pollster::block_on).expect("the recording runs");
                    // The first round compiles.
                    if round > 0 {
                        times.push(start.elapsed().as_secs_f64() / COPIES as f64 * 1e6);
                    }
                }
            }
            let [chain, fused] = times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            });
            let name = format!("{name}/{weight}");
            println!("{name:<26} {:<10} {chain:>10.1} {fused:>10.1} {:>7.2}x", target.name, chain / fused);
        }
    }
}

fn output(label: &str, shape: &[u32]) -> Result<Tensor, Error> {
    Tensor::declare(label, Role::Activations, shape, DType::F32)
}

/// Bytes of a matrix as in files: arbitrary quants, but scales and floats of ordinary size, because subnormals and
/// NaNs can take a different time.
fn weight_bytes(weight: WeightType, n: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = common::words(n.div_ceil(4)).flat_map(u32::to_le_bytes).take(n).collect();
    // The high byte of each float or f16 scale, at these offsets in a unit: floats of 0.5 to 1 for any mantissa, and
    // scales slightly above 0.0078.
    let (unit, high, places): (usize, u8, &[usize]) = match weight {
        WeightType::F32 => (4, 0x3f, &[3]),
        WeightType::F16 => (2, 0x38, &[1]),
        WeightType::BF16 => (2, 0x3f, &[1]),
        WeightType::Q8_0 => (34, 0x20, &[1]),
        WeightType::Q4_0 | WeightType::IQ4_NL | WeightType::Q2_0 | WeightType::Q1_0 => (18, 0x20, &[1]),
        WeightType::Q4_1 => (20, 0x20, &[1, 3]),
        WeightType::Q5_0 => (22, 0x20, &[1]),
        WeightType::Q5_1 => (24, 0x20, &[1, 3]),
        WeightType::Q2_K => (84, 0x20, &[81, 83]),
        WeightType::Q3_K => (110, 0x20, &[109]),
        WeightType::Q4_K => (144, 0x20, &[1, 3]),
        WeightType::Q5_K => (176, 0x20, &[1, 3]),
        WeightType::Q6_K => (210, 0x20, &[209]),
        WeightType::IQ4_XS => (136, 0x20, &[1]),
        WeightType::IQ3_S => (110, 0x20, &[1]),
        WeightType::IQ3_XXS => (98, 0x20, &[1]),
        WeightType::IQ2_S => (82, 0x20, &[1]),
        WeightType::IQ2_XS => (74, 0x20, &[1]),
        WeightType::IQ2_XXS => (66, 0x20, &[1]),
        // Scales are exponents or 8-bit floats.
        WeightType::MXFP4 => (17, 0x78, &[0]),
        WeightType::NVFP4 => (36, 0x38, &[0, 1, 2, 3]),
    };
    for element in bytes.chunks_exact_mut(unit) {
        places.iter().for_each(|&place| element[place] = high);
    }
    bytes
}
