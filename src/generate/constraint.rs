//! Token constraints on a generation.

use super::model::Model;
use super::options::GenerateOptions;
use crate::error::Error;
use crate::platform::MaybeSend;

/// Decides which tokens may come next. Implemented by [`grammar`](crate::grammar) and by callers.
pub(crate) trait TokenConstraint: MaybeSend {
    /// Bitmask of the allowed next tokens, `[ceil(V / 32)]`, lowest bit first.
    ///
    /// # Errors
    /// Usually [`Error::Constraint`], if no token is allowed.
    fn allowed(&mut self) -> Result<&[u32], Error>;

    /// Advances by an allowed token other than an end token. Returns the forced next tokens, empty if there is a
    /// choice; `None` if no token may follow.
    ///
    /// # Errors
    /// Usually [`Error::Constraint`], if the token is not allowed.
    fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, Error>;
}

#[cfg(feature = "grammar")]
impl TokenConstraint for crate::grammar::Guide {
    fn allowed(&mut self) -> Result<&[u32], Error> {
        crate::grammar::Guide::allowed(self)
    }

    fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, Error> {
        use crate::grammar::Next;
        Ok(match crate::grammar::Guide::accept(self, id)? {
            Next::Open => Some(Vec::new()),
            Next::Forced(ids) => Some(ids),
            Next::Complete => None,
        })
    }
}

/// The constraint that the options ask for.
#[cfg(feature = "grammar")]
pub(crate) fn token_constraint(
    model: &Model,
    options: &GenerateOptions,
) -> Result<Option<Box<dyn TokenConstraint>>, Error> {
    let Some(constraint) = &options.constraint else { return Ok(None) };
    let end_ids = options.end_ids(model.tokenizer().ok());
    Ok(Some(Box::new(model.grammars()?.begin(constraint, &end_ids)?)))
}

#[cfg(not(feature = "grammar"))]
pub(crate) fn token_constraint(_: &Model, _: &GenerateOptions) -> Result<Option<Box<dyn TokenConstraint>>, Error> {
    Ok(None)
}
