// Sums over groups of neighbouring invocations: by shuffles inside subgroups, then through workgroup memory where a group
// spans several. Invocations are taken to fill subgroups in order, as in `reduce_subgroup`.
#import deal

fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    let size = subgroupAdd(1u);
    var sum = value;
    // Every shuffle is made by all; a step wider than the group or the subgroup adds nothing.
    for (var step = 64u; step > 0u; step >>= 1u) {
        let other = subgroupShuffleXor(sum, step % size);
        sum += select(vec4<f32>(), other, step < SHARES && step < size);
    }
    partial[local] = sum;
    workgroupBarrier();
    if (local % SHARES == 0u) {
        for (var next = local + size; next < local + SHARES; next += size) {
            sum += partial[next];
        }
    }
    return sum;
}

// The sum over the workgroup. All must call it.
fn workgroup_sum(local: u32, value: f32) -> f32 {
    let size = subgroupAdd(1u);
    partial[local].x = subgroupAdd(value);
    workgroupBarrier();
    var sum = 0.0;
    for (var first = 0u; first < WG; first += size) {
        sum += partial[first].x;
    }
    return sum;
}
