// A tile of TILE x TILE outputs of a matrix product for a workgroup of 16 x 16 invocations. Each has 4 x 4 outputs, and with
// TILE 128 the same of the three other quarters: 64 numbers that it loads then serve twice as many products as in four
// tiles of 64, but there are a quarter as many workgroups.
//
// `x_block(m, q)` gives rows m .. m + 4 at 4 q .. 4 q + 4 along K, a column for each k, and zero outside the matrix;
// `w_block(n, q)` likewise. The kernel that imports this fragment defines them, and `put(m, n, sum)`.

override TILE: u32 = 64u; // or 128
override GUARDED: bool = true; // false where tiles cover the matrices exactly, so that no element lies outside
const WG: u32 = 256u;
const STAGED: u32 = 512u; // quads of x and of w in workgroup memory

var<workgroup> x_tile: array<Staged, STAGED>;
var<workgroup> w_tile: array<Staged, STAGED>;

// Products of rows 4 y .. and 64 + 4 y .. with columns 4 x .. and 64 + 4 x .. of a tile; [row][column].
struct Products {
    near_near: mat4x4<f32>,
    near_far: mat4x4<f32>,
    far_near: mat4x4<f32>,
    far_far: mat4x4<f32>,
}

// Where the quad of four rows is staged for one k. Quads of neighbouring k are shifted, so that invocations that stage the
// same rows at once do not meet in a bank.
fn staged(k: u32, four: u32) -> u32 {
    let fours = TILE / 4u;
    return k * fours + (four + k / 4u) % fours;
}

// Each invocation stages 4 rows x 4 k, half of them of x and half of w.
fn stage(local: u32, m0: u32, n0: u32, q0: u32) {
    let quads = STAGED / TILE;
    let i = local % 128u;
    let q = i % quads;
    let four = i / quads;
    if (local < 128u) {
        let block = x_block(m0 + four * 4u, q0 + q);
        for (var k = 0u; k < 4u; k++) {
            x_tile[staged(q * 4u + k, four)] = Staged(block[k]);
        }
    } else {
        let block = w_block(n0 + four * 4u, q0 + q);
        for (var k = 0u; k < 4u; k++) {
            w_tile[staged(q * 4u + k, four)] = Staged(block[k]);
        }
    }
}

fn outer(x: vec4<f32>, w: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(x.x * w, x.y * w, x.z * w, x.w * w);
}

// Along K from one quad to another; both are multiples of 8, unless the second is the end of K.
fn tile_product(local: u32, m0: u32, n0: u32, quads: vec2<u32>) -> Products {
    let row = local / 16u;
    let col = local % 16u;
    let depth = STAGED / TILE;
    var acc = Products();
    for (var q0 = quads.x; q0 < quads.y; q0 += depth) {
        stage(local, m0, n0, q0);
        workgroupBarrier();
        for (var k = 0u; k < depth * 4u; k++) {
            let x = vec4<f32>(x_tile[staged(k, row)]);
            let w = vec4<f32>(w_tile[staged(k, col)]);
            acc.near_near += outer(x, w);
            if (TILE > 64u) {
                let far_x = vec4<f32>(x_tile[staged(k, row + 16u)]);
                let far_w = vec4<f32>(w_tile[staged(k, col + 16u)]);
                acc.near_far += outer(x, far_w);
                acc.far_near += outer(far_x, w);
                acc.far_far += outer(far_x, far_w);
            }
        }
        workgroupBarrier();
    }
    return acc;
}

fn put_block(m: u32, n: u32, block: mat4x4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            put(m + i, n + j, block[i][j]);
        }
    }
}

fn put_products(local: u32, m0: u32, n0: u32, products: Products) {
    let m = m0 + 4u * (local / 16u);
    let n = n0 + 4u * (local % 16u);
    put_block(m, n, products.near_near);
    if (TILE > 64u) {
        put_block(m, n + 64u, products.near_far);
        put_block(m + 64u, n, products.far_near);
        put_block(m + 64u, n + 64u, products.far_far);
    }
}
