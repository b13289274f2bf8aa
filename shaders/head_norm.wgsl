// Root-mean-square normalisation of packed queries and keys, a head at a time, in place; values stay:
//
//     x[t, h, d] = weight[h is a key, d] * x[t, h, d] / sqrt(mean over d of x[t, h, d]^2 + eps)
//
// Dispatch (heads of all tokens, 16 to a workgroup, folded over x and y), 16 invocations to a head.
// Dehghani et al. 2023, arXiv:2302.05442.
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_queries: u32, head_quads: u32, // T, H + Hkv, H, D / 4
    stride_quads: u32, eps: f32, _pad0: u32, _pad1: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weight: array<vec4<f32>>;    // [2, D]: of queries, of keys
@group(0) @binding(2) var<storage, read_write> qkv: array<vec4<f32>>; // [T, stride]

const WG: u32 = 256u;
const LANES: u32 = 16u; // of a head

var<workgroup> sums: array<f32, WG>;

@compute @workgroup_size(WG)
fn head_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * (WG / LANES) + local / LANES; // over tokens and heads
    let is_there = id < params.n_tokens * params.n_heads;
    let quads = select(0u, params.head_quads, is_there);
    let head = id % params.n_heads;
    let start = id / params.n_heads * params.stride_quads + head * params.head_quads;
    var sum_sq = 0.0;
    for (var i = local % LANES; i < quads; i += LANES) {
        sum_sq += dot(qkv[start + i], qkv[start + i]);
    }
    sums[local] = sum_sq;
    workgroupBarrier();
    // All lanes of a head add up in the same order.
    var total = 0.0;
    for (var lane = 0u; lane < LANES; lane++) {
        total += sums[local / LANES * LANES + lane];
    }
    let scale = 1.0 / sqrt(total / f32(4u * params.head_quads) + params.eps);
    let of_head = select(0u, params.head_quads, head >= params.n_queries);
    for (var i = local % LANES; i < quads; i += LANES) {
        qkv[start + i] = qkv[start + i] * scale * weight[of_head + i];
    }
}
