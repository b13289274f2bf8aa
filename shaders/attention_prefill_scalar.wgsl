// `attention_prefill` without workgroup memory or barriers: one invocation takes ROWS rows alone, for software adapters.
//
// Dispatch (ceil(Hkv * ceil(T * H / Hkv / ROWS) / 8), 1, 1).
#kernel attention_prefill scalar
#import attend

struct Params {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    capacity: u32, window: u32, scale: f32, soft_cap: f32,       // window, soft_cap 0: none
    causal: u32, splits: u32, step: u32, first_group: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 256
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

const WG: u32 = 8u;

@compute @workgroup_size(WG)
fn attention_prefill(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let n = (n_rows() + ROWS - 1u) / ROWS;
    let groups = (n * params.n_kv_heads + WG - 1u) / WG;
    // Early and late rows in turns: late ones see more keys, and llvmpipe cuts a grid into one run for each thread.
    let g = params.first_group + group.x;
    let i = select(g / 2u, groups - 1u - g / 2u, g % 2u == 1u) * WG + local;
    // Neighbours take the same rows in another head, and so as many keys: they wait for the slowest.
    let row = i / params.n_kv_heads * ROWS;
    if (row < n_rows()) {
        attend(row, i % params.n_kv_heads, visible_to(vec2<u32>(row, min(row + ROWS, n_rows()) - 1u)), 0u);
    }
}
