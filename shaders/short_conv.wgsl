// A causal convolution of each channel with its last inputs, up to eight (Poli et al. 2023, arXiv:2302.10866, as in LFM2; and
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
@group(0) @binding(5) var<storage, read_write> past: array<f32>;  // [sequences, n_states, taps - 1, C]
@group(0) @binding(6) var<storage, read_write> y: array<f32>;     // [T, C]

const WG: u32 = 64u;
const GATED: u32 = 1u;
const BIAS: u32 = 2u;
const MOST: u32 = 8u; // taps

// The weight of tap `at` of eight.
fn tap(c: u32, at: u32) -> f32 {
    let first = MOST - params.taps;
    if (at < first) {
        return 0.0;
    }
    return weight[c * params.taps + at - first];
}

fn past_index(place: u32, c: u32, at: u32) -> u32 {
    return (place * (params.taps - 1u) + at + params.taps - MOST) * params.channels + c;
}

// The input of tap `at` for the token after the state in a place.
fn kept(place: u32, c: u32, at: u32) -> f32 {
    if (at + params.taps < MOST) {
        return 0.0;
    }
    return past[past_index(place, c, at)];
}

fn keep(place: u32, c: u32, at: u32, input: f32) {
    if (at + params.taps >= MOST) {
        past[past_index(place, c, at)] = input;
    }
}

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
    // Weights and inputs of eight taps, the oldest first; those that the kernel does not have are zero.
    let old_taps = vec4<f32>(tap(c, 0u), tap(c, 1u), tap(c, 2u), tap(c, 3u));
    let taps = vec4<f32>(tap(c, 4u), tap(c, 5u), tap(c, 6u), tap(c, 7u));
    var shift = 0.0;
    if ((params.flags & BIAS) != 0u) {
        shift = bias[c];
    }
    let pos = state[run.state + POS];
    let place = run.slot * params.n_states;
    var old_inputs = vec4<f32>();
    var inputs = vec3<f32>();
    if (pos > 0u) {
        let before = place + pos % params.n_states;
        old_inputs = vec4<f32>(kept(before, c, 0u), kept(before, c, 1u), kept(before, c, 2u), kept(before, c, 3u));
        inputs = vec3<f32>(kept(before, c, 4u), kept(before, c, 5u), kept(before, c, 6u));
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
            out = dot(taps, window) + dot(old_taps, old_inputs) + shift;
            old_inputs = vec4<f32>(old_inputs.yzw, window.x);
            inputs = window.yzw;
            if (is_gated) {
                out *= x[row + params.channels];
            } else {
                out = silu_at(out);
            }
        }
        y[t * params.channels + c] = out;
    }
    let after = place + (pos + run.n) % params.n_states;
    keep(after, c, 0u, old_inputs.x);
    keep(after, c, 1u, old_inputs.y);
    keep(after, c, 2u, old_inputs.z);
    keep(after, c, 3u, old_inputs.w);
    keep(after, c, 4u, inputs.x);
    keep(after, c, 5u, inputs.y);
    keep(after, c, 6u, inputs.z);
}
