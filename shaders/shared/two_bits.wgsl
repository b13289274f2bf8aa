// Quants of two bits: quads of weights take turns with the two words of a block; quad q has bits 2 (q / 2) of each byte.

// Those of a quad, each in the lowest bits of a byte.
fn two_bits(words: vec2<u32>, quad: u32) -> u32 {
    return (words[quad & 1u] >> (quad & 6u)) & 0x03030303u;
}
