// LANES neighbouring invocations multiply the same rows of w with COLUMNS tokens, and each has a partial sum for every
// token. They exchange these, so that each continues with one token, for which SHARES invocations have partial sums.
// `lanes_sum` adds them: the first of each SHARES gets the sum, and all invocations must call it.

override LANES: u32 = 64u;  // a power of two, 1 to WG
override COLUMNS: u32 = 1u; // 1, 2, 4 or 8, and at most LANES
override SHARES: u32 = LANES / COLUMNS;

// Of one column, x comes first: see `rows_part`.
override PARTIALS: u32 = select(WG * COLUMNS, X_QUADS, COLUMNS == 1u);
var<workgroup> partial: array<vec4<f32>, PARTIALS>;

// Between two sums: the memory is written again.
fn lanes_barrier() {
    workgroupBarrier();
}

// The column with which an invocation continues.
fn lanes_column(local: u32) -> u32 {
    if (COLUMNS == 1u) {
        return 0u;
    }
    return local % LANES / SHARES;
}

// Where an invocation finds the first part of its share, in the memory of a column; others are SHARES apart.
fn first_part(local: u32) -> u32 {
    return local - local % LANES + local % SHARES;
}

// All invocations must call it; the sum is that of the invocation's column.
fn lanes_deal(local: u32, sums: array<vec4<f32>, 8>) -> vec4<f32> {
    partial[local] = sums[0];
    partial[WG + local] = sums[1];
    if (COLUMNS > 2u) {
        partial[2u * WG + local] = sums[2];
        partial[3u * WG + local] = sums[3];
    }
    if (COLUMNS > 4u) {
        partial[4u * WG + local] = sums[4];
        partial[5u * WG + local] = sums[5];
        partial[6u * WG + local] = sums[6];
        partial[7u * WG + local] = sums[7];
    }
    workgroupBarrier();
    let first = lanes_column(local) * WG + first_part(local);
    var sum = partial[first];
    for (var i = 1u; i < COLUMNS; i++) {
        sum += partial[first + i * SHARES];
    }
    workgroupBarrier();
    return lanes_sum(local, sum);
}

// The same of numbers.
fn lanes_deal_numbers(local: u32, numbers: array<f32, 8>) -> f32 {
    partial[local] = vec4<f32>(numbers[0], numbers[1], numbers[2], numbers[3]);
    if (COLUMNS > 4u) {
        partial[WG + local] = vec4<f32>(numbers[4], numbers[5], numbers[6], numbers[7]);
    }
    workgroupBarrier();
    let column = lanes_column(local);
    let first = column / 4u * WG + first_part(local);
    var sum = partial[first][column % 4u];
    for (var i = 1u; i < COLUMNS; i++) {
        sum += partial[first + i * SHARES][column % 4u];
    }
    workgroupBarrier();
    return lanes_sum(local, vec4<f32>(sum, 0.0, 0.0, 0.0)).x;
}
