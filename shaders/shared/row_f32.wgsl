// Rows of a cache of f32: `row_units()` units of 16 bytes, of four elements each.

fn row_units() -> u32 {
    return params.head_dim / 4u;
}
