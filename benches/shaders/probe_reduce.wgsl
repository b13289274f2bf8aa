// Sums of rows, to measure reductions over a workgroup: y[r] = sum over c of x[r, c].
// Dispatch (rows folded over x and y).
#import reduce t0=reduce t2=reduce_subgroup
#import fold

struct Params { n_rows: u32, row_quads: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;  // [R, C]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [R]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn probe_reduce(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group_index(group, grid);
    if (row >= params.n_rows) {
        return;
    }
    var sums = vec4<f32>();
    for (var q = local; q < params.row_quads; q += WG) {
        sums += x[row * params.row_quads + q];
    }
    let sum = workgroup_sum(local, (sums.x + sums.y) + (sums.z + sums.w));
    if (local == 0u) {
        y[row] = sum;
    }
}
