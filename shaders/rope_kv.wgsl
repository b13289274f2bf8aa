// Splits the fused projection, normalises and rotates queries and keys, and writes keys and values to their cache slots:
//
//     qkv[t] = q heads | k heads | v heads
//     q[t, h] = turn(..);   k[g, slot] = turn(..), v[g, slot] = ..,   slot = slot_of(pos + t)
//
// Without key heads there are queries alone, and the cache is not written; without query heads there are keys and values
// alone; without value heads, keys hold their values.
//
// Dispatch (heads of all tokens folded over x and y), LANES invocations per head; see `shared/heads.wgsl`,
// `shared/turn.wgsl` and, for what a row of the cache is, `shared/row_f32.wgsl` and its like.
#import head_lanes t0=head_lanes scalar=head_lanes_alone
#import cache F32=fresh_f32 F16=fresh_f16 Q8_0=fresh_q8_0
#import heads
#import turn
#import paged
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    rot_dims: u32, style: u32, capacity: u32, eps: f32,
    query_row: u32, first: u32, slots: u32, n_value_heads: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [rows, rot_dims / 2] of (cos, sin); those of queries from `query_row` on
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // norms of queries and keys; any buffer without NORM
@group(0) @binding(4) var<storage, read> qkv: array<vec4<f32>>;   // [T, first + (H + 2 Hkv) D], first a multiple of 4
@group(0) @binding(5) var<storage, read_write> q: array<vec4<f32>>; // [T, H, D], D a multiple of 4
@group(0) @binding(6) var<storage, read_write> k: array<vec4<u32>>; // [Hkv, slots, row]
@group(0) @binding(7) var<storage, read_write> v: array<vec4<u32>>; // [Hkv, slots, row]; any buffer without value heads

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn rope_kv(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * (WG / LANES) + local / LANES; // over tokens and heads
    let lane = local % LANES;
    let heads = params.n_heads + params.n_kv_heads + params.n_value_heads;
    let t = id / heads;
    let n = id % heads;
    let is_there = t < params.n_tokens;
    let row = t * (params.first + heads * params.head_dim) + params.first;
    var scale = 1.0;
    if (NORM != 0u) {
        var squares = 0.0;
        if (is_there && (n < params.n_heads + params.n_kv_heads || NORM == NORM_VALUES)) {
            squares = norm_squares(row, n, lane, LANES);
        }
        scale = norm_scale(n, head_sum(local, squares));
    }
    if (!is_there) {
        return;
    }
    let pos = state[POS] + t;
    let head = head_at(row, n, scale, pos, state[ROPE_OFFSET]);
    if (n < params.n_heads) {
        let quads = params.head_dim / 4u;
        for (var i = lane; i < quads; i += LANES) {
            q[(t * params.n_heads + n) * quads + i] = head_quad(head, i);
        }
    } else if (pos < params.capacity) { // padding of the last chunk may lie past the cache
        let g = (n - params.n_heads) % params.n_kv_heads;
        let to = (g * params.slots + slot_of(0u, pos)) * row_units();
        for (var u = lane; u < row_units(); u += LANES) {
            if (n < params.n_heads + params.n_kv_heads) {
                k[to + u] = row_unit(head, u);
            } else {
                v[to + u] = row_unit(head, u);
            }
        }
    }
}
