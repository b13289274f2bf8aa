// Products of four rows of w with one x. LANES invocations share the blocks of K and add up their parts.
//
// With NORM, x is normalised on the way (RMSNorm, `vector` being its weight):
//
//     w . (vector * x / sqrt(mean of x^2 + eps)) = (w . (vector * x)) / sqrt(mean of x^2 + eps)
//
// The mean comes from the loop that reads x anyway, and the factor is the same for all rows.

#import row_block

override NORM: bool = false;

// All invocations must call it; the first of each LANES gets the products.
fn four_rows(local: u32, rows: vec4<u32>, token: u32) -> vec4<f32> {
    let row = rows * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    var squares = vec4<f32>();
    for (var block = local % LANES; block < params.blocks; block += LANES) {
        var part = array<vec4<f32>, 8>();
        for (var i = 0u; i < 8u; i++) {
            let quad = block * 8u + i;
            part[i] = x_of_row(token, quad, quads);
            if (NORM) {
                squares += part[i] * part[i];
                part[i] *= vector[within_row(quad, quads)];
            }
        }
        sum += vec4<f32>(
            block_dot(row.x + block, part),
            block_dot(row.y + block, part),
            block_dot(row.z + block, part),
            block_dot(row.w + block, part),
        );
    }
    sum = lanes_sum(local, sum);
    if (NORM) {
        lanes_barrier();
        let total = lanes_sum(local, squares);
        sum /= sqrt((total.x + total.y + total.z + total.w) / f32(params.dim) + params.eps);
    }
    return sum;
}
