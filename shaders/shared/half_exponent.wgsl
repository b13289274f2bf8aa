// Powers of two that rows in half precision are taken times.
const SMALLEST: u32 = 0x3a800000u; // the bits of 2^-10: less would lose more than half precision's own rounding
const LARGEST: u32 = 0x477fe000u;  // of 65504
const INFINITE: u32 = 0x7f800000u; // of infinity; a row with one, or with a NaN, has no product that is finite anyway

// The exponent, biased as in f32, of the power of two that a row is taken times, from the bits of its largest magnitude. Up
// to 253, so that the inverse is no subnormal either.
fn row_exponent(most: u32) -> u32 {
    if (most == 0u || (most >= SMALLEST && most <= LARGEST) || most >= INFINITE) {
        return 127u;
    }
    return min(268u - (most >> 23u), 253u);
}
