// Embedding gather, one token at a time:
//
//     y[t, c] = w[tokens[pos + t], c]
//
// Dispatch (T folded over x and y). A table too large for one binding comes in slabs of rows, one dispatch each, which write the
// tokens that they hold.
#weights
#import state
#import fold

struct Params { dim: u32, blocks: u32, w_scales: u32, slab_start: u32, slab_rows: u32, n_tokens: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;     // step state
@group(0) @binding(2) var<storage, read> tokens: array<u32>;    // [S]
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;   // [slab_rows, C], packed
@group(0) @binding(4) var<storage, read_write> y: array<f32>;   // [T, C]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn embed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid);
    let pos = state[POS] + token;
    if (token >= params.n_tokens || pos >= arrayLength(&tokens)) { // padding of the last chunk
        return;
    }
    let row = tokens[pos] - params.slab_start;
    if (row >= params.slab_rows) { // also for ids before the slab, which wrap
        return;
    }
    for (var quad = local; quad < params.blocks * 8u; quad += WG) {
        let value = block_quad(row * params.blocks + quad / 8u, quad % 8u);
        let at = token * params.dim + quad * 4u;
        for (var i = 0u; i < 4u; i++) {
            if (quad * 4u + i < params.dim) {
                y[at + i] = value[i];
            }
        }
    }
}
