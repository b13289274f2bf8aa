// A causal convolution of each channel with its last inputs, up to four (Poli et al. 2023, arXiv:2302.10866, as in LFM2; and
// before the gated delta rule and Mamba 2):
//
//     u[t] = b[t] * v[t] with GATED, where x[t] = b | g | v; else x[t, start ..]
//     c[t] = sum over i of weight[i] * u[t - taps + 1 + i] (+ bias);   y[t] = g[t] * c[t] with GATED, else silu(c[t])
//
// The inputs before the pass are in one of `n_states` places of `past` that the sequence has, by its position, and the last ones
// go to another. Dispatch (channels of all sequences folded over x and y), one invocation for all tokens of a channel.
#import rows
#import silu
#import fold

struct Params {
    n_tokens: u32, channels: u32, taps: u32, n_states: u32, // T, C
    x_stride: u32, x_start: u32, flags: u32, row_words: u32,
    has_slots: u32, _pad0: u32, _pad1: u32, _pad2: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> x: array<f32>;           // [T, x_stride]
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // [C, taps]
@group(0) @binding(4) var<storage, read> bias: array<f32>;        // [C]; any buffer without BIAS
@group(0) @binding(5) var<storage, read_write> past: array<f32>;  // [sequences, n_states, 3, C]
@group(0) @binding(6) var<storage, read_write> y: array<f32>;     // [T, C]

const WG: u32 = 64u;
const GATED: u32 = 1u;
const BIAS: u32 = 2u;

@compute @workgroup_size(WG)
fn short_conv(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n_groups = (params.channels + WG - 1u) / WG;
    let sequence = group_index(group, grid) / n_groups;
    let c = group_index(group, grid) % n_groups * WG + local;
    if (c >= params.channels || sequence >= n_runs()) {
        return;
    }
    let run = run_of(sequence);
    if (run.first == run.end) {
        return;
    }
    let is_gated = (params.flags & GATED) != 0u;
    var taps = vec4<f32>();
    for (var i = 0u; i < params.taps; i++) {
        taps[4u - params.taps + i] = weight[c * params.taps + i];
    }
    var shift = 0.0;
    if ((params.flags & BIAS) != 0u) {
        shift = bias[c];
    }
    let pos = state[run.state + POS];
    let place = run.slot * params.n_states;
    var inputs = vec3<f32>(); // the oldest first
    if (pos > 0u) {
        let at = (place + pos % params.n_states) * 3u * params.channels + c;
        inputs = vec3<f32>(past[at], past[at + params.channels], past[at + 2u * params.channels]);
    }
    for (var t = run.first; t < run.end; t++) {
        let row = t * params.x_stride + params.x_start + c;
        var out = 0.0; // rows of padding
        if (t < run.first + run.n) {
            var own = x[row];
            if (is_gated) {
                own *= x[row + 2u * params.channels];
            }
            let window = vec4<f32>(inputs, own);
            inputs = window.yzw;
            out = dot(taps, window) + shift;
            if (is_gated) {
                out *= x[row + params.channels];
            } else {
                out = silu_at(out);
            }
        }
        y[t * params.channels + c] = out;
    }
    let to = (place + (pos + run.n) % params.n_states) * 3u * params.channels + c;
    past[to] = inputs.x;
    past[to + params.channels] = inputs.y;
    past[to + 2u * params.channels] = inputs.z;
}
