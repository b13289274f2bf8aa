// In place of `rows_part` where an invocation works alone: it reads x where it is.
#import row_block

fn rows_part(local: u32, rows: vec4<u32>, token: u32, squares: ptr<function, f32>) -> vec4<f32> {
    let row = rows * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    for (var block = 0u; block < params.blocks; block++) {
        var part = array<vec4<f32>, 8>();
        for (var i = 0u; i < 8u; i++) {
            let quad = block * 8u + i;
            part[i] = x_of_row(token, quad, quads);
            if (NORM) {
                *squares += dot(part[i], part[i]);
                part[i] = weighed(part[i], within_row(quad, quads));
            }
        }
        sum += block_dots(row + block, part);
    }
    return sum;
}
