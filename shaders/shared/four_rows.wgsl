// Products of four rows of w with COLUMNS rows of x. LANES invocations share the blocks of K and add up their parts. A block
// of w is unpacked once for all rows of x, and each of these gets the same operations in the same order, however many there
// are.
//
// With NORM, x is normalised on the way (RMSNorm, `vector` being its weight):
//
//     w . (vector * x / sqrt(mean of x^2 + eps)) = (w . (vector * x)) / sqrt(mean of x^2 + eps)
//
// The mean comes from the loop that reads x anyway, and the factor is the same for all rows of w.

override NORM: bool = false;
override COLUMNS: u32 = 1u;    // 1, 2, 4 or 8
override GUARDED: bool = true; // false where K is a multiple of 32, so that no block goes past the end of x

// Four sums for each row of x. They are named by constants alone, so that they stay in registers.
alias Sums = array<vec4<f32>, 8>;

// A block of each of four rows of w.
struct Blocks { a: Block, b: Block, c: Block, d: Block }

// Four numbers of a row of x, and their squares.
fn x_quad_of(token: u32, quad: u32) -> vec4<f32> {
    let quads = params.dim / 4u;
    // Rows past the end repeat the last one.
    let row = select(token, min(token, params.n_tokens - 1u), COLUMNS > 1u) * quads;
    if (GUARDED) {
        return select(vec4<f32>(), x[row + min(quad, quads - 1u)], quad < quads);
    }
    return x[row + quad];
}

fn add_product(
    i: u32, sums: ptr<function, Sums>, squares: ptr<function, array<f32, 8>>,
    q: mat4x4<f32>, gain: vec4<f32>, token: u32, quad: u32,
) {
    var part = x_quad_of(token + i, quad);
    if (NORM) {
        (*squares)[i] += dot(part, part);
        part *= gain;
    }
    (*sums)[i] += vec4<f32>(dot(q[0], part), dot(q[1], part), dot(q[2], part), dot(q[3], part));
}

// Adds the products of quad `i` of the blocks, which meets quad `quad` of x.
fn add_products(
    sums: ptr<function, Sums>, squares: ptr<function, array<f32, 8>>, blocks: Blocks, i: u32, token: u32, quad: u32,
) {
    let q = mat4x4<f32>(quants(blocks.a, i), quants(blocks.b, i), quants(blocks.c, i), quants(blocks.d, i));
    var gain = vec4<f32>();
    if (NORM) {
        gain = vector[select(quad, min(quad, params.dim / 4u - 1u), GUARDED)];
    }
    add_product(0u, sums, squares, q, gain, token, quad);
    if (COLUMNS > 1u) {
        add_product(1u, sums, squares, q, gain, token, quad);
    }
    if (COLUMNS > 2u) {
        add_product(2u, sums, squares, q, gain, token, quad);
        add_product(3u, sums, squares, q, gain, token, quad);
    }
    if (COLUMNS > 4u) {
        add_product(4u, sums, squares, q, gain, token, quad);
        add_product(5u, sums, squares, q, gain, token, quad);
        add_product(6u, sums, squares, q, gain, token, quad);
        add_product(7u, sums, squares, q, gain, token, quad);
    }
}

// Adds parts of sums, each row of w times its scale.
fn add_scaled(sums: ptr<function, Sums>, scales: vec4<f32>, parts: ptr<function, Sums>) {
    (*sums)[0] += scales * (*parts)[0];
    if (COLUMNS > 1u) {
        (*sums)[1] += scales * (*parts)[1];
    }
    if (COLUMNS > 2u) {
        (*sums)[2] += scales * (*parts)[2];
        (*sums)[3] += scales * (*parts)[3];
    }
    if (COLUMNS > 4u) {
        (*sums)[4] += scales * (*parts)[4];
        (*sums)[5] += scales * (*parts)[5];
        (*sums)[6] += scales * (*parts)[6];
        (*sums)[7] += scales * (*parts)[7];
    }
}

fn add_up(local: u32, sums: ptr<function, Sums>, i: u32, factor: f32) {
    (*sums)[i] = factor * lanes_sum(local, (*sums)[i]);
}

// The sums for one of COLUMNS rows of x, where it is not known which before the shader runs.
fn column_of(sums: ptr<function, Sums>, i: u32) -> vec4<f32> {
    var sum = (*sums)[0];
    if (COLUMNS > 1u) {
        sum = select(sum, (*sums)[1], i == 1u);
    }
    if (COLUMNS > 2u) {
        sum = select(sum, (*sums)[2], i == 2u);
        sum = select(sum, (*sums)[3], i == 3u);
    }
    if (COLUMNS > 4u) {
        sum = select(sum, (*sums)[4], i == 4u);
        sum = select(sum, (*sums)[5], i == 5u);
        sum = select(sum, (*sums)[6], i == 6u);
        sum = select(sum, (*sums)[7], i == 7u);
    }
    return sum;
}

// All invocations must call it, and all get the products with the rows of x from `token` on.
fn four_rows(local: u32, rows: vec4<u32>, token: u32) -> Sums {
    let row = rows * params.blocks;
    var sums = Sums();
    var squares = array<f32, 8>();
    for (var block = local % LANES; block < params.blocks; block += LANES) {
        let b = Blocks(
            block_at(row.x + block), block_at(row.y + block), block_at(row.z + block), block_at(row.w + block),
        );
        let quad = block * 8u;
        var low = Sums();
        add_products(&low, &squares, b, 0u, token, quad);
        add_products(&low, &squares, b, 1u, token, quad + 1u);
        add_products(&low, &squares, b, 2u, token, quad + 2u);
        add_products(&low, &squares, b, 3u, token, quad + 3u);
        add_scaled(&sums, vec4<f32>(b.a.scales.x, b.b.scales.x, b.c.scales.x, b.d.scales.x), &low);
        var high = Sums();
        add_products(&high, &squares, b, 4u, token, quad + 4u);
        add_products(&high, &squares, b, 5u, token, quad + 5u);
        add_products(&high, &squares, b, 6u, token, quad + 6u);
        add_products(&high, &squares, b, 7u, token, quad + 7u);
        add_scaled(&sums, vec4<f32>(b.a.scales.y, b.b.scales.y, b.c.scales.y, b.d.scales.y), &high);
    }
    // Of each row of x.
    var near = vec4<f32>(1.0);
    var far = vec4<f32>(1.0);
    if (NORM) {
        let dim = f32(params.dim);
        near = inverseSqrt(lanes_sum(local, vec4<f32>(squares[0], squares[1], squares[2], squares[3])) / dim + params.eps);
        lanes_barrier();
        if (COLUMNS > 4u) {
            far = lanes_sum(local, vec4<f32>(squares[4], squares[5], squares[6], squares[7]));
            far = inverseSqrt(far / dim + params.eps);
            lanes_barrier();
        }
    }
    add_up(local, &sums, 0u, near.x);
    if (COLUMNS > 1u) {
        lanes_barrier();
        add_up(local, &sums, 1u, near.y);
    }
    if (COLUMNS > 2u) {
        lanes_barrier();
        add_up(local, &sums, 2u, near.z);
        lanes_barrier();
        add_up(local, &sums, 3u, near.w);
    }
    if (COLUMNS > 4u) {
        lanes_barrier();
        add_up(local, &sums, 4u, far.x);
        lanes_barrier();
        add_up(local, &sums, 5u, far.y);
        lanes_barrier();
        add_up(local, &sums, 6u, far.z);
        lanes_barrier();
        add_up(local, &sums, 7u, far.w);
    }
    return sums;
}
