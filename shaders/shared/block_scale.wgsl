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

// Half `i` of all tails, which lie behind all units, below another one or zeros.
fn tail_half(i: u32) -> u32 {
    let word = params.w_scales + (i >> 1u);
    return w[word >> 2u][word & 3u] >> ((i & 1u) * 16u);
}

// Word `i` of all tails.
fn tail_word(i: u32) -> u32 {
    let word = params.w_scales + i;
    return w[word >> 2u][word & 3u];
}

// The scale of a unit whose tail is an f16.
fn unit_scale(unit: u32) -> f32 {
    return half_value(tail_half(unit));
}
