// Operands of a tile from x and packed w; see `tile.wgsl` and `linear_tile.wgsl`.
#import tile_blocks

fn w_quad(n: u32, quad: u32) -> vec4<f32> {
    if (GUARDED && (n >= params.n_out || quad >= params.blocks * 8u)) {
        return vec4<f32>();
    }
    return block_quad(n * params.blocks + quad / 8u, quad % 8u);
}

// Four quads of a row from `quad` on, a multiple of 4; all are of one block.
fn w_run(n: u32, quad: u32) -> mat4x4<f32> {
    if (GUARDED && (n >= params.n_out || quad >= params.blocks * 8u)) {
        return mat4x4<f32>();
    }
    let block = n * params.blocks + quad / 8u;
    let first = quad % 8u / 4u * 4u;
    return mat4x4<f32>(
        block_quad(block, first),
        block_quad(block, first + 1u),
        block_quad(block, first + 2u),
        block_quad(block, first + 3u),
    );
}

fn x_block(m: u32, quad: u32) -> mat4x4<f32> {
    return transpose(mat4x4<f32>(x_quad(m, quad), x_quad(m + 1u, quad), x_quad(m + 2u, quad), x_quad(m + 3u, quad)));
}
