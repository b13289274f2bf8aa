// Weight blocks of Q4_K: weight = scale * quant - min. A super-block of eight is nine vec4: scales and mins, then 32
// nibbles for each block in the order of Q4_0. The min is taken off each weight, as scale * quant - min is exact but for one
// rounding; taken off a sum as min * (sum of x) it would leave the rounding of two large numbers.
#import scale_and_min
#import nibbles

struct Block { scales: vec2<f32>, words: vec4<u32>, scale_and_min: vec2<f32> }

fn block_at(block: u32) -> Block {
    let unit = (block >> 3u) * 9u;
    let at = block & 7u;
    return Block(vec2<f32>(1.0), w[unit + 1u + at], scale_and_min(w[unit], at));
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return b.scale_and_min.x * vec4<f32>(unpack4xU8(nibbles_of(b.words, quad))) - b.scale_and_min.y;
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let unit = (block >> 3u) * 9u;
    let at = block & 7u;
    let nibbles = (w[unit + 1u + at][quad & 3u] >> (4u * (quad >> 2u))) & 0x0f0f0f0fu;
    let scale = scale_and_min(w[unit], at);
    return scale.x * vec4<f32>(unpack4xU8(nibbles)) - scale.y;
}
