// Weight blocks of F16: 32 weights are four vec4, two a word.
#import block_half

// Four weights from two words.
fn widen(words: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
}
