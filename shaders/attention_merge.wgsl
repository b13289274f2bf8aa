// Puts the parts of `attention_decode` together:
//
//     y[h] = sum over parts of exp(highest_p - highest) * sums_p / sum over parts of exp(highest_p - highest) * total_p
//
// Dispatch (ceil(T * H * D / 256) folded over x and y), four columns of a query per invocation.
#import attention
#import parts
#import fold

@group(0) @binding(0) var<uniform> params: AttentionParams;
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
    let last = n_parts(state[query / params.n_heads * params.row_words + POS]) - 1u;
    var highest = LOWEST;
    var sum = 0.0;
    var acc = vec4<f32>();
    // Four at a time, so that none waits for the one before. Parts past the last one have no weight.
    for (var p = 0u; p <= last; p += 4u) {
        let at = min(vec4<u32>(p, p + 1u, p + 2u, p + 3u), vec4<u32>(last));
        let start = vec4<u32>(
            part_start(query, at.x), part_start(query, at.y), part_start(query, at.z), part_start(query, at.w),
        );
        let totals = array<vec4<f32>, 4>(
            parts[start.x + quads], parts[start.y + quads], parts[start.z + quads], parts[start.w + quads],
        );
        let quad = id % quads;
        let sums = array<vec4<f32>, 4>(
            parts[start.x + quad], parts[start.y + quad], parts[start.z + quad], parts[start.w + quad],
        );
        var next = highest;
        for (var i = 0u; i < 4u; i++) {
            next = max(next, totals[i].x);
        }
        let rescale = exp(highest - next);
        sum *= rescale;
        acc *= rescale;
        for (var i = 0u; i < 4u && p + i <= last; i++) {
            let weight = exp(totals[i].x - next);
            sum += weight * totals[i].y;
            acc += weight * sums[i];
        }
        highest = next;
    }
    y[id] = acc / sum;
}
