// `attention_prefill` without workgroup memory or barriers: one invocation takes ROWS rows alone, for software adapters.
//
// Dispatch (ceil(Hkv * tiles / 8) folded over x and y), with tiles of ROWS rows.
#kernel attention_prefill scalar
#import attend
#import fold

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 512
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(5) var<storage, read> sinks: array<f32>;    // [H]; any buffer without SINKS
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

const WG: u32 = 8u;

@compute @workgroup_size(WG)
fn attention_prefill(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let groups = (params.n_tiles * params.n_kv_heads + WG - 1u) / WG;
    // Early and late rows in turns: late ones see more keys, and llvmpipe cuts a grid into one run for each thread.
    let g = params.first_group + group_index(group, grid);
    if (g >= groups) {
        return;
    }
    let i = select(g / 2u, groups - 1u - g / 2u, g % 2u == 1u) * WG + local;
    // Neighbours take the same rows in another head, and so as many keys: they wait for the slowest.
    if (i / params.n_kv_heads < params.n_tiles) {
        let tile = tile_at(i / params.n_kv_heads, ROWS);
        if (tile.first < tile.end) {
            attend(tile.first, tile, i % params.n_kv_heads, visible_to(tile), 0u);
        }
    }
}
