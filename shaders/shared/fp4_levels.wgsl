// Twice the values of 4-bit floats: 0, 1, 2, 3, 4, 6, 8 and 12, and below zero with the fourth bit.
#import bytes

// Those of the nibbles in four bytes. What numbers from 4 on have more than their number is made for four at once: 0, 1, 2
// and 5.
fn fp4_levels(nibbles: u32) -> vec4<f32> {
    let from_four = (nibbles >> 2u) & 0x01010101u;
    let is_third = nibbles & (nibbles >> 1u) & 0x01010101u;
    let more = ((nibbles & 0x03030303u) + (is_third << 1u)) & ((from_four << 3u) - from_four);
    let levels = bytes((nibbles & 0x07070707u) + more, 0.0);
    let signs = (vec4<u32>(nibbles) << vec4<u32>(28u, 20u, 12u, 4u)) & vec4<u32>(0x80000000u);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(levels) | signs);
}
