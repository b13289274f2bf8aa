//! A matrix product without any reuse.

use crate::error::Error;
use crate::kernels::{DispatchPlan, Linear};
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Records a matrix product of which each invocation computes one output, and reads all operands of it from memory. Shader:
/// `benches/shaders/matmul_naive.wgsl`.
///
/// # Shapes
/// As [`matmul`](crate::kernels::matmul).
/// # Errors
/// As [`matmul`](crate::kernels::matmul).
pub fn matmul_naive(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [n_tokens, _] = x.dims2("matmul_naive", "x")?;
    x.expect_shape("matmul_naive", "x", &[n_tokens, linear.w.cols()])?;
    let grid = |rows: u32| (u64::from(rows.div_ceil(16)) * u64::from(n_tokens.div_ceil(16)), 1);
    let (tier, kernel) = (rec.target().tier(), &shaders::MATMUL_NAIVE);
    linear.dispatch(rec, &DispatchPlan { tier, kernel, constants: Vec::new(), split_blocks: None }, &[x], y, grid)
}
