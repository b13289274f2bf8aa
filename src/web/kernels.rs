//! Single kernels on device tensors.

use std::cell::Cell;
use std::fmt::Display;

use js_sys::Float32Array;
use wasm_bindgen::prelude::*;

use super::{Device, to_js_error};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{
    self, AttentionConfig, CachedKeys, KvType, LayerNorm, RopeConfig, RopeStyle, StepState, rope_table,
};
use crate::recording::{Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};

/// Numbers (F32) on a device. A kernel's result is computed when read, when another kernel needs it, or by
/// [`DeviceTensor::compute`].
#[wasm_bindgen]
pub struct DeviceTensor {
    device: crate::Device,
    tensor: Tensor,
    /// Its pending computation.
    recording: Cell<Option<Recording>>,
    /// Whether its shape was given. Otherwise a kernel chooses it.
    has_shape: bool,
}

#[wasm_bindgen]
impl DeviceTensor {
    /// Dimensions, the last one contiguous.
    pub fn shape(&self) -> Vec<u32> {
        self.tensor.shape().to_vec()
    }

    /// Submits its computation without waiting.
    pub fn compute(&self) -> Result<(), JsValue> {
        self.run().map_err(to_js_error)
    }

    /// The numbers, once computed.
    pub async fn read(&self) -> Result<Float32Array, JsValue> {
        let recording = self.recording.take();
        let bytes = self.device.read_array(&self.tensor, recording.as_ref()).await.map_err(to_js_error)?;
        Ok(Float32Array::new(&bytes.buffer()))
    }
}

#[wasm_bindgen]
impl Device {
    /// A tensor with these numbers. Without a shape, kernels choose it.
    pub async fn upload(&self, data: Float32Array, shape: Option<Vec<u32>>) -> Result<DeviceTensor, JsValue> {
        self.upload_array(data, shape).await.map_err(to_js_error)
    }

    /// The product of `a` (`m` rows of `k`) and `b` (`k` rows of `n`).
    pub fn matmul(&self, a: &DeviceTensor, b: &DeviceTensor, m: u32, n: u32, k: u32) -> Result<DeviceTensor, JsValue> {
        self.result(&[m, n], |rec, y| {
            kernels::matmul_plain(rec, &a.of_shape("matmul", "a", &[m, k])?, &b.of_shape("matmul", "b", &[k, n])?, y)
        })
    }

    /// Root-mean-square normalisation of each row of `x`, as long as `weight`.
    #[wasm_bindgen(js_name = rmsNorm)]
    pub fn rms_norm(&self, x: &DeviceTensor, weight: &DeviceTensor, eps: f32) -> Result<DeviceTensor, JsValue> {
        let dim = weight.tensor.len() as u64;
        let x = x.of_rows("rms_norm", "x", dim).map_err(to_js_error)?;
        self.result(x.shape(), |rec, y| {
            let weight = weight.of_shape("rms_norm", "weight", &x.shape()[1..])?;
            kernels::rms_norm(rec, &x, &weight, y, eps)
        })
    }

    /// Layer normalisation of each row of `x`, as long as `weight` and `bias`.
    #[wasm_bindgen(js_name = layerNorm)]
    pub fn layer_norm(
        &self,
        x: &DeviceTensor,
        weight: &DeviceTensor,
        bias: &DeviceTensor,
        eps: f32,
    ) -> Result<DeviceTensor, JsValue> {
        let dim = weight.tensor.len() as u64;
        let x = x.of_rows("layer_norm", "x", dim).map_err(to_js_error)?;
        self.result(x.shape(), |rec, y| {
            let weight = weight.of_shape("layer_norm", "weight", &x.shape()[1..])?;
            let bias = bias.of_shape("layer_norm", "bias", &x.shape()[1..])?;
            kernels::layer_norm(rec, &x, &LayerNorm { weight: &weight, bias: Some(&bias), eps }, y)
        })
    }

    /// Softmax of each row of `columns` elements.
    pub fn softmax(&self, x: &DeviceTensor, columns: u32) -> Result<DeviceTensor, JsValue> {
        let x = x.of_rows("softmax", "x", columns.into()).map_err(to_js_error)?;
        self.result(x.shape(), |rec, y| kernels::softmax(rec, &x, y))
    }

    /// Rotary position embedding of `x`, rows of `n_heads * head_dim`, at positions from `first_pos` on.
    pub fn rope(
        &self,
        x: &DeviceTensor,
        n_heads: u32,
        head_dim: u32,
        first_pos: u32,
        theta: f64,
        style: &str,
    ) -> Result<DeviceTensor, JsValue> {
        let style = match style {
            "interleaved" => RopeStyle::Interleaved,
            "halves" => RopeStyle::Halves,
            other => {
                let (expected, found) = ("interleaved or halves".into(), other.into());
                return Err(to_js_error(Error::Option { option: "style", expected, found }));
            }
        };
        let x = x.of_rows("rope", "x", u64::from(n_heads) * u64::from(head_dim)).map_err(to_js_error)?;
        self.result(x.shape(), |rec, y| {
            let n_tokens = x.shape()[0];
            let config = RopeConfig::new(head_dim, theta, style);
            // Only the rows in use, starting at the first token's.
            let table = rope_table(&config, n_tokens.saturating_add(first_pos));
            let table = &table[table.len() - n_tokens as usize * (head_dim / 2) as usize * 2..];
            let table = self.0.upload("table", &[n_tokens, head_dim / 2, 2], table)?;
            let state = StepState::declare()?;
            state.set(&self.0, 0, n_tokens)?;
            let heads = [n_tokens, n_heads, head_dim];
            kernels::rope(rec, &state, &config, &table, &x.reshape(&heads)?, &y.reshape(&heads)?)
        })
    }

    /// Causal attention. `q`: rows of `n_heads * head_dim`; `k`, `v`: no fewer rows of `n_kv_heads * head_dim`.
    /// The last query sees all of them.
    pub fn attention(
        &self,
        q: &DeviceTensor,
        k: &DeviceTensor,
        v: &DeviceTensor,
        n_heads: u32,
        n_kv_heads: u32,
        head_dim: u32,
    ) -> Result<DeviceTensor, JsValue> {
        let row = |n_heads: u32| u64::from(n_heads) * u64::from(head_dim);
        let q = q.of_rows("attention", "q", row(n_heads)).map_err(to_js_error)?;
        let k = k.of_rows("attention", "k", row(n_kv_heads)).map_err(to_js_error)?;
        let v = v.of_shape("attention", "v", k.shape()).map_err(to_js_error)?;
        let (n_tokens, n_keys) = (q.shape()[0], k.shape()[0]);
        let Some(first_pos) = n_keys.checked_sub(n_tokens) else {
            let expected = format!("at least {n_tokens} rows, as many as `q`");
            return Err(to_js_error(refused("attention", "k", expected, format!("{n_keys} rows"))));
        };
        self.result(q.shape(), |rec, y| {
            let cached = [n_kv_heads, n_keys, head_dim];
            let (keys, values) = (rec.temporary("keys", &cached)?, rec.temporary("values", &cached)?);
            kernels::by_head(rec, &k, &keys)?;
            kernels::by_head(rec, &v, &values)?;
            let state = StepState::declare()?;
            state.set(&self.0, first_pos, n_tokens)?;
            let scale = (head_dim as f32).sqrt().recip();
            let config = AttentionConfig {
                n_heads,
                n_kv_heads,
                head_dim,
                window: None,
                scale,
                soft_cap: None,
                values_from: None,
                causal: true,
                whole_pass: false,
            };
            let (k, v) = (keys.words(), values.words());
            let cached = CachedKeys { k, v: Some(v), kind: KvType::F32, capacity: n_keys };
            kernels::attention(rec, &state, &config, None, &q, &cached, y)
        })
    }
}

impl Device {
    async fn upload_array(&self, data: Float32Array, shape: Option<Vec<u32>>) -> Result<DeviceTensor, Error> {
        /// Elements in WASM memory at a time, 256 KiB. Chromium's software adapter uploaded 8 MiB in 4.9 ms in such
        /// pieces, and in 6.7 ms at once.
        const PIECE: u32 = 1 << 16;
        /// Waits for the device after this many elements, 32 MiB, to bound uploads in flight.
        const DRAINED: u32 = 1 << 23;
        let device = &self.0;
        let len = data.length();
        let mut tensor = Tensor::declare("operand", Role::Activations, &[len], DType::F32)?;
        if let Some(shape) = &shape {
            tensor = tensor.reshape(shape)?;
        }
        let mut piece = vec![0f32; PIECE.min(len) as usize];
        for first in (0..len).step_by(PIECE as usize) {
            let elements = &mut piece[..PIECE.min(len - first) as usize];
            data.subarray(first, first + elements.len() as u32).copy_to(elements);
            device.write(&tensor, first as usize, elements)?;
            if first > 0 && first.is_multiple_of(DRAINED) {
                device.drained().await?;
            }
        }
        let recording = Cell::default();
        Ok(DeviceTensor { device: device.clone(), tensor, recording, has_shape: shape.is_some() })
    }

    /// Records a kernel whose result is a new tensor of this shape.
    fn result(
        &self,
        shape: &[u32],
        record: impl FnOnce(&mut Recorder, &Tensor) -> Result<(), Error>,
    ) -> Result<DeviceTensor, JsValue> {
        let device = &self.0;
        let work = || {
            let y = Tensor::declare("y", Role::Activations, shape, DType::F32)?;
            let mut rec = device.recorder();
            record(&mut rec, &y)?;
            let recording = Cell::new(Some(rec.finish(&mut Workspace::default())));
            Ok(DeviceTensor { device: device.clone(), tensor: y, recording, has_shape: true })
        };
        work().map_err(to_js_error)
    }
}

impl DeviceTensor {
    fn run(&self) -> Result<(), Error> {
        self.recording.take().map_or(Ok(()), |recording| self.device.run(&recording))
    }

    /// The tensor as an operand with this shape.
    fn of_shape(&self, kernel: &'static str, operand: &'static str, shape: &[u32]) -> Result<Tensor, Error> {
        self.run()?;
        if self.has_shape {
            self.tensor.expect_shape(kernel, operand, shape)?;
            return Ok(self.tensor.clone());
        }
        let fits = self.tensor.reshape(shape);
        fits.map_err(|_| refused(kernel, operand, format!("as many as shape {shape:?}"), self.n_elements()))
    }

    /// The tensor as an operand with rows of `columns` elements.
    fn of_rows(&self, kernel: &'static str, operand: &'static str, columns: u64) -> Result<Tensor, Error> {
        let len = self.tensor.len() as u64;
        let n_rows = len.checked_div(columns).filter(|n_rows| n_rows * columns == len);
        match n_rows {
            Some(n_rows) => self.of_shape(kernel, operand, &[n_rows as u32, columns as u32]),
            None => {
                let expected = format!("whole rows of {columns} elements, at least one");
                let found = if self.has_shape { format!("of shape {:?}", self.shape()) } else { self.n_elements() };
                Err(refused(kernel, operand, expected, found))
            }
        }
    }

    fn n_elements(&self) -> String {
        format!("{} elements", self.tensor.len())
    }
}

fn refused(kernel: &'static str, operand: &'static str, expected: impl Display, found: impl Display) -> Error {
    Error::Operand { kernel, operand, expected: expected.to_string(), found: found.to_string() }
}
