// Splits the fused projection, rotates queries and keys, and writes keys and values to their cache slots:
//
//     qkv[t] = q heads | k heads | v heads;   k[g, pos + t] = rotate(..), v[g, pos + t] = ..
//
// Dispatch (pairs folded over x and y), one invocation per pair of elements; see `shared/rotate.wgsl`.
#import split_heads
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    rot_dims: u32, style: u32, capacity: u32, _pad: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [capacity, rot_dims / 2] of (cos, sin)
@group(0) @binding(3) var<storage, read> qkv: array<f32>;         // [T, (H + 2 Hkv) D]
@group(0) @binding(4) var<storage, read_write> q: array<f32>;     // [T, H, D]
@group(0) @binding(5) var<storage, read_write> k: array<f32>;     // [Hkv, capacity, D]
@group(0) @binding(6) var<storage, read_write> v: array<f32>;     // [Hkv, capacity, D]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn rope_kv(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    let pairs = params.head_dim / 2u;
    let heads = params.n_heads + 2u * params.n_kv_heads;
    let t = id / (pairs * heads);
    if (t >= params.n_tokens) {
        return;
    }
    let head = id / pairs % heads;
    let i = id % pairs;
    let at = (t * heads + head) * params.head_dim + pair(i);
    put_pair(t, head, i, vec2<f32>(qkv[at.x], qkv[at.y]));
}
