// Matrix times vector with a packed weight matrix, for one token or a few:
//
//     y[t, y_start + n] = (y[..] +) (bias[..] +) sum over k of x[t, k] * w[n, k]
//
// LANES invocations share four rows of w and split K by blocks of 32; the host picks LANES by K. A workgroup has
// WG / LANES such groups. Dispatch (groups of rows folded over x and y, T in z).
#import block F32=block_f32 F16=block_f16 BF16=block_bf16 Q8_0=block_q8_0 Q4_0=block_q4_0
#import reduce t0=lanes t2=lanes_subgroup
#import linear

override LANES: u32 = 64u; // a power of two, 1 to WG
struct Params { n_tokens: u32, n_out: u32, dim: u32, blocks: u32, w_scales: u32, y_start: u32, y_stride: u32, flags: u32 } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> bias: array<f32>;     // [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;  // [T, K], K a multiple of 4
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [T, y_stride]

const WG: u32 = 64u;
const ROWS: u32 = 4u; // rows of w that an invocation works on at a time
const GRID_X: u32 = 32768u;

@compute @workgroup_size(WG)
fn matvec(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let rows = (group.y * GRID_X + group.x) * (WG / LANES) + local / LANES;
    let n = rows * ROWS;
    // Rows past the end repeat the last one and are not written.
    let last = params.n_out - 1u;
    let row = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(last)) * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    for (var block = local % LANES; block < params.blocks; block += LANES) {
        var part: array<vec4<f32>, 8>;
        for (var i = 0u; i < 8u; i++) {
            let quad = block * 8u + i;
            part[i] = select(vec4<f32>(), x[group.z * quads + min(quad, quads - 1u)], quad < quads);
        }
        sum += vec4<f32>(
            block_dot(row.x + block, part),
            block_dot(row.y + block, part),
            block_dot(row.z + block, part),
            block_dot(row.w + block, part),
        );
    }
    sum = lanes_sum(local, sum);
    if (local % LANES == 0u) {
        put(group.z, n, sum.x);
        put(group.z, n + 1u, sum.y);
        put(group.z, n + 2u, sum.z);
        put(group.z, n + 3u, sum.w);
    }
}
