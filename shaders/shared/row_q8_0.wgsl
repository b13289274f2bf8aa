// Rows of a cache of Q8_0, blocks of 32 signed bytes that share a scale: `row_units()` units of 16 bytes, two for each
// block, then the blocks' scales as f32, four to a unit. So quants are loaded whole, and no two rows share a unit.

fn row_blocks() -> u32 {
    return (params.head_dim + 31u) / 32u;
}

fn row_units() -> u32 {
    return 2u * row_blocks() + (row_blocks() + 3u) / 4u;
}
