// Weight blocks of F32: 32 weights are eight vec4. See `DType` in src/dtype.rs for the packed layout.

struct Block { scales: vec2<f32>, at: u32 }

fn block_at(block: u32) -> Block {
    return Block(vec2<f32>(1.0), block * 8u);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(w[b.at + quad]);
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return quants(block_at(block), quad);
}
