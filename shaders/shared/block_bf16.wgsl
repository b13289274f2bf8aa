// Weight blocks of BF16: 32 weights are four vec4, two a word, each the upper half of an F32.
#import block_half

// Four weights from two words.
fn widen(words: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
}
