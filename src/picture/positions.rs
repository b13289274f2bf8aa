//! Learned positions of patches, in merge-block order.

use super::prepare::merge_order;
use crate::error::Error;

/// Patches of a grid, far above any model's.
const MAX_PATCHES: u64 = 1 << 20;

/// How a square table of positions is resampled to a grid of patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    /// Between the two nearest along each axis, the corners of the grid being those of the table: Qwen3-VL.
    Bilinear,
    /// A triangle, widened when shrinking, as `F.interpolate(mode="bilinear", antialias=True)` of PyTorch: SigLIP 2
    /// with any aspect ratio, LFM2-VL.
    Antialiased,
    /// The entry at this part of the side: SmolVLM, Idefics3. On a grid as large as the table each has its own.
    Nearest,
}

/// Resamples a table of learned positions, `[side * side, width]`, to a grid of `[rows, columns]` patches:
/// `[rows * columns, width]`, in merge-block order.
///
/// # Errors
/// [`Error::Operand`] if the table is not square, empty, or the grid is no whole number of merge blocks.
pub fn interpolate(
    table: &[f32],
    width: usize,
    grid: [u32; 2],
    merge: u32,
    interpolation: Interpolation,
) -> Result<Vec<f32>, Error> {
    let n_entries = table.len().checked_div(width).unwrap_or(0);
    let side = n_entries.isqrt();
    if side == 0 || side * side * width != table.len() {
        let found = format!("{} values of {width} columns", table.len());
        return Err(refused("table", "a square of positions".into(), found));
    }
    check_grid(grid, merge)?;
    let [rows, columns] = grid.map(|n| axis(n, side, interpolation));
    let mut out = vec![0.0; grid[0] as usize * grid[1] as usize * width];
    let mut sums = vec![0.0; width];
    for (out, [row, column]) in out.chunks_exact_mut(width).zip(merge_order(grid, merge)) {
        sums.fill(0.0);
        for &(row, row_weight) in &rows[row as usize] {
            for &(column, weight) in &columns[column as usize] {
                let entry = table[(row * side + column) * width..].iter();
                sums.iter_mut().zip(entry).for_each(|(sum, &value)| *sum += row_weight * weight * f64::from(value));
            }
        }
        out.iter_mut().zip(&sums).for_each(|(out, &sum)| *out = sum as f32);
    }
    Ok(out)
}

/// Adds two tables of learned positions, each `[n, width]`: that of a patch's column and that of its row, as Gemma 4
/// does; `[places.len(), width]`.
///
/// # Errors
/// [`Error::Operand`] for a patch beyond a table.
pub fn add_axes(columns: &[f32], rows: &[f32], width: usize, places: &[[u32; 2]]) -> Result<Vec<f32>, Error> {
    let mut out = Vec::with_capacity(places.len() * width);
    for [row, column] in places {
        let (x, y) = (entry("columns", columns, width, *column)?, entry("rows", rows, width, *row)?);
        out.extend(x.iter().zip(y).map(|(x, y)| x + y));
    }
    Ok(out)
}

/// Numbers of the patches around each patch of a grid, in squares of `side` of them, row by row:
/// `[places.len(), side * side]`, [`u32::MAX`] beyond the grid.
pub fn grid_neighbours(grid: [u32; 2], places: &[[u32; 2]], side: u32) -> Vec<u32> {
    let mut numbers = vec![u32::MAX; grid[0] as usize * grid[1] as usize];
    let at = |[row, column]: [u32; 2]| row as usize * grid[1] as usize + column as usize;
    for (number, place) in (0..).zip(places) {
        if let Some(slot) = numbers.get_mut(at(*place)) {
            *slot = number;
        }
    }
    let offsets = || (0..side).flat_map(move |row| (0..side).map(move |column| [row, column]));
    let neighbour = |place: [u32; 2], offset: [u32; 2]| {
        let [row, column] =
            [0, 1].map(|axis| (place[axis] + offset[axis]).checked_sub(side / 2).filter(|&at| at < grid[axis]));
        row.zip(column).and_then(|(row, column)| numbers.get(at([row, column])).copied()).unwrap_or(u32::MAX)
    };
    places.iter().flat_map(|&place| offsets().map(move |offset| neighbour(place, offset))).collect()
}

/// A row of a table.
fn entry<'a>(name: &'static str, table: &'a [f32], width: usize, at: u32) -> Result<&'a [f32], Error> {
    let entry = table.chunks_exact(width.max(1)).nth(at as usize);
    let found = || format!("{} values of {width} columns", table.len());
    entry.ok_or_else(|| refused(name, format!("a position {at}"), found()))
}

/// For each of `n` places along an axis, entries of a table with `side` of them, and their weights.
fn axis(n: u32, side: usize, interpolation: Interpolation) -> Vec<Vec<(usize, f64)>> {
    let last = (side - 1) as f64;
    let scale = side as f64 / f64::from(n);
    (0..n)
        .map(|place| match interpolation {
            Interpolation::Bilinear => {
                let at = f64::from(place) * last / f64::from(n.max(2) - 1);
                let below = at.floor();
                let above = (below + 1.0).min(last);
                vec![(below as usize, 1.0 - (at - below)), (above as usize, at - below)]
            }
            Interpolation::Antialiased => triangle((f64::from(place) + 0.5) * scale - 0.5, scale.max(1.0), side),
            Interpolation::Nearest => vec![((u64::from(place) * side as u64 / u64::from(n)) as usize, 1.0)],
        })
        .collect()
}

/// Entries under a triangle around `centre`, with weights of sum 1.
fn triangle(centre: f64, support: f64, side: usize) -> Vec<(usize, f64)> {
    let weight = |entry: usize| 1.0 - (entry as f64 - centre).abs() / support;
    let entries = (centre - support).max(0.0) as usize..((centre + support).ceil() as usize + 1).min(side);
    let weights: Vec<_> = entries.map(|entry| (entry, weight(entry))).filter(|(_, weight)| *weight > 0.0).collect();
    let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
    weights.into_iter().map(|(entry, weight)| (entry, weight / sum)).collect()
}

/// Refuses a grid that is empty, too large, or no whole number of merge blocks.
pub(super) fn check_grid(grid: [u32; 2], merge: u32) -> Result<(), Error> {
    let n_patches = u64::from(grid[0]) * u64::from(grid[1]);
    let is_whole = merge > 0 && grid.iter().all(|n| *n > 0 && n.is_multiple_of(merge));
    match is_whole && n_patches <= MAX_PATCHES {
        true => Ok(()),
        false => Err(refused("grid", format!("squares of {merge} x {merge} patches"), format!("{grid:?}"))),
    }
}

fn refused(operand: &'static str, expected: String, found: String) -> Error {
    Error::Operand { kernel: "positions", operand, expected, found }
}
