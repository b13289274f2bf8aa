//! `argmax`: exact, the lowest index first among equals.

use tilewright::kernels::{self, NON_FINITE};

use crate::harness::{Case, Job, Operand};
use crate::inputs::{Inputs, Source};

/// R, V: around the chunk of 2048 and the workgroup of 256.
const ARGMAX: [[u32; 2]; 13] = [
    [1, 1],
    [2, 2],
    [3, 33],
    [2, 63],
    [1, 255],
    [2, 256],
    [1, 257],
    [3, 1000],
    [1, 2047],
    [2, 2048],
    [1, 2049],
    [2, 4096],
    [1, 4097],
];

/// Change to the family's rows before the search.
#[derive(Clone, Copy, PartialEq)]
enum Twist {
    None,
    /// Rounds to a few values, so that most are tied.
    Ties,
    /// Makes one element of the last row non-finite.
    Broken(f32),
}

const TWISTS: [(&str, Twist); 5] = [
    ("plain", Twist::None),
    ("ties", Twist::Ties),
    ("nan", Twist::Broken(f32::NAN)),
    ("inf", Twist::Broken(f32::INFINITY)),
    ("-inf", Twist::Broken(f32::NEG_INFINITY)),
];

pub fn cases(cases: &mut Vec<Case>) {
    for (name, twist) in TWISTS {
        let families = if matches!(twist, Twist::Broken(_)) { &Inputs::ALL[1..3] } else { &Inputs::ALL[..] };
        for &inputs in families {
            for sizes in ARGMAX {
                push_argmax(cases, name, twist, sizes, inputs);
            }
        }
        push_argmax(cases, name, twist, [2, 151_936], Inputs::Normal);
        push_argmax(cases, name, twist, [4097, 3], Inputs::Normal);
    }
}

fn push_argmax(cases: &mut Vec<Case>, name: &str, twist: Twist, sizes: [u32; 2], inputs: Inputs) {
    let [rows, dim] = sizes;
    cases.push(Case {
        kernel: "argmax",
        variant: name.into(),
        sizes: format!("r={rows},v={dim}"),
        inputs,
        build: Box::new(move |source| argmax(source, twist, sizes)),
    });
}

fn twisted(source: &mut Source, twist: Twist, rows: u32, dim: u32) -> Vec<f32> {
    let mut x = source.rows(rows, dim);
    match twist {
        Twist::None => {}
        Twist::Ties => x.iter_mut().for_each(|v| *v = v.clamp(-1.5, 1.5).round()),
        Twist::Broken(value) => {
            let at = x.len() - 1 - source.rng.below(dim as usize);
            x[at] = value;
        }
    }
    x
}

fn argmax(source: &mut Source, twist: Twist, [rows, dim]: [u32; 2]) -> Job {
    let x = twisted(source, twist, rows, dim);
    let best = |row: &[f32]| {
        let mut best = 0;
        for (i, v) in row.iter().enumerate() {
            if !v.is_finite() {
                return NON_FINITE;
            }
            if v.total_cmp(&row[best]).is_gt() {
                best = i;
            }
        }
        best as u32
    };
    let ids = x.chunks_exact(dim as usize).map(best).collect();
    let operands = vec![Operand::floats("x", &[rows, dim], x), Operand::exact_words("ids", &[rows], ids)];
    Job::new(operands, |rec, bound| kernels::argmax(rec, bound.tensor(0), bound.tensor(1)))
}
