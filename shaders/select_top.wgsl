// The best scores of a strip of items join the best of the strips before, score falling, id rising:
//
//     lists[b, s] = the K best of lists[b, s] and of (scores[b, i], first_id + i) for i in part s of N
//
// where `allowed` has the id. A row is cut into S parts, each with a list of its own that it keeps from strip to strip;
// `merge_top` puts the lists together at the end. Whoever does not beat the K-th of its list, nearly everyone soon, costs
// a load and a comparison. A round in which more beat it than there is room for is taken again in short ones. A score
// that is not finite comes first.
//
// Dispatch (parts of all rows folded over x and y).
#import top
#import fold

struct Params {
    n_cols: u32, n_splits: u32, k: u32, first_id: u32, // N, S, K
    flags: u32, n_rows: u32, _pad0: u32, _pad1: u32, // B
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> scores: array<vec4<f32>>;      // [B, N]
@group(0) @binding(2) var<storage, read> allowed: array<u32>;           // a bit for each id; unused without FILTERED
@group(0) @binding(3) var<storage, read_write> lists: array<vec2<u32>>; // [B, S, K] of (score, id)

const WG: u32 = 256u;
const BEGINS: u32 = 1u;   // the lists are empty, whatever they hold
const FILTERED: u32 = 2u; // only ids in `allowed` enter
const SHORT: u32 = ROOM / 4u; // quads of a round that finds room whatever it brings
const LONG: u32 = 4u * WG;

@compute @workgroup_size(WG)
fn select_top(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = group_index(group, grid);
    let split = index % params.n_splits;
    if (index / params.n_splits >= params.n_rows) {
        return;
    }
    let k = params.k;
    let list = index * k;
    let row = index / params.n_splits * params.n_cols;
    let part = (params.n_cols + params.n_splits - 1u) / params.n_splits;
    let begin = row + min(split * part, params.n_cols);
    let end = row + min((split + 1u) * part, params.n_cols);
    let begins = (params.flags & BEGINS) != 0u;

    open_room(local);
    var bar = NOTHING; // what a pair must beat
    if (!begins) {
        bar = to_key(lists[list + k - 1u]);
    }
    var is_loaded = false; // whether `pairs` has the list
    var n = 0u; // pairs that wait
    // A part may begin and end within a quad.
    var quad = begin / 4u;
    let last = (end + 3u) / 4u;
    var round = select(LONG, SHORT, begins);
    while (quad < last) {
        for (var q = quad + local; q < min(quad + round, last); q += WG) {
            let four = scores[q];
            for (var i = 0u; i < 4u; i++) {
                let at = 4u * q + i;
                let pair = vec2<u32>(score_key(four[i]), params.first_id + at - row);
                if (at >= begin && at < end && is_better(pair, bar)) {
                    if ((params.flags & FILTERED) == 0u || ((allowed[pair.y / 32u] >> (pair.y % 32u)) & 1u) != 0u) {
                        put_aside(pair);
                    }
                }
            }
        }
        let n_now = waiting(local);
        let is_over = n_now > ROOM;
        if (!is_over) {
            quad += round;
            round = min(2u * round, LONG);
            n = n_now;
        }
        if (n > 0u && (is_over || n > ROOM / 2u || quad >= last)) {
            if (!is_loaded) {
                for (var i = local; i < k; i += WG) {
                    pairs[i] = NOTHING;
                    if (!begins) {
                        pairs[i] = to_key(lists[list + i]);
                    }
                }
                is_loaded = true;
            }
            merge(local, k, n);
            bar = pairs[k - 1u];
            n = 0u;
        }
        if (is_over) {
            open_room(local);
            round = SHORT;
        }
    }
    if (is_loaded) {
        storageBarrier(); // all have read what is overwritten
        for (var i = local; i < k; i += WG) {
            lists[list + i] = from_key(pairs[i]);
        }
    } else if (begins) {
        for (var i = local; i < k; i += WG) {
            lists[list + i] = from_key(NOTHING);
        }
    }
}
