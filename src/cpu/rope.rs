//! `rope`, `rope_kv` and `rope_packed`: rotary position embedding; `shaders/shared/rotate.wgsl` defines the pairs.

use super::{Call, threads};
use crate::kernels::{RopeKvParams, RopePackedParams, RopeParams};

/// Operations for an element, roughly.
const OPS: usize = 4;

pub(super) struct Rotation<'a> {
    pub rot_dims: usize,
    pub halves: bool,
    /// (cos, sin) of each pair at each position.
    pub table: &'a [[f32; 2]],
}

impl Rotation<'_> {
    /// One head at position `pos`.
    pub fn rotate(&self, pos: usize, x: &[f32], y: &mut [f32]) {
        let half = self.rot_dims / 2;
        // Padding of the last chunk may lie past the table; any angle will do for it.
        let pos = pos.min(self.table.len() / half - 1);
        for (i, &[cos, sin]) in self.table[pos * half..][..half].iter().enumerate() {
            let [a, b] = if self.halves { [i, i + half] } else { [2 * i, 2 * i + 1] };
            y[a] = x[a] * cos - x[b] * sin;
            y[b] = x[a] * sin + x[b] * cos;
        }
        y[self.rot_dims..].copy_from_slice(&x[self.rot_dims..]);
    }
}

pub(crate) fn rope(mut call: Call<'_>) {
    let params: RopeParams = call.params();
    let [state, table, x, y] = call.operands();
    let (n_tokens, head_dim) = (params.n_tokens as usize, params.head_dim as usize);
    let row = params.n_heads as usize * head_dim;
    let rotation = Rotation { rot_dims: params.rot_dims as usize, halves: params.style == 1, table: table.get() };
    let (pos, x) = (state.get::<u32>()[0] as usize, x.get::<f32>());
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_tokens * row], row, n_tokens * row * OPS, |t, y| {
        for (y, x) in y.chunks_exact_mut(head_dim).zip(x[t * row..].chunks_exact(head_dim)) {
            rotation.rotate(pos + t, x, y);
        }
    });
}

pub(crate) fn rope_kv(mut call: Call<'_>) {
    let params: RopeKvParams = call.params();
    let [state, table, qkv, q, k, v] = call.operands();
    let (n_tokens, head_dim, capacity) = (params.n_tokens as usize, params.head_dim as usize, params.capacity as usize);
    let (n_heads, n_kv_heads) = (params.n_heads as usize, params.n_kv_heads as usize);
    let row = (n_heads + 2 * n_kv_heads) * head_dim;
    let rotation = Rotation { rot_dims: params.rot_dims as usize, halves: params.style == 1, table: table.get() };
    let pos = state.get::<u32>()[0] as usize;
    let qkv = qkv.get::<f32>();
    let head = |t: usize, head: usize| &qkv[t * row + head * head_dim..][..head_dim];

    let q_row = n_heads * head_dim;
    let ops = n_tokens * q_row * OPS;
    threads::for_each_chunk(&mut q.get_mut::<f32>()[..n_tokens * q_row], q_row, ops, |t, q| {
        for (h, q) in q.chunks_exact_mut(head_dim).enumerate() {
            rotation.rotate(pos + t, head(t, h), q);
        }
    });
    // Padding of the last chunk may lie past the cache.
    let n_cached = n_tokens.min(capacity.saturating_sub(pos));
    let cached = n_kv_heads * capacity * head_dim;
    let ops = n_tokens * n_kv_heads * head_dim * OPS;
    threads::for_each_chunk(&mut k.get_mut::<f32>()[..cached], capacity * head_dim, ops, |g, k| {
        for t in 0..n_cached {
            rotation.rotate(pos + t, head(t, n_heads + g), &mut k[(pos + t) * head_dim..][..head_dim]);
        }
    });
    threads::for_each_chunk(&mut v.get_mut::<f32>()[..cached], capacity * head_dim, ops, |g, v| {
        for t in 0..n_cached {
            v[(pos + t) * head_dim..][..head_dim].copy_from_slice(head(t, n_heads + n_kv_heads + g));
        }
    });
}

pub(crate) fn rope_packed(mut call: Call<'_>) {
    let params: RopePackedParams = call.params();
    let [tokens, table, qkv] = call.operands();
    let (head_dim, stride) = (params.head_dim as usize, params.stride as usize);
    let rotation = Rotation { rot_dims: params.rot_dims as usize, halves: params.style == 1, table: table.get() };
    // Memory is padded, by less than a token.
    let tokens: &[[u32; 3]] = tokens.get::<u32>().as_chunks().0;
    let rotated = params.n_heads as usize * head_dim;
    let len = params.n_tokens as usize * stride;
    threads::for_each_chunk(&mut qkv.get_mut::<f32>()[..len], stride, len * OPS, |t, row| {
        let mut plain = vec![0.0; head_dim];
        for head in row[..rotated].chunks_exact_mut(head_dim) {
            plain.copy_from_slice(head);
            rotation.rotate(tokens[t][1] as usize, &plain, head);
        }
    });
}
