// Weight blocks of Q5_K: weight = scale * quant - min. A super-block of eight is eleven vec4: scales and mins, a word of
// fifth bits for each block, then 32 nibbles for each in the order of Q4_0. Fifth bit j of byte i is that of weight
// 4 j + i.
#import scale_and_min
#import bytes

// Weights of the low nibbles and lowest fifth bits of four bytes.
fn weights(nibbles: u32, fifths: u32, scale: vec2<f32>) -> vec4<f32> {
    let quants = (nibbles & 0x0f0f0f0fu) | ((fifths & 0x01010101u) << 4u);
    return scale.x * bytes(quants, 0.0) - scale.y;
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let unit = (block >> 3u) * 11u;
    let at = block & 7u;
    let fifths = w[unit + 1u + (at >> 2u)][at & 3u] >> quad;
    return weights(w[unit + 3u + at][quad & 3u] >> (4u * (quad >> 2u)), fifths, scale_and_min(w[unit], at));
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let unit = (block >> 3u) * 11u;
    let at = block & 7u;
    let scale = scale_and_min(w[unit], at);
    let fifths = w[unit + 1u + (at >> 2u)][at & 3u];
    let a = w[unit + 3u + at];
    let b = a >> vec4<u32>(4u);
    return dot(weights(a.x, fifths, scale), x[0]) + dot(weights(a.y, fifths >> 1u, scale), x[1])
        + dot(weights(a.z, fifths >> 2u, scale), x[2]) + dot(weights(a.w, fifths >> 3u, scale), x[3])
        + dot(weights(b.x, fifths >> 4u, scale), x[4]) + dot(weights(b.y, fifths >> 5u, scale), x[5])
        + dot(weights(b.z, fifths >> 6u, scale), x[6]) + dot(weights(b.w, fifths >> 7u, scale), x[7]);
}
