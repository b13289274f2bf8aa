//! The index arithmetic of kernels with cooperative matrices, which few adapters have: the shaders as they are, but with
//! matrices of 4 x 4 numbers that each invocation multiplies by itself.

#![cfg(not(target_arch = "wasm32"))]

mod attention;
#[path = "../common/mod.rs"]
mod common;
mod emulation;
mod products;
