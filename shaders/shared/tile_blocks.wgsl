// The blocks of w that a tile stages, from `w_quad(n, q)`, which the kernel defines; see `tile.wgsl`.

fn w_block(n: u32, quad: u32) -> mat4x4<f32> {
    return transpose(mat4x4<f32>(w_quad(n, quad), w_quad(n + 1u, quad), w_quad(n + 2u, quad), w_quad(n + 3u, quad)));
}
