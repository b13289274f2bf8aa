// Weight blocks of IQ4_XS: weight = unit scale * (scale - 32) * level. A super-block of eight is eight vec4 of nibbles in the
// order of Q4_0; its tail has the f16 scale, the upper two bits of eight 6-bit scales, and a word of their low nibbles.
#import block_scale
#import block_halves
#import nibbles
#import iq4_levels

struct Block { scales: vec2<f32>, words: vec4<u32> }

fn block_at(block: u32) -> Block {
    let unit = block >> 3u;
    let at = block & 7u;
    let head = tail_word(2u * unit);
    let low = (tail_word(2u * unit + 1u) >> (4u * at)) & 15u;
    let high = (head >> (16u + 2u * at)) & 3u;
    return Block(vec2<f32>(half_value(head) * (f32(low | (high << 4u)) - 32.0)), w[block]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return iq4_levels(nibbles_of(b.words, quad));
}
