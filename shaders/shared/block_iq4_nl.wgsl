// Weight blocks of IQ4_NL: weight = scale * level. A block is the vec4 of Q4_0 and an f16 scale.
#import block_scale
#import block_halves
#import nibbles
#import iq4_levels

struct Block { scales: vec2<f32>, words: vec4<u32> }

fn block_at(block: u32) -> Block {
    return Block(vec2<f32>(unit_scale(block)), w[block]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return iq4_levels(nibbles_of(b.words, quad));
}
