// Weight blocks of Q3_K: weight = unit scale * (scale - 32) * (quant - 4).
#import three_bits
#import bytes

fn block_at(block: u32) -> Block {
    var b = three_bits_at(block);
    b.scales = three_bits_scale(block) * (b.scales - 32.0);
    return b;
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return bytes(two_bits(b.words, quad) | (third_bits(b, quad) << 2u), 4.0);
}
