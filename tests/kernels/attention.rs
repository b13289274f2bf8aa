//! `attention`.

use std::ops::Range;

use tilewright::kernels::{self, AttentionConfig, Heads, KvType, PackedTiles, QkNorm, RopeStyle};
#[cfg(not(target_arch = "wasm32"))]
use tilewright::{
    DType, Device, Role, Tensor, Tier, Workspace,
    kernels::{BatchRow, CachedKeys, PAGE, RopeConfig, StepState, rope_table},
};

#[cfg(not(target_arch = "wasm32"))]
use crate::common::{self, shared};

use crate::common::{Expected, visible_keys};
use crate::harness::{Case, FLUSH, Job, Operand, ROUND, sum_rounding};
use crate::inputs::{Inputs, Source};
use crate::rope::{Angles, norm_weights, normed, scaled, turned};
use crate::rows::{self, NAN_WORD};
use crate::softmax::exp_rounding;

/// T, H, Hkv, D, pos, window (0: none), in a cache that ends soon after the last key. Decoding loads keys in tiles of
/// 64 (8 in the `scalar` tier), splits a cache of more than 256 into parts and handles four rows at a time.
const DECODE: [[u32; 6]; 42] = [
    [1, 1, 1, 4, 0, 0],
    [2, 1, 1, 8, 0, 0],
    [3, 2, 1, 16, 1, 0],
    [1, 2, 2, 32, 30, 0],
    [1, 4, 1, 36, 31, 0],
    [2, 3, 3, 40, 32, 0],
    [1, 8, 4, 64, 62, 0],
    [2, 4, 2, 64, 62, 0],
    [1, 16, 1, 64, 64, 0],
    [3, 2, 1, 80, 126, 0],
    [1, 4, 2, 128, 127, 0],
    [1, 3, 1, 128, 128, 0],
    [2, 1, 1, 252, 20, 0],
    [1, 2, 1, 256, 255, 0],
    [1, 2, 1, 256, 256, 0],
    [65, 2, 1, 16, 0, 0],
    [1, 1, 1, 16, 999, 0],
    [5, 2, 1, 32, 0, 1],
    [9, 2, 1, 32, 3, 8],
    [2, 2, 2, 64, 100, 63],
    [2, 2, 1, 64, 100, 64],
    [3, 4, 2, 32, 200, 65],
    [1, 4, 4, 96, 7, 0],
    [1, 6, 2, 8, 251, 0],
    [1, 7, 1, 8, 252, 0],
    [1, 8, 1, 96, 253, 0],
    [2, 6, 2, 16, 254, 0],
    [7, 3, 1, 16, 300, 0],
    [1, 14, 2, 16, 509, 0],
    [1, 5, 1, 16, 510, 0],
    [3, 2, 2, 32, 511, 0],
    [1, 4, 1, 256, 640, 0],
    [1, 4, 2, 8, 1300, 0],
    [2, 2, 1, 16, 700, 63],
    [3, 8, 1, 16, 700, 300],
    [7, 1, 1, 12, 600, 2],
    [7, 7, 7, 4, 127, 0],
    [1, 8, 1, 512, 63, 0],
    [1, 4, 2, 320, 300, 0],
    [3, 2, 1, 512, 700, 300],
    [5, 3, 3, 260, 20, 0],
    [1, 1, 1, 508, 900, 0],
];

/// The same for many tokens, with tiles of 16 rows (8 or fewer in the `scalar` tier), 32 keys (8) and 64 columns.
const PREFILL: [[u32; 6]; 20] = [
    [54, 3, 3, 20, 4, 0],
    [8, 1, 1, 4, 0, 0],
    [8, 4, 1, 60, 31, 0],
    [8, 8, 8, 64, 32, 0],
    [15, 1, 1, 68, 30, 0],
    [16, 2, 2, 80, 0, 0],
    [17, 3, 1, 96, 16, 0],
    [31, 7, 1, 16, 1, 0],
    [33, 8, 1, 16, 5, 0],
    [32, 4, 2, 128, 33, 0],
    [16, 2, 1, 132, 63, 0],
    [9, 6, 2, 192, 64, 0],
    [18, 1, 1, 252, 14, 0],
    [20, 4, 1, 256, 12, 0],
    [40, 2, 1, 32, 100, 1],
    [33, 6, 2, 32, 70, 31],
    [24, 2, 2, 64, 90, 33],
    [20, 8, 1, 512, 30, 0],
    [9, 2, 2, 260, 40, 17],
    [17, 3, 1, 400, 3, 0],
];

/// Lengths of packed sequences; H, Hkv, D, window.
const PACKED: [(&[u32], [u32; 4]); 7] = [
    (&[1], [1, 1, 4, 0]),
    (&[16, 7, 1, 33], [2, 2, 32, 0]),
    (&[2, 2, 2, 3, 40], [3, 3, 20, 0]),
    (&[17, 31, 5], [4, 2, 16, 0]),
    (&[64, 9], [6, 1, 64, 0]),
    (&[40, 3, 70], [2, 2, 64, 17]),
    (&[5, 130], [1, 1, 132, 65]),
];

/// Windows in caches that have wrapped around several times.
const RINGS: [[u32; 6]; 6] = [
    [1, 4, 2, 32, 40, 8],
    [1, 2, 1, 20, 1000, 300],
    [1, 8, 2, 64, 77, 1],
    [5, 2, 1, 16, 61, 9],
    [16, 4, 2, 32, 100, 8],
    [40, 2, 2, 68, 333, 33],
];

/// Treatment of a token's heads.
#[derive(Clone, Copy)]
struct Turn {
    norm: Option<QkNorm>,
    style: Option<RopeStyle>,
    /// Whether it uses another layer's cached key.
    is_shared: bool,
}

const NORMS: [Option<QkNorm>; 5] =
    [Some(QkNorm::Heads), None, Some(QkNorm::RotatedHeads), Some(QkNorm::Whole), Some(QkNorm::HeadsAndValues)];
const STYLES: [Option<RopeStyle>; 3] = [Some(RopeStyle::Halves), Some(RopeStyle::Interleaved), None];

impl Turn {
    fn name(self) -> String {
        let norm = match self.norm {
            None => "",
            Some(QkNorm::Heads) => "+heads",
            Some(QkNorm::RotatedHeads) => "+rotated heads",
            Some(QkNorm::Whole) => "+whole",
            Some(QkNorm::HeadsAndValues) => "+values",
        };
        let of_keys = if self.is_shared { "+shared" } else { "" };
        let style = match self.style {
            None => "",
            Some(RopeStyle::Halves) => "+halves",
            Some(RopeStyle::Interleaved) => "+interleaved",
        };
        format!("{norm}{style}{of_keys}")
    }
}

/// Properties of a case besides its sizes.
#[derive(Clone, Copy)]
struct Options {
    kind: KvType,
    capacity: u32,
    /// Positions that the cache holds.
    slots: u32,
    /// Tokens without padding.
    n_real: u32,
    soft_cap: Option<f32>,
    causal: bool,
    whole_pass: bool,
}

pub fn cases(cases: &mut Vec<Case>) {
    let mut push = |inputs, variant: &str, sizes: [u32; 6], options: Options| {
        let [t, h, hkv, d, pos, window] = sizes;
        let Options { kind, capacity, slots, n_real, .. } = options;
        let end = format!("pos={pos},window={window},real={n_real},capacity={slots}/{capacity}");
        let case = |variant: String, build: Box<dyn Fn(&mut Source) -> Job>| {
            let sizes = format!("t={t},h={h},hkv={hkv},d={d},{end}");
            Case { kernel: "attention", variant: format!("{}+{variant}", rows::tag(kind)), sizes, inputs, build }
        };
        if t > 1 {
            cases.push(case(variant.into(), Box::new(move |source| attention(source, sizes, options))));
            return;
        }
        // Without norm and RoPE, with combinations of them, and with another layer's keys.
        let plain = Turn { norm: None, style: None, is_shared: false };
        let (norm, style) = (NORMS[((h + pos) % 5) as usize], STYLES[((h + d / 4) % 3) as usize]);
        let queries = Turn { norm: norm.filter(|norm| *norm != QkNorm::Whole), style, is_shared: true };
        for turn in [plain, Turn { norm, style, ..plain }, queries] {
            let variant = format!("{variant}+next{}", turn.name());
            cases.push(case(variant, Box::new(move |source| next(source, sizes, options, turn))));
        }
    };
    let usual = |[t, _, _, _, pos, _]: [u32; 6]| {
        let capacity = pos + t + 3;
        Options {
            kind: KvType::F32,
            capacity,
            slots: capacity,
            n_real: t,
            soft_cap: None,
            causal: true,
            whole_pass: false,
        }
    };
    let others = [KvType::F16, KvType::Q8_0];
    for inputs in Inputs::ALL {
        for sizes in DECODE.into_iter().chain(PREFILL) {
            let variant = match (sizes[3] > 256, sizes[5] > 0) {
                (true, _) => "wide heads",
                (false, true) => "window",
                (false, false) => "causal",
            };
            push(inputs, variant, sizes, usual(sizes));
            push(inputs, variant, sizes, Options { kind: others[(sizes[1] + sizes[4]) as usize % 2], ..usual(sizes) });
        }
        // Windows in the minimal number of slots: those of a pass and of its first token's window.
        for sizes in DECODE.into_iter().chain(PREFILL).chain(RINGS).filter(|sizes| sizes[5] > 0) {
            for (kind, more) in [(KvType::F32, 0), (KvType::F32, 3), (others[sizes[4] as usize % 2], 1)] {
                let usual = usual(sizes);
                let slots = (sizes[5] + sizes[0] - 1 + more).min(usual.capacity);
                push(inputs, "ring", sizes, Options { kind, slots, ..usual });
            }
        }
        // A short sequence in a long cache, and the last chunk of a long one with its padding past the cache.
        for sizes in [[1, 4, 2, 16, 0, 0], [1, 2, 1, 64, 63, 0], [3, 2, 1, 16, 64, 20], [9, 2, 1, 16, 20, 0]] {
            push(inputs, "causal", sizes, Options { capacity: 2100, slots: 2100, ..usual(sizes) });
        }
        // The cache's capacity exceeds one dispatch on a software adapter.
        let large = [64, 8, 8, 64, 30, 0];
        push(inputs, "causal", large, Options { capacity: 4096, slots: 4096, ..usual(large) });
        for (sizes, n_real) in [([6, 4, 1, 16, 508, 0], 4), ([16, 4, 2, 16, 90, 0], 6), ([16, 2, 2, 68, 40, 7], 1)] {
            let capacity = sizes[4] + n_real;
            push(inputs, "padded", sizes, Options { capacity, slots: capacity, n_real, ..usual(sizes) });
        }
        for sizes in [[1, 6, 2, 64, 300, 0], [2, 1, 1, 16, 20, 9], [17, 4, 2, 32, 40, 0], [12, 3, 1, 80, 3, 5]] {
            for cap in [5.0, 50.0] {
                push(inputs, "capped", sizes, Options { soft_cap: Some(cap), ..usual(sizes) });
            }
        }
        for sizes in [[1, 4, 2, 16, 3, 0], [5, 2, 1, 64, 0, 0], [7, 4, 1, 16, 400, 0], [40, 3, 1, 32, 0, 0]] {
            push(inputs, "bidirectional", sizes, Options { causal: false, ..usual(sizes) });
        }
        for (sizes, n_real) in [([6, 2, 2, 32, 0, 0], 3), ([20, 2, 1, 64, 0, 0], 17), ([33, 4, 1, 100, 30, 0], 2)] {
            push(inputs, "bidirectional", sizes, Options { causal: false, n_real, ..usual(sizes) });
        }
        for sizes in [[5, 2, 1, 16, 2, 3], [40, 2, 2, 32, 0, 9], [33, 1, 1, 64, 0, 65]] {
            push(inputs, "bidirectional", sizes, Options { causal: false, ..usual(sizes) });
            push(inputs, "whole pass", sizes, Options { causal: false, whole_pass: true, ..usual(sizes) });
        }
        let sizes = [20, 2, 1, 64, 7, 6];
        push(inputs, "whole pass", sizes, Options { causal: false, whole_pass: true, n_real: 17, ..usual(sizes) });
    }
    // In the last two, about the limit of keys per invocation in the `scalar` tier, and more.
    for sizes in [[1, 1, 1, 8, 4096, 0], [9, 1, 1, 8, 4096, 0], [9, 1, 1, 256, 3790, 0], [9, 1, 1, 256, 4100, 0]] {
        push(Inputs::Normal, "causal", sizes, usual(sizes));
        push(Inputs::Repeated, "causal", sizes, usual(sizes));
    }
    for inputs in Inputs::ALL {
        for (lengths, sizes) in PACKED {
            // Biases that end within the sequences, and beyond them.
            for (variant, causal, reach) in [
                ("packed", false, None),
                ("packed causal", true, None),
                ("packed+biases", false, Some(12)),
                ("packed+biases", false, Some(128)),
                ("packed causal+biases", true, Some(3)),
            ] {
                let [h, hkv, d, window] = sizes;
                cases.push(Case {
                    kernel: "attention",
                    variant: variant.into(),
                    sizes: format!("lengths={lengths:?},h={h},hkv={hkv},d={d},window={window},reach={reach:?}"),
                    inputs,
                    build: Box::new(move |source| packed(source, lengths, sizes, causal, reach)),
                });
            }
        }
        for (lengths, [h, hkv, d, _]) in PACKED {
            cases.push(Case {
                kernel: "attention",
                variant: "one query".into(),
                sizes: format!("lengths={lengths:?},h={h},hkv={hkv},d={d}"),
                inputs,
                build: Box::new(move |source| one_query(source, lengths, [h, hkv, d])),
            });
        }
    }
}

/// Error of `cap * tanh(x / cap)` computed with `e^(-2 |x| / cap)` and WGSL's permitted division errors.
fn cap_rounding(score: f64, cap: f64) -> f64 {
    let argument = 2.0 * score.abs() / cap;
    let small = (-argument).exp();
    let of_exp = exp_rounding(argument) + 6.0 * ROUND * argument;
    cap * (2.0 * small / (1.0 + small).powi(2) * of_exp + 10.0 * ROUND)
}

/// Row `i` of rows of `dim`.
fn row(rows: &[f32], i: usize, dim: usize) -> Vec<f64> {
    rows[i * dim..][..dim].iter().map(|&v| f64::from(v)).collect()
}

/// Errors of queries and keys relative to their norms, and of weights and values relative to themselves.
type Off = [f64; 2];

/// Two roundings to 11 bits on devices with half-precision attention, for heads that its kernel supports.
fn off_in_half(source: &Source, d: u32) -> Off {
    if source.staged_f16 && d.is_multiple_of(16) && d <= 128 { [1.0 / 1024.0; 2] } else { [0.0; 2] }
}

/// The scale, and `[T, H D]` expected numbers. Rows are indexed by token and head, or by group and key; biases by
/// token, head and key.
#[allow(clippy::too_many_arguments)]
fn oracle(
    [t, h, hkv, d]: [u32; 4],
    soft_cap: Option<f32>,
    sinks: Option<&[f32]>,
    bias: impl Fn(u32, u32, u32) -> f64,
    visible: impl Fn(u32) -> Range<u32>,
    query: impl Fn(u32, u32) -> Vec<f64>,
    key: impl Fn(u32, u32) -> Vec<f64>,
    value: impl Fn(u32, u32) -> Vec<f64>,
    [turned, rounded]: Off,
) -> (f32, Vec<Expected>) {
    let dim = d as usize;
    let length = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let terms = |query: &[f64], key: &[f64]| -> (f64, f64) {
        let terms = query.iter().zip(key).map(|(&q, &k)| q * k);
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()));
        // An error of queries and keys counts as one of the sum.
        (sum, magnitude + turned / sum_rounding(dim) * length(query) * length(key))
    };
    // One pass over all visible pairs finds the maximum score. Beyond a few dozen, scores make softmax a choice by
    // their last digit in any arithmetic: the factor keeps them below that.
    let group = |head: u32| head / (h / hkv);
    let queries = (0..t).flat_map(|token| (0..h).map(move |head| (token, head)));
    let mut scores = Vec::new();
    let mut largest = 0.0f64;
    for (token, head) in queries.clone() {
        let query = query(token, head);
        let of_query: Vec<_> = visible(token).map(|s| terms(&query, &key(group(head), s))).collect();
        largest = of_query.iter().map(|(score, _)| score.abs()).fold(largest, f64::max);
        scores.push(of_query);
    }
    let usual = f64::from(d).powf(-0.5);
    let scale = if largest * usual > 20.0 { 20.0 / largest } else { usual } as f32;

    let mut want = Vec::with_capacity(scores.len() * dim);
    for ((token, head), of_query) in queries.zip(&scores) {
        let factor = f64::from(scale);
        let cap = soft_cap.map(f64::from);
        let capped = |score: f64| cap.map_or(score * factor, |cap| cap * (score * factor / cap).tanh());
        let sink = sinks.map(|sinks| f64::from(sinks[head as usize]));
        let biases: Vec<f64> = visible(token).map(|s| bias(token, head, s)).collect();
        let own: Vec<f64> = of_query.iter().zip(&biases).map(|((score, _), bias)| capped(*score) + bias).collect();
        let highest = own.iter().copied().fold(sink.unwrap_or(f64::MIN), f64::max);
        let weights: Vec<f64> = own.iter().map(|score| (score - highest).exp()).collect();
        let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - highest).exp());
        // Rounding a score changes its weight by the same relative amount; `exp` adds its own.
        let relative = |((score, magnitude), bias): (&(f64, f64), &f64)| {
            let of_cap = cap.map_or(0.0, |cap| cap_rounding(score * factor, cap));
            let of_score = sum_rounding(dim) * magnitude * factor + 2.0 * ROUND * (score * factor).abs();
            let of_sum = if *bias == 0.0 { 0.0 } else { ROUND * (score * factor + bias).abs() };
            of_score + of_cap + of_sum + exp_rounding(capped(*score) + bias - highest)
        };
        let worst = of_query.iter().zip(&biases).map(relative).fold(0.0, f64::max) + rounded;
        let mut sums = vec![(0.0f64, 0.0f64, 0.0f64); dim];
        for (s, weight) in visible(token).zip(&weights) {
            for (sum, v) in sums.iter_mut().zip(value(group(head), s)) {
                let term = weight / total * v;
                *sum = (sum.0 + term, sum.1 + term.abs(), sum.2 + term * term);
            }
        }
        want.extend(sums.iter().map(|&(value, magnitude, power)| Expected {
            value,
            bound: magnitude * (2.0 * worst + 2.0 * sum_rounding(weights.len())),
            // A value may be subnormal in half precision.
            floor: FLUSH * (weights.len() as f64 + 2.0) + if rounded > 0.0 { ROUND } else { 0.0 },
            power: power.max(value * value),
        }));
    }
    (scale, want)
}

fn no_bias(_: u32, _: u32, _: u32) -> f64 {
    0.0
}

/// Sequences packed one after another, with queries, keys and values of a token side by side. `reach`: with biases for
/// distances up to this.
fn packed(
    source: &mut Source,
    lengths: &'static [u32],
    [h, hkv, d, window]: [u32; 4],
    causal: bool,
    reach: Option<u32>,
) -> Job {
    let (dim, n_tokens) = (d as usize, lengths.iter().sum::<u32>());
    let n_heads = h + 2 * hkv;
    let qkv = source.rows(n_tokens, n_heads * d);
    let n_distances = 2 * reach.unwrap_or(0) + 1;
    let biases: Vec<f32> = source.normal(n_distances * h).into_iter().map(|bias| 3.0 * bias).collect();
    let row = |t: u32, head: u32| row(&qkv, (t * n_heads + head) as usize, dim);
    let visible = |token: u32| {
        let mut first = 0;
        let len = lengths.iter().find(|&&len| {
            token < first + len || {
                first += len;
                false
            }
        });
        let end = first + len.expect("a token of a sequence");
        let end = if causal { token + 1 } else { end };
        if window == 0 {
            return first..end;
        }
        first.max((token + 1).saturating_sub(window))..end.min(token + window)
    };
    let (scale, want) = oracle(
        [n_tokens, h, hkv, d],
        None,
        None,
        |token, head, s| match reach {
            None => 0.0,
            Some(reach) => {
                let distance = (i64::from(s) - i64::from(token)).clamp(-i64::from(reach), reach.into());
                f64::from(biases[(distance + i64::from(reach)) as usize * h as usize + head as usize])
            }
        },
        visible,
        row,
        |g, s| row(s, h + g),
        |g, s| row(s, h + hkv + g),
        [0.0; 2],
    );
    let window = (window > 0).then_some(window);
    let config = AttentionConfig {
        n_heads: h,
        n_kv_heads: hkv,
        head_dim: d,
        window,
        scale,
        soft_cap: None,
        values_from: None,
        causal,
        whole_pass: false,
    };
    let operands = vec![
        Operand::floats("biases", &[n_distances, h], biases),
        Operand::floats("qkv", &[n_tokens, n_heads * d], qkv),
        Operand::close("y", &[n_tokens, h * d], want, 1e-9),
    ];
    Job::new(operands, move |rec, bound| {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        // More room than these sequences need.
        let tiles = PackedTiles::declare(rec.target(), &config, [n_tokens + 20, lengths.len() as u32 + 3, longest])?;
        bound.device.write(tiles.tensor(), 0, &tiles.of(lengths)?)?;
        let biases = reach.map(|_| bound.tensor(0));
        kernels::attention_packed(rec, &tiles, &config, biases, bound.tensor(1), bound.tensor(2))
    })
}

/// One query of each sequence sees all of its keys.
fn one_query(source: &mut Source, lengths: &'static [u32], [h, hkv, d]: [u32; 3]) -> Job {
    let (n_queries, n_keys) = (lengths.len() as u32, lengths.iter().sum::<u32>());
    let (q, kv) = (source.rows(n_queries, h * d), source.rows(n_keys, 2 * hkv * d));
    let dim = d as usize;
    let visible = |query: u32| {
        let first: u32 = lengths[..query as usize].iter().sum();
        first..first + lengths[query as usize]
    };
    let of_kv = |head: u32, s: u32| row(&kv, (s * 2 * hkv + head) as usize, dim);
    let (scale, want) = oracle(
        [n_queries, h, hkv, d],
        None,
        None,
        no_bias,
        visible,
        |query, head| row(&q, (query * h + head) as usize, dim),
        of_kv,
        |g, s| of_kv(hkv + g, s),
        [0.0; 2],
    );
    let config = AttentionConfig {
        n_heads: h,
        n_kv_heads: hkv,
        head_dim: d,
        window: None,
        scale,
        soft_cap: None,
        values_from: None,
        causal: false,
        whole_pass: false,
    };
    let operands = vec![
        Operand::floats("q", &[n_queries, h * d], q),
        Operand::floats("kv", &[n_keys, 2 * hkv * d], kv),
        Operand::close("y", &[n_queries, h * d], want, 1e-9),
    ];
    Job::new(operands, move |rec, bound| {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let tiles = PackedTiles::declare(rec.target(), &config, [n_queries + 5, n_queries + 2, longest])?;
        bound.device.write(tiles.tensor(), 0, &tiles.of_one_query(lengths)?)?;
        kernels::cross_attention(rec, &tiles, &config, bound.tensor(0), bound.tensor(1), bound.tensor(2))
    })
}

/// A cache of `[Hkv, slots, row]`: its words and their values, in slots that passes may read. The others hold NaN.
fn cache(source: &mut Source, [hkv, d]: [u32; 2], options: Options, seen: Range<u32>) -> (Vec<u32>, Vec<f32>) {
    let Options { kind, slots, .. } = options;
    let rows = source.rows(hkv * slots, d);
    let mut packed = rows::pack(kind, &rows, d);
    let is_seen = |slot: u32| seen.clone().any(|s| s % slots == slot);
    for (i, row) in packed.chunks_exact_mut(rows::words(kind, d) as usize).enumerate() {
        if !is_seen(i as u32 % slots) {
            row.fill(NAN_WORD);
        }
    }
    let floats = rows::unpack(kind, &packed, d);
    (packed, floats)
}

fn attention(source: &mut Source, [t, h, hkv, d, pos, window]: [u32; 6], options: Options) -> Job {
    let Options { kind, capacity, slots, n_real, soft_cap, causal, whole_pass } = options;
    let n_keys = capacity.min(pos + if causal { t } else { n_real });
    let q = source.rows(t, h * d);
    let visible = |token: u32| {
        let seen = visible_keys(pos + token, n_keys, window, causal);
        if whole_pass { seen.start.min(pos)..seen.end } else { seen }
    };
    let all = (0..t).map(visible).fold(n_keys..0, |all, seen| all.start.min(seen.start)..all.end.max(seen.end));
    let ((k_words, mut k), (v_words, mut v)) =
        (cache(source, [hkv, d], options, all.clone()), cache(source, [hkv, d], options, all));
    if kind == KvType::Q8_0 && off_in_half(source, d)[1] > 0.0 {
        // Numbers beyond half precision are clamped to its maximum, as in an F16 cache.
        k.iter_mut().chain(&mut v).for_each(|x| *x = x.clamp(-65504.0, 65504.0));
    }
    let cached = |cache: &'_ [f32], group: u32, s: u32| row(cache, (group * slots + s % slots) as usize, d as usize);
    let query = |t: u32, head: u32| row(&q, (t * h + head) as usize, d as usize);
    // Every other case has sinks, with scores comparable to those of the keys.
    let has_sinks = (pos + h) % 2 == 1;
    let sinks: Vec<f32> = source.normal(h).into_iter().map(|sink| 2.0 * sink + 3.0).collect();
    let own_sinks = has_sinks.then_some(&sinks[..]);
    let (key, value) = (|g, s| cached(&k, g, s), |g, s| cached(&v, g, s));
    let off = off_in_half(source, d);
    let nmse = if off[1] > 0.0 { 1e-5 } else { 1e-9 };
    let (scale, want) = oracle([t, h, hkv, d], soft_cap, own_sinks, no_bias, visible, query, key, value, off);
    let window = (window > 0).then_some(window);
    let config = AttentionConfig {
        n_heads: h,
        n_kv_heads: hkv,
        head_dim: d,
        window,
        scale,
        soft_cap,
        values_from: None,
        causal,
        whole_pass,
    };
    let shape = [hkv, slots, rows::words(kind, d)];
    let operands = vec![
        Operand::state(pos, n_real),
        Operand::floats("q", &[t, h * d], q),
        Operand::words("k", &shape, k_words),
        Operand::words("v", &shape, v_words),
        Operand::floats("sinks", &[h], sinks),
        Operand::close("y", &[t, h * d], want, nmse),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let sinks = has_sinks.then(|| tensor(4));
        let cached = rows::cached(kind, [tensor(2), tensor(3)], capacity)?;
        kernels::attention(rec, bound.state(0), &config, sinks, tensor(1), &cached, tensor(5))
    })
}

/// One token, from its projection on.
fn next(source: &mut Source, [_, h, hkv, d, pos, window]: [u32; 6], options: Options, turn: Turn) -> Job {
    let Options { kind, capacity, slots, soft_cap, .. } = options;
    // The token's own key/value heads.
    let own_hkv = if turn.is_shared { 0 } else { hkv };
    let (dim, heads) = (d as usize, h + 2 * own_hkv);
    let first = if window > 0 { (pos + 1).saturating_sub(window) } else { 0 };
    // In some cases unrelated columns come first.
    let before = if h % 2 == 0 { 12 } else { 0 };
    let mut qkv = source.rows(1, before + heads * d);
    // Keys and values are cached unchanged except for RoPE: the token reads its own from the cache.
    let own = (before + h * d) as usize;
    let exact = rows::unpack(kind, &rows::pack(kind, &qkv[own..], d), d);
    qkv[own..].copy_from_slice(&exact);

    let Turn { norm, style, .. } = turn;
    let rot = if dim % 8 == 4 { d } else { d / 2 };
    let angles = Angles::new(source, capacity, rot, pos % 3);
    let weight = norm_weights(source, norm, [h, own_hkv, d]);
    let (projected, factors) = normed(&qkv[before as usize..], norm, &weight, [h, own_hkv, d]);
    let [of_queries, of_keys] = angles.rows();
    let own_heads: Vec<Vec<Expected>> = projected
        .chunks_exact(dim)
        .enumerate()
        .map(|(i, head)| {
            let table = if (i as u32) < h { of_queries } else { of_keys };
            match style {
                Some(style) if (i as u32) < h + own_hkv => {
                    scaled(turned(style, table, head, rot as usize, pos as usize), factors[i].as_ref())
                }
                _ => scaled(head.to_vec(), factors[i].as_ref()),
            }
        })
        .collect();
    let cached_keys = first..if turn.is_shared { pos + 1 } else { pos };
    let ((k_words, k), (v_words, v)) =
        (cache(source, [hkv, d], options, cached_keys.clone()), cache(source, [hkv, d], options, cached_keys));
    let values = |head: &[Expected]| head.iter().map(|x| x.value).collect::<Vec<f64>>();
    // A key is rounded when cached, including the token's own.
    let rounded = |head: &[Expected]| -> Vec<f64> {
        let floats: Vec<f32> = head.iter().map(|x| x.value as f32).collect();
        rows::unpack(kind, &rows::pack(kind, &floats, d), d).into_iter().map(f64::from).collect()
    };
    let cached = |cache: &[f32], group: u32, s: u32| row(cache, (group * slots + s % slots) as usize, dim);
    let key = |g: u32, s: u32| match s == pos && !turn.is_shared {
        true => rounded(&own_heads[(h + g) as usize]),
        false => cached(&k, g, s),
    };
    let value = |g: u32, s: u32| match s == pos && !turn.is_shared {
        true => rounded(&own_heads[(h + hkv + g) as usize]),
        false => cached(&v, g, s),
    };
    let has_sinks = (pos + h) % 2 == 1;
    let sinks: Vec<f32> = source.normal(h).into_iter().map(|sink| 2.0 * sink + 3.0).collect();
    let own_sinks = has_sinks.then_some(&sinks[..]);
    let is_turned = norm.is_some() || style.is_some();
    let (exactness, nmse) = match (is_turned, kind) {
        (false, _) => (0.0, 1e-9),
        // Errors of a norm's sum and of products.
        (true, KvType::F32) => (2.0 * sum_rounding(dim.max((h * d) as usize)), 1e-9),
        // A key's last digit may differ.
        (true, KvType::F16) => (1.0 / 1024.0, 1e-5),
        (true, KvType::Q8_0) => (1.0 / 127.0, 1e-3),
    };
    let visible = |_| first..pos + 1;
    let query = |_, head: u32| values(&own_heads[head as usize]);
    let (scale, mut want) =
        oracle([1, h, hkv, d], soft_cap, own_sinks, no_bias, visible, query, key, value, [exactness, 0.0]);
    if norm == Some(QkNorm::HeadsAndValues) && kind != KvType::F32 {
        // So may a value's.
        let values = own_heads.iter().skip((h + own_hkv) as usize).flatten();
        let largest = values.map(|x| x.value.abs()).fold(0.0, f64::max);
        want.iter_mut().for_each(|x| x.bound += exactness * largest);
    }

    // All rows but the token's stay unchanged.
    let written = |of: u32, before: Vec<u32>| {
        let blank = vec![Expected::new(f64::NAN, 0.0, 0.0); dim];
        let want = (0..hkv * slots).flat_map(|row| match row % slots == pos % slots && !turn.is_shared {
            true => own_heads[(of + row / slots) as usize].clone(),
            false => blank.clone(),
        });
        rows::check(kind, want.collect(), d, Some(before))
    };
    let shape = [hkv, slots, rows::words(kind, d)];
    let operands = vec![
        angles.state(pos, 1),
        angles.operand(),
        Operand::floats("weight", &[weight.len() as u32], weight),
        Operand::floats("qkv", &[1, before + heads * d], qkv),
        Operand::words("k", &shape, k_words.clone()).becomes(written(h, k_words)),
        Operand::words("v", &shape, v_words.clone()).becomes(written(h + hkv, v_words)),
        Operand::floats("sinks", &[h], sinks),
        Operand::close("y", &[1, h * d], want, nmse),
    ];
    let window = (window > 0).then_some(window);
    let config = AttentionConfig {
        n_heads: h,
        n_kv_heads: hkv,
        head_dim: d,
        window,
        scale,
        soft_cap,
        values_from: None,
        causal: true,
        whole_pass: false,
    };
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let rope = style.map(|style| angles.config(style));
        let heads = Heads {
            n_heads: h,
            n_kv_heads: own_hkv,
            head_dim: d,
            keys_hold_values: false,
            first_column: before,
            rope: rope.as_ref().map(|rope| (rope, tensor(1))),
            norm: norm.map(|norm| (norm, tensor(2), crate::rope::EPS)),
        };
        let cached = rows::cached(kind, [tensor(4), tensor(5)], capacity)?;
        let sinks = has_sinks.then(|| tensor(6));
        kernels::attention_next(rec, bound.state(0), &config, &heads, sinks, tensor(3), &cached, tensor(7))
    })
}

/// Tokens of one sequence in a batch with one of another produce the same bits, in cache and result, as separate
/// passes.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn attention_is_bit_equal_for_tokens_of_one_pass() {
    let norms = [None, Some(QkNorm::Heads), Some(QkNorm::Whole), Some(QkNorm::HeadsAndValues)];
    let kinds = [KvType::F32, KvType::F16, KvType::Q8_0];
    // H, Hkv, D, pages per sequence: with few keys, and with enough to split into parts.
    let sizes = [([4, 2, 32], 2), ([6, 1, 64], 20), ([4, 4, 288], 2)];
    for device in shared::gpus_beside_cpu(Tier::ALL).into_iter().chain([common::cpu()]) {
        let all = kinds.into_iter().flat_map(|kind| sizes.map(|of| (kind, of))).enumerate();
        for (i, (kind, (sizes, n_pages))) in common::drawn_on(&device, 2, all) {
            let norm = norms[i % norms.len()];
            // The only table, or one of two.
            let table = [None, Some(0), Some(1)][i % 3];
            let run = |(side_by_side, table)| in_pages(&device, kind, norm, (sizes, n_pages), side_by_side, table);
            let [(y, k, v), (own_y, own_k, own_v)] = [(true, table), (false, None)].map(run);
            let case = format!("{:?} {kind:?} {norm:?} {sizes:?} {table:?}", device.tier());
            assert!(y.iter().all(|&bits| f32::from_bits(bits).is_finite()), "{case}");
            assert_eq!(y.iter().zip(&own_y).position(|(a, b)| a != b), None, "{case}");
            assert!(k == own_k && v == own_v, "{case}");
        }
    }
}

/// Five tokens from the end of a page, after one of another sequence: results, keys and values. `page_table`: which of two page
/// tables has the pages.
#[cfg(not(target_arch = "wasm32"))]
fn in_pages(
    device: &Device,
    kind: KvType,
    norm: Option<QkNorm>,
    ([n_heads, n_kv_heads, head_dim], n_pages): ([u32; 3], u32),
    side_by_side: bool,
    page_table: Option<usize>,
) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut source = Source::new(Inputs::Student, 9, false);
    let slots = (2 * n_pages + 1) * PAGE;
    let mut upload = |label: &str, shape: &[u32]| {
        let floats = source.normal(shape.iter().product());
        device.upload(label, shape, &floats).expect("the shape fits")
    };
    let rope = RopeConfig::new(16, 10_000.0, RopeStyle::Halves);
    let table = device.upload("table", &[2048, 8, 2], &rope_table(&rope, 2048)).expect("the shape fits");
    let weight = upload("weight", &[(n_heads + n_kv_heads) * head_dim]);
    let weight = if norm == Some(QkNorm::Whole) { weight } else { upload("weight", &[2 * head_dim]) };
    let heads = Heads {
        n_heads,
        n_kv_heads,
        head_dim,
        keys_hold_values: false,
        first_column: 0,
        rope: Some((&rope, &table)),
        norm: norm.map(|norm| (norm, &weight, 1e-5)),
    };
    let config = AttentionConfig {
        n_heads,
        n_kv_heads,
        head_dim,
        window: None,
        scale: 0.2,
        soft_cap: None,
        values_from: None,
        causal: true,
        whole_pass: false,
    };
    let mut cache = || {
        let floats = source.normal(n_kv_heads * slots * head_dim);
        let words = rows::pack(kind, &floats, head_dim);
        device.upload("cache", &[n_kv_heads, slots, rows::words(kind, head_dim)], &words).expect("the shape fits")
    };
    let (k, v) = (cache(), cache());
    let cached = CachedKeys { k: k.clone(), v: Some(v.clone()), kind, capacity: n_pages * PAGE };
    let qkv = source.normal(6 * heads_dim(&heads));
    // The first sequence has the odd pages, the other one the even ones, in descending order.
    let pages = |odd: u32| (0..n_pages).rev().map(|page| 2 * page + 1 + odd).collect::<Vec<u32>>();
    let first = n_pages * PAGE - PAGE - 2;
    let row = |pos, odd| {
        let row = BatchRow { pos, n_tokens: 1, ..BatchRow::default() };
        match page_table {
            Some(1) => BatchRow { window_pages: pages(odd), ..row },
            _ => BatchRow { pages: pages(odd), ..row },
        }
    };
    let all: Vec<BatchRow> = [row(40, 1)].into_iter().chain((first..first + 5).map(|pos| row(pos, 0))).collect();
    let mut y = Vec::new();
    for (i, rows) in all.chunks(if side_by_side { all.len() } else { 1 }).enumerate() {
        let n = rows.len() as u32;
        let state = StepState::declare_shared(Some(n), n_pages, page_table.is_some()).expect("a valid state");
        let state = if page_table == Some(1) { state.of_window() } else { state };
        let state = if side_by_side { state.with_runs() } else { state };
        state.set_rows(device, rows).expect("the state is writable");
        let own = &qkv[i * heads_dim(&heads) as usize..][..(n * heads_dim(&heads)) as usize];
        let qkv = device.upload("qkv", &[n, heads_dim(&heads)], own).expect("the shape fits");
        let of_rows = Tensor::declare("y", Role::Activations, &[n, n_heads * head_dim], DType::F32).expect("valid");
        let mut rec = device.recorder();
        kernels::attention_next(&mut rec, &state, &config, &heads, None, &qkv, &cached, &of_rows).expect("shapes fit");
        device.run(&rec.finish(&mut Workspace::default())).expect("the recording runs");
        y.extend(common::block_on(device.read::<u32>(&of_rows)).expect("the result is readable"));
    }
    let read = |tensor| common::block_on(device.read::<u32>(tensor)).expect("the result is readable");
    (y, read(&k), read(&v))
}

#[cfg(not(target_arch = "wasm32"))]
fn heads_dim(heads: &Heads<'_>) -> u32 {
    (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim
}
