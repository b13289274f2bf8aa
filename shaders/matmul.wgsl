// Matrix product with a packed weight matrix, 64 x 64 outputs a workgroup:
//
//     y[m, y_start + n] = (y[..] +) (bias[..] +) sum over k of x[m, k] * w[n, k]
//
// Dispatch (ceil(N / 64), ceil(M / 64), 1). Weights are unpacked once a tile, into workgroup memory.
#import stage t0=stage_f32 t1=stage_f16
#weights
#import tile
#import linear

struct Params {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // M, N, K
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    eps: f32, _pad: u32, first_group: vec2<u32>,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<f32>;        // [M, K]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [M, y_stride]

fn x_quad(m: u32, quad: u32) -> vec4<f32> {
    var value = vec4<f32>();
    if (m < params.n_tokens) {
        let at = m * params.dim;
        for (var i = 0u; i < 4u; i++) {
            if (quad * 4u + i < params.dim) {
                value[i] = x[at + quad * 4u + i];
            }
        }
    }
    return value;
}

fn w_quad(n: u32, quad: u32) -> vec4<f32> {
    if (n >= params.n_out || quad >= params.blocks * 8u) {
        return vec4<f32>();
    }
    return block_quad(n * params.blocks + quad / 8u, quad % 8u);
}

@compute @workgroup_size(256)
fn matmul(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let group = id.xy + params.first_group;
    let m0 = group.y * TILE;
    let n0 = group.x * TILE;
    let acc = tile_product(local, m0, n0, params.blocks * 8u);
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            put(m0 + 4u * (local / 16u) + i, n0 + 4u * (local % 16u) + j, acc[i][j]);
        }
    }
}
