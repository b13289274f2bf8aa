//! Latent attention: `head_matmul`, and attention whose keys hold their values.

use tilewright::WeightType;
use tilewright::kernels::{
    self, AttentionConfig, CachedKeys, HeadColumns, HeadMatrices, Heads, KvType, LatentKey, Norm,
};

use crate::harness::{Case, Job, Operand, Want};
use crate::inputs::{Inputs, Source, dequantise};
use crate::linear::EPS;
use crate::recurrent::close;
use crate::rows;

/// T, H, N, K, R: around the tokens of an invocation and the outputs of a workgroup.
const PRODUCTS: [[u32; 5]; 7] = [
    [1, 1, 4, 4, 8],
    [2, 3, 32, 16, 8],
    [3, 2, 36, 64, 16],
    [4, 4, 512, 128, 64],
    [5, 1, 64, 96, 8],
    [9, 2, 20, 260, 24],
    [1, 16, 128, 512, 64],
];

/// T, H, L, R, position.
const ATTENTION: [[u32; 5]; 7] = [
    [1, 1, 8, 8, 0],
    [1, 4, 32, 8, 21],
    [1, 6, 512, 64, 70],
    [1, 3, 64, 16, 330],
    [5, 2, 32, 8, 0],
    [9, 4, 512, 64, 30],
    [33, 1, 72, 24, 7],
];

pub fn cases(cases: &mut Vec<Case>) {
    for (i, weight) in WeightType::ALL.into_iter().enumerate() {
        for (j, sizes @ [t, h, n, k, r]) in PRODUCTS.into_iter().enumerate() {
            for (is_latent, transposed) in [(true, false), (true, true), (false, false)] {
                // Each type has half of the cases.
                if !(i + j).is_multiple_of(2) {
                    continue;
                }
                cases.push(Case {
                    kernel: "head_matmul",
                    variant: format!(
                        "{weight}{}{}",
                        if is_latent { "+latent" } else { "" },
                        if transposed { "+transposed" } else { "" }
                    ),
                    sizes: format!("t={t},h={h},n={n},k={k},r={r}"),
                    inputs: Inputs::Normal,
                    build: Box::new(move |source| products(source, weight, [is_latent, transposed], sizes)),
                });
            }
        }
    }
    for kind in KvType::ALL {
        for sizes @ [t, h, l, r, pos] in ATTENTION {
            cases.push(Case {
                kernel: if t == 1 { "attention_decode" } else { "attention_prefill" },
                variant: format!("{kind}+latent"),
                sizes: format!("t={t},h={h},l={l},r={r},pos={pos}"),
                inputs: Inputs::Normal,
                build: Box::new(move |source| attention(source, kind, sizes)),
            });
        }
    }
}

fn products(
    source: &mut Source,
    weight: WeightType,
    [is_latent, transposed]: [bool; 2],
    [t, h, n, k, r]: [u32; 5],
) -> Job {
    let r = if is_latent { r } else { 0 };
    // Rows and columns that are something else's.
    let (above, before, between) = (3, 4, 8);
    let [rows, cols] = if transposed { [k, n] } else { [n, k] };
    let (w_rows, stride) = (above + rows + 1, k + r + between);
    let (x_stride, kv_stride) = (before + h * stride, before + n + r);
    let x = source.rows(t, x_stride);
    let bytes = source.weights(weight, h * w_rows, cols);
    let (kv, norm) = (source.rows(t, kv_stride), source.normal(n));
    let w = dequantise(weight, &bytes, cols);
    let mut want = Vec::new();
    for token in 0..t {
        for head in 0..h {
            let x = &x[(token * x_stride + before + head * stride) as usize..];
            want.extend(x[k as usize..][..r as usize].iter().map(|&x| f64::from(x)));
            want.extend((0..n).map(|n| {
                let weight = |i: u32| {
                    let [row, col] = if transposed { [i, n] } else { [n, i] };
                    w[((head * w_rows + above + row) * cols + col) as usize]
                };
                (0..k).map(|i| f64::from(x[i as usize]) * weight(i)).sum::<f64>()
            }));
        }
        if is_latent {
            let kv = &kv[(token * kv_stride + before) as usize..];
            let (latent, turned) = kv.split_at(n as usize);
            want.extend(turned[..r as usize].iter().map(|&x| f64::from(x)));
            let squares: f64 = latent.iter().map(|&x| f64::from(x).powi(2)).sum();
            let scale = 1.0 / (squares / f64::from(n) + f64::from(EPS)).sqrt();
            want.extend(latent.iter().zip(&norm).map(|(&x, &weight)| f64::from(x) * scale * f64::from(weight)));
        }
    }
    let n_keys = u32::from(is_latent);
    let operands = vec![
        Operand::weights(weight, &[h * w_rows, cols], bytes),
        Operand::floats("x", &[t, x_stride], x),
        Operand::floats("kv", &[t, kv_stride], kv),
        Operand::floats("norm", &[n], norm),
        Operand::close("y", &[t, (h + n_keys) * (r + n)], Vec::new(), 0.0).becomes(close(want, 1e-5)),
    ];
    Job::new(operands, move |rec, bound| {
        let matrices = HeadMatrices { w: bound.matrix(0), n_heads: h, start: above, n_out: n, dim: k, transposed };
        let norm = Norm { weight: bound.tensor(3), eps: EPS };
        let key = LatentKey { columns: bound.tensor(2), start: before, n_turned: r, norm };
        let x = HeadColumns { columns: bound.tensor(1), start: before, stride };
        matrices.record(rec, x, is_latent.then_some(key), bound.tensor(4))
    })
}

/// Queries of a pass and keys that are cached, or of one token with its own key.
fn attention(source: &mut Source, kind: KvType, [t, h, l, r, pos]: [u32; 5]) -> Job {
    let (d, is_next) = (l + r, t == 1);
    let slots = pos + t + 5;
    let keys = source.rows(slots, d);
    let words = rows::pack(kind, &keys, d);
    let columns = if is_next { (h + 1) * d } else { h * d };
    let q = source.rows(t, columns);
    let mut cached = rows::unpack(kind, &words, d);
    let mut after = words.clone();
    if is_next {
        // The token's own key is rounded as it is cached.
        let own = rows::pack(kind, &q[(h * d) as usize..], d);
        let row = rows::words(kind, d) as usize;
        after[pos as usize * row..][..row].copy_from_slice(&own);
        cached[(pos * d) as usize..][..d as usize].copy_from_slice(&rows::unpack(kind, &own, d));
    }
    let scale = 0.7 * (d as f32).powf(-0.5);
    let mut want = Vec::new();
    for token in 0..t {
        for head in 0..h {
            let query = &q[(token * columns + head * d) as usize..][..d as usize];
            let key = |s: u32| &cached[(s * d) as usize..][..d as usize];
            let score = |s: u32| {
                let dot: f64 = query.iter().zip(key(s)).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                f64::from(scale) * dot
            };
            let scores: Vec<f64> = (0..pos + token + 1).map(score).collect();
            let highest = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
            let total: f64 = weights.iter().sum();
            want.extend((0..l).map(|i| {
                let values = weights.iter().zip(0..).map(|(weight, s)| weight * f64::from(key(s)[(r + i) as usize]));
                values.sum::<f64>() / total
            }));
        }
    }
    let config = AttentionConfig {
        n_heads: h,
        n_kv_heads: 1,
        head_dim: d,
        values_from: Some(r),
        window: None,
        scale,
        soft_cap: None,
        causal: true,
        whole_pass: false,
    };
    let shape = [1, slots, rows::words(kind, d)];
    let k = match is_next {
        true => Operand::words("k", &shape, words).becomes(rows_within(kind, after, d)),
        false => Operand::words("k", &shape, words),
    };
    let operands = vec![
        Operand::state(pos, t),
        Operand::floats("q", &[t, columns], q),
        k,
        Operand::close("y", &[t, h * l], Vec::new(), 0.0).becomes(close(want, 2e-5)),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let cached = CachedKeys { k: tensor(2).clone(), v: None, kind, capacity: slots };
        if !is_next {
            return kernels::attention(rec, bound.state(0), &config, None, tensor(1), &cached, tensor(3));
        }
        let heads = Heads {
            n_heads: h,
            n_kv_heads: 1,
            head_dim: d,
            keys_hold_values: true,
            first_column: 0,
            rope: None,
            norm: None,
        };
        kernels::attention_next(rec, bound.state(0), &config, &heads, None, tensor(1), &cached, tensor(3))
    })
}

/// Rows of a cache, within a step of rounding.
fn rows_within(kind: KvType, want: Vec<u32>, d: u32) -> Want {
    Want::Check(Box::new(move |words: &[u32]| {
        let pairs = rows::unpack(kind, words, d).into_iter().zip(rows::unpack(kind, &want, d));
        for (i, (got, want)) in pairs.enumerate() {
            if got.is_nan() || (got - want).abs() > 0.02 * want.abs().max(2.0) {
                return Err(format!("element {i} of the keys is {got}, expected {want}"));
            }
        }
        Ok(())
    }))
}
