// What `matmul` and `linear_norm` share where an invocation makes 16 x 8 outputs alone.
#import tile_alone
#import x_quads

fn x_shape() -> vec2<u32> {
    return vec2<u32>(params.n_tokens, params.dim / 4u);
}

// Rows: a quad of four rows of w from `n` on. Those past the end repeat the last one; `put_all` does not write them.
fn w_quads(n: u32, quad: u32) -> mat4x4<f32> {
    let row = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n_out - 1u)) * params.blocks + quad / 8u;
    let i = quad % 8u;
    return transpose(
        mat4x4<f32>(block_quad(row.x, i), block_quad(row.y, i), block_quad(row.z, i), block_quad(row.w, i)),
    );
}

// 16 rows of y from `m` on, in eight columns from `n` on.
fn put_products(m: u32, n: u32) {
    var tile = Tile();
    for (var quad = 0u; quad < params.dim / 4u; quad++) {
        multiply(&tile, m, quad, w_quads(n, quad), w_quads(n + 4u, quad));
    }
    put_tile(tile, m, n, n + 4u);
}
