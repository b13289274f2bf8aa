// Single quads of weights of types whose fragments have no shorter way to them.

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let b = block_at(block);
    return b.scales[quad >> 2u] * quants(b, quad);
}
