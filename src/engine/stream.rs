//! What a request gives, piece by piece.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::watched::Watched;
use crate::error::Error;
use crate::generate::{Piece, StopReason};

/// Tokens of a request so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of these the ones that were not computed, because an earlier sequence began with them.
    pub cached_tokens: usize,
    /// Generated, the one that ended the text included.
    pub completion_tokens: usize,
    /// Tokens that were drafted.
    pub drafted_tokens: usize,
    /// Of these the ones that the model chose as well.
    pub accepted_tokens: usize,
}

/// What the driver has said so far and nobody has read.
#[derive(Default)]
struct Unread {
    pieces: VecDeque<Result<Piece, Error>>,
    usage: Usage,
    /// Whether nothing comes any more.
    is_over: bool,
    stop_reason: Option<StopReason>,
}

/// Channel ends of a stream.
#[derive(Default)]
struct Channel {
    unread: Watched<Unread>,
    is_cancelled: AtomicBool,
}

/// The pieces of a request's text. Dropping it cancels the request.
pub struct Stream(Arc<Channel>);

/// Cancels a request from elsewhere.
#[derive(Clone)]
pub struct StreamHandle(Arc<Channel>);

/// The driver's end.
pub(super) struct ResponseSender(Arc<Channel>);

/// The two ends.
pub(super) fn stream() -> (ResponseSender, Stream) {
    let channel = Arc::new(Channel::default());
    (ResponseSender(channel.clone()), Stream(channel))
}

impl Stream {
    /// The next token with the text that it completes, or `None` at the end.
    ///
    /// # Errors
    /// As [`Generation::next`](crate::generate::Generation::next). The stream is over then.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        let next = |unread: &mut Unread| match unread.pieces.pop_front() {
            Some(piece) => Some(Some(piece)),
            None => unread.is_over.then_some(None),
        };
        self.0.unread.until(next).await
    }

    /// Whether the latest piece was the last one.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn is_at_end(&self) -> bool {
        self.0.unread.with(|unread| unread.is_over && unread.pieces.is_empty())
    }

    /// Why the text ended; `None` while it goes on, or after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.0.unread.with(|unread| unread.stop_reason)
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        self.0.unread.with(|unread| unread.usage)
    }

    /// Cancels the request from elsewhere.
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
    /// Ends the text: at most two more tokens are computed for it.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }
}

impl ResponseSender {
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Says how many tokens the prompt has, and how many of them are not computed.
    pub fn begin(&self, prompt_tokens: usize, cached_tokens: usize) {
        self.0.unread.change(|unread| unread.usage = Usage { prompt_tokens, cached_tokens, ..unread.usage });
    }

    /// Says how many tokens were drafted, and how many of them were right.
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
    /// A driver that is gone says nothing any more, and what it has not ended is broken.
    fn drop(&mut self) {
        self.0.unread.change(|unread| {
            if !unread.is_over {
                unread.is_over = true;
                unread.pieces.push_back(Err(Error::Stopped { reason: "the driver that had the text is gone".into() }));
            }
        });
    }
}
