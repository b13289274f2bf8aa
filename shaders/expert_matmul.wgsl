// Matrix products by experts for many tokens: tiles of rows that have one expert, see `expert_tiles`:
//
//     y[slot, y_start + n] = (bias[e, y_start + n] +) w[e, n] . x[slot / K],   e the expert of the slot
//
// ROWS x COLS outputs a workgroup. Dispatch (tiles, the columns of one after those of another, folded over x and y).
#import tile
#weights
#import tile_blocks
#import expert_rows
#import fold

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;      // [E N, K], packed
@group(0) @binding(2) var<storage, read> bias: array<f32>;         // of all experts, [E, y_stride]; any buffer without BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;      // [T, K] or [slots, K], K a multiple of 4
@group(0) @binding(4) var<storage, read> slots: array<u32>;        // [slots]
@group(0) @binding(5) var<storage, read> tiles: array<vec4<u32>>;  // [n_tiles] of (expert, first of slots, rows, 0)
@group(0) @binding(6) var<storage, read_write> y: array<f32>;      // [slots, y_stride]

var<private> x_rows: vec4<u32> = vec4<u32>(); // those that the invocation stages

fn x_block(m: u32, quad: u32) -> mat4x4<f32> {
    if (quad * 4u >= params.dim) {
        return mat4x4<f32>();
    }
    let at = x_rows * (params.dim / 4u) + quad;
    return transpose(mat4x4<f32>(x[at.x], x[at.y], x[at.z], x[at.w]));
}

fn w_quad(n: u32, quad: u32) -> vec4<f32> {
    if (n >= params.n_out || quad >= params.blocks * 8u) {
        return vec4<f32>();
    }
    return block_quad((first_row + n) * params.blocks + quad / 8u, quad % 8u);
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
    x_rows = rows_of_x(staged_four(local) * 4u);
    let n = id % across * COLS;
    put_products(local, 0u, n, tile_product(local, 0u, n, vec2<u32>(0u, params.blocks * 8u)));
}
