// Weight blocks of Q8_0: 32 signed bytes in two vec4 and an f16 scale; weight = scale * quant.
#import block_scale

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return unit_scale(block) * vec4<f32>(unpack4xI8(w[block * 2u + (quad >> 2u)][quad & 3u]));
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let a = w[block * 2u];
    let b = w[block * 2u + 1u];
    return unit_scale(block)
        * (dot(vec4<f32>(unpack4xI8(a.x)), x[0]) + dot(vec4<f32>(unpack4xI8(a.y)), x[1])
        + dot(vec4<f32>(unpack4xI8(a.z)), x[2]) + dot(vec4<f32>(unpack4xI8(a.w)), x[3])
        + dot(vec4<f32>(unpack4xI8(b.x)), x[4]) + dot(vec4<f32>(unpack4xI8(b.y)), x[5])
        + dot(vec4<f32>(unpack4xI8(b.z)), x[6]) + dot(vec4<f32>(unpack4xI8(b.w)), x[7]));
}
