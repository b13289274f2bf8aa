// A tile of 64 x 64 outputs of a matrix product for a workgroup of 16 x 16 invocations, 4 x 4 outputs each:
//
//     acc[i][j] = sum over k of x[m0 + 4 y + i, k] * w[n0 + 4 x + j, k]
//
// `x_quad(m, q)` and `w_quad(n, q)` load elements 4 q .. 4 q + 4 of a row, zero outside the matrix; the kernel that
// imports this fragment defines them. K is walked in steps of 32, staged with k outermost so that an invocation's four
// rows lie side by side.

const TILE: u32 = 64u;
const STEP: u32 = 32u;

var<workgroup> x_tile: array<Staged, TILE * STEP>;
var<workgroup> w_tile: array<Staged, TILE * STEP>;

fn stage(local: u32, m0: u32, n0: u32, q0: u32) {
    for (var i = local; i < TILE * STEP / 4u; i += 256u) {
        let row = i / 8u;
        let quad = i % 8u;
        let x = x_quad(m0 + row, q0 + quad);
        let w = w_quad(n0 + row, q0 + quad);
        let at = quad * 4u * TILE + row;
        x_tile[at] = Staged(x.x);
        x_tile[at + TILE] = Staged(x.y);
        x_tile[at + 2u * TILE] = Staged(x.z);
        x_tile[at + 3u * TILE] = Staged(x.w);
        w_tile[at] = Staged(w.x);
        w_tile[at + TILE] = Staged(w.y);
        w_tile[at + 2u * TILE] = Staged(w.z);
        w_tile[at + 3u * TILE] = Staged(w.w);
    }
}

fn tile_product(local: u32, m0: u32, n0: u32, k_quads: u32) -> mat4x4<f32> {
    let row = 4u * (local / 16u);
    let col = 4u * (local % 16u);
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    for (var q0 = 0u; q0 < k_quads; q0 += STEP / 4u) {
        stage(local, m0, n0, q0);
        workgroupBarrier();
        for (var k = 0u; k < STEP; k++) {
            let at = k * TILE;
            let w = vec4<f32>(f32(w_tile[at + col]), f32(w_tile[at + col + 1u]), f32(w_tile[at + col + 2u]), f32(w_tile[at + col + 3u]));
            acc0 += f32(x_tile[at + row]) * w;
            acc1 += f32(x_tile[at + row + 1u]) * w;
            acc2 += f32(x_tile[at + row + 2u]) * w;
            acc3 += f32(x_tile[at + row + 3u]) * w;
        }
        workgroupBarrier();
    }
    return mat4x4<f32>(acc0, acc1, acc2, acc3);
}
