//! `tilewright ps`: the models that a running server has loaded.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::BoolishValueParser;
use serde_json::Value;
use tilewright::Error;
use tilewright_serve::bench::{Trust, get};

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
    /// Certificates of the authorities to trust, in PEM, or the server's own; implies https.
    #[arg(long, env = "TILEWRIGHT_CACERT", value_name = "FILE", conflicts_with = "insecure")]
    cacert: Option<PathBuf>,
    /// Accept any TLS certificate; implies https. For a server on this machine.
    #[arg(long, short = 'k', env = "TILEWRIGHT_INSECURE", value_parser = BoolishValueParser::new())]
    insecure: bool,
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
    let trust = match (&args.cacert, args.insecure) {
        (Some(file), _) => Trust::File(file.clone()),
        (None, true) => Trust::All,
        (None, false) => Trust::Public,
    };
    let scheme = if matches!(trust, Trust::Public) { "http" } else { "https" };
    let url = format!("{}{path}", base(scheme, &args.host, args.port));
    let (status, body) = get(&url, args.api_key.as_deref(), &trust).map_err(|error| with_hint(error, &url))?;
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

/// An error of the connection, with what may be the cause.
fn with_hint(error: Error, url: &str) -> Error {
    let (path, reason) = match error {
        Error::Io { path, source } if path.as_os_str() == url => (path, source.to_string()),
        other => return other,
    };
    let hint = match reason.contains("certificate") {
        true => "--cacert FILE names the authority's certificate, -k accepts any",
        false => "is `tilewright serve` running there? --host and --port name the server, -k or --cacert one with TLS",
    };
    Error::Io { path, source: io::Error::other(format!("{reason}; {hint}")) }
}

/// The address of a server; that of a URL is its own.
fn base(scheme: &str, host: &str, port: u16) -> String {
    match host {
        // What a server listens on; a client needs an address.
        "0.0.0.0" => format!("{scheme}://127.0.0.1:{port}"),
        "::" => format!("{scheme}://[::1]:{port}"),
        url if url.contains("://") => url.trim_end_matches('/').to_owned(),
        named if named.matches(':').count() == 1 && !named.ends_with(':') => format!("{scheme}://{named}"),
        address if address.contains(':') && !address.starts_with('[') => format!("{scheme}://[{address}]:{port}"),
        name => format!("{scheme}://{name}:{port}"),
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
            ("gpu-box:9000", "http://gpu-box:9000"),
            ("https://example.org:8443/", "https://example.org:8443"),
        ] {
            assert_eq!(base("http", host, 8080), want, "{host}");
            let with_tls = if host.contains("://") { want.to_owned() } else { want.replace("http://", "https://") };
            assert_eq!(base("https", host, 8080), with_tls, "{host}");
        }
    }
}
