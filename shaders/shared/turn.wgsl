// A projected head on its way to attention: queries and keys are normalised and rotated, values stay or are normalised
// without weights. With `heads`.
#import state

struct Head {
    row: u32,    // where its token's projection begins
    head: u32,   // queries first, then keys, then values
    scale: f32,  // the factor of its norm
    angles: u32, // its row of the table
}

// A head of a token at `pos`.
fn head_at(row: u32, head: u32, scale: f32, pos: u32) -> Head {
    let angles = state[ANGLES] + pos;
    return Head(row, head, scale, select(angles, angles + params.query_row, head < params.n_heads));
}

// Element `e`, normalised if that comes before the rotation.
fn element(head: Head, e: u32) -> f32 {
    let value = qkv[head.row + head.head * params.head_dim + e];
    if (NORM == NORM_HEADS || NORM == NORM_WHOLE || NORM == NORM_VALUES) {
        return value * head.scale * head_weight(head.head, e);
    }
    return value;
}

// Element `e` as attention takes it.
fn turned_element(head: Head, e: u32) -> f32 {
    var value = element(head, e);
    if (e < params.rot_dims) {
        let half = params.rot_dims / 2u;
        let halves = params.style == HALVES;
        let is_second = select((e & 1u) == 1u, e >= half, halves);
        let i = select(e / 2u, e - select(0u, half, is_second), halves);
        let other = element(head, select(e ^ 1u, select(e + half, e - half, is_second), halves));
        let turned = rotate(select(vec2<f32>(value, other), vec2<f32>(other, value), is_second), head.angles, i);
        value = select(turned.x, turned.y, is_second);
    }
    if (NORM == NORM_ROTATED) {
        value *= head.scale * head_weight(head.head, e);
    }
    return value;
}

// Quad `i` as attention takes it.
fn head_quad(head: Head, i: u32) -> vec4<f32> {
    var quad = vec4<f32>();
    for (var j = 0u; j < 4u; j++) {
        if (head.head < params.n_heads + params.n_kv_heads) {
            quad[j] = turned_element(head, 4u * i + j);
        } else {
            let value = qkv[head.row + head.head * params.head_dim + 4u * i + j];
            quad[j] = select(value, value * head.scale, NORM == NORM_VALUES);
        }
    }
    return quad;
}
