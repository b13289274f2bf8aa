// Sums over groups of LANES neighbouring invocations (a power of two up to WG) through workgroup memory.

override LANES: u32 = 64u; // a power of two, 1 to WG

var<workgroup> partial: array<vec4<f32>, WG>;

// All invocations must call it; the first of each group gets the sum.
fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    partial[local] = value;
    for (var step = LANES / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local % LANES < step) {
            partial[local] += partial[local + step];
        }
    }
    return partial[local];
}

// Between two sums: the memory is written again.
fn lanes_barrier() {
    workgroupBarrier();
}
