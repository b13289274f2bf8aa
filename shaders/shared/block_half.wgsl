// Weight blocks of two bytes a weight: 32 weights are four vec4. `widen` makes four floats of two words.

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let eight = w[block * 4u + (quad >> 1u)];
    return widen(select(eight.xy, eight.zw, (quad & 1u) == 1u));
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let a = w[block * 4u];
    let b = w[block * 4u + 1u];
    let c = w[block * 4u + 2u];
    let d = w[block * 4u + 3u];
    return dot(widen(a.xy), x[0]) + dot(widen(a.zw), x[1]) + dot(widen(b.xy), x[2]) + dot(widen(b.zw), x[3])
        + dot(widen(c.xy), x[4]) + dot(widen(c.zw), x[5]) + dot(widen(d.xy), x[6]) + dot(widen(d.zw), x[7]);
}
