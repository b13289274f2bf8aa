// Weight blocks of Q8_0: 32 signed bytes in two vec4 and an f16 scale; weight = scale * quant.
#import block_scale

struct Block { scales: vec2<f32>, low: vec4<u32>, high: vec4<u32> }

fn block_at(block: u32) -> Block {
    return Block(vec2<f32>(unit_scale(block)), w[block * 2u], w[block * 2u + 1u]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(select(b.low[quad & 3u], b.high[quad & 3u], quad > 3u)));
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return unit_scale(block) * vec4<f32>(unpack4xI8(w[block * 2u + (quad >> 2u)][quad & 3u]));
}
