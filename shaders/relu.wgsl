// The rectified linear unit, y = max(x, 0), or its square (So et al. 2021, arXiv:2109.08668).
//
// Dispatch (elements folded over x and y).
#import fold

struct Params { len: u32, is_squared: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;       // [len]
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // [len]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn relu(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id >= params.len) {
        return;
    }
    let positive = max(x[id], 0.0);
    y[id] = select(positive, positive * positive, params.is_squared != 0u);
}
