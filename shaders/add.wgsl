// Sum into the second operand: y[i] = y[i] + x[i], or one row x added to each of y. Dispatch (elements folded over x
// and y).
#import fold

struct Params { len: u32, x_len: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [x_len]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [len]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn add(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id < params.len) {
        y[id] += x[id % params.x_len];
    }
}
