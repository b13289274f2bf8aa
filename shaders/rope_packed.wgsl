// Queries and keys of packed sequences, normalised and rotated by their tokens' positions, in place; values stay, or are
// normalised without weights:
//
//     qkv[t] = q heads | k heads | v heads;   x[t, h] = turn(x[t, h]) for heads of q and k
//
// Dispatch (the heads that change folded over x and y), LANES invocations per head; see `shared/heads.wgsl` and
// `shared/rotate.wgsl`.
#import head_lanes t0=head_lanes scalar=head_lanes_alone
#import heads
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    rot_dims: u32, style: u32, eps: f32, _pad: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;      // [T, 3]: id, position, type
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [S, rot_dims / 2] of (cos, sin)
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // norms of queries and keys; any buffer without NORM
@group(0) @binding(4) var<storage, read_write> qkv: array<f32>;   // [T, (H + 2 Hkv) D]

const WG: u32 = 64u;

// The squares of four elements from `at` on, or of fewer up to `end`, added up: a head may end within a quad.
fn quad_squares(at: u32, end: u32) -> f32 {
    var sum = 0.0;
    for (var i = at; i < min(at + 4u, end); i++) {
        sum += qkv[i] * qkv[i];
    }
    return sum;
}

// The factors of pair i of a head, before it is rotated and after.
fn head_factors(scale: f32, head: u32, i: u32) -> array<vec2<f32>, 2> {
    var factors = array<vec2<f32>, 2>(vec2<f32>(1.0), vec2<f32>(1.0));
    if (NORM != 0u) {
        let at = pair(i);
        factors[select(0u, 1u, NORM == NORM_ROTATED)] = scale * vec2<f32>(head_weight(head, at.x), head_weight(head, at.y));
    }
    return factors;
}

@compute @workgroup_size(WG)
fn rope_packed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * (WG / LANES) + local / LANES; // over tokens and their heads that change
    let turned_heads = params.n_heads + params.n_kv_heads;
    let changed_heads = turned_heads + select(0u, params.n_kv_heads, NORM == NORM_VALUES);
    let t = id / changed_heads;
    let head = id % changed_heads;
    let is_there = t < params.n_tokens;
    let row = t * (turned_heads + params.n_kv_heads) * params.head_dim;
    var scale = 1.0;
    if (NORM != 0u) {
        var squares = 0.0;
        if (is_there) {
            squares = norm_squares(row, head, local % LANES, LANES);
        }
        scale = norm_scale(head, head_sum(local, squares));
    }
    if (!is_there) {
        return;
    }
    if (head >= turned_heads) {
        for (var i = local % LANES; i < params.head_dim; i += LANES) {
            qkv[row + head * params.head_dim + i] *= scale;
        }
        return;
    }
    for (var i = local % LANES; i < params.head_dim / 2u; i += LANES) {
        let at = row + head * params.head_dim + pair(i);
        let factors = head_factors(scale, head, i);
        let turned = rotate(vec2<f32>(qkv[at.x], qkv[at.y]) * factors[0], tokens[3u * t + 1u], i) * factors[1];
        qkv[at.x] = turned.x;
        qkv[at.y] = turned.y;
    }
}
