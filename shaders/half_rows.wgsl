// Rows in half precision, as `matmul_half` takes them:
//
//     half[m, k] = f16(value[m, k] * 2^e[m]),  inverse[m] = 2^-e[m]
//
// A value is that of x; with NORM it is normalised (RMSNorm, `weight` being its weight); with GATED it is that of the
// feed-forward's two halves, act(x[m, k]) * x[m, K + k].
//
// Half precision holds nothing beyond 65504 and loses digits below 2^-14. A row whose largest magnitude is outside SMALLEST
// .. LARGEST is taken times the power of two that brings this magnitude to 2^14 .. 2^15, and sums of its products are to be
// multiplied by the inverse: both are exact, so any finite row has a right product. What is 2^-29 of the row's largest
// magnitude or less then loses digits, as it does in the row's sum. Columns of `half` past those of x are zeros.
// Dispatch (M folded over x and y).
#import half_row t1=half_row
#import gated
#import fold

override NORM: bool = false;
override GATED: bool = false;

struct Params { n_tokens: u32, dim: u32, width: u32, eps: f32 } // M, K, columns of `half`
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;           // [M, K], or with GATED [M, 2 K]; K a multiple of 4
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;      // [K]; any buffer without NORM
@group(0) @binding(3) var<storage, read_write> half: array<vec4<f16>>;  // [M, width]
@group(0) @binding(4) var<storage, read_write> inverse: array<f32>;     // [M]

const WG: u32 = 256u;

// Without the norm's factor.
fn values(m: u32, quad: u32, x_quad: vec4<f32>) -> vec4<f32> {
    if (NORM) {
        return x_quad * weight[quad];
    }
    if (GATED) {
        let up = x[(2u * m + 1u) * (params.dim / 4u) + quad];
        return vec4<f32>(
            gated(x_quad.x, up.x), gated(x_quad.y, up.y), gated(x_quad.z, up.z), gated(x_quad.w, up.w),
        );
    }
    return x_quad;
}

@compute @workgroup_size(WG)
fn half_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let m = group_index(group, grid);
    if (m >= params.n_tokens) {
        return;
    }
    let quads = params.dim / 4u;
    let first = select(m, 2u * m, GATED) * quads;
    var most = vec4<u32>();
    var squares = vec4<f32>();
    for (var quad = local; quad < quads; quad += WG) {
        let x_quad = x[first + quad];
        squares += x_quad * x_quad;
        most = max(most, bitcast<vec4<u32>>(values(m, quad, x_quad)) & vec4<u32>(0x7fffffffu));
    }
    let row = whole_row(local, max(max(most.x, most.y), max(most.z, most.w)), squares.x + squares.y + squares.z + squares.w);
    let factor = select(1.0, 1.0 / sqrt(row.squares / f32(params.dim) + params.eps), NORM);
    let exponent = row_exponent(bitcast<u32>(bitcast<f32>(row.most) * factor));
    let scale = bitcast<f32>(exponent << 23u);
    for (var quad = local; quad < params.width / 4u; quad += WG) {
        var value = vec4<f32>();
        if (quad < quads) {
            value = values(m, quad, x[first + quad]) * factor * scale;
        }
        half[m * (params.width / 4u) + quad] = vec4<f16>(value);
    }
    if (local == 0u) {
        inverse[m] = bitcast<f32>((254u - exponent) << 23u);
    }
}
