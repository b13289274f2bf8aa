// Sums over groups of LANES neighbouring invocations (a power of two up to WG): by shuffles inside subgroups, then
// through workgroup memory where a group spans several. Invocations are taken to fill subgroups in order, as in
// `reduce_subgroup`.

override LANES: u32 = 64u; // a power of two, 1 to WG

var<workgroup> partial: array<vec4<f32>, WG>;

// All invocations must call it; the first of each group gets the sum.
fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    let size = subgroupAdd(1u);
    var sum = value;
    // Every shuffle is made by all; a step wider than the group or the subgroup adds nothing.
    for (var step = 64u; step > 0u; step >>= 1u) {
        let other = subgroupShuffleXor(sum, step % size);
        sum += select(vec4<f32>(), other, step < LANES && step < size);
    }
    partial[local] = sum;
    workgroupBarrier();
    if (local % LANES == 0u) {
        for (var next = local + size; next < local + LANES; next += size) {
            sum += partial[next];
        }
    }
    return sum;
}

// Between two sums: the memory is written again.
fn lanes_barrier() {
    workgroupBarrier();
}
