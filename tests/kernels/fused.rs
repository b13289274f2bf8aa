//! `gate_up`: a product fused with norm and gate, against the chain that it replaces.

use tilewright::WeightType;
use tilewright::kernels::{self, Activation, Gate, Gelu, Linear, Norm};

use crate::activation::activated_within;
use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND};
use crate::inputs::{Inputs, Source, dequantise, has_case};
use crate::linear::{EPS, Rows, few, limit, named_columns, product};
use crate::softmax::exp_rounding;

/// T, F, K: outputs are paired, K in blocks of 32 shared by up to 64 invocations.
const GATE_UP: [[u32; 3]; 10] = [
    [1, 1, 4],
    [2, 2, 32],
    [1, 3, 60],
    [3, 31, 64],
    [1, 33, 128],
    [1, 64, 260],
    [2, 65, 96],
    [1, 63, 96], // part of a super-block
    [1, 5, 2052],
    [7, 129, 64],
];

pub fn cases(cases: &mut Vec<Case>) {
    for weight in WeightType::ALL {
        // Each number of tokens handled side by side, and one more.
        for t in (1..=9).filter(|&t| has_case(weight, t as usize, 4)) {
            let (norm, sizes @ [_, f, k]) = (t % 2 == 0, few(t));
            cases.push(Case {
                kernel: "gate_up",
                variant: format!("{weight}{}{}", if norm { "+norm" } else { "" }, named_columns(t)),
                sizes: format!("t={t},f={f},k={k}"),
                inputs: Inputs::Student,
                build: Box::new(move |source| gate_up(source, (weight, None), norm, Gate::Silu, sizes)),
            });
        }
        for inputs in Inputs::ALL {
            for (i, sizes @ [t, f, k]) in GATE_UP.into_iter().enumerate().filter(|&(i, _)| has_case(weight, i, 6)) {
                let norm = i % 3 != 2;
                let (act, gate) = [
                    ("", Gate::Silu),
                    ("+gelu", Gate::Gelu(Gelu::Exact)),
                    ("+gelu quick", Gate::Gelu(Gelu::Quick)),
                    ("+gelu tanh", Gate::Gelu(Gelu::Tanh)),
                    ("+clamped", Gate::Clamped),
                ][i % 5];
                cases.push(Case {
                    kernel: "gate_up",
                    variant: format!("{weight}{}{act}", if norm { "+norm" } else { "" }),
                    sizes: format!("t={t},f={f},k={k}"),
                    inputs,
                    build: Box::new(move |source| gate_up(source, (weight, None), norm, gate, sizes)),
                });
                // Gates of another type are stored until their ups are computed.
                let gates = if weight == WeightType::Q8_0 { WeightType::F32 } else { WeightType::Q8_0 };
                cases.push(Case {
                    kernel: "gate_up",
                    variant: format!("{weight}+ups{}{act}", if norm { "+norm" } else { "" }),
                    sizes: format!("t={t},f={f},k={k}"),
                    inputs,
                    build: Box::new(move |source| gate_up(source, (weight, Some(gates)), norm, gate, sizes)),
                });
            }
        }
    }
}

/// `gelu(gate) * up` of sums known within bounds.
pub fn geglu(gate: &Expected, up: &Expected, form: Gelu) -> Expected {
    let gelu = activated_within(gate, Activation::Gelu(form));
    let value = gelu.value * up.value;
    Expected {
        value,
        bound: gelu.bound * (up.value.abs() + up.bound) + gelu.value.abs() * up.bound + ROUND * value.abs(),
        floor: (gelu.floor + FLUSH) * (1.0 + up.value.abs() + up.floor) + gelu.value.abs() * (up.floor + FLUSH),
        power: (value * value).max(gelu.power * up.value.powi(2) + gelu.value.powi(2) * up.power),
    }
}

/// `silu(gate) * up` of sums known within bounds. The derivative of silu is at most 1.1.
pub fn swiglu(gate: &Expected, up: &Expected) -> Expected {
    let (z, u) = (gate.value, up.value);
    let silu = z / (1.0 + (-z).exp());
    let value = silu * u;
    // A small exponential has a small part in the quotient.
    let share = 1.0 / (1.0 + z.exp());
    let rounding = exp_rounding(z.min(88.0)) * share + 8.0 * ROUND;
    let spread = |gate: f64, up: f64| 1.1 * gate * u.abs() + (silu.abs() + 1.1 * gate) * up;
    let bound = spread(gate.bound, up.bound) + rounding * (value.abs() + spread(gate.bound, up.bound));
    let all = spread(gate.bound + gate.floor, up.bound + up.floor);
    let floor = all - spread(gate.bound, up.bound) + FLUSH * (1.0 + z.abs()) * (1.0 + u.abs());
    let power = value.powi(2).max(1.21 * gate.power * u * u + silu * silu * up.power);
    Expected { value, bound, floor, power }
}

/// gpt-oss's gate of sums known within bounds. The derivative of `g sigmoid(1.702 g)` is at most 1.1.
pub fn clamped(gate: &Expected, up: &Expected) -> Expected {
    let (g, u) = (gate.value.min(7.0), up.value.clamp(-7.0, 7.0) + 1.0);
    let unit = g / (1.0 + (-1.702 * g).exp());
    let value = unit * u;
    let share = 1.0 / (1.0 + (1.702 * g).exp());
    let rounding = (exp_rounding((1.702 * g).min(88.0)) + 4.0 * ROUND * (1.702 * g).abs()) * share + 12.0 * ROUND;
    let spread = |gate: f64, up: f64| 1.1 * gate * u.abs() + (unit.abs() + 1.1 * gate) * up;
    let up_bound = up.bound + ROUND * u.abs().max(1.0);
    let bound = spread(gate.bound, up_bound) + rounding * (value.abs() + spread(gate.bound, up_bound));
    let all = spread(gate.bound + gate.floor, up_bound + up.floor);
    let floor = all - spread(gate.bound, up_bound) + FLUSH * (1.0 + g.abs()) * (1.0 + u.abs());
    let power = value.powi(2).max(1.21 * gate.power * u * u + unit * unit * up.power.max(1.0));
    Expected { value, bound, floor, power }
}

/// With gates and ups in one matrix, or with gates of another type.
fn gate_up(
    source: &mut Source,
    (weight, gates): (WeightType, Option<WeightType>),
    has_norm: bool,
    gate: Gate,
    [t, f, k]: [u32; 3],
) -> Job {
    let x = source.rows(t, k);
    let apart = gates.map(|gates| (gates, source.weights(gates, f, k)));
    let n_rows = if apart.is_some() { f } else { 2 * f };
    let bytes = source.weights(weight, n_rows, k);
    let norm = source.normal(k);
    let rows = if has_norm { Rows::normed(&x, norm.clone(), EPS) } else { Rows::plain(&x, k as usize) };
    let sizes = [t as usize, 2 * f as usize, k as usize];
    let gate_values = apart.iter().flat_map(|(gates, bytes)| dequantise(*gates, bytes, k));
    let values: Vec<_> = gate_values.chain(dequantise(weight, &bytes, k)).collect();
    let sums = product(source, &rows, &values, &vec![[0.0; 2]; sizes[0] * sizes[1]], sizes);
    let want = sums
        .chunks_exact(2 * f as usize)
        .flat_map(|row| {
            let (gates, ups) = row.split_at(f as usize);
            let gated = |(z, up): (&Expected, &Expected)| match gate {
                Gate::Silu => swiglu(z, up),
                Gate::Gelu(form) => geglu(z, up, form),
                Gate::Clamped => clamped(z, up),
            };
            gates.iter().zip(ups).map(gated).collect::<Vec<_>>()
        })
        .collect();
    let mut operands = vec![
        Operand::weights(weight, &[n_rows, k], bytes),
        Operand::floats("norm", &[k], norm),
        Operand::floats("x", &[t, k], x),
        Operand::close("y", &[t, f], want, limit(source, sizes)),
    ];
    operands.extend(apart.map(|(gates, bytes)| Operand::weights(gates, &[f, k], bytes)));
    Job::new(operands, move |rec, bound| {
        let norm = has_norm.then_some(Norm { weight: bound.tensor(1), eps: EPS });
        let (w, x, y) = (bound.matrix(0), bound.tensor(2), bound.tensor(3));
        if gates.is_none() {
            return kernels::gate_up(rec, w, norm, gate, x, y);
        }
        kernels::matvec(rec, &Linear { norm, ..Linear::new(bound.matrix(4)) }, x, y)?;
        kernels::up_gated(rec, w, norm, gate, x, y)
    })
}
