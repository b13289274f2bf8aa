// Params of `matmul`, `matvec` and their variants, as `LinearParams` in Rust.

struct LinearParams {
    n_tokens: u32, n_out: u32, dim: u32, blocks: u32, // M, N, K
    w_scales: u32, y_start: u32, y_stride: u32, flags: u32,
    eps: f32, split_blocks: u32, first_group: u32, _pad: u32,
}
