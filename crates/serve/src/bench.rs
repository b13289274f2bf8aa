//! Load test of a server: latencies of an OpenAI-compatible endpoint by the number of clients or the request rate.
//!
//! Each request has its own prompt and is streamed to its end. A thread holds a connection, as a client would; times
//! are measured by the client's clock. If the server has Prometheus metrics, they are read before and after.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value as Json, json};
use tilewright::Error;
use ureq::Agent;
use ureq::http::header::AUTHORIZATION;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

use tilewright::bench::{Percentiles, fractions};

/// A server silent for this long is considered gone.
const SILENCE: Duration = Duration::from_secs(600);
/// Maximum sending threads.
pub const MAX_CONCURRENT: usize = 1024;
/// Words for prompts.
const WORDS: [&str; 16] = [
    "the", "little", "dog", "went", "to", "a", "big", "house", "and", "saw", "old", "tree", "with", "her", "red",
    "ball",
];

/// An endpoint and its model.
#[derive(Clone, Debug)]
pub struct Target {
    /// Base URL of `/completions`, such as `http://127.0.0.1:8080/v1`.
    pub url: String,
    /// Model name; default: the first that the server lists.
    pub model: Option<String>,
    /// API key for requests.
    pub api_key: Option<String>,
}

/// Sizes of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Texts {
    /// Approximate tokens per prompt: prompts are words, whose number is calibrated by the first answer.
    pub prompt_tokens: usize,
    /// Maximum tokens per completion.
    pub output_tokens: usize,
    /// Seed for words and pauses.
    pub seed: u64,
}

/// Arrival of requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// This many clients, each sending its next request when the last is done.
    Concurrency(usize),
    /// This many per second on average, regardless of answers, as a Poisson process.
    Rate(f64),
}

/// Cost of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prices {
    /// Dollars per hour for this machine.
    pub dollars_per_hour: f64,
}

impl Prices {
    /// Reads `{"dollars_per_hour": 0.5}`.
    ///
    /// # Errors
    /// [`Error::Option`] with the problem.
    pub fn parse(text: &str) -> Result<Prices, Error> {
        let expected = "an object with `dollars_per_hour`, a number above 0";
        let wrong = |found: String| Error::Option { option: "prices", expected: expected.into(), found };
        let prices: Prices = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        match prices.dollars_per_hour.is_finite() && prices.dollars_per_hour > 0.0 {
            true => Ok(prices),
            false => Err(wrong(prices.dollars_per_hour.to_string())),
        }
    }
}

/// Cost in dollars if the machine does nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Per 1,000 requests.
    pub per_1000_requests: f64,
    /// Per million generated tokens, including their prompts.
    pub per_million_generated_tokens: f64,
    /// Per million tokens, prompt and generated.
    pub per_million_tokens: f64,
}

/// The server's own metrics during a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ServerCounts {
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens from the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Decode batches.
    pub decode_passes: u64,
    /// Prefill chunks.
    pub prompt_passes: u64,
    /// Generated tokens per decode batch: the average batch size.
    pub tokens_per_decode_pass: f64,
}

/// One row of results. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct ServeRow {
    /// Arrival of requests.
    #[serde(flatten)]
    pub load: Load,
    /// Requests sent.
    pub n_requests: usize,
    /// Requests with a complete answer.
    pub n_answered: usize,
    /// Requests refused with status 429.
    pub n_refused: usize,
    /// Requests that failed otherwise.
    pub n_failed: usize,
    /// Messages of the failed requests, each with its count.
    pub failures: Vec<(String, usize)>,
    /// From the first request to the last end.
    pub seconds: f64,
    /// Answered requests per second.
    pub requests_per_second: f64,
    /// Prompt tokens of answered requests.
    pub prompt_tokens: u64,
    /// Prompt tokens of those from the server's prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens of answered requests.
    pub generated_tokens: u64,
    /// Generated tokens per second.
    pub tokens_per_second: f64,
    /// From a request to the first chunk of its answer.
    pub first_token_seconds: Percentiles,
    /// Between chunks of an answer; a chunk is one token unless the server gathers more.
    pub between_tokens_seconds: Percentiles,
    /// From a request to the end of its answer.
    pub request_seconds: Percentiles,
    /// From a request to its refusal.
    pub refused_seconds: Percentiles,
    /// The server's metrics, if available.
    pub server: Option<ServerCounts>,
    /// Cost, if prices are given.
    pub cost: Option<Cost>,
}

/// Outcome of a request.
enum RequestOutcome {
    Answered { times: Vec<f64>, seconds: f64, usage: ReportedUsage },
    Refused { seconds: f64 },
    Failed(String),
}

#[derive(Clone, Copy, Default)]
struct ReportedUsage {
    prompt_tokens: u64,
    cached_tokens: u64,
    generated_tokens: u64,
}

/// Which TLS certificates a client trusts.
#[derive(Clone, Debug, Default)]
pub enum Trust {
    /// Those of public authorities.
    #[default]
    Public,
    /// Those of the authorities in this PEM file, which may also hold the server's own certificate.
    File(PathBuf),
    /// All, whoever issued them and for whatever name.
    All,
}

impl Trust {
    fn config(&self) -> Result<TlsConfig, Error> {
        let config = TlsConfig::builder();
        Ok(match self {
            Trust::Public => config.build(),
            Trust::All => config.disable_verification(true).build(),
            Trust::File(path) => config.root_certs(RootCerts::new_with_certs(&certificates(path)?)).build(),
        })
    }
}

/// The certificates of a PEM file.
fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, Error> {
    let failed = |source| Error::Io { path: path.into(), source };
    let refused = |reason: String| failed(io::Error::new(io::ErrorKind::InvalidData, reason));
    let items = parse_pem(&std::fs::read(path).map_err(failed)?).collect::<Result<Vec<_>, _>>();
    let items = items.map_err(|error| refused(format!("{error}, expected certificates in PEM")))?;
    let certificate = |item| if let PemItem::Certificate(certificate) = item { Some(certificate) } else { None };
    let found: Vec<_> = items.into_iter().filter_map(certificate).collect();
    if found.is_empty() { Err(refused("no certificate in it, expected one in PEM".into())) } else { Ok(found) }
}

/// Status and body of an answer to `GET`.
///
/// # Errors
/// [`Error::Io`] with the URL if there is no answer, or with the file of `trust`.
pub fn get(url: &str, api_key: Option<&str>, trust: &Trust) -> Result<(u16, String), Error> {
    let config = Agent::config_builder()
        .tls_config(trust.config()?)
        .http_status_as_error(false)
        .proxy(None)
        .timeout_connect(Some(Duration::from_secs(5)))
        .timeout_per_read(Some(Duration::from_secs(30)));
    get_by(&config.build().into(), url, api_key)
}

fn get_by(agent: &Agent, url: &str, api_key: Option<&str>) -> Result<(u16, String), Error> {
    let mut request = agent.get(url);
    if let Some(key) = api_key {
        request = request.header(AUTHORIZATION, format!("Bearer {key}"));
    }
    let mut response = request.call().map_err(|error| match error {
        ureq::Error::Io(error) => failed(url, &error.to_string()),
        error => failed(url, &error.to_string()),
    })?;
    let text = response.body_mut().read_to_string().map_err(|error| failed(url, &error.to_string()))?;
    Ok((response.status().as_u16(), text))
}

/// A client of one endpoint.
pub struct Client {
    agent: Agent,
    target: Target,
    model: String,
    texts: Texts,
    /// Words per prompt.
    n_words: usize,
}

impl Client {
    /// Determines the model's name and the number of words per prompt, with two requests.
    ///
    /// # Errors
    /// [`Error::Io`] with the URL if the server does not answer as expected.
    pub fn connect(target: Target, texts: Texts) -> Result<Client, Error> {
        for (option, n) in [("prompt_tokens", texts.prompt_tokens), ("output_tokens", texts.output_tokens)] {
            if n == 0 {
                return Err(Error::Option { option, expected: "at least 1".into(), found: "0".into() });
            }
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .proxy(None)
            .max_idle_connections(MAX_CONCURRENT)
            .max_idle_connections_per_host(MAX_CONCURRENT)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_per_read(Some(SILENCE));
        let target = Target { url: target.url.trim_end_matches('/').to_owned(), ..target };
        let mut client =
            Client { agent: config.build().into(), target, model: String::new(), texts, n_words: texts.prompt_tokens };
        client.model = match client.target.model.clone() {
            Some(model) => model,
            None => client.first_model()?,
        };
        // The first answer may include loading the model; the second has the requested length.
        for _ in 0..2 {
            let found = match client.ask(usize::MAX) {
                RequestOutcome::Answered { usage, .. } => usage.prompt_tokens,
                RequestOutcome::Refused { .. } => {
                    return Err(client.failed("the server refused the first request: it is busy"));
                }
                RequestOutcome::Failed(message) => return Err(client.failed(&message)),
            };
            let n_words = (client.n_words * texts.prompt_tokens) as f64 / found.max(1) as f64;
            client.n_words = (n_words.round() as usize).max(1);
        }
        Ok(client)
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Sends requests and waits until all have ended.
    ///
    /// # Errors
    /// [`Error::Option`] for an invalid load; [`Error::Io`] if the server's metrics become unreadable.
    pub fn measure(&self, load: Load, n_requests: usize, prices: Option<Prices>) -> Result<ServeRow, Error> {
        load.check()?;
        let before = self.counts();
        let start = Instant::now();
        let outcomes = match load {
            Load::Concurrency(n) => self.send_together(n, n_requests),
            Load::Rate(rate) => self.send_at_rate(rate, n_requests),
        };
        let seconds = start.elapsed().as_secs_f64();
        let mut row = ServeRow::of(load, outcomes, seconds);
        row.server = before.map(|before| Ok::<_, Error>(self.scrape()?.since(&before))).transpose()?;
        row.cost = prices.map(|prices| row.cost(prices));
        Ok(row)
    }

    fn send_together(&self, n: usize, n_requests: usize) -> Vec<RequestOutcome> {
        let next = AtomicUsize::new(0);
        let ended = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..n.min(n_requests) {
                scope.spawn(|| {
                    while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < n_requests) {
                        add(&ended, self.ask(number));
                    }
                });
            }
        });
        ended.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn send_at_rate(&self, rate: f64, n_requests: usize) -> Vec<RequestOutcome> {
        let (start, ended) = (Instant::now(), Mutex::new(Vec::new()));
        let times = arrivals(rate, self.texts.seed).take(n_requests);
        std::thread::scope(|scope| {
            for (number, at) in times.enumerate() {
                std::thread::sleep(Duration::from_secs_f64(at).saturating_sub(start.elapsed()));
                let ended = &ended;
                // The handle is dropped: it would keep the thread's system resources until all have ended.
                let thread = std::thread::Builder::new();
                if let Err(error) = thread.spawn_scoped(scope, move || add(ended, self.ask(number))) {
                    add(ended, RequestOutcome::Failed(format!("cannot start a client thread: {error}")));
                }
            }
        });
        ended.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sends one request and reads its answer to the end.
    fn ask(&self, number: usize) -> RequestOutcome {
        let body = json!({
            "model": self.model,
            "prompt": self.prompt(number),
            "max_tokens": self.texts.output_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let start = Instant::now();
        let mut request = self.agent.post(format!("{}/completions", self.target.url));
        if let Some(key) = &self.target.api_key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let response = match request.content_type("application/json").send(body.to_string()) {
            Ok(response) => response,
            Err(error) => return RequestOutcome::Failed(error.to_string()),
        };
        let status = response.status().as_u16();
        let mut body = response.into_body();
        if status != 200 {
            let reply = body.read_to_string().unwrap_or_default();
            let seconds = start.elapsed().as_secs_f64();
            return match status {
                429 => RequestOutcome::Refused { seconds },
                _ => RequestOutcome::Failed(refusal(status, &reply)),
            };
        }
        let mut times = Vec::new();
        match read_events(BufReader::new(body.into_reader()), || times.push(start.elapsed().as_secs_f64())) {
            Ok(Some(usage)) => RequestOutcome::Answered { times, seconds: start.elapsed().as_secs_f64(), usage },
            Ok(None) => RequestOutcome::Failed("the stream ended without usage".into()),
            Err(error) => RequestOutcome::Failed(error.to_string()),
        }
    }

    /// Words of a prompt that starts unlike any other of this client.
    fn prompt(&self, number: usize) -> String {
        let seed = self.texts.seed.wrapping_add(number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let drawn = fractions(seed).skip(1).map(|fraction| WORDS[(fraction * WORDS.len() as f32) as usize]);
        drawn.take(self.n_words).collect::<Vec<_>>().join(" ")
    }

    fn get(&self, url: &str) -> Result<(u16, String), Error> {
        get_by(&self.agent, url, self.target.api_key.as_deref())
    }

    fn first_model(&self) -> Result<String, Error> {
        let url = format!("{}/models", self.target.url);
        let (status, text) = self.get(&url)?;
        let list: Json = serde_json::from_str(&text).unwrap_or_default();
        let name = list["data"][0]["id"].as_str().filter(|_| status == 200);
        name.map(str::to_owned).ok_or_else(|| failed(&url, &format!("cannot list models: {}", refusal(status, &text))))
    }

    /// The server's metrics, if it has those of this crate.
    fn counts(&self) -> Option<Measures> {
        self.scrape().ok()
    }

    fn scrape(&self) -> Result<Measures, Error> {
        let url = format!("{}/metrics", self.target.url.trim_end_matches("/v1"));
        let (status, text) = self.get(&url)?;
        match status == 200 && text.contains("tilewright_tokens") {
            true => Ok(Measures::parse(&text, &self.model)),
            false => Err(failed(&url, &format!("no metrics: status {status}"))),
        }
    }

    fn failed(&self, message: &str) -> Error {
        failed(&self.target.url, message)
    }
}

fn failed(url: &str, message: &str) -> Error {
    Error::Io { path: url.into(), source: io::Error::other(message.to_owned()) }
}

/// The message of an error response.
fn refusal(status: u16, reply: &str) -> String {
    let reply: Json = serde_json::from_str(reply).unwrap_or_default();
    let message = reply["error"]["message"].as_str().or(reply["error"].as_str()).unwrap_or("no reason given");
    format!("status {status}: {message}")
}

/// Reads an event stream to its end and calls `on_part` for each event with text. Returns the usage, if sent.
fn read_events(reader: impl BufRead, mut on_part: impl FnMut()) -> io::Result<Option<ReportedUsage>> {
    let mut usage = None;
    for line in reader.lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data:").map(str::trim).filter(|data| *data != "[DONE]") else { continue };
        let event: Json =
            serde_json::from_str(data).map_err(|error| io::Error::other(format!("bad event: {error}")))?;
        if let Some(message) = event["error"]["message"].as_str() {
            return Err(io::Error::other(format!("the stream ended with an error: {message}")));
        }
        if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            on_part();
        }
        let reply = &event["usage"];
        if let (Some(prompt_tokens), Some(generated_tokens)) =
            (reply["prompt_tokens"].as_u64(), reply["completion_tokens"].as_u64())
        {
            let cached_tokens = reply["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            usage = Some(ReportedUsage { prompt_tokens, cached_tokens, generated_tokens });
        }
    }
    Ok(usage)
}

fn add(ended: &Mutex<Vec<RequestOutcome>>, outcome: RequestOutcome) {
    ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(outcome);
}

/// Arrival times of a Poisson process, in seconds.
fn arrivals(rate: f64, seed: u64) -> impl Iterator<Item = f64> {
    let mut at = 0.0;
    fractions(seed).map(move |fraction| {
        at -= (1.0 - f64::from(fraction)).ln() / rate;
        at
    })
}

impl Load {
    /// Refuses an invalid load.
    ///
    /// # Errors
    /// [`Error::Option`] with the number out of range.
    pub fn check(&self) -> Result<(), Error> {
        let (option, expected, found) = match *self {
            Load::Concurrency(n) if !(1..=MAX_CONCURRENT).contains(&n) => {
                ("concurrency", format!("1 to {MAX_CONCURRENT}"), n.to_string())
            }
            Load::Rate(rate) if !(rate.is_finite() && rate > 0.0) => {
                ("rate", "a number above 0".into(), rate.to_string())
            }
            _ => return Ok(()),
        };
        Err(Error::Option { option, expected, found })
    }

    /// Name in tables.
    pub fn name(&self) -> String {
        match self {
            Load::Concurrency(n) => format!("{n} at once"),
            Load::Rate(rate) => format!("{rate}/s"),
        }
    }
}

impl ServeRow {
    fn of(load: Load, outcomes: Vec<RequestOutcome>, seconds: f64) -> ServeRow {
        let n_requests = outcomes.len();
        let mut sum = ReportedUsage::default();
        let mut failures: Vec<(String, usize)> = Vec::new();
        let [mut first, mut between, mut whole, mut refused] = [const { Vec::new() }; 4];
        for outcome in outcomes {
            match outcome {
                RequestOutcome::Answered { times, seconds, usage } => {
                    first.extend(times.first());
                    between.extend(times.windows(2).map(|pair| pair[1] - pair[0]));
                    whole.push(seconds);
                    sum.prompt_tokens += usage.prompt_tokens;
                    sum.cached_tokens += usage.cached_tokens;
                    sum.generated_tokens += usage.generated_tokens;
                }
                RequestOutcome::Refused { seconds } => refused.push(seconds),
                RequestOutcome::Failed(message) => match failures.iter_mut().find(|(reply, _)| *reply == message) {
                    Some((_, n)) => *n += 1,
                    None => failures.push((message, 1)),
                },
            }
        }
        let n_answered = whole.len();
        ServeRow {
            load,
            n_requests,
            n_answered,
            n_refused: refused.len(),
            n_failed: failures.iter().map(|(_, n)| n).sum(),
            failures,
            seconds,
            requests_per_second: n_answered as f64 / seconds,
            prompt_tokens: sum.prompt_tokens,
            cached_tokens: sum.cached_tokens,
            generated_tokens: sum.generated_tokens,
            tokens_per_second: sum.generated_tokens as f64 / seconds,
            first_token_seconds: Percentiles::of(first),
            between_tokens_seconds: Percentiles::of(between),
            request_seconds: Percentiles::of(whole),
            refused_seconds: Percentiles::of(refused),
            server: None,
            cost: None,
        }
    }

    fn cost(&self, prices: Prices) -> Cost {
        let dollars = prices.dollars_per_hour / 3600.0 * self.seconds;
        let each = |n: u64| dollars / n.max(1) as f64;
        Cost {
            per_1000_requests: 1e3 * each(self.n_answered as u64),
            per_million_generated_tokens: 1e6 * each(self.generated_tokens),
            per_million_tokens: 1e6 * each(self.prompt_tokens + self.generated_tokens),
        }
    }
}

/// Prometheus values of one model, keyed by name and label `kind`.
struct Measures(HashMap<(String, String), f64>);

impl Measures {
    fn parse(text: &str, model: &str) -> Measures {
        let mut found = HashMap::new();
        let of_model = format!("model=\"{model}\"");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = name.split_once('{').unwrap_or((name, ""));
            if labels.contains(&of_model) {
                let kind = labels.split_once("kind=\"").and_then(|(_, rest)| rest.split('"').next()).unwrap_or("");
                found.insert((name.to_owned(), kind.to_owned()), value);
            }
        }
        Measures(found)
    }

    fn since(&self, before: &Measures) -> ServerCounts {
        let count = |name: &str, kind: &str| {
            let at = |measures: &Measures| measures.0.get(&(name.into(), kind.into())).copied().unwrap_or(0.0);
            (at(self) - at(before)).max(0.0) as u64
        };
        let tokens = |kind| count("tilewright_tokens_total", kind);
        let decode_passes = count("tilewright_engine_decode_passes_total", "");
        let generated_tokens = tokens("generated");
        ServerCounts {
            prompt_tokens: tokens("prompt"),
            cached_tokens: tokens("cached"),
            generated_tokens,
            decode_passes,
            prompt_passes: count("tilewright_engine_prompt_passes_total", ""),
            tokens_per_decode_pass: generated_tokens as f64 / decode_passes.max(1) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_follow_a_reproducible_poisson_process() {
        let times: Vec<f64> = arrivals(4.0, 1).take(4000).collect();
        assert!(times.is_sorted() && times == arrivals(4.0, 1).take(4000).collect::<Vec<_>>());
        assert!((times[3999] / 1000.0 - 1.0).abs() < 0.05, "{}", times[3999]);
        // In a Poisson process, the pauses' standard deviation equals their mean.
        let pauses: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let square = pauses.iter().map(|pause| (pause - 0.25).powi(2)).sum::<f64>() / pauses.len() as f64;
        assert!((square.sqrt() / 0.25 - 1.0).abs() < 0.05, "{}", square.sqrt());
    }

    #[test]
    fn row_counts_answers_refusals_and_failures() {
        let usage = ReportedUsage { prompt_tokens: 10, cached_tokens: 4, generated_tokens: 3 };
        let outcomes = vec![
            RequestOutcome::Answered { times: vec![0.5, 0.6, 0.8], seconds: 1.0, usage },
            RequestOutcome::Refused { seconds: 0.01 },
            RequestOutcome::Failed("status 500: oh".into()),
            RequestOutcome::Answered { times: vec![0.7], seconds: 0.75, usage },
            RequestOutcome::Failed("status 500: oh".into()),
        ];
        let row = ServeRow::of(Load::Concurrency(2), outcomes, 2.0);
        assert_eq!([row.n_requests, row.n_answered, row.n_refused, row.n_failed], [5, 2, 1, 2]);
        assert_eq!(row.failures, [("status 500: oh".to_owned(), 2)]);
        assert_eq!([row.prompt_tokens, row.cached_tokens, row.generated_tokens], [20, 8, 6]);
        assert_eq!([row.requests_per_second, row.tokens_per_second], [1.0, 3.0]);
        assert_eq!([row.first_token_seconds.p50, row.first_token_seconds.p99], [0.5, 0.7]);
        assert!((row.between_tokens_seconds.p99 - 0.2).abs() < 1e-9 && row.request_seconds.p99 == 1.0);
        assert_eq!(row.refused_seconds.p99, 0.01);
        // Two seconds at 36 dollars an hour cost two cents.
        let cost = row.cost(Prices { dollars_per_hour: 36.0 });
        assert!((cost.per_1000_requests - 10.0).abs() < 1e-9);
        assert!((cost.per_million_generated_tokens - 0.02 / 6.0 * 1e6).abs() < 1e-6);
        assert!((cost.per_million_tokens - 0.02 / 26.0 * 1e6).abs() < 1e-6);
    }

    #[test]
    fn malformed_prices_are_refused() {
        assert_eq!(Prices::parse("{\"dollars_per_hour\": 0.5}").unwrap(), Prices { dollars_per_hour: 0.5 });
        for wrong in ["", "{}", "{\"dollars_per_hour\": 0}", "{\"dollars_per_hour\": 1, \"more\": 2}"] {
            assert_eq!(Prices::parse(wrong).unwrap_err().code(), "option", "{wrong}");
        }
    }

    #[test]
    fn event_stream_is_read_up_to_its_usage() {
        let stream = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\n\n: alive\n\ndata: {\"choices\":[{\"text\":\"\"}]}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
        let mut n_parts = 0;
        let usage = read_events(stream.as_bytes(), || n_parts += 1).unwrap().unwrap();
        assert_eq!((n_parts, usage.prompt_tokens, usage.generated_tokens), (1, 5, 2));
        assert!(read_events(&b"data: {\"choices\":[]}\n"[..], || ()).unwrap().is_none());
        let broken = read_events(&b"data: {\"error\":{\"message\":\"lost\"}}\n"[..], || ());
        assert!(broken.is_err_and(|error| error.to_string().contains("lost")));
    }
}
