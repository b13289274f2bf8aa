//! Kernels that measure a device, and those that other kernels are compared with. No forward pass and no search uses them. Their
//! shaders are in `benches/shaders/`; of the probes the WASM module has those that a page measures with, and nothing else.

#[cfg(not(target_arch = "wasm32"))]
mod mol_parts;
#[cfg(not(target_arch = "wasm32"))]
mod naive;
mod probe;

#[cfg(not(target_arch = "wasm32"))]
pub use mol_parts::{mol_gate, weighted_sum};
#[cfg(not(target_arch = "wasm32"))]
pub use naive::matmul_naive;
pub use probe::{FmaRounds, PROBE_FMA_FLOP, PROBE_READS, ReadOrder, probe_copy, probe_fma, probe_read, probe_reduce};
#[cfg(not(target_arch = "wasm32"))]
pub use probe::{probe_matrix, probe_matrix_size};

pub(crate) use probe::PROBE_NUMBERS;
