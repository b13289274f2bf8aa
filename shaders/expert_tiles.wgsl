// The rows of products by experts in an order in which those of one expert are together, cut into tiles:
//
//     slots[..] = the slots of expert 0, in order, then those of expert 1, ..
//     tiles[..] = (expert, its first place in slots, rows: R or what is left), of all experts in order; past the last: rows 0
//
// A slot is a token's place for one of its experts. Each workgroup counts all slots and places those of its own experts, so
// that none waits for another. Dispatch (ceil(E / WG) folded over x and y).
#import fold

struct Params { n_slots: u32, n_experts: u32, tile_rows: u32, n_tiles: u32 } // T K, E, R
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> routes: array<vec2<u32>>;      // [T K] of (expert, bits of its weight)
@group(0) @binding(2) var<storage, read_write> slots: array<u32>;       // [T K]
@group(0) @binding(3) var<storage, read_write> tiles: array<vec4<u32>>; // [n_tiles]

const WG: u32 = 64u;
const MOST: u32 = 1088u; // experts

var<workgroup> counts: array<atomic<u32>, MOST>;

fn n_tiles(count: u32) -> u32 {
    return (count + params.tile_rows - 1u) / params.tile_rows;
}

@compute @workgroup_size(WG)
fn expert_tiles(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    // The whole workgroup leaves: the barriers below want control flow that is uniform.
    let first_own = group_index(group, grid) * WG;
    if (first_own >= params.n_experts) {
        return;
    }
    let own = first_own + local;
    for (var e = local; e < MOST; e += WG) {
        atomicStore(&counts[e], 0u);
    }
    workgroupBarrier();
    for (var slot = local; slot < params.n_slots; slot += WG) {
        atomicAdd(&counts[min(routes[slot].x, MOST - 1u)], 1u);
    }
    workgroupBarrier();
    var before = 0u; // slots of the experts before
    var tile = 0u;   // their tiles
    var all = 0u;    // tiles of all experts
    for (var e = 0u; e < params.n_experts; e++) {
        let count = atomicLoad(&counts[e]);
        before += select(0u, count, e < own);
        tile += select(0u, n_tiles(count), e < own);
        all += n_tiles(count);
    }
    if (own < params.n_experts) {
        let count = atomicLoad(&counts[own]);
        for (var first = 0u; first < count; first += params.tile_rows) {
            tiles[tile] = vec4<u32>(own, before + first, min(count - first, params.tile_rows), 0u);
            tile++;
        }
        for (var slot = 0u; slot < params.n_slots && count > 0u; slot++) {
            if (routes[slot].x == own) {
                slots[before] = slot;
                before++;
            }
        }
    }
    // Those past the last, a part for each workgroup.
    let n_groups = (params.n_experts + WG - 1u) / WG;
    for (var i = all + own; i < params.n_tiles; i += n_groups * WG) {
        tiles[i] = vec4<u32>();
    }
}
