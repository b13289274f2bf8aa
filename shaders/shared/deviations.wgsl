// Sums over a row of whole quads, which the kernel gives by `quad_at`, by one invocation. Runs of quads are summed on
// their own first: adding elements one by one to a long sum would lose digits.

const RUN: u32 = 64u;

// Of differences from `first`.
fn deviations(row: u32, quads: u32, first: f32) -> f32 {
    var sums = vec4<f32>();
    for (var start = 0u; start < quads; start += RUN) {
        var part = vec4<f32>();
        for (var i = start; i < min(start + RUN, quads); i++) {
            part += quad_at(row + i) - first;
        }
        sums += part;
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}

// Of squared differences from `first + mean`.
fn squared_deviations(row: u32, quads: u32, first: f32, mean: f32) -> f32 {
    var sums = vec4<f32>();
    for (var start = 0u; start < quads; start += RUN) {
        var part = vec4<f32>();
        for (var i = start; i < min(start + RUN, quads); i++) {
            let deviation = quad_at(row + i) - first - mean;
            part += deviation * deviation;
        }
        sums += part;
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}
