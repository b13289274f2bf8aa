// The hyperbolic tangent by an exponential that cannot overflow, where tanh itself might.
fn tanh_at(z: f32) -> f32 {
    let power = exp(-2.0 * abs(z));
    let magnitude = (1.0 - power) / (1.0 + power);
    return select(magnitude, -magnitude, z < 0.0);
}
