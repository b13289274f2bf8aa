// Rotary position embedding of one pair, Su et al. 2021, arXiv:2104.09864. The first `rot_dims` of a head are rotated,
// the rest passes through. Angles come from a table made on the host, since WGSL promises little for large arguments.

const HALVES: u32 = 1u; // pair i is (i, i + rot_dims / 2) as in Hugging Face files; else (2 i, 2 i + 1) as in GGUF llama

// The two elements of pair i of a head.
fn pair(i: u32) -> vec2<u32> {
    if (params.style == HALVES && i < params.rot_dims / 2u) {
        return vec2<u32>(i, i + params.rot_dims / 2u);
    }
    return vec2<u32>(2u * i, 2u * i + 1u);
}

// Where a row of the table begins. Padding of the last chunk may lie past the last one; any angle will do for it.
fn angle_row(row: u32) -> u32 {
    let half = params.rot_dims / 2u;
    return min(row, arrayLength(&table) / half - 1u) * half;
}

// Pair i of a head by a row of the table.
fn rotate(value: vec2<f32>, row: u32, i: u32) -> vec2<f32> {
    let half = params.rot_dims / 2u;
    if (i >= half) {
        return value;
    }
    let angle = table[angle_row(row) + i]; // (cos, sin)
    return vec2<f32>(value.x * angle.x - value.y * angle.y, value.x * angle.y + value.y * angle.x);
}
