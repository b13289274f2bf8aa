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
    // Four at a time, so that none waits for the one before; past the end the last one again.
    for (var c = start + local; c < end; c += 4u * WG) {
        let at = min(vec4<u32>(c, c + WG, c + 2u * WG, c + 3u * WG), vec4<u32>(end - 1u));
        let first = row * params.dim;
        let values = vec4<f32>(x[first + at.x], x[first + at.y], x[first + at.z], x[first + at.w]);
        for (var i = 0u; i < 4u; i++) {
            if (!is_finite(values[i])) {
                mine = vec2<u32>(0xffffffffu, NON_FINITE);
            } else if (order_key(values[i]) > mine.x) {
                mine = vec2<u32>(order_key(values[i]), at[i]);
            }
        }
    }
    let best_of_chunk = workgroup_best(local, mine);
    if (local == 0u) {
        best[i] = best_of_chunk;
    }
}
