// Gaussian error linear unit, in one of its forms: y = gelu(x), see `shared/gelu.wgsl`.
//
// Dispatch (elements folded over x and y).
#import gelu
#import fold

struct Params { len: u32, form: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [len]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [len]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn gelu(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id < params.len) {
        y[id] = gelu_at(x[id], params.form);
    }
}
