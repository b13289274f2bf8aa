// `matmul` without workgroup memory or barriers: 16 x 8 outputs in the registers of one invocation. Software adapters
// run workgroups one invocation after the other, where barriers cost more than reading x and w again. A load costs them
// dozens of products and is about as dear for four elements as for one: hence many outputs and whole quads. On lavapipe
// this took half the time of 4 x 8 outputs, and a quarter of that with x loaded by elements.
//
// Dispatch (ceil(N / 64), ceil(M / 16), 1).
#kernel matmul scalar
#weights
#import linear
#import tile_alone

struct Params {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // M, N, K
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    eps: f32, split_blocks: u32, first_group: vec2<u32>,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;  // [M, K], K a multiple of 4
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [M, y_stride]

const WG: u32 = 8u;

fn x_shape() -> vec2<u32> {
    return vec2<u32>(params.n_tokens, params.dim / 4u);
}

// Rows: a quad of four rows of w from `n` on. Those past the end repeat the last one; `put` does not write them.
fn w_quads(n: u32, quad: u32) -> mat4x4<f32> {
    let row = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n_out - 1u)) * params.blocks + quad / 8u;
    let i = quad % 8u;
    return transpose(
        mat4x4<f32>(block_quad(row.x, i), block_quad(row.y, i), block_quad(row.z, i), block_quad(row.w, i)),
    );
}

fn put_all(m: u32, n: u32, acc: mat4x4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            put(m + i, n + j, acc[i][j]);
        }
    }
}

@compute @workgroup_size(WG)
fn matmul(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let group = id.xy + params.first_group;
    let m = group.y * 16u;
    let n = (group.x * WG + local) * 8u;
    var tile = Tile();
    for (var quad = 0u; quad < params.dim / 4u; quad++) {
        multiply(&tile, m, quad, w_quads(n, quad), w_quads(n + 4u, quad));
    }
    put_tile(tile, m, n, n + 4u);
}
