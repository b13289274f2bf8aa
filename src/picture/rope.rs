//! Rotary angles of patches, and of the rows of a text with pictures (M-RoPE).

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
    check_rotation(head_dim, 4, base)?;
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

/// A part of a text with pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Tokens.
    Text(u32),
    /// The rows of a picture, a grid of `[rows, columns]` merge blocks.
    Picture([u32; 2]),
}

/// Time, row and column of each row of a text, from position `start` on, and the next position, which is below
/// `start` plus the number of rows after a picture. All three of a token are its position. All rows of a picture have
/// the same time, and the text goes on after its longer side.
///
/// Definition: `get_rope_index` of Qwen3-VL in transformers 5.24.
///
/// # Errors
/// [`Error::Operand`] if a position would not fit into 32 bits.
pub fn text_positions(start: u32, segments: &[Segment]) -> Result<(Vec<[u32; 3]>, u32), Error> {
    let too_long = || operand("segments", "fewer than 2^32 positions", "more".into());
    let mut positions = Vec::new();
    let mut next = start;
    for segment in segments {
        let begin = next;
        match *segment {
            Segment::Text(n) => {
                next = begin.checked_add(n).ok_or_else(too_long)?;
                positions.extend((begin..next).map(|at| [at; 3]));
            }
            Segment::Picture([rows, columns]) => {
                next = begin.checked_add(rows.max(columns)).ok_or_else(too_long)?;
                let row = |row| (0..columns).map(move |column| [begin, begin + row, begin + column]);
                positions.extend((0..rows).flat_map(row));
            }
        }
    }
    Ok((positions, next))
}

/// How the pairs of a head are divided among time, row and column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// Pairs of each, their sum half of the rotated elements.
    pub pairs: [u32; 3],
    /// Whether they take turns (Qwen3-VL, Qwen3.5) or follow each other (Qwen2-VL).
    pub is_interleaved: bool,
}

impl Sections {
    /// What this pair is turned by: 0 for time, 1 for the row, 2 for the column.
    fn axis(&self, pair: u32) -> usize {
        let turn = (pair % 3) as usize;
        let [time, row, _] = self.pairs;
        match self.is_interleaved {
            true if pair / 3 < self.pairs[turn] => turn,
            true => 0,
            false if pair < time => 0,
            false => 1 + usize::from(pair - time >= row),
        }
    }
}

/// Cosine and sine of the angles of each row of a text: `[positions.len(), rotated / 2]` pairs, where `rotated`
/// elements of a head are rotated. Angle `j` is `position * base^(-2 j / rotated)`, by one of the row's three
/// positions.
///
/// # Errors
/// [`Error::Operand`] if the sections do not add up to half of `rotated`, or `base` is not above 0.
pub fn text_angles(
    positions: &[[u32; 3]],
    sections: Sections,
    rotated: u32,
    base: f64,
) -> Result<Vec<[f32; 2]>, Error> {
    check_rotation(rotated, 2, base)?;
    let n_pairs: u64 = sections.pairs.iter().map(|&pairs| u64::from(pairs)).sum();
    if n_pairs != u64::from(rotated / 2) {
        return Err(operand("sections", "half of the rotated elements in all", format!("{:?}", sections.pairs)));
    }
    let frequencies = frequencies(rotated, base);
    let axes: Vec<usize> = (0..rotated / 2).map(|pair| sections.axis(pair)).collect();
    let pairs = || axes.iter().zip(&frequencies);
    let angles = |position: &[u32; 3]| pairs().map(|(&axis, &by)| turned(position[axis], by)).collect::<Vec<_>>();
    Ok(positions.iter().flat_map(angles).collect())
}

/// `base^(-2 j / n)` for each pair of `n` elements.
fn frequencies(n: u32, base: f64) -> Vec<f64> {
    (0..n / 2).map(|pair| base.powf(-2.0 * f64::from(pair) / f64::from(n))).collect()
}

fn turned(place: u32, frequency: f64) -> [f32; 2] {
    let (sin, cos) = (f64::from(place) * frequency).sin_cos();
    [cos as f32, sin as f32]
}

fn check_rotation(n: u32, multiple: u32, base: f64) -> Result<(), Error> {
    if n == 0 || !n.is_multiple_of(multiple) || n > 1 << 16 {
        return Err(operand("head_dim", "a multiple of 4, or of 2 in a text", n.to_string()));
    }
    match base > 0.0 && base.is_finite() {
        true => Ok(()),
        false => Err(operand("base", "a number above 0", base.to_string())),
    }
}

fn operand(operand: &'static str, expected: &str, found: String) -> Error {
    Error::Operand { kernel: "rope", operand, expected: expected.into(), found }
}
