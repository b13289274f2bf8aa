// Reductions over a workgroup of WG invocations with subgroup operations, for any subgroup size: each subgroup reduces
// in registers, then all add up the subgroups' results. Invocations are taken to fill subgroups in order, which holds
// for one-dimensional workgroups on every driver seen; the conformance tests run this variant on each device.

// Stands for minus infinity, which WGSL cannot write.
const LOWEST: f32 = -3.4028234e38;

var<workgroup> partial: array<f32, WG>;

fn workgroup_sum(local: u32, value: f32) -> f32 {
    let size = subgroupAdd(1u);
    let part = subgroupAdd(value);
    if (local % size == 0u) {
        partial[local / size] = part;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < WG / size; i++) {
        sum += partial[i];
    }
    workgroupBarrier(); // `partial` may be written again by the next call
    return sum;
}

fn workgroup_max(local: u32, value: f32) -> f32 {
    let size = subgroupAdd(1u);
    let part = subgroupMax(value);
    if (local % size == 0u) {
        partial[local / size] = part;
    }
    workgroupBarrier();
    var highest = LOWEST;
    for (var i = 0u; i < WG / size; i++) {
        highest = max(highest, partial[i]);
    }
    workgroupBarrier(); // `partial` may be written again by the next call
    return highest;
}
