// Causal attention of each query with its cached keys and values, with grouped queries and an optional window:
//
//     y[t, h] = sum over s of softmax over s of (scale * q[t, h] . k[g, s]) * v[g, s],   s <= pos + t,  g = h * Hkv / H
//
// A streaming softmax walks the keys in tiles of WG and rescales what it has when a larger score appears, so no T x S
// buffer exists. Dispatch (H, T, 1). Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.
#import reduce t0=reduce t2=reduce_subgroup
#import state

struct Params {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    capacity: u32, window: u32, scale: f32, _pad: u32,           // window 0: none
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 256
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

const WG: u32 = 64u;

var<workgroup> query: array<vec4<f32>, WG>;
var<workgroup> weights: array<f32, WG>;
var<workgroup> parts: array<vec4<f32>, WG>;

@compute @workgroup_size(WG)
fn attention(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let quads = params.head_dim / 4u;
    let head = group.y * params.n_heads + group.x; // over tokens and heads
    let kv = group.x * params.n_kv_heads / params.n_heads * params.capacity; // first cached row of this head's group
    // Keys first .. end are visible; padding of the last chunk may lie past the cache.
    let end = min(state[POS] + group.y + 1u, params.capacity);
    var first = 0u;
    if (params.window > 0u && end > params.window) {
        first = end - params.window;
    }
    // For the scores an invocation takes one key of a tile. For the values it takes four columns, of every `slices`-th
    // key, so that small heads keep the whole workgroup busy; the slices are added up at the end.
    let slices = WG / quads;
    let quad = local % quads;
    let slice = local / quads;
    if (local < quads) {
        query[local] = q[head * quads + local];
    }
    workgroupBarrier();
    var highest = LOWEST;
    var sum = 0.0;
    var acc = vec4<f32>();
    for (var start = first; start < end; start += WG) {
        let s = start + local;
        var score = LOWEST;
        if (s < end) {
            var product = vec4<f32>();
            for (var i = 0u; i < quads; i++) {
                product += query[i] * k[(kv + s) * quads + i];
            }
            score = params.scale * (product.x + product.y + product.z + product.w);
        }
        let next = max(highest, workgroup_max(local, score));
        let weight = select(0.0, exp(score - next), s < end);
        weights[local] = weight;
        let rescale = exp(highest - next);
        sum = sum * rescale + workgroup_sum(local, weight); // its barriers also publish `weights`
        highest = next;
        // A tile is summed on its own first: adding keys one by one to a long sum would lose digits.
        var tile = vec4<f32>();
        if (slice < slices) {
            let n = min(WG, end - start);
            for (var j = slice; j < n; j += slices) {
                tile += weights[j] * v[(kv + start + j) * quads + quad];
            }
        }
        acc = acc * rescale + tile;
        workgroupBarrier(); // `weights` is written again
    }
    parts[local] = acc;
    workgroupBarrier();
    if (local < quads) {
        var total = vec4<f32>();
        for (var i = 0u; i < slices; i++) {
            total += parts[i * quads + local];
        }
        y[head * quads + local] = total / sum;
    }
}
