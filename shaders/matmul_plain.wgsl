// Matrix product of two plain matrices, 64 x 64 outputs a workgroup:
//
//     y[m, n] = sum over k of x[m, k] * b[k, n]
//
// Dispatch (ceil(N / 64), ceil(M / 64), 1).
#import stage t0=stage_f32 t1=stage_f16
#import tile

struct Params { m: u32, n: u32, k: u32, _pad: u32, first_group: vec2<u32> } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [M, K]
@group(0) @binding(2) var<storage, read> b: array<f32>;        // [K, N]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;  // [M, N]

fn x_quad(m: u32, quad: u32) -> vec4<f32> {
    var value = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        if (m < params.m && quad * 4u + i < params.k) {
            value[i] = x[m * params.k + quad * 4u + i];
        }
    }
    return value;
}

fn w_quad(n: u32, quad: u32) -> vec4<f32> {
    var value = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        if (n < params.n && quad * 4u + i < params.k) {
            value[i] = b[(quad * 4u + i) * params.n + n];
        }
    }
    return value;
}

@compute @workgroup_size(256)
fn matmul_plain(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let group = id.xy + params.first_group;
    let acc = tile_product(local, group.y * TILE, group.x * TILE, (params.k + 3u) / 4u);
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            let m = group.y * TILE + 4u * (local / 16u) + i;
            let n = group.x * TILE + 4u * (local % 16u) + j;
            if (m < params.m && n < params.n) {
                y[m * params.n + n] = acc[i][j];
            }
        }
    }
}
