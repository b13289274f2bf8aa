// A tile of 16 x 8 outputs in the registers of one invocation, for software adapters. The kernel gives four
// rows of x by `x_quads` and writes four by four outputs by `put_all`.

// Four rows each, in columns; left and right columns of the tile.
struct Tile {
    left0: mat4x4<f32>, left1: mat4x4<f32>, left2: mat4x4<f32>, left3: mat4x4<f32>,
    right0: mat4x4<f32>, right1: mat4x4<f32>, right2: mat4x4<f32>, right3: mat4x4<f32>,
}

// Adds the products of a quad of 16 rows of x with `left` and `right`, four elements of four columns each. llvmpipe
// would not unroll a loop over the rows, and registers cannot be indexed.
fn multiply(tile: ptr<function, Tile>, m: u32, quad: u32, left: mat4x4<f32>, right: mat4x4<f32>) {
    let x0 = x_quads(m, quad);
    (*tile).left0 += left * x0;
    (*tile).right0 += right * x0;
    let x1 = x_quads(m + 4u, quad);
    (*tile).left1 += left * x1;
    (*tile).right1 += right * x1;
    let x2 = x_quads(m + 8u, quad);
    (*tile).left2 += left * x2;
    (*tile).right2 += right * x2;
    let x3 = x_quads(m + 12u, quad);
    (*tile).left3 += left * x3;
    (*tile).right3 += right * x3;
}

fn put_tile(tile: Tile, m: u32, left: u32, right: u32) {
    put_all(m, left, tile.left0);
    put_all(m + 4u, left, tile.left1);
    put_all(m + 8u, left, tile.left2);
    put_all(m + 12u, left, tile.left3);
    put_all(m, right, tile.right0);
    put_all(m + 4u, right, tile.right1);
    put_all(m + 8u, right, tile.right2);
    put_all(m + 12u, right, tile.right3);
}
