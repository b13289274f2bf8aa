// A tile of TILE x TILE outputs of a matrix product for a workgroup of 256 invocations, WIDTH of them side by side; where
// they are 64 or 32 and not 16, fewer rows and more columns. Each has 4 x 4 outputs, and with
// TILE 128 the same of the three other quarters: 64 numbers that it loads then serve twice as many products as in four
// tiles of 64, but there are a quarter as many workgroups.
//
// The kernel that imports this fragment defines `put(m, n, sum)`, which writes an output.

override TILE: u32 = 64u; // or 128
override WIDTH: u32 = 16u; // or 32 or 64, with TILE 64
override ROWS: u32 = TILE * 16u / WIDTH;
override COLS: u32 = TILE * WIDTH / 16u;
override GUARDED: bool = true; // false where tiles cover the matrices exactly, so that no element lies outside
const WG: u32 = 256u;

// Products of rows 4 y .. and 64 + 4 y .. with columns 4 x .. and 64 + 4 x .. of a tile; [row][column].
struct Products {
    near_near: mat4x4<f32>,
    near_far: mat4x4<f32>,
    far_near: mat4x4<f32>,
    far_far: mat4x4<f32>,
}

fn put_block(m: u32, n: u32, block: mat4x4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            put(m + i, n + j, block[i][j]);
        }
    }
}

fn put_products(local: u32, m0: u32, n0: u32, products: Products) {
    let m = m0 + 4u * (local / WIDTH);
    let n = n0 + 4u * (local % WIDTH);
    put_block(m, n, products.near_near);
    if (TILE > 64u) {
        put_block(m, n + 64u, products.near_far);
        put_block(m + 64u, n, products.far_near);
        put_block(m + 64u, n + 64u, products.far_far);
    }
}
