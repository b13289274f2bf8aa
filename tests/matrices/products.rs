//! `matmul_half`. All numbers are small integers, so results are exact.

use half::f16;

use super::emulation::{Gpu, SIZE, emulated};

const BIAS: u32 = 1;
const ACCUMULATE: u32 = 2;
/// Invocations of an emulated subgroup.
const SUBGROUP: u32 = 8;

/// As in `ProductPlan`, with matrices of four.
#[derive(Clone, Copy, Debug)]
struct Tile {
    rows: u32,
    cols: u32,
    /// Subgroups side by side.
    across: u32,
    /// All of them.
    subgroups: u32,
    stages: u32,
}

/// A product and its form.
#[derive(Clone, Copy, Debug)]
struct Case {
    tile: Tile,
    sizes: [u32; 3],
    flags: u32,
    guarded: bool,
    /// Whether rows are scaled by a power of two.
    scaled: bool,
    n_splits: u32,
}

#[test]
fn matrix_unit_products_are_exact_for_every_tile() {
    let Some(gpu) = Gpu::open() else { return };
    let arrays = [("staged", "f16", 4), ("sums", "f32", 1), ("y", "f32", 1)];
    let module = gpu.module(emulated("matmul_half.F32.matrix16", SUBGROUP, &arrays));
    let plain = |[rows, cols, across]: [u32; 3]| Tile { rows, cols, across, subgroups: 4, stages: 1 };
    let plain = [[4, 64, 4], [8, 32, 4], [16, 16, 2], [32, 32, 2]].map(plain);
    let in_stages = plain.map(|tile| Tile { stages: 2, ..tile });
    let by_eight =
        [[32, 32, 4], [64, 32, 2]].map(|[rows, cols, across]| Tile { rows, cols, across, subgroups: 8, stages: 1 });
    for tile in plain.into_iter().chain(in_stages).chain(by_eight) {
        let Tile { rows, cols, .. } = tile;
        let exact =
            Case { tile, sizes: [2 * rows, 2 * cols, 96], flags: 0, guarded: false, scaled: false, n_splits: 1 };
        let ragged = Case { sizes: [2 * rows - 1, cols + 5, 64], guarded: true, ..exact };
        let cases = [
            exact,
            Case { flags: ACCUMULATE, ..exact },
            Case { flags: BIAS, ..exact },
            Case { scaled: true, ..exact },
            Case { scaled: true, flags: ACCUMULATE | BIAS, ..exact },
            Case { n_splits: 2, ..exact },
            ragged,
            Case { flags: ACCUMULATE | BIAS, scaled: true, ..ragged },
            Case { sizes: [1, 1, 32], ..ragged },
        ];
        // Other forms differ in the loop along K and in the parts of subgroups, not in what happens to sums.
        let is_plain = tile.subgroups == 4 && tile.stages == 1;
        let cases: Vec<Case> = cases.into_iter().filter(|case| is_plain || case.scaled == (case.flags != 0)).collect();
        for guarded in [false, true] {
            let pipeline = gpu.pipeline(&module, &constants(tile, guarded));
            cases.iter().filter(|case| case.guarded == guarded).for_each(|&case| check(&gpu, &pipeline, case));
        }
    }
}

/// A tile as overrides.
fn constants(Tile { rows, cols, across, subgroups, stages }: Tile, guarded: bool) -> [(&'static str, f64); 7] {
    assert!(rows.is_multiple_of(SIZE) && cols.is_multiple_of(SIZE * across));
    [
        ("ROWS", f64::from(rows)),
        ("COLS", f64::from(cols)),
        ("ACROSS", f64::from(across)),
        ("SUBGROUP", f64::from(SUBGROUP)),
        ("SUBGROUPS", f64::from(subgroups)),
        ("STAGES", f64::from(stages)),
        ("GUARDED", f64::from(u8::from(guarded))),
    ]
}

/// Runs a case and compares all of `y`.
fn check(gpu: &Gpu, pipeline: &wgpu::ComputePipeline, case: Case) {
    let Case { tile: Tile { rows, cols, .. }, sizes: [m, n, k], flags, scaled, n_splits, .. } = case;
    let (y_start, y_stride) = (4, n.next_multiple_of(4) + 8);
    let blocks = k / 32;
    let width = k.next_multiple_of(256);
    let integer = |i: u32, seed: u32| f64::from((i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) % 7) - 3.0;
    let x = |row: u32, i: u32| integer(row * k + i, 1);
    let w = |col: u32, i: u32| integer(col * k + i, 2);
    let exponent = |row: u32| if scaled && row.is_multiple_of(3) { 2.0 } else { 1.0 };
    let held = |i: u32| integer(i, 3);
    let bias = |i: u32| integer(i, 4);

    let mut halves = vec![f16::ZERO; (m * width) as usize];
    for (row, halves) in halves.chunks_exact_mut(width as usize).enumerate() {
        (0..k).for_each(|i| halves[i as usize] = f16::from_f64(x(row as u32, i) * exponent(row as u32)));
    }
    let weights: Vec<f32> = (0..n * k).map(|i| w(i / k, i % k) as f32).collect();
    let inverse: Vec<f32> = (0..m).map(|row| (1.0 / exponent(row)) as f32).collect();
    let biases: Vec<f32> = (0..y_stride).map(|i| bias(i) as f32).collect();
    let before: Vec<f32> = (0..n_splits * m * y_stride).map(|i| held(i) as f32).collect();
    let split_blocks = blocks.div_ceil(n_splits);
    let params = [m, n, width, blocks, n * blocks * 32, y_start, y_stride, flags, 0, split_blocks, 0, 0];

    let mut want: Vec<f64> = before.iter().map(|&v| f64::from(v)).collect();
    for split in 0..n_splits {
        let along = split * split_blocks * 32..k.min((split + 1) * split_blocks * 32);
        for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
            let at = ((split * m + row) * y_stride + y_start + col) as usize;
            let mut sum: f64 = along.clone().map(|i| x(row, i) * w(col, i)).sum();
            sum += if flags & BIAS != 0 { bias(y_start + col) } else { 0.0 };
            want[at] = sum + if flags & ACCUMULATE != 0 { want[at] } else { 0.0 };
        }
    }
    let grid = [m.div_ceil(rows) * n.div_ceil(cols), 1, n_splits];
    let halves: Vec<u16> = halves.iter().map(|half| half.to_bits()).collect();
    let operands = [
        bytemuck::cast_slice(&weights),
        bytemuck::cast_slice(&biases),
        bytemuck::cast_slice(&halves),
        bytemuck::cast_slice(&inverse),
    ];
    let found = gpu.run(pipeline, &params, &operands, &before, grid);
    for (i, (found, want)) in found.iter().zip(&want).enumerate() {
        let (row, col) = (i as u32 / y_stride, i as u32 % y_stride);
        assert_eq!(f64::from(*found), *want, "{case:?}: row {row} of y, column {col}");
    }
}
