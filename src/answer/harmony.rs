//! Message headers in OpenAI's harmony format, well-formed or not.
//! <https://cookbook.openai.com/articles/openai-harmony>
//!
//! About one header in 25 that a model writes is malformed. Accepted: a recipient before or after the channel, a
//! missing `functions.`, a channel's name without `<|channel|>` or joined to the next word, a missing `<|constrain|>`,
//! a missing `<|end|>` of the previous message, an answer without any header.

/// Real headers have up to 80 bytes.
const MAX_BYTES: usize = 512;

const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];

/// A header so far, including its marks.
#[derive(Debug, Clone, Default)]
pub struct HarmonyHeader {
    pub text: String,
    /// Bytes of it at the prompt's end, which are not part of the answer.
    pub n_given: usize,
}

/// The kind of message after a header.
#[derive(Debug, PartialEq, Eq)]
pub enum HarmonyChannel {
    Thought,
    Answer,
    Call(String),
}

impl HarmonyHeader {
    /// The part that the model wrote.
    pub fn own(&self) -> &str {
        self.text.get(self.n_given..).unwrap_or_default()
    }

    /// Whether it has only the start of a message.
    pub fn is_empty(&self) -> bool {
        matches!(self.text.trim(), "" | "<|start|>" | "<|start|>assistant" | "assistant")
    }

    /// Whether the text may be a header or the start of one.
    pub fn is_possible(&self) -> bool {
        if self.text.len() > MAX_BYTES {
            return false;
        }
        let Some(begun) = self.text.strip_prefix("<|start|>") else { return is_of_words(&self.text) };
        begun.contains("<|channel|>") || is_of_words(begun)
    }

    /// The kind of message.
    pub fn channel(&self) -> HarmonyChannel {
        let recipient = self.text.split_once("to=").map(|(_, rest)| {
            let rest = rest.trim_start();
            rest.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default()
        });
        if let Some(tool) = recipient.filter(|name| !["", "assistant", "user", "all"].contains(name)) {
            return HarmonyChannel::Call(tool.strip_prefix("functions.").unwrap_or(tool).into());
        }
        let named = self.text.split_once("<|channel|>").map_or(self.text.as_str(), |(_, named)| named).trim_start();
        let named = named.strip_prefix("assistant").unwrap_or(named).trim_start();
        match named.starts_with("analysis") {
            true => HarmonyChannel::Thought,
            // Commentary without a recipient is a preamble for the user.
            false => HarmonyChannel::Answer,
        }
    }
}

/// Whether a text, up to a mark, consists of a header's words.
fn is_of_words(text: &str) -> bool {
    let (text, ends_in_space) = match text.split_once("<|") {
        Some((words, _)) => (words, true),
        None => (text, text.ends_with(char::is_whitespace)),
    };
    let mut words = text.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let is_last = words.peek().is_none() && !ends_in_space;
        // The next word may be joined to it.
        let word = word.strip_prefix("assistant").unwrap_or(word);
        let known = ["", "assistant", "json", "code", "to="].into_iter().chain(CHANNELS);
        let fits = |known: &str| word == known || (is_last && known.starts_with(word));
        let is_glued = || {
            CHANNELS.iter().any(|channel| {
                let rest = word.strip_prefix(channel);
                rest.is_some_and(|rest| is_recipient(rest) || (is_last && "to=".starts_with(rest)))
            })
        };
        if !(known.into_iter().any(fits) || is_recipient(word) || is_glued()) {
            return false;
        }
    }
    true
}

fn is_recipient(word: &str) -> bool {
    word.starts_with("to=")
}
