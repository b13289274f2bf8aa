// Nibbles of a block in the order of Q4_0: byte j holds weight j in its low nibble and weight j + 16 in its high one.

// Those of a quad, each in the low half of a byte.
fn nibbles_of(words: vec4<u32>, quad: u32) -> u32 {
    return (words[quad & 3u] >> (4u * (quad >> 2u))) & 0x0f0f0f0fu;
}
