// A tile of TILE x TILE outputs of a matrix product from cooperative matrices of SIZE x SIZE, for a workgroup of four
// subgroups. Each makes a quarter of the tile: 2 x 2 matrices, or 4 x 4 in a large tile, whose operands serve twice as
// many products but which occupies a quarter as many workgroups.
//
// SUBGROUP is the size of the largest subgroup that the adapter makes. Where it makes smaller ones, several have the
// same quarter and compute the same. What differs between subgroups is where they read and write, never which way they
// take: cooperative operations must be reached by all invocations.
//
// `x_block(m, q)` gives rows m .. m + 4 at 4 q .. 4 q + 4 along K, a column for each k, and zero outside the matrix;
// `w_run(n, q)` gives row n at 4 q .. 4 q + 16, a column for each quad, q being a multiple of 4. The kernel that imports this fragment defines them, and `put(m, n, sum)`.

override TILE: u32 = 4u * SIZE; // or 8 * SIZE
override GUARDED: bool = true; // false where tiles cover the matrices exactly, so that no element lies outside
override SUBGROUP: u32 = 32u;
override WG: u32 = 4u * SUBGROUP;
override LARGE: bool = TILE > 4u * SIZE;
const DEPTH: u32 = 32u;  // elements along K that are staged at once
const STRIDE: u32 = 40u; // of a staged row; with 32 every other row would begin in the same bank

var<workgroup> x_tile: array<f16, 8u * SIZE * STRIDE>;
var<workgroup> w_tile: array<f16, 8u * SIZE * STRIDE>;
var<workgroup> sums: array<f32, 4u * SIZE * SIZE>; // one matrix for each quarter, on its way to y

// Matrices side by side; c and d are there in a large tile alone. By name, because a compiler that does not unroll a
// loop over an array of them would keep them in memory.
struct Rights { a: Right, b: Right, c: Right, d: Right }
struct Sums { a: Sum, b: Sum, c: Sum, d: Sum }
struct Products { a: Sums, b: Sums, c: Sums, d: Sums }

// How many invocations stage the same four rows; there are no adapters with subgroups so small that none would.
override SHARE: u32 = WG / (TILE / 4u);

// The four rows of x that an invocation stages, each time the same.
fn staged_row(local: u32) -> u32 {
    return local / SHARE * 4u;
}

// Rows of x are staged times their scales. Returns the largest magnitudes of the invocation's rows of x so far.
fn stage(local: u32, m0: u32, n0: u32, q0: u32, scales: vec4<f32>, before: vec4<u32>) -> vec4<u32> {
    var largest = before;
    let row = staged_row(local);
    for (var q = local % SHARE; q < DEPTH / 4u; q += SHARE) {
        let block = x_block(m0 + row, q0 + q);
        largest = watched(largest, block);
        let x = transpose(block);
        for (var j = 0u; j < 4u; j++) {
            let at = (row + j) * STRIDE + q * 4u;
            let x_quad = vec4<f16>(scaled(x[j], vec4<f32>(scales[j])));
            x_tile[at] = x_quad.x;
            x_tile[at + 1u] = x_quad.y;
            x_tile[at + 2u] = x_quad.z;
            x_tile[at + 3u] = x_quad.w;
        }
    }
    // Half a block of a row each, so that its scale is found once.
    for (var i = local; i < 2u * TILE; i += WG) {
        let first = i % 2u * 4u;
        let run = w_run(n0 + i / 2u, q0 + first);
        for (var j = 0u; j < 4u; j++) {
            let at = i / 2u * STRIDE + (first + j) * 4u;
            let w_quad = vec4<f16>(run[j]);
            w_tile[at] = w_quad.x;
            w_tile[at + 1u] = w_quad.y;
            w_tile[at + 2u] = w_quad.z;
            w_tile[at + 3u] = w_quad.w;
        }
    }
    return largest;
}

fn left(row: u32, k: u32) -> Left {
    return coopLoadT<Left>(&x_tile[row * STRIDE + k], STRIDE);
}

// A staged row of w is a column of the product's right operand.
fn right(col: u32, k: u32) -> Right {
    return coopLoad<Right>(&w_tile[col * STRIDE + k], STRIDE);
}

fn multiplied(before: Sums, x: Left, w: Rights) -> Sums {
    var sum = before;
    sum.a = coopMultiplyAdd(x, w.a, sum.a);
    sum.b = coopMultiplyAdd(x, w.b, sum.b);
    if (LARGE) {
        sum.c = coopMultiplyAdd(x, w.c, sum.c);
        sum.d = coopMultiplyAdd(x, w.d, sum.d);
    }
    return sum;
}

// Along K from one quad to another; both are multiples of 8, unless the second is the end of K. A second time if rows of
// x must be scaled.
fn tile_product(local: u32, m0: u32, n0: u32, quads: vec2<u32>) -> Products {
    let quarter = local / SUBGROUP;
    let row = quarter / 2u * (TILE / 2u);
    let col = quarter % 2u * (TILE / 2u);
    var sum = Products();
    var scales = vec4<f32>(1.0);
    var is_scaled = false;
    open_rows(local);
    loop {
        var largest = vec4<u32>();
        sum = Products();
        for (var q0 = quads.x; q0 < quads.y; q0 += DEPTH / 4u) {
            largest = stage(local, m0, n0, q0, scales, largest);
            workgroupBarrier();
            for (var k = 0u; k < DEPTH; k += SIZE) {
                var w = Rights();
                w.a = right(col, k);
                w.b = right(col + SIZE, k);
                if (LARGE) {
                    w.c = right(col + 2u * SIZE, k);
                    w.d = right(col + 3u * SIZE, k);
                }
                sum.a = multiplied(sum.a, left(row, k), w);
                sum.b = multiplied(sum.b, left(row + SIZE, k), w);
                if (LARGE) {
                    sum.c = multiplied(sum.c, left(row + 2u * SIZE, k), w);
                    sum.d = multiplied(sum.d, left(row + 3u * SIZE, k), w);
                }
            }
            workgroupBarrier();
        }
        if (is_scaled || !must_scale(local, true, staged_row(local), largest)) {
            break;
        }
        is_scaled = true;
        scales = row_scales(staged_row(local));
    }
    return sum;
}

fn put_sum(local: u32, m: u32, n: u32, sum: Sum) {
    let first = local / SUBGROUP * SIZE * SIZE;
    coopStoreT(sum, &sums[first], SIZE);
    workgroupBarrier();
    for (var i = local % SUBGROUP; i < SIZE * SIZE; i += SUBGROUP) {
        let row = m + i / SIZE;
        put(row, n + i % SIZE, sums[first + i] * row_inverse(row % TILE));
    }
    workgroupBarrier();
}

fn put_sums(local: u32, m: u32, n: u32, sum: Sums) {
    put_sum(local, m, n, sum.a);
    put_sum(local, m, n + SIZE, sum.b);
    if (LARGE) {
        put_sum(local, m, n + 2u * SIZE, sum.c);
        put_sum(local, m, n + 3u * SIZE, sum.d);
    }
}

fn put_products(local: u32, m0: u32, n0: u32, products: Products) {
    let quarter = local / SUBGROUP;
    let m = m0 + quarter / 2u * (TILE / 2u);
    let n = n0 + quarter % 2u * (TILE / 2u);
    put_sums(local, m, n, products.a);
    put_sums(local, m + SIZE, n, products.b);
    if (LARGE) {
        put_sums(local, m + 2u * SIZE, n, products.c);
        put_sums(local, m + 3u * SIZE, n, products.d);
    }
}
