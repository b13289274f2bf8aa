// What the variants of `expert_matmul` share: which rows of w, x and y a tile has.

struct Params {
    n_used: u32, n_out: u32, dim: u32, blocks: u32, // K, or 1 where x has a row for each slot; N, K of the product
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    first_expert: u32, n_experts: u32, first_group: u32, n_tiles: u32, // experts that w has
}

const BIAS: u32 = 1u;

var<private> tile: vec4<u32> = vec4<u32>(); // (expert, first of slots, rows, 0)
var<private> first_row: u32 = 0u;           // of the expert, in w

// Rows of x that stand at four places of the tile; those past its end repeat the last one.
fn rows_of_x(m: u32) -> vec4<u32> {
    let at = tile.y + min(vec4<u32>(m, m + 1u, m + 2u, m + 3u), vec4<u32>(tile.z - 1u));
    return vec4<u32>(slots[at.x], slots[at.y], slots[at.z], slots[at.w]) / params.n_used;
}

fn put(m: u32, n: u32, sum: f32) {
    if (m >= tile.z || n >= params.n_out) {
        return;
    }
    var value = sum;
    if ((params.flags & BIAS) != 0u) {
        value += bias[tile.x * params.y_stride + params.y_start + n];
    }
    y[slots[tile.y + m] * params.y_stride + params.y_start + n] = value;
}
