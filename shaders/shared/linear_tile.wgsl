// What the tiled variants of `matmul` share: how x is read and y is written. GUARDED is that of the tile.
#import linear

// Elements 4 * quad .. 4 * quad + 4 of a row of x, zero outside the matrix.
fn x_quad(m: u32, quad: u32) -> vec4<f32> {
    if (GUARDED && (m >= params.n_tokens || quad * 4u >= params.dim)) {
        return vec4<f32>();
    }
    if (!GUARDED || params.dim % 4u == 0u) {
        return x[m * (params.dim / 4u) + quad];
    }
    // Such a row may start within a quad.
    var value = vec4<f32>();
    for (var k = quad * 4u; k < min(quad * 4u + 4u, params.dim); k++) {
        let at = m * params.dim + k;
        value[k % 4u] = x[at / 4u][at % 4u];
    }
    return value;
}
