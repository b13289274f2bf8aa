// `matmul_half` whose weights are words taken as numbers: it reads each block and neither unpacks it nor reads its scale.
#ablate matmul_half Q4_0 Q4_K
#replace block_quad

fn block_quad(block: u32, quad: u32) -> vec4<f32> {
    let words = w[block] ^ vec4<u32>(quad);
    // From 1 to 2.
    return bitcast<vec4<f32>>((words & vec4<u32>(0x007fffffu)) | vec4<u32>(0x3f800000u));
}
