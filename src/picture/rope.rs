//! Rotary angles of patches.

use super::positions::check_grid;
use super::prepare::merge_order;
use crate::error::Error;

/// Which half of the angles of a patch comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// Those of its row: Qwen3-VL and later, LFM3-VL.
    RowFirst,
    /// Those of its column: Gemma 4.
    ColumnFirst,
}

/// Cosine and sine of the angles of each patch of a grid of `[rows, columns]`, in merge-block order:
/// `[rows * columns, head_dim / 2]` pairs. The first `head_dim / 4` of a patch are for one axis, the others for the
/// other; angle `j` of an axis is `place * base^(-4 j / head_dim)`.
///
/// Qwen and LFM3-VL rotate element `j` of a head with element `j + head_dim / 2`. Gemma 4 rotates it with element
/// `j + head_dim / 4` of the same half of the head, so its angles also fit that layout once the quarters of the rows of
/// its query and key matrices are in the order 0, 2, 1, 3.
///
/// # Errors
/// [`Error::Operand`] if `head_dim` is no multiple of 4, `base` is not above 0, or the grid is no whole number of merge
/// blocks.
pub fn grid_angles(grid: [u32; 2], merge: u32, head_dim: u32, base: f64, axes: Axes) -> Result<Vec<[f32; 2]>, Error> {
    check_grid(grid, merge)?;
    check_rotation(head_dim, base)?;
    let frequencies = frequencies(head_dim / 2, base);
    let angles = |[row, column]: [u32; 2]| {
        let order = match axes {
            Axes::RowFirst => [row, column],
            Axes::ColumnFirst => [column, row],
        };
        order.into_iter().flat_map(|place| frequencies.iter().map(move |frequency| turned(place, *frequency)))
    };
    Ok(merge_order(grid, merge).into_iter().flat_map(angles).collect())
}

/// `base^(-2 j / n)` for each pair of `n` elements.
fn frequencies(n: u32, base: f64) -> Vec<f64> {
    (0..n / 2).map(|pair| base.powf(-2.0 * f64::from(pair) / f64::from(n))).collect()
}

fn turned(place: u32, frequency: f64) -> [f32; 2] {
    let (sin, cos) = (f64::from(place) * frequency).sin_cos();
    [cos as f32, sin as f32]
}

fn check_rotation(n: u32, base: f64) -> Result<(), Error> {
    if n == 0 || !n.is_multiple_of(4) || n > 1 << 16 {
        return Err(operand("head_dim", "a multiple of 4", n.to_string()));
    }
    match base > 0.0 && base.is_finite() {
        true => Ok(()),
        false => Err(operand("base", "a number above 0", base.to_string())),
    }
}

fn operand(operand: &'static str, expected: &str, found: String) -> Error {
    Error::Operand { kernel: "rope", operand, expected: expected.into(), found }
}
