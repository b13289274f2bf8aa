// Weight blocks of Q8_0: 32 signed bytes in two vec4 and an f16 scale; weight = scale * quant.
#import block_scale
#import bytes

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return unit_scale(block) * signed_bytes(w[block * 2u + (quad >> 2u)][quad & 3u]);
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let a = w[block * 2u];
    let b = w[block * 2u + 1u];
    return unit_scale(block)
        * (dot(signed_bytes(a.x), x[0]) + dot(signed_bytes(a.y), x[1])
        + dot(signed_bytes(a.z), x[2]) + dot(signed_bytes(a.w), x[3])
        + dot(signed_bytes(b.x), x[4]) + dot(signed_bytes(b.y), x[5])
        + dot(signed_bytes(b.z), x[6]) + dot(signed_bytes(b.w), x[7]));
}
