// `matmul` without workgroup memory or barriers: 4 x 4 outputs in the registers of one invocation. Software adapters
// run workgroups one invocation after the other, where barriers cost more than reading x and w again.
//
// Dispatch (ceil(N / 32), ceil(M / 32), 1), 8 x 8 invocations.
#kernel matmul scalar
#weights
#import linear

struct Params {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // M, N, K
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    eps: f32, _pad0: u32, _pad1: u32, _pad2: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<f32>;        // [M, K]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [M, y_stride]

fn x_quad(m: u32, k: u32) -> vec4<f32> {
    let at = min(m, params.n_tokens - 1u) * params.dim + k;
    if (k + 4u <= params.dim) {
        return vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
    }
    var value = vec4<f32>();
    for (var i = 0u; k + i < params.dim; i++) {
        value[i] = x[at + i];
    }
    return value;
}

@compute @workgroup_size(8, 8)
fn matmul(@builtin(global_invocation_id) id: vec3<u32>) {
    let m = id.y * 4u;
    let n = id.x * 4u;
    let last = params.n_out - 1u;
    let row0 = min(n, last) * params.blocks;
    let row1 = min(n + 1u, last) * params.blocks;
    let row2 = min(n + 2u, last) * params.blocks;
    let row3 = min(n + 3u, last) * params.blocks;
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    for (var quad = 0u; quad < params.blocks * 8u; quad++) {
        let block = quad / 8u;
        let w0 = block_quad(row0 + block, quad % 8u);
        let w1 = block_quad(row1 + block, quad % 8u);
        let w2 = block_quad(row2 + block, quad % 8u);
        let w3 = block_quad(row3 + block, quad % 8u);
        let x0 = x_quad(m, quad * 4u);
        let x1 = x_quad(m + 1u, quad * 4u);
        let x2 = x_quad(m + 2u, quad * 4u);
        let x3 = x_quad(m + 3u, quad * 4u);
        acc0 += vec4<f32>(dot(x0, w0), dot(x0, w1), dot(x0, w2), dot(x0, w3));
        acc1 += vec4<f32>(dot(x1, w0), dot(x1, w1), dot(x1, w2), dot(x1, w3));
        acc2 += vec4<f32>(dot(x2, w0), dot(x2, w1), dot(x2, w2), dot(x2, w3));
        acc3 += vec4<f32>(dot(x3, w0), dot(x3, w1), dot(x3, w2), dot(x3, w3));
    }
    let acc = mat4x4<f32>(acc0, acc1, acc2, acc3);
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            put(m + i, n + j, acc[i][j]);
        }
    }
}
