// Queries, keys and values of one token or a few, in one go: projects x, rotates queries and keys, and writes keys and
// values to their cache slots,
//
//     p = w x[t] (+ bias);   q[t, h] = rotate(p[h]), k[g, pos + t] = rotate(p[H + g]), v[g, pos + t] = p[H + Hkv + g]
//
// which is `matvec` followed by `rope_kv`, with NORM also preceded by `rms_norm`; see `shared/four_rows.wgsl`. A matrix
// may hold only some of the heads, from `first_head` on. LANES invocations work two pairs of elements, which are four
// rows of w. Dispatch (groups of pairs folded over x and y, T in z).
#weights
#import lanes t0=lanes t2=lanes_subgroup scalar=lanes_alone
#import four_rows
#import split_heads
#import fold

struct Params {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // T, N, K
    w_scales: u32, eps: f32, first_head: u32, flags: u32,
    n_heads: u32, n_kv_heads: u32, head_dim: u32, rot_dims: u32, // H, Hkv, D
    style: u32, capacity: u32, first_group: u32, query_row: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;         // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>;   // [rows, rot_dims / 2] of (cos, sin); those of queries from `query_row` on
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;       // [N, K], packed, N whole heads
@group(0) @binding(4) var<storage, read> vector: array<vec4<f32>>;  // bias, [(H + 2 Hkv) D], or with NORM norm weight, [K]
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;       // [T, K], K a multiple of 4
@group(0) @binding(6) var<storage, read_write> q: array<f32>;       // [T, H, D]
@group(0) @binding(7) var<storage, read_write> k: array<f32>;       // [Hkv, capacity, D]
@group(0) @binding(8) var<storage, read_write> v: array<f32>;       // [Hkv, capacity, D]

const WG: u32 = 64u;
const BIAS: u32 = 1u; // `vector` is a bias to add

// The rows of w that make pair number `index`.
fn pair_rows(index: u32) -> vec2<u32> {
    let pairs = params.head_dim / 2u;
    return index / pairs * params.head_dim + pair(index % pairs);
}

fn bias(at: u32) -> f32 {
    return vector[at / 4u][at % 4u];
}

fn put(token: u32, index: u32, sum: vec2<f32>) {
    if (index * 2u >= params.n_out) {
        return;
    }
    let pairs = params.head_dim / 2u;
    let head = params.first_head + index / pairs;
    var value = sum;
    if ((params.flags & BIAS) != 0u) {
        let at = head * params.head_dim + pair(index % pairs);
        value += vec2<f32>(bias(at.x), bias(at.y));
    }
    put_pair(token, head, index % pairs, value, vec2<f32>(1.0));
}

@compute @workgroup_size(WG)
fn qkv(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = ((params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES) * 2u;
    // Pairs past the end repeat the last one; `put` does not write them.
    let last = params.n_out / 2u - 1u;
    let rows = vec4<u32>(pair_rows(min(index, last)), pair_rows(min(index + 1u, last)));
    let sum = four_rows(local, rows, group.z);
    if (local % LANES == 0u) {
        put(group.z, index, sum.xy);
        put(group.z, index + 1u, sum.zw);
    }
}
