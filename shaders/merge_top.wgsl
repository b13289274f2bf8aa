// The lists that `select_top` left for the parts of a row, put together: the K best of all, score falling, id rising.
//
// Dispatch (B folded over x and y).
#import top
#import fold

struct Params { n_splits: u32, k: u32, n_rows: u32, _pad: u32 } // S, K, B
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<vec2<u32>>;      // [B, S, K] of (score, id)
@group(0) @binding(2) var<storage, read_write> best: array<vec2<u32>>; // [B, K] of (score, id)

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn merge_top(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group_index(group, grid);
    if (row >= params.n_rows) {
        return;
    }
    let k = params.k;
    let first = row * params.n_splits * k;
    let end = first + params.n_splits * k;
    for (var i = local; i < k; i += WG) {
        pairs[i] = to_key(lists[first + i]);
    }
    open_room(local); // and all see the first list
    // A round brings no more pairs than there is room for.
    for (var start = first + k; start < end; start += ROOM) {
        let bar = pairs[k - 1u];
        for (var at = start + local; at < min(start + ROOM, end); at += WG) {
            let pair = to_key(lists[at]);
            if (is_better(pair, bar)) {
                put_aside(pair);
            }
        }
        let n = waiting(local);
        if (n > 0u) {
            merge(local, k, n);
        }
    }
    for (var i = local; i < k; i += WG) {
        best[row * k + i] = from_key(pairs[i]);
    }
}
