// Reads cached keys and values; see `row_f32`.
#import row_f32

// Quad `i` of the key whose row begins at unit `at`.
fn key_quad(at: u32, i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(k[at + i]);
}

// The same of a value.
fn value_quad(at: u32, i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(v[at + i]);
}
