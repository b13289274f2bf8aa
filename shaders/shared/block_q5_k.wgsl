// Weight blocks of Q5_K: weight = scale * quant - min. A super-block of eight is eleven vec4: scales and mins, a word of
// fifth bits for each block, then 32 nibbles for each in the order of Q4_0. Fifth bit j of byte i is that of weight
// 4 j + i.
#import scale_and_min
#import nibbles

struct Block { scales: vec2<f32>, words: vec4<u32>, fifths: u32, scale_and_min: vec2<f32> }

fn block_at(block: u32) -> Block {
    let unit = (block >> 3u) * 11u;
    let at = block & 7u;
    let fifths = w[unit + 1u + (at >> 2u)][at & 3u];
    return Block(vec2<f32>(1.0), w[unit + 3u + at], fifths, scale_and_min(w[unit], at));
}

// Weights of four nibbles and fifth bits.
fn weights(nibbles: u32, fifths: u32, scale: vec2<f32>) -> vec4<f32> {
    return scale.x * vec4<f32>(unpack4xU8(nibbles | ((fifths & 0x01010101u) << 4u))) - scale.y;
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return weights(nibbles_of(b.words, quad), b.fifths >> quad, b.scale_and_min);
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let unit = (block >> 3u) * 11u;
    let at = block & 7u;
    let nibbles = (w[unit + 3u + at][quad & 3u] >> (4u * (quad >> 2u))) & 0x0f0f0f0fu;
    return weights(nibbles, w[unit + 1u + (at >> 2u)][at & 3u] >> quad, scale_and_min(w[unit], at));
}
