// `matmul` without workgroup memory or barriers: 16 x 8 outputs in the registers of one invocation. Software adapters
// run the invocations of a workgroup one after the other, so barriers cost more than reading x and w again. A load
// takes as long as dozens of multiplications, and about as long for four elements as for one: hence many outputs and
// whole quads. On lavapipe this took half the time of 4 x 8 outputs, and a quarter of the time of loading x by
// elements.
//
// Dispatch (tiles of 16 x 64 outputs, row after row, folded over x and y).
#kernel matmul scalar
#weights
#import linear
#import linear_alone
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;  // [M, K], K a multiple of 4
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [M, y_stride]

const WG: u32 = 8u;

fn put_all(m: u32, n: u32, acc: mat4x4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            put(m + i, n + j, acc[i][j]);
        }
    }
}

@compute @workgroup_size(WG)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n_out + 63u) / 64u;
    let tile = params.first_group + group_index(group, grid);
    let m = tile / across * 16u;
    if (m >= params.n_tokens) {
        return;
    }
    put_products(m, (tile % across * WG + local) * 8u);
}
