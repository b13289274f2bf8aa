// The products of a tile from its operands, which are staged in workgroup memory for a few k at a time.
//
// `x_block(m, q)` gives rows m .. m + 4 at 4 q .. 4 q + 4 along K, a column for each k, and zero outside the matrix;
// `w_block(n, q)` likewise. The kernel that imports this fragment defines them.
#import products

const STAGED: u32 = 512u; // quads of x and of w in workgroup memory

var<workgroup> x_tile: array<Staged, STAGED>;
var<workgroup> w_tile: array<Staged, STAGED>;

// Where the quad of four rows, one of so many fours, is staged for one k. Quads of neighbouring k are shifted, so that
// invocations that stage the same rows at once do not meet in a bank.
fn staged(k: u32, four: u32, fours: u32) -> u32 {
    return k * fours + (four + k / 4u) % fours;
}

// An invocation stages 4 rows x 4 k, half of them of w and the others, as many as there are rows for, of x.
fn stage(local: u32, m0: u32, n0: u32, q0: u32) {
    let quads = STAGED / COLS;
    let i = local % 128u;
    let q = i % quads;
    let four = i / quads;
    if (local >= 128u) {
        let block = w_block(n0 + four * 4u, q0 + q);
        for (var k = 0u; k < 4u; k++) {
            w_tile[staged(q * 4u + k, four, COLS / 4u)] = Staged(block[k]);
        }
    } else if (four < ROWS / 4u) {
        let block = x_block(m0 + four * 4u, q0 + q);
        for (var k = 0u; k < 4u; k++) {
            x_tile[staged(q * 4u + k, four, ROWS / 4u)] = Staged(block[k]);
        }
    }
}

fn outer(x: vec4<f32>, w: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(x.x * w, x.y * w, x.z * w, x.w * w);
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
        for (var k = 0u; k < depth * 4u; k++) {
            let x = vec4<f32>(x_tile[staged(k, row, ROWS / 4u)]);
            let w = vec4<f32>(w_tile[staged(k, col, COLS / 4u)]);
            acc.near_near += outer(x, w);
            if (TILE > 64u) {
                let far_x = vec4<f32>(x_tile[staged(k, row + 16u, ROWS / 4u)]);
                let far_w = vec4<f32>(w_tile[staged(k, col + 16u, COLS / 4u)]);
                acc.near_far += outer(x, far_w);
                acc.far_near += outer(far_x, w);
                acc.far_far += outer(far_x, far_w);
            }
        }
        workgroupBarrier();
    }
    return acc;
}
