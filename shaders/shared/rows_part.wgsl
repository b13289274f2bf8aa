#import row_block

// An invocation's part of the products of four rows of w with one x: LANES of them share the blocks of K.
fn rows_part(local: u32, rows: vec4<u32>, token: u32) -> vec4<f32> {
    let row = rows * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    for (var block = local % LANES; block < params.blocks; block += LANES) {
        var part = array<vec4<f32>, 8>();
        for (var i = 0u; i < 8u; i++) {
            part[i] = x_of_row(token, block * 8u + i, quads);
        }
        sum += vec4<f32>(
            block_dot(row.x + block, part),
            block_dot(row.y + block, part),
            block_dot(row.z + block, part),
            block_dot(row.w + block, part),
        );
    }
    return sum;
}
