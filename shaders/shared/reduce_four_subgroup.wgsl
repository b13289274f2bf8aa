// Reductions of four numbers at a time over a workgroup of WG invocations; see `reduce_subgroup.wgsl`.

var<workgroup> partial: array<vec4<f32>, WG>;

fn workgroup_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    let size = subgroupAdd(1u);
    let part = subgroupAdd(value);
    if (local % size == 0u) {
        partial[local / size] = part;
    }
    workgroupBarrier();
    var result = partial[0];
    for (var i = 1u; i < WG / size; i++) {
        result = result + partial[i];
    }
    workgroupBarrier(); // `partial` may be written again by the next call
    return result;
}

fn workgroup_max(local: u32, value: vec4<f32>) -> vec4<f32> {
    let size = subgroupAdd(1u);
    let part = subgroupMax(value);
    if (local % size == 0u) {
        partial[local / size] = part;
    }
    workgroupBarrier();
    var result = partial[0];
    for (var i = 1u; i < WG / size; i++) {
        result = max(result, partial[i]);
    }
    workgroupBarrier(); // `partial` may be written again by the next call
    return result;
}
