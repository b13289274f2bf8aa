// The k largest elements of each row in falling order, lowest index first among equals. A row with a NaN or an infinity
// reports NON_FINITE as its first index.
//
// Each round finds the largest element below the one found before, in the order of (value, index). Dispatch (R, 1, 1).
#import best
#import order

struct Params { dim: u32, k: u32, _pad0: u32, _pad1: u32 } // V
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;            // [R, V]
@group(0) @binding(2) var<storage, read_write> values: array<f32>; // [R, k]
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;    // [R, k]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn top_k(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let row = group.x * params.dim;
    var before = vec2<u32>(0xffffffffu, 0u); // above every key
    for (var round = 0u; round < params.k; round++) {
        var mine = vec2<u32>(0u, 0xffffffffu);
        for (var c = local; c < params.dim; c += WG) {
            let key = order_key(x[row + c]);
            let below = key < before.x || (key == before.x && c > before.y);
            if (!is_finite(x[row + c])) {
                mine = vec2<u32>(0xffffffffu, NON_FINITE);
            } else if (below && key > mine.x) {
                mine = vec2<u32>(key, c);
            }
        }
        before = workgroup_best(local, mine);
        if (local == 0u) {
            ids[group.x * params.k + round] = before.y;
            values[group.x * params.k + round] = x[row + min(before.y, params.dim - 1u)];
        }
    }
}
