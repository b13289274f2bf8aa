// Weight blocks of NVFP4: weight = scale * level. Two blocks are two vec4 of Q4_0; their tail has an 8-bit float for each half
// of a block: four bits of exponent, three of fraction.
#import block_scale
#import block_halves
#import nibbles
#import fp4_levels

struct Block { scales: vec2<f32>, words: vec4<u32> }

fn block_at(block: u32) -> Block {
    let bytes = tail_half(block);
    // As f16 they are too small by 2^8, of which one is for the doubled levels.
    let scales = vec2<f32>(half_value((bytes & 0x7fu) << 7u), half_value((bytes & 0x7f00u) >> 1u));
    return Block(128.0 * scales, w[block]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return fp4_levels(nibbles_of(b.words, quad));
}
