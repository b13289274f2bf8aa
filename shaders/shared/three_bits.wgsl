// Super-blocks of eight with quants of three bits, in seven vec4: a word with the f16 scale of all, sixteen low nibbles of
// scales in two, their upper two bits in one; two words of lower bits for each block, then a word of third bits for each.
#import block_scale
#import block_halves
#import two_bits

struct Block { scales: vec2<f32>, words: vec2<u32>, thirds: u32 }

// A block whose scales are still numbers of six bits.
fn three_bits_at(block: u32) -> Block {
    let unit = (block >> 3u) * 7u;
    let at = block & 7u;
    let head = w[unit];
    let four = w[unit + 1u + (at >> 1u)];
    let low = vec2<u32>(select(head.y, head.z, at > 3u) >> (8u * (at & 3u))) >> vec2<u32>(0u, 4u);
    let high = vec2<u32>(head.w >> (4u * at)) >> vec2<u32>(0u, 2u);
    let numbers = (low & vec2<u32>(15u)) | ((high & vec2<u32>(3u)) << vec2<u32>(4u));
    let thirds = w[unit + 5u + (at >> 2u)][at & 3u];
    return Block(vec2<f32>(numbers), select(four.xy, four.zw, (at & 1u) == 1u), thirds);
}

// The scale of all blocks of a super-block.
fn three_bits_scale(block: u32) -> f32 {
    return half_value(w[(block >> 3u) * 7u].x);
}

// Third bits of a quad, in the lowest bit of each byte.
fn third_bits(b: Block, quad: u32) -> u32 {
    return (b.thirds >> quad) & 0x01010101u;
}
