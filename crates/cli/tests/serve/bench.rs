//! `bench serve` against test servers: its counts equal the server's.

use serde_json::Value as Json;
use tilewright_serve::bench::{Client, Load, Prices, Target, Texts};

use super::client::get;
use super::program::command_of;
use super::server::{own, shared};

const TEXTS: Texts = Texts { prompt_tokens: 24, output_tokens: 6, seed: 3 };

fn target(address: std::net::SocketAddr) -> Target {
    Target { url: format!("http://{address}/v1/"), model: None, api_key: None }
}

/// Value of a metric in the server's text format.
fn measured(address: std::net::SocketAddr, name: &str) -> u64 {
    let text = get(address, "/metrics").text();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
fn bench_client_counts_match_the_server_metrics() {
    let server = own(|engine, _| engine.max_sequences = 4);
    let client = Client::connect(target(server.address), TEXTS).unwrap();
    assert_eq!(client.model(), "story");
    let generated = "tilewright_tokens_total{model=\"story\",kind=\"generated\"}";
    let submitted = "tilewright_engine_submitted_total{model=\"story\"}";
    let mut before = [generated, submitted].map(|name| measured(server.address, name));
    for load in [Load::Concurrency(1), Load::Concurrency(4), Load::Rate(200.0)] {
        let row = client.measure(load, 12, Some(Prices { dollars_per_hour: 1.0 })).unwrap();
        assert_eq!([row.n_requests, row.n_answered, row.n_refused, row.n_failed], [12, 12, 0, 0], "{row:?}");
        let now = [generated, submitted].map(|name| measured(server.address, name));
        assert_eq!([row.generated_tokens, 12], [now[0] - before[0], now[1] - before[1]], "{row:?}");
        let counts = row.server.unwrap();
        assert_eq!(
            [counts.generated_tokens, counts.prompt_tokens, counts.cached_tokens],
            [row.generated_tokens, row.prompt_tokens, row.cached_tokens]
        );
        // Prompts have about the requested length and distinct beginnings.
        assert!((18..=30).contains(&(row.prompt_tokens / 12)), "{row:?}");
        assert!(row.cached_tokens < row.prompt_tokens / 2, "{row:?}");
        assert!(row.first_token_seconds.p50 <= row.request_seconds.p50 && row.cost.unwrap().per_1000_requests > 0.0);
        before = now;
    }
}

#[test]
fn refused_and_failed_requests_are_counted_separately() {
    let server = own(|engine, _| (engine.max_sequences, engine.max_queued) = (1, 0));
    let client = Client::connect(target(server.address), Texts { output_tokens: 64, ..TEXTS }).unwrap();
    let row = client.measure(Load::Concurrency(8), 24, None).unwrap();
    assert_eq!(row.n_answered + row.n_refused, 24, "{row:?}");
    assert!(row.n_refused > 0 && row.refused_seconds.p99 > 0.0, "{row:?}");
    let refused = measured(server.address, "tilewright_engine_refused_total{model=\"story\"}");
    assert_eq!(row.n_refused as u64, refused);

    let no_model = Target { model: Some("none".into()), ..target(shared()) };
    let error = Client::connect(no_model, TEXTS).err().unwrap().to_string();
    assert!(error.contains("404") && error.contains("none"), "{error}");
    let nobody = Target { url: "http://127.0.0.1:9/v1".into(), ..target(shared()) };
    assert_eq!(Client::connect(nobody, TEXTS).err().unwrap().code(), "io");
    for load in [Load::Concurrency(0), Load::Rate(0.0), Load::Rate(f64::NAN)] {
        assert_eq!(client.measure(load, 1, None).unwrap_err().code(), "option");
    }
}

#[test]
fn bench_serve_measures_a_server_it_starts() {
    let args =
        ["bench", "serve", "--concurrency", "1,3", "--rate", "100", "--requests", "6", "-p", "16", "-n", "4", "--json"];
    let output = command_of(&args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((told["bench"].as_str(), told["model"].as_str()), (Some("serve"), Some("stories")));
    let rows = told["rows"].as_array().unwrap();
    assert_eq!(
        [&rows[0]["concurrency"], &rows[1]["concurrency"], &rows[2]["rate"]].map(|n| n.as_f64()),
        [1.0, 3.0, 100.0].map(Some)
    );
    assert!(
        rows.iter().all(|row| row["n_answered"] == 6 && row["server"]["decode_passes"].as_u64() > Some(0)),
        "{told}"
    );
    let wrong: [(&[&str], &str); 3] = [
        (&["bench", "serve", "--rate", "0"], "rate"),
        (&["bench", "serve", "--parallel", "0"], "--parallel is 0"),
        (&["bench", "serve", "--prices", "none.json"], "none.json"),
    ];
    for (args, says) in wrong {
        let output = command_of(args).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains(says), "{args:?}: {message}");
    }
}
