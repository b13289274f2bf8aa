// Matrix product with a packed weight matrix, one output an invocation and no reuse: the baseline that the bench
// compares `matmul` with.
//
// Dispatch (ceil(N / 16), ceil(M / 16), 1).
#import block F32=block_f32 F16=block_f16 BF16=block_bf16 Q8_0=block_q8_0 Q4_0=block_q4_0 Q4_K=block_q4_k Q5_K=block_q5_k Q6_K=block_q6_k
#import linear

struct Params { n_tokens: u32, n_out: u32, dim: u32, blocks: u32, w_scales: u32, y_start: u32, y_stride: u32, flags: u32 } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> bias: array<f32>;     // [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<f32>;        // [M, K]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [M, y_stride]

@compute @workgroup_size(16, 16)
fn matmul_naive(@builtin(global_invocation_id) id: vec3<u32>) {
    let n = min(id.x, params.n_out - 1u);
    let m = min(id.y, params.n_tokens - 1u);
    var sum = 0.0;
    for (var k = 0u; k < params.dim; k++) {
        sum += x[m * params.dim + k] * block_quad(n * params.blocks + k / 32u, k % 32u / 4u)[k % 4u];
    }
    put(id.y, id.x, sum);
}
