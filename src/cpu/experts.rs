//! `route`, `expert_gate_up`, `expert_down` and those for many tokens: mixtures of experts. An expert's products are of all
//! its tokens at once.

use super::Call;
use super::block::Block;
use super::linear::{Product, ProductMode, activations, gated_by};
use crate::shaders::constants::{expert_down, expert_gate_up, expert_rows, expert_sum, route};
use crate::shaders::overrides;
use crate::shaders::params::{
    ExpertDownParams, ExpertGateUpParams, ExpertMatmulParams, ExpertSumParams, ExpertTilesParams, RouteParams,
};
use crate::sort;

pub(crate) fn route(mut call: Call<'_>) {
    let params: RouteParams = call.params();
    let [logits, bias, factors, routes] = call.operands();
    let (n_experts, n_used) = (params.n_experts as usize, params.n_used as usize);
    let n_slots = n_used + params.n_shared as usize;
    let is_gated = params.flags & route::GATED != 0;
    let (logits, bias, factors) = (logits.get::<f32>(), bias.get::<f32>(), factors.get::<f32>());
    // Memory is padded, by less than a pair.
    let rows = routes.get_mut::<u32>().as_chunks_mut::<2>().0.chunks_exact_mut(n_slots);
    let logits = logits.chunks_exact(n_experts + usize::from(is_gated));
    let sigmoid = |logit: f32| 1.0 / (1.0 + (-logit).exp());
    for (logits, routes) in logits.zip(rows).take(params.n_tokens as usize) {
        let (logits, gate) = logits.split_at(n_experts);
        let scores: Vec<f32> = if params.flags & route::SIGMOID != 0 {
            logits.iter().map(|&logit| sigmoid(logit)).collect()
        } else {
            let highest = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = logits.iter().map(|&logit| (logit - highest).exp()).sum();
            logits.iter().map(|&logit| (logit - highest).exp() / sum).collect()
        };
        let chosen_by = |e: usize| scores[e] + if params.flags & route::BIAS != 0 { bias[e] } else { 0.0 };
        // Among equals the lowest number comes first.
        let mut order = sort::order(n_experts, &|a, b| chosen_by(b).total_cmp(&chosen_by(a)));
        if params.n_groups > 1 {
            let size = n_experts / params.n_groups as usize;
            let score = |group: usize| {
                let mut best = order.iter().filter(|&&e| e / size == group).map(|&e| chosen_by(e));
                let first = best.next().unwrap_or(f32::MIN);
                first + if params.flags & route::TOP_TWO != 0 { best.next().unwrap_or(0.0) } else { 0.0 }
            };
            let scores: Vec<f32> = (0..params.n_groups as usize).map(score).collect();
            let best = sort::order(scores.len(), &|a, b| scores[b].total_cmp(&scores[a]));
            order.retain(|&e| best[..params.n_groups_used as usize].contains(&(e / size)));
        }
        let total: f32 = order[..n_used].iter().map(|&e| scores[e]).sum();
        let share = if params.flags & route::SHARES != 0 { params.scale / total } else { params.scale };
        let (chosen, shared) = routes.split_at_mut(n_used);
        for (route, &e) in chosen.iter_mut().zip(&order) {
            let factor = if params.flags & route::FACTORS != 0 { factors[e] } else { 1.0 };
            *route = [e as u32, (share * scores[e] * factor).to_bits()];
        }
        let weight = gate.first().map_or(1.0, |&logit| sigmoid(logit));
        for (route, e) in shared.iter_mut().zip(params.n_experts..) {
            *route = [e, weight.to_bits()];
        }
    }
}

/// The slots of each expert that has some, of `n` from `first` on; a slot is a token's place for one of its experts.
fn slots_by_expert(routes: &[[u32; 2]], first: u32, n: u32) -> impl Iterator<Item = (usize, Vec<usize>)> {
    let mut slots = vec![Vec::new(); n as usize];
    for (slot, &[expert, _]) in routes.iter().enumerate() {
        let of_expert = expert.checked_sub(first).and_then(|expert| slots.get_mut(expert as usize));
        if let Some(of_expert) = of_expert {
            of_expert.push(slot);
        }
    }
    slots.into_iter().enumerate().filter(|(_, slots)| !slots.is_empty())
}

/// Rows of blocks one after the other.
fn gather(x: &[Block], n_blocks: usize, rows: impl Iterator<Item = usize>) -> Vec<Block> {
    rows.flat_map(|row| &x[row * n_blocks..][..n_blocks]).copied().collect()
}

pub(crate) fn expert_gate_up(mut call: Call<'_>) {
    let params: ExpertGateUpParams = call.params();
    let (has_norm, gate) = (call.is(overrides::NORM), call.gate());
    let (is_apart, is_ups) = (call.is(overrides::APART), call.is(overrides::UPS));
    let (weight, form) = (call.weight, ProductMode::of(false, call.rounds, call.batch_invariance));
    let [w, vector, x, routes, y] = call.operands();
    let (n_tokens, n_used, ffn_dim) = (params.n_tokens as usize, params.n_used as usize, params.ffn_dim as usize);
    let (dim, n_blocks) = (params.dim as usize, params.blocks as usize);
    let norm = has_norm.then(|| (vector.get(), params.eps));
    let x = activations(&x.get::<f32>()[..n_tokens * dim], [dim, n_blocks], norm);
    let routes = &routes.get::<u32>().as_chunks().0[..n_tokens * n_used];
    let bias = (params.flags & expert_gate_up::BIAS != 0).then(|| vector.get::<f32>());
    let y = y.get_mut::<f32>();
    for (of_w, slots) in slots_by_expert(routes, params.first_expert, params.n_experts) {
        let rows = gather(&x, n_blocks, slots.iter().map(|slot| slot / n_used));
        let n_out = if is_apart { ffn_dim } else { 2 * ffn_dim };
        let product = Product {
            form,
            w: w.get(),
            w_scales: params.w_scales,
            panels: None,
            first_row: of_w * n_out,
            x: &rows,
            n_tokens: slots.len(),
            n_out,
            n_blocks,
        };
        let mut sums = product.plain(weight);
        if let Some(bias) = bias {
            let expert = params.first_expert as usize + of_w;
            let of_rows = &bias[2 * expert * ffn_dim + if is_ups { ffn_dim } else { 0 }..][..n_out];
            for row in sums.chunks_exact_mut(n_out) {
                row.iter_mut().zip(of_rows).for_each(|(sum, bias)| *sum += bias);
            }
        }
        for (slot, sums) in slots.into_iter().zip(sums.chunks_exact(n_out)) {
            let y = &mut y[slot * ffn_dim..][..ffn_dim];
            match (is_apart, is_ups) {
                (true, false) => y.copy_from_slice(sums),
                (true, true) => {
                    let gates = y.to_vec();
                    gated_by(gate, &gates, sums, y);
                }
                (false, _) => gated_by(gate, &sums[..ffn_dim], &sums[ffn_dim..], y),
            }
        }
    }
}

pub(crate) fn expert_down(mut call: Call<'_>) {
    let params: ExpertDownParams = call.params();
    let (weight, form) = (call.weight, ProductMode::of(false, call.rounds, call.batch_invariance));
    let [w, bias, x, routes, y] = call.operands();
    let (n_tokens, n_used, n_out) = (params.n_tokens as usize, params.n_used as usize, params.n_out as usize);
    let (dim, n_blocks) = (params.dim as usize, params.blocks as usize);
    let n_slots = n_tokens * n_used;
    let x = activations(&x.get::<f32>()[..n_slots * dim], [dim, n_blocks], None);
    let routes = &routes.get::<u32>().as_chunks().0[..n_slots];
    let y = &mut y.get_mut::<f32>()[..n_tokens * n_out];
    // Products by slot first, so that a token's are added up in the order of its experts.
    let mut products = vec![0.0; n_slots * n_out];
    for (of_w, slots) in slots_by_expert(routes, params.first_expert, params.n_experts) {
        let rows = gather(&x, n_blocks, slots.iter().copied());
        let product = Product {
            form,
            w: w.get(),
            w_scales: params.w_scales,
            panels: None,
            first_row: of_w * n_out,
            x: &rows,
            n_tokens: slots.len(),
            n_out,
            n_blocks,
        };
        let sums = product.plain(weight);
        for (slot, sums) in slots.into_iter().zip(sums.chunks_exact(n_out)) {
            let to = &mut products[slot * n_out..][..n_out];
            to.copy_from_slice(sums);
            if params.flags & expert_down::BIAS != 0 {
                let expert = params.first_expert as usize + of_w;
                to.iter_mut().zip(&bias.get::<f32>()[expert * n_out..]).for_each(|(sum, bias)| *sum += bias);
            }
        }
    }
    add_up(y, &products, routes, [n_used, n_out], params.flags & expert_down::ACCUMULATE != 0);
}

/// `y = (y +)` the sum of a token's slots by their weights.
fn add_up(y: &mut [f32], x: &[f32], routes: &[[u32; 2]], [n_used, dim]: [usize; 2], adds: bool) {
    for (t, y) in y.chunks_exact_mut(dim).enumerate() {
        if !adds {
            y.fill(0.0);
        }
        for slot in t * n_used..(t + 1) * n_used {
            let weight = f32::from_bits(routes[slot][1]);
            y.iter_mut().zip(&x[slot * dim..]).for_each(|(y, x)| *y += weight * x);
        }
    }
}

pub(crate) fn expert_sum(mut call: Call<'_>) {
    let params: ExpertSumParams = call.params();
    let [x, routes, y] = call.operands();
    let (n_used, dim) = (params.n_used as usize, params.dim as usize);
    let n_tokens = params.n_tokens as usize;
    let y = &mut y.get_mut::<f32>()[..n_tokens * dim];
    let adds = params.flags & expert_sum::ACCUMULATE != 0;
    add_up(y, x.get(), routes.get::<u32>().as_chunks().0, [n_used, dim], adds);
}

pub(crate) fn expert_tiles(mut call: Call<'_>) {
    let params: ExpertTilesParams = call.params();
    let [routes, slots, tiles] = call.operands();
    let routes = &routes.get::<u32>().as_chunks().0[..params.n_slots as usize];
    let (slots, tiles) = (slots.get_mut::<u32>(), tiles.get_mut::<u32>().as_chunks_mut::<4>().0);
    tiles.fill([0; 4]);
    let (mut n_placed, mut n_tiles) = (0, 0);
    for (expert, of_expert) in slots_by_expert(routes, 0, params.n_experts) {
        for of_tile in of_expert.chunks(params.tile_rows as usize) {
            tiles[n_tiles] = [expert as u32, n_placed as u32, of_tile.len() as u32, 0];
            n_tiles += 1;
            for &slot in of_tile {
                slots[n_placed] = slot as u32;
                n_placed += 1;
            }
        }
    }
}

pub(crate) fn expert_matmul(mut call: Call<'_>) {
    let params: ExpertMatmulParams = call.params();
    let (weight, form) = (call.weight, ProductMode::of(false, call.rounds, call.batch_invariance));
    let [w, bias, x, slots, tiles, y] = call.operands();
    let (n_used, n_out) = (params.n_used as usize, params.n_out as usize);
    let (dim, n_blocks) = (params.dim as usize, params.blocks as usize);
    let (start, stride) = (params.y_start as usize, params.y_stride as usize);
    let x = activations(x.get::<f32>(), [dim, n_blocks], None);
    let y = y.get_mut::<f32>();
    let tiles = &tiles.get::<u32>().as_chunks::<4>().0[..params.n_tiles as usize];
    for &[expert, first, n, _] in tiles {
        let of_w = expert.wrapping_sub(params.first_expert);
        if n == 0 || of_w >= params.n_experts {
            continue;
        }
        let slots = &slots.get::<u32>()[first as usize..][..n as usize];
        let rows = gather(&x, n_blocks, slots.iter().map(|&slot| slot as usize / n_used));
        let product = Product {
            form,
            w: w.get(),
            w_scales: params.w_scales,
            panels: None,
            first_row: of_w as usize * n_out,
            x: &rows,
            n_tokens: n as usize,
            n_out,
            n_blocks,
        };
        let sums = product.plain(weight);
        let of_expert = &bias.get::<f32>()
            [if params.flags & expert_rows::BIAS != 0 { expert as usize * stride + start } else { 0 }..];
        for (&slot, sums) in slots.iter().zip(sums.chunks_exact(n_out)) {
            let y = &mut y[slot as usize * stride + start..][..n_out];
            y.copy_from_slice(sums);
            if params.flags & expert_rows::BIAS != 0 {
                y.iter_mut().zip(of_expert).for_each(|(y, bias)| *y += bias);
            }
        }
    }
}
