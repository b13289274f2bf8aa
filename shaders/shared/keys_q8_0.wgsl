// Reads cached keys and values; see `row_q8_0`.
#import row_q8_0
#import bytes

fn quad_of(unit: vec4<u32>, scales: vec4<u32>, i: u32) -> vec4<f32> {
    return bitcast<f32>(scales[(i / 8u) & 3u]) * signed_bytes(unit[i & 3u]);
}

// Quad `i` of the key whose row begins at unit `at`.
fn key_quad(at: u32, i: u32) -> vec4<f32> {
    return quad_of(k[at + i / 4u], k[at + 2u * row_blocks() + i / 32u], i);
}

// The same of a value.
fn value_quad(at: u32, i: u32) -> vec4<f32> {
    return quad_of(v[at + i / 4u], v[at + 2u * row_blocks() + i / 32u], i);
}
