//! Recurrent layers: `short_conv`, `delta_rule`, `selective_scan` and `sigmoid_gate`.

use tilewright::kernels::{self, Decay, DeltaRule, Gates, N_STATES, SelectiveScan, ShortConv};

use crate::harness::{Case, Job, Operand, Want};
use crate::inputs::{Inputs, Source};

/// T, C, taps, pos, tokens in the pass.
const CONV: [[u32; 5]; 10] = [
    [1, 1, 2, 0, 1],
    [1, 3, 2, 1, 1],
    [5, 31, 3, 0, 5],
    [1, 64, 3, 3, 1],
    [2, 65, 4, 2, 2],
    [8, 7, 4, 9, 5],
    [4, 130, 3, 4, 4],
    [33, 5, 4, 1, 33],
    [3, 66, 7, 6, 2],
    [11, 9, 8, 2, 11],
];

/// T, Hk, H, Dk, Dv, pos, tokens in the pass.
const DELTA: [[u32; 7]; 9] = [
    [1, 1, 1, 1, 1, 0, 1],
    [1, 1, 2, 16, 16, 3, 1],
    [6, 2, 4, 8, 20, 0, 6],
    [3, 1, 3, 33, 4, 7, 2],
    [2, 2, 2, 128, 128, 1, 2],
    [9, 1, 1, 20, 130, 2, 9],
    [4, 3, 6, 64, 32, 4, 4],
    [3, 1, 2, 130, 8, 2, 3],
    [2, 1, 1, 256, 20, 5, 2],
];

/// T, G, H, N, P, pos, tokens in the pass.
const SCAN: [[u32; 7]; 8] = [
    [1, 1, 1, 1, 1, 0, 1],
    [1, 1, 2, 16, 16, 3, 1],
    [6, 2, 4, 8, 20, 0, 6],
    [3, 1, 3, 33, 4, 7, 2],
    [2, 1, 2, 128, 64, 1, 2],
    [9, 1, 1, 20, 130, 2, 9],
    [4, 3, 6, 64, 32, 4, 4],
    [8, 1, 5, 256, 13, 6, 7],
];

/// T, C, first column, elements of a gate.
const GATE: [[u32; 4]; 6] =
    [[1, 1, 0, 1], [3, 40, 7, 1], [2, 257, 0, 257], [5, 64, 100, 1], [1, 1000, 3, 1], [3, 96, 4, 24]];

pub fn cases(cases: &mut Vec<Case>) {
    // These kernels divide by lengths and multiply repeatedly: other families say nothing about them.
    let inputs = Inputs::Normal;
    for (i, sizes @ [t, c, taps, pos, n]) in CONV.into_iter().enumerate() {
        for gated in [true, false] {
            let has_bias = i % 2 == 1 && !gated;
            cases.push(Case {
                kernel: "short_conv",
                variant: if gated { "gated" } else { "silu" }.into(),
                sizes: format!("t={t},c={c},taps={taps},pos={pos},n={n}"),
                inputs,
                build: Box::new(move |source| conv(source, gated, has_bias, sizes)),
            });
        }
    }
    for (i, sizes @ [t, hk, h, dk, dv, pos, n]) in DELTA.into_iter().enumerate() {
        for decay in [Decay::Heads, Decay::Channels { bound: -5.0 }] {
            let order = if i % 2 == 0 { "grouped" } else { "in turns" };
            let by = if decay == Decay::Heads { "heads" } else { "channels" };
            cases.push(Case {
                kernel: "delta_rule",
                variant: format!("{order}, by {by}"),
                sizes: format!("t={t},hk={hk},h={h},dk={dk},dv={dv},pos={pos},n={n}"),
                inputs,
                build: Box::new(move |source| delta(source, i % 2 == 0, decay, sizes)),
            });
        }
    }
    for sizes @ [t, g, h, n_rows, p, pos, n] in SCAN {
        cases.push(Case {
            kernel: "selective_scan",
            variant: "F32".into(),
            sizes: format!("t={t},g={g},h={h},rows={n_rows},p={p},pos={pos},n={n}"),
            inputs,
            build: Box::new(move |source| scan(source, sizes)),
        });
    }
    for sizes @ [t, c, start, size] in GATE {
        for is_plain in [false, true] {
            cases.push(Case {
                kernel: "sigmoid_gate",
                variant: if is_plain { "plain" } else { "sigmoid" }.into(),
                sizes: format!("t={t},c={c},start={start},size={size}"),
                inputs,
                build: Box::new(move |source| gate(source, is_plain, sizes)),
            });
        }
    }
}

/// Floats within this share of the largest expected one.
pub fn close(want: Vec<f64>, share: f64) -> Want {
    let largest = want.iter().fold(1e-3f64, |largest, value| largest.max(value.abs()));
    Want::Check(Box::new(move |words: &[u32]| {
        for (i, (&word, &want)) in words.iter().zip(&want).enumerate() {
            let got = f64::from(f32::from_bits(word));
            if (got - want).abs() > share * largest || !got.is_finite() {
                return Err(format!("[{i}] is {got}, expected {want} within {share:e} of {largest}"));
            }
        }
        Ok(())
    }))
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn conv(source: &mut Source, gated: bool, has_bias: bool, [t, c, taps, pos, n]: [u32; 5]) -> Job {
    let (width, first) = if gated { (3 * c, 0) } else { (c + 5, 3) };
    let (x, weight, bias) = (source.rows(t, width), source.normal(c * taps), source.normal(c));
    let past = source.normal(N_STATES * (taps - 1) * c);
    let [t_len, c_len, n_len, taps_len, width_len, first_len] = [t, c, n, taps, width, first].map(|n| n as usize);
    let slot = |position: u32| (position % N_STATES * (taps - 1) * c) as usize;
    // Inputs of a channel, beginning with those before the pass.
    let inputs = |channel: usize| -> Vec<f64> {
        let before =
            (0..taps_len - 1).map(|i| if pos == 0 { 0.0 } else { past[slot(pos) + i * c_len + channel] }.into());
        let own = (0..n_len).map(|t| {
            let row = &x[t * width_len..];
            f64::from(row[first_len + channel]) * if gated { f64::from(row[2 * c_len + channel]) } else { 1.0 }
        });
        before.chain(own).collect()
    };
    let mut want = vec![0.0; t_len * c_len];
    let mut after: Vec<f64> = past.iter().map(|&value| value.into()).collect();
    for channel in 0..c_len {
        let inputs = inputs(channel);
        for t in 0..n_len {
            let taps = (0..taps_len).map(|i| f64::from(weight[channel * taps_len + i]) * inputs[t + i]);
            let sum = taps.sum::<f64>() + if has_bias { f64::from(bias[channel]) } else { 0.0 };
            let gate = if gated { f64::from(x[t * width_len + c_len + channel]) } else { 0.0 };
            want[t * c_len + channel] = if gated { sum * gate } else { silu(sum) };
        }
        for i in 0..taps_len - 1 {
            after[slot(pos + n) + i * c_len + channel] = inputs[n_len + i];
        }
    }
    let operands = vec![
        Operand::state(pos, n),
        Operand::floats("x", &[t, width], x),
        Operand::floats("weight", &[c, taps], weight),
        Operand::floats("bias", &[c], bias),
        Operand::floats("past", &[N_STATES, taps - 1, c], past).becomes(close(after, 1e-6)),
        Operand::close("y", &[t, c], Vec::new(), 0.0).becomes(close(want, 2e-6)),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let conv = ShortConv { weight: tensor(2), bias: has_bias.then(|| tensor(3)), gated, first_column: first };
        conv.record(rec, bound.state(0), tensor(1), tensor(4), tensor(5))
    })
}

fn delta(source: &mut Source, grouped: bool, decay: Decay, [t, hk, h, dk, dv, pos, n]: [u32; 7]) -> Job {
    let beta_scale = if h == 4 { 2.0 } else { 1.0 };
    let rule = DeltaRule { n_key_heads: hk, n_heads: h, key_dim: dk, value_dim: dv, grouped, beta_scale, decay };
    let (qkv, x) = (source.rows(t, rule.channels()), source.rows(t, rule.inputs()));
    // Decays of a few per cent, as in models.
    let n_decays = rule.n_decays() as usize;
    let mut heads = source.normal(h + rule.n_decays() + dv);
    heads[..h as usize].iter_mut().for_each(|a| *a = -0.05 - a.abs() / 4.0);
    let matrices = source.normal(N_STATES * h * dk * dv);
    let eps = 1e-5f32;
    let [hk_len, h_len, dk_len, dv_len] = [hk, h, dk, dv].map(|n| n as usize);
    let (keys, channels) = (hk_len * dk_len, rule.channels() as usize);
    let slot = |position: u32, head: usize| ((position % N_STATES) as usize * h_len + head) * dk_len * dv_len;
    let mut want = vec![0.0; t as usize * h_len * dv_len];
    let mut after: Vec<f64> = matrices.iter().map(|&value| value.into()).collect();
    for head in 0..h_len {
        let key_head = if grouped { head / (h_len / hk_len) } else { head % hk_len };
        let mut state: Vec<f64> = (0..dk_len * dv_len)
            .map(|i| if pos == 0 { 0.0 } else { f64::from(matrices[slot(pos, head) + i]) })
            .collect();
        for t in 0..n as usize {
            let row: Vec<f64> = qkv[t * channels..][..channels].iter().map(|&x| x.into()).collect();
            let unit = |from: usize| -> Vec<f64> {
                let vector = &row[from + key_head * dk_len..][..dk_len];
                let length = (vector.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                vector.iter().map(|x| x / length).collect()
            };
            let (q, k) = (unit(0), unit(keys));
            let gates: Vec<f64> = x[t * rule.inputs() as usize + channels..].iter().map(|&x| f64::from(x)).collect();
            let rest = &gates[h_len * dv_len..];
            let beta = f64::from(beta_scale) / (1.0 + (-rest[head]).exp());
            let step = |of: usize| rest[h_len + of] + f64::from(heads[h_len + of]);
            for (i, row) in state.chunks_exact_mut(dv_len).enumerate() {
                let log = match decay {
                    Decay::Heads => f64::from(heads[head]) * step(head).exp().ln_1p(),
                    Decay::Channels { bound } => {
                        let rate = -f64::from(heads[head]);
                        f64::from(bound) / (1.0 + (-rate * step(head * dk_len + i)).exp())
                    }
                };
                row.iter_mut().for_each(|element| *element *= log.exp());
            }
            let mut out = vec![0.0; dv_len];
            for c in 0..dv_len {
                let known: f64 = (0..dk_len).map(|i| state[i * dv_len + c] * k[i]).sum();
                let delta = beta * (row[2 * keys + head * dv_len + c] - known);
                (0..dk_len).for_each(|i| state[i * dv_len + c] += k[i] * delta);
                out[c] = (0..dk_len).map(|i| state[i * dv_len + c] * q[i]).sum::<f64>() / f64::from(dk).sqrt();
            }
            let mean = out.iter().map(|x| x * x).sum::<f64>() / f64::from(dv);
            for c in 0..dv_len {
                let normed = f64::from(heads[h_len + n_decays + c]) * out[c] / (mean + f64::from(eps)).sqrt();
                let z = gates[head * dv_len + c];
                let gate = if decay == Decay::Heads { silu(z) } else { 1.0 / (1.0 + (-z).exp()) };
                want[(t * h_len + head) * dv_len + c] = normed * gate;
            }
        }
        after[slot(pos + n, head)..][..dk_len * dv_len].copy_from_slice(&state);
    }
    let operands = vec![
        Operand::state(pos, n),
        Operand::floats("qkv", &[t, rule.channels()], qkv),
        Operand::floats("x", &[t, rule.inputs()], x),
        Operand::floats("heads", &[h + rule.n_decays() + dv], heads),
        Operand::floats("matrices", &[N_STATES, h, dk, dv], matrices).becomes(close(after, 3e-6)),
        Operand::close("y", &[t, h * dv], Vec::new(), 0.0).becomes(close(want, 3e-5)),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        rule.record(rec, bound.state(0), [tensor(1), tensor(2), tensor(3)], eps, tensor(4), tensor(5))
    })
}

fn scan(source: &mut Source, [t, g, h, n_rows, p, pos, n]: [u32; 7]) -> Job {
    let scan = SelectiveScan { n_groups: g, n_heads: h, state_dim: n_rows, head_dim: p };
    let (vbc, x) = (source.rows(t, scan.channels()), source.rows(t, scan.inputs()));
    // Decays of a few per cent, as in models.
    let mut heads = source.normal(3 * h);
    heads[..h as usize].iter_mut().for_each(|a| *a = -0.05 - a.abs() / 4.0);
    let matrices = source.normal(N_STATES * h * n_rows * p);
    let [g_len, h_len, rows_len, p_len] = [g, h, n_rows, p].map(|n| n as usize);
    let (inner, channels, inputs) = (h_len * p_len, scan.channels() as usize, scan.inputs() as usize);
    let slot = |position: u32, head: usize| ((position % N_STATES) as usize * h_len + head) * rows_len * p_len;
    let mut want = vec![0.0; t as usize * inner];
    let mut after: Vec<f64> = matrices.iter().map(|&value| value.into()).collect();
    for head in 0..h_len {
        let group = head * g_len / h_len;
        for column in 0..p_len {
            let first =
                |i: usize| if pos == 0 { 0.0 } else { f64::from(matrices[slot(pos, head) + i * p_len + column]) };
            let mut states: Vec<f64> = (0..rows_len).map(first).collect();
            for t in 0..n as usize {
                let row: Vec<f64> = vbc[t * channels..][..channels].iter().map(|&v| v.into()).collect();
                let x: Vec<f64> = x[t * inputs..][..inputs].iter().map(|&v| v.into()).collect();
                let step = (x[inner + channels + head] + f64::from(heads[h_len + head])).exp().ln_1p();
                let decay = (f64::from(heads[head]) * step).exp();
                let value = row[head * p_len + column];
                let of_group = &row[inner + group * rows_len..];
                let mut out = f64::from(heads[2 * h_len + head]) * value;
                for (i, state) in states.iter_mut().enumerate() {
                    *state = decay * *state + step * of_group[i] * value;
                    out += *state * of_group[g_len * rows_len + i];
                }
                want[t * inner + head * p_len + column] = out * silu(x[head * p_len + column]);
            }
            for (i, state) in states.into_iter().enumerate() {
                after[slot(pos + n, head) + i * p_len + column] = state;
            }
        }
    }
    let operands = vec![
        Operand::state(pos, n),
        Operand::floats("vbc", &[t, scan.channels()], vbc),
        Operand::floats("x", &[t, scan.inputs()], x),
        Operand::floats("heads", &[3 * h], heads),
        Operand::floats("matrices", &[N_STATES, h, n_rows, p], matrices).becomes(close(after, 3e-6)),
        Operand::close("y", &[t, h * p], Vec::new(), 0.0).becomes(close(want, 1e-5)),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        scan.record(rec, bound.state(0), [tensor(1), tensor(2), tensor(3)], tensor(4), tensor(5))
    })
}

fn gate(source: &mut Source, is_plain: bool, [t, c, start, size]: [u32; 4]) -> Job {
    let width = start + c / size + if start > 0 { 2 } else { 0 };
    let (gates, y) = (source.rows(t, width), source.rows(t, c));
    let want = (0..t * c).map(|i| {
        let (row, column) = (i / c, start + i % c / size);
        let gate = f64::from(gates[(row * width + column) as usize]);
        f64::from(y[i as usize]) * if is_plain { gate } else { 1.0 / (1.0 + (-gate).exp()) }
    });
    let want = want.collect();
    let operands =
        vec![Operand::floats("gates", &[t, width], gates), Operand::floats("y", &[t, c], y).becomes(close(want, 1e-6))];
    let record = if is_plain { kernels::multiply } else { kernels::sigmoid_gate };
    Job::new(operands, move |rec, bound| record(rec, Gates { columns: bound.tensor(0), start, size }, bound.tensor(1)))
}
