//! The answers of a request while the engine generates them: deltas, tokens and finish reasons.

use std::collections::{HashSet, VecDeque};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use tilewright::answer::{AnswerReader, CallPart, Event, call_id};
use tilewright::engine::{Request, Stream, Usage};
use tilewright::generate::{GenerateOptions, Piece, PromptLogprobs, StopReason};
use tilewright::tokenizer::Tokenizer;
use tilewright::{Error, ImageRows};

use super::app::{RequestContext, RunOptions};
use super::errors::ApiError;
use super::metrics::Metrics;
use super::models::{Decoder, Lease};
use super::request_log::SharedRecord;
use super::telemetry::{Operation, Stages};

/// Delay before a request's next answer is submitted again when the queue is full.
const PAUSE: Duration = Duration::from_millis(20);

/// How the answers to a prompt are generated. They differ only in their seeds.
#[derive(Clone)]
pub struct AnswerOptions {
    pub options: GenerateOptions,
    pub seeds: Vec<u64>,
}

/// A prompt and its options, shared by all of its answers so that the request is held in memory once.
pub struct PreparedPrompt {
    pub ids: Vec<u32>,
    /// Images whose rows stand among the ids.
    pub images: Vec<Arc<ImageRows>>,
    pub choices: Arc<AnswerOptions>,
    /// Parses answers, a clone each; `None` for plain text.
    pub reader: Option<AnswerReader>,
}

/// A token and its log probability.
#[derive(Clone, Debug)]
pub struct ScoredToken {
    pub id: u32,
    pub bytes: Vec<u8>,
    pub logprob: f32,
    /// The most likely tokens: ids, bytes and log probabilities.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

impl ScoredToken {
    /// The token's text; a partial character becomes U+FFFD.
    pub fn text(bytes: &[u8]) -> String {
        String::from_utf8_lossy(bytes).into_owned()
    }
}

/// A part of an answer.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    pub thinking: String,
    pub text: String,
    /// Parts of calls; those of one call are joined.
    pub calls: Vec<CallPart>,
    /// Tokens whose text is final, if requested. Tokens of a stop string are never sent.
    pub tokens: Vec<ScoredToken>,
    /// Ids of all generated tokens, if requested.
    pub ids: Vec<u32>,
}

impl Delta {
    fn add(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Thinking(text) => self.thinking += &text,
                Event::Text(text) | Event::NotACall { text, .. } => self.text += &text,
                Event::CallPart(part) => self.add_call(part),
                // Readers of requests give calls in parts.
                Event::Call(_) | Event::Open(_) => {}
            }
        }
    }

    pub fn add_call(&mut self, part: CallPart) {
        match self.calls.last_mut().filter(|_| !part.is_first) {
            Some(call) => {
                call.arguments += &part.arguments;
                call.is_last = part.is_last;
            }
            None => self.calls.push(part),
        }
    }

    /// Adds the next delta of the same answer.
    pub fn append(&mut self, next: Delta) {
        self.thinking += &next.thinking;
        self.text += &next.text;
        next.calls.into_iter().for_each(|part| self.add_call(part));
        self.tokens.extend(next.tokens);
        self.ids.extend(next.ids);
    }

    /// Takes the part that continues the call of the delta before, which comes before this delta's text.
    pub fn take_continued(&mut self) -> Option<CallPart> {
        let continues = self.calls.first().is_some_and(|part| !part.is_first);
        continues.then(|| self.calls.remove(0))
    }

    fn has_whole_calls(&self) -> bool {
        self.calls.iter().any(|call| call.is_last)
    }

    /// Approximate memory size as JSON.
    fn size_bytes(&self) -> usize {
        /// An object of three members, with a value for each byte of the token.
        fn of_token(bytes: &[u8]) -> usize {
            512 + 80 * bytes.len()
        }
        let of_call = |call: &CallPart| call.arguments.len() + if call.is_first { call.name.len() + 512 } else { 0 };
        let calls = self.calls.iter().map(of_call).sum::<usize>();
        let tokens = self
            .tokens
            .iter()
            .map(|token| of_token(&token.bytes) + token.top.iter().map(|(_, bytes, _)| of_token(bytes)).sum::<usize>());
        self.thinking.len() + self.text.len() + calls + tokens.sum::<usize>() + 16 * self.ids.len()
    }

    /// Whether it has nothing.
    pub fn is_empty(&self) -> bool {
        let has_tokens = !self.tokens.is_empty() || !self.ids.is_empty();
        self.thinking.is_empty() && self.text.is_empty() && self.calls.is_empty() && !has_tokens
    }
}

/// The end of an answer.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub reason: StopReason,
    /// The stop string that ended it: an index into the options' list.
    pub stop: Option<usize>,
    pub has_calls: bool,
    pub usage: Usage,
}

impl End {
    /// Whether it was cut off for lack of room or time.
    pub fn is_cut(&self) -> bool {
        is_cut(self.reason)
    }

    /// OpenAI's `finish_reason`.
    pub fn finish(&self) -> &'static str {
        match (self.is_cut(), self.has_calls) {
            (true, _) => "length",
            (false, true) => "tool_calls",
            (false, false) => "stop",
        }
    }
}

fn is_cut(reason: StopReason) -> bool {
    matches!(reason, StopReason::MaxTokens | StopReason::ContextFull | StopReason::Deadline)
}

/// An event of the answer with that index.
pub enum AnswerEvent {
    Delta(usize, Delta),
    End(usize, End),
}

/// An answer not yet submitted.
struct PendingAnswer {
    index: usize,
    ask: Arc<PreparedPrompt>,
    seed: u64,
}

/// An answer in progress.
struct RunningAnswer {
    index: usize,
    stream: Stream,
    reader: Option<AnswerReader>,
    /// Tokens that end the text without being part of it.
    end_ids: Vec<u32>,
    /// Tokens whose text is not sent yet.
    held: VecDeque<ScoredToken>,
    /// The reached stop string.
    stop: Option<usize>,
    has_calls: bool,
    latest: Option<Instant>,
    stages: Stages,
}

/// Token usage of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestUsage {
    pub tokens: Usage,
    /// Completion tokens that are reasoning, including its markers.
    pub reasoning_tokens: usize,
}

/// What was asked of a prompt: its tokens, and their log probabilities from the second on.
#[derive(Clone, Debug, Default)]
pub struct PromptReport {
    pub ids: Vec<u32>,
    pub logprobs: Vec<PromptLogprobs>,
}

/// When the first prompt began to be computed, and the first and latest token arrived.
#[derive(Clone, Copy, Debug, Default)]
struct AnswerTimes {
    begun: Option<Instant>,
    first: Option<Instant>,
    latest: Option<Instant>,
}

/// The answers of a request. Dropping them cancels those in progress.
pub struct Answers {
    lease: Lease,
    decoder: Arc<Decoder>,
    metrics: Arc<Metrics>,
    since: Instant,
    cache_salt: Option<String>,
    run: RunOptions,
    deadline: Instant,
    /// By prompt, if requested.
    prompts: Vec<PromptReport>,
    times: AnswerTimes,
    waiting: VecDeque<PendingAnswer>,
    running: Vec<RunningAnswer>,
    events: VecDeque<AnswerEvent>,
    /// The number of answers per prompt, and the usage of each answer.
    n_each: usize,
    usages: Vec<Usage>,
    n_reasoning: usize,
    /// The trace of all answers.
    operation: Operation,
    record: SharedRecord,
}

impl Answers {
    /// Submits the first answer. Answers to the same prompt have consecutive indices.
    ///
    /// # Errors
    /// `busy` if the queue is full; errors of [`Engine::submit`](tilewright::engine::Engine::submit).
    pub fn begin(
        lease: Lease,
        metrics: Arc<Metrics>,
        asks: Vec<PreparedPrompt>,
        since: &RequestContext,
        deadline: Instant,
    ) -> Result<Answers, ApiError> {
        let decoder = lease.decoder()?;
        let n_each = asks.first().map_or(1, |ask| ask.choices.seeds.len());
        let mut waiting = VecDeque::new();
        let mut prompts = Vec::new();
        for ask in asks {
            if since.run.reports_ids || ask.choices.options.prompt_logprobs.is_some() {
                prompts.push(PromptReport { ids: ask.ids.clone(), logprobs: Vec::new() });
            }
            // Check every prompt now: only the first is submitted here.
            decoder.model().check_prompt_with(&ask.ids, &ask.images)?;
            let ask = Arc::new(ask);
            for &seed in &ask.choices.seeds {
                waiting.push_back(PendingAnswer { index: waiting.len(), ask: ask.clone(), seed });
            }
        }
        let n = waiting.len();
        let operation = since.trace.operation(lease.entry.name(), n);
        let mut answers = Answers {
            lease,
            decoder,
            metrics,
            since: since.at,
            cache_salt: since.cache_salt.clone(),
            run: since.run,
            deadline,
            prompts,
            times: AnswerTimes::default(),
            waiting,
            running: Vec::new(),
            events: VecDeque::new(),
            n_each,
            usages: vec![Usage::default(); n],
            n_reasoning: 0,
            operation,
            record: since.record.clone(),
        };
        answers.record.answered_by(answers.lease.entry.name());
        match answers.submit(false) {
            Ok(()) => Ok(answers),
            Err(error) => Err(answers.failed(error)),
        }
    }

    fn failed(&mut self, error: ApiError) -> ApiError {
        self.operation.failed(error.code);
        error
    }

    /// Submits waiting answers one by one, each after all earlier ones have started. So a request takes one place in
    /// the queue, however many answers it asks for.
    fn submit(&mut self, may_wait: bool) -> Result<(), ApiError> {
        while let Some(next) = self.waiting.front()
            && self.running.iter().all(|answer| answer.latest.is_some())
        {
            if may_wait && !self.decoder.engine.has_room() {
                return Ok(());
            }
            let PendingAnswer { index, ref ask, seed } = *next;
            let options = &ask.choices.options;
            // Answers to the same prompt share its log probabilities.
            let prompt_logprobs = options.prompt_logprobs.filter(|_| index.is_multiple_of(self.n_each));
            let options = GenerateOptions { seed: Some(seed), prompt_logprobs, ..options.clone() };
            let tokenizer = self.decoder.model().tokenizer()?;
            let end_ids = options.end_ids(Some(tokenizer));
            let (deadline, cache_salt) = (Some(self.deadline), self.cache_salt.clone());
            let adapter = self.lease.adapter.clone();
            let RunOptions { priority, reads_cache, .. } = self.run;
            let request = Request { images: ask.images.clone(), ..Request::new(ask.ids.clone(), options) };
            let request = Request { deadline, cache_salt, adapter, priority, reads_cache, ..request };
            let stream = match self.decoder.engine.submit(request) {
                Err(Error::Busy { .. }) if may_wait => return Ok(()),
                stream => stream?,
            };
            let reader = ask.reader.clone();
            self.waiting.pop_front();
            let (held, stages) = (VecDeque::new(), self.operation.queued(index));
            self.running.push(RunningAnswer {
                index,
                stream,
                reader,
                end_ids,
                held,
                stop: None,
                has_calls: false,
                latest: None,
                stages,
            });
        }
        Ok(())
    }

    /// When the first token arrived.
    pub fn first(&self) -> Option<Instant> {
        self.times.first
    }

    /// Tokens of all prompts and answers so far.
    pub fn usage(&self) -> RequestUsage {
        let mut sum = Usage::default();
        for (index, usage) in self.usages.iter().enumerate() {
            // All answers share the prompt; tokens that later ones found cached were computed for the first.
            if index % self.n_each == 0 {
                sum.prompt_tokens += usage.prompt_tokens;
                sum.cached_tokens += usage.cached_tokens;
            }
            sum.completion_tokens += usage.completion_tokens;
        }
        RequestUsage { tokens: sum, reasoning_tokens: self.n_reasoning }
    }

    /// What was asked of the prompt of this answer, if anything; log probabilities come before its first event.
    pub fn prompt(&self, index: usize) -> Option<&PromptReport> {
        self.prompts.get(index / self.n_each)
    }

    /// The model's vocabulary.
    ///
    /// # Errors
    /// Those of [`Model::tokenizer`](tilewright::generate::Model::tokenizer).
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.decoder.model().tokenizer()
    }

    /// llama.cpp's `timings` of all answers so far.
    pub fn timings(&self) -> Json {
        let usage = self.usage().tokens;
        let AnswerTimes { begun, first, latest } = self.times;
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f64() * 1e3,
            _ => 0.0,
        };
        let now = Some(Instant::now());
        let n_prompt = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        let (prompt_ms, predicted_ms) = (between(begun, first.or(now)), between(first, latest));
        // Nothing can be said of a single token's rate.
        let over = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let (n_prompt, n) = (n_prompt as f64, usage.completion_tokens as f64);
        json!({
            "cache_n": usage.cached_tokens,
            "prompt_n": n_prompt as u64,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": over(prompt_ms, n_prompt),
            "prompt_per_second": over(1e3 * n_prompt, prompt_ms),
            "predicted_n": n as u64,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": over(predicted_ms, n),
            "predicted_per_second": over(1e3 * n, predicted_ms),
        })
    }

    /// Token counts of the answer with that index so far.
    pub fn usage_of(&self, index: usize) -> Usage {
        self.usages.get(index).copied().unwrap_or_default()
    }

    /// The next event; `None` when all answers have ended.
    ///
    /// # Errors
    /// Errors of the engine.
    pub async fn next(&mut self) -> Option<Result<AnswerEvent, ApiError>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(Ok(event));
            }
            if let Err(error) = self.submit(true) {
                return Some(Err(self.failed(error)));
            }
            if self.running.is_empty() {
                if self.waiting.is_empty() {
                    self.operation.done();
                    return None;
                }
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            let (running, begun) = (&mut self.running, &mut self.times.begun);
            let (at, piece) = poll_fn(|context| {
                for (at, answer) in running.iter_mut().enumerate() {
                    if let Poll::Ready(piece) = pin!(answer.stream.next()).poll(context) {
                        return Poll::Ready((at, piece));
                    }
                    // The engine also wakes this task when the prompt starts.
                    answer.stages.look(|| answer.stream.usage());
                    if begun.is_none() && answer.stream.usage().prompt_tokens > 0 {
                        *begun = Some(Instant::now());
                    }
                }
                Poll::Pending
            })
            .await;
            let taken = match piece {
                Some(Ok(piece)) => self.piece(at, piece),
                Some(Err(error)) => Err(error),
                None => self.end(at),
            };
            if let Err(error) = taken {
                self.lease.note(&error);
                return Some(Err(self.failed(error.into())));
            }
        }
    }

    fn piece(&mut self, at: usize, piece: Piece) -> Result<(), Error> {
        let Some(answer) = self.running.get_mut(at) else { return Ok(()) };
        let (now, model, usage) = (Instant::now(), self.lease.entry.name(), answer.stream.usage());
        match answer.latest.replace(now) {
            Some(latest) => self.metrics.further_token(model, now - latest),
            None => {
                self.metrics.first_token(model, now - self.since);
                answer.stages.first_token(usage);
                report_prompt(&mut self.prompts, self.n_each, answer);
                if self.usages.iter().all(|usage| usage.completion_tokens == 0) {
                    self.operation.first_token(now - self.since);
                    self.record.first_token(now - self.since);
                }
            }
        }
        self.usages[answer.index] = usage;
        answer.stop = piece.stop;
        self.times.begun.get_or_insert(self.since);
        self.times.first.get_or_insert(now);
        self.times.latest = Some(now);
        let mut delta = Delta::default();
        if self.run.reports_ids {
            delta.ids.push(piece.id);
        }
        if let Some(logprobs) = &piece.logprobs {
            let tokenizer = self.decoder.model().tokenizer()?;
            let bytes = |id| tokenizer.token_bytes(id).unwrap_or_default().to_vec();
            let top = logprobs.top.iter().map(|&(id, logprob)| (id, bytes(id), logprob)).collect();
            // The end token may complete the text, but is not one of its tokens.
            if self.run.reports_ends || !answer.end_ids.contains(&piece.id) {
                let (id, bytes) = (piece.id, bytes(piece.id));
                answer.held.push_back(ScoredToken { id, bytes, logprob: logprobs.logprob, top });
            }
            let n_certain = answer.held.len().saturating_sub(piece.held);
            delta.tokens.extend(answer.held.drain(..n_certain));
        }
        match &mut answer.reader {
            Some(reader) => {
                let was_thinking = reader.is_thinking();
                delta.add(reader.push(piece.id, &piece.text)?);
                self.n_reasoning += usize::from(was_thinking || reader.is_thinking());
            }
            None => delta.text = piece.text,
        }
        answer.has_calls |= delta.has_whole_calls();
        if !delta.is_empty() {
            self.events.push_back(AnswerEvent::Delta(answer.index, delta));
        }
        Ok(())
    }

    fn end(&mut self, at: usize) -> Result<(), Error> {
        let mut answer = self.running.swap_remove(at);
        let Some(reason) = answer.stream.stop_reason() else {
            return Err(Error::Stopped { reason: "the text ended without a reason".into() });
        };
        let usage = answer.stream.usage();
        self.usages[answer.index] = usage;
        report_prompt(&mut self.prompts, self.n_each, &answer);
        self.metrics.used(self.lease.entry.name(), usage);
        let mut delta = Delta::default();
        if let Some(reader) = &mut answer.reader {
            delta.add(if is_cut(reason) { reader.finish_cut() } else { reader.finish() });
        }
        match reason {
            // The held tokens are the stop string's.
            StopReason::StopText | StopReason::Cancelled => {}
            _ => delta.tokens.extend(answer.held.drain(..)),
        }
        let has_calls = answer.has_calls || delta.has_whole_calls();
        if !delta.is_empty() {
            self.events.push_back(AnswerEvent::Delta(answer.index, delta));
        }
        let end = End { reason, stop: answer.stop, has_calls, usage };
        answer.stages.end(usage, Some(end.finish()));
        self.operation.finished(answer.index, end.finish());
        self.events.push_back(AnswerEvent::End(answer.index, end));
        Ok(())
    }

    /// Collects all answers, by index. If together they exceed `most` bytes, unfinished ones end with `MaxTokens`.
    ///
    /// # Errors
    /// As [`Answers::next`].
    pub async fn collect(&mut self, most: usize) -> Result<Vec<(Delta, End)>, ApiError> {
        let mut whole: Vec<(Delta, Option<End>)> = self.usages.iter().map(|_| (Delta::default(), None)).collect();
        let mut n_bytes = 0;
        while let Some(event) = self.next().await {
            match event? {
                AnswerEvent::Delta(index, delta) => {
                    n_bytes += delta.size_bytes();
                    whole[index].0.append(delta);
                }
                AnswerEvent::End(index, end) => whole[index].1 = Some(end),
            }
            if n_bytes > most {
                for (index, (delta, end)) in whole.iter_mut().enumerate() {
                    let has_calls = delta.has_whole_calls();
                    let usage = self.usages[index];
                    end.get_or_insert(End { reason: StopReason::MaxTokens, stop: None, has_calls, usage });
                }
                self.operation.done();
                break;
            }
        }
        Ok(whole.into_iter().filter_map(|(delta, end)| Some((delta, end?))).collect())
    }
}

/// Takes the log probabilities of a prompt from its first answer.
fn report_prompt(prompts: &mut [PromptReport], n_each: usize, answer: &RunningAnswer) {
    if let Some(prompt) = prompts.get_mut(answer.index / n_each)
        && answer.index.is_multiple_of(n_each)
    {
        prompt.logprobs.extend(answer.stream.prompt_logprobs());
    }
}

impl Drop for Answers {
    /// Counts the tokens of cancelled answers too.
    fn drop(&mut self) {
        for answer in &mut self.running {
            let usage = answer.stream.usage();
            self.metrics.used(self.lease.entry.name(), usage);
            self.usages[answer.index] = usage;
            answer.stages.end(usage, None);
        }
        let usage = self.usage().tokens;
        self.record.used(usage);
        self.operation.used(|| usage);
    }
}

/// Ids of tool calls. Answers of one request have the same messages, so the model may repeat ids.
pub struct CallIds {
    taken: HashSet<String>,
    next: usize,
}

impl CallIds {
    /// Continues the numbering of the conversation's ids.
    pub fn new(n_messages: usize) -> CallIds {
        CallIds { taken: HashSet::new(), next: n_messages * 100 }
    }

    /// The id of a call: the model's own if it is unique.
    pub fn of(&mut self, call: &CallPart) -> String {
        let mut id = call.id.clone();
        loop {
            let id = id.take().unwrap_or_else(|| {
                self.next += 1;
                call_id(self.next - 1)
            });
            if self.taken.insert(id.clone()) {
                return id;
            }
        }
    }

    /// A call in OpenAI's format, or a later part of one.
    pub fn call_json(&mut self, call: &CallPart) -> Json {
        match call.is_first {
            true => json!({
                "id": self.of(call),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }),
            false => json!({"function": {"arguments": call.arguments}}),
        }
    }
}

/// Token usage in OpenAI's format.
pub fn usage_json(RequestUsage { tokens: usage, reasoning_tokens }: RequestUsage) -> Json {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sinks;
    use crate::models::{KeepOptions, Loaded, ModelSpec, Models};
    use crate::telemetry::{Telemetry, TraceContext};
    use tilewright::Device;
    use tilewright::answer::Format;
    use tilewright::engine::{Engine, EngineOptions};
    use tilewright::generate::Model;

    /// A request is held once, and one of its answers is submitted, however many answers it asks for.
    #[test]
    fn answers_of_a_request_share_its_content_in_memory() {
        let model = Model::builtin(&Device::cpu()).unwrap();
        let (engine, _driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
        let decoder = Arc::new(Decoder::of(engine, Some("chatml")).unwrap());
        let story = ModelSpec::new("story", 1, move || Ok(Loaded::Decoder(decoder.clone())));
        let models = Models::new(vec![story], KeepOptions::default(), 1, None, Sinks::default()).unwrap();
        models.preload().unwrap();
        let lease = pollster::block_on(models.get("story")).ok().unwrap();

        let options = GenerateOptions { stop: vec!["x".repeat(1024); 64], ..GenerateOptions::default() };
        let choices = Arc::new(AnswerOptions { options, seeds: (0..128).collect() });
        let tools = vec![json!({"type": "function", "function": {"name": "f", "description": "x".repeat(1 << 20)}})];
        let reader = Some(AnswerReader::new(Format::Hermes).with_tools(&tools));
        let ask = PreparedPrompt { ids: vec![1; 100], images: Vec::new(), choices: choices.clone(), reader };
        let since = RequestContext::new(Instant::now(), TraceContext::default(), None, SharedRecord::default());
        let metrics = Arc::new(Metrics::new(&Telemetry::default()));
        let deadline = Instant::now() + Duration::from_secs(60);
        let answers = Answers::begin(lease, metrics, vec![ask], &since, deadline).ok().unwrap();
        assert_eq!((answers.waiting.len(), answers.running.len()), (127, 1));
        let ask = &answers.waiting[0].ask;
        assert!(answers.waiting.iter().all(|waiting| Arc::ptr_eq(&waiting.ask, ask)));
        assert_eq!((Arc::strong_count(ask), Arc::strong_count(&choices)), (127, 2));
        let seeds: Vec<u64> = answers.waiting.iter().map(|waiting| waiting.seed).collect();
        assert!(seeds.iter().copied().eq(1..128));
    }
}
