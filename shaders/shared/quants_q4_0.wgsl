// Quants of Q4_0 as signed bytes, four a word.
#import block_scale

// Quants 16 * half .. 16 * half + 16 of a block: nibbles less 8. With its top bit set no byte borrows from the next.
fn block_quants(block: u32, half: u32) -> vec4<u32> {
    let nibbles = (w[block] >> vec4<u32>(4u * half)) & vec4<u32>(0x0f0f0f0fu);
    return ((nibbles | vec4<u32>(0x80808080u)) - vec4<u32>(0x08080808u)) ^ vec4<u32>(0x80808080u);
}
