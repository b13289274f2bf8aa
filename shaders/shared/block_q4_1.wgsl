// Weight blocks of Q4_1: weight = scale * quant + min. A block is the vec4 of Q4_0; its tail has scale and min, both f16.
#import block_scale
#import block_halves
#import nibbles
#import bytes

struct Block { scales: vec2<f32>, words: vec4<u32>, scale: f32, min: f32 }

fn block_at(block: u32) -> Block {
    let tail = tail_word(block);
    return Block(vec2<f32>(1.0), w[block], half_value(tail), half_value(tail >> 16u));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return b.scale * bytes(nibbles_of(b.words, quad), 0.0) + b.min;
}
