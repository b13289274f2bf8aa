// Root-mean-square normalisation, one token at a time:
//
//     y[t, c] = ((y[t, c] +) weight[c] * x[t, c] / sqrt(mean over c of x[t, c]^2 + eps)) (* factor)
//
// Dispatch (T folded over x and y), one workgroup per token. Zhang & Sennrich 2019, arXiv:1910.07467.
#import reduce t0=reduce t2=reduce_subgroup
#import fold

struct RmsNormParams { n_tokens: u32, dim: u32, eps: f32, flags: u32, stride: u32, weight_rows: u32, _pad0: u32, _pad1: u32 } // T, C
@group(0) @binding(0) var<uniform> params: RmsNormParams;
@group(0) @binding(1) var<storage, read> x: array<f32>;       // [T, stride], of which C columns count
@group(0) @binding(2) var<storage, read> weight: array<f32>;  // [weight_rows, C], in turns
@group(0) @binding(3) var<storage, read> factor: array<f32>;  // [1]; any buffer without FACTOR
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // [T, C]

const WG: u32 = 256u;
const ACCUMULATE: u32 = 2u; // add to what y holds
const FACTOR: u32 = 4u;     // multiply the sum

@compute @workgroup_size(WG)
fn rms_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid);
    if (token >= params.n_tokens) {
        return;
    }
    let row = token * params.dim; // first element of this token
    let x_row = token * params.stride;
    let weights = token % params.weight_rows * params.dim;
    // Each invocation squares every WG-th element of the row.
    var sum_sq = 0.0;
    for (var c = local; c < params.dim; c += WG) {
        sum_sq += x[x_row + c] * x[x_row + c];
    }
    let scale = 1.0 / sqrt(workgroup_sum(local, sum_sq) / f32(params.dim) + params.eps);
    var gain = 1.0;
    if ((params.flags & FACTOR) != 0u) {
        gain = factor[0];
    }
    for (var c = local; c < params.dim; c += WG) {
        var value = x[x_row + c] * scale * weight[weights + c];
        if ((params.flags & ACCUMULATE) != 0u) {
            value += y[row + c];
        }
        y[row + c] = value * gain;
    }
}
