// Powers of two for the rows of x in a tile that is staged in half precision, which holds nothing beyond 65504 and loses
// digits below 2^-14. A row whose largest magnitude is outside SMALLEST .. LARGEST is staged times the power of two that
// brings this magnitude to 2^14 .. 2^15, and its sums are multiplied by the inverse: both are exact, so any finite row has
// a right product. What is 2^-29 of the row's largest magnitude or less then loses digits, as it does in the row's sum.
//
// The scales come too late to be found by reading x twice for every tile. Instead the invocations that stage x watch what
// passes by, the product is finished as if no row needed a scale, and where one does, which is rare, it is taken once more.
// A row's result does not depend on the rows beside it: a factor of 1 changes nothing.

const SMALLEST: u32 = 0x3a800000u; // the bits of 2^-10: less would lose more than half precision's own rounding
const LARGEST: u32 = 0x477fe000u;  // of 65504
const INFINITE: u32 = 0x7f800000u; // of infinity; a row with one, or with a NaN, has no product that is finite anyway

var<workgroup> row_largest: array<atomic<u32>, 128>; // bits of the largest magnitude in each row
var<workgroup> row_is_outside: atomic<u32>;
var<workgroup> is_any_outside: u32;

// To be called before all else; a barrier must come before `must_scale`.
fn open_rows(local: u32) {
    for (var row = local; row < 128u; row += WG) {
        atomicStore(&row_largest[row], 0u);
    }
    if (local == 0u) {
        atomicStore(&row_is_outside, 0u);
    }
}

// The largest magnitudes of four rows, as bits, with those of four of their columns.
fn watched(largest: vec4<u32>, block: mat4x4<f32>) -> vec4<u32> {
    let magnitude = vec4<u32>(0x7fffffffu);
    let near = max(bitcast<vec4<u32>>(block[0]) & magnitude, bitcast<vec4<u32>>(block[1]) & magnitude);
    let far = max(bitcast<vec4<u32>>(block[2]) & magnitude, bitcast<vec4<u32>>(block[3]) & magnitude);
    return max(largest, max(near, far));
}

// Whether a row of the tile must be scaled, the same for all invocations. Those that stage rows say which, from `row` on,
// and what was their largest.
fn must_scale(local: u32, stages: bool, row: u32, largest: vec4<u32>) -> bool {
    if (stages) {
        for (var i = 0u; i < 4u; i++) {
            atomicMax(&row_largest[row + i], largest[i]);
        }
    }
    workgroupBarrier();
    if (stages && any(row_scales(row) != vec4<f32>(1.0))) {
        atomicStore(&row_is_outside, 1u);
    }
    workgroupBarrier();
    if (local == 0u) {
        is_any_outside = atomicLoad(&row_is_outside);
    }
    return workgroupUniformLoad(&is_any_outside) != 0u;
}

// The exponent of a row's power of two, biased as in f32. Up to 253, so that the inverse is no subnormal either.
fn row_exponent(row: u32) -> u32 {
    let largest = atomicLoad(&row_largest[row]);
    if (largest == 0u || (largest >= SMALLEST && largest <= LARGEST) || largest >= INFINITE) {
        return 127u;
    }
    return min(268u - (largest >> 23u), 253u);
}

fn row_scales(row: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(
        vec4<u32>(row_exponent(row), row_exponent(row + 1u), row_exponent(row + 2u), row_exponent(row + 3u)) << vec4<u32>(23u),
    );
}

fn scaled(x: vec4<f32>, scales: vec4<f32>) -> vec4<f32> {
    return x * scales;
}

fn row_inverse(row: u32) -> f32 {
    return bitcast<f32>((254u - row_exponent(row)) << 23u);
}

// Sums of four rows as if nothing had been scaled.
fn unscaled(row: u32, sums: mat4x4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        sums[0] * row_inverse(row), sums[1] * row_inverse(row + 1u),
        sums[2] * row_inverse(row + 2u), sums[3] * row_inverse(row + 3u),
    );
}
