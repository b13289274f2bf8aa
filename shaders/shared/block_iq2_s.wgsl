// Weight blocks of IQ2_S, IQ2_XS and IQ2_XXS, whose codebooks were looked up: weight = unit scale * (scale + 0.5) / 4 * level.
// The lower bits of a quant count the levels 8, 25 and 43 (and 62, which no codebook has), the third one is the sign.
#import three_bits
#import bytes

fn block_at(block: u32) -> Block {
    var b = three_bits_at(block);
    b.scales = three_bits_scale(block) * (b.scales + 0.5) * 0.25;
    return b;
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    let counts = unpack4xU8(two_bits(b.words, quad)) * vec4<u32>(8u);
    let levels = vec4<f32>((vec4<u32>(0x3e2b1908u) >> counts) & vec4<u32>(0xffu));
    return levels * (1.0 - 2.0 * bytes(third_bits(b, quad), 0.0));
}
