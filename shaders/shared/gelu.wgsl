// The Gaussian error linear unit, exact, by the tanh formula or by the quick one, a sigmoid. Hendrycks & Gimpel 2016,
// arXiv:1606.08415.
//
//     exact: z / 2 * (1 + erf(z / sqrt 2))      tanh: z / 2 * (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))
//     quick: z / (1 + exp(-1.702 z))
//
// Every product that something is added to is an `fma`: a compiler that chose by itself which of them to round could choose
// otherwise in another variant of a kernel, and results in every batch are to be the same; see `tile.wgsl`.

// 1 - erf(a) for a >= 0, relative error below 1.2e-7: Chebyshev fit of erfc, Press et al., Numerical Recipes 6.2.
fn erfc_positive(a: f32) -> f32 {
    let t = 1.0 / fma(0.5, a, 1.0);
    var p = fma(t, 0.17087277, -0.82215223);
    p = fma(t, p, 1.48851587);
    p = fma(t, p, -1.13520398);
    p = fma(t, p, 0.27886807);
    p = fma(t, p, -0.18628806);
    p = fma(t, p, 0.09678418);
    p = fma(t, p, 0.37409196);
    p = fma(t, p, 1.00002368);
    return t * exp(fma(t, p, fma(-a, a, -1.26551223)));
}

const TANH_FORM: u32 = 1u;
const QUICK_FORM: u32 = 2u;

fn gelu_at(z: f32, form: u32) -> f32 {
    if (form == QUICK_FORM) {
        return z / (1.0 + exp(clamp(-1.702 * z, -88.0, 88.0)));
    }
    if (form == TANH_FORM) {
        // 1 + tanh(u) = 2 / (1 + exp(-2 u)), which does not overflow where tanh itself might.
        let u = 0.7978845608 * fma(0.044715 * z * z, z, z);
        return z / (1.0 + exp(clamp(-2.0 * u, -88.0, 88.0)));
    }
    let tail = 0.5 * erfc_positive(min(abs(z) * 0.7071067812, 10.0)); // the normal tail beyond |z|
    return select(z * tail, fma(-z, tail, z), z > 0.0);
}
