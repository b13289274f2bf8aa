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
    /// Tokens that were guessed.
    pub drafted_tokens: usize,
    /// Of these the ones that the model chose as well.
    pub accepted_tokens: usize,
}

/// What the driver has said so far and nobody has read.
#[derive(Default)]
struct Told {
    pieces: VecDeque<Result<Piece, Error>>,
    usage: Usage,
    /// Whether nothing comes any more.
    is_over: bool,
    stop_reason: Option<StopReason>,
}

/// Both ends of a stream.
#[derive(Default)]
struct Both {
    told: Watched<Told>,
    is_cancelled: AtomicBool,
}

/// The pieces of a request's text. Dropping it cancels the request.
pub struct Stream(Arc<Both>);

/// Cancels a request from elsewhere.
#[derive(Clone)]
pub struct StreamHandle(Arc<Both>);

/// The driver's end.
pub(super) struct Teller(Arc<Both>);

/// The two ends.
pub(super) fn stream() -> (Teller, Stream) {
    let both = Arc::new(Both::default());
    (Teller(both.clone()), Stream(both))
}

impl Stream {
    /// The next token with the text that it completes, or `None` at the end.
    ///
    /// # Errors
    /// As [`Generation::next`](crate::generate::Generation::next). The stream is over then.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        let next = |told: &mut Told| match told.pieces.pop_front() {
            Some(piece) => Some(Some(piece)),
            None => told.is_over.then_some(None),
        };
        self.0.told.until(next).await
    }

    /// Whether the latest piece was the last one.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn is_at_end(&self) -> bool {
        self.0.told.with(|told| told.is_over && told.pieces.is_empty())
    }

    /// Why the text ended; `None` while it goes on, or after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.0.told.with(|told| told.stop_reason)
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        self.0.told.with(|told| told.usage)
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

impl Teller {
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Says how many tokens the prompt has, and how many of them are not computed.
    pub fn begin(&self, prompt_tokens: usize, cached_tokens: usize) {
        self.0.told.change(|told| told.usage = Usage { prompt_tokens, cached_tokens, ..told.usage });
    }

    /// Says how many tokens were guessed, and how many of them were right.
    pub fn guessed(&self, drafted_tokens: usize, accepted_tokens: usize) {
        self.0.told.change(|told| {
            told.usage.drafted_tokens += drafted_tokens;
            told.usage.accepted_tokens += accepted_tokens;
        });
    }

    pub fn piece(&self, piece: Piece) {
        self.0.told.change(|told| {
            told.usage.completion_tokens += 1;
            told.pieces.push_back(Ok(piece));
        });
    }

    pub fn end(self, reason: StopReason) {
        self.0.told.change(|told| {
            told.stop_reason = Some(reason);
            told.is_over = true;
        });
    }

    pub fn fail(self, error: Error) {
        self.0.told.change(|told| {
            told.pieces.push_back(Err(error));
            told.is_over = true;
        });
    }
}

impl Drop for Teller {
    /// A driver that is gone says nothing any more, and what it has not ended is broken.
    fn drop(&mut self) {
        self.0.told.change(|told| {
            if !told.is_over {
                told.is_over = true;
                told.pieces.push_back(Err(Error::Stopped { reason: "the driver that had the text is gone".into() }));
            }
        });
    }
}
