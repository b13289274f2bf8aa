// Multiplies rows by gates or by their sigmoid, each of which is for a group of neighbouring elements:
//
//     y[t, i] *= sigmoid(gates[t, start + i / size]), or gates[t, start + i / size] where they are plain
//
// Dispatch (elements folded over x and y).
#import fold

struct Params { n_rows: u32, dim: u32, gate_stride: u32, gate_start: u32, size: u32, plain: u32, _pad0: u32, _pad1: u32 } // T, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gates: array<f32>;   // [T, gate_stride]
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // [T, C]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn sigmoid_gate(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id >= params.n_rows * params.dim) {
        return;
    }
    let column = id % params.dim / params.size;
    let gate = gates[id / params.dim * params.gate_stride + params.gate_start + column];
    y[id] *= select(1.0 / (1.0 + exp(min(-gate, 88.0))), gate, params.plain != 0u);
}
