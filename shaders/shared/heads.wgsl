// The norm of queries and keys, to mean square 1: of each head by itself (Dehghani et al. 2023, arXiv:2302.05442), before
// or after it is rotated, or of all heads of a token together; and of values, without weights. With `head_lanes`.
#import rotate

override NORM: u32 = 0u; // none of these: no norm
const NORM_HEADS: u32 = 1u;
const NORM_ROTATED: u32 = 2u;
const NORM_WHOLE: u32 = 3u;
const NORM_VALUES: u32 = 4u; // as NORM_HEADS, and of values

// The factors of a head's norm but its weights. `row` is where the token's projection begins. All invocations must call it,
// with `is_there` false where there is no such head.
fn head_scale(local: u32, row: u32, head: u32, is_there: bool) -> f32 {
    let is_key = head >= params.n_heads;
    var start = head * params.head_dim;
    var len = params.head_dim;
    if (NORM == NORM_WHOLE) {
        start = select(0u, params.n_heads * params.head_dim, is_key);
        len = select(params.n_heads, params.n_kv_heads, is_key) * params.head_dim;
    }
    let end = select(0u, len, is_there);
    var sum_sq = 0.0;
    for (var i = local % LANES; i < end; i += LANES) {
        let value = qkv[row + start + i];
        sum_sq += value * value;
    }
    // The rotation does not change it.
    return 1.0 / sqrt(head_sum(local, sum_sq) / f32(len) + params.eps);
}

// The weights of pair i of a head.
fn head_weights(head: u32, i: u32) -> vec2<f32> {
    var at = pair(i);
    if (NORM == NORM_WHOLE) {
        at += head * params.head_dim;
    } else if (head >= params.n_heads) {
        at += params.head_dim;
    }
    return vec2<f32>(weight[at.x], weight[at.y]);
}

// The factors of pair i of a head, before it is rotated and after.
fn head_factors(scale: f32, head: u32, i: u32) -> array<vec2<f32>, 2> {
    var factors = array<vec2<f32>, 2>(vec2<f32>(1.0), vec2<f32>(1.0));
    if (NORM == NORM_ROTATED) {
        factors[1] = scale * head_weights(head, i);
    } else if (NORM != 0u) {
        factors[0] = scale * head_weights(head, i);
    }
    return factors;
}
