// Matrix times vector with a packed weight matrix, for one token or a few:
//
//     y[t, y_start + n] = (y[..] +) (bias[..] +) sum over k of x[t, k] * w[n, k]
//
// LANES invocations share four rows of w and split K by blocks of 32; the host picks LANES by K. A workgroup has
// WG / LANES such groups. Dispatch (groups of rows folded over x and y, T in z).
#import block F32=block_f32 F16=block_f16 BF16=block_bf16 Q8_0=block_q8_0 Q4_0=block_q4_0 Q4_K=block_q4_k Q5_K=block_q5_k Q6_K=block_q6_k
#import reduce t0=lanes t2=lanes_subgroup
#import linear
#import four_rows

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
    let sum = lanes_sum(local, four_rows(rows * ROWS, group.z, local % LANES, LANES));
    if (local % LANES == 0u) {
        put_four(rows * ROWS, group.z, sum);
    }
}
