// `gate_up` by the experts of each token:
//
//     y[t, s, f] = act(gate[e, f] . x[t] (+ bias)) * (up[e, f] . x[t] (+ bias)),   e = routes[t, s]
//
// with NORM preceded by `rms_norm`; see `shared/four_rows.wgsl`. w has the rows of some experts, of each its gates and then
// its ups, or with APART those of one kind alone: first the gates, whose products wait in y for those of the ups. LANES
// invocations work four rows of w. Dispatch (groups of rows folded over x and y, T K in z).
#weights
#import lanes t0=row_lanes t2=row_lanes_subgroup scalar=row_lanes_alone
#import four_rows
#import gated
#import fold

struct Params {
    n_used: u32, ffn_dim: u32, dim: u32, blocks: u32, // K, F, C
    w_scales: u32, eps: f32, flags: u32, first_group: u32,
    first_expert: u32, n_experts: u32, n_tokens: u32, _pad: u32, // those that w has
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [2 E F, C] or [E F, C], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias of all experts, [2 E F], or with NORM norm weight, [C]
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, C], C a multiple of 4
@group(0) @binding(4) var<storage, read> routes: array<vec2<u32>>;  // [T, K] of (expert, bits of its weight)
@group(0) @binding(5) var<storage, read_write> y: array<f32>;       // [T, K, F]

override WG: u32 = 64u; // 128 with one column
const BIAS: u32 = 1u; // `vector` is a bias to add

override APART: bool = false; // w has rows of one kind
override UPS: bool = false;   // with APART, ups

fn bias(expert: u32, row: u32) -> f32 {
    if ((params.flags & BIAS) == 0u) {
        return 0.0;
    }
    let at = expert * 2u * params.ffn_dim + row;
    return vector[at / 4u][at % 4u];
}

@compute @workgroup_size(WG)
fn expert_gate_up(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let slot = group.z;
    let expert = routes[slot].x;
    // Experts before the first are far past the end.
    let of_w = expert - params.first_expert;
    if (of_w >= params.n_experts) {
        return;
    }
    let token = slot / params.n_used;
    let four = (params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES;
    let first = slot * params.ffn_dim;
    // Rows past the end repeat the last one.
    if (APART) {
        let f = four * 4u;
        let rows = min(vec4<u32>(f, f + 1u, f + 2u, f + 3u), vec4<u32>(params.ffn_dim - 1u));
        let sum = four_rows(local, of_w * params.ffn_dim + rows, token);
        if (local % LANES == 0u) {
            for (var i = 0u; i < 4u && f + i < params.ffn_dim; i++) {
                if (UPS) {
                    y[first + f + i] = gated(y[first + f + i], sum[i] + bias(expert, params.ffn_dim + f + i));
                } else {
                    y[first + f + i] = sum[i] + bias(expert, f + i);
                }
            }
        }
    } else {
        let f = four * 2u;
        let gates = min(vec2<u32>(f, f + 1u), vec2<u32>(params.ffn_dim - 1u));
        let rows = vec4<u32>(gates, gates + params.ffn_dim);
        let sum = four_rows(local, of_w * 2u * params.ffn_dim + rows, token);
        if (local % LANES == 0u) {
            for (var i = 0u; i < 2u && f + i < params.ffn_dim; i++) {
                let gate = sum[i] + bias(expert, f + i);
                y[first + f + i] = gated(gate, sum[i + 2u] + bias(expert, params.ffn_dim + f + i));
            }
        }
    }
}
