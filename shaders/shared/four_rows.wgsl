// Products of four rows of w with one x. LANES invocations share the blocks of K and add up their parts.
//
// With NORM, x is normalised on the way (RMSNorm, `vector` being its weight):
//
//     w . (vector * x / sqrt(mean of x^2 + eps)) = (w . (vector * x)) / sqrt(mean of x^2 + eps)
//
// The mean comes from the loop that reads x anyway, and the factor is the same for all rows.

override NORM: bool = false;

fn weighed(value: vec4<f32>, quad: u32) -> vec4<f32> {
    return value * vector[quad];
}

// All invocations must call it; the first of each LANES gets the products.
fn four_rows(local: u32, rows: vec4<u32>, token: u32) -> vec4<f32> {
    var squares = 0.0;
    let part = rows_part(local, rows, token, &squares);
    lanes_barrier();
    var sum = lanes_sum(local, part);
    if (NORM) {
        lanes_barrier();
        sum /= sqrt(workgroup_sum(local, squares) / f32(params.dim) + params.eps);
    }
    return sum;
}
