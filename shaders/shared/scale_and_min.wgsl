// Scales and mins of the blocks of Q4_K and Q5_K super-blocks.
#import block_scale

// The scale and the min of block `at` of a super-block. The head's words are an f16 for all scales and one for all mins,
// eight low nibbles of 6-bit scales, eight of mins, and the upper two bits of both. Products of the two are exact in f32.
fn scale_and_min(head: vec4<u32>, at: u32) -> vec2<f32> {
    let low = (head.yz >> vec2<u32>(4u * at)) & vec2<u32>(15u);
    let high = (head.ww >> vec2<u32>(2u * at, 2u * at + 16u)) & vec2<u32>(3u);
    return vec2<f32>(half_value(head.x), half_value(head.x >> 16u)) * vec2<f32>(low | (high << vec2<u32>(4u)));
}
