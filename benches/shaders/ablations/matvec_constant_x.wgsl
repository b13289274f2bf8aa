// `matvec` whose x is one number, which costs no memory and no barrier.
#ablate matvec Q4_0
#replace rows_part

fn rows_part(local: u32, rows: vec4<u32>, token: u32, squares: ptr<function, f32>) -> vec4<f32> {
    let row = rows * params.blocks;
    // No compiler knows what it is.
    let value = vec4<f32>(f32(params.n_tokens));
    let part = array<vec4<f32>, 8>(value, value, value, value, value, value, value, value);
    var sum = vec4<f32>();
    for (var at = local % LANES; at < params.blocks; at += LANES) {
        sum += block_dots(row + at, part);
    }
    return sum;
}
