// Sums over groups of neighbouring invocations through workgroup memory.
#import deal

fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    partial[local] = value;
    for (var step = SHARES / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local % SHARES < step) {
            partial[local] += partial[local + step];
        }
    }
    return partial[local];
}

// The sum over the workgroup. All must call it.
fn workgroup_sum(local: u32, value: f32) -> f32 {
    partial[local].x = value;
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step) {
            partial[local].x += partial[local + step].x;
        }
    }
    workgroupBarrier();
    return partial[0].x;
}
