//! Tokens that begin and end a model's output, beyond those named in files.
//!
//! Files name one end-of-text token, and sometimes one end-of-turn token. Chat models end turns with further tokens,
//! identified here by their texts. The list is llama.cpp's (`llama-vocab.cpp` in `llama-cpp-sys-2` 0.1.161), without
//! its fill-in-the-middle tokens, which do not end an answer in Hugging Face's generation either.

use super::vocab::TokenType;

/// Texts of end-of-answer tokens.
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
    // Gemma 4's end of turn, and the start of a tool's response.
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];

/// Ends a message but not the answer, in vocabularies that have both tokens of a pair: gpt-oss and Solar Open.
const MESSAGE_END: (&str, [[&str; 2]; 2]) = ("<|end|>", [["<|return|>", "<|call|>"], ["<|calls|>", "<|flush|>"]]);

/// Control tokens of Gemma 4. Its files disable adding BOS because its chat template writes one, but the model
/// produces nonsense without (ggml-org/llama.cpp#21500).
const NEEDS_BOS: [&str; 3] = ["<bos>", "<|turn>", "<turn|>"];

/// The end-of-answer tokens without duplicates: those that the file names, in order, then those identified by text.
/// `find` looks up a token's id and type by text.
pub(super) fn ends(named: impl IntoIterator<Item = u32>, find: impl Fn(&str) -> Option<(u32, TokenType)>) -> Vec<u32> {
    // Files mark some of them as normal tokens. Texts without `<|` may be literal: `</s>` is HTML.
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

/// The token that ends a message but not the answer, if the vocabulary has one.
pub(super) fn message_end(find: impl Fn(&str) -> Option<(u32, TokenType)>) -> Option<u32> {
    let (text, pairs) = MESSAGE_END;
    let goes_on = pairs.iter().any(|pair| pair.iter().all(|text| find(text).is_some()));
    find(text).filter(|_| goes_on).map(|token| token.0)
}

/// Whether the vocabulary's model needs BOS, regardless of its file.
pub(super) fn needs_bos(find: impl Fn(&str) -> Option<(u32, TokenType)>) -> bool {
    NEEDS_BOS.iter().all(|text| find(text).is_some_and(|token| token.1 == TokenType::Control))
}
