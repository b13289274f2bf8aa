//! Matrix products by the `gemm` crate, in row-major terms.

/// How the right-hand matrix of a product lies in memory.
#[derive(Clone, Copy)]
pub(super) enum Right {
    /// `[k, n]`.
    Plain,
    /// `[n, k]`.
    Transposed,
}

/// `y = x b`, on one thread or on all.
///
/// `x`: `[m, k]`; `b`: `[k, n]` as `right` says; `y`: `[m, n]`.
pub(super) fn product(
    x: &[f32],
    b: &[f32],
    right: Right,
    [n, k]: [usize; 2],
    y: &mut [f32],
    threads: gemm::Parallelism,
) {
    let m = x.len() / k;
    assert!(x.len() == m * k && b.len() == k * n && y.len() == m * n);
    let (b_col, b_row) = match right {
        Right::Plain => (1, n as isize),
        Right::Transposed => (k as isize, 1),
    };
    // SAFETY: the slices are as long as the products of the sizes, as just checked, and the strides stay inside them; `y`
    // aliases neither of the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            y.as_mut_ptr(),
            1,
            n as isize,
            false,
            x.as_ptr(),
            1,
            k as isize,
            b.as_ptr(),
            b_col,
            b_row,
            0.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}
