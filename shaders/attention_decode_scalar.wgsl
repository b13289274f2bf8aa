// `attention_decode` without workgroup memory or barriers: one invocation takes ROWS rows and a part of the keys alone, for
// software adapters.
//
// Dispatch (Hkv * ceil(T * H / Hkv / ROWS) folded over x and y, ceil(splits / 8)).
#kernel attention_decode scalar
#import attend
#import fold

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 512
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(5) var<storage, read> sinks: array<f32>;    // [H]; any buffer without SINKS
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D], or parts [T, H, splits, D + 4]

const WG: u32 = 8u;

@compute @workgroup_size(WG)
fn attention_decode(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let kv_head = group_index(group, grid) % params.n_kv_heads;
    let first_row = group_index(group, grid) / params.n_kv_heads * ROWS;
    let split = group.z * WG + local;
    let keys = part_range(split);
    if (split < params.splits && keys.x < keys.y && first_row < n_rows()) {
        attend(first_row, all_rows(), kv_head, keys, split);
    }
}
