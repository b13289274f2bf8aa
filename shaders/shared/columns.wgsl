// Products of four rows of w with COLUMNS rows of x, so that a weight is read and unpacked once for all of them; with one
// column it is `four_rows`.
//
// An invocation takes two quads of a block that are half a block apart, which most types keep in the same words, and four
// neighbours share a block: they read x, of which there is more than of w, side by side.
#import four_rows

struct Columns {
    starts: array<u32, 8>, // rows of x, in quads
    sums: array<vec4<f32>, 8>,
    squares: array<f32, 8>,
}

// Adds the products with quad `at` of one row of x; `four` has the weights of each of its elements in four rows.
fn add_column(c: u32, at: u32, four: mat4x4<f32>, columns: ptr<function, Columns>) {
    let quad = x[(*columns).starts[c] + at];
    var sum = (*columns).sums[c];
    sum += four[0] * quad.x;
    sum += four[1] * quad.y;
    sum += four[2] * quad.z;
    sum += four[3] * quad.w;
    (*columns).sums[c] = sum;
    if (NORM) {
        var squares = (*columns).squares[c];
        squares += quad.x * quad.x;
        squares += quad.y * quad.y;
        squares += quad.z * quad.z;
        squares += quad.w * quad.w;
        (*columns).squares[c] = squares;
    }
}

// The same of all rows of x, with a quad of a block.
fn add_quad(row: vec4<u32>, block: u32, quad: u32, columns: ptr<function, Columns>) {
    let at = block * 8u + quad;
    var four = transpose(mat4x4<f32>(
        block_quad(row.x + block, quad),
        block_quad(row.y + block, quad),
        block_quad(row.z + block, quad),
        block_quad(row.w + block, quad),
    ));
    if (NORM) {
        let norm = vector[at];
        four = mat4x4<f32>(four[0] * norm.x, four[1] * norm.y, four[2] * norm.z, four[3] * norm.w);
    }
    add_column(0u, at, four, columns);
    add_column(1u, at, four, columns);
    if (COLUMNS > 2u) {
        add_column(2u, at, four, columns);
        add_column(3u, at, four, columns);
    }
    if (COLUMNS > 4u) {
        add_column(4u, at, four, columns);
        add_column(5u, at, four, columns);
        add_column(6u, at, four, columns);
        add_column(7u, at, four, columns);
    }
}

// All invocations must call it; the first of each SHARES gets the products of column `lanes_column`. Tokens past the end
// repeat the last one.
fn products(local: u32, rows: vec4<u32>, first_token: u32) -> vec4<f32> {
    if (COLUMNS == 1u) {
        return four_rows(local, rows, first_token);
    }
    var columns = Columns();
    for (var c = 0u; c < 8u; c++) {
        columns.starts[c] = min(first_token + c, params.n_tokens - 1u) * (params.dim / 4u);
    }
    let row = rows * params.blocks;
    let whole = params.dim / 32u;
    for (var pair = local % LANES; pair < whole * 4u; pair += LANES) {
        add_quad(row, pair >> 2u, pair & 3u, &columns);
        add_quad(row, pair >> 2u, (pair & 3u) | 4u, &columns);
    }
    // What a last block has of x.
    for (var quad = local % LANES; quad < params.dim / 4u - whole * 8u; quad += LANES) {
        add_quad(row, whole, quad, &columns);
    }
    var sum = lanes_deal(local, columns.sums);
    if (NORM) {
        lanes_barrier();
        sum /= sqrt(lanes_deal_numbers(local, columns.squares) / f32(params.dim) + params.eps);
    }
    return sum;
}
