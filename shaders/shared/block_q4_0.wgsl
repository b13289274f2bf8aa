// Weight blocks of Q4_0: 32 nibbles in one vec4 and an f16 scale; weight = scale * (quant - 8). Byte j holds weight j in
// its low nibble and weight j + 16 in its high one, as in the file.
#import block_scale
#import bytes

// The low nibbles of four bytes, less 8.
fn quants(word: u32) -> vec4<f32> {
    return bytes(word & 0x0f0f0f0fu, 8.0);
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let scale = unit_scale(block);
    return scale * bytes((w[block][quad & 3u] >> (4u * (quad >> 2u))) & 0x0f0f0f0fu, 0.0) - 8.0 * scale;
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let a = w[block];
    let b = a >> vec4<u32>(4u);
    return unit_scale(block)
        * (dot(quants(a.x), x[0]) + dot(quants(a.y), x[1]) + dot(quants(a.z), x[2]) + dot(quants(a.w), x[3])
        + dot(quants(b.x), x[4]) + dot(quants(b.y), x[5]) + dot(quants(b.z), x[6]) + dot(quants(b.w), x[7]));
}
