enable f16;
// What `half_rows` finds out about a row.

const SMALLEST: u32 = 0x3a800000u; // the bits of 2^-10: less would lose more than half precision's own rounding
const LARGEST: u32 = 0x477fe000u;  // of 65504
const INFINITE: u32 = 0x7f800000u; // of infinity; a row with one, or with a NaN, has no product that is finite anyway

// The bits of the largest magnitude, and the sum of squares.
struct Row { most: u32, squares: f32 }

var<workgroup> rows: array<Row, WG>;

// Of the whole row, from what each invocation saw of it. All must call it.
fn whole_row(local: u32, most: u32, squares: f32) -> Row {
    rows[local] = Row(most, squares);
    for (var step = WG / 2u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (local < step) {
            let other = rows[local + step];
            rows[local] = Row(max(rows[local].most, other.most), rows[local].squares + other.squares);
        }
    }
    workgroupBarrier();
    return rows[0];
}

// The exponent, biased as in f32, of the power of two that a row is taken times, from the bits of its largest magnitude. Up
// to 253, so that the inverse is no subnormal either.
fn row_exponent(most: u32) -> u32 {
    if (most == 0u || (most >= SMALLEST && most <= LARGEST) || most >= INFINITE) {
        return 127u;
    }
    return min(268u - (most >> 23u), 253u);
}
