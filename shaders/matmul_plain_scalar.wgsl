// `matmul_plain` without workgroup memory or barriers: 16 x 8 outputs in the registers of one invocation, or eight of a
// single row. See `matmul_scalar`.
//
// Dispatch (ceil(N / 64), ceil(M / 16), 1).
#kernel matmul_plain scalar

struct Params { m: u32, n: u32, k: u32, _pad: u32, first_group: vec2<u32> } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;        // [M, K], K a multiple of 4
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;        // [K, N], N a multiple of 4
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;  // [M, N]

const WG: u32 = 8u;
// Quads of K that are added up on their own first: one long sum would lose digits.
const RUN: u32 = 8u;

// Columns: a quad of four rows of x from `m` on. Rows past the end repeat the last one; `put` does not write them.
fn x_quads(m: u32, quad: u32) -> mat4x4<f32> {
    let row = min(vec4<u32>(m, m + 1u, m + 2u, m + 3u), vec4<u32>(params.m - 1u)) * (params.k / 4u) + quad;
    return mat4x4<f32>(x[row.x], x[row.y], x[row.z], x[row.w]);
}

// Columns: four rows of b, four elements each.
fn b_quads(quad: u32, col: u32) -> mat4x4<f32> {
    let step = params.n / 4u;
    let at = quad * 4u * step + min(col, step - 1u);
    return mat4x4<f32>(b[at], b[at + step], b[at + 2u * step], b[at + 3u * step]);
}

fn put(m: u32, col: u32, value: vec4<f32>) {
    if (m < params.m && col < params.n / 4u) {
        y[m * (params.n / 4u) + col] = value;
    }
}

fn put_all(m: u32, col: u32, acc: mat4x4<f32>) {
    put(m, col, acc[0]);
    put(m + 1u, col, acc[1]);
    put(m + 2u, col, acc[2]);
    put(m + 3u, col, acc[3]);
}

// One row of x.
fn row_product(col: u32) {
    let quads = params.k / 4u;
    var left = vec4<f32>();
    var right = vec4<f32>();
    for (var start = 0u; start < quads; start += RUN) {
        var part_left = vec4<f32>();
        var part_right = vec4<f32>();
        for (var quad = start; quad < min(start + RUN, quads); quad++) {
            part_left += b_quads(quad, col) * x[quad];
            part_right += b_quads(quad, col + 1u) * x[quad];
        }
        left += part_left;
        right += part_right;
    }
    put(0u, col, left);
    put(0u, col + 1u, right);
}

// 16 rows of x from `m` on.
fn tile_product(m: u32, col: u32) {
    let quads = params.k / 4u;
    var left0 = mat4x4<f32>();
    var left1 = mat4x4<f32>();
    var left2 = mat4x4<f32>();
    var left3 = mat4x4<f32>();
    var right0 = mat4x4<f32>();
    var right1 = mat4x4<f32>();
    var right2 = mat4x4<f32>();
    var right3 = mat4x4<f32>();
    for (var start = 0u; start < quads; start += RUN) {
        var part_left0 = mat4x4<f32>();
        var part_left1 = mat4x4<f32>();
        var part_left2 = mat4x4<f32>();
        var part_left3 = mat4x4<f32>();
        var part_right0 = mat4x4<f32>();
        var part_right1 = mat4x4<f32>();
        var part_right2 = mat4x4<f32>();
        var part_right3 = mat4x4<f32>();
        for (var quad = start; quad < min(start + RUN, quads); quad++) {
            let left = b_quads(quad, col);
            let right = b_quads(quad, col + 1u);
            let x0 = x_quads(m, quad);
            part_left0 += left * x0;
            part_right0 += right * x0;
            let x1 = x_quads(m + 4u, quad);
            part_left1 += left * x1;
            part_right1 += right * x1;
            let x2 = x_quads(m + 8u, quad);
            part_left2 += left * x2;
            part_right2 += right * x2;
            let x3 = x_quads(m + 12u, quad);
            part_left3 += left * x3;
            part_right3 += right * x3;
        }
        left0 += part_left0;
        left1 += part_left1;
        left2 += part_left2;
        left3 += part_left3;
        right0 += part_right0;
        right1 += part_right1;
        right2 += part_right2;
        right3 += part_right3;
    }
    put_all(m, col, left0);
    put_all(m + 4u, col, left1);
    put_all(m + 8u, col, left2);
    put_all(m + 12u, col, left3);
    put_all(m, col + 1u, right0);
    put_all(m + 4u, col + 1u, right1);
    put_all(m + 8u, col + 1u, right2);
    put_all(m + 12u, col + 1u, right3);
}

@compute @workgroup_size(WG)
fn matmul_plain(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let group = id.xy + params.first_group;
    let col = (group.x * WG + local) * 2u;
    if (params.m == 1u) {
        row_product(col);
    } else {
        tile_product(group.y * 16u, col);
    }
}
