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
    multiply([m, n, k], (x, [k as isize, 1]), (b, [b_row, b_col]), y, false, threads);
}

/// `y = x wᵀ` on one thread, where no row of `y` depends on how many there are: `gemm` cuts K in another way where there
/// are few, and adds up along K side by side where the result is small and both operands are contiguous.
///
/// `x`: `[m, k]`; `w`: `[n, k]`; `y`: `[m, n]`.
pub(super) fn invariant_product(x: &[f32], w: &[f32], k: usize, y: &mut [f32]) {
    /// No product cuts a K of this length.
    const UNCUT: usize = 512;
    /// Elements of a result that counts as small.
    const SMALL: usize = 256;
    let (m, n) = (x.len() / k, w.len() / k);
    assert!(x.len() == m * k && w.len() == k * n && y.len() == m * n);
    let mut transposed = Vec::new();
    for first in (0..k).step_by(UNCUT) {
        let len = UNCUT.min(k - first);
        let (x, x_strides) = if m * n <= SMALL || n == 1 {
            let column = |i: usize| x[first + i..].iter().step_by(k);
            transposed.clear();
            (0..len).for_each(|i| transposed.extend(column(i)));
            (transposed.as_slice(), [1, m as isize])
        } else {
            (&x[first..], [k as isize, 1])
        };
        multiply([m, n, len], (x, x_strides), (&w[first..], [1, k as isize]), y, first > 0, gemm::Parallelism::None);
    }
}

/// `y = x b`, or `y += x b`. Operands come with the strides of their two dimensions.
fn multiply(
    [m, n, k]: [usize; 3],
    (x, [x_row, x_col]): (&[f32], [isize; 2]),
    (b, [b_row, b_col]): (&[f32], [isize; 2]),
    y: &mut [f32],
    accumulate: bool,
    threads: gemm::Parallelism,
) {
    let end = |rows: usize, row: isize, cols: usize, col: isize| (rows - 1) * row as usize + (cols - 1) * col as usize;
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(end(m, x_row, k, x_col) < x.len() && end(k, b_row, n, b_col) < b.len() && y.len() == m * n);
    // SAFETY: rows and columns times their strides, all above 0, stay inside the three slices, as just checked, and `y`
    // aliases neither of the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            y.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            x.as_ptr(),
            x_col,
            x_row,
            b.as_ptr(),
            b_col,
            b_row,
            if accumulate { 1.0 } else { 0.0 },
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}
