// Sums over groups of LANES neighbouring invocations (a power of two up to WG) through workgroup memory.

override LANES: u32 = 64u; // a power of two, 1 to WG

var<workgroup> partial: array<vec4<f32>, WG>;

// All invocations must call it, and all of a group get its sum.
fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    partial[local] = value;
    for (var step = LANES / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local % LANES < step) {
            partial[local] += partial[local + step];
        }
    }
    workgroupBarrier();
    return partial[local - local % LANES];
}

// Between two sums: the memory is written again.
fn lanes_barrier() {
    workgroupBarrier();
}
