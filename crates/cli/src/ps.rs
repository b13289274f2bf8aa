//! `tilewright ps`: the models that a running server has loaded.

use std::io::{self, Write};
use std::path::Path;

use clap::Args;
use serde_json::Value;
use tilewright::Error;
use tilewright_serve::bench::get;

use super::{CommandFailure, print_json, show_bytes};

/// List the models that a running server has loaded.
///
/// Works with `tilewright serve` and with other servers that have Ollama's API.
#[derive(Args)]
pub struct PsArgs {
    /// Server: a name or IP address, or a URL such as https://example.org.
    #[arg(long, default_value = "127.0.0.1", env = "TILEWRIGHT_HOST", value_name = "HOST")]
    host: String,
    /// Its port; a URL may name it instead.
    #[arg(long, default_value = "8080", env = "TILEWRIGHT_PORT", value_name = "PORT")]
    port: u16,
    /// API key of the server.
    #[arg(long, env = "TILEWRIGHT_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Print the server's JSON.
    #[arg(long)]
    json: bool,
    /// Print the server's health, and fail unless it is ready: for container health checks. Needs no key.
    #[arg(long)]
    health: bool,
}

pub fn ps(args: &PsArgs) -> Result<(), CommandFailure> {
    let path = if args.health { "/health" } else { "/api/ps" };
    let url = format!("{}{path}", base(&args.host, args.port));
    let (status, body) = get(&url, args.api_key.as_deref()).map_err(|error| match error {
        Error::Io { path, source } => {
            let hint = "is `tilewright serve` running there? --host and --port name the server";
            Error::Io { path, source: io::Error::other(format!("{source}; {hint}")) }
        }
        other => other,
    })?;
    let failed = |message: String| Error::Io { path: Path::new(&url).into(), source: io::Error::other(message) };
    let parsed: Option<Value> = serde_json::from_str(&body).ok();
    if args.health {
        let Some(health) = parsed.filter(|_| status == 200) else {
            return Err(failed(format!("status {status}, expected 200: {}", body.trim())).into());
        };
        return print_json(&health);
    }
    let models = parsed.as_ref().and_then(|body| body.get("models")?.as_array());
    let (Some(models), 200) = (models, status) else {
        let key = if status == 401 { "; --api-key or TILEWRIGHT_API_KEY gives the key" } else { "" };
        return Err(failed(format!("status {status}, expected a list of models{key}")).into());
    };
    if args.json {
        return print_json(&parsed.unwrap_or_default());
    }
    if models.is_empty() {
        say!("no model is loaded at {url}");
        return Ok(());
    }
    let rows: Vec<[String; 4]> = models.iter().map(row).collect();
    let head = ["NAME", "SIZE", "CONTEXT", "UNTIL"].map(str::to_owned);
    let width = |at: usize| rows.iter().chain([&head]).map(|row| row[at].chars().count()).max().unwrap_or_default();
    let [name, size, context] = [0, 1, 2].map(width);
    let mut out = io::stdout().lock();
    for row in [&head].into_iter().chain(&rows) {
        let line = format!("{:<name$}  {:>size$}  {:>context$}  {}", row[0], row[1], row[2], row[3]);
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(out.flush()?)
}

fn base(host: &str, port: u16) -> String {
    match host {
        // What a server listens on; a client needs an address.
        "0.0.0.0" => format!("http://127.0.0.1:{port}"),
        "::" => format!("http://[::1]:{port}"),
        url if url.contains("://") => url.trim_end_matches('/').to_owned(),
        address if address.contains(':') && !address.starts_with('[') => format!("http://[{address}]:{port}"),
        name => format!("http://{name}:{port}"),
    }
}

/// Name, size, context length and time of unloading; empty where the server does not say.
fn row(model: &Value) -> [String; 4] {
    let text = |key: &str| model.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let number = |key: &str| model.get(key).and_then(Value::as_u64);
    let size = number("size").map_or(String::new(), show_bytes);
    let context = number("context_length").map_or(String::new(), |n| n.to_string());
    [text("name"), size, context, text("expires_at")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_a_host_an_address_or_a_url() {
        for (host, want) in [
            ("127.0.0.1", "http://127.0.0.1:8080"),
            ("0.0.0.0", "http://127.0.0.1:8080"),
            ("::", "http://[::1]:8080"),
            ("2001:db8::1", "http://[2001:db8::1]:8080"),
            ("gpu-box", "http://gpu-box:8080"),
            ("https://example.org:8443/", "https://example.org:8443"),
        ] {
            assert_eq!(base(host, 8080), want, "{host}");
        }
    }
}
