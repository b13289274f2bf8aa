// `layer_norm` without workgroup memory or barriers: one invocation takes a token alone, for software adapters. Rows of
// whole quads are loaded by four; of others each element is loaded by itself, because they start within a quad.
//
// Dispatch (ceil(T / 8) folded over x and y).
#kernel layer_norm scalar
#import deviations
#import fold

struct NormParams { n_tokens: u32, dim: u32, eps: f32, flags: u32 } // T, C
@group(0) @binding(0) var<uniform> params: NormParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;       // [T, C]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;  // [C]
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>;    // [C]; any buffer where flags lack BIAS
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>; // [T, C]

const WG: u32 = 8u;
const BIAS: u32 = 1u;

fn quad_at(i: u32) -> vec4<f32> {
    return x[i];
}

// The row's mean deviation from `first + mean`, or its mean square.
fn mean_deviation(row: u32, quads: u32, first: f32, mean: f32, squared: bool) -> f32 {
    var sum = 0.0;
    if (squared) {
        sum = squared_deviations(row / 4u, quads, first, mean);
    } else {
        sum = deviations(row / 4u, quads, first);
    }
    for (var start = quads * 4u; start < params.dim; start += RUN) {
        var part = 0.0;
        for (var c = row + start; c < row + min(start + RUN, params.dim); c++) {
            let deviation = x[c / 4u][c % 4u] - first - mean;
            part += select(deviation, deviation * deviation, squared);
        }
        sum += part;
    }
    return sum / f32(params.dim);
}

@compute @workgroup_size(WG)
fn layer_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let token = group_index(group, grid) * WG + local;
    if (token >= params.n_tokens) {
        return;
    }
    let row = token * params.dim;
    let quads = select(0u, params.dim / 4u, params.dim % 4u == 0u);
    // Sums of differences from the row's first element: a mean far from zero then costs no digits.
    let first = x[row / 4u][row % 4u];
    let mean = mean_deviation(row, quads, first, 0.0, false); // relative to `first`
    let scale = 1.0 / sqrt(mean_deviation(row, quads, first, mean, true) + params.eps);
    for (var i = 0u; i < quads; i++) {
        var value = (x[row / 4u + i] - first - mean) * scale * weight[i];
        if ((params.flags & BIAS) != 0u) {
            value += bias[i];
        }
        y[row / 4u + i] = value;
    }
    for (var c = quads * 4u; c < params.dim; c++) {
        let at = row + c;
        var value = (x[at / 4u][at % 4u] - first - mean) * scale * weight[c / 4u][c % 4u];
        if ((params.flags & BIAS) != 0u) {
            value += bias[c / 4u][c % 4u];
        }
        y[at / 4u][at % 4u] = value;
    }
}
