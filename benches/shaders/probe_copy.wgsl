// Copies words, to measure memory: y[i] = x[i], four at a time.
// Dispatch (quads of y folded over x and y).
#import fold

struct Params { n_quads: u32, _pad0: u32, _pad1: u32, _pad2: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;        // [4 n_quads]
@group(0) @binding(2) var<storage, read_write> y: array<vec4<u32>>;  // [4 n_quads]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn probe_copy(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id < params.n_quads) {
        y[id] = x[id];
    }
}
