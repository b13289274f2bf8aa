enable f16;
// Reads cached keys and values as they are; see `row_f16`.
struct Halves { near: vec4<f16>, far: vec4<f16> }

fn halves_of(unit: vec4<u32>) -> Halves {
    return Halves(
        vec4<f16>(vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y))),
        vec4<f16>(vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w))),
    );
}

// Eight elements from the 8 i-th on of the key whose row begins at unit `at`.
fn key_halves(at: u32, i: u32) -> Halves {
    return halves_of(k[at + i]);
}

// The same of a value.
fn value_halves(at: u32, i: u32) -> Halves {
    return halves_of(v[at + i]);
}
