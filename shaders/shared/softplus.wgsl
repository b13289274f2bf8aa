// ln(1 + exp(z)), without the overflow of a large z.
fn softplus(z: f32) -> f32 {
    return max(z, 0.0) + log(1.0 + exp(-abs(z)));
}
