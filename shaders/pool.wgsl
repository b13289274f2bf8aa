// One row for each sequence of a batch: the mean of its rows, the first or the last of them,
//
//     y[b] = (sum over r of x[r]) / n   or   x[first]   or   x[end - 1],   r from first to end - 1, (first, end) = spans[b]
//
// with NORMALISE divided by max(sqrt(sum over c of y[b, c]^2), 1e-12). An empty span gives zeros. Runs of rows are
// summed on their own first, counted from the span's own beginning: one long sum would lose digits, and a result must
// not depend on where in the batch a sequence lies. Dispatch (B folded over x and y).
#import reduce t0=reduce t2=reduce_subgroup
#import fold

struct Params {
    n_rows: u32, dim: u32, pooling: u32, normalise: u32, // T, C
    n_spans: u32, _pad0: u32, _pad1: u32, _pad2: u32,    // B
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> spans: array<vec2<u32>>;  // [B, 2]
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;      // [T, C]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;      // [B, C]

const WG: u32 = 256u;
const RUN: u32 = 64u;
const CLS: u32 = 1u;
const LAST: u32 = 2u;

// Elements 4 * quad .. 4 * quad + 4 of a row, zero past its end.
fn x_quad(row: u32, quad: u32) -> vec4<f32> {
    if (params.dim % 4u == 0u) {
        return x[row * (params.dim / 4u) + quad];
    }
    // Such a row may start within a quad.
    var value = vec4<f32>();
    for (var c = quad * 4u; c < min(quad * 4u + 4u, params.dim); c++) {
        let at = row * params.dim + c;
        value[c % 4u] = x[at / 4u][at % 4u];
    }
    return value;
}

fn mean(first: u32, end: u32, quad: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    for (var start = first; start < end; start += RUN) {
        var part = vec4<f32>();
        for (var row = start; row < min(start + RUN, end); row++) {
            part += x_quad(row, quad);
        }
        sum += part;
    }
    return sum / f32(end - first);
}

@compute @workgroup_size(WG)
fn pool(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let span = group_index(group, grid);
    if (span >= params.n_spans) {
        return;
    }
    let end = min(spans[span].y, params.n_rows);
    let first = min(spans[span].x, end);
    let at = span * params.dim;
    var sum_sq = 0.0;
    for (var quad = local; quad * 4u < params.dim; quad += WG) {
        var value = vec4<f32>();
        if (first < end) {
            switch params.pooling {
                case CLS: { value = x_quad(first, quad); }
                case LAST: { value = x_quad(end - 1u, quad); }
                default: { value = mean(first, end, quad); }
            }
        }
        sum_sq += dot(value, value);
        for (var i = 0u; i < min(params.dim - quad * 4u, 4u); i++) {
            y[at + quad * 4u + i] = value[i];
        }
    }
    if (params.normalise == 0u) {
        return;
    }
    let norm = max(sqrt(workgroup_sum(local, sum_sq)), 1e-12);
    for (var quad = local; quad * 4u < params.dim; quad += WG) {
        for (var c = quad * 4u; c < min(quad * 4u + 4u, params.dim); c++) {
            y[at + c] /= norm;
        }
    }
}
