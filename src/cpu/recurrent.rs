//! `short_conv`, `delta_rule` and `selective_scan`: layers that keep a state of fixed size.

use super::{Call, threads};
use crate::shaders::constants::short_conv;
use crate::shaders::params::{DeltaRuleParams, SelectiveScanParams, ShortConvParams};

/// Tokens of a pass that go through states one after the other.
struct Run {
    /// Position of the first one.
    pos: u32,
    /// Its place in the pass.
    first: usize,
    /// How many there are, and how many rows with padding.
    n: usize,
    n_rows: usize,
    /// The sequence's place among the states of all.
    slot: usize,
}

/// The sequences of a pass over `n_tokens` rows; `shaders/shared/rows.wgsl`.
fn runs(state: &[u32], n_tokens: u32, row_words: u32, has_slots: u32) -> Vec<Run> {
    let row = |i: usize| &state[i * row_words as usize..];
    let slot = |row: &[u32]| if has_slots != 0 { row[4] as usize } else { 0 };
    match row_words {
        0 => {
            let (n_rows, row) = (n_tokens as usize, row(0));
            vec![Run { pos: row[0], first: 0, n: (row[1] as usize).min(n_rows), n_rows, slot: slot(row) }]
        }
        _ => {
            let mut runs: Vec<Run> = Vec::new();
            for (i, row) in (0..n_tokens as usize).map(|i| (i, row(i))) {
                match runs.last_mut().filter(|_| row[5] > 0) {
                    Some(run) => (run.n, run.n_rows) = (run.n + 1, run.n_rows + 1),
                    None => {
                        let n = row[1].min(1) as usize;
                        runs.push(Run { pos: row[0], first: i, n, n_rows: 1, slot: slot(row) });
                    }
                }
            }
            runs
        }
    }
}

impl Run {
    /// Where the state is that was left after a position, among those of `len` elements.
    fn state(&self, position: u32, n_states: u32, len: usize) -> std::ops::Range<usize> {
        let first = (self.slot * n_states as usize + (position % n_states) as usize) * len;
        first..first + len
    }
}

pub(crate) fn short_conv(mut call: Call<'_>) {
    let params: ShortConvParams = call.params();
    let [state, x, weight, bias, past, y] = call.operands();
    let (channels, taps) = (params.channels as usize, params.taps as usize);
    let past_len = (taps - 1) * channels;
    let (stride, is_gated) = (params.x_stride as usize, params.flags & short_conv::GATED != 0);
    let (x, weight, bias) = (x.get::<f32>(), weight.get::<f32>(), bias.get::<f32>());
    let (past, y) = (past.get_mut::<f32>(), y.get_mut::<f32>());
    for run in runs(state.get(), params.n_tokens, params.row_words, params.has_slots) {
        let y = &mut y[run.first * channels..][..run.n_rows * channels];
        let x = &x[run.first * stride..];
        let n = run.n;
        // The inputs before the pass, the oldest first, and then its own.
        let mut inputs = match run.pos {
            0 => vec![0.0; past_len],
            pos => past[run.state(pos, params.n_states, past_len)].to_vec(),
        };
        for row in x[params.x_start as usize..].chunks(stride).take(n) {
            match is_gated {
                true => inputs.extend(row[..channels].iter().zip(&row[2 * channels..]).map(|(b, v)| b * v)),
                false => inputs.extend(&row[..channels]),
            }
        }
        past[run.state(run.pos + n as u32, params.n_states, past_len)].copy_from_slice(&inputs[n * channels..]);
        let ops = 2 * taps * n * channels;
        threads::for_each_chunk(y, channels, ops, |t, y| {
            y.fill(0.0);
            if t >= n {
                return;
            }
            for (c, y) in y.iter_mut().enumerate() {
                // In f64: what follows divides small outputs by their length, which makes rounding count.
                let of_tap = |i: usize| f64::from(weight[c * taps + i]) * f64::from(inputs[(t + i) * channels + c]);
                let sum: f64 = (0..taps).map(of_tap).sum();
                let sum = sum + if params.flags & short_conv::BIAS != 0 { f64::from(bias[c]) } else { 0.0 };
                *y = match is_gated {
                    true => sum as f32 * x[t * stride + params.x_start as usize + channels + c],
                    false => (sum / (1.0 + (-sum).exp())) as f32,
                };
            }
        });
    }
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
    /// Updates the matrix by a token and writes the token's result to `out`.
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
        let gates = &self.x[t * params.x_stride as usize + channels..];
        let (z, rest) = gates.split_at(n_heads * value_dim);
        let beta = (f64::from(params.beta_scale) / (1.0 + (-f64::from(rest[self.head])).exp())) as f32;
        let (alphas, dt, rate) = (&rest[n_heads..], &self.heads[n_heads..], f64::from(self.heads[self.head]));
        let bound = f64::from(params.bound);
        // One decay for all rows, or one for each.
        let (n_decays, decay, decays) = match bound < 0.0 {
            false => {
                let decay = (rate * softplus(alphas[self.head] + dt[self.head])).exp();
                (n_heads, decay as f32, Vec::new())
            }
            true => {
                let of_head = self.head * key_dim..(self.head + 1) * key_dim;
                let steps = alphas[of_head.clone()].iter().zip(&dt[of_head]).map(|(alpha, dt)| f64::from(alpha + dt));
                let decays = steps.map(|step| (bound / (1.0 + (rate * step).exp())).exp() as f32);
                (n_heads * key_dim, 1.0, decays.collect::<Vec<f32>>())
            }
        };

        let mut delta = vec![0.0; value_dim];
        for (i, (row, key)) in matrix.chunks_exact_mut(value_dim).zip(&key).enumerate() {
            let decay = decays.get(i).copied().unwrap_or(decay);
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
        let weights = &self.heads[n_heads + n_decays..];
        for ((out, weight), z) in out.iter_mut().zip(weights).zip(&z[self.head * value_dim..]) {
            let gate = if bound < 0.0 { 1.0 } else { *z } / (1.0 + (-z).exp());
            *out *= weight * scale * gate;
        }
    }
}

pub(crate) fn delta_rule(mut call: Call<'_>) {
    let params: DeltaRuleParams = call.params();
    let [state, qkv, x, heads, matrices, y] = call.operands();
    let (n_heads, value_dim) = (params.n_heads as usize, params.value_dim as usize);
    let size = params.key_dim as usize * value_dim;
    let (qkv, x, heads) = (qkv.get::<f32>(), x.get::<f32>(), heads.get::<f32>());
    scan(
        &runs(state.get(), params.n_tokens, params.row_words, params.has_slots),
        [params.n_states as usize, n_heads, size, value_dim],
        matrices.get_mut(),
        y.get_mut(),
        |head, t, matrix, out| Head { params: &params, head, qkv, x, heads }.step(t, matrix, out),
    );
}

/// Takes the tokens of each sequence through the matrices of its heads, `[n_heads, size]`, which go on. `step` is given the head,
/// the token, the matrix, and where its `width` results belong.
fn scan(
    runs: &[Run],
    [n_states, n_heads, size, width]: [usize; 4],
    matrices: &mut [f32],
    y: &mut [f32],
    step: impl Fn(usize, usize, &mut [f32], &mut [f32]) + Sync,
) {
    for run in runs {
        let mut current = match run.pos {
            0 => vec![0.0; n_heads * size],
            pos => matrices[run.state(pos, n_states as u32, n_heads * size)].to_vec(),
        };
        // Results by head first: heads are independent, tokens are not.
        let mut each: Vec<(Vec<f32>, &mut [f32])> =
            current.chunks_exact_mut(size).map(|matrix| (vec![0.0; run.n * width], matrix)).collect();
        threads::for_each_chunk(&mut each, 1, 4 * run.n * n_heads * size, |head, each| {
            for (out, matrix) in each {
                let tokens = out.chunks_exact_mut(width).enumerate();
                tokens.for_each(|(t, out)| step(head, run.first + t, matrix, out));
            }
        });
        let y = &mut y[run.first * n_heads * width..][..run.n_rows * n_heads * width];
        y.fill(0.0);
        for (t, row) in y.chunks_exact_mut(n_heads * width).enumerate().take(run.n) {
            for (row, (out, _)) in row.chunks_exact_mut(width).zip(&each) {
                row.copy_from_slice(&out[t * width..][..width]);
            }
        }
        matrices[run.state(run.pos + run.n as u32, n_states as u32, n_heads * size)].copy_from_slice(&current);
    }
}

pub(crate) fn selective_scan(mut call: Call<'_>) {
    let params: SelectiveScanParams = call.params();
    let [state, vbc, x, heads, matrices, y] = call.operands();
    let (n_heads, head_dim, state_dim) = (params.n_heads as usize, params.head_dim as usize, params.state_dim as usize);
    let (width, size) = (n_heads * head_dim, state_dim * head_dim);
    let of_groups = params.n_groups as usize * state_dim;
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
    scan(
        &runs(state.get(), params.n_tokens, params.row_words, params.has_slots),
        [params.n_states as usize, n_heads, size, head_dim],
        matrices.get_mut(),
        y.get_mut(),
        step,
    );
}
