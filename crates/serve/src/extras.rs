//! What answers in OpenAI's shape say besides their text, if asked: usage in streams, llama.cpp's `timings`, vLLM's
//! token ids and prompt log probabilities.

use serde_json::{Map, Value as Json, json};
use tilewright::Error;
use tilewright::generate::PromptLogprobs;
use tilewright::tokenizer::Tokenizer;

use super::answers::{Answers, PromptReport, ScoredToken, usage_json};

/// What was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// Whether a stream ends with the usage.
    pub usage: bool,
    /// Whether each part of a stream has the usage so far.
    pub continuous_usage: bool,
    /// llama.cpp's `timings`.
    pub timings: bool,
    /// Ids of the tokens.
    pub token_ids: bool,
    /// vLLM's `prompt_logprobs`.
    pub prompt_logprobs: bool,
}

impl Extras {
    /// Adds to a part of a stream.
    pub fn add(self, part: &mut Map<String, Json>, answers: &Answers) {
        if self.usage {
            let usage = if self.continuous_usage { usage_json(answers.usage()) } else { Json::Null };
            part.insert("usage".into(), usage);
        }
        self.add_timings(part, answers);
    }

    /// Adds the timings.
    pub fn add_timings(self, body: &mut Map<String, Json>, answers: &Answers) {
        if self.timings {
            body.insert("timings".into(), answers.timings());
        }
    }

    /// vLLM's fields about a prompt.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary.
    pub fn of_prompt(self, prompt: &PromptReport, tokenizer: &Tokenizer) -> Result<Map<String, Json>, Error> {
        let mut fields = Map::new();
        if self.token_ids {
            fields.insert("prompt_token_ids".into(), json!(prompt.ids));
        }
        if self.prompt_logprobs {
            let all = prompt.logprobs.iter().map(|token| ranked(token, tokenizer));
            // Nothing comes before the first token.
            let all: Result<Vec<Json>, Error> = std::iter::once(Ok(Json::Null)).chain(all).collect();
            fields.insert("prompt_logprobs".into(), all?.into());
        }
        Ok(fields)
    }
}

/// The most likely tokens and the prompt's own by their ids.
fn ranked(token: &PromptLogprobs, tokenizer: &Tokenizer) -> Result<Json, Error> {
    let entry = |id: u32, logprob: f32, rank: usize| {
        let text = ScoredToken::text(tokenizer.token_bytes(id)?);
        Ok((id.to_string(), json!({"logprob": logprob, "rank": rank, "decoded_token": text})))
    };
    let top = token.logprobs.top.iter().zip(1..).map(|(&(id, logprob), rank)| entry(id, logprob, rank));
    let own = entry(token.id, token.logprobs.logprob, token.rank);
    Ok(Json::Object(top.chain([own]).collect::<Result<_, Error>>()?))
}
