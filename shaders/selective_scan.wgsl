// The selective scan of Mamba 2 (Dao & Gu 2024, arXiv:2405.21060) of each head, token after token, and the gate of what it
// gives:
//
//     d = softplus(dt[t] + bias);   S = exp(a d) S + d b[t] v[t]^T;   y[t] = (S^T c[t] + skip v[t]) * silu(z[t])
//
// where heads of a group have b and c in common. The matrix S before the pass is in one of `n_states` places that the
// sequence has, by its position, and the last one goes to another. Dispatch (columns of all heads and sequences folded over x and
// y), one invocation for all tokens of a column.
#import rows
#import silu
#import softplus
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_groups: u32, head_dim: u32,  // T, H, G, P
    state_dim: u32, n_states: u32, x_stride: u32, dt_start: u32, // N
    row_words: u32, has_slots: u32, _pad0: u32, _pad1: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>; // step state
@group(0) @binding(2) var<storage, read> vbc: array<f32>;   // [T, H P + 2 G N]: v of all heads, b and c of all groups
@group(0) @binding(3) var<storage, read> x: array<f32>;     // [T, x_stride]: z first, [H P], and dt from dt_start on, [H]
@group(0) @binding(4) var<storage, read> heads: array<f32>; // a, [H]; bias, [H]; skip, [H]
@group(0) @binding(5) var<storage, read_write> matrices: array<f32>; // [sequences, n_states, H, N, P]
@group(0) @binding(6) var<storage, read_write> y: array<f32>; // [T, H P]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn selective_scan(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let width = params.n_heads * params.head_dim;
    let n_groups = (width + WG - 1u) / WG;
    let sequence = group_index(group, grid) / n_groups;
    let column = group_index(group, grid) % n_groups * WG + local;
    if (column >= width || sequence >= n_runs()) {
        return;
    }
    let run = run_of(sequence);
    if (run.first == run.end) {
        return;
    }
    let head = column / params.head_dim;
    let first = width + head / (params.n_heads / params.n_groups) * params.state_dim; // of b
    let stride = width + 2u * params.n_groups * params.state_dim;
    let size = params.state_dim * params.head_dim;
    let pos = state[run.state + POS];
    let place = run.slot * params.n_states;
    let to = ((place + (pos + run.n) % params.n_states) * params.n_heads + head) * size + column % params.head_dim;
    var at = ((place + pos % params.n_states) * params.n_heads + head) * size + column % params.head_dim;
    for (var t = run.first; t < run.end; t++) {
        var out = 0.0; // rows of padding
        if (t < run.first + run.n) {
            let row = t * stride;
            let value = vbc[row + column];
            let step = softplus(x[t * params.x_stride + params.dt_start + head] + heads[params.n_heads + head]);
            let decay = exp(heads[head] * step);
            let begins = t == run.first && pos == 0u;
            for (var i = 0u; i < params.state_dim; i++) {
                var element = step * vbc[row + first + i] * value;
                if (!begins) {
                    element += decay * matrices[at + i * params.head_dim];
                }
                matrices[to + i * params.head_dim] = element;
                out += element * vbc[row + first + params.n_groups * params.state_dim + i];
            }
            out = (out + heads[2u * params.n_heads + head] * value) * silu_at(x[t * params.x_stride + column]);
            at = to;
        }
        y[t * width + column] = out;
    }
}
