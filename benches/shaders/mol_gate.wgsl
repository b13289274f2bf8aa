// The gate of a mixture of logits from its three parts, before the softmax; `mol` has it in registers:
//
//     y = z * sigmoid(z),  z = a * b + c,      or y = a + b + c
//
// Dispatch (elements folded over x and y). Ding & Zhai 2024, arXiv:2407.15462.
#import silu

struct Params { n_items: u32, n_queries: u32, pairs: u32, grid_x: u32, is_sum: u32, _pad0: u32, _pad1: u32, _pad2: u32 } // I, B, P
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>;        // [B, P]
@group(0) @binding(2) var<storage, read> b: array<f32>;        // [I, P]
@group(0) @binding(3) var<storage, read> c: array<f32>;        // [I, B, P]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;  // [I, B, P]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn mol_gate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let id = (group.y * params.grid_x + group.x) * WG + local;
    let row = params.n_queries * params.pairs;
    let item = id / row;
    if (item >= params.n_items) {
        return;
    }
    let of_query = a[id % row];
    let of_item = b[item * params.pairs + id % params.pairs];
    if (params.is_sum != 0u) {
        y[id] = of_query + of_item + c[id];
    } else {
        y[id] = silu_at(of_query * of_item + c[id]);
    }
}
