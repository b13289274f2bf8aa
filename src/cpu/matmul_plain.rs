//! `matmul_plain`: `y = x b` of two plain matrices.

use std::borrow::Cow;

use super::Call;
use super::dots::Dots;
use super::simd;
use super::threads::{self, Tile};
use crate::shaders::params::MatmulPlainParams;

pub(crate) fn matmul_plain(mut call: Call<'_>) {
    /// What dot products ask of the length of rows.
    const RUN: usize = 8;
    let params: MatmulPlainParams = call.params();
    let (m, n, k) = (params.m as usize, params.n as usize, params.k as usize);
    let [x, b, y] = call.operands();
    let (x, b) = (&x.get::<f32>()[..m * k], &b.get::<f32>()[..k * n]);
    let dim = k.next_multiple_of(RUN);
    let x = match dim == k {
        true => Cow::Borrowed(x),
        false => {
            let mut padded = vec![0.0; m * dim];
            padded.chunks_exact_mut(dim).zip(x.chunks_exact(k)).for_each(|(to, x)| to[..k].copy_from_slice(x));
            Cow::Owned(padded)
        }
    };
    let shape = [m.min(512), threads::chunk_len(n, 16, 64)];
    // Some columns of `b`, as rows, and their products.
    let write = |(w, sums): &mut (Vec<f32>, Vec<f32>), mut tile: Tile<'_>| {
        let n_rows = tile.columns.len();
        w.resize(n_rows * dim, 0.0);
        sums.resize(tile.rows.len() * n_rows, 0.0);
        for (j, b) in b.chunks_exact(n).enumerate() {
            b[tile.columns.clone()].iter().enumerate().for_each(|(row, &b)| w[row * dim + j] = b);
        }
        simd::run_wide(Dots { w, x: &x[tile.rows.start * dim..tile.rows.end * dim], dim, sums });
        tile.rows_mut().zip(sums.chunks_exact(n_rows)).for_each(|(y, sums)| y.copy_from_slice(sums));
    };
    threads::for_each_tile(&mut y.get_mut::<f32>()[..m * n], n, 0..n, shape, m * n * k, write);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Operand;

    #[test]
    fn plain_matmul_is_exact_at_ragged_sizes() {
        for [m, n, k] in [[1, 1, 1], [1, 70, 65], [5, 3, 129], [67, 33, 64], [520, 70, 9]] {
            // Small integers: sums are exact in any order.
            let matrix = |len: usize| -> Vec<f32> { (0..len).map(|i| (i * i % 11) as f32 - 5.0).collect() };
            let (x, b, mut y) = (matrix(m * k), matrix(k * n), vec![f32::NAN; m * n]);
            let want: Vec<f32> =
                (0..m * n).map(|i| (0..k).map(|j| x[i / n * k + j] * b[j * n + i % n]).sum()).collect();
            let params = MatmulPlainParams { m: m as u32, n: n as u32, k: k as u32, ..bytemuck::Zeroable::zeroed() };
            matmul_plain(Call {
                params: bytemuck::bytes_of(&params),
                constants: &[],
                weight: None,
                rounds: false,
                batch_invariance: Default::default(),
                panels: None,
                operands: vec![
                    Operand::Read(bytemuck::cast_slice(&x)),
                    Operand::Read(bytemuck::cast_slice(&b)),
                    Operand::Write(bytemuck::cast_slice_mut(&mut y)),
                ],
            });
            assert_eq!(y, want, "{m} x {n} x {k}");
        }
    }
}
