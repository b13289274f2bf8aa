// Reductions over a workgroup of WG invocations (a power of two) through workgroup memory. All invocations must call
// them, and all get the result.

// Stands for minus infinity, which WGSL cannot write.
const LOWEST: f32 = -3.4028234e38;

var<workgroup> partial: array<f32, WG>;

fn workgroup_sum(local: u32, value: f32) -> f32 {
    partial[local] = value;
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step) {
            partial[local] += partial[local + step];
        }
    }
    return workgroupUniformLoad(&partial[0]);
}

fn workgroup_max(local: u32, value: f32) -> f32 {
    partial[local] = value;
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step) {
            partial[local] = max(partial[local], partial[local + step]);
        }
    }
    return workgroupUniformLoad(&partial[0]);
}
