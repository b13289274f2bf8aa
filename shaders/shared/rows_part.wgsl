// An invocation's part of the products of four rows of w with one x: LANES of them share the blocks of K.

override GUARDED: bool = true; // false where K is a multiple of 32, so that no block goes past the end of x

fn rows_part(local: u32, rows: vec4<u32>, token: u32) -> vec4<f32> {
    let row = rows * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    for (var block = local % LANES; block < params.blocks; block += LANES) {
        let a = block_at(row.x + block);
        let b = block_at(row.y + block);
        let c = block_at(row.z + block);
        let d = block_at(row.w + block);
        for (var half = 0u; half < 2u; half++) {
            var part = vec4<f32>();
            for (var i = 4u * half; i < 4u * half + 4u; i++) {
                let quad = block * 8u + i;
                var four = x[token * quads + select(quad, min(quad, quads - 1u), GUARDED)];
                if (GUARDED) {
                    four = select(vec4<f32>(), four, quad < quads);
                }
                part += vec4<f32>(
                    dot(quants(a, i), four), dot(quants(b, i), four), dot(quants(c, i), four), dot(quants(d, i), four),
                );
            }
            sum += vec4<f32>(a.scales[half], b.scales[half], c.scales[half], d.scales[half]) * part;
        }
    }
    return sum;
}
