//! `short_conv`, `delta_rule` and `selective_scan`: layers that keep a state of fixed size.

use super::{Call, threads};
use crate::kernels::{CONV_BIAS, CONV_GATED, DeltaRuleParams, SelectiveScanParams, ShortConvParams};

/// The slot of `past` that a position has.
fn slot(position: u32, n_states: u32, len: usize) -> std::ops::Range<usize> {
    let first = (position % n_states) as usize * len;
    first..first + len
}

pub(crate) fn short_conv(mut call: Call<'_>) {
    let params: ShortConvParams = call.params();
    let [state, x, weight, bias, past, y] = call.operands();
    let (n_tokens, channels, taps) = (params.n_tokens as usize, params.channels as usize, params.taps as usize);
    let (stride, is_gated) = (params.x_stride as usize, params.flags & CONV_GATED != 0);
    let &[pos, n_in_pass, ..] = state.get::<u32>() else { return };
    let n = n_in_pass.min(params.n_tokens) as usize;
    let (x, weight, bias) = (x.get::<f32>(), weight.get::<f32>(), bias.get::<f32>());
    let past = past.get_mut::<f32>();
    // The three inputs before the pass, the oldest first, and then its own.
    let mut inputs = match pos {
        0 => vec![0.0; 3 * channels],
        _ => past[slot(pos, params.n_states, 3 * channels)].to_vec(),
    };
    for row in x[params.x_start as usize..].chunks(stride).take(n) {
        match is_gated {
            true => inputs.extend(row[..channels].iter().zip(&row[2 * channels..]).map(|(b, v)| b * v)),
            false => inputs.extend(&row[..channels]),
        }
    }
    past[slot(pos + n as u32, params.n_states, 3 * channels)].copy_from_slice(&inputs[n * channels..]);
    let ops = 2 * taps * n * channels;
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_tokens * channels], channels, ops, |t, y| {
        y.fill(0.0);
        if t >= n {
            return;
        }
        for (c, y) in y.iter_mut().enumerate() {
            // In f64: what follows divides small outputs by their length, which makes rounding count.
            let of_tap =
                |i: usize| f64::from(weight[c * taps + i]) * f64::from(inputs[(t + 4 - taps + i) * channels + c]);
            let sum: f64 = (0..taps).map(of_tap).sum();
            let sum = sum + if params.flags & CONV_BIAS != 0 { f64::from(bias[c]) } else { 0.0 };
            *y = match is_gated {
                true => sum as f32 * x[t * stride + params.x_start as usize + channels + c],
                false => (sum / (1.0 + (-sum).exp())) as f32,
            };
        }
    });
}

/// `ln(1 + exp(z))`, without the overflow of a large z.
fn softplus(z: f32) -> f64 {
    let z = f64::from(z);
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// What one value head of `delta_rule` needs.
struct Head<'a> {
    params: &'a DeltaRuleParams,
    head: usize,
    qkv: &'a [f32],
    x: &'a [f32],
    heads: &'a [f32],
}

impl Head<'_> {
    /// Takes a token: the matrix goes on and `out` is what it gives.
    fn step(&self, t: usize, matrix: &mut [f32], out: &mut [f32]) {
        let params = self.params;
        let (n_heads, key_dim, value_dim) =
            (params.n_heads as usize, params.key_dim as usize, params.value_dim as usize);
        let n_key_heads = params.n_key_heads as usize;
        let key_head = match params.grouped {
            0 => self.head % n_key_heads,
            _ => self.head / (n_heads / n_key_heads),
        };
        let keys = n_key_heads * key_dim;
        let channels = 2 * keys + n_heads * value_dim;
        let row = &self.qkv[t * channels..][..channels];
        let of_length_1 = |from: usize| {
            let vector = &row[from + key_head * key_dim..][..key_dim];
            let scale = (1.0 / (vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() + 1e-6).sqrt()) as f32;
            vector.iter().map(|x| x * scale).collect::<Vec<f32>>()
        };
        let (query, key) = (of_length_1(0), of_length_1(keys));
        let value = &row[2 * keys + self.head * value_dim..][..value_dim];
        let gates = &self.x[t * params.x_stride as usize + channels..][..n_heads * (value_dim + 2)];
        let (z, rest) = gates.split_at(n_heads * value_dim);
        let beta = (1.0 / (1.0 + (-f64::from(rest[self.head])).exp())) as f32;
        let step = softplus(rest[n_heads + self.head] + self.heads[n_heads + self.head]);
        let decay = (f64::from(self.heads[self.head]) * step).exp() as f32;

        let mut delta = vec![0.0; value_dim];
        for (row, key) in matrix.chunks_exact_mut(value_dim).zip(&key) {
            for (element, known) in row.iter_mut().zip(&mut delta) {
                *element *= decay;
                *known += *element * key;
            }
        }
        delta.iter_mut().zip(value).for_each(|(delta, value)| *delta = beta * (value - *delta));
        out.fill(0.0);
        for ((row, key), query) in matrix.chunks_exact_mut(value_dim).zip(&key).zip(&query) {
            for ((element, delta), out) in row.iter_mut().zip(&delta).zip(&mut *out) {
                *element += key * delta;
                *out += *element * query;
            }
        }
        let scale = (key_dim as f32).powf(-0.5);
        let mean = out.iter().map(|x| (x * scale).powi(2)).sum::<f32>() / value_dim as f32;
        let scale = scale / (mean + params.eps).sqrt();
        let weights = &self.heads[2 * n_heads..];
        for ((out, weight), z) in out.iter_mut().zip(weights).zip(&z[self.head * value_dim..]) {
            *out *= weight * scale * z / (1.0 + (-z).exp());
        }
    }
}

pub(crate) fn delta_rule(mut call: Call<'_>) {
    let params: DeltaRuleParams = call.params();
    let [state, qkv, x, heads, matrices, y] = call.operands();
    let (n_heads, value_dim) = (params.n_heads as usize, params.value_dim as usize);
    let size = params.key_dim as usize * value_dim;
    let &[pos, n_in_pass, ..] = state.get::<u32>() else { return };
    let n = n_in_pass.min(params.n_tokens);
    let matrices = matrices.get_mut::<f32>();
    let mut current = match pos {
        0 => vec![0.0; n_heads * size],
        _ => matrices[slot(pos, params.n_states, n_heads * size)].to_vec(),
    };
    let (qkv, x, heads) = (qkv.get::<f32>(), x.get::<f32>(), heads.get::<f32>());
    // Results by head first: heads are independent, tokens are not.
    let n_tokens = n as usize;
    let mut each: Vec<(Vec<f32>, &mut [f32])> =
        current.chunks_exact_mut(size).map(|matrix| (vec![0.0; n_tokens * value_dim], matrix)).collect();
    threads::for_each_chunk(&mut each, 1, 4 * n_tokens * n_heads * size, |head, each| {
        for (out, matrix) in each {
            let of_head = Head { params: &params, head, qkv, x, heads };
            out.chunks_exact_mut(value_dim).enumerate().for_each(|(t, out)| of_head.step(t, matrix, out));
        }
    });
    let y = &mut y.get_mut::<f32>()[..params.n_tokens as usize * n_heads * value_dim];
    y.fill(0.0);
    for (t, row) in y.chunks_exact_mut(n_heads * value_dim).enumerate().take(n_tokens) {
        for (row, (out, _)) in row.chunks_exact_mut(value_dim).zip(&each) {
            row.copy_from_slice(&out[t * value_dim..][..value_dim]);
        }
    }
    matrices[slot(pos + n, params.n_states, n_heads * size)].copy_from_slice(&current);
}

pub(crate) fn selective_scan(mut call: Call<'_>) {
    let params: SelectiveScanParams = call.params();
    let [state, vbc, x, heads, matrices, y] = call.operands();
    let (n_heads, head_dim, state_dim) = (params.n_heads as usize, params.head_dim as usize, params.state_dim as usize);
    let (width, size) = (n_heads * head_dim, state_dim * head_dim);
    let of_groups = params.n_groups as usize * state_dim;
    let &[pos, n_in_pass, ..] = state.get::<u32>() else { return };
    let n = n_in_pass.min(params.n_tokens);
    let n_tokens = n as usize;
    let matrices = matrices.get_mut::<f32>();
    let mut current = match pos {
        0 => vec![0.0; n_heads * size],
        _ => matrices[slot(pos, params.n_states, n_heads * size)].to_vec(),
    };
    let (vbc, x, heads) = (vbc.get::<f32>(), x.get::<f32>(), heads.get::<f32>());
    let step = |head: usize, t: usize, matrix: &mut [f32], out: &mut [f32]| {
        let row = &vbc[t * (width + 2 * of_groups)..][..width + 2 * of_groups];
        let x = &x[t * params.x_stride as usize..][..params.x_stride as usize];
        let group = head / (n_heads / params.n_groups as usize);
        let values = &row[head * head_dim..][..head_dim];
        let b = &row[width + group * state_dim..][..state_dim];
        let c = &row[width + of_groups + group * state_dim..][..state_dim];
        let step = softplus(x[params.dt_start as usize + head] + heads[n_heads + head]);
        let (decay, step) = ((f64::from(heads[head]) * step).exp() as f32, step as f32);
        out.fill(0.0);
        for ((row, b), c) in matrix.chunks_exact_mut(head_dim).zip(b).zip(c) {
            for ((element, value), out) in row.iter_mut().zip(values).zip(&mut *out) {
                *element = decay * *element + step * b * value;
                *out += *element * c;
            }
        }
        for ((out, value), z) in out.iter_mut().zip(values).zip(&x[head * head_dim..]) {
            *out = (*out + heads[2 * n_heads + head] * value) * z / (1.0 + (-z).exp());
        }
    };
    // Results by head first: heads are independent, tokens are not.
    let mut each: Vec<(Vec<f32>, &mut [f32])> =
        current.chunks_exact_mut(size).map(|matrix| (vec![0.0; n_tokens * head_dim], matrix)).collect();
    threads::for_each_chunk(&mut each, 1, 3 * n_tokens * n_heads * size, |head, each| {
        for (out, matrix) in each {
            out.chunks_exact_mut(head_dim).enumerate().for_each(|(t, out)| step(head, t, matrix, out));
        }
    });
    let y = &mut y.get_mut::<f32>()[..params.n_tokens as usize * width];
    y.fill(0.0);
    for (t, row) in y.chunks_exact_mut(width).enumerate().take(n_tokens) {
        for (row, (out, _)) in row.chunks_exact_mut(head_dim).zip(&each) {
            row.copy_from_slice(&out[t * head_dim..][..head_dim]);
        }
    }
    matrices[slot(pos + n, params.n_states, n_heads * size)].copy_from_slice(&current);
}
