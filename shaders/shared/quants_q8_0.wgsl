// Quants of Q8_0 as signed bytes, four a word.
#import block_scale

// Quants 16 * half .. 16 * half + 16 of a block.
fn block_quants(block: u32, half: u32) -> vec4<u32> {
    return w[block * 2u + half];
}
