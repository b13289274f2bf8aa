// Weight blocks as quants with a scale for each half. A type's fragment has `Block`, with `scales` and what its quants are
// made of, `block_at`, which loads one, and `quants`, which makes four numbers of it.

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let b = block_at(block);
    return b.scales[quad >> 2u] * quants(b, quad);
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let b = block_at(block);
    return dot(b.scales, vec2<f32>(
        dot(quants(b, 0u), x[0]) + dot(quants(b, 1u), x[1]) + dot(quants(b, 2u), x[2]) + dot(quants(b, 3u), x[3]),
        dot(quants(b, 4u), x[4]) + dot(quants(b, 5u), x[5]) + dot(quants(b, 6u), x[6]) + dot(quants(b, 7u), x[7]),
    ));
}
