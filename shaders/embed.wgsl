// Embedding gather, one token at a time:
//
//     y[t, c] = factor * w[tokens[pos + t], c] (+ positions[pos + t, c])
//
// where the pass's tokens are the next ones of a sequence. With a row of the step state for each of them they are of different
// sequences, and the rows have ids and positions.
//
// Rows that pad the pass, t >= n_tokens, and rows whose id is outside the vocabulary are zeros. They must be numbers:
// their keys and values enter the cache, and attention multiplies those with the weight 0, which a NaN survives.
//
// Dispatch (T folded over x and y). A table too large for one binding comes in slabs of rows, one dispatch each, which
// write the tokens that they hold; the first one also writes the zeros.
#weights
#import state
#import fold

struct Params { dim: u32, blocks: u32, w_scales: u32, slab_start: u32, slab_rows: u32, n_tokens: u32, factor: f32, n_positions: u32, row_words: u32, _pad0: u32, _pad1: u32, _pad2: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;     // step state
@group(0) @binding(2) var<storage, read> tokens: array<u32>;    // [S], or the step state
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;   // [slab_rows, C], packed
@group(0) @binding(4) var<storage, read> positions: array<f32>; // [n_positions, C]; any buffer where there are none
@group(0) @binding(5) var<storage, read_write> y: array<f32>;   // [T, C]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn embed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid);
    if (token >= params.n_tokens) {
        return;
    }
    let has_row = params.row_words > 0u;
    let own = token * params.row_words;
    let pos = state[own + POS] + select(token, 0u, has_row);
    let at = select(pos, own + TOKEN, has_row);
    var row = params.slab_rows; // in no slab
    if (token < state[N_TOKENS] && at < arrayLength(&tokens)) {
        row = tokens[at] - params.slab_start; // ids before the slab wrap
    }
    let is_held = row < params.slab_rows;
    if (!is_held && params.slab_start > 0u) {
        return;
    }
    for (var quad = local; quad < params.blocks * 8u; quad += WG) {
        var value = vec4<f32>();
        if (is_held) {
            value = params.factor * block_quad(row * params.blocks + quad / 8u, quad % 8u);
        }
        for (var i = 0u; i < 4u; i++) {
            let c = quad * 4u + i;
            if (c < params.dim) {
                if (is_held && params.n_positions > 0u) {
                    value[i] += positions[min(pos, params.n_positions - 1u) * params.dim + c];
                }
                y[token * params.dim + c] = value[i];
            }
        }
    }
}
