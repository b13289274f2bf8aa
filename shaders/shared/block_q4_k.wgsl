// Weight blocks of Q4_K: weight = scale * quant - min. A super-block of eight is nine vec4: scales and mins, then 32
// nibbles for each block in the order of Q4_0.
#import scale_and_min
#import bytes

// The low nibbles of four bytes as weights.
fn weights(word: u32, scale: vec2<f32>) -> vec4<f32> {
    return scale.x * bytes(word & 0x0f0f0f0fu, 0.0) - scale.y;
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let unit = (block >> 3u) * 9u;
    let at = block & 7u;
    return weights(w[unit + 1u + at][quad & 3u] >> (4u * (quad >> 2u)), scale_and_min(w[unit], at));
}

// Sum over the block of weight times x. The min is taken off each weight, as scale * quant - min is exact but for one
// rounding; taken off the sum as min * (sum of x) it would leave the rounding of two large numbers.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let unit = (block >> 3u) * 9u;
    let at = block & 7u;
    let scale = scale_and_min(w[unit], at);
    let a = w[unit + 1u + at];
    let b = a >> vec4<u32>(4u);
    return dot(weights(a.x, scale), x[0]) + dot(weights(a.y, scale), x[1])
        + dot(weights(a.z, scale), x[2]) + dot(weights(a.w, scale), x[3])
        + dot(weights(b.x, scale), x[4]) + dot(weights(b.y, scale), x[5])
        + dot(weights(b.z, scale), x[6]) + dot(weights(b.w, scale), x[7]);
}
