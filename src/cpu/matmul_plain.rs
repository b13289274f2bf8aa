//! `matmul_plain`: `y = x b` of two plain matrices.

#[cfg(not(target_arch = "wasm32"))]
use ::gemm::Parallelism;

use super::Call;
#[cfg(not(target_arch = "wasm32"))]
use super::gemm::{self, Right};
use crate::kernels::PlainParams;

pub(crate) fn matmul_plain(mut call: Call<'_>) {
    let params: PlainParams = call.params();
    let (m, n, k) = (params.m as usize, params.n as usize, params.k as usize);
    let [x, b, y] = call.operands();
    product(&x.get::<f32>()[..m * k], &b.get::<f32>()[..k * n], n, k, &mut y.get_mut::<f32>()[..m * n]);
}

/// `x`: `[m, k]`; `b`: `[k, n]`; `y`: `[m, n]`.
#[cfg(not(target_arch = "wasm32"))]
fn product(x: &[f32], b: &[f32], n: usize, k: usize, y: &mut [f32]) {
    gemm::product(x, b, Right::Plain, [n, k], y, Parallelism::Rayon(0));
}

/// `x`: `[m, k]`; `b`: `[k, n]`; `y`: `[m, n]`. Rows of `b` are added up in runs that stay in the cache.
#[cfg(any(test, target_arch = "wasm32"))]
fn plain_product(x: &[f32], b: &[f32], n: usize, k: usize, y: &mut [f32]) {
    const ROWS: usize = 64;
    y.fill(0.0);
    for (i, b) in b.chunks(ROWS * n).enumerate() {
        for (x, y) in x.chunks_exact(k).zip(y.chunks_exact_mut(n)) {
            for (x, b) in x[i * ROWS..].iter().zip(b.chunks_exact(n)) {
                y.iter_mut().zip(b).for_each(|(y, b)| *y += x * b);
            }
        }
    }
}
#[cfg(target_arch = "wasm32")]
use plain_product as product;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_products_agree_at_awkward_sizes() {
        for [m, n, k] in [[1, 1, 1], [1, 70, 65], [5, 3, 129], [67, 33, 64]] {
            // Small integers: sums are exact in any order.
            let matrix = |len: usize| -> Vec<f32> { (0..len).map(|i| (i * i % 11) as f32 - 5.0).collect() };
            let (x, b) = (matrix(m * k), matrix(k * n));
            let want: Vec<f32> =
                (0..m * n).map(|i| (0..k).map(|j| x[i / n * k + j] * b[j * n + i % n]).sum()).collect();
            for product in [product, plain_product] {
                let mut y = vec![f32::NAN; m * n];
                product(&x, &b, n, k, &mut y);
                assert_eq!(y, want, "{m} x {n} x {k}");
            }
        }
    }
}
