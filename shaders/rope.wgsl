// Rotary position embedding of heads; see `shared/rotate.wgsl`. Token t stands at position pos + t.
//
// Dispatch (pairs folded over x and y), one invocation per pair.
#import rotate
#import state
#import fold

struct Params { n_tokens: u32, n_heads: u32, head_dim: u32, rot_dims: u32, style: u32, _pad0: u32, _pad1: u32, _pad2: u32 } // T, H, D
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [S, rot_dims / 2] of (cos, sin)
@group(0) @binding(3) var<storage, read> x: array<f32>;           // [T, H, D]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;     // [T, H, D]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn rope(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    let pairs = params.head_dim / 2u;
    let head = id / pairs; // over tokens and heads
    if (head >= params.n_tokens * params.n_heads) {
        return;
    }
    let i = id % pairs;
    let at = head * params.head_dim + pair(i);
    let turned = rotate(vec2<f32>(x[at.x], x[at.y]), state[POS] + head / params.n_heads, i);
    y[at.x] = turned.x;
    y[at.y] = turned.y;
}
