// Weight blocks of Q5_1: weight = scale * quant + min. A block is the vec4 of Q4_0; its tail has a word of fifth bits, in the
// order of Q5_0, and scale and min, both f16.
#import block_scale
#import block_halves
#import nibbles
#import bytes

struct Block { scales: vec2<f32>, words: vec4<u32>, fifths: u32, scale: f32, min: f32 }

fn block_at(block: u32) -> Block {
    let pair = tail_word(2u * block + 1u);
    return Block(vec2<f32>(1.0), w[block], tail_word(2u * block), half_value(pair), half_value(pair >> 16u));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    let five = nibbles_of(b.words, quad) | (((b.fifths >> quad) & 0x01010101u) << 4u);
    return b.scale * bytes(five, 0.0) + b.min;
}
