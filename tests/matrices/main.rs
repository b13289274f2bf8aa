//! Kernels with cooperative matrices, which few adapters have: the shaders as they are, but with matrices of 4 x 4 numbers
//! that the invocations of a subgroup share out among themselves, so that their index arithmetic is tested on any adapter.

mod attention;
mod emulation;
mod products;
