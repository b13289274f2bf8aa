// `matvec` that reads weights, scales and x, and multiplies nothing: a block is worth one number of its words.
#ablate matvec Q4_0
#replace block_dot

fn block_dot(block: u32, x: array<vec4<f32>, 8>) -> f32 {
    let words = w[block] ^ vec4<u32>(tail_half(block));
    let word = (words.x ^ words.y) ^ (words.z ^ words.w);
    // From 1 to 2.
    return bitcast<f32>((word & 0x007fffffu) | 0x3f800000u) + x[0].x;
}
