// Reductions of four numbers at a time over a workgroup of WG invocations; see `reduce.wgsl`.

var<workgroup> partial: array<vec4<f32>, WG>;

fn workgroup_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    partial[local] = value;
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step) {
            partial[local] = partial[local] + partial[local + step];
        }
    }
    return workgroupUniformLoad(&partial[0]);
}

fn workgroup_max(local: u32, value: vec4<f32>) -> vec4<f32> {
    partial[local] = value;
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step) {
            partial[local] = max(partial[local], partial[local + step]);
        }
    }
    return workgroupUniformLoad(&partial[0]);
}
