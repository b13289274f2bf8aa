//! `matvec_lora`, `gate_up_lora` and `add_lora`: products with low-rank addends.

use tilewright::WeightType;
use tilewright::kernels::{self, Gate, Gelu, Linear, LowRank, Norm};

use crate::common::Expected;
use crate::fused::{clamped, geglu, swiglu};
use crate::harness::{Case, Data, FLUSH, Job, Operand, ROUND, Want, sum_rounding};
use crate::inputs::{Inputs, Source, dequantise, has_case};
use crate::linear::{EPS, Rows, few, limit, named_columns, product};

/// T, N, K, as those of `matvec`, and R.
const MATVEC: [[u32; 4]; 14] = [
    [1, 1, 4, 4],
    [2, 3, 32, 8],
    [1, 31, 36, 4],
    [3, 32, 64, 12],
    [1, 33, 60, 8],
    [2, 63, 96, 16],
    [1, 62, 96, 4], // part of a super-block
    [1, 65, 132, 256],
    [3, 127, 192, 20],
    [1, 129, 260, 64],
    [2, 255, 96, 8],
    [1, 5, 1000, 260], // more quads than invocations
    [7, 6, 2048, 4],
    [1, 9, 2052, 36],
];

/// T, F, K, as those of `gate_up`, and R.
const GATE_UP: [[u32; 4]; 9] = [
    [1, 1, 4, 4],
    [2, 2, 32, 8],
    [1, 3, 60, 4],
    [3, 31, 64, 12],
    [1, 33, 128, 64],
    [1, 64, 260, 8],
    [2, 65, 96, 260],
    [1, 63, 96, 16], // part of a super-block
    [7, 129, 64, 4],
];

/// T, N, R: a workgroup computes 256 columns of four tokens each.
const ADD: [[u32; 3]; 10] = [
    [1, 1, 4],
    [3, 2, 8],
    [4, 255, 4],
    [5, 256, 12],
    [8, 257, 16],
    [9, 33, 64],
    [33, 70, 260],
    [128, 129, 8],
    [2, 1025, 36],
    [67, 40, 20],
];

const BIAS: usize = 1;
const ACCUMULATE: usize = 2;
const NORM: usize = 4;

pub fn cases(cases: &mut Vec<Case>) {
    let mut push = |weight: WeightType, flags: usize, n_members, sizes: [u32; 4], inputs, columns: String| {
        let named = |flag: usize, name: &'static str| if flags & flag != 0 { name } else { "" };
        let (bias, accumulate, norm) = (named(BIAS, "+bias"), named(ACCUMULATE, "+accumulate"), named(NORM, "+norm"));
        let [t, n, k, r] = sizes;
        cases.push(Case {
            kernel: "matvec_lora",
            variant: format!("{weight}{bias}{accumulate}{norm}+members{n_members}{columns}"),
            sizes: format!("t={t},n={n},k={k},r={r}"),
            inputs,
            build: Box::new(move |source| matvec(source, weight, flags, n_members, sizes)),
        });
    };
    for weight in WeightType::ALL {
        for inputs in Inputs::ALL {
            for (i, &sizes) in MATVEC.iter().enumerate().filter(|&(i, _)| has_case(weight, i, 8)) {
                // A norm excludes a bias.
                let flags = [BIAS, ACCUMULATE | NORM, 0, BIAS | ACCUMULATE, NORM][i % 5];
                push(weight, flags, 1 + i % 4, sizes, inputs, String::new());
            }
        }
        for t in (1..=9).filter(|&t| has_case(weight, t as usize, 4)) {
            let ([t, n, k], flags) = (few(t), if t % 2 == 0 { NORM } else { BIAS | ACCUMULATE });
            push(weight, flags, 1 + t as usize % 4, [t, n, k, 8 * t], Inputs::Student, named_columns(t));
        }
    }
    for weight in WeightType::ALL {
        for t in (1..=9).filter(|&t| has_case(weight, t as usize, 4)) {
            let ([t, f, k], norm) = (few(t), t % 2 == 0);
            cases.push(Case {
                kernel: "gate_up_lora",
                variant: format!("{weight}{}{}", if norm { "+norm" } else { "" }, named_columns(t)),
                sizes: format!("t={t},f={f},k={k},r=8"),
                inputs: Inputs::Student,
                build: Box::new(move |source| gate_up(source, (weight, None), norm, Gate::Silu, [t, f, k, 8])),
            });
        }
        for inputs in Inputs::ALL {
            for (i, &sizes) in GATE_UP.iter().enumerate().filter(|&(i, _)| has_case(weight, i, 6)) {
                let norm = i % 3 != 2;
                let (act, gate) = [
                    ("", Gate::Silu),
                    ("+gelu", Gate::Gelu(Gelu::Exact)),
                    ("", Gate::Silu),
                    ("+gelu tanh", Gate::Gelu(Gelu::Tanh)),
                    ("+clamped", Gate::Clamped),
                ][i % 5];
                let gates = if weight == WeightType::Q8_0 { WeightType::F32 } else { WeightType::Q8_0 };
                for (ups, gates) in [("", None), ("+ups", Some(gates))] {
                    let [t, f, k, r] = sizes;
                    cases.push(Case {
                        kernel: "gate_up_lora",
                        variant: format!("{weight}{ups}{}{act}", if norm { "+norm" } else { "" }),
                        sizes: format!("t={t},f={f},k={k},r={r}"),
                        inputs,
                        build: Box::new(move |source| gate_up(source, (weight, gates), norm, gate, sizes)),
                    });
                }
            }
        }
    }
    for inputs in Inputs::ALL {
        for (i, &sizes) in ADD.iter().enumerate() {
            let ([t, n, r], n_members) = (sizes, 1 + i % 4);
            cases.push(Case {
                kernel: "add_lora",
                variant: format!("F32+members{n_members}{}", if i % 2 == 0 { "" } else { "+beside" }),
                sizes: format!("t={t},n={n},r={r}"),
                inputs,
                build: Box::new(move |source| add(source, n_members, i % 2 == 1, sizes)),
            });
        }
    }
}

/// Low-rank factors: the inner products, and the second factors with `n` rows.
struct LoraFactors {
    /// `[T, members R]`.
    inner: Vec<f32>,
    /// `[N, R]`.
    b: Vec<f32>,
    starts: Vec<u32>,
    r: u32,
}

impl LoraFactors {
    /// For up to `n_members` members; fewer if there are not enough rows.
    fn new(source: &mut Source, n_members: usize, [t, n, r]: [u32; 3]) -> LoraFactors {
        let n_members = (n_members as u32).min(n);
        // Members of different heights.
        let starts = (0..n_members).map(|i| i * n / n_members + u32::from(i == 1 && n > 2 * n_members)).collect();
        // Small, so that sums with others neither drown nor overflow.
        let inner = source.normal(t * n_members * r);
        LoraFactors { inner, b: source.normal(n * r), starts, r }
    }

    /// Addend of row `n` for token `t`, and the sum of its terms' magnitudes.
    fn of(&self, t: usize, n: usize) -> [f64; 2] {
        let r = self.r as usize;
        let member = self.starts.iter().rposition(|&start| start as usize <= n).unwrap();
        let inner = &self.inner[(t * self.starts.len() + member) * r..][..r];
        let terms = inner.iter().zip(&self.b[n * r..][..r]).map(|(&x, &b)| f64::from(x) * f64::from(b));
        terms.fold([0.0; 2], |[sum, magnitude], term| [sum + term, magnitude + term.abs()])
    }

    /// Widens the bounds of `[T, N]` sums by the addends' rounding.
    fn widen(&self, mut sums: Vec<Expected>, n: u32) -> Vec<Expected> {
        for (i, sum) in sums.iter_mut().enumerate() {
            let [_, magnitude] = self.of(i / n as usize, i % n as usize);
            sum.bound += (sum_rounding(self.r as usize) + 2.0 * ROUND) * magnitude;
            sum.floor += FLUSH * (2.0 * self.r as f64 + magnitude);
            sum.power = sum.power.max(magnitude * magnitude / f64::from(self.r));
        }
        sums
    }

    fn operands(&self, n: u32) -> [Operand; 2] {
        let columns = self.starts.len() as u32 * self.r;
        let t = self.inner.len() as u32 / columns;
        [
            Operand::floats("inner", &[t, columns], self.inner.clone()),
            Operand::floats("b", &[n, self.r], self.b.clone()),
        ]
    }
}

/// A product into columns 2.. of `y`, so that rows of `b` match those of `y`.
fn matvec(source: &mut Source, weight: WeightType, flags: usize, n_members: usize, [t, n, k, r]: [u32; 4]) -> Job {
    let left = if flags & BIAS != 0 { 2 } else { 0 };
    let x = source.rows(t, k);
    let bytes = source.weights(weight, n, k);
    let norm = source.normal(k);
    let (bias, held) = (source.normal(left + n), source.normal(t * (left + n)));
    let factors = LoraFactors::new(source, n_members, [t, left + n, r]);
    let rows = if flags & NORM != 0 { Rows::normed(&x, norm.clone(), EPS) } else { Rows::plain(&x, k as usize) };
    let width = (left + n) as usize;
    let term = |row: usize, col: usize| {
        let [low, _] = factors.of(row, col);
        let held = if flags & ACCUMULATE != 0 { f64::from(held[row * width + col]) } else { 0.0 };
        let bias = if flags & BIAS != 0 { f64::from(bias[col]) } else { 0.0 };
        [low + bias, held]
    };
    let own = || (0..t as usize).flat_map(|row| (left as usize..width).map(move |col| (row, col)));
    let more: Vec<[f64; 2]> = own().map(|(row, col)| term(row, col)).collect();
    let sizes = [t as usize, n as usize, k as usize];
    let sums = product(source, &rows, &dequantise(weight, &bytes, k), &more, sizes);
    let mut want: Vec<Expected> = held.iter().map(|&held| Expected::new(f64::from(held), 0.0, 0.0)).collect();
    for ((row, col), sum) in own().zip(sums) {
        want[row * width + col] = sum;
    }
    let mut want = factors.widen(want, left + n);
    for (i, want) in want.iter_mut().enumerate() {
        if (i % width) < left as usize {
            *want = Expected::new(f64::from(held[i]), 0.0, 0.0);
        } else if flags & BIAS != 0 {
            want.bound += 2.0 * ROUND * f64::from(bias[i % width]).abs();
        }
    }
    let limit = limit(source, sizes);
    let [inner, b] = factors.operands(left + n);
    let mut y = Operand::floats("y", &[t, left + n], held).becomes(Want::Close(want, limit));
    if left == 0 && flags & ACCUMULATE == 0 {
        y.data = Data::Blank(tilewright::DType::F32);
    }
    let operands = vec![
        Operand::weights(weight, &[n, k], bytes),
        Operand::floats("norm", &[k], norm),
        Operand::floats("bias", &[left + n], bias),
        Operand::floats("x", &[t, k], x),
        inner,
        b,
        y,
    ];
    Job::new(operands, move |rec, bound| {
        let linear = Linear {
            norm: (flags & NORM != 0).then_some(Norm { weight: bound.tensor(1), eps: EPS }),
            bias: (flags & BIAS != 0).then_some(bound.tensor(2)),
            accumulate: flags & ACCUMULATE != 0,
            y_start: left,
            ..Linear::new(bound.matrix(0))
        };
        let low = LowRank { inner: bound.tensor(4), b: bound.tensor(5), starts: &factors.starts };
        kernels::matvec_lora(rec, &linear, &low, bound.tensor(3), bound.tensor(6))
    })
}

/// With gates and ups in one matrix, or gates of another type. Both are adapted.
fn gate_up(
    source: &mut Source,
    (weight, gates): (WeightType, Option<WeightType>),
    has_norm: bool,
    gate: Gate,
    [t, f, k, r]: [u32; 4],
) -> Job {
    let x = source.rows(t, k);
    let apart = gates.map(|gates| (gates, source.weights(gates, f, k)));
    let n_rows = if apart.is_some() { f } else { 2 * f };
    let bytes = source.weights(weight, n_rows, k);
    let norm = source.normal(k);
    let mut factors = LoraFactors::new(source, 1, [t, 2 * f, r]);
    factors.starts = vec![0, f];
    factors.inner = source.normal(2 * t * r);
    let rows = if has_norm { Rows::normed(&x, norm.clone(), EPS) } else { Rows::plain(&x, k as usize) };
    let sizes = [t as usize, 2 * f as usize, k as usize];
    let gate_values = apart.iter().flat_map(|(gates, bytes)| dequantise(*gates, bytes, k));
    let values: Vec<_> = gate_values.chain(dequantise(weight, &bytes, k)).collect();
    let more: Vec<[f64; 2]> =
        (0..sizes[0] * sizes[1]).map(|i| [factors.of(i / sizes[1], i % sizes[1])[0], 0.0]).collect();
    let sums = factors.widen(product(source, &rows, &values, &more, sizes), 2 * f);
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
    let [inner, b] = factors.operands(2 * f);
    let mut operands = vec![
        Operand::weights(weight, &[n_rows, k], bytes),
        Operand::floats("norm", &[k], norm),
        Operand::floats("x", &[t, k], x),
        inner,
        b,
        Operand::close("y", &[t, f], want, limit(source, sizes)),
    ];
    operands.extend(apart.map(|(gates, bytes)| Operand::weights(gates, &[f, k], bytes)));
    Job::new(operands, move |rec, bound| {
        let norm = has_norm.then_some(Norm { weight: bound.tensor(1), eps: EPS });
        let (w, x, y) = (bound.matrix(0), bound.tensor(2), bound.tensor(5));
        let low = LowRank { inner: bound.tensor(3), b: bound.tensor(4), starts: &factors.starts };
        if gates.is_none() {
            return kernels::gate_up_lora(rec, w, norm, gate, &low, x, y);
        }
        kernels::matvec_lora(rec, &Linear { norm, ..Linear::new(bound.matrix(6)) }, &low, x, y)?;
        kernels::up_gated_lora(rec, w, norm, gate, &low, x, y)
    })
}

fn add(source: &mut Source, n_members: usize, is_beside: bool, [t, n, r]: [u32; 3]) -> Job {
    let width = if is_beside { n + 3 } else { n };
    let held = source.rows(t, width);
    let factors = LoraFactors::new(source, n_members, [t, n, r]);
    let want = held.iter().enumerate().map(|(i, &held)| {
        let (row, col, held) = (i / width as usize, i % width as usize, f64::from(held));
        if col >= n as usize {
            return Expected::new(held, 0.0, 0.0);
        }
        let [low, magnitude] = factors.of(row, col);
        let bound = sum_rounding(r as usize) * magnitude + 2.0 * ROUND * (held.abs() + magnitude);
        let power = (held + low).powi(2).max(magnitude * magnitude / f64::from(r));
        Expected { value: held + low, bound, floor: FLUSH * (2.0 * f64::from(r) + magnitude + 1.0), power }
    });
    let want = want.collect();
    let [inner, b] = factors.operands(n);
    let y = Operand::floats("y", &[t, width], held).becomes(Want::Close(want, 1e-10));
    Job::new(vec![inner, b, y], move |rec, bound| {
        let low = LowRank { inner: bound.tensor(0), b: bound.tensor(1), starts: &factors.starts };
        kernels::add_lora(rec, &low, bound.tensor(2))
    })
}
