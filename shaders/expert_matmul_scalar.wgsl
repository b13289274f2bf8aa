// `expert_matmul` without workgroup memory or barriers; see `matmul_scalar.wgsl`. Dispatch (tiles of 16 x 64 outputs, the
// columns of one after those of another, folded over x and y).
#kernel expert_matmul scalar
#weights
#import expert_rows
#import tile_alone
#import fold

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;      // [E N, K], packed
@group(0) @binding(2) var<storage, read> bias: array<f32>;         // of all experts, [E, y_stride]; any buffer without BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;      // [T, K] or [slots, K], K a multiple of 4
@group(0) @binding(4) var<storage, read> slots: array<u32>;        // [slots]
@group(0) @binding(5) var<storage, read> tiles: array<vec4<u32>>;  // [n_tiles] of (expert, first of slots, rows, 0)
@group(0) @binding(6) var<storage, read_write> y: array<f32>;      // [slots, y_stride]

const WG: u32 = 8u;
const COLS: u32 = 64u;

var<private> x_rows: array<vec4<u32>, 4> = array<vec4<u32>, 4>(); // of the tile

// Columns: a quad of four rows of x.
fn x_quads(m: u32, quad: u32) -> mat4x4<f32> {
    let at = x_rows[m / 4u] * (params.dim / 4u) + quad;
    return mat4x4<f32>(x[at.x], x[at.y], x[at.z], x[at.w]);
}

// Rows: a quad of four rows of w from `n` on. Those past the end repeat the last one; `put` does not write them.
fn w_quads(n: u32, quad: u32) -> mat4x4<f32> {
    let rows = first_row + min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n_out - 1u));
    let block = rows * params.blocks + quad / 8u;
    let i = quad % 8u;
    return transpose(
        mat4x4<f32>(block_quad(block.x, i), block_quad(block.y, i), block_quad(block.z, i), block_quad(block.w, i)),
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
fn expert_matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n_out + COLS - 1u) / COLS;
    let id = params.first_group + group_index(group, grid);
    if (id / across >= params.n_tiles) {
        return;
    }
    let of_group = tiles[id / across];
    // Experts before the first are far past the end.
    let of_w = of_group.x - params.first_expert;
    if (of_group.z == 0u || of_w >= params.n_experts) {
        return;
    }
    tile = of_group;
    first_row = of_w * params.n_out;
    for (var i = 0u; i < 4u; i++) {
        x_rows[i] = rows_of_x(i * 4u);
    }
    let n = (id % across * WG + local) * 8u;
    var products = Tile();
    for (var quad = 0u; quad < params.dim / 4u; quad++) {
        multiply(&products, 0u, quad, w_quads(n, quad), w_quads(n + 4u, quad));
    }
    put_tile(products, 0u, n, n + 4u);
}
