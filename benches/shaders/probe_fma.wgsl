// Multiplies and adds in registers, to measure arithmetic. Invocation i has 32 numbers, i mod 32 + n for n below 32, each
// of which becomes `factor * it + step` for so many rounds, and writes their sum:
//
//     y[i] = sum over n of a(n, rounds),  a(n, r) = factor * a(n, r - 1) + step,  a(n, 0) = i mod 32 + n
//
// The numbers are f16 in T1. Factor and step are the host's, so that no compiler knows what comes of them; with the
// factor 1 and whole steps nothing is rounded while numbers stay below 2048. Rounds come in fours, beside which the loop
// costs little.
// Dispatch (elements of y folded over x and y).
#import numbers t0=numbers_f32 t1=numbers_f16
#import fold

struct Params { n_out: u32, rounds: u32, factor: f32, step: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;  // [n_out]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn probe_fma(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id < params.n_out) {
        let f = Numbers(vec4<f32>(params.factor));
        let s = Numbers(vec4<f32>(params.step));
        let first = vec4<f32>(f32(id % 32u)) + vec4<f32>(0.0, 1.0, 2.0, 3.0);
        var a0 = Numbers(first);
        var a1 = Numbers(first + 4.0);
        var a2 = Numbers(first + 8.0);
        var a3 = Numbers(first + 12.0);
        var a4 = Numbers(first + 16.0);
        var a5 = Numbers(first + 20.0);
        var a6 = Numbers(first + 24.0);
        var a7 = Numbers(first + 28.0);
        for (var round = 0u; round < params.rounds; round += 4u) {
            a0 = fma(fma(fma(fma(a0, f, s), f, s), f, s), f, s);
            a1 = fma(fma(fma(fma(a1, f, s), f, s), f, s), f, s);
            a2 = fma(fma(fma(fma(a2, f, s), f, s), f, s), f, s);
            a3 = fma(fma(fma(fma(a3, f, s), f, s), f, s), f, s);
            a4 = fma(fma(fma(fma(a4, f, s), f, s), f, s), f, s);
            a5 = fma(fma(fma(fma(a5, f, s), f, s), f, s), f, s);
            a6 = fma(fma(fma(fma(a6, f, s), f, s), f, s), f, s);
            a7 = fma(fma(fma(fma(a7, f, s), f, s), f, s), f, s);
        }
        let sums = ((vec4<f32>(a0) + vec4<f32>(a1)) + (vec4<f32>(a2) + vec4<f32>(a3)))
            + ((vec4<f32>(a4) + vec4<f32>(a5)) + (vec4<f32>(a6) + vec4<f32>(a7)));
        y[id] = (sums.x + sums.y) + (sums.z + sums.w);
    }
}
