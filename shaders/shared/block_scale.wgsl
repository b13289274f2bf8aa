// Scales of the quantised weight types.

// The value of the f16 in the lower half of a word. Subnormal scales occur in real files and a driver may flush them in
// unpack2x16float, so they are widened by hand.
fn half_value(word: u32) -> f32 {
    let bits = word & 0xffffu;
    if ((bits & 0x7c00u) == 0u) {
        let magnitude = f32(bits & 0x3ffu) * 0x1p-24;
        return select(magnitude, -magnitude, (bits & 0x8000u) != 0u);
    }
    return unpack2x16float(bits).x;
}

// The scale of a unit, block or super-block: f16, two a word, behind all quants.
fn unit_scale(unit: u32) -> f32 {
    let word = params.w_scales + (unit >> 1u);
    return half_value(w[word >> 2u][word & 3u] >> ((unit & 1u) * 16u));
}
