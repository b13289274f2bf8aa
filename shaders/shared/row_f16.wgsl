// Rows of a cache of f16, two to a word, so that no adapter needs `shader-f16`: `row_units()` units of 16 bytes, of eight
// elements each; the last one may be half empty.

fn row_units() -> u32 {
    return (params.head_dim + 7u) / 8u;
}
