// A projected head on its way to attention: queries and keys are normalised and rotated, values stay or are normalised
// without weights. With `heads`; the kernel defines `qkv`, whose heads are whole quads.

struct Head {
    row: u32,    // where its token's projection begins
    head: u32,   // queries first, then keys, then values
    scale: f32,  // the factor of its norm
    angles: u32, // its row of the table
}

// A head of a token at `pos`, in a sequence whose position 0 has the row `rope_offset`.
fn head_at(row: u32, head: u32, scale: f32, pos: u32, rope_offset: u32) -> Head {
    let angles = rope_offset + pos;
    return Head(row, head, scale, select(angles, angles + params.query_row, head < params.n_heads));
}

// Quad `i` as it comes from the projection.
fn projected(head: Head, i: u32) -> vec4<f32> {
    return qkv[(head.row + head.head * params.head_dim) / 4u + i];
}

// The factors of quad `i` that its norm gives.
fn norm_factors(head: Head, i: u32) -> vec4<f32> {
    let e = 4u * i;
    return head.scale * vec4<f32>(
        head_weight(head.head, e),
        head_weight(head.head, e + 1u),
        head_weight(head.head, e + 2u),
        head_weight(head.head, e + 3u),
    );
}

// Quad `i`, normalised if that comes before the rotation.
fn unturned_quad(head: Head, i: u32) -> vec4<f32> {
    let quad = projected(head, i);
    if (NORM == NORM_HEADS || NORM == NORM_WHOLE || NORM == NORM_VALUES) {
        return quad * norm_factors(head, i);
    }
    return quad;
}

// The elements that those of a quad are turned with, for pairs of (i, i + half).
fn partners(head: Head, at: vec4<u32>) -> vec4<f32> {
    // As a rule they are a quad as well.
    if (params.rot_dims % 8u == 0u) {
        return unturned_quad(head, at.x / 4u);
    }
    return vec4<f32>(
        unturned_quad(head, at.x / 4u)[at.x % 4u],
        unturned_quad(head, at.y / 4u)[at.y % 4u],
        unturned_quad(head, at.z / 4u)[at.z % 4u],
        unturned_quad(head, at.w / 4u)[at.w % 4u],
    );
}

// Quad `i` of a query or a key by its angles.
fn turned_quad(head: Head, i: u32) -> vec4<f32> {
    let quad = unturned_quad(head, i);
    if (4u * i >= params.rot_dims) {
        return quad;
    }
    if (params.style != HALVES) {
        return vec4<f32>(rotate(quad.xy, head.angles, 2u * i), rotate(quad.zw, head.angles, 2u * i + 1u));
    }
    let half = params.rot_dims / 2u;
    let e = 4u * i + vec4<u32>(0u, 1u, 2u, 3u);
    let is_second = e >= vec4<u32>(half);
    let is_turned = e < vec4<u32>(params.rot_dims);
    let partner = select(e, select(e + half, e - half, is_second), is_turned);
    let other = partners(head, partner);
    let pair = min(select(e, partner, is_second), vec4<u32>(half - 1u));
    let row = angle_row(head.angles);
    let a = vec4<f32>(table[row + pair.x], table[row + pair.y]);
    let b = vec4<f32>(table[row + pair.z], table[row + pair.w]);
    let cosine = vec4<f32>(a.xz, b.xz);
    let sine = vec4<f32>(a.yw, b.yw);
    return select(quad, quad * cosine + select(-other, other, is_second) * sine, is_turned);
}

// Quad `i` as attention takes it.
fn head_quad(head: Head, i: u32) -> vec4<f32> {
    if (head.head >= params.n_heads + params.n_kv_heads) {
        let value = projected(head, i);
        return select(value, value * head.scale, NORM == NORM_VALUES);
    }
    let quad = turned_quad(head, i);
    if (NORM == NORM_ROTATED) {
        return quad * norm_factors(head, i);
    }
    return quad;
}

// The squares of a quad of the projection that lies at element `at`, added up.
fn quad_squares(at: u32, end: u32) -> f32 {
    let quad = qkv[at / 4u];
    return dot(quad, quad);
}
