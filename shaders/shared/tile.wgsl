// The products of a tile from its operands, which are staged in workgroup memory for a few k at a time.
//
// `x_block(m, q)` gives rows m .. m + 4 at 4 q .. 4 q + 4 along K, a column for each k, and zero outside the matrix;
// `w_block(n, q)` likewise. The kernel that imports this fragment defines them.
#import products

const STAGED: u32 = 512u; // quads of x and of w in workgroup memory

var<workgroup> x_tile: array<vec4<f32>, STAGED>;
var<workgroup> w_tile: array<vec4<f32>, STAGED>;

// Where the quad of four rows, one of so many fours, is staged for one k. Quads of neighbouring k are shifted, so that
// invocations that stage the same rows at once do not meet in a bank.
fn staged(k: u32, four: u32, fours: u32) -> u32 {
    return k * fours + (four + k / 4u) % fours;
}

// Which four rows of x or w an invocation stages, each time the same: half of the invocations stage w and the others, as
// many as there are rows for, x.
fn staged_four(local: u32) -> u32 {
    return local % 128u / (STAGED / COLS);
}

// An invocation stages 4 rows x 4 k.
fn stage(local: u32, m0: u32, n0: u32, q0: u32) {
    let q = local % (STAGED / COLS);
    let four = staged_four(local);
    if (local >= 128u) {
        let block = w_block(n0 + four * 4u, q0 + q);
        for (var k = 0u; k < 4u; k++) {
            w_tile[staged(q * 4u + k, four, COLS / 4u)] = block[k];
        }
    } else if (four < ROWS / 4u) {
        let block = x_block(m0 + four * 4u, q0 + q);
        for (var k = 0u; k < 4u; k++) {
            x_tile[staged(q * 4u + k, four, ROWS / 4u)] = block[k];
        }
    }
}

// Adds products to `sum` by `fma`, so that no compiler chooses for itself whether to round the products. It may choose
// otherwise in each variant (TILE, GUARDED), and then a row would have other bits in a larger batch. WGSL lets `fma` be
// a rounded product and a sum; but an operation of its own is expanded in one way by a driver, wherever it occurs. naga
// 30 writes `Fma` of GLSL.std.450 in SPIR-V, `fma` in MSL and `mad` in HLSL; Tint does the same.
fn add_outer(sum: mat4x4<f32>, x: vec4<f32>, w: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        fma(vec4<f32>(x.x), w, sum[0]),
        fma(vec4<f32>(x.y), w, sum[1]),
        fma(vec4<f32>(x.z), w, sum[2]),
        fma(vec4<f32>(x.w), w, sum[3]),
    );
}

// Adds the products of element `k` of a quad along K, whose four rows of x and of w begin at `near`, and at `far` 64 rows on.
fn add_products(acc: ptr<function, Products>, near: vec2<u32>, far: vec2<u32>, k: u32) {
    let x = x_tile[near.x + k * (ROWS / 4u)];
    let w = w_tile[near.y + k * (COLS / 4u)];
    (*acc).near_near = add_outer((*acc).near_near, x, w);
    if (TILE > 64u) {
        let far_x = x_tile[far.x + k * (ROWS / 4u)];
        let far_w = w_tile[far.y + k * (COLS / 4u)];
        (*acc).near_far = add_outer((*acc).near_far, x, far_w);
        (*acc).far_near = add_outer((*acc).far_near, far_x, w);
        (*acc).far_far = add_outer((*acc).far_far, far_x, far_w);
    }
}

// Along K from one quad to another; both are multiples of 8, unless the second is the end of K.
fn tile_product(local: u32, m0: u32, n0: u32, quads: vec2<u32>) -> Products {
    let row = local / WIDTH;
    let col = local % WIDTH;
    let depth = STAGED / COLS;
    var acc = Products();
    for (var q0 = quads.x; q0 < quads.y; q0 += depth) {
        stage(local, m0, n0, q0);
        workgroupBarrier();
        for (var q = 0u; q < depth; q++) {
            let near = vec2<u32>(staged(4u * q, row, ROWS / 4u), staged(4u * q, col, COLS / 4u));
            var far = vec2<u32>();
            if (TILE > 64u) {
                far = vec2<u32>(staged(4u * q, row + 16u, ROWS / 4u), staged(4u * q, col + 16u, COLS / 4u));
            }
            // One after the other and not in a loop: a quad's four k are staged equally far apart, so that their
            // places are constants beside that of the first.
            add_products(&acc, near, far, 0u);
            add_products(&acc, near, far, 1u);
            add_products(&acc, near, far, 2u);
            add_products(&acc, near, far, 3u);
        }
        workgroupBarrier();
    }
    return acc;
}
