//! Learned positions and rotary angles, compared with what transformers adds and with its formulas in NumPy.

use tilewright::picture::positions::{Interpolation, add_axes, interpolate};
use tilewright::picture::rope::{Axes, grid_angles};

use super::{References, message_of, path};

fn largest(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
}

/// The place of each patch, block by block.
fn blocks([rows, columns]: [u32; 2], merge: u32) -> Vec<[u32; 2]> {
    let mut places: Vec<[u32; 2]> = (0..rows * columns).map(|at| [at / columns, at % columns]).collect();
    places.sort_by_key(|[row, column]| (row / merge, column / merge, row % merge, column % merge));
    places
}

/// Rows of a reference in raster order, in merge-block order.
fn ordered(raster: &[f32], width: usize, grid: [u32; 2], merge: u32) -> Vec<f32> {
    let row = |[row, column]: [u32; 2]| &raster[(row * grid[1] + column) as usize * width..][..width];
    blocks(grid, merge).into_iter().flat_map(row).copied().collect()
}

fn open(folder: &str) -> References {
    References::open(&path(&format!("{folder}/refs.safetensors")))
}

/// Positions are the input of the first block without the product of the patches.
#[test]
fn interpolated_tables_are_those_of_transformers() {
    let references = open("qwen3-vl");
    let got = interpolate(&references.floats("table"), 32, [6, 8], 2, Interpolation::Bilinear).unwrap();
    let difference = largest(&got, &references.floats("positions"));
    assert!(difference < 2e-6, "{difference}");

    let references = open("lfm2-vl");
    let got = interpolate(&references.floats("table"), 48, [4, 6], 2, Interpolation::Antialiased).unwrap();
    let want = ordered(&references.floats("positions")[..24 * 48], 48, [4, 6], 2);
    let difference = largest(&got, &want);
    assert!(difference < 2e-6, "{difference}");

    let references = open("smolvlm");
    let got = interpolate(&references.floats("table"), 48, [6, 6], 2, Interpolation::Nearest).unwrap();
    let want = ordered(&references.floats("positions")[..36 * 48], 48, [6, 6], 2);
    let difference = largest(&got, &want);
    assert!(difference < 2e-6, "{difference}");
}

#[test]
fn added_tables_are_those_of_transformers() {
    let references = open("gemma4-vl");
    let table = references.floats("table");
    let (columns, rows) = table.split_at(table.len() / 2);
    let got = add_axes(columns, rows, 48, &blocks([9, 9], 3)).unwrap();
    let want = ordered(&references.floats("positions")[..81 * 48], 48, [9, 9], 3);
    let difference = largest(&got, &want);
    assert!(difference < 2e-6, "{difference}");
    let message = "positions: `rows` is 3072 values of 48 columns, expected a position 64";
    assert_eq!(message_of(add_axes(columns, rows, 48, &[[64, 0]])), message);
}

/// A constant table stays so, and a grid of the table's size has its entries.
#[test]
fn interpolation_keeps_what_it_must() {
    let table: Vec<f32> = (0..49).map(|at| at as f32).collect();
    for kind in [Interpolation::Bilinear, Interpolation::Antialiased, Interpolation::Nearest] {
        assert_eq!(interpolate(&table, 1, [7, 7], 1, kind).unwrap(), table, "{kind:?}");
        for grid in [[1, 1], [1, 9], [20, 3], [4, 4]] {
            let got = interpolate(&[2.0; 25], 1, grid, 1, kind).unwrap();
            assert!(got.len() as u32 == grid[0] * grid[1] && largest(&got, &vec![2.0; got.len()]) < 1e-6, "{kind:?}");
        }
    }
    let refused =
        |table: &[f32], width, grid, merge| message_of(interpolate(table, width, grid, merge, Interpolation::Bilinear));
    assert!(refused(&table[1..], 1, [2, 2], 1).contains("`table` is 48 values of 1 columns"));
    assert!(refused(&table, 0, [2, 2], 1).contains("`table` is 49 values of 0 columns"));
    assert!(refused(&table, 1, [2, 3], 2).contains("`grid` is [2, 3], expected squares of 2 x 2 patches"));
    assert!(refused(&table, 1, [0, 3], 1).contains("`grid` is [0, 3]"));
    assert!(refused(&table, 1, [u32::MAX, u32::MAX], 1).contains("`grid`"));
    assert!(refused(&table, 1, [2, 2], 0).contains("`grid`"));
}

#[test]
fn angles_of_grids() {
    for (folder, grid, merge, base, axes) in
        [("qwen3-vl", [6, 8], 2, 1e4, Axes::RowFirst), ("gemma4-vl", [9, 9], 3, 100.0, Axes::ColumnFirst)]
    {
        let want = open(folder).floats("angles");
        let got = grid_angles(grid, merge, 16, base, axes).unwrap();
        let difference = largest(got.as_flattened(), &want);
        assert!(difference < 1e-6, "{folder}: {difference}");
    }
    assert!(message_of(grid_angles([2, 2], 2, 18, 1e4, Axes::RowFirst)).contains("`head_dim` is 18"));
    assert!(message_of(grid_angles([2, 2], 2, 16, 0.0, Axes::RowFirst)).contains("`base` is 0"));
    assert!(message_of(grid_angles([2, 1], 2, 16, 1e4, Axes::RowFirst)).contains("`grid`"));
}
