// Multiplication by a number, and with a cap above 0 a soft bound:
//
//     y[i] = factor * x[i], or cap * tanh(factor * x[i] / cap)
//
// Dispatch (elements folded over x and y).
#import tanh
#import fold

struct Params { len: u32, factor: f32, cap: f32, _pad: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [len]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [len]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn scale(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id < params.len) {
        let value = params.factor * x[id];
        if (params.cap > 0.0) {
            y[id] = params.cap * tanh_at(value / params.cap);
        } else {
            y[id] = value;
        }
    }
}
