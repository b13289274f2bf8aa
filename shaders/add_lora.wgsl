// Adds what a LoRA adapter contributes to the product of many tokens, which is in y:
//
//     y[t, n] += sum over r of inner[t, r] * b[n, r]
//
// where r runs over the columns of inner that belong to row n of b (Hu et al. 2021, arXiv:2106.09685). An invocation has one n and
// TOKENS tokens, so that it reads a row of b once for all of them; neighbours have neighbouring n.
// Dispatch (outputs of TOKENS tokens folded over x and y).
#import members
#import fold

struct Params {
    n_tokens: u32, n_out: u32, y_stride: u32, rank: u32, // T, N, R / 4
    members: vec4<u32>, // see `shared/members.wgsl`
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> inner: array<vec4<f32>>;  // [T, members R], R a multiple of 4
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;  // [N, R]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;  // [T, y_stride]

const WG: u32 = 256u;
const TOKENS: u32 = 4u;

@compute @workgroup_size(WG)
fn add_lora(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    let first = id / params.n_out * TOKENS;
    let n = id % params.n_out;
    if (first >= params.n_tokens) {
        return;
    }
    // Tokens past the end repeat the last one.
    let tokens = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(params.n_tokens - 1u));
    let of_inner = tokens * params.members.w + member_of(vec4<u32>(n)) * params.rank;
    let of_b = n * params.rank;
    var sum = vec4<f32>();
    for (var r = 0u; r < params.rank; r++) {
        let quad = b[of_b + r];
        sum += vec4<f32>(
            dot(quad, inner[of_inner.x + r]),
            dot(quad, inner[of_inner.y + r]),
            dot(quad, inner[of_inner.z + r]),
            dot(quad, inner[of_inner.w + r]),
        );
    }
    for (var i = 0u; i < TOKENS && first + i < params.n_tokens; i++) {
        y[(first + i) * params.y_stride + n] += sum[i];
    }
}
