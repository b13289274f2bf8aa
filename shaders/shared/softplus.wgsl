// ln(1 + exp(z)), without the overflow of a large z.
fn softplus(z: f32) -> f32 {
    // What `1 + e` rounds away is put back: e of a large |z| is the result.
    let e = exp(-abs(z));
    let sum = 1.0 + e;
    return max(z, 0.0) + select(log(sum) * (e / max(sum - 1.0, 1e-7)), e, sum == 1.0);
}
