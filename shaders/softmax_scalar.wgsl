// `softmax` without workgroup memory or barriers: one invocation takes a row alone, for software adapters. Rows of whole
// quads are loaded by four; of others each element is loaded by itself, because they start within a quad.
//
// Dispatch (ceil(rows / 8) folded over x and y).
#kernel softmax scalar

struct Params { n_rows: u32, dim: u32, grid_x: u32, _pad: u32 } // R, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;       // [R, C]
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>; // [R, C]

// Stands for minus infinity, which WGSL cannot write.
const LOWEST: f32 = -3.4028234e38;
const WG: u32 = 8u;
const RUN: u32 = 64u; // summed on its own first: adding elements one by one to a long sum would lose digits

@compute @workgroup_size(WG)
fn softmax(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let r = (group.y * params.grid_x + group.x) * WG + local;
    if (r >= params.n_rows) {
        return;
    }
    let row = r * params.dim;
    let quads = select(0u, params.dim / 4u, params.dim % 4u == 0u);
    let quad = row / 4u;
    var top = vec4<f32>(LOWEST);
    for (var i = 0u; i < quads; i++) {
        top = max(top, x[quad + i]);
    }
    var highest = max(max(top.x, top.y), max(top.z, top.w));
    for (var c = row + quads * 4u; c < row + params.dim; c++) {
        highest = max(highest, x[c / 4u][c % 4u]);
    }
    var sums = vec4<f32>();
    for (var start = 0u; start < quads; start += RUN) {
        var part = vec4<f32>();
        for (var i = start; i < min(start + RUN, quads); i++) {
            part += exp(x[quad + i] - highest);
        }
        sums += part;
    }
    var sum = (sums.x + sums.y) + (sums.z + sums.w);
    for (var start = quads * 4u; start < params.dim; start += RUN) {
        var part = 0.0;
        for (var c = row + start; c < row + min(start + RUN, params.dim); c++) {
            part += exp(x[c / 4u][c % 4u] - highest);
        }
        sum += part;
    }
    for (var i = 0u; i < quads; i++) {
        y[quad + i] = exp(x[quad + i] - highest) / sum;
    }
    for (var c = row + quads * 4u; c < row + params.dim; c++) {
        y[c / 4u][c % 4u] = exp(x[c / 4u][c % 4u] - highest) / sum;
    }
}
