// Gated activation of the feed-forward's two halves, as `swiglu` but by GELU:
//
//     y[t, f] = gelu(gate_up[t, f]) * gate_up[t, F + f]
//
// Dispatch (elements folded over x and y). Shazeer 2020, arXiv:2002.05202.
#import gelu
#import fold

struct Params { n_tokens: u32, ffn_dim: u32, form: u32, _pad: u32 } // T, F
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gate_up: array<f32>;  // [T, 2 F]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [T, F]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn geglu(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id >= params.n_tokens * params.ffn_dim) {
        return;
    }
    let at = id / params.ffn_dim * 2u * params.ffn_dim + id % params.ffn_dim;
    y[id] = gelu_at(gate_up[at], params.form) * gate_up[at + params.ffn_dim];
}
