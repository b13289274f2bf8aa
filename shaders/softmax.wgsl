// Softmax of each row:
//
//     y[r, c] = exp(x[r, c] - max) / sum over c of exp(x[r, c] - max)
//
// Dispatch (rows folded over x and y), one workgroup per row.
#import reduce t0=reduce t2=reduce_subgroup
#import fold

struct Params { n_rows: u32, dim: u32, _pad0: u32, _pad1: u32 } // R, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;       // [R, C]
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // [R, C]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn softmax(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let r = group_index(group, grid);
    if (r >= params.n_rows) {
        return;
    }
    let row = r * params.dim;
    var highest = LOWEST;
    for (var c = local; c < params.dim; c += WG) {
        highest = max(highest, x[row + c]);
    }
    highest = workgroup_max(local, highest);
    var sum = 0.0;
    for (var c = local; c < params.dim; c += WG) {
        sum += exp(x[row + c] - highest);
    }
    sum = workgroup_sum(local, sum);
    for (var c = local; c < params.dim; c += WG) {
        y[row + c] = exp(x[row + c] - highest) / sum;
    }
}
