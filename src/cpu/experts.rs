//! `route`, `expert_gate_up` and `expert_down`: mixtures of experts. An expert's products are of all its tokens at once.

use super::Call;
use super::block::Block;
use super::linear::{Product, activations, gated_by};
use crate::kernels::{
    ACCUMULATE, BIAS, ExpertDownParams, ExpertGateUpParams, ROUTE_BIAS, RouteParams, SHARES, SIGMOID,
};

pub(crate) fn route(mut call: Call<'_>) {
    let params: RouteParams = call.params();
    let [logits, bias, routes] = call.operands();
    let (n_experts, n_used) = (params.n_experts as usize, params.n_used as usize);
    let (logits, bias) = (logits.get::<f32>(), bias.get::<f32>());
    // Memory is padded, by less than a pair.
    let rows = routes.get_mut::<u32>().as_chunks_mut::<2>().0.chunks_exact_mut(n_used);
    for (logits, routes) in logits.chunks_exact(n_experts).zip(rows).take(params.n_tokens as usize) {
        let scores: Vec<f32> = if params.flags & SIGMOID != 0 {
            logits.iter().map(|&logit| 1.0 / (1.0 + (-logit).exp())).collect()
        } else {
            let highest = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = logits.iter().map(|&logit| (logit - highest).exp()).sum();
            logits.iter().map(|&logit| (logit - highest).exp() / sum).collect()
        };
        let chosen_by = |e: usize| scores[e] + if params.flags & ROUTE_BIAS != 0 { bias[e] } else { 0.0 };
        let mut order: Vec<usize> = (0..n_experts).collect();
        // The order is stable: among equals the lowest number comes first.
        order.sort_by(|&a, &b| chosen_by(b).total_cmp(&chosen_by(a)));
        let total: f32 = order[..n_used].iter().map(|&e| scores[e]).sum();
        let share = if params.flags & SHARES != 0 { params.scale / total } else { params.scale };
        for (route, &e) in routes.iter_mut().zip(&order) {
            *route = [e as u32, (share * scores[e]).to_bits()];
        }
    }
}

/// The slots of each expert that has some; a slot is a token's place for one of its experts.
fn slots_by_expert(routes: &[[u32; 2]], n_experts: usize) -> impl Iterator<Item = (usize, Vec<usize>)> {
    let mut slots = vec![Vec::new(); n_experts];
    for (slot, &[expert, _]) in routes.iter().enumerate() {
        slots[expert as usize % n_experts].push(slot);
    }
    slots.into_iter().enumerate().filter(|(_, slots)| !slots.is_empty())
}

/// Rows of blocks one after the other.
fn gather(x: &[Block], n_blocks: usize, rows: impl Iterator<Item = usize>) -> Vec<Block> {
    rows.flat_map(|row| &x[row * n_blocks..][..n_blocks]).copied().collect()
}

pub(crate) fn expert_gate_up(mut call: Call<'_>) {
    let params: ExpertGateUpParams = call.params();
    let weight = call.weight;
    let [w, vector, x, routes, y] = call.operands();
    let (n_tokens, n_used, ffn_dim) = (params.n_tokens as usize, params.n_used as usize, params.ffn_dim as usize);
    let (dim, n_blocks) = (params.dim as usize, params.blocks as usize);
    let x = activations(&x.get::<f32>()[..n_tokens * dim], vector.get(), [dim, n_blocks], params.flags, params.eps);
    let routes = &routes.get::<u32>().as_chunks().0[..n_tokens * n_used];
    let bias = (params.flags & BIAS != 0).then(|| vector.get::<f32>());
    let y = y.get_mut::<f32>();
    for (expert, slots) in slots_by_expert(routes, params.n_experts as usize) {
        let rows = gather(&x, n_blocks, slots.iter().map(|slot| slot / n_used));
        let first_row = expert * params.expert_rows as usize;
        let [gate, up] = [first_row, first_row + params.up_row as usize].map(|first_row| {
            let product = Product {
                invariant: false,
                w: w.get(),
                w_scales: params.w_scales,
                first_row,
                x: &rows,
                n_tokens: slots.len(),
                n_out: ffn_dim,
                n_blocks,
            };
            let mut sums = product.plain(weight);
            if let Some(bias) = bias {
                for row in sums.chunks_exact_mut(ffn_dim) {
                    row.iter_mut().zip(&bias[first_row..]).for_each(|(sum, bias)| *sum += bias);
                }
            }
            sums
        });
        for (i, slot) in slots.into_iter().enumerate() {
            let row = i * ffn_dim..(i + 1) * ffn_dim;
            gated_by(params.flags, &gate[row.clone()], &up[row], &mut y[slot * ffn_dim..][..ffn_dim]);
        }
    }
}

pub(crate) fn expert_down(mut call: Call<'_>) {
    let params: ExpertDownParams = call.params();
    let weight = call.weight;
    let [w, bias, x, routes, y] = call.operands();
    let (n_tokens, n_used, n_out) = (params.n_tokens as usize, params.n_used as usize, params.n_out as usize);
    let (dim, n_blocks) = (params.dim as usize, params.blocks as usize);
    let n_slots = n_tokens * n_used;
    let x = activations(&x.get::<f32>()[..n_slots * dim], &[], [dim, n_blocks], 0, 0.0);
    let routes = &routes.get::<u32>().as_chunks().0[..n_slots];
    let y = &mut y.get_mut::<f32>()[..n_tokens * n_out];
    // Products by slot first, so that a token's are added up in the order of its experts.
    let mut products = vec![0.0; n_slots * n_out];
    for (expert, slots) in slots_by_expert(routes, params.n_experts as usize) {
        let rows = gather(&x, n_blocks, slots.iter().copied());
        let first_row = expert * n_out;
        let product = Product {
            invariant: false,
            w: w.get(),
            w_scales: params.w_scales,
            first_row,
            x: &rows,
            n_tokens: slots.len(),
            n_out,
            n_blocks,
        };
        let sums = product.plain(weight);
        for (slot, sums) in slots.into_iter().zip(sums.chunks_exact(n_out)) {
            let to = &mut products[slot * n_out..][..n_out];
            to.copy_from_slice(sums);
            if params.flags & BIAS != 0 {
                to.iter_mut().zip(&bias.get::<f32>()[first_row..]).for_each(|(sum, bias)| *sum += bias);
            }
        }
    }
    for (t, y) in y.chunks_exact_mut(n_out).enumerate() {
        if params.flags & ACCUMULATE == 0 {
            y.fill(0.0);
        }
        for slot in t * n_used..(t + 1) * n_used {
            let weight = f32::from_bits(routes[slot][1]);
            y.iter_mut().zip(&products[slot * n_out..]).for_each(|(y, product)| *y += weight * product);
        }
    }
}
