// A gate's weights through workgroup memory, some rows at a time.

const WG: u32 = 64u;
const STAGED: u32 = 15u; // rows: 33 quads each at most
const STAGED_QUADS: u32 = 495u;

var<workgroup> staged: array<vec4<f32>, STAGED_QUADS>;

// Makes rows first .. first + STAGED readable; all invocations must call it.
fn stage(local: u32, first: u32) {
    workgroupBarrier();
    let n = min(STAGED, params.hidden - first) * ROW;
    for (var i = local; i < n; i += WG) {
        staged[i] = gate[first * ROW + i];
    }
    workgroupBarrier();
}

// Quad `i` of a row that is staged.
fn weight(first: u32, row: u32, i: u32) -> vec4<f32> {
    return staged[(row - first) * ROW + i];
}
