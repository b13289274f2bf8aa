// Clips numbers to bounds, a pair for each of up to three groups of columns: y = min(max(x, low), high).
//
// Dispatch (elements folded over x and y).
#import fold

struct Params { len: u32, width: u32, second: u32, third: u32 } // first columns of further groups; `width` without
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> bounds: array<vec2<f32>>; // [groups] of (low, high)
@group(0) @binding(2) var<storage, read> x: array<f32>;            // [T, width]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;      // [T, width]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn clip(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id >= params.len) {
        return;
    }
    let column = id % params.width;
    let own = bounds[select(0u, 1u, column >= params.second) + select(0u, 1u, column >= params.third)];
    y[id] = min(max(x[id], own.x), own.y);
}
