//! Mixtures of experts: `route`, `expert_gate_up`, `expert_down`, and for many tokens `expert_tiles`, `expert_matmul`
//! and `expert_sum`.

use tilewright::WeightType;
use tilewright::kernels::{
    self, ExpertDown, ExpertGateUp, ExpertGroups, ExpertProduct, ExpertRows, ExpertScore, ExpertTiles, Gate, Gelu,
    Norm, Router, SharedExperts,
};

use crate::common::Expected;
use crate::fused::{clamped, geglu, swiglu};
use crate::harness::{Case, Data, FLUSH, Job, Operand, ROUND, Want};
use crate::inputs::{Inputs, Source, dequantise, has_case};
use crate::linear::{EPS, Rows, limit, product};

/// T, E, K.
const ROUTE: [[u32; 3]; 9] =
    [[1, 1, 1], [2, 2, 2], [3, 5, 2], [1, 8, 2], [5, 60, 4], [2, 64, 6], [1, 65, 65], [3, 128, 8], [2, 1024, 10]];

/// T, E, K, F, C.
const PRODUCTS: [[u32; 5]; 7] = [
    [1, 1, 1, 4, 4],
    [2, 3, 2, 8, 32],
    [1, 4, 2, 12, 60],
    [3, 6, 3, 36, 64],
    [1, 2, 2, 64, 260],
    [9, 5, 1, 20, 96],
    [1, 8, 4, 68, 128],
];

/// T, E, K: around the tiles of 16 and 64 rows, and with unused experts.
const TILES: [[u32; 3]; 8] =
    [[1, 1, 1], [3, 5, 2], [16, 1, 1], [17, 1, 1], [40, 3, 2], [70, 2, 1], [33, 130, 4], [260, 3, 3]];

/// T, E, K, rows of an expert, columns.
const TILED: [[u32; 5]; 6] = [
    [1, 1, 1, 4, 4],
    [9, 3, 2, 20, 32],
    [17, 1, 1, 70, 60],
    [70, 2, 2, 64, 64],
    [200, 3, 1, 300, 36],
    [30, 8, 4, 260, 260],
];

/// A matrix that has some experts only: the first, and their number.
const MIDDLE: [u32; 2] = [1, 2];

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in Inputs::ALL {
        for (i, sizes @ [t, e, k]) in ROUTE.into_iter().enumerate() {
            let score = [ExpertScore::Softmax, ExpertScore::Sigmoid][i % 2];
            let groups = match e {
                60 => Some(ExpertGroups { n: 4, n_used: 2, top_two: false }),
                64 => Some(ExpertGroups { n: 64, n_used: 7, top_two: false }),
                128 => Some(ExpertGroups { n: 8, n_used: 4, top_two: true }),
                1024 => Some(ExpertGroups { n: 16, n_used: 1, top_two: true }),
                _ => None,
            };
            let router = Router { score, shares: i % 3 != 1, scale: [1.0, 2.5][i % 2], groups };
            let vectors @ [has_bias, has_factors] = [i % 4 == 3, i % 3 == 2];
            let shared =
                [(0, false), (1, true), (3, false), (2, true)].map(|(n, gated)| SharedExperts { n, gated })[i % 4];
            cases.push(Case {
                kernel: "route",
                variant: format!(
                    "{score:?}{}{}{}",
                    if groups.is_some() { "+groups" } else { "" },
                    if has_bias { "+bias" } else { "" },
                    if has_factors { "+factors" } else { "" }
                ),
                sizes: format!("t={t},e={e},k={k},m={}", shared.n),
                inputs,
                build: Box::new(move |source| route(source, router, shared, vectors, sizes)),
            });
        }
        for sizes @ [t, e, k] in TILES {
            let sizes_text = format!("t={t},e={e},k={k}");
            let sum_sizes = sizes_text.clone();
            cases.push(Case {
                kernel: "expert_tiles",
                variant: String::new(),
                sizes: sizes_text,
                inputs,
                build: Box::new(move |source| tiles(source, sizes)),
            });
            for accumulate in [false, true] {
                cases.push(Case {
                    kernel: "expert_sum",
                    variant: if accumulate { "+accumulate" } else { "" }.into(),
                    sizes: format!("{sum_sizes},c={}", 4 * e + 3),
                    inputs,
                    build: Box::new(move |source| sum(source, accumulate, [t, e, k, 4 * e + 3])),
                });
            }
        }
        for weight in WeightType::ALL {
            let of = |&(i, _): &(usize, [u32; 5])| has_case(weight, i, PRODUCTS.len());
            for (i, sizes @ [t, e, k, f, c]) in PRODUCTS.into_iter().enumerate().filter(of) {
                let gate =
                    [Gate::Silu, Gate::Clamped, Gate::Gelu(Gelu::Exact), Gate::Silu, Gate::Gelu(Gelu::Tanh)][i % 5];
                let vector = ["+norm", "+bias", ""][i % 3];
                let sizes_text = format!("t={t},e={e},k={k},f={f},c={c}");
                for (way, name) in [(Way::Whole, ""), (Way::Apart, "+apart"), (Way::Middle, "+middle")] {
                    cases.push(Case {
                        kernel: "expert_gate_up",
                        variant: format!("{weight}{vector}+{gate:?}{name}"),
                        sizes: sizes_text.clone(),
                        inputs,
                        build: Box::new(move |source| gate_up(source, weight, (vector, way), gate, sizes)),
                    });
                }
                let (has_bias, accumulate) = (i % 2 == 0, i % 3 != 0);
                let (bias, sum) = (if has_bias { "+bias" } else { "" }, if accumulate { "+accumulate" } else { "" });
                for (way, name) in [(Way::Whole, ""), (Way::Middle, "+middle")] {
                    cases.push(Case {
                        kernel: "expert_down",
                        variant: format!("{weight}{bias}{sum}{name}"),
                        sizes: sizes_text.clone(),
                        inputs,
                        build: Box::new(move |source| down(source, weight, (has_bias, way), accumulate, sizes)),
                    });
                }
            }
            for (i, sizes @ [t, e, k, n, c]) in TILED.into_iter().enumerate() {
                let (has_bias, by_slot, way) = (i % 2 == 0, i % 3 == 1, [Way::Whole, Way::Middle][i / 2 % 2]);
                let bias = if has_bias { "+bias" } else { "" };
                cases.push(Case {
                    kernel: "expert_matmul",
                    variant: format!("{weight}{bias}"),
                    sizes: format!("t={t},e={e},k={k},n={n},c={c}"),
                    inputs,
                    build: Box::new(move |source| matmul(source, weight, (has_bias, by_slot, way), sizes)),
                });
            }
        }
    }
}

/// The available expert matrices.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// All, in one matrix.
    Whole,
    /// All, with gates and ups in separate matrices.
    Apart,
    /// Some experts only.
    Middle,
}

impl Way {
    /// The first available expert and their number, out of `e`.
    fn experts(self, e: u32) -> [u32; 2] {
        match self {
            Way::Middle if e > MIDDLE[0] => [MIDDLE[0], MIDDLE[1].min(e - MIDDLE[0])],
            _ => [0, e],
        }
    }

    fn has(self, e: u32, expert: u32) -> bool {
        let [first, n] = self.experts(e);
        (first..first + n).contains(&expert)
    }
}

fn route(
    source: &mut Source,
    router: Router,
    shared: SharedExperts,
    [has_bias, has_factors]: [bool; 2],
    [t, e, k]: [u32; 3],
) -> Job {
    let n_logits = e + u32::from(shared.gated);
    let (logits, bias, factors) = (source.rows(t, n_logits), source.normal(e), source.normal(e));
    let own_bias = if has_bias { bias.clone() } else { vec![0.0; e as usize] };
    let own_factors = if has_factors { factors.clone() } else { vec![1.0; e as usize] };
    let rows = logits.clone();
    let check = move |words: &[u32]| {
        let routes = words.chunks_exact(2 * (k + shared.n) as usize);
        for (t, (row, routes)) in rows.chunks_exact(n_logits as usize).zip(routes).enumerate() {
            let ((row, gate), (routes, beside)) = (row.split_at(e as usize), routes.split_at(2 * k as usize));
            let chosen = check_route(router, row, [&own_bias, &own_factors], routes);
            let all = chosen.and_then(|()| check_shared(e, gate, beside));
            all.map_err(|message| format!("token {t}: {message}"))?;
        }
        Ok(())
    };
    let routes =
        Operand::exact_words("routes", &[t, k + shared.n, 2], Vec::new()).becomes(Want::Check(Box::new(check)));
    let operands = vec![
        Operand::floats("logits", &[t, n_logits], logits),
        Operand::floats("bias", &[e], bias),
        Operand::floats("factors", &[e], factors),
        routes,
    ];
    Job::new(operands, move |rec, bound| {
        let vectors = [has_bias.then(|| bound.tensor(1)), has_factors.then(|| bound.tensor(2))];
        kernels::route(rec, &router, shared, bound.tensor(0), vectors, bound.tensor(3))
    })
}

/// Whether the pairs after a token's own experts are the shared experts.
fn check_shared(e: u32, gate: &[f32], routes: &[u32]) -> Result<(), String> {
    let want = gate.first().map_or(1.0, |&logit| 1.0 / (1.0 + (-f64::from(logit)).exp()));
    for (expert, route) in (e..).zip(routes.chunks_exact(2)) {
        let weight = f64::from(f32::from_bits(route[1]));
        if route[0] != expert || (weight - want).abs() > 3e-5 * want + FLUSH {
            return Err(format!(
                "expert {} of all tokens has the weight {weight}, expected {expert} and {want}",
                route[0]
            ));
        }
    }
    Ok(())
}

/// Checks pairs of an expert and its weight's bits against the definition in f64. Experts with scores tied within
/// rounding may swap places.
fn check_route(router: Router, logits: &[f32], [bias, factors]: [&[f32]; 2], routes: &[u32]) -> Result<(), String> {
    let logits: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    let highest = logits.iter().copied().fold(f64::MIN, f64::max);
    let total: f64 = logits.iter().map(|logit| (logit - highest).exp()).sum();
    let scores: Vec<f64> = match router.score {
        ExpertScore::Softmax => logits.iter().map(|logit| (logit - highest).exp() / total).collect(),
        ExpertScore::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    };
    let chosen_by: Vec<f64> = scores.iter().zip(bias).map(|(score, &bias)| score + f64::from(bias)).collect();
    let (allowed, has_tied_groups) = allowed_experts(router.groups, &chosen_by);
    let mut sorted: Vec<f64> = allowed.iter().map(|&e| chosen_by[e]).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let close = |a: f64, b: f64| (a - b).abs() <= 3e-5 * a.abs().max(b.abs()) + 1e-7;
    let experts: Vec<usize> = routes.chunks_exact(2).map(|route| route[0] as usize).collect();
    let chosen: f64 = experts.iter().map(|&e| scores.get(e).copied().unwrap_or(f64::NAN)).sum();
    for (s, (&expert, route)) in experts.iter().zip(routes.chunks_exact(2)).enumerate() {
        if expert >= logits.len() || experts[..s].contains(&expert) {
            return Err(format!("expert {expert} is none, or is chosen twice"));
        }
        let is_chosen = allowed.contains(&expert) && close(chosen_by[expert], sorted[s]);
        if !is_chosen && !has_tied_groups {
            return Err(format!("expert {expert} of score {}, expected one of {}", chosen_by[expert], sorted[s]));
        }
        let share = if router.shares { f64::from(router.scale) / chosen } else { f64::from(router.scale) };
        let (weight, want) = (f64::from(f32::from_bits(route[1])), share * scores[expert] * f64::from(factors[expert]));
        // Shares of scores below the range of f32 are undefined.
        let is_told = !router.shares || chosen > 1e-30;
        if is_told && !close(weight, want) {
            return Err(format!("expert {expert} has the weight {weight}, expected {want}"));
        }
    }
    Ok(())
}

/// The experts of the groups that a token uses, and whether another group is tied with one of them within rounding.
fn allowed_experts(groups: Option<ExpertGroups>, chosen_by: &[f64]) -> (Vec<usize>, bool) {
    let Some(groups) = groups else { return ((0..chosen_by.len()).collect(), false) };
    let size = chosen_by.len() / groups.n as usize;
    let score = |experts: &[f64]| {
        let mut experts = experts.to_vec();
        experts.sort_by(|a, b| b.total_cmp(a));
        experts.iter().take(if groups.top_two { 2 } else { 1 }).sum::<f64>()
    };
    let mut scores: Vec<(f64, usize)> = chosen_by.chunks(size).map(score).zip(0..).collect();
    scores.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (used, others) = scores.split_at(groups.n_used as usize);
    let last = used.last().map_or(0.0, |(score, _)| *score);
    let is_tied = others.first().is_some_and(|(score, _)| (score - last).abs() <= 3e-5 * last.abs() + 1e-7);
    (used.iter().flat_map(|(_, group)| group * size..(group + 1) * size).collect(), is_tied)
}

/// Distinct experts of each token, and their weights.
fn routes(source: &mut Source, [t, e, k]: [u32; 3]) -> Vec<u32> {
    let weights = source.normal(t * k);
    let of = |slot: u32| {
        let (token, s) = (slot / k, slot % k);
        [(7 * token + 3 * s * (if e % 3 == 0 { 1 } else { 3 }) + token * s) % e, weights[slot as usize].to_bits()]
    };
    (0..t * k).flat_map(of).collect()
}

fn gate_up(
    source: &mut Source,
    weight: WeightType,
    (vector, way): (&'static str, Way),
    gate: Gate,
    [t, e, k, f, c]: [u32; 5],
) -> Job {
    let n_rows = 2 * e * f;
    let (x, bytes) = (source.rows(t, c), source.weights(weight, n_rows, c));
    let (norm, bias, routes) = (source.normal(c), source.normal(n_rows), routes(source, [t, e, k]));
    let (has_norm, has_bias) = (vector == "+norm", vector == "+bias");
    let rows = if has_norm { Rows::normed(&x, norm.clone(), EPS) } else { Rows::plain(&x, c as usize) };
    let sizes = [t as usize, n_rows as usize, c as usize];
    let more = |i: usize| [if has_bias { f64::from(bias[i % bias.len()]) } else { 0.0 }, 0.0];
    let more: Vec<[f64; 2]> = (0..sizes[0] * sizes[1]).map(more).collect();
    let sums = product(source, &rows, &dequantise(weight, &bytes, c), &more, sizes);
    let at = |slot: u32, f_at: u32| {
        let (token, expert) = (slot / k, routes[2 * slot as usize]);
        [2 * expert * f + f_at, (2 * expert + 1) * f + f_at].map(|row| &sums[(token * n_rows + row) as usize])
    };
    let gated = |[z, up]: [&Expected; 2]| match gate {
        Gate::Silu => swiglu(z, up),
        Gate::Gelu(form) => geglu(z, up, form),
        Gate::Clamped => clamped(z, up),
    };
    let untouched = || Expected::new(f64::NAN, 0.0, 0.0);
    let want = (0..t * k).flat_map(|slot| (0..f).map(move |f_at| (slot, f_at)));
    let want = want.map(|(slot, f_at)| match way.has(e, routes[2 * slot as usize]) {
        true => gated(at(slot, f_at)),
        false => untouched(),
    });
    let want = want.collect();
    let (first, n) = (way.experts(e)[0], way.experts(e)[1]);
    // Selects some experts' bytes, or those of one kind.
    let of_rows = |rows: std::ops::Range<u32>| {
        let row_bytes = bytes.len() / n_rows as usize;
        bytes[rows.start as usize * row_bytes..rows.end as usize * row_bytes].to_vec()
    };
    let of_kind = |kind: u32| (0..e).flat_map(|e| of_rows((2 * e + kind) * f..(2 * e + kind + 1) * f)).collect();
    let (both, second): (Vec<u8>, Vec<u8>) = match way {
        Way::Apart => (of_kind(0), of_kind(1)),
        _ => (of_rows(2 * first * f..2 * (first + n) * f), of_rows(0..f)),
    };
    let both_rows = if way == Way::Apart { e * f } else { 2 * n * f };
    let second_rows = if way == Way::Apart { e * f } else { f };
    let operands = vec![
        Operand::weights(weight, &[both_rows, c], both),
        Operand::floats("norm", &[c], norm),
        Operand::floats("bias", &[n_rows], bias),
        Operand::floats("x", &[t, c], x),
        Operand::words("routes", &[t, k, 2], routes.clone()),
        Operand::close("y", &[t * k, f], want, limit(source, sizes).max(1e-9)),
        Operand::weights(weight, &[second_rows, c], second),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let gate_up = ExpertGateUp {
            w: bound.matrix(0),
            rows: if way == Way::Apart { ExpertRows::Gates } else { ExpertRows::Both },
            first_expert: first,
            bias: has_bias.then(|| tensor(2)),
            norm: has_norm.then(|| Norm { weight: tensor(1), eps: EPS }),
            gate,
        };
        gate_up.record(rec, tensor(3), tensor(4), tensor(5))?;
        if way == Way::Apart {
            let ups = ExpertGateUp { w: bound.matrix(6), rows: ExpertRows::Ups, ..gate_up };
            ups.record(rec, tensor(3), tensor(4), tensor(5))?;
        }
        Ok(())
    })
}

fn down(
    source: &mut Source,
    weight: WeightType,
    (has_bias, way): (bool, Way),
    accumulate: bool,
    [t, e, k, f, c]: [u32; 5],
) -> Job {
    let (n_rows, n_slots) = (e * c, t * k);
    let (x, bytes) = (source.rows(n_slots, f), source.weights(weight, n_rows, f));
    let (bias, routes, before) = (source.normal(n_rows), routes(source, [t, e, k]), source.normal(t * c));
    let sizes = [n_slots as usize, n_rows as usize, f as usize];
    let more = |i: usize| [if has_bias { f64::from(bias[i % bias.len()]) } else { 0.0 }, 0.0];
    let more: Vec<[f64; 2]> = (0..sizes[0] * sizes[1]).map(more).collect();
    let sums = product(source, &Rows::plain(&x, f as usize), &dequantise(weight, &bytes, f), &more, sizes);
    let of_slot = |slot: u32, n: u32| {
        let expert = routes[2 * slot as usize];
        way.has(e, expert).then(|| &sums[(slot * n_rows + expert * c + n) as usize])
    };
    let want = weighted([t, k, c], &routes, accumulate.then_some(&before), of_slot);
    let nmse = limit(source, sizes).max(1e-9);
    let y = match accumulate {
        true => Operand::floats("y", &[t, c], before.clone()).becomes(Want::Close(want, nmse)),
        false => Operand::close("y", &[t, c], want, nmse),
    };
    debug_assert!(matches!(y.data, Data::Floats(_) | Data::Blank(_)));
    let [first, n] = way.experts(e);
    let row_bytes = bytes.len() / n_rows as usize;
    let own = bytes[(first * c) as usize * row_bytes..((first + n) * c) as usize * row_bytes].to_vec();
    let operands = vec![
        Operand::weights(weight, &[n * c, f], own),
        Operand::floats("bias", &[n_rows], bias),
        Operand::floats("x", &[n_slots, f], x),
        Operand::words("routes", &[t, k, 2], routes),
        y,
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let bias = has_bias.then(|| tensor(1));
        let down = ExpertDown { w: bound.matrix(0), first_expert: first, bias, accumulate };
        down.record(rec, tensor(2), tensor(3), tensor(4))
    })
}

/// Weighted sum of experts' outputs: `of_slot` gives one expert's value in column n, if any.
fn weighted<'a>(
    [t, k, c]: [u32; 3],
    routes: &[u32],
    before: Option<&Vec<f32>>,
    of_slot: impl Fn(u32, u32) -> Option<&'a Expected>,
) -> Vec<Expected> {
    let want = (0..t * c).map(|i| {
        let (token, n) = (i / c, i % c);
        let first = before.map_or(0.0, |before| f64::from(before[i as usize]));
        let mut total = Expected::new(first, 0.0, FLUSH);
        let mut magnitude = first.abs();
        for slot in token * k..(token + 1) * k {
            let Some(sum) = of_slot(slot, n) else { continue };
            let share = f64::from(f32::from_bits(routes[2 * slot as usize + 1]));
            total.value += share * sum.value;
            total.bound += share.abs() * sum.bound;
            total.floor += share.abs() * sum.floor + FLUSH;
            total.power += share * share * sum.power;
            magnitude += (share * sum.value).abs();
        }
        total.bound += f64::from(k + 2) * ROUND * magnitude + total.bound * f64::from(k) * ROUND;
        total.power = total.power.max(total.value * total.value);
        total
    });
    want.collect()
}

/// Slots sorted by expert, as in the tiles: each slot is in one tile of its expert, and tiles are as full as possible.
fn tiles(source: &mut Source, [t, e, k]: [u32; 3]) -> Job {
    let routes = routes(source, [t, e, k]);
    let (n_slots, by_slot) = (t * k, routes.clone());
    // The tiled product of ones with each expert's number identifies the expert of a slot.
    let want: Vec<f32> = by_slot.chunks_exact(2).flat_map(|route| [4.0 * (route[0] + 1) as f32; 4]).collect();
    let w: Vec<u8> = (0..e).flat_map(|e| [(e + 1) as f32; 16]).flat_map(f32::to_le_bytes).collect();
    let operands = vec![
        Operand::words("routes", &[t, k, 2], routes),
        Operand::weights(WeightType::F32, &[4 * e, 4], w),
        Operand::floats("x", &[t, 4], vec![1.0; 4 * t as usize]),
        Operand::exact_floats("y", &[n_slots, 4], &want),
    ];
    Job::new(operands, move |rec, bound| {
        let tiles = ExpertTiles::record(rec, bound.tensor(0), e)?;
        let product = ExpertProduct { w: bound.matrix(1), rows: 4, first_expert: 0, bias: None, y_start: 0 };
        product.record(rec, &tiles, bound.tensor(2), bound.tensor(3))
    })
}

fn matmul(
    source: &mut Source,
    weight: WeightType,
    (has_bias, by_slot, way): (bool, bool, Way),
    [t, e, k, n_out, c]: [u32; 5],
) -> Job {
    let (n_rows, n_x) = (e * n_out, if by_slot { t * k } else { t });
    let (x, bytes) = (source.rows(n_x, c), source.weights(weight, n_rows, c));
    // Extra columns before and after the output.
    let (start, stride) = (3, n_out + 5);
    let (bias, routes) = (source.normal(e * stride), routes(source, [t, e, k]));
    let sizes = [n_x as usize, n_rows as usize, c as usize];
    let bias_of = |row: u32| bias[(row / n_out * stride + start + row % n_out) as usize];
    let more = |i: usize| [if has_bias { f64::from(bias_of(i as u32 % n_rows)) } else { 0.0 }, 0.0];
    let more: Vec<[f64; 2]> = (0..sizes[0] * sizes[1]).map(more).collect();
    let sums = product(source, &Rows::plain(&x, c as usize), &dequantise(weight, &bytes, c), &more, sizes);
    let want = (0..t * k * stride).map(|i| {
        let (slot, expert) = (i / stride, routes[2 * (i / stride) as usize]);
        let row = if by_slot { slot } else { slot / k };
        match (i % stride).checked_sub(start).filter(|&n| n < n_out && way.has(e, expert)) {
            Some(n) => sums[(row * n_rows + expert * n_out + n) as usize],
            None => Expected::new(f64::NAN, 0.0, 0.0),
        }
    });
    let want = want.collect();
    let [first, n] = way.experts(e);
    let row_bytes = bytes.len() / n_rows as usize;
    let own = bytes[(first * n_out) as usize * row_bytes..((first + n) * n_out) as usize * row_bytes].to_vec();
    let operands = vec![
        Operand::weights(weight, &[n * n_out, c], own),
        Operand::floats("bias", &[e * stride], bias),
        Operand::floats("x", &[n_x, c], x),
        Operand::words("routes", &[t, k, 2], routes),
        Operand::close("y", &[t * k, stride], want, limit(source, sizes).max(1e-9)),
    ];
    Job::new(operands, move |rec, bound| {
        let tiles = ExpertTiles::record(rec, bound.tensor(3), e)?;
        let bias = has_bias.then(|| bound.tensor(1));
        let product = ExpertProduct { w: bound.matrix(0), rows: n_out, first_expert: first, bias, y_start: start };
        product.record(rec, &tiles, bound.tensor(2), bound.tensor(4))
    })
}

fn sum(source: &mut Source, accumulate: bool, [t, e, k, c]: [u32; 4]) -> Job {
    let (x, routes, before) = (source.rows(t * k, c), routes(source, [t, e, k]), source.normal(t * c));
    let each: Vec<Expected> = x.iter().map(|&x| Expected::new(f64::from(x), 0.0, 0.0)).collect();
    let of_slot = |slot: u32, n: u32| Some(&each[(slot * c + n) as usize]);
    let want = weighted([t, k, c], &routes, accumulate.then_some(&before), of_slot);
    let y = match accumulate {
        true => Operand::floats("y", &[t, c], before.clone()).becomes(Want::Close(want, 1e-9)),
        false => Operand::close("y", &[t, c], want, 1e-9),
    };
    let operands = vec![Operand::floats("x", &[t * k, c], x), Operand::words("routes", &[t, k, 2], routes), y];
    Job::new(operands, move |rec, bound| {
        kernels::expert_sum(rec, bound.tensor(0), bound.tensor(1), accumulate, bound.tensor(2))
    })
}
