//! `by_head`: rows of heads in cache layout.

use tilewright::kernels;

use crate::harness::{Case, Job, Operand};
use crate::inputs::{Inputs, Source};

/// S, H, D: around the workgroup of 256 elements.
const SIZES: [[u32; 3]; 9] =
    [[1, 1, 1], [2, 1, 3], [1, 5, 4], [3, 2, 32], [7, 4, 9], [1, 1, 256], [257, 1, 1], [5, 8, 64], [65, 12, 128]];

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in Inputs::ALL {
        for [s, h, d] in SIZES {
            cases.push(Case {
                kernel: "by_head",
                variant: "F32".into(),
                sizes: format!("s={s},h={h},d={d}"),
                inputs,
                build: Box::new(move |source| by_head(source, s, h, d)),
            });
        }
    }
}

fn by_head(source: &mut Source, s: u32, h: u32, d: u32) -> Job {
    let x = source.rows(s, h * d);
    let mut want = Vec::new();
    for head in 0..h {
        for row in 0..s {
            want.extend((0..d).map(|i| x[((row * h + head) * d + i) as usize]));
        }
    }
    let operands = vec![Operand::floats("x", &[s, h * d], x), Operand::exact_floats("y", &[h, s, d], &want)];
    Job::new(operands, |rec, bound| kernels::by_head(rec, bound.tensor(0), bound.tensor(1)))
}
