//! Kernels that devices and other kernels are measured against. No forward pass and no search uses them, so they are not in
//! the WASM module. Their shaders are in `benches/shaders/`.

mod mol_parts;
mod naive;
mod probe;

pub use mol_parts::{mol_gate, weighted_sum};
pub use naive::matmul_naive;
pub use probe::{PROBE_READS, ReadOrder, probe_read};

pub(crate) use mol_parts::{MolGateParams, WeightedSumParams};
pub(crate) use probe::ProbeReadParams;
