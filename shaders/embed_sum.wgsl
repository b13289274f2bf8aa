// Embeddings of a text encoder: the rows of a token, its position and its type, added up,
//
//     y[t, c] = w[id, c] + positions[position, c] + types[type, c],   (id, position, type) = tokens[t]
//
// Numbers past a table's end take its last row; a table of positions or types without rows adds nothing. Dispatch
// (T folded over x and y). A matrix too large for one binding comes in slabs of rows, one dispatch each, which write the tokens that
// they hold.
#weights
#import fold

struct Params {
    dim: u32, blocks: u32, w_scales: u32, slab_start: u32, // C
    slab_rows: u32, n_ids: u32, n_positions: u32, n_types: u32, // V, S, N
    n_tokens: u32, _pad0: u32, _pad1: u32, _pad2: u32, // T
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;     // [T, 3]: id, position, type
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;    // [slab_rows, C], packed
@group(0) @binding(3) var<storage, read> positions: array<f32>;  // [S, C]; any buffer where S is 0
@group(0) @binding(4) var<storage, read> types: array<f32>;      // [N, C]; any buffer where N is 0
@group(0) @binding(5) var<storage, read_write> y: array<f32>;    // [T, C]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn embed_sum(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid);
    if (token >= params.n_tokens) {
        return;
    }
    let numbers = token * 3u;
    let row = min(tokens[numbers], params.n_ids - 1u) - params.slab_start;
    if (row >= params.slab_rows) { // also for ids before the slab, which wrap
        return;
    }
    let position = min(tokens[numbers + 1u], max(params.n_positions, 1u) - 1u) * params.dim;
    let kind = min(tokens[numbers + 2u], max(params.n_types, 1u) - 1u) * params.dim;
    for (var quad = local; quad < params.blocks * 8u; quad += WG) {
        let weights = block_quad(row * params.blocks + quad / 8u, quad % 8u);
        for (var i = 0u; i < 4u; i++) {
            let c = quad * 4u + i;
            if (c < params.dim) {
                var sum = weights[i];
                if (params.n_positions > 0u) {
                    sum += positions[position + c];
                }
                if (params.n_types > 0u) {
                    sum += types[kind + c];
                }
                y[token * params.dim + c] = sum;
            }
        }
    }
}
