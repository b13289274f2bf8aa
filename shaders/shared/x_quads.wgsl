// Rows of x for `tile_alone`. The kernel says by `x_shape` how many there are, and how many quads a row has.

// Columns: a quad of four rows of x from `m` on. Rows past the end repeat the last one and must not be written.
fn x_quads(m: u32, quad: u32) -> mat4x4<f32> {
    let row = min(vec4<u32>(m, m + 1u, m + 2u, m + 3u), vec4<u32>(x_shape().x - 1u)) * x_shape().y + quad;
    return mat4x4<f32>(x[row.x], x[row.y], x[row.z], x[row.w]);
}
