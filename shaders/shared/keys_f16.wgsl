// Reads cached keys and values; see `row_f16`.
#import row_f16

fn quad_of(unit: vec4<u32>, i: u32) -> vec4<f32> {
    let words = select(unit.xy, unit.zw, (i & 1u) == 1u);
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
}

// Quad `i` of the key whose row begins at unit `at`.
fn key_quad(at: u32, i: u32) -> vec4<f32> {
    return quad_of(k[at + i / 2u], i);
}

// The same of a value.
fn value_quad(at: u32, i: u32) -> vec4<f32> {
    return quad_of(v[at + i / 2u], i);
}
