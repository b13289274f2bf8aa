//! Single kernels on typed arrays.

use wasm_bindgen::prelude::*;

use super::{Device, to_js_error};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{self, AttentionConfig, RopeConfig, RopeScaling, RopeStyle, StepState, rope_table};
use crate::recording::{Recorder, Workspace};
use crate::tensor::{Role, Tensor};

#[wasm_bindgen]
impl Device {
    /// The product of `a` (`m` rows of `k`) and `b` (`k` rows of `n`).
    pub async fn matmul(&self, a: Vec<f32>, b: Vec<f32>, m: u32, n: u32, k: u32) -> Result<Vec<f32>, JsValue> {
        self.run(&[m, n], |device, rec, y| {
            let a = device.upload("a", &[m, k], &a)?;
            let b = device.upload("b", &[k, n], &b)?;
            kernels::matmul_plain(rec, &a, &b, y)
        })
        .await
    }

    /// Root-mean-square normalisation of each row of `x`, as long as `weight`.
    #[wasm_bindgen(js_name = rmsNorm)]
    pub async fn rms_norm(&self, x: Vec<f32>, weight: Vec<f32>, eps: f32) -> Result<Vec<f32>, JsValue> {
        let shape = rows("rms_norm", "x", &x, weight.len()).map_err(to_js_error)?;
        self.run(&shape, |device, rec, y| {
            let x = device.upload("x", &shape, &x)?;
            let weight = device.upload("weight", &[shape[1]], &weight)?;
            kernels::rms_norm(rec, &x, &weight, y, eps)
        })
        .await
    }

    /// Softmax of each row of `columns` elements.
    pub async fn softmax(&self, x: Vec<f32>, columns: u32) -> Result<Vec<f32>, JsValue> {
        let shape = rows("softmax", "x", &x, columns as usize).map_err(to_js_error)?;
        self.run(&shape, |device, rec, y| kernels::softmax(rec, &device.upload("x", &shape, &x)?, y)).await
    }

    /// Rotary position embedding of `x`, rows of `n_heads * head_dim`, at positions from `first_pos` on.
    pub async fn rope(
        &self,
        x: Vec<f32>,
        n_heads: u32,
        head_dim: u32,
        first_pos: u32,
        theta: f64,
        style: String,
    ) -> Result<Vec<f32>, JsValue> {
        let style = match style.as_str() {
            "interleaved" => RopeStyle::Interleaved,
            "halves" => RopeStyle::Halves,
            other => {
                let (expected, found) = ("interleaved or halves".into(), other.into());
                return Err(to_js_error(Error::Option { option: "style", expected, found }));
            }
        };
        let [n_tokens, _] = rows("rope", "x", &x, n_heads as usize * head_dim as usize).map_err(to_js_error)?;
        let shape = [n_tokens, n_heads, head_dim];
        self.run(&shape, |device, rec, y| {
            let config = RopeConfig { rot_dims: head_dim, theta, style, scaling: RopeScaling::None };
            let table = rope_table(&config, n_tokens.saturating_add(first_pos));
            let table = device.upload("table", &[n_tokens.saturating_add(first_pos), head_dim / 2, 2], &table)?;
            let x = device.upload("x", &shape, &x)?;
            let state = StepState::declare()?;
            state.set(device, first_pos, n_tokens)?;
            kernels::rope(rec, &state, &config, &table, &x, y)
        })
        .await
    }

    /// Causal attention. `q`: rows of `n_heads * head_dim`; `k`, `v`: rows of `n_kv_heads * head_dim`, at least as many;
    /// the last query sees all of them.
    pub async fn attention(
        &self,
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        n_heads: u32,
        n_kv_heads: u32,
        head_dim: u32,
    ) -> Result<Vec<f32>, JsValue> {
        let (q_dim, kv_dim) = (n_heads as usize * head_dim as usize, n_kv_heads as usize * head_dim as usize);
        let q_shape = rows("attention", "q", &q, q_dim).map_err(to_js_error)?;
        let [n_keys, _] = rows("attention", "k", &k, kv_dim).map_err(to_js_error)?;
        let Some(first_pos) = n_keys.checked_sub(q_shape[0]).filter(|_| v.len() == k.len()) else {
            return Err(to_js_error(Error::Operand {
                kernel: "attention",
                operand: "k",
                expected: format!("at least {} rows, and as many as `v`", q_shape[0]),
                found: format!("{n_keys} rows, and `v` has {}", v.len() / kv_dim),
            }));
        };
        self.run(&q_shape, |device, rec, y| {
            let cache_shape = [n_kv_heads, n_keys, head_dim];
            let q = device.upload("q", &q_shape, &q)?;
            let k = device.upload("k", &cache_shape, &by_head(&k, cache_shape))?;
            let v = device.upload("v", &cache_shape, &by_head(&v, cache_shape))?;
            let state = StepState::declare()?;
            state.set(device, first_pos, q_shape[0])?;
            let scale = (head_dim as f32).sqrt().recip();
            let config =
                AttentionConfig { n_heads, n_kv_heads, head_dim, window: None, scale, soft_cap: None, causal: true };
            kernels::attention(rec, &state, &config, &q, &k, &v, y)
        })
        .await
    }
}

impl Device {
    /// Runs what `record` records and reads its result, a new tensor of this shape.
    async fn run(
        &self,
        shape: &[u32],
        record: impl FnOnce(&crate::Device, &mut Recorder, &Tensor) -> Result<(), Error>,
    ) -> Result<Vec<f32>, JsValue> {
        let device = &self.0;
        let work = async {
            let y = Tensor::declare("y", Role::Activations, shape, DType::F32)?;
            let mut rec = Recorder::new(device);
            record(device, &mut rec, &y)?;
            let mut words = device.run_and_read(&rec.finish(&mut Workspace::default()), &y)?.await?;
            words.truncate(y.len());
            Ok(bytemuck::cast_vec(words))
        };
        work.await.map_err(to_js_error)
    }
}

/// The shape of a matrix given as its elements.
fn rows(kernel: &'static str, operand: &'static str, x: &[f32], columns: usize) -> Result<[u32; 2], Error> {
    match x.len().checked_div(columns) {
        Some(n_rows @ 1..) if n_rows * columns == x.len() => Ok([n_rows as u32, columns as u32]),
        _ => Err(Error::Operand {
            kernel,
            operand,
            expected: format!("whole rows of {columns} elements, at least one"),
            found: format!("{} elements", x.len()),
        }),
    }
}

/// Keys or values head by head, `[Hkv, S, D]`, from position by position, `[S, Hkv * D]`.
fn by_head(x: &[f32], [n_heads, n_pos, head_dim]: [u32; 3]) -> Vec<f32> {
    let (heads, positions, d) = (n_heads as usize, n_pos as usize, head_dim as usize);
    let starts = (0..heads).flat_map(|head| (0..positions).map(move |pos| (pos * heads + head) * d));
    starts.flat_map(|start| x[start..start + d].iter().copied()).collect()
}
