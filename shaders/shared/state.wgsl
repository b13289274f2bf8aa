// Words of a row of the step state; see `StepState` in src/kernels/state.rs.
const POS: u32 = 0u;      // absolute position of this pass's first token
const N_TOKENS: u32 = 1u; // tokens in this pass
const TOKEN: u32 = 2u;    // token chosen last
const ROPE_OFFSET: u32 = 3u;   // row of the table of angles that position 0 has
// Where several sequences share a cache:
const SLOT: u32 = 4u;     // the sequence's place among states and among tokens
const N_BEFORE: u32 = 5u; // rows before this one that are of the same sequence, in turn
const PAGES: u32 = 8u;    // the pages of its keys and values, from position 0 on, in one table or two
const PAGE: u32 = 64u;    // positions of a page
