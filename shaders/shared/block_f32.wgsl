// Weight blocks of F32: 32 weights are eight vec4. See `DType` in src/dtype.rs for the packed layout.

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(w[block * 8u + quad]);
}

// Sum over the block of weight times x.
fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let at = block * 8u;
    return dot(bitcast<vec4<f32>>(w[at]), x[0]) + dot(bitcast<vec4<f32>>(w[at + 1u]), x[1])
        + dot(bitcast<vec4<f32>>(w[at + 2u]), x[2]) + dot(bitcast<vec4<f32>>(w[at + 3u]), x[3])
        + dot(bitcast<vec4<f32>>(w[at + 4u]), x[4]) + dot(bitcast<vec4<f32>>(w[at + 5u]), x[5])
        + dot(bitcast<vec4<f32>>(w[at + 6u]), x[6]) + dot(bitcast<vec4<f32>>(w[at + 7u]), x[7]);
}
