// Tiles whose operands are staged in half precision, by cooperative matrices of SIZE x SIZE: four or eight SUBGROUPS, ACROSS
// of them side by side, with up to 4 x 4 matrices each.
//
// SUBGROUP is the size of the largest subgroup that the adapter makes, MIN_SUBGROUP of the smallest. Where it makes smaller
// ones, several have the same part of the tile and compute the same; they must not add to y directly. What differs between
// subgroups is where they read and write, never which way they take: cooperative operations must be reached by all
// invocations.

override MIN_SUBGROUP: u32 = 32u;
override SUBGROUP: u32 = 32u;
override ACROSS: u32 = 2u;
override SUBGROUPS: u32 = 4u;
override WG: u32 = SUBGROUPS * SUBGROUP;
override HIGH: u32 = ROWS * ACROSS / (SUBGROUPS * SIZE); // matrices of a subgroup: 1, 2 or 4 one below the other
override WIDE: u32 = COLS / ACROSS / SIZE; // and side by side
override DEPTH: u32 = 32u; // or 64: half as many barriers
override STRIDE: u32 = DEPTH / 4u + 2u; // quads of a staged row; without two more every other row would begin in the same bank

override SUMS: u32 = SUBGROUPS * SIZE * SIZE;
var<workgroup> sums: array<f32, SUMS>; // a matrix of each subgroup, on its way to y
// Both of 16 bytes, of which the first 4 are used: matrices load from addresses that are multiples of 16, and NVIDIA's driver
// places small variables before large ones.
var<workgroup> is_any_scaled: array<atomic<u32>, 4>;
var<workgroup> must_scale: vec4<u32>;

// By name, because a compiler that does not unroll a loop over an array of matrices would keep them in memory.
struct Rights { a: Right, b: Right, c: Right, d: Right }
struct Sums { a: Sum, b: Sum, c: Sum, d: Sum }
struct Products { a: Sums, b: Sums, c: Sums, d: Sums }

// The first row of x, and of w, of a subgroup's part of the tile.
fn part(local: u32) -> vec2<u32> {
    let subgroup = local / SUBGROUP;
    return vec2<u32>(subgroup / ACROSS * HIGH, subgroup % ACROSS * WIDE) * SIZE;
}

fn left(row: u32, quad: u32) -> Left {
    return coopLoadT<Left>(&staged[(row * STRIDE + quad) * (4u / PER)], STRIDE * 4u / PER);
}

// A staged row of w is a column of the product's right operand.
fn right(col: u32, quad: u32) -> Right {
    return coopLoad<Right>(&staged[((ROWS + col) * STRIDE + quad) * (4u / PER)], STRIDE * 4u / PER);
}

fn with_rights(before: Sums, x: Left, w: Rights) -> Sums {
    var sum = before;
    sum.a = coopMultiplyAdd(x, w.a, sum.a);
    if (WIDE > 1u) {
        sum.b = coopMultiplyAdd(x, w.b, sum.b);
    }
    if (WIDE > 2u) {
        sum.c = coopMultiplyAdd(x, w.c, sum.c);
        sum.d = coopMultiplyAdd(x, w.d, sum.d);
    }
    return sum;
}

fn multiplied(local: u32, base: u32, before: Products) -> Products {
    var sum = before;
    let first = part(local);
    for (var i = 0u; i < DEPTH / 4u; i += SIZE / 4u) {
        let quad = base + i;
        var w = Rights();
        w.a = right(first.y, quad);
        if (WIDE > 1u) {
            w.b = right(first.y + SIZE, quad);
        }
        if (WIDE > 2u) {
            w.c = right(first.y + 2u * SIZE, quad);
            w.d = right(first.y + 3u * SIZE, quad);
        }
        sum.a = with_rights(sum.a, left(first.x, quad), w);
        if (HIGH > 1u) {
            sum.b = with_rights(sum.b, left(first.x + SIZE, quad), w);
        }
        if (HIGH > 2u) {
            sum.c = with_rights(sum.c, left(first.x + 2u * SIZE, quad), w);
            sum.d = with_rights(sum.d, left(first.x + 3u * SIZE, quad), w);
        }
    }
    return sum;
}

// Whether a row of the tile was taken times a power of two, the same for all invocations.
fn is_scaled(local: u32, m0: u32) -> bool {
    if (local == 0u) {
        atomicStore(&is_any_scaled[0], 0u);
    }
    workgroupBarrier();
    for (var row = local; row < ROWS; row += WG) {
        if (inverse[within(m0 + row, params.n_tokens)] != 1.0) {
            atomicStore(&is_any_scaled[0], 1u);
        }
    }
    workgroupBarrier();
    if (local == 0u) {
        must_scale = vec4<u32>(atomicLoad(&is_any_scaled[0]));
    }
    return workgroupUniformLoad(&must_scale).x != 0u;
}

fn put_sum(local: u32, m: u32, n: u32, sum: Sum) {
    let first = local / SUBGROUP * SIZE * SIZE;
    coopStoreT(sum, &sums[first], SIZE);
    workgroupBarrier();
    for (var i = local % SUBGROUP; i < SIZE * SIZE; i += SUBGROUP) {
        let row = m + i / SIZE;
        put(row, n + i % SIZE, sums[first + i] * inverse[within(row, params.n_tokens)]);
    }
    workgroupBarrier();
}

fn put_sums(local: u32, m: u32, n: u32, sum: Sums) {
    put_sum(local, m, n, sum.a);
    if (WIDE > 1u) {
        put_sum(local, m, n + SIZE, sum.b);
    }
    if (WIDE > 2u) {
        put_sum(local, m, n + 2u * SIZE, sum.c);
        put_sum(local, m, n + 3u * SIZE, sum.d);
    }
}

// To y as it is, or added to it.
fn store_sum(m: u32, n: u32, sum: Sum) {
    let at = (first_row + m) * params.y_stride + params.y_start + n;
    let stride = params.y_stride;
    if ((params.flags & ACCUMULATE) != 0u) {
        let before = coopLoadT<Sum>(&y[at], stride);
        let total = before + sum;
        coopStoreT(total, &y[at], stride);
    } else {
        coopStoreT(sum, &y[at], stride);
    }
}

fn store_sums(m: u32, n: u32, sum: Sums) {
    store_sum(m, n, sum.a);
    if (WIDE > 1u) {
        store_sum(m, n + SIZE, sum.b);
    }
    if (WIDE > 2u) {
        store_sum(m, n + 2u * SIZE, sum.c);
        store_sum(m, n + 3u * SIZE, sum.d);
    }
}

fn put_products(local: u32, m0: u32, n0: u32, products: Products) {
    let first = vec2<u32>(m0, n0) + part(local);
    let m = first.x;
    let n = first.y;
    let adds_once = MIN_SUBGROUP == SUBGROUP || (params.flags & ACCUMULATE) == 0u;
    let is_plain = adds_once && !GUARDED && !GELU && !TANH && (params.flags & BIAS) == 0u;
    if (is_plain && !is_scaled(local, m0)) {
        store_sums(m, n, products.a);
        if (HIGH > 1u) {
            store_sums(m + SIZE, n, products.b);
        }
        if (HIGH > 2u) {
            store_sums(m + 2u * SIZE, n, products.c);
            store_sums(m + 3u * SIZE, n, products.d);
        }
        return;
    }
    put_sums(local, m, n, products.a);
    if (HIGH > 1u) {
        put_sums(local, m + SIZE, n, products.b);
    }
    if (HIGH > 2u) {
        put_sums(local, m + 2u * SIZE, n, products.c);
        put_sums(local, m + 3u * SIZE, n, products.d);
    }
}
