// Scales of the quantised weight types.

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
