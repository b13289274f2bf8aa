//! Kernels with cooperative matrices, which few adapters have: the same shaders with emulated matrices of 4 x 4
//! numbers, shared out among a subgroup's invocations, so that any adapter tests their index arithmetic.

mod attention;
mod emulation;
mod products;
