//! The stream of pieces that a request produces.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::watched::Watched;
use crate::error::Error;
use crate::generate::{Piece, PromptLogprobs, StopReason};

/// Token counts of a request so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens, including the one that ended the completion.
    pub completion_tokens: usize,
    /// Draft tokens.
    pub drafted_tokens: usize,
    /// Draft tokens that the model accepted.
    pub accepted_tokens: usize,
}

/// What the driver sent and the stream has not read.
#[derive(Default)]
struct Unread {
    pieces: VecDeque<Result<Piece, Error>>,
    /// Of the prompt's tokens from the second on.
    prompt_logprobs: Vec<PromptLogprobs>,
    usage: Usage,
    /// Whether the driver has ended the stream.
    is_over: bool,
    stop_reason: Option<StopReason>,
}

/// State shared by the ends of a stream.
#[derive(Default)]
struct StreamState {
    unread: Watched<Unread>,
    is_cancelled: AtomicBool,
}

/// The pieces of a request's completion. Dropping the stream cancels the request.
pub struct Stream(Arc<StreamState>);

/// Cancels a request, also from another thread.
#[derive(Clone)]
pub struct StreamHandle(Arc<StreamState>);

/// The driver's end of a stream.
pub(super) struct ResponseSender(Arc<StreamState>);

/// Creates both ends of a stream.
pub(super) fn stream() -> (ResponseSender, Stream) {
    let channel = Arc::new(StreamState::default());
    (ResponseSender(channel.clone()), Stream(channel))
}

impl Stream {
    /// The next token and the text it completes, or `None` at the end.
    ///
    /// # Errors
    /// As [`Generation::next`](crate::generate::Generation::next). An error ends the stream.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        let next = |unread: &mut Unread| match unread.pieces.pop_front() {
            Some(piece) => Some(Some(piece)),
            None => unread.is_over.then_some(None),
        };
        self.0.unread.until(next).await
    }

    /// Whether the last piece has been read.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn is_at_end(&self) -> bool {
        self.0.unread.with(|unread| unread.is_over && unread.pieces.is_empty())
    }

    /// Why the completion ended; `None` while it runs or after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.0.unread.with(|unread| unread.stop_reason)
    }

    /// Token counts so far.
    pub fn usage(&self) -> Usage {
        self.0.unread.with(|unread| unread.usage)
    }

    /// Takes the log probabilities of the prompt's tokens from the second on, if
    /// [`GenerateOptions::prompt_logprobs`](field@crate::GenerateOptions::prompt_logprobs) is set. They are complete
    /// once there is a piece, or the completion has ended.
    pub fn prompt_logprobs(&self) -> Vec<PromptLogprobs> {
        self.0.unread.with(|unread| std::mem::take(&mut unread.prompt_logprobs))
    }

    /// A handle that cancels the request.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.0.clone())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }
}

impl StreamHandle {
    /// Ends the completion: at most two more tokens are computed for it.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }
}

impl ResponseSender {
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Reports the prompt's length and how many of its tokens are cached.
    pub fn begin(&self, prompt_tokens: usize, cached_tokens: usize) {
        self.0.unread.change(|unread| unread.usage = Usage { prompt_tokens, cached_tokens, ..unread.usage });
    }

    /// Sets the log probabilities of prompt tokens, the first of which has this number of others before it.
    pub fn prompt_logprobs(&self, n_before: usize, logprobs: impl Iterator<Item = PromptLogprobs>) {
        self.0.unread.with(|unread| {
            // A prompt is computed again after a lost device.
            unread.prompt_logprobs.truncate(n_before);
            unread.prompt_logprobs.extend(logprobs);
        });
    }

    /// Adds to the counts of drafted and accepted tokens.
    pub fn drafted(&self, drafted_tokens: usize, accepted_tokens: usize) {
        self.0.unread.change(|unread| {
            unread.usage.drafted_tokens += drafted_tokens;
            unread.usage.accepted_tokens += accepted_tokens;
        });
    }

    pub fn piece(&self, piece: Piece) {
        self.0.unread.change(|unread| {
            unread.usage.completion_tokens += 1;
            unread.pieces.push_back(Ok(piece));
        });
    }

    pub fn end(self, reason: StopReason) {
        self.0.unread.change(|unread| {
            unread.stop_reason = Some(reason);
            unread.is_over = true;
        });
    }

    pub fn fail(self, error: Error) {
        self.0.unread.change(|unread| {
            unread.pieces.push_back(Err(error));
            unread.is_over = true;
        });
    }
}

impl Drop for ResponseSender {
    /// Fails a stream that the driver dropped without ending it.
    fn drop(&mut self) {
        self.0.unread.change(|unread| {
            if !unread.is_over {
                unread.is_over = true;
                unread.pieces.push_back(Err(Error::Stopped { reason: "the driver was dropped".into() }));
            }
        });
    }
}
