// The gated feed-forward's first half for one token or a few, in one go:
//
//     y[t, f] = act(w[f] . x[t]) * (w[F + f] . x[t])
//
// which is `matvec` followed by `swiglu` or `geglu`, with NORM also preceded by `rms_norm`; see `shared/four_rows.wgsl`. With
// UPS, w has the ups alone, and the gates' products wait in y. LANES invocations work four rows of w for COLUMNS tokens, as in
// `matvec`. Dispatch (groups of rows folded over x and y, ceil(T / COLUMNS) in z).
#weights
#import lanes t0=row_lanes t2=row_lanes_subgroup scalar=row_lanes_alone
#import columns
#import gated
#import fold

struct Params { n_tokens: u32, ffn_dim: u32, dim: u32, blocks: u32, w_scales: u32, eps: f32, first_group: u32, _pad: u32 } // T, F, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;       // [2 F, K], packed: gate, then up; or [F, K]
@group(0) @binding(2) var<storage, read> vector: array<vec4<f32>>;  // [K], norm weight; any buffer without NORM
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;       // [T, K], K a multiple of 4
@group(0) @binding(4) var<storage, read_write> y: array<f32>;       // [T, F]

override WG: u32 = 64u; // 128 with one column

override UPS: bool = false; // w has ups alone

@compute @workgroup_size(WG)
fn gate_up(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let four = (params.first_group + group_index(group, grid)) * (WG / LANES) + local / LANES;
    let first_token = group.z * COLUMNS;
    // Rows past the end repeat the last one.
    var rows = vec4<u32>(four * 4u, four * 4u + 1u, four * 4u + 2u, four * 4u + 3u);
    if (UPS) {
        rows = min(rows, vec4<u32>(params.ffn_dim - 1u));
    } else {
        let gates = min(vec2<u32>(four * 2u, four * 2u + 1u), vec2<u32>(params.ffn_dim - 1u));
        rows = vec4<u32>(gates, gates + params.ffn_dim);
    }
    let sum = products(local, rows, first_token);
    let token = first_token + lanes_column(local);
    if (local % SHARES == 0u && (COLUMNS == 1u || token < params.n_tokens)) {
        put(token, four, sum);
    }
}

fn put(token: u32, four: u32, sum: vec4<f32>) {
    let first = token * params.ffn_dim;
    if (UPS) {
        let f = four * 4u;
        for (var i = 0u; i < 4u && f + i < params.ffn_dim; i++) {
            y[first + f + i] = gated(y[first + f + i], sum[i]);
        }
    } else {
        let f = four * 2u;
        for (var i = 0u; i < 2u && f + i < params.ffn_dim; i++) {
            y[first + f + i] = gated(sum[i], sum[i + 2u]);
        }
    }
}
