//! `softmax` of each row.

use super::simd::{self, Function, Instructions, Map, Numbers, exp};
use super::{Call, threads};
use crate::shaders::params::SoftmaxParams;

/// `e^(x - highest)`.
pub(super) struct ExpBelow {
    pub highest: f32,
}

impl Function for ExpBelow {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        exp::<I, X>(x - X::splat(self.highest))
    }
}

pub(crate) fn softmax(mut call: Call<'_>) {
    const OPS: usize = 24;
    let params: SoftmaxParams = call.params();
    let [x, y] = call.operands();
    let (dim, len) = (params.dim as usize, params.n_rows as usize * params.dim as usize);
    let x = x.get::<f32>();
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, len * OPS, |r, y| {
        let x = &x[r * dim..][..dim];
        let highest = x.iter().copied().fold(f32::MIN, f32::max);
        simd::run_wide(Map { function: ExpBelow { highest }, x, y: &mut *y });
        let sum = y.iter().map(|&y| f64::from(y)).sum::<f64>() as f32;
        y.iter_mut().for_each(|y| *y /= sum);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Operand;

    #[test]
    fn softmax_of_extreme_rows_is_exact() {
        let mut x = vec![-1e4f32; 2 * 7];
        x[2] = 1e4;
        x[6] = 1e4;
        let mut y = vec![f32::NAN; 2 * 7];
        let params = SoftmaxParams { n_rows: 2, dim: 7 };
        softmax(Call {
            params: bytemuck::bytes_of(&params),
            constants: &[],
            weight: None,
            rounds: false,
            batch_invariance: Default::default(),
            panels: None,
            operands: vec![Operand::Read(bytemuck::cast_slice(&x)), Operand::Write(bytemuck::cast_slice_mut(&mut y))],
        });
        assert_eq!(y[..7], [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.5]);
        assert_eq!(y[7..], [1.0 / 7.0; 7]);
    }
}
