//! `tilewright serve` in a build without the server.

use clap::Args;
use tilewright::Error;

use super::CommandFailure;

/// Serve models over HTTP; needs a build with `--features serve`.
#[derive(Args)]
pub struct ServeArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _rest: Vec<String>,
}

pub fn serve() -> Result<(), CommandFailure> {
    let source = std::io::Error::other(
        "this build has no server; install one with `cargo install --path crates/cli --features serve`",
    );
    Err(Error::Io { path: "serve".into(), source }.into())
}
