// Matrix product with a packed weight matrix, ROWS x COLS outputs a workgroup:
//
//     y[m, y_start + n] = (y[..] +) act((bias[..] +) sum over k of x[m, k] * w[n, k])
//
// Dispatch (tiles, row after row, folded over x and y, splits). Weights are unpacked once a tile, into workgroup memory. A split
// takes `split_blocks` blocks along K and has M rows of y to itself, which `split_sum` adds up.
#import tile
#weights
#import linear_tile
#import tile_operands
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;  // [M, K]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [splits, M, y_stride]

@compute @workgroup_size(WG)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n_out + COLS - 1u) / COLS;
    let tile = params.first_group + group_index(group, grid);
    let start = vec2<u32>(tile / across * ROWS, tile % across * COLS);
    if (start.x >= params.n_tokens) {
        return;
    }
    let blocks = min(vec2<u32>(group.z, group.z + 1u) * params.split_blocks, vec2<u32>(params.blocks));
    first_row = group.z * params.n_tokens;
    put_products(local, start.x, start.y, tile_product(local, start.x, start.y, blocks * 8u));
}
