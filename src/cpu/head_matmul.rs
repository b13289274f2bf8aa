//! `head_matmul`: products of heads with matrices of their own.

use super::block::{Block, Packed};
use super::linear::{OutputRows, Product, ProductMode, activations};
use super::norm::rms_norm_row;
use super::{Call, threads};
use crate::dtype::BLOCK;
use crate::shaders::overrides;
use crate::shaders::params::HeadMatmulParams;

/// Tokens that a thread takes at a time.
const TOKENS: usize = 64;

pub(crate) fn head_matmul(mut call: Call<'_>) {
    let params: HeadMatmulParams = call.params();
    let (is_transposed, is_latent) = (call.is(overrides::TRANSPOSED), call.is(overrides::LATENT));
    let (weight, form) = (call.weight, ProductMode::of(false, call.rounds, call.batch_invariance));
    let [w, x, kv, norm, y] = call.operands();
    let (n_tokens, n_heads, n_turned) = (params.n_tokens as usize, params.n_heads as usize, params.n_turned as usize);
    let (n_out, dim, n_blocks) = (params.n_out as usize, params.dim as usize, params.blocks as usize);
    let (stride, width) = (params.y_stride as usize, n_turned + n_out);
    let (x, y) = (x.get::<f32>(), &mut y.get_mut::<f32>()[..n_tokens * stride]);
    let of_head = |t: usize, head: usize| {
        &x[t * params.x_stride as usize + params.x_start as usize + head * params.x_head as usize..]
    };
    let first_row = |head: usize| head * params.w_rows as usize + params.w_start as usize;
    if is_transposed {
        let w = Packed::new(weight, w.get(), params.w_scales);
        let ops = 2 * n_tokens * n_heads * n_out * dim;
        threads::for_each_tile(
            y,
            stride,
            0..n_heads * width,
            [TOKENS, width],
            ops,
            |row: &mut Vec<Block>, mut tile| {
                let (head, first) = (tile.columns.start / width, tile.rows.start);
                row.resize(n_blocks, [0.0; BLOCK]);
                let mut rows: Vec<&mut [f32]> = tile.rows_mut().collect();
                rows.iter_mut().for_each(|y| y.fill(0.0));
                for k in 0..dim {
                    w.run((first_row(head) + k) * n_blocks, n_blocks).unpack(row);
                    for (t, y) in rows.iter_mut().enumerate() {
                        let x = of_head(first + t, head)[k];
                        y[n_turned..].iter_mut().zip(row.as_flattened()).for_each(|(y, w)| *y += x * w);
                    }
                }
            },
        );
    } else {
        for head in 0..n_heads {
            let rows: Vec<f32> = (0..n_tokens).flat_map(|t| &of_head(t, head)[..dim]).copied().collect();
            let x = activations(&rows, [dim, n_blocks], None);
            let to = OutputRows::at(y, [head * width + n_turned, stride]);
            Product {
                form,
                w: w.get(),
                w_scales: params.w_scales,
                panels: None,
                first_row: first_row(head),
                x: &x,
                n_tokens,
                n_out,
                n_blocks,
            }
            .write(weight, to);
        }
    }
    if !is_latent {
        return;
    }
    let (kv, norm) = (kv.get::<f32>(), norm.get::<f32>());
    for (t, y) in y.chunks_exact_mut(stride).enumerate() {
        let (queries, key) = y.split_at_mut(n_heads * width);
        for (head, query) in queries.chunks_exact_mut(width).enumerate() {
            query[..n_turned].copy_from_slice(&of_head(t, head)[dim..][..n_turned]);
        }
        let kv = &kv[t * params.kv_stride as usize + params.kv_start as usize..];
        let (turned, latent) = key.split_at_mut(n_turned);
        turned.copy_from_slice(&kv[n_out..][..n_turned]);
        rms_norm_row(&kv[..n_out], norm, params.eps, latent);
    }
}
