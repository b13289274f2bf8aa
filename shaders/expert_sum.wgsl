// The sum of what a token's experts make, by their weights:
//
//     y[t, n] = (y[t, n] +) sum over s of weight[t, s] * x[t, s, n]
//
// Dispatch (elements folded over x and y).
#import fold

struct Params { n_tokens: u32, n_used: u32, dim: u32, flags: u32 } // T, K, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;            // [T, K, C]
@group(0) @binding(2) var<storage, read> routes: array<vec2<u32>>; // [T, K] of (expert, bits of its weight)
@group(0) @binding(3) var<storage, read_write> y: array<f32>;      // [T, C]

const WG: u32 = 256u;
const ACCUMULATE: u32 = 2u; // add to what y holds

@compute @workgroup_size(WG)
fn expert_sum(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id >= params.n_tokens * params.dim) {
        return;
    }
    let first = id / params.dim * params.n_used;
    var sum = 0.0;
    if ((params.flags & ACCUMULATE) != 0u) {
        sum = y[id];
    }
    for (var s = 0u; s < params.n_used; s++) {
        sum += bitcast<f32>(routes[first + s].y) * x[(first + s) * params.dim + id % params.dim];
    }
    y[id] = sum;
}
