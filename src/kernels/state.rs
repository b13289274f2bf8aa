//! What changes from token to token: one small tensor that kernels read and the end of a pass advances.

use super::N_STATES;
use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::{advance, state};
use crate::shaders::params::{AdvanceParams, LastRowParams};
use crate::tensor::{Role, Tensor, TensorWriter};

/// Positions of a page of cached keys, where sequences share a cache.
pub const PAGE: u32 = state::PAGE;

/// Position and number of tokens of the current pass, the token chosen last, and the RoPE table's row for position 0.
/// Four words: `pos`, `n_tokens`, `token`, `rope_offset`; `shaders/shared/state.wgsl` names them.
///
/// Where several sequences share a cache, there is such a row for each token of a pass, or one for a pass over tokens of one of
/// them, and it also says where the sequence's keys and states are.
#[derive(Clone, Debug)]
pub struct StepState {
    words: Tensor,
    /// Pages of a sequence at most; 0 where the cache is one sequence's alone.
    n_pages: u32,
    /// Page tables of a row: 2 if layers with a window have pages of their own.
    n_tables: u32,
    /// The table that kernels read.
    table: u32,
    /// Whether each token of a pass has a row.
    is_batch: bool,
    /// Whether several rows in turn may be of one sequence.
    has_runs: bool,
    /// States that layers keep of a sequence: [`StepState::with_states`].
    n_states: u32,
}

/// What a row of the state says of a sequence that shares a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchRow {
    /// Position of the pass's first token.
    pub pos: u32,
    /// Tokens of the pass. Of the first row of several: how many rows count.
    pub n_tokens: u32,
    /// The token at `pos`.
    pub token: u32,
    /// The RoPE table's row for position 0.
    pub rope_offset: u32,
    /// The sequence's place among states and among tokens.
    pub slot: u32,
    /// Rows before this one that are of the same sequence, in turn: [`StepState::with_runs`].
    pub n_before: u32,
    /// The pages of its keys and values, from position 0 on. Those after the last one are page 0, which is nobody's.
    pub pages: Vec<u32>,
    /// The same of layers with a window, if they have pages of their own; page 0 before the window.
    pub window_pages: Vec<u32>,
}

impl BatchRow {
    /// The pages of the `at`-th of sequences that have pages for so many positions each, one sequence after the other.
    pub fn pages_of(at: u32, n_positions: u32) -> Vec<u32> {
        let n_pages = n_positions.div_ceil(PAGE);
        (at * n_pages..(at + 1) * n_pages).collect()
    }
}

impl StepState {
    /// Words of a row before its pages.
    pub(crate) const ROW_HEAD: u32 = state::PAGES;

    /// Declares a state.
    ///
    /// # Errors
    /// None in practice; the shape is fixed.
    pub fn declare() -> Result<StepState, Error> {
        let words = Tensor::declare("state", Role::Activations, &[4], DType::U32)?;
        Ok(StepState { words, n_pages: 0, n_tables: 1, table: 0, is_batch: false, has_runs: false, n_states: N_STATES })
    }

    /// Declares a state for sequences that share a cache and have up to so many pages each: with a row for each of `n_rows`
    /// tokens of a pass, or with one for a pass over tokens of one sequence. `has_windows`: layers with a window have pages of
    /// their own.
    ///
    /// # Errors
    /// [`Error::Operand`] if it is larger than a tensor can be.
    pub fn declare_shared(n_rows: Option<u32>, n_pages: u32, has_windows: bool) -> Result<StepState, Error> {
        let n_tables = if has_windows { 2 } else { 1 };
        let shape = [n_rows.unwrap_or(1), Self::ROW_HEAD + n_tables * n_pages];
        let words = Tensor::declare("state", Role::Activations, &shape, DType::U32)?;
        Ok(StepState { words, n_pages, n_tables, table: 0, is_batch: n_rows.is_some(), has_runs: false, n_states: 1 })
    }

    /// Writes the first rows of a state that was declared for sequences that share a cache.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set_rows(&self, device: &dyn TensorWriter, rows: &[BatchRow]) -> Result<(), Error> {
        let (stride, n_tables) = (self.stride() as usize, self.n_tables as usize);
        let mut words = vec![0; rows.len() * stride];
        for (words, row) in words.chunks_exact_mut(stride).zip(rows) {
            words[..6].copy_from_slice(&[row.pos, row.n_tokens, row.token, row.rope_offset, row.slot, row.n_before]);
            for (table, pages) in [&row.pages, &row.window_pages].into_iter().enumerate().take(n_tables) {
                let words = words[Self::ROW_HEAD as usize..].iter_mut().skip(table).step_by(n_tables);
                words.zip(pages).for_each(|(word, page)| *word = *page);
            }
        }
        device.write_words(&self.words, 0, &words)
    }

    /// Writes a further page of the sequence that has a row: the `at`-th, and that of layers with a window.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set_page(&self, device: &dyn TensorWriter, row: usize, at: usize, pages: [u32; 2]) -> Result<(), Error> {
        let n_tables = self.n_tables as usize;
        let first = row * self.stride() as usize + Self::ROW_HEAD as usize + at * n_tables;
        device.write_words(&self.words, first, &pages[..n_tables])
    }

    /// Declares another state for the same kind of passes.
    ///
    /// # Errors
    /// As [`StepState::declare_shared`].
    pub fn declare_like(&self) -> Result<StepState, Error> {
        let words = Tensor::declare(self.words.label(), Role::Activations, self.words.shape(), DType::U32)?;
        Ok(StepState { words, ..self.clone() })
    }

    /// Whether each token of a pass has a row, as a rule of a sequence of its own.
    pub fn is_batch(&self) -> bool {
        self.is_batch
    }

    /// The same words for passes in which several rows in turn may be tokens of one sequence, at positions in turn.
    #[must_use]
    pub fn with_runs(&self) -> StepState {
        StepState { has_runs: self.is_batch, ..self.clone() }
    }

    /// The same for kernels of a layer with a window.
    #[must_use]
    pub fn of_window(&self) -> StepState {
        StepState { table: self.n_tables - 1, ..self.clone() }
    }

    /// The same where layers keep so many states of each sequence that shares a cache, in turns: those after the last passes.
    #[must_use]
    pub fn with_states(&self, n_states: u32) -> StepState {
        StepState { n_states, ..self.clone() }
    }

    /// States that layers keep of a sequence.
    pub(super) fn n_states(&self) -> u32 {
        self.n_states
    }

    /// Whether several rows in turn may be of one sequence.
    pub(super) fn has_runs(&self) -> bool {
        self.has_runs
    }

    /// Words of a row, where each token has one; else 0.
    pub(super) fn row_words(&self) -> u32 {
        if self.is_batch { self.stride() } else { 0 }
    }

    /// Words of a row of sequences that share a cache.
    fn stride(&self) -> u32 {
        Self::ROW_HEAD + self.n_tables * self.n_pages
    }

    /// Whether sequences share the cache.
    pub(super) fn is_shared(&self) -> bool {
        self.n_pages > 0
    }

    /// The override that says which page table kernels read.
    pub(super) fn constant(&self) -> Option<(&'static str, f64)> {
        let table = if self.n_tables == 1 { 1 } else { 2 + self.table };
        self.is_shared().then_some(("PAGE_TABLE", f64::from(table)))
    }

    /// Sets position and number of tokens for the next pass.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set(&self, device: &dyn TensorWriter, pos: u32, n_tokens: u32) -> Result<(), Error> {
        self.set_with_rope(device, pos, n_tokens, 0)
    }

    /// As [`StepState::set`], with the RoPE table's row for position 0, see
    /// [`RopeConfig::first_row`](super::RopeConfig::first_row).
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set_with_rope(
        &self,
        device: &dyn TensorWriter,
        pos: u32,
        n_tokens: u32,
        rope_offset: u32,
    ) -> Result<(), Error> {
        device.write_words(&self.words, 0, &[pos, n_tokens, 0, rope_offset])
    }

    /// The words; [`StepState::tokens`] takes them apart after a read.
    pub fn tensor(&self) -> &Tensor {
        &self.words
    }

    /// The token chosen last, from the words of one state after another as read back. [`NON_FINITE`](super::NON_FINITE)
    /// if none could be.
    pub fn tokens(words: &[u32]) -> impl Iterator<Item = u32> {
        words.chunks_exact(4).map(|state| state[2])
    }
}

/// Records `y = x[n_tokens - 1]`, the last token's row. Shader: `shaders/last_row.wgsl`.
///
/// # Shapes
/// `x`: `[T, C]`; `y`: `[1, C]`.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn last_row(rec: &mut Recorder, state: &StepState, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [_, dim] = x.dims2("last_row", "x")?;
    y.expect_shape("last_row", "y", &[1, dim])?;
    let params = LastRowParams { dim };
    rec.dispatch(&shaders::LAST_ROW, None, &[], params, &[&state.words, x, y], [dim.div_ceil(256), 1, 1])
}

/// Records the end of a pass: `ids[0]` joins `tokens` and the state moves on to it; of a state with a row for each sequence
/// each row that counts moves on to its own id. Shader: `shaders/advance.wgsl`.
///
/// # Shapes
/// `ids`: `[1]`; `tokens`: `[S]`. With rows `ids`: `[R]`, R at most 64; `tokens`: `[slots, S]`.
/// # Errors
/// [`Error::Shape`] if the shapes are others.
pub fn advance(rec: &mut Recorder, state: &StepState, ids: &Tensor, tokens: &Tensor) -> Result<(), Error> {
    let (n_rows, capacity) = match state.is_batch() {
        true => (ids.len() as u32, tokens.dims2("advance", "tokens")?[1]),
        false => (1, tokens.len() as u32),
    };
    ids.expect_shape("advance", "ids", &[n_rows.min(advance::WG)])?;
    let params = AdvanceParams { capacity, n_rows, row_words: state.row_words() };
    rec.dispatch(&shaders::ADVANCE, None, &[], params, &[ids, &state.words, tokens], [1, 1, 1])
}
