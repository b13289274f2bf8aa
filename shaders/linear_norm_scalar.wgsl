// `linear_norm` with 16 x 8 outputs in the registers of each invocation, as in `matmul_scalar`, and with one barrier: a
// workgroup has an invocation for each eight columns, and then one normalises a row alone, as in `layer_norm_scalar`.
//
// Dispatch (ceil(M / 16) folded over x and y).
#kernel linear_norm scalar
#weights
#import linear_alone
#import deviations
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [N]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [M, K], K a multiple of 4
@group(0) @binding(4) var<storage, read> weight: array<vec4<f32>>;  // [N], N a multiple of 4
@group(0) @binding(5) var<storage, read> shift: array<vec4<f32>>;   // [N]; any buffer where flags lack SHIFT
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [M, N]

override WG: u32 = 128u; // N / 8, rounded up
const BIAS: u32 = 1u;
const ACCUMULATE: u32 = 2u;
const SHIFT: u32 = 32u; // add `shift` behind the normalisation

fn put_all(m: u32, n: u32, acc: mat4x4<f32>) {
    if (n >= params.n_out) {
        return;
    }
    var bias = vec4<f32>();
    if ((params.flags & BIAS) != 0u) {
        bias = vector[n / 4u];
    }
    for (var i = 0u; i < 4u; i++) {
        if (m + i < params.n_tokens) {
            let at = (m + i) * (params.n_out / 4u) + n / 4u;
            var value = acc[i] + bias;
            if ((params.flags & ACCUMULATE) != 0u) {
                value += y[at];
            }
            y[at] = value;
        }
    }
}

fn quad_at(i: u32) -> vec4<f32> {
    return y[i];
}

fn normalise(m: u32) {
    let quads = params.n_out / 4u;
    let row = m * quads;
    // Sums of differences from the row's first element: a mean far from zero then costs no digits.
    let first = y[row].x;
    let mean = deviations(row, quads, first) / f32(params.n_out); // relative to `first`
    let variance = squared_deviations(row, quads, first, mean) / f32(params.n_out);
    let scale = 1.0 / sqrt(variance + params.eps);
    for (var i = 0u; i < quads; i++) {
        var value = (y[row + i] - first - mean) * scale * weight[i];
        if ((params.flags & SHIFT) != 0u) {
            value += shift[i];
        }
        y[row + i] = value;
    }
}

@compute @workgroup_size(WG)
fn linear_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let m = (params.first_group + group_index(group, grid)) * 16u;
    if (m >= params.n_tokens) {
        return;
    }
    put_products(m, local * 8u);
    storageBarrier();
    for (var row = local; row < min(params.n_tokens - m, 16u); row += WG) {
        normalise(m + row);
    }
}
