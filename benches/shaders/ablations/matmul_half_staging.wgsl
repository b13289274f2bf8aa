// `matmul_half` that reads, unpacks and stages all operands, and multiplies those of the last step alone.
#ablate matmul_half F16 Q4_0 Q4_K
#replace tile_product

fn tile_product(local: u32, m0: u32, n0: u32, quads: vec2<u32>) -> Products {
    let step = DEPTH / 4u;
    var sum = Products();
    var ahead = read_step(local, m0, n0, quads.x);
    for (var q0 = quads.x; q0 < quads.y; q0 += step) {
        stage(local, ahead, 0u);
        workgroupBarrier();
        ahead = read_step(local, m0, n0, min(q0 + step, quads.y - step));
        workgroupBarrier();
    }
    return multiplied(local, 0u, sum);
}
