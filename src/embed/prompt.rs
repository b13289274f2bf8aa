//! The prompt around a query and a document, for rerankers that are language models.

use crate::error::Error;
use crate::load::RerankPrompt;
use crate::tokenizer::{EncodeOptions, EncodingCache, Tokenizer};

/// A prompt with the tokens of its ends. Texts between them are encoded together, since tokens cross their borders,
/// and as plain text, so that no text becomes a control token.
pub(super) struct PairPrompt {
    prompt: RerankPrompt,
    /// Tokens up to the last special one before the instruction.
    prefix: Vec<u32>,
    /// The text from there to the instruction.
    lead: String,
    suffix: Vec<u32>,
}

impl PairPrompt {
    /// # Errors
    /// [`Error::Tokenizer`] if the prompt cannot be encoded.
    pub fn new(prompt: RerankPrompt, tokenizer: &Tokenizer) -> Result<PairPrompt, Error> {
        let end = |name: &str| prompt.before.rfind(name).map(|at| at + name.len());
        let ends = tokenizer.special_tokens().filter(|(name, _)| !name.is_empty()).filter_map(|(name, _)| end(name));
        let (before, lead) = prompt.before.split_at(ends.max().unwrap_or(0));
        let encode =
            |text: &str| tokenizer.encode_with(text, EncodeOptions { add_special: false, parse_special: true });
        Ok(PairPrompt { prefix: encode(before)?, suffix: encode(&prompt.after)?, lead: lead.to_owned(), prompt })
    }

    /// Number of tokens around the texts.
    pub fn len(&self) -> usize {
        self.prefix.len() + self.suffix.len()
    }

    /// The tokens of a pair, with its end cut to `max_tokens` in all, and their number before.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if a text cannot be encoded.
    pub fn encode(
        &self,
        encodings: &EncodingCache,
        [query, document]: [&str; 2],
        instruction: Option<&str>,
        max_tokens: usize,
    ) -> Result<(Vec<u32>, usize), Error> {
        let RerankPrompt { query: before_query, document: before_document, .. } = &self.prompt;
        let parts = [&self.lead, instruction.unwrap_or_default(), before_query, query, before_document, document];
        let inner = encodings.encode(&parts.concat(), EncodeOptions::default())?;
        let kept = &inner[..inner.len().min(max_tokens.saturating_sub(self.len()))];
        Ok(([&self.prefix, kept, &self.suffix].concat(), self.len() + inner.len()))
    }
}
