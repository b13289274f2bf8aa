// Weight blocks of MXFP4: weight = scale * level. Two blocks are two vec4 of Q4_0; their tail has both exponents.
#import block_scale
#import block_halves
#import nibbles
#import fp4_levels

struct Block { scales: vec2<f32>, words: vec4<u32> }

fn block_at(block: u32) -> Block {
    let exponent = (tail_half(block >> 1u) >> (8u * (block & 1u))) & 0xffu;
    // Half of 2^(exponent - 127), as levels are doubled; it is subnormal for the two lowest.
    let bits = select((exponent - 1u) << 23u, 0x00200000u << (exponent & 1u), exponent < 2u);
    return Block(vec2<f32>(bitcast<f32>(bits)), w[block]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return fp4_levels(nibbles_of(b.words, quad));
}
