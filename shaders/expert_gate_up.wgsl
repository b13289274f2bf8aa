// `gate_up` by the experts of each token:
//
//     y[t, s, f] = act(gate[e, f] . x[t] (+ bias)) * (up[e, f] . x[t] (+ bias)),   e = routes[t, s]
//
// with NORM preceded by `rms_norm`; see `shared/four_rows.wgsl`. LANES invocations work two outputs, that is four rows
// of w. Dispatch (groups of outputs folded over x and y, T K in z).
#weights
#import lanes t0=lanes t2=lanes_subgroup scalar=lanes_alone
#import four_rows
#import gated
#import fold

struct Params {
    n_used: u32, ffn_dim: u32, dim: u32, blocks: u32, // K, F, C
    w_scales: u32, eps: f32, flags: u32, first_group: u32,
    expert_rows: u32, up_row: u32, n_tokens: u32, n_experts: u32, // rows of w from an expert to the next, from a gate to its up
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [2 E F, C], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [2 E F], or with NORM norm weight, [C]
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, C], C a multiple of 4
@group(0) @binding(4) var<storage, read> routes: array<vec2<u32>>;  // [T, K] of (expert, bits of its weight)
@group(0) @binding(5) var<storage, read_write> y: array<f32>;       // [T, K, F]

const WG: u32 = 64u;
const BIAS: u32 = 1u; // `vector` is a bias to add

fn bias(row: u32) -> f32 {
    if ((params.flags & BIAS) == 0u) {
        return 0.0;
    }
    return vector[row / 4u][row % 4u];
}

@compute @workgroup_size(WG)
fn expert_gate_up(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let f = ((params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES) * 2u;
    let first = routes[group.z].x * params.expert_rows;
    let gates = first + min(vec2<u32>(f, f + 1u), vec2<u32>(params.ffn_dim - 1u));
    let ups = gates + params.up_row;
    let sum = four_rows(local, vec4<u32>(gates, ups), group.z / params.n_used);
    if (local % LANES == 0u) {
        let at = group.z * params.ffn_dim + f;
        if (f < params.ffn_dim) {
            y[at] = gated(sum.x + bias(gates.x), sum.z + bias(ups.x));
        }
        if (f + 1u < params.ffn_dim) {
            y[at + 1u] = gated(sum.y + bias(gates.y), sum.w + bias(ups.y));
        }
    }
}
