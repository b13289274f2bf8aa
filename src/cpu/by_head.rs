//! `by_head`: rows of heads in the layout of a cache.

use super::{Call, threads};
use crate::kernels::ByHeadParams;

pub(crate) fn by_head(mut call: Call<'_>) {
    let params: ByHeadParams = call.params();
    let [x, y] = call.operands();
    let (n_rows, n_heads, head_dim) = (params.n_rows as usize, params.n_heads as usize, params.head_dim as usize);
    let (x, len) = (x.get::<f32>(), n_rows * n_heads * head_dim);
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], n_rows * head_dim, len, |head, y| {
        for (row, y) in y.chunks_exact_mut(head_dim).enumerate() {
            y.copy_from_slice(&x[(row * n_heads + head) * head_dim..][..head_dim]);
        }
    });
}
