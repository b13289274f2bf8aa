// Sums over the LANES neighbouring invocations that share a head. All of a workgroup must call it, and all get the sum.

const LANES: u32 = 16u;

var<workgroup> parts: array<f32, WG>;

fn head_sum(local: u32, value: f32) -> f32 {
    parts[local] = value;
    workgroupBarrier();
    // All lanes of a head add up in the same order.
    var total = 0.0;
    for (var lane = 0u; lane < LANES; lane++) {
        total += parts[local / LANES * LANES + lane];
    }
    return total;
}
