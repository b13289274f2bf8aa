// `matvec` with what an adapter adds:
//
//     y[t, y_start + n] = (y[..] +) (bias[..] +) sum over k of x[t, k] * w[n, k] + sum over r of inner[t, r] * b[y_start + n, r]
//
// see `shared/low_rank.wgsl`. In r stand the columns of inner that belong to row n. Dispatch as `matvec`.
#weights
#import lanes t0=row_lanes t2=row_lanes_subgroup scalar=row_lanes_alone
#import linear
#import columns
#import fold
#import low_rank

struct Params {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // T, N, K
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    eps: f32, split_blocks: u32, first_group: u32, rank: u32, // R / 4
    members: vec4<u32>, // see `shared/members.wgsl`
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [N, K], packed
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride], or with NORM norm weight, [K]
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, K], K a multiple of 4
@group(0) @binding(4) var<storage, read> inner: array<vec4<f32>>;       // [T, members R], R a multiple of 4
@group(0) @binding(5) var<storage, read> b: array<vec4<f32>>;       // [y_start + N or more, R]
@group(0) @binding(6) var<storage, read_write> y: array<f32>;       // [T, y_stride]

override WG: u32 = 64u; // 128 with one column

@compute @workgroup_size(WG)
fn matvec_lora(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    // Rows past the end repeat the last one; `put` does not write them, nor tokens past the end.
    let n = ((params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES) * 4u;
    let rows = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n_out - 1u));
    let first_token = group.z * COLUMNS;
    let token = first_token + lanes_column(local);
    let product = products(local, rows, first_token);
    let sum = product + low_rank(local, rows + params.y_start, min(token, params.n_tokens - 1u));
    if (local % SHARES == 0u) {
        put(token, n, sum.x);
        put(token, n + 1u, sum.y);
        put(token, n + 2u, sum.z);
        put(token, n + 3u, sum.w);
    }
}
