//! The best items of score rows that come strip by strip.

use super::fold;
use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::select_top::{BEGINS, FILTERED};
use crate::shaders::constants::top;
use crate::shaders::params::{MergeTopParams, SelectTopParams};
use crate::tensor::Tensor;

/// Maximum number of items that [`select_top`] keeps for each row: a list is in workgroup memory while it changes.
pub const MAX_TOP: u32 = top::MAX_K;
/// The id in places for which no item was found.
pub const NO_ITEM: u32 = u32::MAX;

/// Columns that one workgroup of [`select_top`] takes at most; what it walks must stay below what software adapters
/// walk.
const LONGEST_PART: u32 = 1 << 16;
/// Lists of a row that [`merge_top`] takes at most, for the same reason.
const MAX_SPLITS: u32 = 128;

/// A strip of items whose scores come to [`select_top`].
#[derive(Clone, Copy, Debug)]
pub struct TopStrip<'a> {
    /// Id of the strip's first item; the others follow.
    pub first_id: u32,
    /// Whether no strip came before, so that the lists begin empty.
    pub begins: bool,
    /// A bit for each id, 32 to a word from the lowest, U32 of any shape: items without it never enter. `None` lets all
    /// in.
    pub allowed: Option<&'a Tensor>,
}

/// Into how many parts [`select_top`] should cut rows of `n_cols` scores, so that `n_rows` rows occupy a GPU.
pub fn top_splits(n_rows: u32, n_cols: u32) -> u32 {
    /// Shorter parts take as long for their lists as for their scores.
    const SHORTEST_PART: u32 = 4096;
    /// Workgroups that occupy a large GPU.
    const ENOUGH: u32 = 128;
    let wanted = ENOUGH.div_ceil(n_rows.max(1)).min(n_cols.div_ceil(SHORTEST_PART));
    wanted.max(n_cols.div_ceil(LONGEST_PART)).max(1)
}

/// Records that the best scores of a strip of items join those of the strips before: higher scores first, among equals
/// the lower id. Zeros of either sign are equal; a score that is NaN or infinite comes before all others, stored as a
/// NaN. Shader: `shaders/select_top.wgsl`.
///
/// # Shapes
/// `scores`: `[B, N]`; `lists`: `[B, S, K, 2]` of U32, pairs of a score's bits and an id in order, where each of S
/// parts of a row has its own K best, see [`top_splits`]. They are kept from strip to strip. With S = 1 they are the
/// result, else [`merge_top`] makes it. Places without an item have all bits set, so their id is [`NO_ITEM`].
/// # Errors
/// [`Error::Shape`] if `lists` disagrees with `scores`, [`Error::Operand`] if K exceeds [`MAX_TOP`], a part is longer
/// than 2^16 columns, ids reach [`NO_ITEM`] or `allowed` ends before them.
pub fn select_top(rec: &mut Recorder, scores: &Tensor, strip: &TopStrip, lists: &Tensor) -> Result<(), Error> {
    let kernel = shaders::SELECT_TOP.name;
    let [n_rows, n_cols] = scores.dims2(kernel, "scores")?;
    let [n_splits, k] = splits_and_k(kernel, lists)?;
    lists.expect_shape(kernel, "lists", &[n_rows, n_splits, k, 2])?;
    let error = |operand, expected, found| Err(Error::Operand { kernel, operand, expected, found });
    if n_cols.div_ceil(n_splits) > LONGEST_PART {
        let expected = format!("at most {LONGEST_PART} columns in each of {n_splits} parts");
        return error("scores", expected, format!("of {n_cols} columns"));
    }
    let Some(end) = strip.first_id.checked_add(n_cols) else {
        return error("first_id", format!("{n_cols} ids below {NO_ITEM}"), strip.first_id.to_string());
    };
    if let Some(allowed) = strip.allowed.filter(|allowed| (allowed.len() as u64) < u64::from(end.div_ceil(32))) {
        return error("allowed", format!("at least {} words", end.div_ceil(32)), format!("of {}", allowed.len()));
    }
    let flags = if strip.begins { BEGINS } else { 0 } | if strip.allowed.is_some() { FILTERED } else { 0 };
    let params = SelectTopParams { n_cols, n_splits, k, first_id: strip.first_id, flags, n_rows };
    // Never read where there is no filter.
    let none = Tensor::temporary("allowed", &[1], DType::U32)?;
    let operands = [scores, strip.allowed.unwrap_or(&none), lists];
    let grid = fold(rec.target(), u64::from(n_rows) * u64::from(n_splits));
    rec.dispatch(&shaders::SELECT_TOP, None, &[], params, &operands, grid)
}

/// Records the best of the lists that [`select_top`] left for the parts of each row. Shader: `shaders/merge_top.wgsl`.
///
/// # Shapes
/// `lists`: `[B, S, K, 2]`; `best`: `[B, K, 2]` of U32, pairs of a score's bits and an id, the best first.
/// # Errors
/// [`Error::Shape`] if `best` disagrees with `lists`, [`Error::Operand`] if K exceeds [`MAX_TOP`] or S exceeds 128.
pub fn merge_top(rec: &mut Recorder, lists: &Tensor, best: &Tensor) -> Result<(), Error> {
    let kernel = shaders::MERGE_TOP.name;
    let [n_splits, k] = splits_and_k(kernel, lists)?;
    let n_rows = lists.shape()[0];
    best.expect_shape(kernel, "best", &[n_rows, k, 2])?;
    let params = MergeTopParams { n_splits, k, n_rows };
    let grid = fold(rec.target(), n_rows.into());
    rec.dispatch(&shaders::MERGE_TOP, None, &[], params, &[lists, best], grid)
}

/// S and K of lists.
fn splits_and_k(kernel: &'static str, lists: &Tensor) -> Result<[u32; 2], Error> {
    match *lists.shape() {
        [_, n_splits, k, 2] if n_splits <= MAX_SPLITS && k <= MAX_TOP => Ok([n_splits, k]),
        _ => Err(Error::Operand {
            kernel,
            operand: "lists",
            expected: format!("of shape [B, S, K, 2] with at most {MAX_SPLITS} for S and {MAX_TOP} for K"),
            found: format!("of shape {:?}", lists.shape()),
        }),
    }
}
