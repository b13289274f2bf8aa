// `attention_prefill` without workgroup memory or barriers: one invocation takes ROWS rows alone, for software adapters.
//
// Dispatch (ceil(Hkv * tiles / 8) folded over x and y), with tiles of ROWS rows.
#kernel attention_prefill scalar
#import keys F32=keys_f32 F16=keys_f16 Q8_0=keys_q8_0
#import attend
#import fold

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 512
@group(0) @binding(3) var<storage, read> k: array<vec4<u32>>;  // [Hkv, slots, row]
@group(0) @binding(4) var<storage, read> v: array<vec4<u32>>;  // [Hkv, slots, row]
@group(0) @binding(5) var<storage, read> sinks: array<f32>;    // see `sinks`; any buffer without them
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

const WG: u32 = 8u;

// Where the queries of rows start, for `query_quad`.
fn query_places(rows: vec4<u32>, kv_head: u32) -> vec4<u32> {
    return queries_from(rows, kv_head);
}

fn query_quad(at: u32) -> vec4<f32> {
    return q[at];
}

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
            let kv_head = i % params.n_kv_heads;
            let keys = visible_to(tile, 2u * TILE);
            var near = begin(tile.first, tile, kv_head, keys, 0u);
            // Rows past the end would be those of `near` again.
            let has_far = ROWS > 4u && tile.first + 4u < tile.end;
            var far = Rows();
            if (has_far) {
                far = begin(tile.first + 4u, tile, kv_head, keys, 0u);
            }
            attend(&near, &far, has_far, tile, kv_head, keys);
        }
    }
}
