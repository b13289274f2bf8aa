//! `top_k`: the largest elements of each row in falling order.

use super::Call;
use super::argmax::order_key;
use crate::kernels::{NON_FINITE, TopKParams};

pub(crate) fn top_k(mut call: Call<'_>) {
    let params: TopKParams = call.params();
    let n_rows = call.grid[0] as usize;
    let [x, values, ids] = call.operands();
    let (dim, k) = (params.dim as usize, params.k as usize);
    let values = values.get_mut::<f32>().chunks_exact_mut(k);
    let ids = ids.get_mut::<u32>().chunks_exact_mut(k);
    for ((x, values), ids) in x.get::<f32>().chunks_exact(dim).zip(values).zip(ids).take(n_rows) {
        if x.iter().any(|value| !value.is_finite()) {
            // What each round of the shader finds: the last element stands for the index that does not exist.
            ids.fill(NON_FINITE);
            values.fill(x[dim - 1]);
            continue;
        }
        // Falling keys, rising indices, as one rising number.
        let mut order: Vec<u64> =
            x.iter().zip(0u64..).map(|(&value, index)| u64::from(!order_key(value)) << 32 | index).collect();
        if k < dim {
            order.select_nth_unstable(k - 1);
            order.truncate(k);
        }
        order.sort_unstable();
        for ((order, id), value) in order.into_iter().zip(ids).zip(values) {
            *id = order as u32;
            *value = x[*id as usize];
        }
    }
}
