// Operands of a tile from x and packed w; see `tile.wgsl` and `linear_tile.wgsl`.
#import tile_blocks

fn w_quad(n: u32, quad: u32) -> vec4<f32> {
    if (GUARDED && (n >= params.n_out || quad >= params.blocks * 8u)) {
        return vec4<f32>();
    }
    return block_quad(n * params.blocks + quad / 8u, quad % 8u);
}

fn x_block(m: u32, quad: u32) -> mat4x4<f32> {
    return transpose(mat4x4<f32>(x_quad(m, quad), x_quad(m + 1u, quad), x_quad(m + 2u, quad), x_quad(m + 3u, quad)));
}
