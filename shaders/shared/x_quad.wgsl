// x as rows of quads. The kernel says by `x_shape` how many rows and columns it has. GUARDED is that of the tile.

// Elements 4 * quad .. 4 * quad + 4 of a row of x, zero outside the matrix.
fn x_quad(m: u32, quad: u32) -> vec4<f32> {
    let shape = x_shape();
    if (GUARDED && (m >= shape.x || quad * 4u >= shape.y)) {
        return vec4<f32>();
    }
    if (!GUARDED || shape.y % 4u == 0u) {
        return x[m * (shape.y / 4u) + quad];
    }
    // Such a row may start within a quad.
    var value = vec4<f32>();
    for (var k = quad * 4u; k < min(quad * 4u + 4u, shape.y); k++) {
        let at = m * shape.y + k;
        value[k % 4u] = x[at / 4u][at % 4u];
    }
    return value;
}
