// Largest element of each chunk of a row, with its index; among equals the lowest index wins. A chunk that holds a NaN
// or an infinity reports the index NON_FINITE.
//
// Dispatch (chunks of all rows folded over x and y): the first of two passes, `argmax_merge` is the second.
#import best
#import order
#import fold

struct Params { dim: u32, chunk: u32, n_chunks: u32, n_rows: u32 } // V, elements per chunk
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;              // [R, V]
@group(0) @binding(2) var<storage, read_write> best: array<vec2<u32>>; // [R, chunks] of (order key, index)

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn argmax(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(group, grid);
    let row = i / params.n_chunks;
    if (row >= params.n_rows) {
        return;
    }
    let start = i % params.n_chunks * params.chunk;
    let end = min(start + params.chunk, params.dim);
    var mine = vec2<u32>(0u, 0u); // below the key of every float
    for (var c = start + local; c < end; c += WG) {
        let value = x[row * params.dim + c];
        if (!is_finite(value)) {
            mine = vec2<u32>(0xffffffffu, NON_FINITE);
        } else if (order_key(value) > mine.x) {
            mine = vec2<u32>(order_key(value), c);
        }
    }
    let best_of_chunk = workgroup_best(local, mine);
    if (local == 0u) {
        best[i] = best_of_chunk;
    }
}
