// The sixteen levels of IQ4_NL and IQ4_XS, eight of which are four bytes of two words each.

// Those that the nibbles in four bytes count.
fn iq4_levels(nibbles: u32) -> vec4<f32> {
    let at = unpack4xU8(nibbles);
    let lower = select(vec4<u32>(0xbfad9881u), vec4<u32>(0xf6eaddcfu), (at & vec4<u32>(4u)) != vec4<u32>());
    let upper = select(vec4<u32>(0x26190d01u), vec4<u32>(0x71594535u), (at & vec4<u32>(4u)) != vec4<u32>());
    let four = bitcast<vec4<i32>>(select(lower, upper, (at & vec4<u32>(8u)) != vec4<u32>()));
    // Its byte to the top, and down again with its sign.
    return vec4<f32>((four << (vec4<u32>(24u) - 8u * (at & vec4<u32>(3u)))) >> vec4<u32>(24u));
}
