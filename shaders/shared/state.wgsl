// Words of the step state; see `StepState` in src/kernels/state.rs.
const POS: u32 = 0u;      // absolute position of this pass's first token
const N_TOKENS: u32 = 1u; // tokens in this pass
const TOKEN: u32 = 2u;    // token chosen last
const ANGLES: u32 = 3u;   // row of the table of angles that position 0 has
