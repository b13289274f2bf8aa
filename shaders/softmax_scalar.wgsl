// `softmax` without workgroup memory or barriers: one invocation takes a row alone, for software adapters. Rows of whole
// quads are loaded by four; of others each element is loaded by itself, because they start within a quad.
//
// Dispatch (ceil(rows / 8) folded over x and y).
#kernel softmax scalar
#import fold

struct Params { n_rows: u32, dim: u32, _pad0: u32, _pad1: u32 } // R, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;       // [R, C]
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>; // [R, C]

// Stands for minus infinity, which WGSL cannot write.
const LOWEST: f32 = -3.4028234e38;
const WG: u32 = 8u;
const RUN: u32 = 8u; // quads that are weighed and summed at a time
const PART: u32 = 64u; // elements, likewise

// Every row is read twice: sums grow together with the highest element so far, and shrink when a higher one comes.
fn by_quads(row: u32) {
    let quads = params.dim / 4u;
    var top = vec4<f32>(LOWEST);
    var sums = vec4<f32>(); // of exp(x - top), by component
    for (var start = 0u; start < quads; start += RUN) {
        var run = array<vec4<f32>, RUN>();
        var next = top;
        for (var i = 0u; i < RUN; i++) {
            let at = start + i;
            run[i] = select(vec4<f32>(LOWEST), x[row + min(at, quads - 1u)], at < quads);
            next = max(next, run[i]);
        }
        var part = vec4<f32>();
        for (var i = 0u; i < RUN; i++) {
            part += select(vec4<f32>(), exp(run[i] - next), start + i < quads);
        }
        sums = sums * exp(top - next) + part;
        top = next;
    }
    let highest = max(max(top.x, top.y), max(top.z, top.w));
    sums *= exp(top - highest);
    let sum = (sums.x + sums.y) + (sums.z + sums.w);
    for (var i = 0u; i < quads; i++) {
        y[row + i] = exp(x[row + i] - highest) / sum;
    }
}

// The elements of a row that starts within a quad.
fn by_elements(row: u32) {
    var highest = LOWEST;
    for (var c = row; c < row + params.dim; c++) {
        highest = max(highest, x[c / 4u][c % 4u]);
    }
    var sum = 0.0;
    for (var start = row; start < row + params.dim; start += PART) {
        var part = 0.0; // adding elements one by one to a long sum would lose digits
        for (var c = start; c < min(start + PART, row + params.dim); c++) {
            part += exp(x[c / 4u][c % 4u] - highest);
        }
        sum += part;
    }
    for (var c = row; c < row + params.dim; c++) {
        y[c / 4u][c % 4u] = exp(x[c / 4u][c % 4u] - highest) / sum;
    }
}

@compute @workgroup_size(WG)
fn softmax(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let r = group_index(group, grid) * WG + local;
    if (r >= params.n_rows) {
        return;
    }
    if (params.dim % 4u == 0u) {
        by_quads(r * params.dim / 4u);
    } else {
        by_elements(r * params.dim);
    }
}
