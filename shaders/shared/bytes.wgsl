// Bytes as numbers, exactly.

// By bits: a byte in the lowest bits of the number 2^23 is added to it. On AMD's GPUs four bytes take up to six instructions
// more than with conversions (RADV); NVIDIA's convert at a fraction of the rate of sums.
override BY_BITS: bool = false;

// The four bytes of a word, lowest first, less `less`, an integer up to 2^15.
fn bytes(word: u32, less: f32) -> vec4<f32> {
    if (!BY_BITS) {
        return vec4<f32>(unpack4xU8(word)) - less;
    }
    let pairs = vec2<u32>(word, word >> 16u);
    let even = bitcast<vec2<f32>>((pairs & vec2<u32>(0xffu)) | vec2<u32>(0x4b000000u)) - vec2<f32>(8388608.0 + less);
    // 2^23 + 256 * byte
    let scaled = bitcast<vec2<f32>>((pairs & vec2<u32>(0xff00u)) | vec2<u32>(0x4b000000u));
    let odd = fma(scaled, vec2<f32>(0.00390625), vec2<f32>(-32768.0 - less));
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

// The same of signed bytes.
fn signed_bytes(word: u32) -> vec4<f32> {
    if (!BY_BITS) {
        return vec4<f32>(unpack4xI8(word));
    }
    return bytes(word ^ 0x80808080u, 128.0);
}
