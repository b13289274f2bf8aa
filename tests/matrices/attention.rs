//! `attention_half`, against its formula in f64. Tiles are a quarter of their size, like matrices.

use std::ops::Range;

use half::f16;
use tilewright::kernels::KvType;

use super::emulation::{Gpu, SIZE, emulated};
use crate::common::{Rng, visible_keys};

const CAUSAL: u32 = 1;
const WHOLE_PASS: u32 = 4;
/// Half a unit in the last place of half precision.
const ROUND: f64 = 1.0 / 2048.0;
/// Bits of a NaN as two halves and as a scale: must never be read.
const NAN_WORD: u32 = 0x7fc0_7fc0;

/// Course of scores along the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Course {
    /// Random scores.
    Random,
    /// Up by 20 or more every eleven keys, and falling between, so that sums are rescaled.
    Jumps,
    /// Up by a third per key: no tile exceeds the reference by much, many do so together.
    Creeps,
    /// Falling, so that the first key's weight dominates.
    Falls,
}

impl Course {
    /// The score of key `s`, without noise.
    fn score(self, s: u32) -> f64 {
        let s = f64::from(s);
        match self {
            Course::Random => 0.0,
            Course::Jumps => 2.2 * (s / 11.0).floor() * 10.0 - 3.0 * (s % 11.0),
            Course::Creeps => s / 3.0,
            Course::Falls => -s / 2.0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// T, H, Hkv, pos, window (0: none).
    sizes: [u32; 5],
    course: Course,
    soft_cap: Option<f32>,
    causal: bool,
    /// Whether queries see all keys of their pass, whatever the window.
    whole_pass: bool,
    /// Tokens that are padding.
    padding: u32,
    /// Fewer slots than positions.
    ring: bool,
    /// Factor of queries, and divisor of keys.
    magnitude: f32,
}

const USUAL: Case = Case {
    sizes: [9, 2, 1, 0, 0],
    course: Course::Random,
    soft_cap: None,
    causal: true,
    whole_pass: false,
    padding: 0,
    ring: false,
    magnitude: 1.0,
};

const CASES: [Case; 21] = [
    USUAL,
    Case { sizes: [2, 1, 1, 0, 0], ..USUAL },
    // Heads that share keys; rows that do and do not fill tiles.
    Case { sizes: [11, 6, 2, 37, 0], ..USUAL },
    Case { sizes: [16, 4, 2, 48, 0], ..USUAL },
    Case { sizes: [70, 3, 3, 5, 0], ..USUAL },
    // Windows: rows that see none of the first tiles, and caches that have wrapped around several times.
    Case { sizes: [40, 2, 1, 0, 3], ..USUAL },
    Case { sizes: [24, 2, 2, 50, 20], ring: true, ..USUAL },
    Case { sizes: [5, 4, 2, 100, 6], ring: true, course: Course::Jumps, ..USUAL },
    Case { sizes: [33, 2, 1, 30, 31], course: Course::Creeps, ..USUAL },
    Case { soft_cap: Some(5.0), sizes: [17, 4, 2, 40, 0], ..USUAL },
    Case { soft_cap: Some(30.0), course: Course::Jumps, sizes: [17, 4, 2, 40, 0], ..USUAL },
    Case { padding: 5, sizes: [20, 2, 1, 13, 0], ..USUAL },
    Case { causal: false, padding: 3, sizes: [20, 2, 1, 13, 0], ..USUAL },
    Case { causal: false, sizes: [40, 2, 2, 0, 9], ..USUAL },
    Case { causal: false, whole_pass: true, padding: 2, sizes: [80, 2, 1, 7, 9], ..USUAL },
    // Whole tiles of padding.
    Case { causal: false, padding: 35, sizes: [50, 2, 2, 0, 4], ..USUAL },
    Case { course: Course::Jumps, sizes: [9, 4, 2, 90, 0], ..USUAL },
    Case { course: Course::Creeps, sizes: [30, 4, 2, 90, 0], ..USUAL },
    Case { course: Course::Falls, sizes: [12, 4, 2, 90, 0], ..USUAL },
    // Queries beyond half precision, and such that would lose digits in it.
    Case { sizes: [12, 4, 2, 30, 0], magnitude: 1e5, ..USUAL },
    Case { sizes: [12, 4, 2, 30, 0], magnitude: 1e-4, ..USUAL },
];

#[test]
fn matrix_unit_attention_matches_its_formula() {
    let Some(gpu) = Gpu::open() else { return };
    // A matrix of 8 x 8 is two stacked ones. Heads that fill all columns, and others.
    for (kind, matrix, head_dim, has_sinks) in
        [(KvType::Q8_0, 16, 16, true), (KvType::F16, 16, 32, false), (KvType::F16, 8, 64, true)]
    {
        let (high, per, subgroup) = if matrix == 8 { (2, 1, 16) } else { (1, 4, 8) };
        let label = format!("attention_half.{}.matrix{matrix}", kind.name().to_uppercase());
        let module = gpu.module(emulated(&label, subgroup, &[("staged", "f16", per), ("exchange", "f32", per)]));
        let constants = [("HEAD_DIM", head_dim), ("SUBGROUP", subgroup), ("SINKS", u32::from(has_sinks))];
        let pipeline = gpu.pipeline(&module, &constants.map(|(name, value)| (name, f64::from(value))));
        for (seed, case) in CASES.into_iter().enumerate() {
            let operands = Operands::new(kind, head_dim, has_sinks, case, seed as u64);
            let found = operands.run(&gpu, &pipeline, 4 * high * SIZE);
            operands.check(&found, &format!("{label}, heads of {head_dim}: {case:?}"));
        }
    }
}

struct Operands {
    kind: KvType,
    head_dim: u32,
    case: Case,
    scale: f32,
    slots: u32,
    capacity: u32,
    q: Vec<f32>,
    /// The cache's contents, as numbers and as words.
    keys: [Vec<f32>; 2],
    words: [Vec<u32>; 2],
    sinks: Option<Vec<f32>>,
}

impl Operands {
    fn new(kind: KvType, head_dim: u32, has_sinks: bool, case: Case, seed: u64) -> Operands {
        let mut rng = Rng::new(seed);
        let [t, h, hkv, pos, window] = case.sizes;
        // Rows past the keys hold NaN, unless padding lies past the cache.
        let capacity = if case.padding > 0 { pos + t - case.padding } else { pos + t + 9 };
        let slots = if case.ring { window - 1 + t } else { capacity };
        let dim = head_dim as usize;
        let sinks = (0..h).map(|_| 2.0 * rng.normal() as f32 + 3.0).collect();
        let mut operands = Operands {
            kind,
            head_dim,
            case,
            scale: (1.0 / f64::from(head_dim).sqrt()) as f32,
            slots,
            capacity,
            q: Vec::new(),
            keys: [Vec::new(), Vec::new()],
            words: [Vec::new(), Vec::new()],
            sinks: has_sinks.then_some(sinks),
        };
        // All queries share their first half, so that scores follow from the keys.
        let along = |i: usize| if case.course != Course::Random && i < dim / 2 { 2.0 } else { 0.0 };
        for i in 0..(t * h) as usize * dim {
            operands.q.push((along(i % dim) + rng.normal()) as f32 * case.magnitude);
        }
        let seen = (0..t).map(|token| operands.visible(token)).filter(|seen| !seen.is_empty());
        let seen = seen.fold(capacity..0, |all, seen| all.start.min(seen.start)..all.end.max(seen.end));
        for values in [false, true] {
            for slot in (0..hkv).flat_map(|_| 0..slots) {
                let Some(s) = seen.clone().find(|s| s % slots == slot) else {
                    operands.words[usize::from(values)].extend(vec![NAN_WORD; kind.row_words(head_dim) as usize]);
                    operands.keys[usize::from(values)].extend(vec![f32::NAN; dim]);
                    continue;
                };
                let (score, factor) = match values {
                    true => (0.0, 1.0),
                    false => (case.course.score(s) / f64::from(head_dim).sqrt(), 1.0 / f64::from(case.magnitude)),
                };
                let element = |i| if along(i) > 0.0 { score } else { 0.0 } + rng.normal();
                let row: Vec<f32> = (0..dim).map(element).map(|x| (factor * x) as f32).collect();
                let (words, row) = stored(kind, &row);
                operands.words[usize::from(values)].extend(words);
                operands.keys[usize::from(values)].extend(row);
            }
        }
        operands
    }

    /// Keys visible to a token.
    fn visible(&self, token: u32) -> Range<u32> {
        let Case { sizes: [t, _, _, pos, window], causal, whole_pass, padding, .. } = self.case;
        let n_keys = self.capacity.min(pos + if causal { t } else { t - padding });
        let seen = visible_keys(pos + token, n_keys, window, causal);
        if whole_pass { seen.start.min(pos)..seen.end } else { seen }
    }

    fn run(&self, gpu: &Gpu, pipeline: &wgpu::ComputePipeline, tile_rows: u32) -> Vec<f32> {
        let &Operands { kind, head_dim, case, scale, slots, capacity, .. } = self;
        let [t, h, hkv, pos, window] = case.sizes;
        let (quads, units) = (head_dim / 4, kind.row_words(head_dim) / 4);
        let n_tiles = (t * h / hkv).div_ceil(tile_rows);
        let of_pass = if case.whole_pass { WHOLE_PASS } else { 0 };
        let flags = of_pass | if case.causal { CAUSAL } else { 0 };
        let cap = case.soft_cap.unwrap_or(0.0);
        let mut params = vec![t, h, hkv, head_dim, capacity, window, scale.to_bits(), cap.to_bits()];
        params.extend([flags, 1, 1, 0, h * quads, units, slots * units, n_tiles, 0, 0, 0, slots]);
        params.resize(28, 0);
        let state = [pos, t - case.padding, 0, 0];
        let operands: [&[u8]; 5] = [
            bytemuck::cast_slice(&state),
            bytemuck::cast_slice(&self.q),
            bytemuck::cast_slice(&self.words[0]),
            bytemuck::cast_slice(&self.words[1]),
            bytemuck::cast_slice(self.sinks.as_deref().unwrap_or(&[0.0])),
        ];
        let y = vec![f32::NAN; (t * h * head_dim) as usize];
        // Folded; an odd number of workgroups leaves one over.
        gpu.run(pipeline, &params, &operands, &y, [(n_tiles * hkv).div_ceil(2), 2, 1])
    }

    /// Compares each element with its own bound, and all with the mean error of half precision.
    fn check(&self, found: &[f32], name: &str) {
        let &Operands { kind, case, slots, .. } = self;
        let ([t, h, hkv, ..], dim) = (case.sizes, self.head_dim as usize);
        let row =
            |of: &[f32], i: u32| -> Vec<f64> { of[i as usize * dim..][..dim].iter().map(|&x| f64::from(x)).collect() };
        // F16 keys and values are exact.
        let of_cache = if kind == KvType::Q8_0 { ROUND } else { 0.0 };
        let scale = f64::from(self.scale);
        let (mut noise, mut power) = (0.0, 0.0);
        for (token, head) in (0..t - case.padding).flat_map(|token| (0..h).map(move |head| (token, head))) {
            let query = row(&self.q, token * h + head);
            let at = |s: u32| head / (h / hkv) * slots + s % slots;
            let (mut scores, mut worst) = (Vec::new(), 0.0f64);
            for s in self.visible(token) {
                let terms = query.iter().zip(row(&self.keys[0], at(s))).map(|(q, k)| scale * q * k);
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
                worst = worst.max((ROUND + of_cache + 1e-6) * magnitude);
                scores.push(case.soft_cap.map_or(sum, |cap| f64::from(cap) * (sum / f64::from(cap)).tanh()));
            }
            let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head as usize]));
            let highest = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
            let total: f64 = scores.iter().copied().chain(sink).map(|score| (score - highest).exp()).sum();
            let (mut want, mut bound) = (vec![0.0; dim], vec![0.0; dim]);
            for (s, score) in self.visible(token).zip(scores) {
                let weight = (score - highest).exp() / total;
                for ((want, bound), v) in want.iter_mut().zip(&mut bound).zip(row(&self.keys[1], at(s))) {
                    *want += weight * v;
                    // A weight is rounded; weights of at most 2^-24 of the largest may become zero.
                    *bound += weight * v.abs() * (ROUND + of_cache + 2.0 * worst.exp_m1()) + 1e-7 * v.abs();
                }
            }
            for (i, (&want, &bound)) in want.iter().zip(&bound).enumerate() {
                let found = f64::from(found[(token * h + head) as usize * dim + i]);
                let is_close = (found - want).abs() <= bound;
                assert!(
                    is_close,
                    "{name}: token {token}, head {head}, element {i}: {found} for {want}, at most {bound} off"
                );
                noise += (found - want).powi(2);
                power += want * want;
            }
        }
        // Rounding Q8_0 keys moves large scores by more, and tiny keys have fewer digits.
        let is_ordinary = case.course == Course::Random && case.magnitude == 1.0;
        let limit = if kind == KvType::F16 || is_ordinary { 1e-6 } else { 1e-5 };
        assert!(noise <= limit * power, "{name}: its error is {:.1e} of the result", noise / power);
    }
}

/// A row of a cache in words, and its values.
fn stored(kind: KvType, row: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let mut bytes = Vec::new();
    let mut floats = Vec::new();
    if kind == KvType::F16 {
        for &x in row {
            bytes.extend(f16::from_f32(x).to_le_bytes());
            floats.push(f16::from_f32(x).to_f32());
        }
    } else {
        let mut scales = Vec::new();
        for block in row.chunks(32) {
            let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
            let mut quants = [0i8; 32];
            for (quant, x) in quants.iter_mut().zip(block) {
                *quant = (x / scale).round() as i8;
                floats.push(scale * f32::from(*quant));
            }
            bytes.extend(quants.map(|quant| quant as u8));
            scales.extend(scale.to_le_bytes());
        }
        bytes.extend(scales);
    }
    bytes.resize(4 * kind.row_words(row.len() as u32) as usize, 0);
    (bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect(), floats)
}
