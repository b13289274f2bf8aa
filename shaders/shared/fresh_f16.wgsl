// Makes rows of a cache; see `row_f16`. With `turn`.
#import row_f16

// The largest f16. Larger values are clamped to it, because an infinity would turn whole rows of attention into NaN.
const LARGEST: f32 = 65504.0;

fn pack_quad(head: Head, i: u32) -> vec2<u32> {
    if (4u * i >= params.head_dim) {
        return vec2<u32>();
    }
    let quad = clamp(head_quad(head, i), vec4<f32>(-LARGEST), vec4<f32>(LARGEST));
    return vec2<u32>(pack2x16float(quad.xy), pack2x16float(quad.zw));
}

// Unit `u` of the row that a head becomes.
fn row_unit(head: Head, u: u32) -> vec4<u32> {
    return vec4<u32>(pack_quad(head, 2u * u), pack_quad(head, 2u * u + 1u));
}

// Quad `i` of a head as it is read from the cache later.
fn cached_quad(head: Head, i: u32) -> vec4<f32> {
    let words = pack_quad(head, i);
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
}
