//! `embed` and `embed_sum`, the gathers of embeddings, and `last_row`.

use super::block::Packed;
use super::{Call, threads};
use crate::dtype::BLOCK;
use crate::shaders::params::{EmbedParams, EmbedSumParams, LastRowParams};

pub(crate) fn embed(mut call: Call<'_>) {
    let params: EmbedParams = call.params();
    let (weight, n_tokens) = (call.weight, params.n_tokens as usize);
    let [state, tokens, w, positions, y] = call.operands();
    let n_blocks = params.blocks as usize;
    let w = Packed::new(weight, w.get(), params.w_scales);
    let mut row = vec![[0.0; BLOCK]; n_blocks];
    let state = state.get::<u32>();
    let n_in_pass = state[1] as usize;
    let dim = params.dim as usize;
    let tokens = tokens.get::<u32>();
    // The position of a token and its id.
    let token_at = |t: usize| match params.row_words as usize {
        0 => (state[0] as usize + t, tokens.get(state[0] as usize + t)),
        words => (state[t * words] as usize, state.get(t * words + 2)),
    };
    for (t, y) in y.get_mut::<f32>().chunks_exact_mut(dim).take(n_tokens).enumerate() {
        // Rows after the last token pad the pass.
        let (pos, token) = token_at(t);
        let token = token.filter(|_| t < n_in_pass);
        match token.map(|token| token.wrapping_sub(params.slab_start)) {
            Some(id) if id < params.slab_rows => {
                w.run(id as usize * n_blocks, n_blocks).unpack(&mut row);
                y.iter_mut().zip(row.as_flattened()).for_each(|(y, x)| *y = params.factor * x);
                if let Some(last) = (params.n_positions as usize).checked_sub(1) {
                    let row = &positions.get::<f32>()[pos.min(last) * dim..][..dim];
                    y.iter_mut().zip(row).for_each(|(y, x)| *y += x);
                }
            }
            // The first slab writes zeros where no token is, and those after it what they hold.
            _ if params.slab_start == 0 => y.fill(0.0),
            _ => {}
        }
    }
}

pub(crate) fn embed_sum(mut call: Call<'_>) {
    let params: EmbedSumParams = call.params();
    let (weight, n_tokens) = (call.weight, params.n_tokens as usize);
    let [tokens, w, positions, types, y] = call.operands();
    let (n_blocks, dim) = (params.blocks as usize, params.dim as usize);
    let w = Packed::new(weight, w.get(), params.w_scales);
    let tables = [(positions.get::<f32>(), params.n_positions), (types.get(), params.n_types)];
    // Their memory is rounded up, perhaps to no whole number of triples.
    let (tokens, _) = tokens.get::<u32>().as_chunks::<3>();
    let y = &mut y.get_mut::<f32>()[..n_tokens * dim];
    threads::for_each_chunk(y, dim, n_tokens * dim, |t, y| {
        let [id, numbers @ ..] = tokens[t];
        let id = id.min(params.n_ids - 1).wrapping_sub(params.slab_start);
        if id >= params.slab_rows {
            return;
        }
        let mut row = vec![[0.0; BLOCK]; n_blocks];
        w.run(id as usize * n_blocks, n_blocks).unpack(&mut row);
        y.copy_from_slice(&row.as_flattened()[..dim]);
        for ((table, n_rows), number) in tables.iter().zip(numbers) {
            let Some(last) = n_rows.checked_sub(1) else { continue };
            let row = &table[number.min(last) as usize * dim..][..dim];
            y.iter_mut().zip(row).for_each(|(y, x)| *y += x);
        }
    });
}

pub(crate) fn last_row(mut call: Call<'_>) {
    let params: LastRowParams = call.params();
    let [state, x, y] = call.operands();
    let (n_tokens, dim) = (state.get::<u32>()[1] as usize, params.dim as usize);
    let y = &mut y.get_mut::<f32>()[..dim];
    if let Some(x) = x.get::<f32>()[..].chunks_exact(dim).nth(n_tokens.wrapping_sub(1)) {
        y.copy_from_slice(x);
    }
}
