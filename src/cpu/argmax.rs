//! `argmax` and `argmax_merge`: the best of each chunk of a row, then the best of those.

use super::{Call, threads};
use crate::kernels::NON_FINITE;
use crate::shaders::params::{ArgmaxMergeParams, ArgmaxParams};

/// Unsigned order of keys is the order of the floats; see `shaders/shared/order.wgsl`.
pub(super) fn order_key(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

pub(crate) fn argmax(mut call: Call<'_>) {
    let params: ArgmaxParams = call.params();
    let n_rows = params.n_rows as usize;
    let [x, best] = call.operands();
    let (dim, chunk, n_chunks) = (params.dim as usize, params.chunk as usize, params.n_chunks as usize);
    let x = x.get::<f32>();
    let best = &mut best.get_mut::<[u32; 2]>()[..n_rows * n_chunks];
    threads::for_each_chunk(best, 1, n_rows * dim, |i, best| {
        let start = i % n_chunks * chunk;
        let row = &x[i / n_chunks * dim..][..dim];
        best[0] = largest(&row[start..(start + chunk).min(dim)], start as u32);
    });
}

/// Order key and index of the largest element, the first among equals; indices count from `start`.
fn largest(x: &[f32], start: u32) -> [u32; 2] {
    if x.iter().any(|value| !value.is_finite()) {
        return [u32::MAX, NON_FINITE];
    }
    let keys = x.iter().zip(start..).map(|(&value, index)| [order_key(value), index]);
    keys.fold([0, 0], |best, found| if found[0] > best[0] { found } else { best })
}

pub(crate) fn argmax_merge(mut call: Call<'_>) {
    let params: ArgmaxMergeParams = call.params();
    let n_rows = params.n_rows as usize;
    let [best, ids] = call.operands();
    let rows = best.get::<[u32; 2]>().chunks_exact(params.n_chunks as usize);
    for (id, row) in ids.get_mut::<u32>()[..n_rows].iter_mut().zip(rows) {
        let better = |best: [u32; 2], &[key, index]: &[u32; 2]| {
            if key > best[0] || (key == best[0] && index < best[1]) { [key, index] } else { best }
        };
        *id = row.iter().fold([0, 0], better)[1];
    }
}
