// `matmul_half` that multiplies the first step's operands in every step: no reads, no unpacking, no staging. The barrier
// keeps a compiler from loading what is staged once for all steps.
#ablate matmul_half F16 Q4_0 Q4_K
#replace tile_product

fn tile_product(local: u32, m0: u32, n0: u32, quads: vec2<u32>) -> Products {
    let step = DEPTH / 4u;
    var sum = Products();
    stage(local, read_step(local, m0, n0, quads.x), 0u);
    for (var q0 = quads.x; q0 < quads.y; q0 += step) {
        workgroupBarrier();
        sum = multiplied(local, 0u, sum);
    }
    return sum;
}
