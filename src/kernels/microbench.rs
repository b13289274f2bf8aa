//! Kernels that measure a device, and those that other kernels are compared with. No forward pass and no search uses them. Their
//! shaders are in `benches/shaders/`; of the probes the WASM module has those that a page measures with, and nothing else.

mod mol_parts;
mod naive;
mod probe;

pub use mol_parts::{mol_gate, weighted_sum};
pub use naive::matmul_naive;
pub use probe::{
    FmaRounds, PROBE_FMA_FLOP, PROBE_READS, ReadOrder, probe_copy, probe_fma, probe_matrix, probe_matrix_size,
    probe_read, probe_reduce,
};

pub(crate) use probe::PROBE_NUMBERS;
