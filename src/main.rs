//! The command line, a thin layer over the library's public API.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
