// Matrix product of two plain matrices, ROWS x COLS outputs a workgroup:
//
//     y[m, n] = sum over k of x[m, k] * b[k, n]
//
// Dispatch (tiles, row after row, folded over x and y).
#import x_quad
#import tile
#import fold

struct Params { m: u32, n: u32, k: u32, first_group: u32 } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;        // [M, K]
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;        // [K, N]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;        // [M, N]

fn x_shape() -> vec2<u32> {
    return vec2<u32>(params.m, params.k);
}

// Elements n .. n + 4 of a row of b, n being a multiple of 4, zero outside the matrix.
fn b_quad(k: u32, n: u32) -> vec4<f32> {
    if (GUARDED && (k >= params.k || n >= params.n)) {
        return vec4<f32>();
    }
    if (!GUARDED || params.n % 4u == 0u) {
        return b[k * (params.n / 4u) + n / 4u];
    }
    var value = vec4<f32>();
    for (var j = n; j < min(n + 4u, params.n); j++) {
        let at = k * params.n + j;
        value[j % 4u] = b[at / 4u][at % 4u];
    }
    return value;
}

fn x_block(m: u32, quad: u32) -> mat4x4<f32> {
    return transpose(mat4x4<f32>(x_quad(m, quad), x_quad(m + 1u, quad), x_quad(m + 2u, quad), x_quad(m + 3u, quad)));
}

fn w_block(n: u32, quad: u32) -> mat4x4<f32> {
    let k = quad * 4u;
    return mat4x4<f32>(b_quad(k, n), b_quad(k + 1u, n), b_quad(k + 2u, n), b_quad(k + 3u, n));
}

fn put(m: u32, n: u32, sum: f32) {
    if (!GUARDED || (m < params.m && n < params.n)) {
        y[m * params.n + n] = sum;
    }
}

@compute @workgroup_size(WG)
fn matmul_plain(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n + COLS - 1u) / COLS;
    let tile = params.first_group + group_index(group, grid);
    let start = vec2<u32>(tile / across * ROWS, tile % across * COLS);
    if (start.x >= params.m) {
        return;
    }
    put_products(local, start.x, start.y, tile_product(local, start.x, start.y, vec2<u32>(0u, (params.k + 3u) / 4u)));
}
