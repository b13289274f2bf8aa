// Weight blocks of Q4_0: 32 nibbles in one vec4 and an f16 scale; weight = scale * (quant - 8). Byte j holds weight j in
// its low nibble and weight j + 16 in its high one, as in the file.
#import block_scale
#import nibbles

struct Block { scales: vec2<f32>, words: vec4<u32> }

fn block_at(block: u32) -> Block {
    return Block(vec2<f32>(unit_scale(block)), w[block]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(nibbles_of(b.words, quad))) - 8.0;
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let nibbles = (w[block][quad & 3u] >> (4u * (quad >> 2u))) & 0x0f0f0f0fu;
    return unit_scale(block) * (vec4<f32>(unpack4xU8(nibbles)) - 8.0);
}
