// Blocks of a row of x, which has fewer quads than the blocks of w where K is no whole number of blocks or super-blocks.
// Checks of each quad would be a tenth of all instructions of quantised weights, and a quarter of those of F16.

override RAGGED: bool = false; // blocks go past the row's end

// A quad of a row that is there, for those past its end.
fn within_row(quad: u32, quads: u32) -> u32 {
    return select(quad, min(quad, quads - 1u), RAGGED);
}

// Zeros past the row's end.
fn x_of_row(token: u32, quad: u32, quads: u32) -> vec4<f32> {
    let value = x[token * quads + within_row(quad, quads)];
    return select(value, vec4<f32>(), RAGGED && quad >= quads);
}

// Products of a block of each of four rows of w with a block of x.
fn block_dots(blocks: vec4<u32>, x: array<vec4<f32>, 8>) -> vec4<f32> {
    return vec4<f32>(block_dot(blocks.x, x), block_dot(blocks.y, x), block_dot(blocks.z, x), block_dot(blocks.w, x));
}
