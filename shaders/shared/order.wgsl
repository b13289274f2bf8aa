// Order and finiteness of floats by their bits: a compiler may assume that there is no NaN, so `x != x` proves nothing.

const NON_FINITE: u32 = 0xffffffffu; // stands for "no token": some logit is NaN or infinite

fn is_finite(value: f32) -> bool {
    return (bitcast<u32>(value) & 0x7f800000u) != 0x7f800000u;
}

// Unsigned order of keys is the order of the floats.
fn order_key(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}
