// Rows of heads, such as keys as they are projected, in the layout of a cache: y[h, s, d] = x[s, h, d].
//
// Dispatch (elements folded over x and y), one invocation per element.
#import fold

struct Params { n_rows: u32, n_heads: u32, head_dim: u32, _pad: u32 } // S, H, D
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [S, H, D]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [H, S, D]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn by_head(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    let head = id / params.head_dim / params.n_rows;
    let row = id / params.head_dim % params.n_rows;
    if (head < params.n_heads) {
        y[id] = x[(row * params.n_heads + head) * params.head_dim + id % params.head_dim];
    }
}
