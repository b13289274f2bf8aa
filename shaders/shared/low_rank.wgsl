// What an adapter adds to four rows of a product with one token:
//
//     sum over r of b[n, r] * inner[token, member of n, r]
//
// where inner is the product of x with the adapter's first factors (Hu et al. 2021, arXiv:2106.09685). SHARES invocations share
// r and add up their parts, as `lanes` has it. All invocations must call it, after a sum of the lanes.
#import members

fn low_rank(local: u32, rows: vec4<u32>, token: u32) -> vec4<f32> {
    lanes_barrier();
    let of_b = rows * params.rank;
    let of_inner = token * params.members.w + member_of(rows) * params.rank;
    var sum = vec4<f32>();
    for (var r = local % SHARES; r < params.rank; r += SHARES) {
        sum += vec4<f32>(
            dot(b[of_b.x + r], inner[of_inner.x + r]),
            dot(b[of_b.y + r], inner[of_inner.y + r]),
            dot(b[of_b.z + r], inner[of_inner.z + r]),
            dot(b[of_b.w + r], inner[of_inner.w + r]),
        );
    }
    return lanes_sum(local, sum);
}
