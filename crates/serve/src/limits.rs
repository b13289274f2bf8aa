//! Limits on requests.

use std::time::Duration;

/// Limits of a server. A request above a limit is refused early.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Maximum bytes of a request's body.
    pub body_bytes: usize,
    /// Maximum bytes of a body with a sound.
    pub audio_bytes: usize,
    /// Maximum length of a sound.
    pub audio_time: Duration,
    /// Maximum bytes of all bodies together, without the first 64 KiB of each. Each JSON value counts 128 bytes more. Samples
    /// of decoded sounds have a limit of their own, which is as large: 64 KB for each second.
    pub bodies_bytes: usize,
    /// Maximum JSON values in a body.
    pub values: usize,
    /// Maximum bytes of the request line and headers.
    pub header_bytes: usize,
    /// Maximum number of headers.
    pub headers: usize,
    /// Timeout for a request's headers, and for idle connections.
    pub header_time: Duration,
    /// Timeout for a request's body.
    pub body_time: Duration,
    /// Timeout for a client that does not read its answer.
    pub write_time: Duration,
    /// Maximum number of connections. Above it, the connection idle for longest is closed; if all are busy, the new
    /// one waits.
    pub connections: usize,
    /// Maximum tokens of an answer; `None`: limited by the context only.
    pub max_tokens: Option<usize>,
    /// Time limit of an answer, from its request on. The answer is cut off then. Transcripts have none.
    pub answer_time: Duration,
    /// Maximum answers of a request, over all its prompts.
    pub choices: usize,
    /// Maximum bytes of echoed prompts in all answers of a request.
    pub echo_bytes: usize,
    /// Maximum memory of an answer that is not streamed, including its tokens' log probabilities. The answer is cut
    /// off there.
    pub answer_bytes: usize,
    /// Maximum memory of stored responses, which `previous_response_id` continues.
    pub stored_bytes: usize,
    /// Maximum tools of a request.
    pub tools: usize,
    /// Maximum stop strings of a request.
    pub stops: usize,
    /// Maximum texts of an embeddings request, or documents of a rerank request.
    pub texts: usize,
    /// Maximum requests for embeddings, scores and transcripts per model, queued or running.
    pub batches: usize,
    /// Interval of keep-alive comments in a stream without output.
    pub keep_alive: Duration,
    /// Grace period for running answers at shutdown.
    pub drain: Duration,
}

impl Default for Limits {
    /// 8 MiB of body, 25 MiB with a sound and 200 MiB of all, 32 KiB and 100 headers within 10 s, 512 connections, 10 minutes
    /// for an answer.
    fn default() -> Self {
        Limits {
            body_bytes: 8 << 20,
            audio_bytes: 25 << 20,
            audio_time: Duration::from_secs(3600),
            bodies_bytes: 200 << 20,
            values: 1 << 19,
            header_bytes: 32 << 10,
            headers: 100,
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(30),
            write_time: Duration::from_secs(30),
            connections: 512,
            max_tokens: None,
            answer_time: Duration::from_secs(600),
            choices: 128,
            echo_bytes: 8 << 20,
            answer_bytes: 256 << 20,
            stored_bytes: 64 << 20,
            tools: 512,
            stops: 64,
            texts: 2048,
            batches: 32,
            keep_alive: Duration::from_secs(15),
            drain: Duration::from_secs(30),
        }
    }
}
