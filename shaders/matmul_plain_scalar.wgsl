// `matmul_plain` without workgroup memory or barriers: 16 x 8 outputs in the registers of one invocation, or eight of a
// single row. See `matmul_scalar`.
//
// Dispatch (tiles of 16 x 64 outputs, row after row, folded over x and y).
#kernel matmul_plain scalar
#import tile_alone
#import x_quads
#import fold

struct Params { m: u32, n: u32, k: u32, first_group: u32 } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;        // [M, K], K a multiple of 4
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;        // [K, N], N a multiple of 4
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;  // [M, N]

const WG: u32 = 8u;
// Quads of K that are added up on their own first: one long sum would lose digits.
const RUN: u32 = 8u;

fn x_shape() -> vec2<u32> {
    return vec2<u32>(params.m, params.k / 4u);
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
    var tile = Tile();
    for (var start = 0u; start < quads; start += RUN) {
        var part = Tile();
        for (var quad = start; quad < min(start + RUN, quads); quad++) {
            multiply(&part, m, quad, b_quads(quad, col), b_quads(quad, col + 1u));
        }
        tile.left0 += part.left0;
        tile.left1 += part.left1;
        tile.left2 += part.left2;
        tile.left3 += part.left3;
        tile.right0 += part.right0;
        tile.right1 += part.right1;
        tile.right2 += part.right2;
        tile.right3 += part.right3;
    }
    put_tile(tile, m, col, col + 1u);
}

@compute @workgroup_size(WG)
fn matmul_plain(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n + 63u) / 64u;
    let tile = params.first_group + group_index(group, grid);
    let m = tile / across * 16u;
    if (m >= params.m) {
        return;
    }
    let col = (tile % across * WG + local) * 2u;
    if (params.m == 1u) {
        row_product(col);
    } else {
        tile_product(m, col);
    }
}
