// Makes rows of a cache; see `row_f32`. With `turn`.
#import row_f32

// Unit `u` of the row that a head becomes.
fn row_unit(head: Head, u: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(head_quad(head, u));
}

// Quad `i` of a head as it is read from the cache later.
fn cached_quad(head: Head, i: u32) -> vec4<f32> {
    return head_quad(head, i);
}
