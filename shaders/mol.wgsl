// Mixture of logits: the score of an item for a query is a mean of products of their components, weighted by a gate that
// sees these products. In one pass over the items, for N queries' and M items' components:
//
//     l[n, m] = sum over k of queries[n, k] * w[m, k]                       queries hold 1 / temperature
//     c[p]    = b2[p] + sum over h of W2[p, h] * act(b1[h] + sum over p of W1[h, p] * l[p])
//     z[p]    = A[p] * B[p] + c[p]                                          A of the query, B of the item
//     score   = sum over p of softmax(z * sigmoid(z))[p] * l[p]
//
// Other forms: COMBINE and ALIGNED. Pairs p = (n, m) are kept in up to four 4 x 4 blocks in registers, a column for each n
// and a row for each m; block j has the j % N4th four of n and the j / N4th four of m. What pads them has a gate of zero.
//
// Dispatch (tiles of WG items and QUERIES queries folded over x and y). Ding & Zhai 2024, arXiv:2407.15462.
#import block F32=block_f32 F16=block_f16 Q8_0=block_q8_0
#import gate t0=gate_staged scalar=gate_direct
#import fold

struct Params {
    n_queries: u32, n_items: u32, n_scores: u32, quads: u32, // B, I, columns of `scores`, D / 4
    blocks: u32, w_scales: u32, hidden: u32, item_quads: u32, // blocks in a row of w, -, H, G / 4
    query_components: u32, item_components: u32, pairs: u32, first_group: u32, // N, M, P
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;            // [M, I, D], packed
@group(0) @binding(2) var<storage, read> item_gates: array<vec4<f32>>;   // [I, G]: B; or what W1 makes of the item
@group(0) @binding(3) var<storage, read> queries: array<vec4<f32>>;      // [B, N, D]
@group(0) @binding(4) var<storage, read> query_gates: array<vec4<f32>>;  // [B, G]
@group(0) @binding(5) var<storage, read> gate: array<vec4<f32>>;         // [H, ROW]: W1, W2 transposed, b1; b2; mask, 1 for pairs and 0 for padding
@group(0) @binding(6) var<storage, read> ids: array<u32>;                // [B, n_scores]; read if GATHERED
@group(0) @binding(7) var<storage, read_write> scores: array<f32>;       // [B, n_scores]

override QUERIES: u32 = 1u; // that an invocation takes, 1, 2 or 4
override N4: u32 = 1u;
override BLOCKS: u32 = 1u; // N4 times the fours of m, at most 4
override COMBINE: u32 = 1u; // 0: gate = A + B + c; 1: as above; 2: the sigmoid is of z normalised to mean 0 and variance 1
override ACT: u32 = 0u; // 0: z * sigmoid(z); 1: max(z, 0); 2: z
override ALIGNED: bool = false; // pairs are (p, p), and W1 sees query and item: b1[h] + sum is A[h] + B[h], gate is c
override GATHERED: bool = false; // column j of a query is item ids[j], none if that is past the end
override BOUND: bool = false; // the score is the highest l

// Quads of a row of `gate`.
override ROW: u32 = 8u * BLOCKS + 1u;

const LOWEST: f32 = -3.4028234e38;

struct Pairs { a: mat4x4<f32>, b: mat4x4<f32>, c: mat4x4<f32>, d: mat4x4<f32> }

fn fours(first: u32, n: u32) -> vec4<u32> {
    return min(first + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(n - 1u));
}

// Rows: a quad of four components of an item. Those past the last repeat it.
fn item_four(m: u32, item: u32, quad: u32) -> mat4x4<f32> {
    let row = (fours(m, params.item_components) * params.n_items + item) * params.blocks + quad / 8u;
    let i = quad % 8u;
    return transpose(
        mat4x4<f32>(block_quad(row.x, i), block_quad(row.y, i), block_quad(row.z, i), block_quad(row.w, i)),
    );
}

// Columns: a quad of four components of a query.
fn query_four(n: u32, query: u32, quad: u32) -> mat4x4<f32> {
    let row = (fours(n, params.query_components) + query * params.query_components) * params.quads + quad;
    return mat4x4<f32>(queries[row.x], queries[row.y], queries[row.z], queries[row.w]);
}

fn pick(x: Pairs, i: u32) -> mat4x4<f32> {
    if (i == 0u) {
        return x.a;
    }
    if (i == 1u) {
        return x.b;
    }
    if (i == 2u) {
        return x.c;
    }
    return x.d;
}

// All components of an item, four a matrix.
fn item_fours(item: u32, quad: u32) -> Pairs {
    var fours = Pairs();
    fours.a = item_four(0u, item, quad);
    if (BLOCKS > N4) {
        fours.b = item_four(4u, item, quad);
    }
    if (BLOCKS > 2u * N4) {
        fours.c = item_four(8u, item, quad);
    }
    if (BLOCKS > 3u * N4) {
        fours.d = item_four(12u, item, quad);
    }
    return fours;
}

fn query_fours(query: u32, quad: u32) -> Pairs {
    var fours = Pairs();
    fours.a = query_four(0u, query, quad);
    if (N4 > 1u) {
        fours.b = query_four(4u, query, quad);
    }
    if (N4 > 2u) {
        fours.c = query_four(8u, query, quad);
    }
    if (N4 > 3u) {
        fours.d = query_four(12u, query, quad);
    }
    return fours;
}

// Adds the products of a quad.
fn multiply(l: ptr<function, Pairs>, items: Pairs, query: u32, quad: u32) {
    let fours = query_fours(query, quad);
    (*l).a += items.a * fours.a;
    if (BLOCKS > 1u) {
        (*l).b += pick(items, 1u / N4) * pick(fours, 1u % N4);
    }
    if (BLOCKS > 2u) {
        (*l).c += pick(items, 2u / N4) * pick(fours, 2u % N4);
    }
    if (BLOCKS > 3u) {
        (*l).d += pick(items, 3u / N4) * pick(fours, 3u % N4);
    }
}

fn products(a: mat4x4<f32>, b: mat4x4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]);
}

// Aligned pairs: elements 4 i .. 4 i + 4 of component p are column i of the block; the same of the items.
fn aligned_four(p: u32, item: u32, query: u32, quad: u32) -> vec4<f32> {
    let pair = products(
        item_four(p, item, quad),
        transpose(query_four(p, query, quad)),
    );
    return (pair[0] + pair[1]) + (pair[2] + pair[3]);
}

fn aligned_block(first: u32, item: u32, query: u32, quad: u32) -> mat4x4<f32> {
    return mat4x4<f32>(
        aligned_four(first, item, query, quad),
        aligned_four(first + 4u, item, query, quad),
        aligned_four(first + 8u, item, query, quad),
        aligned_four(first + 12u, item, query, quad),
    );
}

fn multiply_aligned(l: ptr<function, Pairs>, item: u32, query: u32, quad: u32) {
    (*l).a += aligned_block(0u, item, query, quad);
    if (BLOCKS > 1u) {
        (*l).b += aligned_block(16u, item, query, quad);
    }
    if (BLOCKS > 2u) {
        (*l).c += aligned_block(32u, item, query, quad);
    }
    if (BLOCKS > 3u) {
        (*l).d += aligned_block(48u, item, query, quad);
    }
}

// Sixteen numbers of a staged row.
fn weight_block(first: u32, row: u32, i: u32) -> mat4x4<f32> {
    return mat4x4<f32>(weight(first, row, i), weight(first, row, i + 1u), weight(first, row, i + 2u),
        weight(first, row, i + 3u));
}

fn weights(first: u32, row: u32, at: u32) -> Pairs {
    var value = Pairs();
    value.a = weight_block(first, row, at);
    if (BLOCKS > 1u) {
        value.b = weight_block(first, row, at + 4u);
    }
    if (BLOCKS > 2u) {
        value.c = weight_block(first, row, at + 8u);
    }
    if (BLOCKS > 3u) {
        value.d = weight_block(first, row, at + 12u);
    }
    return value;
}

fn dot_block(a: mat4x4<f32>, b: mat4x4<f32>) -> vec4<f32> {
    return fma(a[3], b[3], fma(a[2], b[2], fma(a[1], b[1], a[0] * b[0])));
}

fn total(x: vec4<f32>) -> f32 {
    return (x.x + x.y) + (x.z + x.w);
}

fn dot_pairs(a: Pairs, b: Pairs) -> f32 {
    var sum = dot_block(a.a, b.a);
    if (BLOCKS > 1u) {
        sum += dot_block(a.b, b.b);
    }
    if (BLOCKS > 2u) {
        sum += dot_block(a.c, b.c);
    }
    if (BLOCKS > 3u) {
        sum += dot_block(a.d, b.d);
    }
    return total(sum);
}

fn add_block(sum: mat4x4<f32>, x: mat4x4<f32>, factor: f32) -> mat4x4<f32> {
    let f = vec4<f32>(factor);
    return mat4x4<f32>(fma(x[0], f, sum[0]), fma(x[1], f, sum[1]), fma(x[2], f, sum[2]), fma(x[3], f, sum[3]));
}

// Adds x times the factor.
fn add_pairs(sum: ptr<function, Pairs>, x: Pairs, factor: f32) {
    (*sum).a = add_block((*sum).a, x.a, factor);
    if (BLOCKS > 1u) {
        (*sum).b = add_block((*sum).b, x.b, factor);
    }
    if (BLOCKS > 2u) {
        (*sum).c = add_block((*sum).c, x.c, factor);
    }
    if (BLOCKS > 3u) {
        (*sum).d = add_block((*sum).d, x.d, factor);
    }
}

fn sigmoid(z: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-z, 88.0)));
}

fn activated(z: f32) -> f32 {
    if (ACT == 0u) {
        return z * sigmoid(z);
    }
    return select(z, max(z, 0.0), ACT == 1u);
}

fn hidden(l: Pairs, row: Pairs, bias: f32, h: u32, item: u32, query: u32) -> f32 {
    if (ALIGNED) {
        let at = h / 4u;
        let sum = item_gates[item * params.item_quads + at] + query_gates[query * params.item_quads + at];
        return activated(sum[h % 4u]);
    }
    return activated(bias + dot_pairs(l, row));
}

// Sixteen numbers of the gates of query and item from their quads at `i`, and those of z.
fn combined(c: mat4x4<f32>, item: u32, query: u32, i: u32) -> mat4x4<f32> {
    if (ALIGNED) {
        return c;
    }
    let at = item * params.item_quads + i;
    let b = mat4x4<f32>(item_gates[at], item_gates[at + 1u], item_gates[at + 2u], item_gates[at + 3u]);
    let other = query * params.item_quads + i;
    let a = mat4x4<f32>(query_gates[other], query_gates[other + 1u], query_gates[other + 2u], query_gates[other + 3u]);
    if (COMBINE == 0u) {
        return a + b + c;
    }
    return products(a, b) + c;
}

// z * sigmoid(factor * (z - mean)), or z.
fn gated_four(z: vec4<f32>, mean: f32, factor: f32) -> vec4<f32> {
    if (COMBINE == 0u) {
        return z;
    }
    return z / (1.0 + exp(min((mean - z) * factor, vec4<f32>(88.0))));
}

fn masked(x: mat4x4<f32>, mask: mat4x4<f32>) -> mat4x4<f32> {
    let lowest = vec4<f32>(LOWEST);
    let zero = vec4<f32>();
    return mat4x4<f32>(
        select(lowest, x[0], mask[0] > zero),
        select(lowest, x[1], mask[1] > zero),
        select(lowest, x[2], mask[2] > zero),
        select(lowest, x[3], mask[3] > zero),
    );
}

fn gated(z: mat4x4<f32>, mask: mat4x4<f32>, mean: f32, factor: f32) -> mat4x4<f32> {
    let gate = mat4x4<f32>(
        gated_four(z[0], mean, factor),
        gated_four(z[1], mean, factor),
        gated_four(z[2], mean, factor),
        gated_four(z[3], mean, factor),
    );
    return masked(gate, mask);
}

fn highest_four(x: mat4x4<f32>) -> vec4<f32> {
    return max(max(x[0], x[1]), max(x[2], x[3]));
}

fn highest(x: Pairs) -> f32 {
    var top = highest_four(x.a);
    if (BLOCKS > 1u) {
        top = max(top, highest_four(x.b));
    }
    if (BLOCKS > 2u) {
        top = max(top, highest_four(x.c));
    }
    if (BLOCKS > 3u) {
        top = max(top, highest_four(x.d));
    }
    return max(max(top.x, top.y), max(top.z, top.w));
}

// Weights e^(gate - top) times l, and the weights alone.
fn weighed(gate: mat4x4<f32>, l: mat4x4<f32>, top: f32, sums: ptr<function, mat2x4<f32>>) {
    let highest = vec4<f32>(top);
    let e = mat4x4<f32>(exp(gate[0] - highest), exp(gate[1] - highest), exp(gate[2] - highest), exp(gate[3] - highest));
    (*sums)[0] += dot_block(e, l);
    (*sums)[1] += (e[0] + e[1]) + (e[2] + e[3]);
}

fn less(x: mat4x4<f32>, y: f32) -> mat4x4<f32> {
    let v = vec4<f32>(y);
    return x - mat4x4<f32>(v, v, v, v);
}

// The score from the logits and c.
fn score(l: Pairs, c: Pairs, item: u32, query: u32) -> f32 {
    let mask = row_of(params.hidden * ROW + 4u * BLOCKS);
    if (BOUND) {
        return highest(Pairs(
            masked(l.a, mask.a),
            masked(l.b, mask.b),
            masked(l.c, mask.c),
            masked(l.d, mask.d),
        ));
    }
    var z = Pairs();
    z.a = combined(c.a, item, query, 0u);
    if (BLOCKS > 1u) {
        z.b = combined(c.b, item, query, 4u);
    }
    if (BLOCKS > 2u) {
        z.c = combined(c.c, item, query, 8u);
    }
    if (BLOCKS > 3u) {
        z.d = combined(c.d, item, query, 12u);
    }
    var mean = 0.0;
    var factor = 1.0;
    if (COMBINE == 2u) {
        let n = f32(params.pairs);
        mean = dot_pairs(z, mask) / n;
        let off = Pairs(
            products(less(z.a, mean), mask.a),
            products(less(z.b, mean), mask.b),
            products(less(z.c, mean), mask.c),
            products(less(z.d, mean), mask.d),
        );
        factor = inverseSqrt(dot_pairs(off, off) / n + 1e-5);
    }
    z.a = gated(z.a, mask.a, mean, factor);
    z.b = gated(z.b, mask.b, mean, factor);
    z.c = gated(z.c, mask.c, mean, factor);
    z.d = gated(z.d, mask.d, mean, factor);
    let top = highest(z);
    var sums = mat2x4<f32>();
    weighed(z.a, l.a, top, &sums);
    if (BLOCKS > 1u) {
        weighed(z.b, l.b, top, &sums);
    }
    if (BLOCKS > 2u) {
        weighed(z.c, l.c, top, &sums);
    }
    if (BLOCKS > 3u) {
        weighed(z.d, l.d, top, &sums);
    }
    return total(sums[0]) / total(sums[1]);
}

// A row of numbers for pairs behind the gate's own rows.
fn row_of(at: u32) -> Pairs {
    var row = Pairs();
    row.a = mat4x4<f32>(gate[at], gate[at + 1u], gate[at + 2u], gate[at + 3u]);
    if (BLOCKS > 1u) {
        row.b = mat4x4<f32>(gate[at + 4u], gate[at + 5u], gate[at + 6u], gate[at + 7u]);
    }
    if (BLOCKS > 2u) {
        row.c = mat4x4<f32>(gate[at + 8u], gate[at + 9u], gate[at + 10u], gate[at + 11u]);
    }
    if (BLOCKS > 3u) {
        row.d = mat4x4<f32>(gate[at + 12u], gate[at + 13u], gate[at + 14u], gate[at + 15u]);
    }
    return row;
}

@compute @workgroup_size(WG)
fn mol(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n_scores + WG - 1u) / WG;
    let tile = params.first_group + group_index(group, grid);
    let column = tile % across * WG + local;
    let first_query = tile / across * QUERIES;
    if (first_query >= params.n_queries) {
        return;
    }
    // What lies outside repeats the last item and query and is not written.
    let query = min(first_query + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.n_queries - 1u));
    var item = column;
    if (GATHERED) {
        item = ids[query.x * params.n_scores + min(column, params.n_scores - 1u)];
    }
    let is_there = column < params.n_scores && item < params.n_items;
    item = min(item, params.n_items - 1u);

    var l0 = Pairs();
    var l1 = Pairs();
    var l2 = Pairs();
    var l3 = Pairs();
    for (var quad = 0u; quad < params.quads; quad++) {
        if (ALIGNED) {
            multiply_aligned(&l0, item, query.x, quad);
        } else {
            let items = item_fours(item, quad);
            multiply(&l0, items, query.x, quad);
            if (QUERIES > 1u) {
                multiply(&l1, items, query.y, quad);
            }
            if (QUERIES > 2u) {
                multiply(&l2, items, query.z, quad);
                multiply(&l3, items, query.w, quad);
            }
        }
    }
    let b2 = row_of(params.hidden * ROW);
    var c0 = b2;
    var c1 = b2;
    var c2 = b2;
    var c3 = b2;
    if (!BOUND) {
        for (var first = 0u; first < params.hidden; first += STAGED) {
            stage(local, first);
            for (var h = first; h < min(first + STAGED, params.hidden); h++) {
                let w1 = weights(first, h, 0u);
                let bias = weight(first, h, 8u * BLOCKS).x;
                let h0 = hidden(l0, w1, bias, h, item, query.x);
                var h1 = 0.0;
                var h2 = 0.0;
                var h3 = 0.0;
                if (QUERIES > 1u) {
                    h1 = hidden(l1, w1, bias, h, item, query.y);
                }
                if (QUERIES > 2u) {
                    h2 = hidden(l2, w1, bias, h, item, query.z);
                    h3 = hidden(l3, w1, bias, h, item, query.w);
                }
                let w2 = weights(first, h, 4u * BLOCKS);
                add_pairs(&c0, w2, h0);
                if (QUERIES > 1u) {
                    add_pairs(&c1, w2, h1);
                }
                if (QUERIES > 2u) {
                    add_pairs(&c2, w2, h2);
                    add_pairs(&c3, w2, h3);
                }
            }
        }
    }
    if (is_there) {
        scores[query.x * params.n_scores + column] = score(l0, c0, item, query.x);
        if (QUERIES > 1u && first_query + 1u < params.n_queries) {
            scores[query.y * params.n_scores + column] = score(l1, c1, item, query.y);
        }
        if (QUERIES > 2u && first_query + 2u < params.n_queries) {
            scores[query.z * params.n_scores + column] = score(l2, c2, item, query.z);
        }
        if (QUERIES > 2u && first_query + 3u < params.n_queries) {
            scores[query.w * params.n_scores + column] = score(l3, c3, item, query.w);
        }
    }
}
