//! `grid_conv`.

use tilewright::kernels;

use crate::harness::{Case, Job, Operand};
use crate::inputs::{Inputs, Source};
use crate::recurrent::close;

/// Rows and columns of patches, C, side of the kernel.
const SIZES: [[u32; 4]; 7] =
    [[1, 1, 1, 3], [1, 5, 3, 3], [2, 2, 64, 3], [4, 6, 31, 3], [3, 3, 257, 1], [5, 4, 10, 5], [9, 7, 5, 7]];

pub fn cases(cases: &mut Vec<Case>) {
    for sizes @ [rows, columns, c, side] in SIZES {
        cases.push(Case {
            kernel: "grid_conv",
            variant: "F32".into(),
            sizes: format!("grid={rows}x{columns},c={c},side={side}"),
            inputs: Inputs::Normal,
            build: Box::new(move |source| conv(source, sizes)),
        });
    }
}

fn conv(source: &mut Source, [rows, columns, c, side]: [u32; 4]) -> Job {
    let (t, taps) = (rows * columns, side * side);
    let (x, weight) = (source.rows(t, 3 * c), source.normal(c * taps));
    // Patches column by column: their order is the caller's.
    let place = |t: u32| [t % rows, t / rows];
    let neighbour = |t: u32, i: u32| {
        let [row, column] = place(t);
        let [row, column] = [row + i / side, column + i % side].map(|at| at.checked_sub(side / 2));
        let (row, column) = (row.filter(|&row| row < rows)?, column.filter(|&column| column < columns)?);
        Some(column * rows + row)
    };
    let neighbours = (0..t * taps).map(|at| neighbour(at / taps, at % taps).unwrap_or(u32::MAX)).collect();
    let at = |t: u32, part: u32, channel: u32| f64::from(x[((t * 3 + part) * c + channel) as usize]);
    let value = |at_y: u32| {
        let (t, channel) = (at_y / c, at_y % c);
        let taps = (0..taps).filter_map(|i| {
            let of = neighbour(t, i)?;
            Some(f64::from(weight[(channel * taps + i) as usize]) * at(of, 0, channel) * at(of, 2, channel))
        });
        at(t, 1, channel) * taps.sum::<f64>()
    };
    let want = (0..t * c).map(value).collect();
    let operands = vec![
        Operand::words("neighbours", &[t, taps], neighbours),
        Operand::floats("x", &[t, 3 * c], x.clone()),
        Operand::floats("weight", &[c, taps], weight.clone()),
        Operand::close("y", &[t, c], Vec::new(), 0.0).becomes(close(want, 2e-6)),
    ];
    Job::new(operands, |rec, bound| {
        let tensor = |i| bound.tensor(i);
        kernels::grid_conv(rec, tensor(0), tensor(1), tensor(2), tensor(3))
    })
}
