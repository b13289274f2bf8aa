// Matrix product with a packed weight matrix, one output an invocation and no reuse: the baseline that the bench
// compares `matmul` with.
//
// Dispatch (ceil(N / 16), ceil(M / 16), 1).
#weights
#import linear
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read> x: array<f32>;        // [M, K]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [M, y_stride]

@compute @workgroup_size(16, 16)
fn matmul_naive(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let across = (params.n_out + 15u) / 16u;
    let tile = params.first_group + group_index(group, grid);
    let at = vec2<u32>(tile % across, tile / across) * 16u + local.xy;
    let n = min(at.x, params.n_out - 1u);
    let m = min(at.y, params.n_tokens - 1u);
    var sum = 0.0;
    for (var k = 0u; k < params.dim; k++) {
        sum += x[m * params.dim + k] * block_quad(n * params.blocks + k / 32u, k % 32u / 4u)[k % 4u];
    }
    put(at.y, at.x, sum);
}
