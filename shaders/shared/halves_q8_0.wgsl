enable f16;
// Reads cached keys and values in half precision; see `row_q8_0`. Numbers beyond its range become its largest.
#import row_q8_0
#import bytes
struct Halves { near: vec4<f16>, far: vec4<f16> }

const LARGEST_SCALE: f32 = 65504.0 / 127.0;

fn halves_of(unit: vec4<u32>, scale: u32, i: u32) -> Halves {
    let words = select(unit.xy, unit.zw, (i & 1u) == 1u);
    let factor = min(bitcast<f32>(scale), LARGEST_SCALE);
    return Halves(
        vec4<f16>(factor * signed_bytes(words.x)),
        vec4<f16>(factor * signed_bytes(words.y)),
    );
}

// Eight elements from the 8 i-th on of the key whose row begins at unit `at`.
fn key_halves(at: u32, i: u32) -> Halves {
    return halves_of(k[at + i / 2u], k[at + 2u * row_blocks() + i / 16u][(i / 4u) & 3u], i);
}

// The same of a value.
fn value_halves(at: u32, i: u32) -> Halves {
    return halves_of(v[at + i / 2u], v[at + 2u * row_blocks() + i / 16u][(i / 4u) & 3u], i);
}
