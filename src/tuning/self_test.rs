//! The self-test: each shader variant of a device's tier on small operands, compared with the CPU's twin. Drivers
//! miscompile shaders; a variant that computes wrongly is banned, and the baseline takes its place.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::operands::{input, matrix};
use super::{Tuning, compare, file};
use crate::device::Device;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{
    AttentionConfig, Gelu, LayerNorm, Linear, Norm, Pooling, Qkv, RopeConfig, RopeScaling, RopeStyle, Sampling,
    StepState, add, argmax, attention, embed, embed_sum, gate_up, geglu, gelu, head_norm, last_row, layer_norm,
    linear_norm, matmul, matmul_plain, matvec, pool, rms_norm, rope_kv, rope_table, sample, softmax, split_sum, swiglu,
};
use crate::recording::{Recorder, Workspace};
use crate::shaders::{self, Kernel, Tier, Variant};
use crate::tensor::Tensor;

/// When no further check is begun, so that opening a device takes at most 200 ms longer. What is left is tested when it
/// is opened next.
const BUDGET: Duration = Duration::from_millis(170);

/// What was found where there is no folder, by identity.
static FOUND: LazyLock<Mutex<HashMap<String, Tuning>>> = LazyLock::new(Mutex::default);

type Record = fn(&mut Recorder, WeightType) -> Result<Vec<Tensor>, Error>;

/// Kernels that are recorded together, and how; the outputs are compared.
struct Check {
    kernels: &'static [&'static Kernel],
    weight: Option<WeightType>,
    record: Record,
}

/// A device with what is known of it: from its file in `folder`, from the memory of this process where there is no
/// folder, and from tests of variants that neither knows.
///
/// # Errors
/// [`Error::Gpu`] if a variant of the baseline computes wrongly; errors of [`Device::run`].
pub(crate) async fn examine(mut device: Device, folder: Option<&Path>) -> Result<Device, Error> {
    let mut notices = Vec::new();
    let path: Option<PathBuf> = folder.map(|folder| file::path(folder, device.info()));
    let identity = serde_json::Value::Object(file::identity(device.info())).to_string();
    let known = match &path {
        Some(path) => file::read(path, device.info()).unwrap_or_else(|why| {
            notices.push(format!("{} is ignored: {why}", path.display()));
            None
        }),
        None => FOUND.lock().unwrap_or_else(PoisonError::into_inner).get(&identity).cloned(),
    };
    device = device.with_tuning(known.unwrap_or_default());
    if test(&mut device, BUDGET, &mut notices).await? {
        device.free_unused();
        let tuning = device.tuning();
        match &path {
            Some(path) => {
                if let Err(error) = file::write(path, device.info(), tuning) {
                    notices.push(format!("the self-test's outcome was not saved: {error}"));
                }
            }
            None => {
                let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
                found.insert(identity, tuning.clone());
            }
        }
    }
    Ok(device.with_file(path, notices))
}

/// Tests variants that have not been tested, as long as the budget lasts; returns whether there were any.
pub(super) async fn test(device: &mut Device, budget: Duration, notices: &mut Vec<String>) -> Result<bool, Error> {
    let start = Instant::now();
    let cpu = Device::cpu();
    let mut is_any = false;
    for check in checks() {
        // A variant that fails is banned, and the check made again with what takes its place.
        loop {
            let variants = check.variants(device);
            if variants.iter().all(|variant| device.tuning().passed.contains(variant.label)) {
                break;
            }
            if start.elapsed() >= budget {
                return Ok(is_any);
            }
            is_any = true;
            let mut tuning = device.tuning().clone();
            match check.outcome(device, &cpu).await? {
                Ok(()) => {
                    tuning.passed.extend(variants.iter().map(|variant| variant.label));
                    *device = device.with_tuning(tuning);
                    break;
                }
                Err(found) => {
                    let labels: Vec<_> =
                        variants.iter().filter(|v| v.tier != Tier::Baseline).map(|v| v.label).collect();
                    if labels.is_empty() {
                        let labels: Vec<_> = variants.iter().map(|variant| variant.label).collect();
                        return Err(Error::Gpu {
                            context: format!("the self-test of `{}`", labels.join("`, `")),
                            message: format!("{found}; nothing could take its place"),
                        });
                    }
                    for label in labels {
                        notices.push(format!("`{label}` is not used on this driver: {found}"));
                        tuning.banned.insert(label, found.clone());
                    }
                    *device = device.with_tuning(tuning);
                }
            }
        }
    }
    Ok(is_any)
}

impl Check {
    /// The variants that the device takes.
    fn variants(&self, device: &Device) -> Vec<&'static Variant> {
        let of = |kernel: &&'static Kernel| kernel.variant(self.weight, device.tier_for(kernel, self.weight));
        self.kernels.iter().filter_map(of).collect()
    }

    /// Whether the device computes what the CPU does, or what it does instead.
    async fn outcome(&self, device: &Device, cpu: &Device) -> Result<Result<(), String>, Error> {
        let want = self.outputs(cpu).await?;
        match self.outputs(device).await {
            Ok(got) => Ok(got.iter().zip(&want).try_for_each(|(got, want)| compare(got, want))),
            Err(error @ Error::DeviceLost { .. }) => Err(error),
            // A compiler may also refuse a variant.
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    async fn outputs(&self, device: &Device) -> Result<Vec<(DType, Vec<u32>)>, Error> {
        // A choice might take another variant than the one to be tested.
        let mut rec = Recorder::new(&device.with_tuning(device.tuning().without_choices()));
        let tensors = (self.record)(&mut rec, self.weight.unwrap_or(WeightType::F32))?;
        device.run(&rec.finish(&mut Workspace::default()))?;
        let mut outputs = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            outputs.push((tensor.dtype(), device.read(tensor).await?));
        }
        Ok(outputs)
    }
}

/// The kernels of forward passes, by how much depends on them.
fn checks() -> impl Iterator<Item = Check> {
    use WeightType::{BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let plain = PLAIN.iter().map(|&(kernels, record)| Check { kernels, weight: None, record });
    let products = [Q8_0, Q4_K, Q4_0, F16, Q6_K, F32, BF16, Q5_K].into_iter().flat_map(|weight| {
        PRODUCTS.iter().map(move |&(kernels, record)| Check { kernels, weight: Some(weight), record })
    });
    let encoders = [F32, F16, Q8_0, Q4_K, Q4_0, Q6_K, BF16, Q5_K].into_iter().flat_map(|weight| {
        ENCODERS.iter().map(move |&(kernels, record)| Check { kernels, weight: Some(weight), record })
    });
    plain.chain(products).chain(encoders)
}

/// Kernels without a matrix.
static PLAIN: [(&[&Kernel], Record); 16] = [
    (&[&shaders::RMS_NORM], |rec, _| {
        let y = blank(rec, &[3, 260])?;
        rms_norm(rec, &input(rec, &[3, 260])?, &input(rec, &[260])?, &y, 1e-5)?;
        Ok(vec![y])
    }),
    (&[&shaders::ATTENTION_DECODE, &shaders::ATTENTION_MERGE], |rec, _| attend(rec, 1, 1500, 1100)),
    (&[&shaders::ATTENTION_PREFILL], |rec, _| attend(rec, 16, 64, 21)),
    (&[&shaders::ARGMAX, &shaders::ARGMAX_MERGE], |rec, _| {
        let ids = rec.device().upload("ids", &[1], &[0u32])?;
        argmax(rec, &input(rec, &[1, 5000])?, &ids)?;
        Ok(vec![ids])
    }),
    (&[&shaders::SAMPLE], draw),
    (&[&shaders::SWIGLU], |rec, _| {
        let y = blank(rec, &[2, 36])?;
        swiglu(rec, &input(rec, &[2, 72])?, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::ROPE_KV], |rec, _| rotate(rec)),
    (&[&shaders::LAST_ROW], |rec, _| {
        let y = blank(rec, &[1, 260])?;
        last_row(rec, &state(rec, 2, 3)?, &input(rec, &[3, 260])?, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::SOFTMAX], |rec, _| {
        let y = blank(rec, &[3, 260])?;
        softmax(rec, &input(rec, &[3, 260])?, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::LAYER_NORM], |rec, _| {
        let (x, vector, y) = (input(rec, &[3, 260])?, input(rec, &[260])?, blank(rec, &[3, 260])?);
        layer_norm(rec, &x, &LayerNorm { weight: &vector, bias: Some(&vector), eps: 1e-5 }, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::GELU, &shaders::ADD], |rec, _| {
        let (x, y) = (input(rec, &[300])?, blank(rec, &[300])?);
        gelu(rec, &x, &y, Gelu::Tanh)?;
        add(rec, &x, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::GEGLU], |rec, _| {
        let y = blank(rec, &[2, 36])?;
        geglu(rec, &input(rec, &[2, 72])?, &y, Gelu::Exact)?;
        Ok(vec![y])
    }),
    (&[&shaders::HEAD_NORM], |rec, _| {
        let (weight, qkv) = (input(rec, &[2, 20])?, input(rec, &[3, 160])?);
        head_norm(rec, [4, 2, 20], &weight, 1e-5, &qkv)?;
        Ok(vec![qkv])
    }),
    (&[&shaders::POOL], |rec, _| {
        let (x, y) = (input(rec, &[70, 260])?, blank(rec, &[2, 260])?);
        let spans = rec.device().upload("spans", &[2, 2], &[0u32, 3, 3, 70])?;
        pool(rec, Pooling::Mean, true, &spans, &x, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::SPLIT_SUM], |rec, _| {
        let y = blank(rec, &[3, 70])?;
        split_sum(rec, &input(rec, &[12, 70])?, Some(&input(rec, &[70])?), None, 0, true, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::MATMUL_PLAIN], |rec, _| {
        let y = blank(rec, &[20, 68])?;
        matmul_plain(rec, &input(rec, &[20, 36])?, &input(rec, &[36, 68])?, &y)?;
        Ok(vec![y])
    }),
];

/// Kernels of text encoders with a matrix, which is of any type.
static ENCODERS: [(&[&Kernel], Record); 2] = [
    (&[&shaders::EMBED_SUM], |rec, weight| {
        let (w, y) = (matrix(rec.device(), weight, 20, 512)?, blank(rec, &[3, 512])?);
        let tokens = rec.device().upload("tokens", &[3, 3], &[19u32, 0, 1, 0, 3, 0, 7, 1, 1])?;
        let (positions, types) = (input(rec, &[4, 512])?, input(rec, &[2, 512])?);
        embed_sum(rec, &tokens, &w, Some(&positions), Some(&types), &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::LINEAR_NORM], |rec, weight| {
        let (w, y) = (matrix(rec.device(), weight, 68, 512)?, blank(rec, &[20, 68])?);
        let norm = LayerNorm { weight: &input(rec, &[68])?, bias: None, eps: 1e-5 };
        linear_norm(rec, &Linear::new(&w), &norm, &input(rec, &[20, 512])?, &y)?;
        Ok(vec![y])
    }),
];

/// Kernels with a matrix, which is of any type.
static PRODUCTS: [(&[&Kernel], Record); 5] = [
    (&[&shaders::MATVEC], |rec, weight| {
        let (w, y) = (matrix(rec.device(), weight, 22, DIM)?, blank(rec, &[2, 22])?);
        matvec(rec, &Linear::new(&w), &input(rec, &[2, DIM])?, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::QKV], project),
    (&[&shaders::GATE_UP], |rec, weight| {
        let (w, vector) = (matrix(rec.device(), weight, 22, DIM)?, input(rec, &[DIM])?);
        let (x, y) = (input(rec, &[2, DIM])?, blank(rec, &[2, 11])?);
        gate_up(rec, &w, Some(Norm { weight: &vector, eps: 1e-5 }), &x, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::MATMUL], |rec, weight| {
        let (w, y) = (matrix(rec.device(), weight, 70, 512)?, blank(rec, &[20, 70])?);
        matmul(rec, &Linear::new(&w), &input(rec, &[20, 512])?, &y)?;
        Ok(vec![y])
    }),
    (&[&shaders::EMBED], |rec, weight| {
        let (w, y) = (matrix(rec.device(), weight, 20, 512)?, blank(rec, &[3, 512])?);
        let tokens = rec.device().upload("tokens", &[8], &[3u32, 0, 19, 7, 1, 18, 2, 4])?;
        embed(rec, &state(rec, 2, 3)?, &tokens, &w, &y)?;
        Ok(vec![y])
    }),
];

/// Columns of the matrices: more blocks than lanes, in whole super-blocks.
const DIM: u32 = 2304;

/// An output, so that a kernel that writes nothing is seen not to.
fn blank(rec: &Recorder, shape: &[u32]) -> Result<Tensor, Error> {
    rec.device().upload("y", shape, &vec![0f32; shape.iter().product::<u32>() as usize])
}

fn state(rec: &Recorder, pos: u32, n_tokens: u32) -> Result<StepState, Error> {
    let state = StepState::declare()?;
    state.set(rec.device(), pos, n_tokens)?;
    Ok(state)
}

fn attend(rec: &mut Recorder, n_tokens: u32, capacity: u32, pos: u32) -> Result<Vec<Tensor>, Error> {
    let config = AttentionConfig {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 32,
        window: None,
        scale: 1.0,
        soft_cap: None,
        causal: true,
    };
    let (q, y) = (input(rec, &[n_tokens, 128])?, blank(rec, &[n_tokens, 128])?);
    let (k, v) = (input(rec, &[2, capacity, 32])?, input(rec, &[2, capacity, 32])?);
    attention(rec, &state(rec, pos, n_tokens)?, &config, &q, &k, &v, &y)?;
    Ok(vec![y])
}

const ROPE: RopeConfig =
    RopeConfig { rot_dims: 16, theta: 1e4, style: RopeStyle::Interleaved, scaling: RopeScaling::None };

fn rotate(rec: &mut Recorder) -> Result<Vec<Tensor>, Error> {
    let table = rec.device().upload("table", &[8, 8, 2], &rope_table(&ROPE, 8))?;
    let (q, k, v) = (blank(rec, &[3, 32])?, blank(rec, &[1, 8, 16])?, blank(rec, &[1, 8, 16])?);
    rope_kv(rec, &state(rec, 2, 3)?, &ROPE, &table, &input(rec, &[3, 64])?, &q, &k, &v)?;
    Ok(vec![q, k, v])
}

fn project(rec: &mut Recorder, weight: WeightType) -> Result<Vec<Tensor>, Error> {
    let table = rec.device().upload("table", &[8, 8, 2], &rope_table(&ROPE, 8))?;
    let (w, vector, x) = (matrix(rec.device(), weight, 64, DIM)?, input(rec, &[DIM])?, input(rec, &[2, DIM])?);
    let (q, k, v) = (blank(rec, &[2, 32])?, blank(rec, &[1, 8, 16])?, blank(rec, &[1, 8, 16])?);
    let norm = Some(Norm { weight: &vector, eps: 1e-5 });
    let qkv = Qkv { w: &w, bias: None, norm, first_head: 0, rope: &ROPE, table: &table };
    qkv.record(rec, &state(rec, 2, 2)?, &x, &q, &k, &v)?;
    Ok(vec![q, k, v])
}

/// A draw among one: which token it is depends on no rounding.
fn draw(rec: &mut Recorder, _: WeightType) -> Result<Vec<Tensor>, Error> {
    let settings = Sampling {
        temperature: 0.8,
        top_k: 1,
        top_p: 0.95,
        min_p: 0.05,
        seed: [1, 0],
        repeat_penalty: 1.0,
        repeat_last_n: 64,
    };
    let sampling = rec.device().upload::<u32>("sampling", &[8], bytemuck::cast_slice(&[settings]))?;
    let ids = rec.device().upload("ids", &[1], &[0u32])?;
    sample(rec, &sampling, &state(rec, 2, 1)?, &input(rec, &[1, 3000])?, &ids)?;
    Ok(vec![ids])
}
