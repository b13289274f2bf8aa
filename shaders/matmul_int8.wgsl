// `matmul` in bytes: x is rounded to 8 bits by blocks of 32, as weights are, and four products of quants are one
// operation:
//
//     x_scale[m, b] = (max over k in b of |x[m, k]|) / 127
//     x_quant[m, k] = round(x[m, k] / x_scale[m, b])
//     y[m, y_start + n] = (y[..] +) act((bias[..] +)
//         sum over b of x_scale[m, b] * w_scale[n, b] * (sum over k in b of x_quant[m, k] * w_quant[n, k]))
//
// The inner sum is exact, and as f32 too: it is below 2^24. Dispatch (ceil(N / TILE), ceil(M / TILE), splits), see
// `matmul.wgsl`.
#kernel matmul t3
#import quants Q8_0=quants_q8_0 Q4_0=quants_q4_0
#import linear_tile
#import products
#import fold

struct Params {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // M, N, K
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    eps: f32, split_blocks: u32, first_group: u32, _pad: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;  // [M, K]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [splits, M, y_stride]

const STAGED: u32 = 128u; // blocks of x and of w in workgroup memory
const SMALLEST: u32 = 0x04000000u; // bits of 2^-119, from where on the 127th part is no subnormal, which may be flushed

// 32 quants as bytes, and what they are multiplied by.
struct Block {
    low: vec4<u32>,
    high: vec4<u32>,
    scale: f32,
}

var<workgroup> x_tile: array<vec4<u32>, 256>; // 2 * STAGED: halves of blocks
var<workgroup> w_tile: array<vec4<u32>, 256>;
var<workgroup> x_scales: array<f32, STAGED>;
var<workgroup> w_scales: array<f32, STAGED>;

fn magnitudes(quad: vec4<f32>) -> vec4<u32> {
    return bitcast<vec4<u32>>(quad) & vec4<u32>(0x7fffffffu);
}

fn quants(quad: vec4<f32>, factor: f32) -> u32 {
    return pack4xI8Clamp(vec4<i32>(round(quad * factor)));
}

// The largest magnitude is found among bits, which are ordered as the numbers are and end with infinity and NaN: a
// block that holds one has it as its scale, and no product with it is finite.
fn x_block(m: u32, block: u32) -> Block {
    var x = array<vec4<f32>, 8>();
    var peaks = vec4<u32>();
    for (var i = 0u; i < 8u; i++) {
        x[i] = x_quad(m, block * 8u + i);
        peaks = max(peaks, magnitudes(x[i]));
    }
    let peak = max(max(peaks.x, peaks.y), max(peaks.z, peaks.w));
    if (peak < SMALLEST) {
        return Block();
    }
    let largest = bitcast<f32>(peak);
    let factor = 127.0 / largest;
    return Block(
        vec4<u32>(quants(x[0], factor), quants(x[1], factor), quants(x[2], factor), quants(x[3], factor)),
        vec4<u32>(quants(x[4], factor), quants(x[5], factor), quants(x[6], factor), quants(x[7], factor)),
        largest / 127.0,
    );
}

fn w_block(n: u32, block: u32) -> Block {
    if (GUARDED && n >= params.n_out) {
        return Block();
    }
    let at = n * params.blocks + block;
    return Block(block_quants(at, 0u), block_quants(at, 1u), unit_scale(at));
}

// Where row 4 * four + i of a tile is staged, `part` being a block, or half of one: rows that neighbouring invocations
// read at once do not meet in a bank.
fn staged(part: u32, i: u32, four: u32) -> u32 {
    return (part * 4u + i) * (TILE / 4u) + four;
}

// Each invocation stages a block, half of them of x and half of w; zeros for blocks from `end` on.
fn stage(local: u32, m0: u32, n0: u32, block0: u32, end: u32) {
    let four = local % (TILE / 4u);
    let i = local / (TILE / 4u) % 4u;
    let b = local % STAGED / TILE;
    let row = four * 4u + i;
    var block = Block();
    if (local < STAGED) {
        if (block0 + b < end) {
            block = x_block(m0 + row, block0 + b);
        }
        x_tile[staged(2u * b, i, four)] = block.low;
        x_tile[staged(2u * b + 1u, i, four)] = block.high;
        x_scales[staged(b, i, four)] = block.scale;
    } else {
        if (block0 + b < end) {
            block = w_block(n0 + row, block0 + b);
        }
        w_tile[staged(2u * b, i, four)] = block.low;
        w_tile[staged(2u * b + 1u, i, four)] = block.high;
        w_scales[staged(b, i, four)] = block.scale;
    }
}

fn dot16(x: vec4<u32>, w: vec4<u32>) -> i32 {
    return dot4I8Packed(x.x, w.x) + dot4I8Packed(x.y, w.y) + dot4I8Packed(x.z, w.z) + dot4I8Packed(x.w, w.w);
}

fn dots(x: vec4<u32>, w: array<vec4<u32>, 4>) -> vec4<i32> {
    return vec4<i32>(dot16(x, w[0]), dot16(x, w[1]), dot16(x, w[2]), dot16(x, w[3]));
}

// Products of a block of four rows of x with one of four rows of w; [row][column].
fn block_product(b: u32, x_four: u32, w_four: u32) -> mat4x4<f32> {
    var sums = array<vec4<i32>, 4>();
    for (var half = 2u * b; half < 2u * b + 2u; half++) {
        let w = array<vec4<u32>, 4>(
            w_tile[staged(half, 0u, w_four)], w_tile[staged(half, 1u, w_four)],
            w_tile[staged(half, 2u, w_four)], w_tile[staged(half, 3u, w_four)],
        );
        for (var i = 0u; i < 4u; i++) {
            sums[i] += dots(x_tile[staged(half, i, x_four)], w);
        }
    }
    let w_scale = vec4<f32>(
        w_scales[staged(b, 0u, w_four)], w_scales[staged(b, 1u, w_four)],
        w_scales[staged(b, 2u, w_four)], w_scales[staged(b, 3u, w_four)],
    );
    return mat4x4<f32>(
        vec4<f32>(sums[0]) * w_scale * x_scales[staged(b, 0u, x_four)],
        vec4<f32>(sums[1]) * w_scale * x_scales[staged(b, 1u, x_four)],
        vec4<f32>(sums[2]) * w_scale * x_scales[staged(b, 2u, x_four)],
        vec4<f32>(sums[3]) * w_scale * x_scales[staged(b, 3u, x_four)],
    );
}

@compute @workgroup_size(WG)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let across = (params.n_out + TILE - 1u) / TILE;
    let tile = params.first_group + group_index(group, grid);
    let start = vec2<u32>(tile / across, tile % across) * TILE;
    if (start.x >= params.n_tokens) {
        return;
    }
    let row = local / 16u;
    let col = local % 16u;
    let blocks = STAGED / TILE;
    let end = min((group.z + 1u) * params.split_blocks, params.blocks);
    first_row = group.z * params.n_tokens;
    var acc = Products();
    for (var block0 = group.z * params.split_blocks; block0 < end; block0 += blocks) {
        stage(local, start.x, start.y, block0, end);
        workgroupBarrier();
        for (var b = 0u; b < blocks; b++) {
            acc.near_near += block_product(b, row, col);
            if (TILE > 64u) {
                acc.near_far += block_product(b, row, col + 16u);
                acc.far_near += block_product(b, row + 16u, col);
                acc.far_far += block_product(b, row + 16u, col + 16u);
            }
        }
        workgroupBarrier();
    }
    put_products(local, start.x, start.y, acc);
}
