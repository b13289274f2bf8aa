//! Which tokens begin and end what a model writes, beyond what files say of it.
//!
//! Files name one token that ends a text, sometimes one that ends a turn. Chat models end their turns with tokens that no key
//! names, so those are known here by their texts. The list is that of llama.cpp (`llama-vocab.cpp` in `llama-cpp-sys-2`
//! 0.1.161), without its tokens for filling in the middle, which end no answer in Hugging Face's generation either.

use super::vocab::TokenType;

/// Texts of tokens that end an answer.
const ENDS: [&str; 22] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<eos>",
    "</s>",
    // Gemma 4's turn, and the place where a tool's answer is to follow.
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];

/// Ends a message, after which the same answer goes on with the next, in vocabularies that have both tokens of a pair: those
/// of gpt-oss and of Solar Open.
const MESSAGE_END: (&str, [[&str; 2]; 2]) = ("<|end|>", [["<|return|>", "<|call|>"], ["<|calls|>", "<|flush|>"]]);

/// Control tokens of Gemma 4. Its files say that no BOS is to be added, because its chat template writes one, but the
/// model writes nonsense without (ggml-org/llama.cpp#21500).
const NEEDS_BOS: [&str; 3] = ["<bos>", "<|turn>", "<turn|>"];

/// The tokens that end an answer, each once: those that a file names, in its order, then those that are known by their texts.
/// `find` gives a token's id and type by its text.
pub(super) fn ends(named: impl IntoIterator<Item = u32>, find: impl Fn(&str) -> Option<(u32, TokenType)>) -> Vec<u32> {
    // Files forget to say of some that they are no text. A text of the others may be meant as it stands: `</s>` is HTML.
    let by_text = ENDS.into_iter().filter_map(|text| {
        find(text).filter(|token| token.1 == TokenType::Control || text.starts_with("<|")).map(|token| token.0)
    });
    let message_end = message_end(&find);
    let mut ids = Vec::new();
    for id in named.into_iter().chain(by_text) {
        if Some(id) != message_end && !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// The token that ends a message and not the answer, where the vocabulary has one.
pub(super) fn message_end(find: impl Fn(&str) -> Option<(u32, TokenType)>) -> Option<u32> {
    let (text, pairs) = MESSAGE_END;
    let goes_on = pairs.iter().any(|pair| pair.iter().all(|text| find(text).is_some()));
    find(text).filter(|_| goes_on).map(|token| token.0)
}

/// Whether a vocabulary is that of a model that needs BOS, whatever its file says.
pub(super) fn needs_bos(find: impl Fn(&str) -> Option<(u32, TokenType)>) -> bool {
    NEEDS_BOS.iter().all(|text| find(text).is_some_and(|token| token.1 == TokenType::Control))
}
