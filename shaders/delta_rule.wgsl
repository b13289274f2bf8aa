// The gated delta rule (Yang et al. 2024, arXiv:2412.06464) of each value head, token after token, and the gated norm of what
// it gives:
//
//     S = exp(a softplus(alpha[t] + dt)) S;   S += k[t] (beta[t] (v[t] - S^T k[t]))^T;   o = S^T q[t] / sqrt(Dk)
//     y[t] = weight * o / sqrt(mean of o^2 + eps) * silu(z[t])
//
// with q and k of length 1 and beta = beta_scale * sigmoid. With a `bound` below 0, Kimi Delta Attention (Kimi Team 2025,
// arXiv:2510.26692): each row of S has an alpha and a dt of its own, and
//
//     S = exp(bound sigmoid(-a (alpha[t] + dt))) S;   y[t] = weight * o / sqrt(mean of o^2 + eps) * sigmoid(z[t])
//
// The matrix S before the pass is in one of `n_states` places that the sequence has, by its position, and the last one goes to
// another. Dispatch (heads of all sequences folded over x and y), one workgroup per value head.
#import reduce t0=reduce t2=reduce_subgroup
#import rows
#import silu
#import softplus
#import fold

struct Params {
    n_tokens: u32, n_key_heads: u32, n_heads: u32, key_dim: u32, // T, Hk, H, Dk
    value_dim: u32, n_states: u32, x_stride: u32, grouped: u32,  // Dv
    eps: f32, row_words: u32, has_slots: u32, beta_scale: f32,
    bound: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;      // step state
@group(0) @binding(2) var<storage, read> qkv: array<f32>;        // [T, 2 Hk Dk + H Dv]
@group(0) @binding(3) var<storage, read> x: array<f32>;          // [T, x_stride]: q, k, v as they were, then z, beta, alpha
@group(0) @binding(4) var<storage, read> heads: array<f32>;      // a, [H]; dt, [H] or [H Dk]; norm weight, [Dv]
@group(0) @binding(5) var<storage, read_write> matrices: array<f32>; // [sequences, n_states, H, Dk, Dv]
@group(0) @binding(6) var<storage, read_write> y: array<f32>;    // [T, H Dv]

const WG: u32 = 128u;
const MOST: u32 = 256u; // Dk, Dv
const LENGTH_EPS: f32 = 1e-6;

var<workgroup> key: array<f32, MOST>;
var<workgroup> query: array<f32, MOST>;
var<workgroup> outs: array<f32, MOST>;
var<workgroup> decays: array<f32, MOST>;

// Of -|z|, the exponential neither overflows nor loses a NaN, as a bound could.
fn sigmoid_at(z: f32) -> f32 {
    let e = exp(-abs(z));
    return select(e, 1.0, z >= 0.0) / (1.0 + e);
}

@compute @workgroup_size(WG)
fn delta_rule(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let head = group_index(group, grid) % params.n_heads;
    let sequence = group_index(group, grid) / params.n_heads;
    if (sequence >= n_runs()) {
        return;
    }
    let run = run_of(sequence);
    if (run.first == run.end) {
        return;
    }
    let share = params.n_heads / params.n_key_heads;
    let key_head = select(head % params.n_key_heads, head / share, params.grouped != 0u);
    let keys = params.n_key_heads * params.key_dim;
    let channels = 2u * keys + params.n_heads * params.value_dim;
    let size = params.key_dim * params.value_dim;
    let by_row = params.bound < 0.0;
    let n_decays = params.n_heads * select(1u, params.key_dim, by_row);
    let pos = state[run.state + POS];
    let place = run.slot * params.n_states;
    let to = ((place + (pos + run.n) % params.n_states) * params.n_heads + head) * size;
    var at = ((place + pos % params.n_states) * params.n_heads + head) * size;
    for (var t = run.first; t < run.first + run.n; t++) {
        let row = t * channels;
        let gates = t * params.x_stride + channels;
        let after_z = gates + params.n_heads * params.value_dim;
        var squares = vec2<f32>();
        for (var i = local; i < params.key_dim; i += WG) {
            if (by_row) {
                let column = params.n_heads + head * params.key_dim + i;
                decays[i] = exp(params.bound * sigmoid_at(-heads[head] * (x[after_z + column] + heads[column])));
            } else {
                decays[i] = 1.0;
            }
            query[i] = qkv[row + key_head * params.key_dim + i];
            key[i] = qkv[row + keys + key_head * params.key_dim + i];
            squares += vec2<f32>(query[i] * query[i], key[i] * key[i]);
        }
        let query_scale = 1.0 / sqrt((workgroup_sum(local, squares.x) + LENGTH_EPS) * f32(params.key_dim));
        let key_scale = 1.0 / sqrt(workgroup_sum(local, squares.y) + LENGTH_EPS);
        let beta = params.beta_scale / (1.0 + exp(min(-x[after_z + head], 88.0)));
        // One decay for all rows: applied to the sum, it rounds less than applied to each row.
        var decay = 1.0;
        if (!by_row) {
            decay = exp(heads[head] * softplus(x[after_z + params.n_heads + head] + heads[params.n_heads + head]));
        }
        let begins = t == run.first && pos == 0u;
        var sum_sq = 0.0;
        for (var c = local; c < params.value_dim; c += WG) {
            var known = 0.0;
            if (!begins) {
                for (var i = 0u; i < params.key_dim; i++) {
                    known += decays[i] * matrices[at + i * params.value_dim + c] * key[i];
                }
            }
            let value = qkv[row + 2u * keys + head * params.value_dim + c];
            let delta = beta * (value - decay * key_scale * known) * key_scale;
            var out = 0.0;
            for (var i = 0u; i < params.key_dim; i++) {
                var element = key[i] * delta;
                if (!begins) {
                    element += decay * decays[i] * matrices[at + i * params.value_dim + c];
                }
                matrices[to + i * params.value_dim + c] = element;
                out += element * query[i];
            }
            outs[c] = out * query_scale;
            sum_sq += outs[c] * outs[c];
        }
        let scale = 1.0 / sqrt(workgroup_sum(local, sum_sq) / f32(params.value_dim) + params.eps);
        for (var c = local; c < params.value_dim; c += WG) {
            let z = x[gates + head * params.value_dim + c];
            y[(t * params.n_heads + head) * params.value_dim + c] =
                heads[params.n_heads + n_decays + c] * outs[c] * scale * select(silu_at(z), sigmoid_at(z), by_row);
        }
        at = to;
    }
    // Rows of padding.
    for (var t = run.first + run.n; t < run.end; t++) {
        for (var c = local; c < params.value_dim; c += WG) {
            y[(t * params.n_heads + head) * params.value_dim + c] = 0.0;
        }
    }
}
