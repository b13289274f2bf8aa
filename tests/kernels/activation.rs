//! `swiglu`, `silu`, `geglu`, `gelu`, `relu`, `clip`, `add` and `scale`.

use tilewright::kernels::{self, Activation, Gelu};

use crate::common::Expected;
use crate::harness::{Case, Data, FLUSH, Job, Operand, ROUND};
use crate::inputs::{Inputs, Source};
use crate::softmax::exp_rounding;

/// T, F: around the workgroup of 256 elements.
const SIZES: [[u32; 2]; 11] =
    [[1, 1], [2, 1], [1, 3], [3, 31], [2, 33], [1, 64], [3, 85], [1, 256], [1, 257], [5, 1000], [1, 4097]];

const NMSE: f64 = 1e-10;

type Build = fn(&mut Source, u32, u32) -> Job;

pub fn cases(cases: &mut Vec<Case>) {
    let kernels: [(&'static str, &str, Build); 15] = [
        ("swiglu", "F32", swiglu),
        ("silu", "F32", silu),
        ("geglu", "exact", |source, t, f| geglu(source, t, f, Gelu::Exact)),
        ("geglu", "tanh", |source, t, f| geglu(source, t, f, Gelu::Tanh)),
        ("geglu", "quick", |source, t, f| geglu(source, t, f, Gelu::Quick)),
        ("gelu", "exact", |source, t, f| gelu(source, t, f, Gelu::Exact)),
        ("gelu", "tanh", |source, t, f| gelu(source, t, f, Gelu::Tanh)),
        ("gelu", "quick", |source, t, f| gelu(source, t, f, Gelu::Quick)),
        ("relu", "F32", |source, t, f| relu(source, t, f, false)),
        ("relu", "squared", |source, t, f| relu(source, t, f, true)),
        ("clip", "F32", clip),
        ("add", "F32", |source, t, f| add(source, t, [t, f])),
        ("add", "row", |source, t, f| add(source, t, [1, f])),
        ("scale", "F32", |source, t, f| scale(source, t, f, None)),
        ("scale", "soft cap", |source, t, f| scale(source, t, f, Some(30.0))),
    ];
    for (kernel, variant, build) in kernels {
        let mut push = |inputs, [n_tokens, dim]: [u32; 2]| {
            cases.push(Case {
                kernel,
                variant: variant.into(),
                sizes: format!("t={n_tokens},f={dim}"),
                inputs,
                build: Box::new(move |source| build(source, n_tokens, dim)),
            });
        };
        for inputs in Inputs::ALL {
            SIZES.into_iter().for_each(|sizes| push(inputs, sizes));
        }
        push(Inputs::Normal, [65_537, 3]);
    }
}

fn swiglu(source: &mut Source, n_tokens: u32, dim: u32) -> Job {
    let gate_up = source.rows(n_tokens, 2 * dim);
    let mut want = Vec::new();
    for row in gate_up.chunks_exact(2 * dim as usize) {
        let (gates, ups) = row.split_at(dim as usize);
        for (&gate, &up) in gates.iter().zip(ups) {
            let (gate, up) = (silu_of(f64::from(gate)), f64::from(up));
            let value = gate.value * up;
            let bound = gate.bound * up.abs() + ROUND * value.abs();
            want.push(Expected::new(value, bound, gate.floor * (1.0 + up.abs())));
        }
    }
    let operands = vec![
        Operand::floats("gate_up", &[n_tokens, 2 * dim], gate_up),
        Operand::close("y", &[n_tokens, dim], want, NMSE),
    ];
    Job::new(operands, |rec, bound| kernels::swiglu(rec, bound.tensor(0), bound.tensor(1)))
}

/// SiLU of an exactly known number.
fn silu_of(x: f64) -> Expected {
    let value = x / (1.0 + (-x).exp());
    // A small exponential has a small part in the quotient.
    let share = 1.0 / (1.0 + x.exp());
    let bound = value.abs() * (exp_rounding(x.min(88.0)) * share + 7.0 * ROUND);
    Expected::new(value, bound, FLUSH * (1.0 + x.abs()))
}

fn silu(source: &mut Source, n_tokens: u32, dim: u32) -> Job {
    let x = source.rows(n_tokens, dim);
    let want = x.iter().map(|&x| silu_of(f64::from(x))).collect();
    let shape = [n_tokens, dim];
    let operands = vec![Operand::floats("x", &shape, x), Operand::close("y", &shape, want, NMSE)];
    Job::new(operands, |rec, bound| kernels::silu(rec, bound.tensor(0), bound.tensor(1)))
}

fn relu(source: &mut Source, n_tokens: u32, dim: u32, is_squared: bool) -> Job {
    let x = source.rows(n_tokens, dim);
    let expected = |x: f32| {
        let value = f64::from(x).max(0.0).powi(if is_squared { 2 } else { 1 });
        Expected::new(value, 2.0 * ROUND * value, FLUSH)
    };
    let want = x.iter().map(|&x| expected(x)).collect();
    let shape = [n_tokens, dim];
    let operands = vec![Operand::floats("x", &shape, x), Operand::close("y", &shape, want, NMSE)];
    Job::new(operands, move |rec, bound| kernels::relu(rec, bound.tensor(0), bound.tensor(1), is_squared))
}

/// With as many groups of columns as there are columns, up to three.
fn clip(source: &mut Source, n_tokens: u32, dim: u32) -> Job {
    let x = source.rows(n_tokens, dim);
    let n_groups = dim.min(3);
    let widths: Vec<u32> = (0..n_groups).map(|i| if i + 1 < n_groups { 1 } else { dim + 1 - n_groups }).collect();
    let bounds: Vec<f32> = (0..n_groups).flat_map(|i| [-0.5 / (1 + i) as f32, 0.25 * (1 + i) as f32]).collect();
    let clipped = |(i, &x): (usize, &f32)| {
        let group = (i as u32 % dim).min(n_groups - 1) as usize;
        Expected::new(f64::from(x).max(bounds[2 * group].into()).min(bounds[2 * group + 1].into()), 0.0, FLUSH)
    };
    let want = x.iter().enumerate().map(clipped).collect();
    let shape = [n_tokens, dim];
    let operands = vec![
        Operand::floats("bounds", &[2 * n_groups], bounds.clone()),
        Operand::floats("x", &shape, x),
        Operand::close("y", &shape, want, NMSE),
    ];
    Job::new(operands, move |rec, bound| kernels::clip(rec, bound.tensor(0), &widths, bound.tensor(1), bound.tensor(2)))
}

/// The complementary error function for `a >= 0`: its power series near zero, else its continued fraction, both far
/// beyond f32 accuracy. Abramowitz & Stegun 7.1.6 and 7.1.14.
fn erfc(a: f64) -> f64 {
    let scale = 2.0 / std::f64::consts::PI.sqrt() * (-a * a).exp();
    if a < 2.0 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > 1e-18 * sum {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        return 1.0 - scale * sum;
    }
    let mut tail = a;
    for n in (1..200).rev() {
        tail = a + f64::from(n) / 2.0 / tail;
    }
    scale / 2.0 / tail
}

#[test]
fn erfc_matches_the_c_library() {
    // Values of the C library.
    for (a, want) in [
        (0.0, 1.0),
        (0.25, 0.7236736098317631),
        (1.0, 0.15729920705028513),
        (1.75, 0.013328328780817555),
        (2.0, 0.004677734981047265),
        (3.0, 2.2090496998585438e-05),
        (5.0, 1.5374597944280351e-12),
        (9.5, 3.76921448565488e-41),
    ] {
        assert!((erfc(a) / want - 1.0).abs() < 1e-13, "erfc({a}) = {:e}, expected {want:e}", erfc(a));
    }
}

/// GELU of an exactly known number.
fn gelu_of(x: f32, form: Gelu) -> Expected {
    gelu_within(&Expected { power: 0.0, ..Expected::new(f64::from(x), 0.0, 0.0) }, form)
}

/// An activation of a number known within a bound.
pub fn activated_within(x: &Expected, activation: Activation) -> Expected {
    match activation {
        Activation::Gelu(form) => gelu_within(x, form),
        Activation::Tanh => tanh_within(x),
    }
}

/// The hyperbolic tangent of a number known within a bound; the derivative is at most 1.
fn tanh_within(x: &Expected) -> Expected {
    let Expected { value: x, bound, floor, power: of_sum } = *x;
    let argument = (2.0 * x.abs()).min(88.0);
    let power = (-argument).exp();
    // Part of the exponential's relative error remains; a small result is the difference of numbers near 1.
    let share = 2.0 * power / (1.0 + power).powi(2);
    let rounding = 8.0 * ROUND + (exp_rounding(argument) + 4.0 * ROUND * argument) * share;
    Expected {
        value: x.tanh(),
        bound: bound + rounding,
        floor: FLUSH * (1.0 + x.abs()) + floor,
        power: of_sum.max(1.0),
    }
}

/// GELU of a number known within a bound; the derivative is at most 1.13.
fn gelu_within(x: &Expected, form: Gelu) -> Expected {
    let Expected { value: x, bound, floor, power } = *x;
    let (value, argument) = match form {
        Gelu::Exact => {
            let tail = 0.5 * erfc(x.abs() / 2f64.sqrt());
            (if x > 0.0 { x * (1.0 - tail) } else { x * tail }, x * x / 2.0)
        }
        Gelu::Tanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            (x / (1.0 + (-2.0 * u).exp()), 2.0 * u)
        }
        Gelu::Quick => (x / (1.0 + (-1.702 * x).exp()), 1.702 * x),
    };
    // Only the negative side has the exponential's full relative error.
    let share = if x > 0.0 { (-argument.abs()).exp() } else { 1.0 };
    let argument = argument.abs().min(88.0);
    let rounding = 8.0 * ROUND + (4.0 * ROUND + exp_rounding(argument) + 4.0 * ROUND * argument) * share;
    Expected {
        value,
        bound: (value.abs() + 1.13 * bound) * rounding + 1.13 * bound,
        floor: FLUSH * (1.0 + x.abs()) + 1.13 * floor,
        power: (value * value).max(1.28 * power),
    }
}

fn gelu(source: &mut Source, n_tokens: u32, dim: u32, form: Gelu) -> Job {
    let x = source.rows(n_tokens, dim);
    let want = x.iter().map(|&x| gelu_of(x, form)).collect();
    let shape = [n_tokens, dim];
    let operands = vec![Operand::floats("x", &shape, x), Operand::close("y", &shape, want, NMSE)];
    Job::new(operands, move |rec, bound| kernels::gelu(rec, bound.tensor(0), bound.tensor(1), form))
}

fn geglu(source: &mut Source, n_tokens: u32, dim: u32, form: Gelu) -> Job {
    let gate_up = source.rows(n_tokens, 2 * dim);
    let mut want = Vec::new();
    for row in gate_up.chunks_exact(2 * dim as usize) {
        let (gates, ups) = row.split_at(dim as usize);
        for (&gate, &up) in gates.iter().zip(ups) {
            let (gate, up) = (gelu_of(gate, form), f64::from(up));
            let value = gate.value * up;
            let floor = FLUSH * (1.0 + gate.value.abs()) * (1.0 + up.abs()) + gate.floor * up.abs();
            want.push(Expected::new(value, gate.bound * up.abs() + ROUND * value.abs(), floor));
        }
    }
    let operands = vec![
        Operand::floats("gate_up", &[n_tokens, 2 * dim], gate_up),
        Operand::close("y", &[n_tokens, dim], want, NMSE),
    ];
    Job::new(operands, move |rec, bound| kernels::geglu(rec, bound.tensor(0), bound.tensor(1), form))
}

/// `x` has as many rows, or one for all.
fn add(source: &mut Source, n_tokens: u32, [n_rows, dim]: [u32; 2]) -> Job {
    let (x, held) = (source.rows(n_rows, dim), source.rows(n_tokens, dim));
    let sum = |(&x, &y): (&f32, &f32)| {
        let value = f64::from(x) + f64::from(y);
        Expected::new(value, ROUND * value.abs(), 2.0 * FLUSH)
    };
    let want = x.iter().cycle().zip(&held).map(sum).collect();
    let y = Operand { data: Data::Floats(held), ..Operand::close("y", &[n_tokens, dim], want, NMSE) };
    let shape = if n_rows == n_tokens { vec![n_tokens, dim] } else { vec![dim] };
    Job::new(vec![Operand::floats("x", &shape, x), y], |rec, bound| kernels::add(rec, bound.tensor(0), bound.tensor(1)))
}

fn scale(source: &mut Source, n_tokens: u32, dim: u32, cap: Option<f32>) -> Job {
    let x = source.rows(n_tokens, dim);
    let factor = source.rng.normal() as f32;
    let product = |&x: &f32| {
        let value = f64::from(x) * f64::from(factor);
        let product = Expected::new(value, ROUND * value.abs(), FLUSH * (1.0 + f64::from(factor).abs()));
        let Some(cap) = cap.map(f64::from) else { return product };
        let quotient = Expected {
            value: value / cap,
            bound: (product.bound + 3.0 * ROUND * value.abs()) / cap,
            floor: product.floor,
            power: product.power / (cap * cap),
        };
        let tanh = tanh_within(&quotient);
        let value = cap * tanh.value;
        let bound = cap * tanh.bound + ROUND * value.abs();
        Expected { value, bound, floor: (1.0 + cap) * tanh.floor, power: cap * cap * tanh.power }
    };
    let want = x.iter().map(product).collect();
    let shape = [n_tokens, dim];
    let y = Operand::close("y", &shape, want, NMSE);
    Job::new(vec![Operand::floats("x", &shape, x), y], move |rec, bound| match cap {
        Some(cap) => kernels::soft_cap(rec, bound.tensor(0), bound.tensor(1), factor, cap),
        None => kernels::scale(rec, bound.tensor(0), bound.tensor(1), factor),
    })
}
