//! `argmax` and `top_k`: exact, the lowest index first among equals.

use tilewright::kernels::{self, NON_FINITE};

use crate::harness::{Case, Data, Job, Operand, Want};
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

/// R, V, k.
const TOP_K: [[u32; 3]; 11] = [
    [1, 1, 1],
    [2, 2, 2],
    [3, 31, 5],
    [1, 32, 32],
    [2, 65, 64],
    [1, 255, 3],
    [3, 256, 1],
    [2, 257, 10],
    [1, 1000, 40],
    [1, 4096, 8],
    [2, 4097, 5],
];

/// What is done to the family's rows before they are searched.
#[derive(Clone, Copy, PartialEq)]
enum Twist {
    None,
    /// Rounded to a few values, so that most are equal to others.
    Ties,
    /// One element of the last row is not finite.
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
            for sizes in TOP_K {
                let [rows, dim, k] = sizes;
                cases.push(Case {
                    kernel: "top_k",
                    variant: name.into(),
                    sizes: format!("r={rows},v={dim},k={k}"),
                    inputs,
                    build: Box::new(move |source| top_k(source, twist, sizes)),
                });
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

/// Indices of a row in falling order of its elements; zeros of different sign count as different, as `total_cmp` has it.
fn falling(row: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    order
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

fn top_k(source: &mut Source, twist: Twist, [rows, dim, k]: [u32; 3]) -> Job {
    let x = twisted(source, twist, rows, dim);
    let (mut ids, mut values) = (Vec::new(), Vec::new());
    for row in x.chunks_exact(dim as usize) {
        if row.iter().all(|v| v.is_finite()) {
            let best = &falling(row)[..k as usize];
            ids.extend(best.iter().map(|&id| Some(id)));
            values.extend(best.iter().map(|&id| Some(row[id as usize].to_bits())));
        } else {
            // The first id says that the row is broken; what else stands there means nothing.
            ids.extend((0..k).map(|i| if i == 0 { Some(NON_FINITE) } else { None }));
            values.extend((0..k).map(|_| None));
        }
    }
    let same = |want: Vec<Option<u32>>| {
        Want::Check(Box::new(move |got: &[u32]| {
            match got.iter().zip(&want).position(|(got, want)| want.is_some_and(|want| want != *got)) {
                None => Ok(()),
                Some(at) => Err(format!("element {at} is {}, expected {:?} (bits)", got[at], want[at])),
            }
        }))
    };
    let blank = |label, dtype| Operand { data: Data::Blank(dtype), ..Operand::words(label, &[rows, k], vec![]) };
    let operands = vec![
        Operand::floats("x", &[rows, dim], x),
        blank("values", tilewright::DType::F32).becomes(same(values)),
        blank("ids", tilewright::DType::U32).becomes(same(ids)),
    ];
    Job::new(operands, |rec, bound| kernels::top_k(rec, bound.tensor(0), bound.tensor(1), bound.tensor(2)))
}
