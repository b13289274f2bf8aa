// `attention_decode` without workgroup memory or barriers: one invocation takes ROWS rows and a part of the keys alone, for
// software adapters.
//
// Dispatch (Hkv, ceil(splits / 8), ceil(T * H / Hkv / ROWS)).
#kernel attention_decode scalar
#import attend

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 256
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D], or parts [T, H, splits, D + 4]

const WG: u32 = 8u;

@compute @workgroup_size(WG)
fn attention_decode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let split = group.y * WG + local;
    let keys = part_range(split);
    if (split < params.splits && keys.x < keys.y) {
        attend(group.z * ROWS, all_rows(), group.x, keys, split);
    }
}
