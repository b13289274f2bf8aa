// Weight blocks of Q1_0: weight = scale or -scale. Four blocks are one vec4, a word each, and an f16 scale. Bit j of byte i is
// that of weight 4 j + i.
#import block_scale
#import block_halves
#import bytes

struct Block { scales: vec2<f32>, word: u32 }

fn block_at(block: u32) -> Block {
    return Block(vec2<f32>(unit_scale(block >> 2u)), w[block >> 2u][block & 3u]);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return 2.0 * bytes((b.word >> quad) & 0x01010101u, 0.0) - 1.0;
}
