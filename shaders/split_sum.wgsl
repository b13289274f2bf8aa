// Adds up what the splits of a matrix product along K gave, in their order:
//
//     y[m, y_start + n] = (y[..] +) act((bias[..] +) sum over s of parts[s, m, n])
//
// Dispatch (outputs folded over x and y).
#import linear
#import fold

struct Params {
    n_tokens: u32, n_out: u32, n_splits: u32, y_start: u32, // M, N, S
    y_stride: u32, flags: u32, _pad0: u32, _pad1: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> parts: array<f32>;    // [S, M, N]
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // bias, [y_stride]; any buffer where flags lack BIAS
@group(0) @binding(3) var<storage, read_write> y: array<f32>;  // [M, y_stride]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn split_sum(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    let len = params.n_tokens * params.n_out;
    if (id >= len) {
        return;
    }
    var sum = 0.0;
    for (var split = 0u; split < params.n_splits; split++) {
        sum += parts[split * len + id];
    }
    put(id / params.n_out, id % params.n_out, sum);
}
