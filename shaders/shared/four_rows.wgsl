// Products of four neighbouring rows of w with one x, over every `stride`-th block of K from `first` on. Rows past the
// end repeat the last one; `put` does not write them.

fn four_rows(n: u32, token: u32, first: u32, stride: u32) -> vec4<f32> {
    let last = params.n_out - 1u;
    let row = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(last)) * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    for (var block = first; block < params.blocks; block += stride) {
        var part: array<vec4<f32>, 8>;
        for (var i = 0u; i < 8u; i++) {
            let quad = block * 8u + i;
            part[i] = select(vec4<f32>(), x[token * quads + min(quad, quads - 1u)], quad < quads);
        }
        sum += vec4<f32>(
            block_dot(row.x + block, part),
            block_dot(row.y + block, part),
            block_dot(row.z + block, part),
            block_dot(row.w + block, part),
        );
    }
    return sum;
}

fn put_four(n: u32, token: u32, sum: vec4<f32>) {
    put(token, n, sum.x);
    put(token, n + 1u, sum.y);
    put(token, n + 2u, sum.z);
    put(token, n + 3u, sum.w);
}
