// Gaussian error linear unit, exact or by the tanh formula. Hendrycks & Gimpel 2016, arXiv:1606.08415.
//
//     exact: y = x / 2 * (1 + erf(x / sqrt 2))      tanh: y = x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
//
// Dispatch (elements folded over x and y).

struct Params { len: u32, tanh_form: u32, grid_x: u32, _pad: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [len]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [len]

const WG: u32 = 256u;

// 1 - erf(a) for a >= 0, relative error below 1.2e-7: Chebyshev fit of erfc, Press et al., Numerical Recipes 6.2.
fn erfc_positive(a: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * a);
    let p = t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * (-0.18628806 + t * (0.27886807
        + t * (-1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277))))))));
    return t * exp(-a * a - 1.26551223 + p);
}

@compute @workgroup_size(WG)
fn gelu(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let id = (group.y * params.grid_x + group.x) * WG + local;
    if (id >= params.len) {
        return;
    }
    let value = x[id];
    if (params.tanh_form != 0u) {
        // 1 + tanh(u) = 2 / (1 + exp(-2 u)), which does not overflow where tanh itself might.
        let u = 0.7978845608 * (value + 0.044715 * value * value * value);
        y[id] = value / (1.0 + exp(clamp(-2.0 * u, -88.0, 88.0)));
        return;
    }
    let tail = 0.5 * erfc_positive(min(abs(value) * 0.7071067812, 10.0)); // the normal tail beyond |value|
    y[id] = select(value * tail, value * (1.0 - tail), value > 0.0);
}
