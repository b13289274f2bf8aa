// Weight blocks of Q2_0: weight = scale * (quant - 1). Two blocks are one vec4, two words each, and an f16 scale.
#import block_scale
#import block_halves
#import two_bits
#import bytes

struct Block { scales: vec2<f32>, words: vec2<u32> }

fn block_at(block: u32) -> Block {
    let four = w[block >> 1u];
    return Block(vec2<f32>(unit_scale(block >> 1u)), select(four.xy, four.zw, (block & 1u) == 1u));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return bytes(two_bits(b.words, quad), 1.0);
}
