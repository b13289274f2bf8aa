// Matrix times vector with a packed weight matrix, for one token or a few:
//
//     y[t, y_start + n] = (y[..] +) act((bias[..] +) sum over k of x[t, k] * w[n, k])
//
// LANES invocations share four rows of w and split K; the host picks LANES by K. A workgroup has WG / LANES such groups. They
// unpack a weight once for COLUMNS tokens. In the scalar variant one invocation works four rows of one token alone: software
// adapters run a workgroup one invocation after the other, where barriers cost most. Dispatch (groups of rows folded over x and y,
// ceil(T / COLUMNS) in z).
#weights
#import lanes t0=row_lanes t2=row_lanes_subgroup scalar=row_lanes_alone
#import linear
#import columns
#import fold
#import linear_params

@group(0) @binding(0) var<uniform> params: LinearParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride], or with NORM norm weight, [K]
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, K], K a multiple of 4
@group(0) @binding(4) var<storage, read_write> y: array<f32>;       // [T, y_stride]

override WG: u32 = 64u; // 128 with one column

@compute @workgroup_size(WG)
fn matvec(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    // Rows past the end repeat the last one; `put` does not write them, nor tokens past the end.
    let n = ((params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES) * 4u;
    let rows = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n_out - 1u));
    let first_token = group.z * COLUMNS;
    let sum = products(local, rows, first_token);
    if (local % SHARES == 0u) {
        let token = first_token + lanes_column(local);
        put(token, n, sum.x);
        put(token, n + 1u, sum.y);
        put(token, n + 2u, sum.z);
        put(token, n + 3u, sum.w);
    }
}
