// Weight blocks of Q6_K: weight = unit scale * scale * (quant - 32), a scale for each half of a block. A super-block of
// eight is thirteen vec4: sixteen signed scales, two words of upper bits for each block, then 32 nibbles for each in the
// order of Q4_0. Quads of weights take turns with the two words; quad q has bits 2 (q / 2) of each byte.
#import block_scale
#import bytes

// The quants of four low nibbles and lowest upper bits of four bytes, less 32.
fn quants(nibbles: u32, uppers: u32) -> vec4<f32> {
    return bytes((nibbles & 0x0f0f0f0fu) | ((uppers & 0x03030303u) << 4u), 32.0);
}

// The scales of both halves of block `at` of a super-block.
fn half_scales(unit: u32, at: u32) -> vec2<f32> {
    let four = signed_bytes(w[unit * 13u][at >> 1u]);
    return unit_scale(unit) * select(four.xy, four.zw, (at & 1u) == 1u);
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let unit = block >> 3u;
    let at = block & 7u;
    let uppers = w[unit * 13u + 1u + (at >> 1u)][2u * (at & 1u) + (quad & 1u)] >> (quad & 6u);
    let nibbles = w[unit * 13u + 5u + at][quad & 3u] >> (4u * (quad >> 2u));
    return half_scales(unit, at)[quad >> 2u] * quants(nibbles, uppers);
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let unit = block >> 3u;
    let at = block & 7u;
    let four = w[unit * 13u + 1u + (at >> 1u)];
    let uppers = select(four.xy, four.zw, (at & 1u) == 1u);
    let a = w[unit * 13u + 5u + at];
    let b = a >> vec4<u32>(4u);
    return dot(half_scales(unit, at), vec2<f32>(
        dot(quants(a.x, uppers.x), x[0]) + dot(quants(a.y, uppers.y), x[1])
        + dot(quants(a.z, uppers.x >> 2u), x[2]) + dot(quants(a.w, uppers.y >> 2u), x[3]),
        dot(quants(b.x, uppers.x >> 4u), x[4]) + dot(quants(b.y, uppers.y >> 4u), x[5])
        + dot(quants(b.z, uppers.x >> 6u), x[6]) + dot(quants(b.w, uppers.y >> 6u), x[7]),
    ));
}
