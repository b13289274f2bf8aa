//! `by_head`: rows of heads in the layout of a cache.

use super::{Call, threads};
use crate::shaders::params::ByHeadParams;

pub(crate) fn by_head(mut call: Call<'_>) {
    let params: ByHeadParams = call.params();
    let [x, y] = call.operands();
    let (n_rows, n_heads, head_dim) = (params.n_rows as usize, params.n_heads as usize, params.head_dim as usize);
    let (x, len) = (x.get::<f32>(), n_rows * n_heads * head_dim);
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], n_rows * head_dim, len, |head, y| {
        // A matrix's transposition: a copy of one number would be a call.
        if head_dim == 1 {
            y.iter_mut().zip(x[head..].iter().step_by(n_heads)).for_each(|(y, &x)| *y = x);
            return;
        }
        for (row, y) in y.chunks_exact_mut(head_dim).enumerate() {
            y.copy_from_slice(&x[(row * n_heads + head) * head_dim..][..head_dim]);
        }
    });
}
