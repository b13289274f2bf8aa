//! Late interaction.

use super::fold;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::MaxSimParams;
use crate::tensor::Tensor;

/// Records how well documents' tokens answer queries' tokens: for each token of a query the highest similarity with
/// any token of the document, summed up (Khattab & Zaharia 2020, arXiv:2004.12832). An empty query or document gives
/// zero. A score does not depend on where its document lies. Shader: `shaders/max_sim.wgsl`.
///
/// # Shapes
/// `query_spans`: `[B, 2]` of U32, the first row of each query and the one behind its last; `document_spans`:
/// `[I, 2]`, the same of columns; `x`: `[R, C]`, similarities of tokens; `scores`: `[B, N]`, of which columns `first`
/// to `first + I` are written.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the others, [`Error::Operand`] if the documents' scores do not fit.
pub fn max_sim(
    rec: &mut Recorder,
    query_spans: &Tensor,
    document_spans: &Tensor,
    x: &Tensor,
    first: u32,
    scores: &Tensor,
) -> Result<(), Error> {
    let kernel = shaders::MAX_SIM.name;
    let ([n_rows, n_cols], [n_queries, n_scores]) = (x.dims2(kernel, "x")?, scores.dims2(kernel, "scores")?);
    let [n_documents, _] = document_spans.dims2(kernel, "document_spans")?;
    query_spans.expect_shape(kernel, "query_spans", &[n_queries, 2])?;
    document_spans.expect_shape(kernel, "document_spans", &[n_documents, 2])?;
    if first.checked_add(n_documents).is_none_or(|end| end > n_scores) {
        let expected = format!("room for {n_documents} documents in {n_scores} columns");
        return Err(Error::Operand { kernel, operand: "first", expected, found: first.to_string() });
    }
    let params = MaxSimParams { n_rows, n_cols, n_queries, n_documents, first, n_scores };
    let grid = fold(rec.target(), u64::from(n_queries) * u64::from(n_documents));
    rec.dispatch(&shaders::MAX_SIM, None, &[], params, &[query_spans, document_spans, x, scores], grid)
}
