//! `tilewright bench serve`: a server under load, by number of clients and by request rate.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright::Error;
use tilewright::bench::Percentiles;
use tilewright::engine::EngineOptions;
use tilewright_serve::bench::{Client, Load, Prices, ServeRow, Target, Texts};
use tilewright_serve::{Limits, Server, ServerOptions};
use tokio::sync::oneshot;

use crate::run::ModelArgs;
use crate::serve::ModelLoader;
use crate::{CommandFailure, print_json, read_text};

const EXAMPLES: &str = "\
Examples:
  tilewright bench serve model.gguf --concurrency 1,8,32,128
  tilewright bench serve model.gguf --rate 1,2,5 --requests 100 --prices prices.json
  tilewright bench serve --url http://127.0.0.1:8080/v1 --model qwen --concurrency 8 --json

prices.json: {\"dollars_per_hour\": 0.5}";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeBenchArgs {
    /// Model to serve in this process, as for `run` [default: the built-in model].
    #[arg(conflicts_with = "url")]
    model: Option<String>,
    /// Address of a running server, such as http://127.0.0.1:8080/v1.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Model to request from the server [default: the first it lists].
    #[arg(long = "model", value_name = "NAME", requires = "url", id = "name")]
    name: Option<String>,
    /// API key of the server.
    #[arg(long, env = "TILEWRIGHT_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Numbers of concurrent clients, each waiting for its answer [default: 1,8,32,128 without --rate].
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    concurrency: Vec<usize>,
    /// Requests per second, sent at random times whether or not earlier ones are answered.
    #[arg(long, value_delimiter = ',', value_name = "R,..")]
    rate: Vec<f64>,
    /// Requests for each value of --concurrency or --rate [default: 4 per client, at least 32].
    #[arg(long, short = 'r', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    requests: Option<u32>,
    /// Approximate prompt length, in tokens.
    #[arg(long, short = 'p', default_value_t = 128, value_name = "N")]
    n_prompt: usize,
    /// Maximum number of tokens per answer.
    #[arg(long, short = 'n', default_value_t = 64, value_name = "N")]
    n_gen: usize,
    /// Seed of prompts and request times.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// JSON file with the price of this machine, to compute the cost of requests and tokens.
    #[arg(long, value_name = "FILE")]
    prices: Option<PathBuf>,
    /// Maximum batch size of the server in this process [default: the number of clients, at most 64].
    #[arg(long, value_name = "N", conflicts_with = "url")]
    parallel: Option<u32>,
    /// Maximum requests waiting for the model; more are refused [default: the number of clients].
    #[arg(long, value_name = "N", conflicts_with = "url")]
    queue: Option<usize>,
    #[command(flatten)]
    server: ModelArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn bench(args: ServeBenchArgs) -> Result<(), CommandFailure> {
    let prices = match &args.prices {
        Some(path) => {
            let text = read_text(path)?;
            Some(Prices::parse(&text)?)
        }
        None => None,
    };
    let usual = if args.concurrency.is_empty() && args.rate.is_empty() { &[1, 8, 32, 128][..] } else { &[] };
    let together = args.concurrency.iter().chain(usual).map(|&n| Load::Concurrency(n));
    let loads: Vec<Load> = together.chain(args.rate.iter().map(|&rate| Load::Rate(rate))).collect();
    loads.iter().try_for_each(Load::check)?;
    let most = args.concurrency.iter().chain(usual).max().copied().unwrap_or(32);
    let texts = Texts { prompt_tokens: args.n_prompt, output_tokens: args.n_gen, seed: args.seed };
    let own = match &args.url {
        Some(_) => None,
        None => Some(OwnServer::start(args.model.as_deref(), most, args.parallel, args.queue, args.server)?),
    };
    let url = match (&own, args.url) {
        (Some(own), _) => format!("http://{}/v1", own.address),
        (None, url) => url.unwrap_or_default(),
    };
    let client = Client::connect(Target { url: url.clone(), model: args.name, api_key: args.api_key }, texts)?;
    let mut out = io::stdout().lock();
    if !args.json {
        let answers = format!("answers of up to {}", texts.output_tokens);
        writeln!(out, "{} at {url}, prompts of about {} tokens, {answers}", client.model(), texts.prompt_tokens)?;
        print_header(&mut out)?;
    }
    let mut rows = Vec::new();
    for load in loads {
        let n_requests = match (args.requests, load) {
            (Some(n), _) => n as usize,
            (None, Load::Concurrency(n)) => (4 * n).max(32),
            (None, Load::Rate(_)) => 32,
        };
        let row = client.measure(load, n_requests, prices)?;
        if !args.json {
            print_row(&mut out, &row)?;
        }
        rows.push(row);
    }
    if args.json {
        return print_json(&json!({
            "bench": "serve",
            "model": client.model(),
            "url": if own.is_some() { None } else { Some(&url) },
            "device": own.as_ref().map(|own| &own.device),
            "parallel": own.as_ref().map(|own| own.engine.max_sequences),
            "queue": own.as_ref().map(|own| own.engine.max_queued),
            "texts": texts,
            "prices": prices,
            "rows": rows,
        }));
    }
    print_more(&mut out, &rows)?;
    Ok(out.flush()?)
}

/// A server in a thread of this process; dropping it ends the server.
struct OwnServer {
    address: SocketAddr,
    device: serde_json::Value,
    engine: EngineOptions,
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl OwnServer {
    fn start(
        model: Option<&str>,
        n_clients: usize,
        parallel: Option<u32>,
        queue: Option<usize>,
        args: ModelArgs,
    ) -> Result<OwnServer, Error> {
        let together = n_clients.clamp(1, EngineOptions::MAX_SEQUENCES as usize) as u32;
        let engine = EngineOptions {
            max_sequences: parallel.unwrap_or(together),
            max_queued: queue.unwrap_or(n_clients),
            ..EngineOptions::default()
        };
        engine.check()?;
        let loader = ModelLoader::new(args, engine.clone(), None)?;
        let spec = loader.spec(model)?;
        let limits = Limits { connections: 2 * tilewright_serve::bench::MAX_CONCURRENT, ..Limits::default() };
        let report: tilewright_serve::LogSink = std::sync::Arc::new(|line: &str| say!("error: {line}"));
        let options = ServerOptions { limits, report: Some(report), ..ServerOptions::default() };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|source| Error::Io { path: "threads".into(), source })?;
        let server = Server::bind(SocketAddr::from(([127, 0, 0, 1], 0)), vec![spec], options)?;
        server.load()?;
        let device = json!(loader.device()?.info());
        let address = server.address();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            if let Err(error) = runtime.block_on(server.run(async { drop(ended.await) })) {
                say!("error: {error}");
            }
            runtime.shutdown_background();
        });
        Ok(OwnServer { address, device, engine, end: Some(end), thread: Some(thread) })
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn print_header(out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<12} {:>8} {:>7} {:>6} {:>10} {:>10} {:>26} {:>26} {:>26}\n{:<58} {:>26} {:>26} {:>26}",
        "load",
        "answered",
        "refused",
        "failed",
        "requests/s",
        "tokens/s",
        "first token ms",
        "between tokens ms",
        "request ms",
        "",
        "p50 / p95 / p99",
        "p50 / p95 / p99",
        "p50 / p95 / p99",
    )
}

fn ms(times: &Percentiles) -> String {
    let [p50, p95, p99] = [times.p50, times.p95, times.p99].map(|seconds| seconds * 1e3);
    format!("{p50:.1} / {p95:.1} / {p99:.1}")
}

fn print_row(out: &mut impl Write, row: &ServeRow) -> io::Result<()> {
    writeln!(
        out,
        "{:<12} {:>8} {:>7} {:>6} {:>10.2} {:>10.1} {:>26} {:>26} {:>26}",
        row.load.name(),
        row.n_answered,
        row.n_refused,
        row.n_failed,
        row.requests_per_second,
        row.tokens_per_second,
        ms(&row.first_token_seconds),
        ms(&row.between_tokens_seconds),
        ms(&row.request_seconds),
    )?;
    // Show the row before the next load, which may take long.
    out.flush()
}

fn print_more(out: &mut impl Write, rows: &[ServeRow]) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<12} {:>13} {:>13} {:>13} {:>13} {:>16}",
        "load", "prompt tokens", "cached", "generated", "tokens/pass", "refused p99 ms"
    )?;
    for row in rows {
        let batch = row.server.map_or("-".into(), |server| format!("{:.2}", server.tokens_per_decode_pass));
        let refused = match row.n_refused {
            0 => "-".into(),
            _ => format!("{:.1}", row.refused_seconds.p99 * 1e3),
        };
        let (name, known) = (row.load.name(), row.cached_tokens);
        let [prompt, generated] = [row.prompt_tokens, row.generated_tokens];
        writeln!(out, "{name:<12} {prompt:>13} {known:>13} {generated:>13} {batch:>13} {refused:>16}")?;
        for (message, n) in &row.failures {
            writeln!(out, "    {n} failed: {message}")?;
        }
    }
    let costs = || rows.iter().filter_map(|row| Some((row.load.name(), row.cost?)));
    if costs().next().is_some() {
        writeln!(
            out,
            "\n{:<12} {:>18} {:>28} {:>18}",
            "load", "$/1,000 requests", "$/million generated tokens", "$/million tokens"
        )?;
    }
    for (name, cost) in costs() {
        writeln!(
            out,
            "{name:<12} {:>18.6} {:>28.6} {:>18.6}",
            cost.per_1000_requests, cost.per_million_generated_tokens, cost.per_million_tokens
        )?;
    }
    Ok(())
}
