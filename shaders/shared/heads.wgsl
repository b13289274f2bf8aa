// The norm of queries and keys, to mean square 1: of each head by itself (Dehghani et al. 2023, arXiv:2302.05442), before
// or after it is rotated, or of all heads of a token together; and of values, without weights.
#import rotate

override NORM: u32 = 0u; // none of these: no norm
const NORM_HEADS: u32 = 1u;
const NORM_ROTATED: u32 = 2u;
const NORM_WHOLE: u32 = 3u;
const NORM_VALUES: u32 = 4u; // as NORM_HEADS, and of values

// Elements that a head is normalised with.
fn norm_len(head: u32) -> u32 {
    if (NORM == NORM_WHOLE) {
        return select(params.n_heads, params.n_kv_heads, head >= params.n_heads) * params.head_dim;
    }
    return params.head_dim;
}

// The squares of every `lanes`-th quad of what a head is normalised with, added up. `row` is where the token's projection
// begins.
fn norm_squares(row: u32, head: u32, lane: u32, lanes: u32) -> f32 {
    var start = head * params.head_dim;
    if (NORM == NORM_WHOLE) {
        start = select(0u, params.n_heads * params.head_dim, head >= params.n_heads);
    }
    var sum = 0.0;
    for (var i = 4u * lane; i < norm_len(head); i += 4u * lanes) {
        sum += quad_squares(row + start + i, row + start + norm_len(head));
    }
    return sum;
}

// The factor that normalises a head, without the norm's weights, from the sum of its squares. Rotation does not
// change it.
fn norm_scale(head: u32, squares: f32) -> f32 {
    return 1.0 / sqrt(squares / f32(norm_len(head)) + params.eps);
}

// The weight of element `e` of a head.
fn head_weight(head: u32, e: u32) -> f32 {
    if (NORM == NORM_WHOLE) {
        return weight[head * params.head_dim + e];
    }
    return weight[select(e, e + params.head_dim, head >= params.n_heads)];
}
