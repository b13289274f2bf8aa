//! What a client may ask for at most.

use std::time::Duration;

/// Limits of a server. What exceeds one of them is refused before it costs anything.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of all requests' bodies at a time, without the first 64 KiB of each. A JSON value counts as 128 bytes more.
    pub bodies_bytes: usize,
    /// JSON values of a request's body.
    pub values: usize,
    /// Bytes of a request's line and headers.
    pub header_bytes: usize,
    /// Headers of a request.
    pub headers: usize,
    /// How long a client may take for a request's headers, and leave a connection idle.
    pub header_time: Duration,
    /// How long a client may take for a request's body.
    pub body_time: Duration,
    /// How long a client may leave an answer unread whose parts it has no room for.
    pub write_time: Duration,
    /// Connections at a time. For a further one, the connection ends that has waited longest for its client; where all are at
    /// work, it waits.
    pub connections: usize,
    /// Tokens of an answer; none but the context's if `None`.
    pub max_tokens: Option<usize>,
    /// How long an answer may take, from its request to its end, where it is cut off.
    pub answer_time: Duration,
    /// Answers of a request, of all its prompts together.
    pub choices: usize,
    /// Bytes of the prompts that the answers of a request begin with.
    pub echo_bytes: usize,
    /// Bytes that an answer takes in memory that is not streamed, with the tokens of which it tells how likely they were. It ends
    /// where it has as many.
    pub answer_bytes: usize,
    /// Tools of a request.
    pub tools: usize,
    /// Stop texts of a request.
    pub stops: usize,
    /// Texts of a request for vectors, and documents of one for scores.
    pub texts: usize,
    /// Requests for vectors and scores at a time for each model, those that wait included.
    pub batches: usize,
    /// How often a stream without news says that it is alive.
    pub keep_alive: Duration,
    /// How long answers in progress may take once the server was told to end.
    pub drain: Duration,
}

impl Default for Limits {
    /// 8 MiB of body and 64 MiB of all, 32 KiB and 100 headers within 10 s, 512 connections, 10 minutes for an answer.
    fn default() -> Self {
        Limits {
            body_bytes: 8 << 20,
            bodies_bytes: 64 << 20,
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
            tools: 512,
            stops: 64,
            texts: 2048,
            batches: 32,
            keep_alive: Duration::from_secs(15),
            drain: Duration::from_secs(30),
        }
    }
}
