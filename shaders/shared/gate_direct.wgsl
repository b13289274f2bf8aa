// A gate's weights as they lie in memory: on software adapters all invocations read one address at a time, and no
// barrier is cheaper than any.

const WG: u32 = 8u;
const STAGED: u32 = 65535u; // all rows at once

fn stage(local: u32, first: u32) {}

// Quad `i` of a row.
fn weight(first: u32, row: u32, i: u32) -> vec4<f32> {
    return gate[row * ROW + i];
}
