// Twice the values of 4-bit floats: 0, 1, 2, 3, 4, 6, 8 and 12, and below zero with the fourth bit.

// Those of the nibbles in four bytes.
fn fp4_levels(nibbles: u32) -> vec4<f32> {
    let at = unpack4xU8(nibbles);
    let levels = vec4<f32>((vec4<u32>(0xc8643210u) >> (4u * (at & vec4<u32>(7u)))) & vec4<u32>(15u));
    return select(levels, -levels, at > vec4<u32>(7u));
}
