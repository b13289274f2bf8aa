// Layer normalisation, one token at a time:
//
//     y[t, c] = weight[c] * (x[t, c] - mean) / sqrt(variance + eps) (+ bias[c])
//
// The variance is the mean of squared deviations, taken in a second pass: the difference of mean squares would cancel.
// Dispatch (T folded over x and y), one workgroup per token. Ba et al. 2016, arXiv:1607.06450.
#import reduce t0=reduce t2=reduce_subgroup
#import fold

struct NormParams { n_tokens: u32, dim: u32, eps: f32, flags: u32 } // T, C
@group(0) @binding(0) var<uniform> params: NormParams;
@group(0) @binding(1) var<storage, read> x: array<f32>;       // [T, C]
@group(0) @binding(2) var<storage, read> weight: array<f32>;  // [C]
@group(0) @binding(3) var<storage, read> bias: array<f32>;    // [C]; any buffer where flags lack BIAS
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // [T, C]

const WG: u32 = 256u;
const BIAS: u32 = 1u;

@compute @workgroup_size(WG)
fn layer_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid);
    if (token >= params.n_tokens) {
        return;
    }
    let row = token * params.dim;
    // Sums of differences from the row's first element: a mean far from zero then costs no digits.
    let first = x[row];
    var sum = 0.0;
    for (var c = local; c < params.dim; c += WG) {
        sum += x[row + c] - first;
    }
    let mean = workgroup_sum(local, sum) / f32(params.dim); // relative to `first`
    var sum_sq = 0.0;
    for (var c = local; c < params.dim; c += WG) {
        let deviation = x[row + c] - first - mean;
        sum_sq += deviation * deviation;
    }
    let scale = 1.0 / sqrt(workgroup_sum(local, sum_sq) / f32(params.dim) + params.eps);
    for (var c = local; c < params.dim; c += WG) {
        var value = (x[row + c] - first - mean) * scale * weight[c];
        if ((params.flags & BIAS) != 0u) {
            value += bias[c];
        }
        y[row + c] = value;
    }
}
