// Splits the fused projection, normalises and rotates queries and keys, and writes keys and values to their cache slots:
//
//     qkv[t] = q heads | k heads | v heads
//     q[t, h] = turn(..);   k[g, pos + t] = turn(..), v[g, pos + t] = ..
//
// Without key heads there are queries alone, and the cache is not written.
//
// Dispatch (heads of all tokens folded over x and y), LANES invocations per head; see `shared/heads.wgsl` and
// `shared/rotate.wgsl`.
#import head_lanes t0=head_lanes scalar=head_lanes_alone
#import heads
#import split_heads
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    rot_dims: u32, style: u32, capacity: u32, eps: f32,
    norm: u32, query_row: u32, first: u32, _pad: u32, // the norm is for the CPU, which knows no overrides
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [rows, rot_dims / 2] of (cos, sin); those of queries from `query_row` on
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // norms of queries and keys; any buffer without NORM
@group(0) @binding(4) var<storage, read> qkv: array<f32>;         // [T, first + (H + 2 Hkv) D]
@group(0) @binding(5) var<storage, read_write> q: array<f32>;     // [T, H, D]
@group(0) @binding(6) var<storage, read_write> k: array<f32>;     // [Hkv, capacity, D]
@group(0) @binding(7) var<storage, read_write> v: array<f32>;     // [Hkv, capacity, D]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn rope_kv(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * (WG / LANES) + local / LANES; // over tokens and heads
    let heads = params.n_heads + 2u * params.n_kv_heads;
    let t = id / heads;
    let head = id % heads;
    let is_there = t < params.n_tokens;
    let is_turned = head < params.n_heads + params.n_kv_heads;
    let row = t * (params.first + heads * params.head_dim) + params.first;
    var scale = 1.0;
    if (NORM != 0u) {
        scale = head_scale(local, row, head, is_there && (is_turned || NORM == NORM_VALUES));
    }
    if (!is_there) {
        return;
    }
    for (var i = local % LANES; i < params.head_dim / 2u; i += LANES) {
        let at = row + head * params.head_dim + pair(i);
        let value = vec2<f32>(qkv[at.x], qkv[at.y]);
        if (is_turned) {
            let factors = head_factors(scale, head, i);
            put_pair(t, head, i, value * factors[0], factors[1]);
        } else {
            put_pair(t, head, i, value * select(1.0, scale, NORM == NORM_VALUES), vec2<f32>(1.0));
        }
    }
}
