// Weight blocks of two bytes a weight: 32 weights are four vec4. `widen` makes four floats of two words.

struct Block { scales: vec2<f32>, at: u32 }

fn block_at(block: u32) -> Block {
    return Block(vec2<f32>(1.0), block * 4u);
}

fn quants(b: Block, quad: u32) -> vec4<f32> {
    let eight = w[b.at + (quad >> 1u)];
    return widen(select(eight.xy, eight.zw, (quad & 1u) == 1u));
}

// Weights 4 * quad .. 4 * quad + 4 of a block.
fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    return quants(block_at(block), quad);
}
