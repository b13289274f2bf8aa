//! `rope`, `rope_kv` and `rope_packed`: rotary position embedding; `shaders/shared/rotate.wgsl` defines the pairs.

use super::cached::{Pages, write_row};
use super::norm::mean;
use super::{Call, threads};
use crate::kernels::{KvType, QkNorm};
use crate::shaders::constants::rotate;
use crate::shaders::overrides;
use crate::shaders::params::{RopeKvParams, RopePackedParams, RopeParams};

/// Operations for an element, roughly.
const OPS: usize = 4;

pub(super) struct Rotation<'a> {
    pub rot_dims: usize,
    pub halves: bool,
    /// (cos, sin) of each pair at each position.
    pub table: &'a [[f32; 2]],
}

impl Rotation<'_> {
    /// One head by a row of the table.
    pub fn rotate(&self, row: usize, x: &[f32], y: &mut [f32]) {
        let half = self.rot_dims / 2;
        if half == 0 {
            return y.copy_from_slice(x);
        }
        // Padding of the last chunk may lie past the table; any angle will do for it.
        let row = row.min(self.table.len() / half - 1);
        for (i, &[cos, sin]) in self.table[row * half..][..half].iter().enumerate() {
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
    let rotation =
        Rotation { rot_dims: params.rot_dims as usize, halves: params.style == rotate::HALVES, table: table.get() };
    let (pos, x) = (state.get::<u32>()[0] as usize, x.get::<f32>());
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_tokens * row], row, n_tokens * row * OPS, |t, y| {
        for (y, x) in y.chunks_exact_mut(head_dim).zip(x[t * row..].chunks_exact(head_dim)) {
            rotation.rotate(pos + t, x, y);
        }
    });
}

/// The heads of a token's queries and keys on their way to attention.
pub(super) struct Turning<'a> {
    pub rotation: Rotation<'a>,
    pub norm: Option<QkNorm>,
    /// Of queries, then of keys.
    pub weight: &'a [f32],
    pub eps: f32,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

impl Turning<'_> {
    /// The factor of a head's norm but its weights, and these; `row` is the token's projection.
    fn norm(&self, row: &[f32], head: usize) -> Option<(f64, &[f32])> {
        let &Turning { n_heads, n_kv_heads, head_dim, .. } = self;
        let is_key = head >= n_heads;
        let whole = match (self.norm?, is_key) {
            (QkNorm::Whole, false) => 0..n_heads,
            (QkNorm::Whole, true) => n_heads..n_heads + n_kv_heads,
            _ => head..head + 1,
        };
        let weights = match self.norm? {
            QkNorm::Whole => head,
            _ => usize::from(is_key),
        };
        let elements = &row[whole.start * head_dim..whole.end * head_dim];
        let scale = 1.0 / (mean(elements, |x| x * x) + f64::from(self.eps)).sqrt();
        Some((scale, &self.weight[weights * head_dim..][..head_dim]))
    }

    /// A head of the values of a token, normalised if they are.
    pub fn value(&self, row: &[f32], g: usize) -> Vec<f32> {
        let mut head = row[(self.n_heads + self.n_kv_heads + g) * self.head_dim..][..self.head_dim].to_vec();
        if self.norm == Some(QkNorm::HeadsAndValues) {
            let scale = 1.0 / (mean(&head, |x| x * x) + f64::from(self.eps)).sqrt();
            head.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32);
        }
        head
    }

    /// A head of a token by a row of angles; `scratch` has room for a head.
    pub fn turn(&self, angles: usize, row: &[f32], head: usize, scratch: &mut [f32], to: &mut [f32]) {
        let from = &row[head * self.head_dim..][..self.head_dim];
        let normed = |x: f32, scale: f64, weight: f32| (f64::from(x) * scale) as f32 * weight;
        match self.norm(row, head) {
            None => self.rotation.rotate(angles, from, to),
            Some((scale, weights)) if self.norm == Some(QkNorm::RotatedHeads) => {
                self.rotation.rotate(angles, from, to);
                to.iter_mut().zip(weights).for_each(|(x, &weight)| *x = normed(*x, scale, weight));
            }
            Some((scale, weights)) => {
                for ((x, &from), &weight) in scratch.iter_mut().zip(from).zip(weights) {
                    *x = normed(from, scale, weight);
                }
                self.rotation.rotate(angles, scratch, to);
            }
        }
    }
}

pub(crate) fn rope_kv(mut call: Call<'_>) {
    let params: RopeKvParams = call.params();
    let (norm, page_table) = (QkNorm::of(call.constant(overrides::NORM)), call.constant(overrides::PAGE_TABLE));
    let kind = KvType::of(call.weight).unwrap_or(KvType::F32);
    let [state, table, weight, qkv, q, k, v] = call.operands();
    let (n_tokens, head_dim) = (params.n_tokens as usize, params.head_dim as usize);
    let (n_heads, n_kv_heads) = (params.n_heads as usize, params.n_kv_heads as usize);
    let (capacity, slots) = (params.capacity as usize, params.slots as usize);
    let n_value_heads = params.n_value_heads as usize;
    let row_len = (n_heads + n_kv_heads + n_value_heads) * head_dim;
    let rotation =
        Rotation { rot_dims: params.rot_dims as usize, halves: params.style == rotate::HALVES, table: table.get() };
    let weight = weight.get();
    let turning = Turning { rotation, norm, weight, eps: params.eps, n_heads, n_kv_heads, head_dim };
    let [pos, rope_offset] = [0, 3].map(|word| state.get::<u32>()[word]);
    let (pos, angles) = (pos as usize, pos.wrapping_add(rope_offset) as usize);
    let query_angles = angles + params.query_row as usize;
    let qkv = qkv.get::<f32>();
    let first = params.first as usize;
    let row = |t: usize| &qkv[t * (first + row_len) + first..][..row_len];
    let pages = Pages::of_row(state.get(), page_table, 0, slots);

    let q_row = n_heads * head_dim;
    let ops = n_tokens * q_row * OPS;
    if q_row > 0 {
        threads::for_each_chunk(&mut q.get_mut::<f32>()[..n_tokens * q_row], q_row, ops, |t, q| {
            let mut scratch = vec![0.0; head_dim];
            for (h, q) in q.chunks_exact_mut(head_dim).enumerate() {
                turning.turn(query_angles + t, row(t), h, &mut scratch, q);
            }
        });
    }
    // Padding of the last chunk may lie past the cache.
    let n_cached = n_tokens.min(capacity.saturating_sub(pos));
    let words = kind.row_words(params.head_dim) as usize;
    let ops = n_tokens * n_kv_heads * head_dim * OPS;
    threads::for_each_chunk(&mut k.get_mut()[..n_kv_heads * slots * words], slots * words, ops, |g, k| {
        let [mut scratch, mut key] = [vec![0.0; head_dim], vec![0.0; head_dim]];
        for t in 0..n_cached {
            turning.turn(angles + t, row(t), n_heads + g, &mut scratch, &mut key);
            write_row(kind, &key, &mut k[pages.slot(pos + t) * words..][..words]);
        }
    });
    threads::for_each_chunk(&mut v.get_mut()[..n_value_heads * slots * words], slots * words, ops, |g, v| {
        for t in 0..n_cached {
            write_row(kind, &turning.value(row(t), g), &mut v[pages.slot(pos + t) * words..][..words]);
        }
    });
}

pub(crate) fn rope_packed(mut call: Call<'_>) {
    let params: RopePackedParams = call.params();
    let norm = QkNorm::of(call.constant(overrides::NORM));
    let [tokens, table, weight, qkv] = call.operands();
    let (n_heads, n_kv_heads, head_dim) =
        (params.n_heads as usize, params.n_kv_heads as usize, params.head_dim as usize);
    let rotation =
        Rotation { rot_dims: params.rot_dims as usize, halves: params.style == rotate::HALVES, table: table.get() };
    let weight = weight.get();
    let turning = Turning { rotation, norm, weight, eps: params.eps, n_heads, n_kv_heads, head_dim };
    // Memory is padded, by less than a token.
    let tokens: &[[u32; 3]] = tokens.get::<u32>().as_chunks().0;
    let row_len = (n_heads + 2 * n_kv_heads) * head_dim;
    let turned = (n_heads + n_kv_heads) * head_dim;
    let len = params.n_tokens as usize * row_len;
    threads::for_each_chunk(&mut qkv.get_mut::<f32>()[..len], row_len, len * OPS, |t, row| {
        let (plain, mut scratch) = (row[..turned].to_vec(), vec![0.0; head_dim]);
        for (head, to) in row[..turned].chunks_exact_mut(head_dim).enumerate() {
            turning.turn(tokens[t][1] as usize, &plain, head, &mut scratch, to);
        }
        if norm == Some(QkNorm::HeadsAndValues) {
            for g in 0..n_kv_heads {
                let value = turning.value(row, g);
                row[turned + g * head_dim..][..head_dim].copy_from_slice(&value);
            }
        }
    });
}
