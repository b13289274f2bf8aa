// `rms_norm` without workgroup memory or barriers: one invocation takes a token alone, for software adapters. Rows of whole
// quads are loaded by four; of others each element is loaded by itself, because they start within a quad.
//
// Dispatch (ceil(T / 8) folded over x and y).
#kernel rms_norm scalar
#import fold

struct RmsNormParams { n_tokens: u32, dim: u32, eps: f32, flags: u32, stride: u32, weight_rows: u32, _pad0: u32, _pad1: u32 } // T, C
@group(0) @binding(0) var<uniform> params: RmsNormParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;       // [T, stride], of which C columns count
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;  // [weight_rows, C], in turns
@group(0) @binding(3) var<storage, read> factor: array<f32>;        // [1]; any buffer without FACTOR
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>; // [T, C]

const WG: u32 = 8u;
const ACCUMULATE: u32 = 2u; // add to what y holds
const FACTOR: u32 = 4u;     // multiply the sum
const RUN: u32 = 64u; // summed on its own first: adding elements one by one to a long sum would lose digits

@compute @workgroup_size(WG)
fn rms_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid) * WG + local;
    if (token >= params.n_tokens) {
        return;
    }
    let row = token * params.dim;
    let x_row = token * params.stride;
    let weights = token % params.weight_rows * params.dim;
    let quads = select(0u, params.dim / 4u, params.dim % 4u == 0u && params.stride % 4u == 0u);
    let quad = row / 4u;
    let x_quad = x_row / 4u;
    var sums = vec4<f32>();
    for (var start = 0u; start < quads; start += RUN) {
        var part = vec4<f32>();
        for (var i = start; i < min(start + RUN, quads); i++) {
            part += x[x_quad + i] * x[x_quad + i];
        }
        sums += part;
    }
    var sum_sq = (sums.x + sums.y) + (sums.z + sums.w);
    for (var start = quads * 4u; start < params.dim; start += RUN) {
        var part = 0.0;
        for (var c = x_row + start; c < x_row + min(start + RUN, params.dim); c++) {
            part += x[c / 4u][c % 4u] * x[c / 4u][c % 4u];
        }
        sum_sq += part;
    }
    let gain = select(1.0, factor[0], (params.flags & FACTOR) != 0u);
    let scale = gain / sqrt(sum_sq / f32(params.dim) + params.eps);
    // Two loops, one of which has no turns: software adapters load on both sides of a branch.
    let adds = (params.flags & ACCUMULATE) != 0u;
    let kept = select(0u, quads, adds);
    for (var i = 0u; i < kept; i++) {
        y[quad + i] = x[x_quad + i] * scale * weight[weights / 4u + i] + y[quad + i] * gain;
    }
    for (var i = kept; i < quads; i++) {
        y[quad + i] = x[x_quad + i] * scale * weight[weights / 4u + i];
    }
    for (var c = quads * 4u; c < params.dim; c++) {
        let at = row + c;
        let normed = x[(x_row + c) / 4u][(x_row + c) % 4u] * scale * weight[(weights + c) / 4u][(weights + c) % 4u];
        y[at / 4u][at % 4u] = normed + select(0.0, y[at / 4u][at % 4u] * gain, adds);
    }
}
