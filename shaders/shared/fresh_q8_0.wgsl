// Makes rows of a cache; see `row_q8_0`. With `turn`.
#import row_q8_0

fn quad_or_zero(head: Head, i: u32) -> vec4<f32> {
    if (4u * i >= params.head_dim) {
        return vec4<f32>();
    }
    return head_quad(head, i);
}

// The scale of a block, by which its largest element is 127 or -127.
fn scale_of(head: Head, block: u32) -> f32 {
    var highest = vec4<f32>();
    for (var i = 8u * block; i < 8u * block + 8u; i++) {
        highest = max(highest, abs(quad_or_zero(head, i)));
    }
    return max(max(highest.x, highest.y), max(highest.z, highest.w)) / 127.0;
}

// Quants of quad `i`. A scale so small that its inverse overflows stands for zeros.
fn quants(head: Head, i: u32, scale: f32) -> vec4<i32> {
    let inverse = select(0.0, 1.0 / scale, scale > 1e-37);
    return vec4<i32>(clamp(round(quad_or_zero(head, i) * inverse), vec4<f32>(-127.0), vec4<f32>(127.0)));
}

// Unit `u` of the row that a head becomes.
fn row_unit(head: Head, u: u32) -> vec4<u32> {
    var unit = vec4<u32>();
    if (u < 2u * row_blocks()) {
        let scale = scale_of(head, u / 2u);
        for (var i = 0u; i < 4u; i++) {
            unit[i] = pack4xI8(quants(head, 4u * u + i, scale));
        }
    } else {
        for (var i = 0u; i < 4u; i++) {
            unit[i] = bitcast<u32>(scale_of(head, 4u * (u - 2u * row_blocks()) + i));
        }
    }
    return unit;
}

// Quad `i` of a head as it is read from the cache later.
fn cached_quad(head: Head, i: u32) -> vec4<f32> {
    let scale = scale_of(head, i / 8u);
    return scale * vec4<f32>(quants(head, i, scale));
}
