// The second product of each token's experts, weighted and added up:
//
//     y[t, n] = (y[t, n] +) sum over s of weight[t, s] * (w[e, n] . x[t, s] (+ bias[e, n])),   e = routes[t, s]
//
// over the experts that w has. LANES invocations share four rows of each expert. Dispatch (groups of rows folded over x and y, T in z).
#weights
#import lanes t0=row_lanes t2=row_lanes_subgroup scalar=row_lanes_alone
#import fold

struct Params {
    n_used: u32, n_out: u32, dim: u32, blocks: u32, // K, C, F
    w_scales: u32, flags: u32, first_group: u32, n_tokens: u32,
    first_expert: u32, n_experts: u32, _pad0: u32, _pad1: u32, // those that w has
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [E C, F], packed
@group(0) @binding(2) var<storage, read> bias: array<f32>;          // of all experts, [E C]; any buffer without BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, K, F], F a multiple of 4
@group(0) @binding(4) var<storage, read> routes: array<vec2<u32>>;  // [T, K] of (expert, bits of its weight)
@group(0) @binding(5) var<storage, read_write> y: array<f32>;       // [T, C]

override WG: u32 = 64u; // 128 with one column
const NORM: bool = false; // x is taken as it is
const BIAS: u32 = 1u;
const ACCUMULATE: u32 = 2u; // add to what y holds

fn weighed(value: vec4<f32>, quad: u32) -> vec4<f32> {
    return value;
}

@compute @workgroup_size(WG)
fn expert_down(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = ((params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES) * 4u;
    let t = group.z;
    // Rows past the end repeat the last one.
    let rows = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n_out - 1u));
    var squares = 0.0;
    var sum = vec4<f32>();
    for (var s = 0u; s < params.n_used; s++) {
        let slot = t * params.n_used + s;
        let weight = bitcast<f32>(routes[slot].y);
        // Experts before the first are far past the end.
        let of_w = routes[slot].x - params.first_expert;
        if (of_w >= params.n_experts) {
            continue;
        }
        sum += weight * rows_part(local, of_w * params.n_out + rows, slot, &squares);
        if ((params.flags & BIAS) != 0u && local % LANES == 0u) {
            let at = routes[slot].x * params.n_out + rows;
            sum += weight * vec4<f32>(bias[at.x], bias[at.y], bias[at.z], bias[at.w]);
        }
    }
    lanes_barrier();
    sum = lanes_sum(local, sum);
    if (local % LANES == 0u) {
        for (var i = 0u; i < 4u && n + i < params.n_out; i++) {
            let at = t * params.n_out + n + i;
            if ((params.flags & ACCUMULATE) != 0u) {
                y[at] += sum[i];
            } else {
                y[at] = sum[i];
            }
        }
    }
}
