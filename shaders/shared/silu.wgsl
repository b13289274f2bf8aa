// The sigmoid linear unit, z / (1 + exp(-z)). exp overflows to infinity below -88, where the quotient is then zero, as
// it should be; the bound keeps it finite.
fn silu_at(z: f32) -> f32 {
    return z / (1.0 + exp(min(-z, 88.0)));
}
