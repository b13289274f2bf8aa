enable f16;
// Tiles whose operands are staged in half precision, by lanes: 256 invocations with 4 x 4 outputs each, or in tiles of 128 x
// 128 the same of its four quarters, so that each number loaded serves twice as many products.

const WG: u32 = 256u;
const DEPTH: u32 = 16u;
const STRIDE: u32 = 5u; // quads of a staged row; with 4 every fourth row would begin in the same bank
const PER: u32 = 4u; // numbers in what the staged array is made of
alias Staged = vec4<f16>;

override LARGE: bool = ROWS * COLS > 4096u;
override WIDTH: u32 = select(COLS / 4u, 16u, LARGE); // invocations side by side

// Products of rows 4 y .. and 64 + 4 y .. with columns x, x + WIDTH .. and 64 + x .. of a tile; [row][column].
struct Products {
    near_near: mat4x4<f32>,
    near_far: mat4x4<f32>,
    far_near: mat4x4<f32>,
    far_far: mat4x4<f32>,
}

fn place(at: u32, quad: vec4<f16>) {
    staged[at] = quad;
}

// A quad of each of four staged rows, `step` rows apart; a column for each row.
fn four(row: u32, step: u32, quad: u32) -> mat4x4<f32> {
    let at = row * STRIDE + quad;
    return mat4x4<f32>(
        vec4<f32>(staged[at]),
        vec4<f32>(staged[at + step * STRIDE]),
        vec4<f32>(staged[at + 2u * step * STRIDE]),
        vec4<f32>(staged[at + 3u * step * STRIDE]),
    );
}

// Adds one row's products along a quad of K by `fma`, see `add_outer` in `tile.wgsl`; w has a column for each k.
fn add_row(sum: vec4<f32>, x: vec4<f32>, w: mat4x4<f32>) -> vec4<f32> {
    let two = fma(vec4<f32>(x.y), w[1], fma(vec4<f32>(x.x), w[0], sum));
    return fma(vec4<f32>(x.w), w[3], fma(vec4<f32>(x.z), w[2], two));
}

fn add_rows(sum: mat4x4<f32>, x: mat4x4<f32>, w: mat4x4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        add_row(sum[0], x[0], w), add_row(sum[1], x[1], w), add_row(sum[2], x[2], w), add_row(sum[3], x[3], w),
    );
}

fn multiplied(local: u32, base: u32, before: Products) -> Products {
    var sum = before;
    let row = local / WIDTH * 4u;
    let col = ROWS + local % WIDTH;
    for (var i = 0u; i < DEPTH / 4u; i++) {
        let quad = base + i;
        let x = four(row, 1u, quad);
        let w = transpose(four(col, WIDTH, quad));
        sum.near_near = add_rows(sum.near_near, x, w);
        if (LARGE) {
            let far_x = four(row + 64u, 1u, quad);
            let far_w = transpose(four(col + 64u, WIDTH, quad));
            sum.near_far = add_rows(sum.near_far, x, far_w);
            sum.far_near = add_rows(sum.far_near, far_x, w);
            sum.far_far = add_rows(sum.far_far, far_x, far_w);
        }
    }
    return sum;
}

fn put_block(m: u32, n: u32, block: mat4x4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        let factor = inverse[within(m + i, params.n_tokens)];
        for (var j = 0u; j < 4u; j++) {
            put(m + i, n + j * WIDTH, block[i][j] * factor);
        }
    }
}

fn put_products(local: u32, m0: u32, n0: u32, products: Products) {
    let m = m0 + local / WIDTH * 4u;
    let n = n0 + local % WIDTH;
    put_block(m, n, products.near_near);
    if (LARGE) {
        put_block(m, n + 64u, products.near_far);
        put_block(m + 64u, n, products.far_near);
        put_block(m + 64u, n + 64u, products.far_far);
    }
}
