// Weight blocks of IQ3_S and IQ3_XXS, whose codebooks were decoded during loading:
//
//     weight = unit scale * (2 scale + 1) * level
//
// A super-block of eight blocks has eight vec4 of nibbles in the order of Q4_0; a nibble n is the level 2n - 15. Its
// tail has the f16 scale, the f16 magnitude that replaces 15, and a word of eight 4-bit scales.
#import block_scale
#import block_halves
#import nibbles
#import bytes

struct Block { scales: vec2<f32>, words: vec4<u32>, outermost: f32 }

fn block_at(block: u32) -> Block {
    let unit = block >> 3u;
    let head = tail_word(2u * unit);
    let scale = (tail_word(2u * unit + 1u) >> (4u * (block & 7u))) & 15u;
    return Block(vec2<f32>(half_value(head) * f32(2u * scale + 1u)), w[block], half_value(head >> 16u));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    let levels = 2.0 * bytes(nibbles_of(b.words, quad), 0.0) - 15.0;
    return select(levels, sign(levels) * b.outermost, abs(levels) == vec4<f32>(15.0));
}
