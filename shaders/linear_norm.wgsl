// A product added to the residual stream, and the layer normalisation behind it, in one go:
//
//     s[m] = (y[m] +) (bias +) x[m] w^T
//     y[m, n] = weight[n] * (s[m, n] - mean of s[m]) / sqrt(variance of s[m] + eps) (+ shift[n])
//
// which is `matmul` followed by `layer_norm`. A workgroup takes ROWS rows of y and all columns, COLS of them at a time;
// rows wait in y until all of their columns are there. Each row is summed in one order, whatever rows are beside it.
// Dispatch (ceil(M / ROWS) folded over x and y).
#import tile
#weights
#import linear_tile
#import tile_operands
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [N]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [M, K]
@group(0) @binding(4) var<storage, read> weight: array<f32>;        // [N]
@group(0) @binding(5) var<storage, read> shift: array<f32>;         // [N]; any buffer where flags lack SHIFT
@group(0) @binding(6) var<storage, read_write> y: array<f32>;       // [M, N]

const SHIFT: u32 = 32u; // add `shift` behind the normalisation
const LANES: u32 = 16u; // invocations that share a row

// The sum over the LANES invocations of each row, which all of them get. The tile's memory is free by then.
fn lanes_sum(local: u32, value: f32) -> f32 {
    x_tile[local] = vec4<f32>(value);
    for (var step = LANES / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local % LANES < step) {
            x_tile[local] += x_tile[local + step];
        }
    }
    workgroupBarrier();
    let sum = x_tile[local - local % LANES].x;
    workgroupBarrier(); // the memory is written again by the next call
    return sum;
}

fn normalise(local: u32, m: u32) {
    let lane = local % LANES;
    let is_row = m < params.n_tokens;
    let row = min(m, params.n_tokens - 1u) * params.n_out;
    // Sums of differences from the row's first element: a mean far from zero then costs no digits.
    let first = y[row];
    var sum = 0.0;
    for (var n = lane; n < params.n_out; n += LANES) {
        sum += y[row + n] - first;
    }
    let mean = lanes_sum(local, sum) / f32(params.n_out); // relative to `first`
    var sum_sq = 0.0;
    for (var n = lane; n < params.n_out; n += LANES) {
        let deviation = y[row + n] - first - mean;
        sum_sq += deviation * deviation;
    }
    let scale = 1.0 / sqrt(lanes_sum(local, sum_sq) / f32(params.n_out) + params.eps);
    if (!is_row) {
        return;
    }
    for (var n = lane; n < params.n_out; n += LANES) {
        var value = (y[row + n] - first - mean) * scale * weight[n];
        if ((params.flags & SHIFT) != 0u) {
            value += shift[n];
        }
        y[row + n] = value;
    }
}

@compute @workgroup_size(WG)
fn linear_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let m = (params.first_group + group_index(group, grid)) * ROWS;
    if (m >= params.n_tokens) {
        return;
    }
    for (var n = 0u; n < params.n_out; n += COLS) {
        put_products(local, m, n, tile_product(local, m, n, vec2<u32>(0u, params.blocks * 8u)));
    }
    storageBarrier();
    normalise(local, m + local / LANES);
}
