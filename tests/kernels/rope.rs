//! `rope`, `rope_kv`, `rope_packed` and the table of angles.

use tilewright::kernels::{self, Heads, KvType, QkNorm, QueryGrowth, RopeConfig, RopeScaling, RopeStyle, rope_table};

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND, Want, sum_rounding};
use crate::inputs::{Inputs, Source};
use crate::norm::rms_normed;
use crate::rows;

/// T, H, Hkv, D, rotated, pos: workgroups handle 64 pairs each.
const SIZES: [[u32; 6]; 12] = [
    [1, 1, 1, 2, 2, 0],
    [1, 2, 1, 4, 2, 3],
    [2, 3, 1, 32, 32, 1],
    [3, 4, 2, 40, 20, 31],
    [1, 8, 8, 64, 64, 63],
    [5, 16, 1, 64, 32, 64],
    [1, 1, 1, 128, 128, 127],
    [2, 1, 1, 130, 126, 128],
    [3, 4, 4, 80, 80, 255],
    [33, 2, 1, 24, 24, 256],
    [2, 3, 3, 256, 64, 1000],
    [1, 2, 1, 576, 576, 7],
];

const NMSE: f64 = 1e-9;
pub const EPS: f32 = 1e-5;

/// Norms of heads with their names; none for most cases.
const NORMS: [(&str, Option<QkNorm>); 5] = [
    ("", None),
    ("+heads", Some(QkNorm::Heads)),
    ("+rotated heads", Some(QkNorm::RotatedHeads)),
    ("+whole", Some(QkNorm::Whole)),
    ("+values", Some(QkNorm::HeadsAndValues)),
];

/// Keys and values without queries: those of an encoder's rows.
const KEYS: [[u32; 6]; 3] = [[1, 0, 1, 4, 2, 0], [3, 0, 4, 40, 20, 31], [17, 0, 3, 64, 64, 0]];
/// Queries without keys of their own.
const QUERIES: [[u32; 6]; 3] = [[1, 1, 0, 4, 2, 0], [3, 4, 0, 40, 20, 31], [17, 3, 0, 256, 64, 7]];

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in Inputs::ALL {
        for (name, style) in [("interleaved", RopeStyle::Interleaved), ("halves", RopeStyle::Halves)] {
            for (i, sizes) in SIZES.into_iter().enumerate() {
                let [t, h, hkv, d, rot, pos] = sizes;
                cases.push(Case {
                    kernel: "rope",
                    variant: name.into(),
                    sizes: format!("t={t},h={h},d={d},rot={rot},pos={pos}"),
                    inputs,
                    build: Box::new(move |source| rope(source, style, sizes)),
                });
                // Without a norm, and with one of them; sometimes without RoPE.
                for (of_norm, norm) in [NORMS[0], NORMS[1 + (i + i / 4) % 4]] {
                    let style = Some(style).filter(|_| norm.is_none() || i % 4 != 3);
                    let variant = if style.is_some() { format!("{name}{of_norm}") } else { of_norm[1..].into() };
                    if norm != Some(QkNorm::Whole) {
                        cases.push(Case {
                            kernel: "rope_packed",
                            variant: variant.clone(),
                            sizes: format!("t={t},h={h},hkv={hkv},d={d},rot={rot},s={}", pos + t),
                            inputs,
                            build: Box::new(move |source| rope_packed(source, style, norm, sizes)),
                        });
                    }
                    // The second cache is too short for the pass: positions past its end are dropped. The third one
                    // has fewer slots than positions.
                    let d = d.next_multiple_of(4);
                    let sizes = [t, h, hkv, d, rot, pos];
                    let all = pos + t + 1;
                    let rooms = [[all; 2], [(pos + t - 1).max(1); 2], [all.div_ceil(2).max(t), all]];
                    // F32 in all, and one of the other types in turn.
                    let others = [KvType::F16, KvType::Q8_0].map(|kind| (kind, rooms[i % 3]));
                    for (kind, room) in rooms.map(|room| (KvType::F32, room)).into_iter().chain(others) {
                        let [slots, capacity] = room;
                        cases.push(Case {
                            kernel: "rope_kv",
                            variant: format!("{}+{variant}", rows::tag(kind)),
                            sizes: format!("t={t},h={h},hkv={hkv},d={d},rot={rot},pos={pos},s={slots}/{capacity}"),
                            inputs,
                            build: Box::new(move |source| rope_kv(source, style, norm, sizes, (kind, room))),
                        });
                    }
                }
            }
            for (i, sizes @ [t, h, _, d, rot, pos]) in QUERIES.into_iter().enumerate() {
                let (norm, kind, end) = (NORMS[[0, 4, 1][i]].1, KvType::ALL[i], pos + t);
                cases.push(Case {
                    kernel: "rope_kv",
                    variant: format!("{}+{name}, queries alone", rows::tag(kind)),
                    sizes: format!("t={t},h={h},d={d},rot={rot},pos={pos},norm={i}"),
                    inputs,
                    build: Box::new(move |source| rope_kv(source, Some(style), norm, sizes, (kind, [end; 2]))),
                });
            }
            for (i, sizes @ [t, _, hkv, d, rot, pos]) in KEYS.into_iter().enumerate() {
                let (kind, end, style) = (KvType::ALL[i], pos + t, Some(style).filter(|_| i > 0));
                cases.push(Case {
                    kernel: "rope_kv",
                    variant: format!("{}+{name}, keys alone", rows::tag(kind)),
                    sizes: format!("t={t},hkv={hkv},d={d},rot={rot},pos={pos}"),
                    inputs,
                    build: Box::new(move |source| rope_kv(source, style, None, sizes, (kind, [end; 2]))),
                });
            }
        }
    }
}

/// Cosine and sine of random angles, independent of how real tables are made.
pub fn random_table(source: &mut Source, n_pos: u32, rot_dims: u32) -> Vec<f32> {
    let angles = (0..n_pos * rot_dims / 2).map(|_| source.rng.unit() * std::f64::consts::TAU);
    angles.flat_map(|angle| [angle.cos() as f32, angle.sin() as f32]).collect()
}

pub fn config(style: RopeStyle, rot_dims: u32) -> RopeConfig {
    RopeConfig::new(rot_dims, 1e4, style)
}

/// Exactly known numbers.
fn exact(values: &[f32]) -> Vec<Expected> {
    values.iter().map(|&v| Expected::new(f64::from(v), 0.0, 0.0)).collect()
}

/// One rotated head: pair by pair as defined, in any order of storage.
pub fn turned(style: RopeStyle, table: &[f32], head: &[Expected], rot_dims: usize, pos: usize) -> Vec<Expected> {
    let half = rot_dims / 2;
    let mut out = head.to_vec();
    for i in 0..half {
        let (a, b) = match style {
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            RopeStyle::Halves => (i, i + half),
        };
        let at = (pos * half + i) * 2;
        let (cos, sin) = (f64::from(table[at]), f64::from(table[at + 1]));
        let (x, y) = (&head[a], &head[b]);
        let expected = |p: f64, q: f64| {
            let (p_term, q_term) = (x.value * p, y.value * q);
            Expected {
                value: p_term + q_term,
                bound: 3.0 * ROUND * (p_term.abs() + q_term.abs()) + (x.bound * p).abs() + (y.bound * q).abs(),
                floor: 4.0 * FLUSH + (x.floor * p).abs() + (y.floor * q).abs(),
                power: x.power * p * p + y.power * q * q,
            }
        };
        out[a] = expected(cos, -sin);
        out[b] = expected(sin, cos);
    }
    out
}

/// The heads of a token's projection, with queries and keys normalised by the weights; and the factors of those
/// normalised after RoPE.
pub fn normed(
    row: &[f32],
    norm: Option<QkNorm>,
    weight: &[f32],
    [h, hkv, d]: [u32; 3],
) -> (Vec<Expected>, Vec<Option<Vec<f64>>>) {
    let (d, q_len, k_end) = (d as usize, (h * d) as usize, ((h + hkv) * d) as usize);
    let heads = row.len() / d;
    match norm {
        None => (exact(row), vec![None; heads]),
        Some(QkNorm::Whole) => {
            let (of_q, of_k) = weight.split_at(q_len);
            let parts = [rms_normed(&row[..q_len], of_q, EPS), rms_normed(&row[q_len..k_end], of_k, EPS)];
            (parts.into_iter().flatten().chain(exact(&row[k_end..])).collect(), vec![None; heads])
        }
        Some(norm @ (QkNorm::Heads | QkNorm::HeadsAndValues)) => {
            let of = |(i, head): (usize, &[f32])| match i as u32 {
                i if i < h => rms_normed(head, &weight[..d], EPS),
                i if i < h + hkv => rms_normed(head, &weight[d..], EPS),
                _ if norm == QkNorm::HeadsAndValues => rms_normed(head, &vec![1.0; d], EPS),
                _ => exact(head),
            };
            (row.chunks_exact(d).enumerate().flat_map(of).collect(), vec![None; heads])
        }
        Some(QkNorm::RotatedHeads) => {
            let factors = |(i, head): (usize, &[f32])| {
                let mean_sq = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / d as f64;
                let gain = 1.0 / (mean_sq + f64::from(EPS)).sqrt();
                let of = if (i as u32) < h { &weight[..d] } else { &weight[d..] };
                ((i as u32) < h + hkv).then(|| of.iter().map(|&w| gain * f64::from(w)).collect())
            };
            (exact(row), row.chunks_exact(d).enumerate().map(factors).collect())
        }
    }
}

/// Elements multiplied by factors known up to rounding.
pub fn scaled(head: Vec<Expected>, factors: Option<&Vec<f64>>) -> Vec<Expected> {
    let Some(factors) = factors else { return head };
    let rounding = sum_rounding(head.len()) + 4.0 * ROUND;
    let one = |(x, &factor): (Expected, &f64)| Expected {
        value: x.value * factor,
        bound: (x.bound + rounding * x.value.abs()) * factor.abs(),
        floor: (x.floor + FLUSH) * (1.0 + factor.abs()),
        power: x.power * factor * factor,
    };
    head.into_iter().zip(factors).map(one).collect()
}

/// Angles of positions below `capacity`, and the row of position 0; queries have separate rows.
pub struct Angles {
    table: Vec<f32>,
    first: u32,
    rot: u32,
}

impl Angles {
    pub fn new(source: &mut Source, capacity: u32, rot: u32, first: u32) -> Angles {
        Angles { table: random_table(source, 2 * (capacity + first), rot), first, rot }
    }

    pub fn operand(&self) -> Operand {
        Operand::floats("table", &[self.table.len() as u32 / self.rot, self.rot / 2, 2], self.table.clone())
    }

    pub fn state(&self, pos: u32, n_tokens: u32) -> Operand {
        Operand::turned_state(pos, n_tokens, self.first)
    }

    /// The kernels' configuration.
    pub fn config(&self, style: RopeStyle) -> RopeConfig {
        RopeConfig { query_growth: Some(QueryGrowth { beta: 0.5, length: 9 }), ..config(style, self.rot) }
    }

    /// Rows of queries and of keys from position 0 on.
    pub fn rows(&self) -> [&[f32]; 2] {
        let skipped = (self.first * self.rot) as usize;
        [&self.table[self.table.len() / 2 + skipped..], &self.table[skipped..self.table.len() / 2]]
    }
}

/// Expected queries, keys and values for projections `[T, (H + 2 Hkv) * D]`, in a cache with this number of slots.
fn split(
    style: RopeStyle,
    angles: &Angles,
    projected: &[Expected],
    [t, h, hkv, d, rot, pos]: [u32; 6],
    [slots, capacity]: [u32; 2],
) -> [Vec<Expected>; 3] {
    let blank = Expected::new(f64::NAN, 0.0, 0.0);
    let anything = Expected::new(f64::INFINITY, 0.0, 0.0);
    let (d_len, cache_len) = (d as usize, (hkv * slots * d) as usize);
    let mut q = vec![blank; (t * h * d) as usize];
    let (mut k, mut v) = (vec![blank; cache_len], vec![blank; cache_len]);
    for (i, head) in projected.chunks_exact(d_len).enumerate() {
        let (token, head_idx) = (i as u32 / (h + 2 * hkv), i as u32 % (h + 2 * hkv));
        let at = pos + token;
        let [of_queries, of_keys] = angles.rows();
        let turned = |table: &[f32], at: u32| turned(style, table, head, rot as usize, at as usize);
        let place = |group: u32| ((group * slots + at % slots) * d) as usize;
        if head_idx < h {
            // A query past the cache has no angle.
            let query = if at < capacity { turned(of_queries, at) } else { vec![anything; d_len] };
            let start = ((token * h + head_idx) * d) as usize;
            q[start..start + d_len].copy_from_slice(&query);
        } else if at < capacity && head_idx < h + hkv {
            let start = place(head_idx - h);
            k[start..start + d_len].copy_from_slice(&turned(of_keys, at));
        } else if at < capacity {
            let start = place(head_idx - h - hkv);
            v[start..start + d_len].copy_from_slice(head);
        }
    }
    [q, k, v]
}

fn rope(source: &mut Source, style: RopeStyle, [t, h, _, d, rot, pos]: [u32; 6]) -> Job {
    let n_pos = pos + t;
    let table = random_table(source, n_pos, rot);
    let x = source.rows(t * h, d);
    let head =
        |(i, head): (usize, &[f32])| turned(style, &table, &exact(head), rot as usize, pos as usize + i / h as usize);
    let want = x.chunks_exact(d as usize).enumerate().flat_map(head).collect();
    let operands = vec![
        Operand::state(pos, t),
        Operand::floats("table", &[n_pos, rot / 2, 2], table),
        Operand::floats("x", &[t, h, d], x),
        Operand::close("y", &[t, h, d], want, NMSE),
    ];
    Job::new(operands, move |rec, bound| {
        kernels::rope(rec, bound.state(0), &config(style, rot), bound.tensor(1), bound.tensor(2), bound.tensor(3))
    })
}

fn rope_kv(
    source: &mut Source,
    style: Option<RopeStyle>,
    norm: Option<QkNorm>,
    [t, h, hkv, d, rot, pos]: [u32; 6],
    (kind, [slots, capacity]): (KvType, [u32; 2]),
) -> Job {
    let angles = Angles::new(source, capacity, rot, pos % 3);
    let heads = h + 2 * hkv;
    // In some cases unrelated columns come first.
    let first = if h % 2 == 0 { 12 } else { 0 };
    let qkv = source.rows(t, first + heads * d);
    let weight = norm_weights(source, norm, [h, hkv, d]);
    let rot_dims = if style.is_some() { rot } else { 0 };
    let (mut projected, mut factors) = (Vec::new(), Vec::new());
    for row in qkv.chunks_exact((first + heads * d) as usize) {
        let (of_row, of_heads) = normed(&row[first as usize..], norm, &weight, [h, hkv, d]);
        projected.extend(of_row);
        factors.extend(of_heads);
    }
    let plain = style.unwrap_or(RopeStyle::Halves);
    let [q, k, v] = split(plain, &angles, &projected, [t, h, hkv, d, rot_dims, pos], [slots, capacity]);
    // Heads of the results, each with its factors.
    let by_head = |values: Vec<Expected>, head_of: &dyn Fn(u32) -> Option<u32>| -> Vec<Expected> {
        let all = values.chunks_exact(d as usize).map(<[Expected]>::to_vec).zip(0..);
        all.flat_map(|(head, i)| scaled(head, head_of(i).and_then(|at| factors[at as usize].as_ref()))).collect()
    };
    let q = by_head(q, &|i| Some(i / h * heads + i % h));
    let k = by_head(k, &|i| {
        let token = (0..t).find(|token| (pos + token) % slots == i % slots)?;
        Some(token * heads + h + i / slots)
    });
    let shape = [hkv.max(1), slots, rows::words(kind, d)];
    let row = |label, want| match hkv {
        0 => Operand::words(label, &shape, vec![7; shape.iter().product::<u32>() as usize]),
        _ => Operand::exact_words(label, &shape, Vec::new()).becomes(rows::check(kind, want, d, None)),
    };
    let operands = vec![
        angles.state(pos, t),
        angles.operand(),
        Operand::floats("weight", &[weight.len() as u32], weight),
        Operand::floats("qkv", &[t, first + heads * d], qkv),
        match h {
            0 => Operand::words("q", &[1], vec![7]),
            _ => Operand::close("q", &[t, h * d], q, NMSE),
        },
        row("k", k),
        row("v", v),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let config = style.map(|style| angles.config(style));
        let rope = config.as_ref().map(|config| (config, tensor(1)));
        let norm = norm.map(|norm| (norm, tensor(2), EPS));
        let heads = Heads {
            n_heads: h,
            n_kv_heads: hkv,
            head_dim: d,
            keys_hold_values: false,
            first_column: first,
            rope,
            norm,
        };
        let cached = rows::cached(kind, [tensor(5), tensor(6)], capacity)?;
        match h {
            0 => kernels::cache_kv(rec, bound.state(0), &heads, tensor(3), &cached),
            _ => kernels::rope_kv(rec, bound.state(0), &heads, tensor(3), tensor(4), &cached),
        }
    })
}

/// Weights of head norms.
pub fn norm_weights(source: &mut Source, norm: Option<QkNorm>, [h, hkv, d]: [u32; 3]) -> Vec<f32> {
    match norm {
        Some(QkNorm::Whole) => source.normal((h + hkv) * d),
        _ => source.normal(if hkv == 0 { d } else { 2 * d }),
    }
}

fn rope_packed(
    source: &mut Source,
    style: Option<RopeStyle>,
    norm: Option<QkNorm>,
    [t, h, hkv, d, rot, pos]: [u32; 6],
) -> Job {
    let n_pos = pos + t;
    let table = random_table(source, n_pos, rot);
    let heads = h + 2 * hkv;
    let qkv = source.rows(t, heads * d);
    let weight = norm_weights(source, norm, [h, hkv, d]);
    let rot_dims = if style.is_some() { rot as usize } else { 0 };
    // Id, position and type; positions in any order.
    let tokens: Vec<u32> = (0..t).flat_map(|i| [7, (pos + 5 * i) % n_pos, 1]).collect();
    let mut want = Vec::with_capacity(qkv.len());
    for (token, row) in qkv.chunks_exact((heads * d) as usize).enumerate() {
        let position = tokens[token * 3 + 1] as usize;
        let (of_row, factors) = normed(row, norm, &weight, [h, hkv, d]);
        for ((i, head), factors) in (0..).zip(of_row.chunks_exact(d as usize)).zip(&factors) {
            let plain = style.unwrap_or(RopeStyle::Halves);
            let turned = match i < h + hkv {
                true => turned(plain, &table, head, rot_dims, position),
                false => head.to_vec(),
            };
            want.extend(scaled(turned, factors.as_ref()));
        }
    }
    let operands = vec![
        Operand::words("tokens", &[t, 3], tokens),
        Operand::floats("table", &[n_pos, rot / 2, 2], table),
        Operand::floats("weight", &[weight.len() as u32], weight),
        Operand::floats("qkv", &[t, heads * d], qkv).becomes(Want::Close(want, NMSE)),
    ];
    Job::new(operands, move |rec, bound| {
        let config = style.map(|style| config(style, rot));
        let rope = config.as_ref().map(|config| (config, bound.tensor(1)));
        let norm = norm.map(|norm| (norm, bound.tensor(2), EPS));
        let heads =
            Heads { n_heads: h, n_kv_heads: hkv, head_dim: d, keys_hold_values: false, first_column: 0, rope, norm };
        kernels::rope_packed(rec, &heads, bound.tensor(0), bound.tensor(3))
    })
}

/// Llama 3's rule as published: three bands by wavelength, the middle one blended.
fn llama3_frequency(plain: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = std::f64::consts::TAU / plain;
    if wavelength < original / high {
        plain
    } else if wavelength > original / low {
        plain / factor
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * plain / factor + smooth * plain
    }
}

#[test]
fn rope_table_matches_formula() {
    let factors: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 / 3.0).collect();
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 8192.0 };
    let yarn = |truncate, magnitude| RopeScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_seq_len: 4096.0,
        truncate,
        magnitude,
    };
    let plain = [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }, RopeScaling::Factors(factors)];
    let scalings = plain.into_iter().chain([llama3, yarn(true, 1.25), yarn(false, 1.0)]);
    for (scaling, theta) in scalings.zip([1e4, 1e4, 5e5, 5e5, 1.5e5, 1.5e5]) {
        let (rot_dims, n_pos) = (64u32, 3000u32);
        let config = RopeConfig { rot_dims, theta, style: RopeStyle::Halves, scaling, query_growth: None };
        let table = rope_table(&config, n_pos);
        assert_eq!(table.len(), (n_pos * rot_dims) as usize);
        let mut bands = [0; 2]; // frequencies unchanged, and changed
        for i in 0..rot_dims / 2 {
            let plain = 1.0 / theta.powf(f64::from(2 * i) / f64::from(rot_dims));
            let frequency = match &config.scaling {
                RopeScaling::None => plain,
                RopeScaling::Linear { factor } => plain / factor,
                RopeScaling::Factors(factors) => plain / f64::from(factors[i as usize]),
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq_len } => {
                    llama3_frequency(plain, *factor, *low_freq_factor, *high_freq_factor, *original_max_seq_len)
                }
                RopeScaling::Long { .. } => unreachable!("it has a test of its own"),
                RopeScaling::Yarn { factor, truncate, .. } => {
                    yarn_frequency(f64::from(i), plain, theta, *factor, *truncate)
                }
            };
            let magnitude = match config.scaling {
                RopeScaling::Yarn { magnitude, .. } => magnitude,
                _ => 1.0,
            };
            bands[usize::from(frequency != plain)] += 1;
            for pos in [0, 1, 2, 17, 511, 2999] {
                let (sin, cos) = (f64::from(pos) * frequency).sin_cos();
                let at = ((pos * rot_dims / 2 + i) * 2) as usize;
                let [cos, sin] = [cos, sin].map(|value| value * magnitude);
                let error = (f64::from(table[at]) - cos).abs().max((f64::from(table[at + 1]) - sin).abs());
                assert!(error < 1e-7, "{:?}: position {pos}, pair {i}: off by {error:e}", config.scaling);
            }
        }
        if matches!(config.scaling, RopeScaling::Llama3 { .. } | RopeScaling::Yarn { .. }) {
            assert!(bands[0] > 0 && bands[1] > 0, "the settings must reach all bands");
        }
    }
}

/// YaRN's frequency of pair `i` of 32, with its range ending at 32 and 1 turns over 4096 positions: pairs 8.09 and
/// 17.40 at a base of 150,000, computed by hand.
fn yarn_frequency(i: f64, plain: f64, theta: f64, factor: f64, truncate: bool) -> f64 {
    let pair_of = |turns: f64| 32.0 * (4096.0 / (turns * std::f64::consts::TAU)).log(theta);
    let [fast, slow] = match truncate {
        true => [pair_of(32.0).floor(), pair_of(1.0).ceil()],
        false => [pair_of(32.0), pair_of(1.0)],
    };
    let interpolated = ((i - fast) / (slow - fast)).clamp(0.0, 1.0);
    plain * (1.0 - interpolated) + plain / factor * interpolated
}

/// LongRoPE: rows of short sequences, then of long ones; growing queries have all of them again.
#[test]
fn longrope_table_has_short_long_and_query_rows() {
    let (short, long) = (vec![1.0, 2.0, 4.0, 8.0], vec![3.0, 5.0, 7.0, 9.0]);
    let scaling = RopeScaling::Long { short, long, original_max_seq_len: 10, magnitude: 1.5 };
    let growth = QueryGrowth { beta: 0.1, length: 4 };
    let config = RopeConfig { scaling, query_growth: Some(growth), ..config(RopeStyle::Halves, 8) };
    let table = rope_table(&config, 25);
    assert_eq!((table.len(), config.n_rows(25)), (2 * 35 * 8, 70));
    assert_eq!([1, 10, 11, 25].map(|n| config.first_row(n, 25)), [0, 0, 10, 10]);
    for row in 0..70u32 {
        let (pos, is_long) = if row % 35 < 10 { (row % 35, false) } else { (row % 35 - 10, true) };
        let steps = if row < 35 { 0.0 } else { f64::from(pos / 4) };
        for (i, factor) in [[1.0, 3.0], [2.0, 5.0], [4.0, 7.0], [8.0, 9.0]].into_iter().enumerate() {
            let angle = f64::from(pos) / 1e4f64.powf(i as f64 / 4.0) / factor[usize::from(is_long)];
            let grown = 1.5 * (1.0 + 0.1 * steps.ln_1p());
            for (value, want) in table[(row as usize * 4 + i) * 2..][..2].iter().zip([angle.cos(), angle.sin()]) {
                assert!((f64::from(*value) - grown * want).abs() < 1e-6, "row {row}, pair {i}: {value}");
            }
        }
    }
    // A context that never exceeds the original one.
    assert_eq!((config.n_rows(6), [1, 6].map(|n| config.first_row(n, 6))), (24, [0, 0]));
}
