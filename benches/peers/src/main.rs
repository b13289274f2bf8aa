//! tilewright against burn (wgpu) on the first adapter, and against candle on the CPU.
//!
//! `cargo run --release`, in this folder; a word such as `matmul` selects operations by name. All engines get the same
//! operands, and results are compared before timing. Engines alternate sample by sample, so that other load on the
//! machine affects all alike. A sample is as many runs as take about 50 ms, followed by one wait; operands stay on the
//! device. Times are medians; ratios are the peer's time by ours: above 1 we are faster.

use std::error::Error;
use std::time::{Duration, Instant};

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DeviceKind, TensorData, activation, module};
use candle_core::{DType as CandleType, Device as CandleDevice, Tensor as CandleTensor};
use candle_nn::attention::{AttnMask, flash_attn};
use tilewright::kernels::{self, AttentionConfig, CachedKeys, KvType, Linear, StepState};
use tilewright::{DType, Device, DeviceChoice, Role, Tensor, Workspace};

type Result<T> = std::result::Result<T, Box<dyn Error>>;
type BurnTensor<const D: usize> = burn::tensor::Tensor<D>;

const SAMPLES: usize = 9;
const SAMPLE: Duration = Duration::from_millis(50);
const EPS: f32 = 1e-5;

/// An operation with its shape.
#[derive(Clone, Copy)]
enum Op {
    /// `[m, k]` by `[k, n]`.
    Matmul { m: u32, k: u32, n: u32 },
    /// `[rows, dim]`.
    Softmax { rows: u32, dim: u32 },
    /// `[rows, dim]`.
    RmsNorm { rows: u32, dim: u32 },
    /// Causal, as many keys as queries.
    Attention { heads: u32, tokens: u32, head_dim: u32 },
}

const OPS: [Op; 8] = [
    Op::Matmul { m: 256, k: 256, n: 256 },
    Op::Matmul { m: 512, k: 512, n: 512 },
    Op::Matmul { m: 1024, k: 1024, n: 1024 },
    Op::Matmul { m: 128, k: 1024, n: 2816 },
    Op::Matmul { m: 1, k: 1024, n: 2816 },
    Op::Softmax { rows: 512, dim: 4096 },
    Op::RmsNorm { rows: 512, dim: 4096 },
    Op::Attention { heads: 8, tokens: 128, head_dim: 64 },
];

impl Op {
    fn name(self) -> String {
        match self {
            Op::Matmul { m: 1, k, n } => format!("matvec 1x{k}x{n}"),
            Op::Matmul { m, k, n } => format!("matmul {m}x{k}x{n}"),
            Op::Softmax { rows, dim } => format!("softmax {rows}x{dim}"),
            Op::RmsNorm { rows, dim } => format!("rms_norm {rows}x{dim}"),
            Op::Attention { heads, tokens, head_dim } => format!("attention {heads}x{tokens}x{head_dim}"),
        }
    }
}

/// An operation in an engine, with its operands.
struct Contender {
    /// Runs it `n` times and waits for the last.
    run: Box<dyn FnMut(usize) -> Result<()>>,
    /// Runs it once and returns the values in our own layout.
    result: Box<dyn Fn() -> Result<Vec<f32>>>,
}

fn ours(op: Op, device: &Device) -> Result<Contender> {
    let output = |shape: &[u32]| Tensor::declare("y", Role::Activations, shape, DType::F32);
    let mut rec = device.recorder();
    let y = match op {
        Op::Matmul { m, k, n } => {
            let w = device.upload_matrix("w", [n, k], &values(n * k, 2))?;
            let (x, y) = (device.upload("x", &[m, k], &values(m * k, 1))?, output(&[m, n])?);
            Linear::new(&w).record(&mut rec, &x, &y)?;
            y
        }
        Op::Softmax { rows, dim } => {
            let (x, y) = (device.upload("x", &[rows, dim], &values(rows * dim, 1))?, output(&[rows, dim])?);
            kernels::softmax(&mut rec, &x, &y)?;
            y
        }
        Op::RmsNorm { rows, dim } => {
            let (x, y) = (device.upload("x", &[rows, dim], &values(rows * dim, 1))?, output(&[rows, dim])?);
            let weight = device.upload("weight", &[dim], &vec![1f32; dim as usize])?;
            kernels::rms_norm(&mut rec, &x, &weight, &y, EPS)?;
            y
        }
        Op::Attention { heads, tokens, head_dim } => {
            let config = AttentionConfig {
                n_heads: heads,
                n_kv_heads: heads,
                head_dim,
                window: None,
                scale: (head_dim as f32).powf(-0.5),
                soft_cap: None,
                values_from: None,
                causal: true,
                whole_pass: false,
            };
            let len = heads * tokens * head_dim;
            let state = StepState::declare()?;
            state.set(device, 0, tokens)?;
            let q = device.upload("q", &[tokens, heads * head_dim], &values(len, 1))?;
            let cached = CachedKeys::declare("cache", KvType::F32, [heads, tokens, head_dim], tokens)?;
            for (tensor, seed) in [&cached.k].into_iter().chain(&cached.v).zip([2, 3]) {
                let by_head = swap(&values(len, seed), tokens, heads, head_dim);
                device.write(tensor, 0, &by_head.into_iter().map(f32::to_bits).collect::<Vec<_>>())?;
            }
            let y = output(&[tokens, heads * head_dim])?;
            kernels::attention(&mut rec, &state, &config, None, &q, &cached, &y)?;
            y
        }
    };
    let recording = std::rc::Rc::new(rec.finish(&mut Workspace::default()));
    let (device, again) = (device.clone(), (device.clone(), recording.clone()));
    Ok(Contender {
        run: Box::new(move |n| {
            for _ in 0..n {
                device.run(&recording)?;
            }
            Ok(pollster::block_on(device.drained())?)
        }),
        result: Box::new(move || {
            again.0.run(&again.1)?;
            Ok(pollster::block_on(again.0.read(&y))?)
        }),
    })
}

fn burn(op: Op, device: &burn::tensor::Device) -> Result<Contender> {
    match op {
        Op::Matmul { m, k, n } => {
            // [n, k] to [k, n]: the layout of burn's own linear layer.
            let w = swap(&values(n * k, 2), n, k, 1);
            let (x, w) = (burn_tensor(values(m * k, 1), [m, k], device), burn_tensor(w, [k, n], device));
            Ok(burn_contender(device, move || x.clone().matmul(w.clone())))
        }
        Op::Softmax { rows, dim } => {
            let x = burn_tensor(values(rows * dim, 1), [rows, dim], device);
            Ok(burn_contender(device, move || activation::softmax(x.clone(), 1)))
        }
        Op::RmsNorm { rows, dim } => {
            let x = burn_tensor(values(rows * dim, 1), [rows, dim], device);
            let norm = burn::nn::RmsNormConfig::new(dim as usize).with_epsilon(EPS.into()).init(device);
            Ok(burn_contender(device, move || norm.forward(x.clone())))
        }
        Op::Attention { heads, tokens, head_dim } => {
            let operand = |seed| {
                let values = swap(&values(heads * tokens * head_dim, seed), tokens, heads, head_dim);
                burn_tensor(values, [1, heads, tokens, head_dim], device)
            };
            let (q, k, v) = (operand(1), operand(2), operand(3));
            let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
            let attend = move || module::attention(q.clone(), k.clone(), v.clone(), None, None, options);
            let mut contender = burn_contender(device, attend);
            let by_head = contender.result;
            contender.result = Box::new(move || Ok(swap(&by_head()?, heads, tokens, head_dim)));
            Ok(contender)
        }
    }
}

fn burn_tensor<const D: usize>(values: Vec<f32>, shape: [u32; D], device: &burn::tensor::Device) -> BurnTensor<D> {
    BurnTensor::from_data(TensorData::new(values, shape.map(|d| d as usize)), device)
}

fn burn_contender<const D: usize>(
    device: &burn::tensor::Device,
    op: impl Fn() -> BurnTensor<D> + Clone + 'static,
) -> Contender {
    let (device, once) = (device.clone(), op.clone());
    Contender {
        run: Box::new(move |n| {
            for _ in 0..n {
                op();
            }
            Ok(device.sync()?)
        }),
        result: Box::new(move || {
            Ok(once().try_into_data()?.try_into_vec::<f32>().map_err(|error| format!("{error:?}"))?)
        }),
    }
}

fn candle(op: Op) -> Result<Contender> {
    let tensor = |values: Vec<f32>, shape: &[u32]| {
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        CandleTensor::from_vec(values, shape, &CandleDevice::Cpu)
    };
    Ok(match op {
        Op::Matmul { m, k, n } => {
            // As in candle's own linear layer.
            let (x, w) = (tensor(values(m * k, 1), &[m, k])?, tensor(values(n * k, 2), &[n, k])?.t()?);
            candle_contender(move || x.matmul(&w))
        }
        Op::Softmax { rows, dim } => {
            let x = tensor(values(rows * dim, 1), &[rows, dim])?;
            candle_contender(move || candle_nn::ops::softmax_last_dim(&x))
        }
        Op::RmsNorm { rows, dim } => {
            let x = tensor(values(rows * dim, 1), &[rows, dim])?;
            let weight = CandleTensor::ones(dim as usize, CandleType::F32, &CandleDevice::Cpu)?;
            candle_contender(move || candle_nn::ops::rms_norm(&x, &weight, EPS))
        }
        Op::Attention { heads, tokens, head_dim } => {
            let operand = |seed| tensor(values(heads * tokens * head_dim, seed), &[1, tokens, heads, head_dim]);
            let (q, k, v) = (operand(1)?, operand(2)?, operand(3)?);
            let scale = (head_dim as f32).powf(-0.5);
            let attend = move || flash_attn::<f32>(&q, &k, &v, scale, AttnMask::causal(), None, None);
            let mut contender = candle_contender(attend);
            let by_head = contender.result;
            contender.result = Box::new(move || Ok(swap(&by_head()?, heads, tokens, head_dim)));
            contender
        }
    })
}

fn candle_contender(op: impl Fn() -> candle_core::Result<CandleTensor> + Clone + 'static) -> Contender {
    let once = op.clone();
    Contender {
        run: Box::new(move |n| (0..n).try_for_each(|_| op().map(drop)).map_err(Into::into)),
        result: Box::new(move || Ok(once()?.flatten_all()?.to_vec1()?)),
    }
}

/// Milliseconds per run in each engine, alternating.
fn race(contenders: &mut [Contender]) -> Result<Vec<f64>> {
    let mut n_runs = Vec::new();
    for contender in contenders.iter_mut() {
        // The first run compiles and may try several kernels.
        (contender.run)(1)?;
        let start = Instant::now();
        (contender.run)(1)?;
        n_runs.push((SAMPLE.as_secs_f64() / start.elapsed().as_secs_f64()).ceil().clamp(1.0, 1000.0) as usize);
    }
    let mut times = vec![Vec::new(); contenders.len()];
    for _ in 0..SAMPLES {
        for (i, contender) in contenders.iter_mut().enumerate() {
            let start = Instant::now();
            (contender.run)(n_runs[i])?;
            times[i].push(start.elapsed().as_secs_f64() * 1e3 / n_runs[i] as f64);
        }
    }
    Ok(times
        .into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[SAMPLES / 2]
        })
        .collect())
}

/// Rejects results that differ by more than F32 arithmetic explains.
fn agree(name: &str, engine: &str, found: &[f32], expected: &[f32]) -> Result<()> {
    let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    let error = found.iter().zip(expected).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
    if found.len() != expected.len() || error.is_nan() || error > 2e-3 * largest {
        return Err(format!("{name} on {engine} differs by {error:e} where values reach {largest:e}").into());
    }
    Ok(())
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let adapters = pollster::block_on(Device::adapters());
    let gpu = pollster::block_on(Device::open(&DeviceChoice::Gpu, None))?;
    let cpu = Device::cpu();
    // wgpu counts software adapters as CPUs, and burn selects by that.
    let is_software = adapters.first().is_some_and(|adapter| adapter.is_software);
    let kind = if is_software { DeviceKind::Cpu } else { DeviceKind::DefaultDevice };
    let burn_device = burn::tensor::Device::wgpu(kind);
    println!(
        "gpu  {} ({}), tier {}; burn-wgpu 0.22.1 on {burn_device:?}",
        gpu.info().name,
        gpu.info().driver,
        gpu.info().tier
    );
    println!("cpu  {}; candle 0.11.1", cpu.info().name);
    println!(
        "\n{:<24} {:>10} {:>10} {:>8} {:>12} {:>10} {:>8}",
        "operation", "gpu ms", "burn ms", "ratio", "cpu ms", "candle ms", "ratio"
    );
    for op in OPS {
        let name = op.name();
        if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        let mut contenders = [ours(op, &gpu)?, burn(op, &burn_device)?, ours(op, &cpu)?, candle(op)?];
        let expected = (contenders[2].result)()?;
        for (engine, contender) in ["our gpu", "burn", "our cpu", "candle"].into_iter().zip(&contenders) {
            agree(&name, engine, &(contender.result)()?, &expected)?;
        }
        let times = race(&mut contenders)?;
        let [gpu_ms, burn_ms, cpu_ms, candle_ms] = times[..] else { return Err("four engines, four times".into()) };
        println!(
            "{name:<24} {gpu_ms:>10.3} {burn_ms:>10.3} {:>7.2}x {cpu_ms:>12.3} {candle_ms:>10.3} {:>7.2}x",
            burn_ms / gpu_ms,
            candle_ms / cpu_ms
        );
    }
    Ok(())
}

/// Seeded numbers in [-1, 1).
fn values(n: u32, seed: u64) -> Vec<f32> {
    let next = |state: u64| state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let states = std::iter::successors(Some(next(seed)), move |&state| Some(next(state)));
    states.take(n as usize).map(|state| (state >> 32) as f32 / (1u64 << 31) as f32 - 1.0).collect()
}

/// `[a, b, c]` to `[b, a, c]`.
fn swap(values: &[f32], a: u32, b: u32, c: u32) -> Vec<f32> {
    let (a, b, c) = (a as usize, b as usize, c as usize);
    let rows = (0..b).flat_map(|j| (0..a).map(move |i| (i * b + j) * c));
    rows.flat_map(|at| values[at..at + c].iter().copied()).collect()
}
