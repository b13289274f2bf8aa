// Sums of rows with a weight for each element: y[r] = sum over c of weight[r, c] x[r, c].
//
// Dispatch (rows folded over x and y).

struct Params { n_rows: u32, dim: u32, grid_x: u32, _pad: u32 } // R, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weight: array<f32>;   // [R, C]
@group(0) @binding(2) var<storage, read> x: array<f32>;        // [R, C]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;  // [R]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn weighted_sum(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let row = (group.y * params.grid_x + group.x) * WG + local;
    if (row >= params.n_rows) {
        return;
    }
    var sum = 0.0;
    for (var at = row * params.dim; at < (row + 1u) * params.dim; at++) {
        sum += weight[at] * x[at];
    }
    y[row] = sum;
}
