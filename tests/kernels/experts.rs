//! `route`, `expert_gate_up` and `expert_down`: mixtures of experts.

use tilewright::WeightType;
use tilewright::kernels::{self, ExpertDown, ExpertGateUp, ExpertScore, Gate, Gelu, Norm, Router};

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

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in Inputs::ALL {
        for (i, sizes @ [t, e, k]) in ROUTE.into_iter().enumerate() {
            let score = [ExpertScore::Softmax, ExpertScore::Sigmoid][i % 2];
            let router = Router { score, shares: i % 3 != 1, scale: [1.0, 2.5][i % 2] };
            let has_bias = i % 4 == 3;
            cases.push(Case {
                kernel: "route",
                variant: format!("{score:?}{}", if has_bias { "+bias" } else { "" }),
                sizes: format!("t={t},e={e},k={k}"),
                inputs,
                build: Box::new(move |source| route(source, router, has_bias, sizes)),
            });
        }
        for weight in WeightType::ALL {
            let of = |&(i, _): &(usize, [u32; 5])| has_case(weight, i, PRODUCTS.len());
            for (i, sizes @ [t, e, k, f, c]) in PRODUCTS.into_iter().enumerate().filter(of) {
                let gate =
                    [Gate::Silu, Gate::Clamped, Gate::Gelu(Gelu::Exact), Gate::Silu, Gate::Gelu(Gelu::Tanh)][i % 5];
                let (vector, by_expert) = (["+norm", "+bias", ""][i % 3], i % 2 == 1);
                let sizes_text = format!("t={t},e={e},k={k},f={f},c={c}");
                cases.push(Case {
                    kernel: "expert_gate_up",
                    variant: format!("{weight}{vector}+{gate:?}{}", if by_expert { "+by expert" } else { "" }),
                    sizes: sizes_text.clone(),
                    inputs,
                    build: Box::new(move |source| gate_up(source, weight, (vector, by_expert), gate, sizes)),
                });
                let (has_bias, accumulate) = (i % 2 == 0, i % 3 != 0);
                let (bias, sum) = (if has_bias { "+bias" } else { "" }, if accumulate { "+accumulate" } else { "" });
                cases.push(Case {
                    kernel: "expert_down",
                    variant: format!("{weight}{bias}{sum}"),
                    sizes: sizes_text,
                    inputs,
                    build: Box::new(move |source| down(source, weight, has_bias, accumulate, sizes)),
                });
            }
        }
    }
}

fn route(source: &mut Source, router: Router, has_bias: bool, [t, e, k]: [u32; 3]) -> Job {
    let (logits, bias) = (source.rows(t, e), source.normal(e));
    let own_bias = if has_bias { bias.clone() } else { vec![0.0; e as usize] };
    let rows = logits.clone();
    let check = move |words: &[u32]| {
        let routes = words.chunks_exact(2 * k as usize);
        for (t, (row, routes)) in rows.chunks_exact(e as usize).zip(routes).enumerate() {
            check_route(router, row, &own_bias, routes).map_err(|message| format!("token {t}: {message}"))?;
        }
        Ok(())
    };
    let routes = Operand::exact_words("routes", &[t, k, 2], Vec::new()).becomes(Want::Check(Box::new(check)));
    let operands = vec![Operand::floats("logits", &[t, e], logits), Operand::floats("bias", &[e], bias), routes];
    Job::new(operands, move |rec, bound| {
        let bias = has_bias.then(|| bound.tensor(1));
        kernels::route(rec, &router, bound.tensor(0), bias, bound.tensor(2))
    })
}

/// Whether pairs of an expert and the bits of its weight are a token's, by their definition in f64. Experts whose scores
/// rounding cannot tell apart may take each other's places.
fn check_route(router: Router, logits: &[f32], bias: &[f32], routes: &[u32]) -> Result<(), String> {
    let logits: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    let highest = logits.iter().copied().fold(f64::MIN, f64::max);
    let total: f64 = logits.iter().map(|logit| (logit - highest).exp()).sum();
    let scores: Vec<f64> = match router.score {
        ExpertScore::Softmax => logits.iter().map(|logit| (logit - highest).exp() / total).collect(),
        ExpertScore::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    };
    let chosen_by: Vec<f64> = scores.iter().zip(bias).map(|(score, &bias)| score + f64::from(bias)).collect();
    let mut sorted = chosen_by.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let close = |a: f64, b: f64| (a - b).abs() <= 3e-5 * a.abs().max(b.abs()) + 1e-7;
    let experts: Vec<usize> = routes.chunks_exact(2).map(|route| route[0] as usize).collect();
    let chosen: f64 = experts.iter().map(|&e| scores.get(e).copied().unwrap_or(f64::NAN)).sum();
    for (s, (&expert, route)) in experts.iter().zip(routes.chunks_exact(2)).enumerate() {
        if expert >= logits.len() || experts[..s].contains(&expert) {
            return Err(format!("expert {expert} is none, or is chosen twice"));
        }
        if !close(chosen_by[expert], sorted[s]) {
            return Err(format!("expert {expert} of score {}, expected one of {}", chosen_by[expert], sorted[s]));
        }
        let share = if router.shares { f64::from(router.scale) / chosen } else { f64::from(router.scale) };
        let (weight, want) = (f64::from(f32::from_bits(route[1])), share * scores[expert]);
        // Shares of scores that are all below what f32 holds are nobody's.
        let is_told = !router.shares || chosen > 1e-30;
        if is_told && !close(weight, want) {
            return Err(format!("expert {expert} has the weight {weight}, expected {want}"));
        }
    }
    Ok(())
}

/// Experts of each token, no one twice, and their weights.
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
    (vector, by_expert): (&'static str, bool),
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
        let [gate_row, up_row] = match by_expert {
            true => [2 * expert * f + f_at, (2 * expert + 1) * f + f_at],
            false => [expert * f + f_at, (e + expert) * f + f_at],
        };
        [gate_row, up_row].map(|row| &sums[(token * n_rows + row) as usize])
    };
    let gated = |[z, up]: [&Expected; 2]| match gate {
        Gate::Silu => swiglu(z, up),
        Gate::Gelu(form) => geglu(z, up, form),
        Gate::Clamped => clamped(z, up),
    };
    let want = (0..t * k).flat_map(|slot| (0..f).map(move |f_at| (slot, f_at)));
    let want = want.map(|(slot, f_at)| gated(at(slot, f_at))).collect();
    let operands = vec![
        Operand::weights(weight, &[n_rows, c], bytes),
        Operand::floats("norm", &[c], norm),
        Operand::floats("bias", &[n_rows], bias),
        Operand::floats("x", &[t, c], x),
        Operand::words("routes", &[t, k, 2], routes.clone()),
        Operand::close("y", &[t * k, f], want, limit(source, sizes).max(1e-9)),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let gate_up = ExpertGateUp {
            w: bound.matrix(0),
            bias: has_bias.then(|| tensor(2)),
            norm: has_norm.then(|| Norm { weight: tensor(1), eps: EPS }),
            n_experts: e,
            by_expert,
            gate,
        };
        gate_up.record(rec, tensor(3), tensor(4), tensor(5))
    })
}

fn down(source: &mut Source, weight: WeightType, has_bias: bool, accumulate: bool, [t, e, k, f, c]: [u32; 5]) -> Job {
    let (n_rows, n_slots) = (e * c, t * k);
    let (x, bytes) = (source.rows(n_slots, f), source.weights(weight, n_rows, f));
    let (bias, routes, before) = (source.normal(n_rows), routes(source, [t, e, k]), source.normal(t * c));
    let sizes = [n_slots as usize, n_rows as usize, f as usize];
    let more = |i: usize| [if has_bias { f64::from(bias[i % bias.len()]) } else { 0.0 }, 0.0];
    let more: Vec<[f64; 2]> = (0..sizes[0] * sizes[1]).map(more).collect();
    let sums = product(source, &Rows::plain(&x, f as usize), &dequantise(weight, &bytes, f), &more, sizes);
    let want = (0..t * c).map(|i| {
        let (token, n) = (i / c, i % c);
        let first = if accumulate { f64::from(before[i as usize]) } else { 0.0 };
        let mut total = Expected::new(first, 0.0, FLUSH);
        let mut magnitude = first.abs();
        for slot in token * k..(token + 1) * k {
            let (expert, share) = (routes[2 * slot as usize], f32::from_bits(routes[2 * slot as usize + 1]));
            let (sum, share) = (&sums[(slot * n_rows + expert * c + n) as usize], f64::from(share));
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
    let (want, nmse) = (want.collect(), limit(source, sizes).max(1e-9));
    let y = match accumulate {
        true => Operand::floats("y", &[t, c], before.clone()).becomes(Want::Close(want, nmse)),
        false => Operand::close("y", &[t, c], want, nmse),
    };
    debug_assert!(matches!(y.data, Data::Floats(_) | Data::Blank(_)));
    let operands = vec![
        Operand::weights(weight, &[n_rows, f], bytes),
        Operand::floats("bias", &[n_rows], bias),
        Operand::floats("x", &[n_slots, f], x),
        Operand::words("routes", &[t, k, 2], routes),
        y,
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        let down = ExpertDown { w: bound.matrix(0), bias: has_bias.then(|| tensor(1)), accumulate };
        down.record(rec, tensor(2), tensor(3), tensor(4))
    })
}
