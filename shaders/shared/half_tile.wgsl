// A tile of ROWS x COLS outputs from operands that are staged in workgroup memory row by row, DEPTH along K at a time: first
// rows of x, then those of w.
//
// With two STAGES, a step's operands are staged in one half of the memory while those of the other are multiplied, which
// takes one barrier a step instead of two.
//
// The unit says how many invocations there are, multiplies what is staged, and puts the products.

// Two quads of a row of x, which one load of 16 bytes reads.
struct Pair { near: vec4<f16>, far: vec4<f16> }

override ROWS: u32 = 64u;
override COLS: u32 = 64u;
override GUARDED: bool = true; // false where tiles cover y exactly, and rows of y are aligned
override STAGES: u32 = 1u; // or 2
override STAGE: u32 = (ROWS + COLS) * STRIDE; // quads
override STAGED: u32 = STAGES * STAGE * (4u / PER);
var<workgroup> staged: array<Staged, STAGED>;

// What an invocation stages in each step: pairs of quads of rows of x that are X_STEP rows apart, and half blocks, with one
// scale each, of rows of w that are W_STEP apart.
override PAIRS: u32 = DEPTH / 8u;
override HALVES: u32 = DEPTH / 16u;
override X_STEP: u32 = WG / PAIRS;
override W_STEP: u32 = WG / HALVES;
override X_ROUNDS: u32 = (ROWS + X_STEP - 1u) / X_STEP;
override W_ROUNDS: u32 = (COLS + W_STEP - 1u) / W_STEP;

// Rows outside of the operands repeat the last one: their products are put nowhere.
fn within(row: u32, n_rows: u32) -> u32 {
    return select(row, min(row, n_rows - 1u), GUARDED);
}

// What an invocation has read for a step but not yet staged in workgroup memory: per round two quads of x and four of w.
// The arrays suffice for the largest tile with subgroups of 16, or of 8 where matrices are smaller. With twice the DEPTH
// they suffice if neither operand has more rows than there are invocations.
struct Ahead { x: array<vec4<f16>, 16>, w: array<vec4<f16>, 16> }

fn read_step(local: u32, m0: u32, n0: u32, q0: u32) -> Ahead {
    var ahead = Ahead();
    for (var i = 0u; i < X_ROUNDS; i++) {
        let row = within_tile(local / PAIRS + i * X_STEP, ROWS, X_STEP);
        let source = x[within(m0 + row, params.n_tokens) * (params.dim / 8u) + local % PAIRS + q0 / 2u];
        ahead.x[2u * i] = source.near;
        ahead.x[2u * i + 1u] = source.far;
    }
    let first = local % HALVES * 4u;
    for (var i = 0u; i < W_ROUNDS; i++) {
        let col = within_tile(local / HALVES + i * W_STEP, COLS, W_STEP);
        let block = within(n0 + col, params.n_out) * params.blocks + (q0 + first) / 8u;
        let quad = (q0 + first) % 8u;
        ahead.w[4u * i] = vec4<f16>(block_quad(block, quad));
        ahead.w[4u * i + 1u] = vec4<f16>(block_quad(block, quad + 1u));
        ahead.w[4u * i + 2u] = vec4<f16>(block_quad(block, quad + 2u));
        ahead.w[4u * i + 3u] = vec4<f16>(block_quad(block, quad + 3u));
    }
    return ahead;
}

// From quad `base` on.
fn stage(local: u32, ahead: Ahead, base: u32) {
    let pair = local % PAIRS * 2u;
    for (var i = 0u; i < X_ROUNDS; i++) {
        let row = local / PAIRS + i * X_STEP;
        if (ROWS % X_STEP == 0u || row < ROWS) {
            let at = base + row * STRIDE + pair;
            place(at, ahead.x[2u * i]);
            place(at + 1u, ahead.x[2u * i + 1u]);
        }
    }
    let first = local % HALVES * 4u;
    for (var i = 0u; i < W_ROUNDS; i++) {
        let col = local / HALVES + i * W_STEP;
        if (COLS % W_STEP == 0u || col < COLS) {
            let at = base + (ROWS + col) * STRIDE + first;
            place(at, ahead.w[4u * i]);
            place(at + 1u, ahead.w[4u * i + 1u]);
            place(at + 2u, ahead.w[4u * i + 2u]);
            place(at + 3u, ahead.w[4u * i + 3u]);
        }
    }
}

// A row that the tile has, where there are fewer than invocations for them.
fn within_tile(row: u32, n_rows: u32, step: u32) -> u32 {
    return select(min(row, n_rows - 1u), row, n_rows % step == 0u);
}

// Along K from one quad to another, multiples of 8, and of a step. A step's operands are read while those before them are
// multiplied; steps past the last one read its own again.
fn tile_product(local: u32, m0: u32, n0: u32, quads: vec2<u32>) -> Products {
    let step = DEPTH / 4u;
    let last = quads.y - step;
    var sum = Products();
    var ahead = read_step(local, m0, n0, quads.x);
    if (STAGES == 1u) {
        for (var q0 = quads.x; q0 < quads.y; q0 += step) {
            stage(local, ahead, 0u);
            workgroupBarrier();
            ahead = read_step(local, m0, n0, min(q0 + step, last));
            sum = multiplied(local, 0u, sum);
            workgroupBarrier();
        }
        return sum;
    }
    stage(local, ahead, 0u);
    ahead = read_step(local, m0, n0, min(quads.x + step, last));
    workgroupBarrier();
    var base = 0u;
    for (var q0 = quads.x; q0 < quads.y; q0 += step) {
        sum = multiplied(local, base, sum);
        base = STAGE - base;
        stage(local, ahead, base);
        ahead = read_step(local, m0, n0, min(q0 + 2u * step, last));
        workgroupBarrier();
    }
    return sum;
}
