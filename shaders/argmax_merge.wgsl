// The best of each row's chunks, the second pass of `argmax`: ids[r] is the row's largest element, or NON_FINITE.
//
// Dispatch (R folded over x and y).
#import best
#import fold

struct Params { n_chunks: u32, n_rows: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> best: array<vec2<u32>>;  // [R, chunks] of (order key, index)
@group(0) @binding(2) var<storage, read_write> ids: array<u32>;   // [R]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn argmax_merge(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group_index(group, grid);
    if (row >= params.n_rows) {
        return;
    }
    var mine = vec2<u32>(0u, 0u);
    for (var i = local; i < params.n_chunks; i += WG) {
        let other = best[row * params.n_chunks + i];
        if (is_better(other, mine)) {
            mine = other;
        }
    }
    let best_of_row = workgroup_best(local, mine);
    if (local == 0u) {
        ids[row] = best_of_row.y;
    }
}
