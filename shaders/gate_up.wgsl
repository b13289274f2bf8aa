// The gated feed-forward's first half for one token or a few, in one go:
//
//     y[t, f] = act(w[f] . x[t]) * (w[F + f] . x[t])
//
// which is `matvec` followed by `swiglu` or `geglu`, with NORM also preceded by `rms_norm`; see `shared/four_rows.wgsl`. LANES
// invocations work two outputs, that is four rows of w. Dispatch (groups of outputs folded over x and y, T in z).
#weights
#import lanes t0=lanes t2=lanes_subgroup scalar=lanes_alone
#import four_rows
#import gated
#import fold

struct Params { n_tokens: u32, ffn_dim: u32, dim: u32, blocks: u32, w_scales: u32, eps: f32, flags: u32, first_group: u32 } // T, F, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [2 F, K], packed: gate, then up
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // [K], norm weight; any buffer without NORM
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, K], K a multiple of 4
@group(0) @binding(4) var<storage, read_write> y: array<f32>;       // [T, F]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn gate_up(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let f = ((params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES) * 2u;
    let gates = min(vec2<u32>(f, f + 1u), vec2<u32>(params.ffn_dim - 1u));
    let sum = four_rows(local, vec4<u32>(gates, gates + params.ffn_dim), group.z);
    if (local % LANES == 0u) {
        let at = group.z * params.ffn_dim + f;
        if (f < params.ffn_dim) {
            y[at] = gated(sum.x, sum.z);
        }
        if (f + 1u < params.ffn_dim) {
            y[at + 1u] = gated(sum.y, sum.w);
        }
    }
}
