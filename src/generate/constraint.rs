//! What a generation asks about the text that it may write.

use super::model::Model;
use super::options::GenerateOptions;
use crate::error::Error;
use crate::platform::MaybeSend;

/// Says which tokens may come next in a text. [`grammar`](crate::grammar) does, and so may whoever runs a generation.
pub(crate) trait TokenConstraint: MaybeSend {
    /// The tokens that may come next: a bit for each of the vocabulary, `[ceil(V / 32)]`, the lowest first.
    ///
    /// # Errors
    /// Usually [`Error::Constraint`], if there is none.
    fn allowed(&mut self) -> Result<&[u32], Error>;

    /// Goes on with a token that may come and does not end the text. Returns the tokens that must come next, none if there is
    /// a choice; or `None` if no further token may come.
    ///
    /// # Errors
    /// Usually [`Error::Constraint`], if the token may not come.
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

/// Begins what the options ask a text to match.
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
