// Rotary position embedding of packed sequences, in place: the first `n_heads` heads of each row of `qkv`, queries and keys,
// are rotated by their tokens' positions; the values behind them stay. See `shared/rotate.wgsl`.
//
// Dispatch (rotated pairs folded over x and y), one invocation per pair.
#import rotate
#import fold

struct Params { n_tokens: u32, n_heads: u32, head_dim: u32, rot_dims: u32, style: u32, stride: u32, _pad0: u32, _pad1: u32 } // T, H, D
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;      // [T, 3]: id, position, type
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [S, rot_dims / 2] of (cos, sin)
@group(0) @binding(3) var<storage, read_write> qkv: array<f32>;   // [T, stride]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn rope_packed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    let pairs = params.rot_dims / 2u;
    let head = id / pairs; // over tokens and heads
    if (head >= params.n_tokens * params.n_heads) {
        return;
    }
    let i = id % pairs;
    let token = head / params.n_heads;
    let at = token * params.stride + head % params.n_heads * params.head_dim + pair(i);
    let turned = rotate(vec2<f32>(qkv[at.x], qkv[at.y]), tokens[3u * token + 1u], i);
    qkv[at.x] = turned.x;
    qkv[at.y] = turned.y;
}
