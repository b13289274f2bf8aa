// Weight blocks of Q6_K: weight = unit scale * scale * (quant - 32), a scale for each half of a block. A super-block of
// eight is thirteen vec4: sixteen signed scales, two words of upper bits for each block, then 32 nibbles for each in the
// order of Q4_0. Quads of weights take turns with the two words; quad q has bits 2 (q / 2) of each byte.
#import block_scale
#import nibbles

struct Block { scales: vec2<f32>, words: vec4<u32>, uppers: vec2<u32> }

// The quants of four nibbles and lowest upper bits of four bytes, less 32.
fn six_bits(nibbles: u32, uppers: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(nibbles | ((uppers & 0x03030303u) << 4u))) - 32.0;
}

// The scales of both halves of block `at` of a super-block.
fn half_scales(unit: u32, at: u32) -> vec2<f32> {
    let four = vec4<f32>(unpack4xI8(w[unit * 13u][at >> 1u]));
    return unit_scale(unit) * select(four.xy, four.zw, (at & 1u) == 1u);
}

fn block_at(block: u32) -> Block {
    let unit = block >> 3u;
    let at = block & 7u;
    let four = w[unit * 13u + 1u + (at >> 1u)];
    return Block(half_scales(unit, at), w[unit * 13u + 5u + at], select(four.xy, four.zw, (at & 1u) == 1u));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return six_bits(nibbles_of(b.words, quad), b.uppers[quad & 1u] >> (quad & 6u));
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let unit = block >> 3u;
    let at = block & 7u;
    let uppers = w[unit * 13u + 1u + (at >> 1u)][2u * (at & 1u) + (quad & 1u)] >> (quad & 6u);
    let nibbles = (w[unit * 13u + 5u + at][quad & 3u] >> (4u * (quad >> 2u))) & 0x0f0f0f0fu;
    return half_scales(unit, at)[quad >> 2u] * six_bits(nibbles, uppers);
}
