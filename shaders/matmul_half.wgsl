// Matrix product with a packed weight matrix in half precision, summed in f32, ROWS x COLS outputs a workgroup:
//
//     y[m, y_start + n] = (y[..] +) act((bias[..] +) inverse[m] * (sum over k of x[m, k] * w[n, k]))
//
// x and `inverse` come from `half_rows`. Dispatch (tiles, row after row, folded over x and y, splits). Weights are unpacked
// once a tile, into workgroup memory. A split takes `split_blocks` blocks along K and has M rows of y to itself, which
// `split_sum` adds up.
#import unit t1=half_fma matrix8=half_matrix8 matrix16=half_matrix16
#weights
#import half_tile
#import linear
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<Pair>;  // [M, dim], dim being all of w's blocks or more
@group(0) @binding(4) var<storage, read> inverse: array<f32>;  // [M]
@group(0) @binding(5) var<storage, read_write> y: array<f32>;  // [splits, M, y_stride]

@compute @workgroup_size(WG)
fn matmul_half(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n_out + COLS - 1u) / COLS;
    let tile = params.first_group + group_index(group, grid);
    let m = tile / across * ROWS;
    let n = tile % across * COLS;
    if (m >= params.n_tokens) {
        return;
    }
    let blocks = min(vec2<u32>(group.z, group.z + 1u) * params.split_blocks, vec2<u32>(params.blocks));
    first_row = group.z * params.n_tokens;
    // Matrices load from addresses that are multiples of 16 bytes. Named first, `staged` is placed first, or after variables
    // that take multiples of 16 bytes.
    let products = tile_product(local, m, n, blocks * 8u);
    put_products(local, m, n, products);
}
