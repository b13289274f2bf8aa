// Weight blocks of Q8_0: 32 signed bytes in two vec4 and an f16 scale; weight = scale * quant.

// The scale of a block: f16, two a word, behind all quants. Subnormal scales occur in real files and a driver may flush
// them in unpack2x16float, so they are widened by hand.
fn block_scale(block: u32) -> f32 {
    let word = params.w_scales + (block >> 1u);
    let bits = (w[word >> 2u][word & 3u] >> ((block & 1u) * 16u)) & 0xffffu;
    if ((bits & 0x7c00u) == 0u) {
        let magnitude = f32(bits & 0x3ffu) * 0x1p-24;
        return select(magnitude, -magnitude, (bits & 0x8000u) != 0u);
    }
    return unpack2x16float(bits).x;
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return block_scale(block) * vec4<f32>(unpack4xI8(w[block * 2u + (quad >> 2u)][quad & 3u]));
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let a = w[block * 2u];
    let b = w[block * 2u + 1u];
    return block_scale(block)
        * (dot(vec4<f32>(unpack4xI8(a.x)), x[0]) + dot(vec4<f32>(unpack4xI8(a.y)), x[1])
        + dot(vec4<f32>(unpack4xI8(a.z)), x[2]) + dot(vec4<f32>(unpack4xI8(a.w)), x[3])
        + dot(vec4<f32>(unpack4xI8(b.x)), x[4]) + dot(vec4<f32>(unpack4xI8(b.y)), x[5])
        + dot(vec4<f32>(unpack4xI8(b.z)), x[6]) + dot(vec4<f32>(unpack4xI8(b.w)), x[7]));
}
