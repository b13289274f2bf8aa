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
