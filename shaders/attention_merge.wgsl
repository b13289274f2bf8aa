// Puts the parts of `attention_decode` together:
//
//     y[h] = sum over parts of exp(highest_p - highest) * sums_p / sum over parts of exp(highest_p - highest) * total_p
//
// Dispatch (ceil(T * H * D / 256) folded over x and y), four columns of a query per invocation.
#import attention
#import parts
#import fold

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> parts: array<vec4<f32>>;   // [T, H, splits, D + 4]
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn attention_merge(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quads = params.head_dim / 4u;
    let id = group_index(group, grid) * WG + local;
    let query = id / quads;
    if (query >= params.n_tokens * params.n_heads) {
        return;
    }
    let n = n_parts(state[query / params.n_heads * params.row_words + POS]);
    var highest = LOWEST;
    for (var p = 0u; p < n; p++) {
        highest = max(highest, parts[part_start(query, p) + quads].x);
    }
    var sum = 0.0;
    var acc = vec4<f32>();
    for (var p = 0u; p < n; p++) {
        let start = part_start(query, p);
        let weight = exp(parts[start + quads].x - highest);
        sum += weight * parts[start + quads].y;
        acc += weight * parts[start + id % quads];
    }
    y[id] = acc / sum;
}
