enable f16;
// What `half_rows` finds out about a row.
#import half_exponent

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
