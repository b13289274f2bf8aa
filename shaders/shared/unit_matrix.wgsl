// Cooperative matrices for `probe_matrix`: eight sums stay in registers and are by name, because a compiler that does not
// unroll a loop over an array of them would keep them in memory.

var<workgroup> staged: array<f16, 6u * SIZE * SIZE>;

fn left(i: u32) -> Left {
    return coopLoadT<Left>(&staged[i * SQUARE], SIZE);
}

fn right(j: u32) -> Right {
    return coopLoadT<Right>(&staged[(2u + j) * SQUARE], SIZE);
}

fn multiply(local: u32, first: u32) {
    for (var at = local; at < 6u * SQUARE; at += WG) {
        staged[at] = f16(x[at]);
    }
    workgroupBarrier();
    let a0 = left(0u);
    let a1 = left(1u);
    let b0 = right(0u);
    let b1 = right(1u);
    let b2 = right(2u);
    let b3 = right(3u);
    var s0 = Sum();
    var s1 = Sum();
    var s2 = Sum();
    var s3 = Sum();
    var s4 = Sum();
    var s5 = Sum();
    var s6 = Sum();
    var s7 = Sum();
    for (var round = 0u; round < params.rounds; round++) {
        s0 = coopMultiplyAdd(a0, b0, s0);
        s1 = coopMultiplyAdd(a0, b1, s1);
        s2 = coopMultiplyAdd(a0, b2, s2);
        s3 = coopMultiplyAdd(a0, b3, s3);
        s4 = coopMultiplyAdd(a1, b0, s4);
        s5 = coopMultiplyAdd(a1, b1, s5);
        s6 = coopMultiplyAdd(a1, b2, s6);
        s7 = coopMultiplyAdd(a1, b3, s7);
    }
    coopStoreT(s0, &y[first], SIZE);
    coopStoreT(s1, &y[first + SQUARE], SIZE);
    coopStoreT(s2, &y[first + 2u * SQUARE], SIZE);
    coopStoreT(s3, &y[first + 3u * SQUARE], SIZE);
    coopStoreT(s4, &y[first + 4u * SQUARE], SIZE);
    coopStoreT(s5, &y[first + 5u * SQUARE], SIZE);
    coopStoreT(s6, &y[first + 6u * SQUARE], SIZE);
    coopStoreT(s7, &y[first + 7u * SQUARE], SIZE);
}
